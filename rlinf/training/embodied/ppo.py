"""Learning a policy that acts from minibatches of decisions: clipped policy losses, a critic's loss, AdamW's steps.

Every rank has the whole policy, or slices of it, and computes on its share of a minibatch; `training/optimizer.py` adds
the gradients up, and the sums of all ranks come back as metrics. Blocking code, no actor.

`Preparation` makes a policy ready to learn, in place: which parameters learn, low-rank adapters beside frozen weights,
the dtype to compute in, checkpointed blocks, and parameters in slices over the ranks (FSDP2); and it gives the weights
back as those who act take them over. Every rank has the same weights before, and calls the same functions in the same
order. A small policy on float32 that learns as a whole stays as it was made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from rlinf.algos.algorithms import AlgorithmSpec, loss_of, value_loss_of
from rlinf.algos.loss_sum import LossSum, Mask, MicroBatch
from rlinf.algos.losses import coefficients
from rlinf.data.rng import mix
from rlinf.data.weights import Export
from rlinf.models.policy.base import Policy
from rlinf.models.policy.published import matches
from rlinf.training.embodied.trajectories import TrajectoryBatch
from rlinf.training.optimizer import Schedule, adamw_of_parts, lr_factor, minimize


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """Settings of the optimizer of a policy."""

    lr: float = 3e-4
    """Learning rate."""
    critic_lr: float | None = None
    """Learning rate of the parameters that only values need; None: `lr`."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    grad_clip: float = 0.5
    """A gradient with a larger global norm is scaled down to it."""
    value_coef: float = 0.5
    """Weight of the critic's loss beside the policy's."""
    schedule: Schedule = "constant"
    """How learning rates fall after the warm-up, until step `total_steps`."""
    warmup_steps: int = 0
    """Steps, each with all its epochs, over which learning rates rise linearly."""
    min_lr_ratio: float = 0.0
    """Share of the learning rates that is left at the end of a linear or cosine schedule."""
    entropy_schedule: Schedule = "constant"
    """How the weight of the entropy falls, to 0 in step `total_steps`."""
    total_steps: int | None = None
    """Steps of the whole run; needed by schedules that fall."""

    def __post_init__(self) -> None:
        falling = {self.schedule, self.entropy_schedule} - {"constant"}
        if falling and self.total_steps is None:
            raise ValueError(f"trainer: schedule={falling.pop()} needs total_steps, the steps of the whole run")

    def lr_factor(self, done: int) -> float:
        """Factor of the learning rates in the step after `done` steps."""
        return lr_factor(done, self.schedule, self.warmup_steps, self.total_steps, self.min_lr_ratio)

    def entropy_factor(self, done: int) -> float:
        """Factor of the entropy's weight in that step."""
        return lr_factor(done, self.entropy_schedule, 0, self.total_steps, 0.0)


