"""The memory that the roles of a policy take which acts: weights, and what training keeps beside them.

In: a policy on the meta device, and how it is made ready to learn. Out: a `Footprint` per role, and what does not fit.
Activations are left out, since what a policy keeps of a row is its own affair: what is refused here cannot fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.loading import Problem
from rlinf.job.checks.footprint import GB, Footprint
from rlinf.models.policy.base import Policy
from rlinf.placement.seats import Placed
from rlinf.training.embodied.preparing import Preparation, choose, plain

_STATE = 3
"""Numbers of float32 beside each that learns: its gradient, and AdamW's two running means."""


def control_footprints(
    policy: Policy, how: Preparation | None = None, *, ranks: int = 1, targets: bool = False
) -> dict[str, Footprint]:
    """What a process of each role takes that has a policy of its own.

    Args:
        policy: any with the right shapes; on the meta device it costs nothing. With adapters it is changed.
        how: it is made ready to learn; None: as it is, in float32.
        ranks: of the trainer.
        targets: the trainer keeps a second copy of the critics (soft actor-critic).

    Raises:
        ValueError: it cannot be made ready so.
    """
    how = Preparation() if how is None else how
    dtype = how.computes_in
    buffers = float(sum(buffer.numel() * buffer.element_size() for buffer in policy.buffers()))
    named = list(policy.named_parameters())
    acting = sum(each.numel() * policy.kept_in(name, dtype).itemsize for name, each in named)
    copied = 4.0 * sum(parameter.numel() for parameter in policy.of_critic()) if targets else 0.0
    slices = ranks if how.slices(policy, ranks) else 1
    blocks = policy.blocks()
    choose(policy, how)
    weights = learned = 0.0
    for name, parameter in policy.named_parameters():
        whole = dtype != how.kept_in(policy, name) and policy.kept_in(plain(name), dtype) != dtype
        share = parameter.numel() / (1 if whole else slices)
        weights += share * how.kept_in(policy, name).itemsize
        learned += share * 4.0 if parameter.requires_grad else 0.0
    gathered = 0.0
    if slices > 1:
        inside = [sum(each.numel() for each in block.parameters()) for block in blocks]
        outside = sum(each.numel() for each in policy.parameters()) - sum(inside)
        gathered = float(dtype.itemsize * (outside + 2 * max(inside, default=0)))  # a block, and the one that comes
    trainer = Footprint(
        weights=weights + buffers + copied, gradients=learned, optimizer=(_STATE - 1) * learned, gathered=gathered
    )
    return {"policy": Footprint(weights=acting + buffers), "trainer": trainer}


def unfit(config: EmbodiedConfig, placed: Placed, footprints: Mapping[str, Footprint]) -> Iterator[Problem]:
    """What does not fit into a device's memory, even if the roles take turns on it.

    Args:
        config: of the run.
        placed: where the roles are, and how much memory each device has.
        footprints: of the roles.
    """
    for role, footprint in footprints.items():
        memory = placed.room(role)
        if memory is None or footprint.active_bytes <= memory:
            continue
        advice = (
            f"{role} takes at least {footprint.active_bytes / GB:,.1f} GB of a device of {memory / GB:,.1f} GB: "
            + ", or ".join(_cures(config, role))
        )
        yield Problem(
            "configuration", "policy.path" if config.policy.path else "policy.settings", _named(config), advice
        )


def _named(config: EmbodiedConfig) -> str:
    return config.policy.path or str(config.policy.type or "mlp")


def _cures(config: EmbodiedConfig, role: str) -> Iterator[str]:
    policy = config.policy
    if policy.dtype == "float32":
        yield "policy.dtype=bfloat16"
    if role == "trainer":
        if policy.sharding == "replicate":
            yield "policy.sharding=shard"
        yield "name more hosts in placement.trainer, which share its state"
        if not policy.lora.on:
            yield "train adapters only (policy.lora.r=32) or less of it (policy.train)"
    else:
        yield "take devices with more memory"
