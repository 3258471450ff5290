"""A policy made ready to learn: what of it learns, what it computes in, what it keeps for the gradient, and how it lies
on the ranks.

In: a policy with its weights, the same on every rank. Out: the same module, changed in place: low-rank adapters beside
frozen weights, checkpointed blocks, parameters in slices over the ranks (FSDP2); and its weights again as those who act
take them over. A small policy on float32 that learns as a whole stays as it was made. Blocking code; every rank calls
the same functions in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from rlinf.data.rng import mix
from rlinf.data.weights import Export
from rlinf.models.policy.base import Policy
from rlinf.models.policy.published import matches

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""What a policy may compute in."""
Sharding = Literal["auto", "shard", "replicate"]
"""Whether a policy that learns lies in slices over the trainer's ranks (FSDP2), or whole on each of them; "auto" slices
one that has blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """How a policy is made ready to learn."""

    dtype: str = "float32"
    """What it computes in, "float32" or "bfloat16"; what learns is kept in float32 whatever this is."""
    train: tuple[str, ...] | None = None
    """Patterns of the parameters that learn, of which the last that fits decides; "!" before one excludes. None: as the
    policy's class says, and with adapters only what is the policy's own, such as its critic."""
    lora: Mapping[str, Any] | None = None
    """Low-rank adapters, which learn: `r`, `alpha` and `target_modules`, see `lora.add_adapters`; "auto" stands for the
    class's `lora_targets`. None for none."""
    gradient_checkpointing: bool = False
    """Blocks keep their input alone, and compute the rest again for the gradient."""
    sharding: Sharding = "auto"
    """How it lies on the ranks."""
    seed: int = 0
    """Of new adapters."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"policy: dtype={self.dtype!r} is none of {', '.join(DTYPES)}")
        if self.sharding not in ("auto", "shard", "replicate"):
            raise ValueError(f"policy: sharding={self.sharding!r} is none of auto, shard, replicate")

    @property
    def computes_in(self) -> torch.dtype:
        """`dtype` as torch has it."""
        return DTYPES[self.dtype]

    def patterns(self, policy: Policy) -> tuple[str, ...]:
        """`train`, or what stands for it."""
        if self.train is not None:
            return tuple(self.train)
        return policy.own if self.lora else policy.trains

    def kept_in(self, policy: Policy, name: str) -> torch.dtype:
        """The dtype of a parameter: of those that stay as they are, small steps need not be kept."""
        learning = ".lora_" in name or learns(plain(name), self.patterns(policy))
        return torch.float32 if learning else policy.kept_in(plain(name), self.computes_in)

    def slices(self, policy: Policy, ranks: int) -> bool:
        """Whether the policy is spread by FSDP2: over the ranks, or, for its casts alone, on a single one.

        Raises:
            ValueError: it must compute in bfloat16 and lie whole on several ranks.
        """
        mixed = self.computes_in != torch.float32
        if self.sharding == "replicate":
            if mixed and ranks > 1:
                raise ValueError("policy: sharding=replicate does not go with dtype=bfloat16 on several ranks")
            return mixed
        return mixed or (ranks > 1 and (self.sharding == "shard" or bool(policy.blocks())))


def learns(name: str, patterns: Sequence[str]) -> bool:
    """Whether a parameter of this name learns: the last pattern that fits decides, and "!" before it excludes."""
    found = False
    for pattern in patterns:
        if matches(name, [pattern.removeprefix("!")]):
            found = not pattern.startswith("!")
    return found


def choose(policy: Policy, how: Preparation) -> None:
    """Add the adapters, and have only what learns require gradients.

    Args:
        policy: whole; it may be on the meta device.
        how: as it was configured.

    Raises:
        ValueError: a pattern or a target fits nothing, or nothing is left that learns.
    """
    patterns = how.patterns(policy)
    names = [name for name, _ in policy.named_parameters()]
    for pattern in how.train or ():
        if not any(matches(name, [pattern.removeprefix("!")]) for name in names):
            raise ValueError(
                f"policy: train={pattern!r} fits no parameter; there are {', '.join(names[:3])}"
                + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            )
    if how.lora:
        _add_adapters(policy, how.lora)
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(".lora_" in name or learns(plain(name), patterns))
    if not any(parameter.requires_grad for parameter in policy.parameters()):
        raise ValueError(f"policy: train={list(patterns)} leaves nothing that learns")


def prepare(policy: Policy, how: Preparation, slices: DeviceMesh | None) -> None:
    """Make a policy ready to learn.

    Args:
        policy: whole, on its device; changed in place.
        how: as it was configured.
        slices: the ranks over which it is spread, where `how.slices`; None leaves it whole.

    Raises:
        ValueError: see `choose`; or it has no blocks to checkpoint.
    """
    choose(policy, how)
    if how.lora:
        _start_adapters(policy, how)
    policy.keep(how.kept_in)
    blocks = policy.blocks()
    if how.gradient_checkpointing:
        if not blocks:
            raise ValueError("policy: gradient_checkpointing=true needs a policy with blocks, which this one has not")
        from rlinf.models.language.kernels.blocks import checkpoint_blocks  # imports transformers

        checkpoint_blocks(blocks)
    if slices is not None:
        _spread(policy, blocks, slices, how.computes_in)


def _spread(policy: Policy, blocks: Sequence[nn.Module], mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Spread a policy over ranks, block by block. What stays in float32 while the rest computes in another dtype is
    small, and stays whole on every rank: `minimize` sums its gradients."""
    from rlinf.models.language.fsdp import sum_gradients

    whole: set[nn.Parameter] = set()
    precision = MixedPrecisionPolicy()
    if dtype != torch.float32:
        named = policy.named_parameters()
        whole = {each for name, each in named if policy.kept_in(plain(name), dtype) != dtype}
        # policies cast what they look at themselves, and actions must not be
        precision = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision, ignored_params=whole)
    fully_shard(policy, mesh=mesh, mp_policy=precision, ignored_params=whole)
    register_fsdp_forward_method(policy, "imitate")
    sum_gradients(policy)