class PolicyLearner:
    """Takes AdamW's steps on a policy, in place.

    Args:
        policy: on its device.
        settings: see `PolicySettings`.
        mesh: ranks that each have a copy; None for one.
    """

    def __init__(self, policy: Policy, settings: PolicySettings, mesh: DeviceMesh | None = None):
        self.policy, self.settings, self._mesh = policy, settings, mesh
        self._device = next(policy.parameters()).device
        rates = ((policy.without_critic(), settings.lr), (policy.of_critic(), settings.critic_lr or settings.lr))
        deciding, self._of_critic = ([each for each in part if each.requires_grad] for part, _ in rates)
        self._parameters = [*deciding, *self._of_critic]
        parts = [(part, rate) for part, (_, rate) in zip((deciding, self._of_critic), rates, strict=True)]
        self.optimizer = adamw_of_parts(parts, betas=settings.betas, weight_decay=settings.weight_decay)
        self._rates = [float(group["lr"]) for group in self.optimizer.param_groups]

    def begin(self, done: int, spec: AlgorithmSpec) -> AlgorithmSpec:
        """Set what schedules say for the step after `done` steps.

        Args:
            done: steps that were taken, each with all its epochs.
            spec: the algorithm as it was configured.

        Returns:
            The algorithm as it is in this step.
        """
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * self.settings.lr_factor(done)
        return replace(spec, entropy_bonus=spec.entropy_bonus * self.settings.entropy_factor(done))

    def learn(
        self,
        mine: TrajectoryBatch | Sequence[TrajectoryBatch],
        spec: AlgorithmSpec,
        *,
        whole: TrajectoryBatch | None = None,
        critic_only: bool = False,
    ) -> tuple[LossSum, dict[str, float]]:
        """One optimizer step on a minibatch; each rank must, with its share of the same one.

        Args:
            mine: this rank's share, at least one decision; one that is `silent` where there is no work for it. Or its
                micro-batches (see `cut`), as many on every rank, which are on the device one after the other.
            spec: the algorithm.
            whole: the minibatch of all ranks, no episode of which is divided where the algorithm averages over
                episodes; None where `mine` is all of it.
            critic_only: change nothing but what only values need.

        Returns:
            The sums of all ranks, and `loss`, `grad_norm` (before clipping), `lr`; no numbers, and no step, where no
            decision of any rank counts.

        Raises:
            FloatingPointError: the loss or the gradient is not finite; the weights have not changed.
        """
        parts = [mine] if isinstance(mine, TrajectoryBatch) else list(mine)
        weights = _weights(parts if whole is None else [whole], spec)
        if weights[int(critic_only)] == 0:
            return LossSum(torch.zeros(()), torch.zeros((), dtype=torch.float64)), {}
        # each loss is divided by its own count, and all of it by the policy's
        scale = self.settings.value_coef * (weights[0] / weights[1]) if weights[1] > 0 else None
        gathered, norm = self.step(
            (partial(self._loss, part, spec, scale, critic_only) for part in parts), critic_only=critic_only
        )
        lr = float(self.optimizer.param_groups[0]["lr"])
        return gathered, {"loss": gathered.average(), "grad_norm": norm, "lr": lr}

    def step(self, losses: Iterable[Callable[[], LossSum]], *, critic_only: bool = False) -> tuple[LossSum, float]:
        """One optimizer step on the sum of some losses; each rank must, with as many.

        Args:
            losses: of micro-batches; each is made, back-propagated and let go before the next.
            critic_only: see `learn`.

        Returns:
            See `optimizer_step`.
        """
        parameters = self._of_critic if critic_only else self._parameters
        return minimize(losses, parameters, self.optimizer, mesh=self._mesh, grad_clip=self.settings.grad_clip)

    def _loss(self, part: TrajectoryBatch, spec: AlgorithmSpec, scale: float | None, critic_only: bool) -> LossSum:
        policy_loss, value_loss = self._losses(part.to(self._device), spec)
        if value_loss is None or scale is None:
            return policy_loss
        both = policy_loss.plus(value_loss, scale)
        return replace(both, total=value_loss.total, weight=value_loss.weight) if critic_only else both

    def _losses(self, mine: TrajectoryBatch, spec: AlgorithmSpec) -> tuple[LossSum, LossSum | None]:
        outputs = self.policy(mine.stored)
        loss = loss_of(
            spec,
            MicroBatch(
                logprobs=outputs.logprobs.reshape(mine.mask.shape),
                mask=mine.mask,
                old_logprobs=mine.logprobs,
                advantages=mine.advantages,
                sequences=mine.sequences,
                entropy=outputs.entropy.reshape(mine.mask.shape),
            ),
        )
        if outputs.values is None or mine.returns is None or mine.values is None or mine.value_mask is None:
            return loss, None
        values, scale = outputs.values.reshape(mine.returns.shape), self.policy.value_scale
        return loss, value_loss_of(spec, values / scale, mine.values / scale, mine.returns / scale, mine.value_mask)


def _weights(parts: Sequence[TrajectoryBatch], spec: AlgorithmSpec) -> tuple[float, float]:
    """Divisors of the policy's and of the critic's loss. Every rank counts all decisions: to ask each other would take
    longer."""
    return (
        sum(_count(spec, part.mask, part.sequences) for part in parts),
        sum(_count(spec, part.value_mask, None) for part in parts if part.value_mask is not None),
    )


def _count(spec: AlgorithmSpec, mask: Tensor, sequences: Tensor | None) -> float:
    """Divisor of a loss over some tokens."""
    how = spec.aggregation
    if how.how == "token-mean":
        return float(mask.sum())
    return float(coefficients("minibatch", Mask.of(mask, mask), how.how, how.norm_length, sequences)[1])


def cut(rows: Tensor, most: int | None, sequences: Tensor | None) -> list[Tensor]:
    """The micro-batches of some decisions.

    Args:
        rows: which decisions, int64 [n].
        most: decisions in each; None for all in one. An episode that is averaged over stays whole, so that one which is
            longer has a larger micro-batch.
        sequences: episode of each decision, [n], for losses that average over episodes.

    Returns:
        The rows of each micro-batch; none without decisions.
    """
    if most is None or not len(rows):
        return [rows] if len(rows) else []
    if sequences is None:
        return list(rows.split(most))
    parts: list[list[int]] = [[]]
    for episode in dict.fromkeys(sequences.tolist()):
        whole = rows[sequences == episode].tolist()
        if parts[-1] and len(parts[-1]) + len(whole) > most:
            parts.append([])
        parts[-1].extend(whole)
    return [torch.tensor(part) for part in parts]


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Dtypes that a policy may compute in."""
Sharding = Literal["auto", "shard", "replicate"]
"""Layout of a policy that learns: in slices over the trainer's ranks (FSDP2), or whole on each of them; "auto" slices
one that has blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """Settings by which a policy is made ready to learn."""

    dtype: str = "float32"
    """Dtype to compute in, "float32" or "bfloat16"; what learns is kept in float32 whatever this is."""
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
    """Seed of new adapters."""

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
        """True if the policy is spread by FSDP2: over the ranks, or, for its casts alone, on a single one.

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
    """True if a parameter of this name learns: the last pattern that fits decides, and "!" before it excludes."""
    result = False
    for pattern in patterns:
        if matches(name, [pattern.removeprefix("!")]):
            result = not pattern.startswith("!")
    return result


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
        from rlinf.models.language.attention import checkpoint_blocks  # imports transformers

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
        target_dtype = parameter.dtype if dtype is None else policy.kept_in(name, dtype)
        yield name, Export(tuple(parameter.shape), target_dtype, make)
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