def _add_adapters(policy: Policy, lora: Mapping[str, Any]) -> None:
    from rlinf.models.language.lora import add_adapters, lora_targets

    if lora.get("path") is None and "target_modules" in lora:
        wanted = lora["target_modules"]
        if wanted in ("auto", ["auto"]) and policy.lora_targets:
            wanted = policy.lora_targets
        inner = [name for name in lora_targets(policy, wanted) if not matches(f"{name}.weight", policy.own)]
        lora = {**lora, "target_modules": inner}
    add_adapters(policy, lora)


@torch.no_grad()
def _start_adapters(policy: Policy, how: Preparation) -> None:
    from rlinf.models.language.lora import POLICY, adapter_values

    assert how.lora is not None
    saved = {POLICY: how.lora["path"]} if how.lora.get("path") else {}
    for parameter, value in adapter_values(policy, mix(how.seed, 1), saved):
        parameter.copy_(value)


# The weights for everybody else ---------------------------------------------------------------------------------------


def origin_of(policy: Mapping[str, Any], path: str | None) -> str:
    """`Weights.origin` of a policy as it is made.

    Args:
        policy: its configuration.
        path: directory that it is read from; None for none.
    """
    return f"{json.dumps(policy, sort_keys=True, default=str)}, path {path}"


def plain(name: str) -> str:
    """The name that a parameter has in the policy without adapters."""
    return name.replace(".base_layer", "")


def exported(policy: Policy, dtype: torch.dtype | None, *, changing: bool = False) -> Iterator[tuple[str, Export]]:
    """Parameters and saved buffers under the names of the plain policy, with adapters added in; to be made and gathered
    one after the other, on all ranks together.

    Args:
        policy: prepared.
        dtype: of its parameters, but for those that stay in float32; None: as they are.
        changing: leave out the parameters that nothing changes.
    """
    touched = {plain(name) for name, each in policy.named_parameters() if each.requires_grad}
    layers = {name.partition(".lora_")[0] for name in touched if ".lora_" in name}
    for name, parameter, make in _parameters(policy):
        if changing and name not in touched and name.rpartition(".")[0] not in layers:
            continue
        kept = parameter.dtype if dtype is None else policy.kept_in(name, dtype)
        yield name, Export(tuple(parameter.shape), kept, make)
    of_parameters = {name for name, _ in policy.named_parameters()}
    for name, buffer in policy.weights().items():
        if name not in of_parameters:
            yield plain(name), Export(tuple(buffer.shape), buffer.dtype, buffer.detach)


def _parameters(policy: Policy) -> Iterator[tuple[str, nn.Parameter, Callable[[], Tensor]]]:
    """Names, parameters, and what makes those with their adapters."""
    if any(".lora_" in name for name, _ in policy.named_parameters()):
        from rlinf.models.language.lora import plain_parameters  # imports transformers

        yield from plain_parameters(policy)
    else:
        yield from ((name, parameter, parameter.detach) for name, parameter in policy.named_parameters())
