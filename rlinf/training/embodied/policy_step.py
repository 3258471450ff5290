"""Optimizer steps of a policy on minibatches of decisions: clipped policy losses and a critic's. Blocking, no actor.

In: minibatches. Out: a changed policy, and the sums of all ranks. Every rank has the whole policy and computes on its
share of a minibatch; `training/optimizer.py` adds the gradients up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rlinf.algos.apply import loss_of, value_loss_of
from rlinf.algos.losses.aggregate import coefficients
from rlinf.algos.spec import AlgorithmSpec
from rlinf.algos.tensor.batches import MicroBatch
from rlinf.algos.tensor.loss_sum import LossSum
from rlinf.algos.tensor.masks import keep
from rlinf.models.policy.base import Policy
from rlinf.training.adamw import adamw_of_parts
from rlinf.training.embodied.trajectory_batch import TrajectoryBatch
from rlinf.training.learning_rate import Schedule, lr_factor
from rlinf.training.optimizer import minimize


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """Settings of the optimizer of a policy."""

    lr: float = 3e-4
    """Learning rate."""
    critic_lr: float | None = None
    """Of what only values need; None: `lr`."""
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
        """What learning rates are multiplied with in the step after `done` steps."""
        return lr_factor(done, self.schedule, self.warmup_steps, self.total_steps, self.min_lr_ratio)

    def entropy_factor(self, done: int) -> float:
        """What the weight of the entropy is multiplied with in that step."""
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
        found = self.policy(mine.stored)
        loss = loss_of(
            spec,
            MicroBatch(
                logprobs=found.logprobs.reshape(mine.mask.shape),
                mask=mine.mask,
                old_logprobs=mine.logprobs,
                advantages=mine.advantages,
                sequences=mine.sequences,
                entropy=found.entropy.reshape(mine.mask.shape),
            ),
        )
        if found.values is None or mine.returns is None or mine.values is None or mine.value_mask is None:
            return loss, None
        values, scale = found.values.reshape(mine.returns.shape), self.policy.value_scale
        return loss, value_loss_of(spec, values / scale, mine.values / scale, mine.returns / scale, mine.value_mask)


def _weights(parts: Sequence[TrajectoryBatch], spec: AlgorithmSpec) -> tuple[float, float]:
    """What the policy's and the critic's loss are divided by. Every rank counts all decisions: to ask each other would
    take longer."""
    return (
        sum(_count(spec, part.mask, part.sequences) for part in parts),
        sum(_count(spec, part.value_mask, None) for part in parts if part.value_mask is not None),
    )


def _count(spec: AlgorithmSpec, mask: Tensor, sequences: Tensor | None) -> float:
    """What a loss over some tokens is divided by."""
    how = spec.aggregation
    if how.how == "token-mean":
        return float(mask.sum())
    return float(coefficients("minibatch", keep(mask, torch.float32), how.how, how.norm_length, sequences)[1])


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
    found: list[list[int]] = [[]]
    for episode in dict.fromkeys(sequences.tolist()):
        whole = rows[sequences == episode].tolist()
        if found[-1] and len(found[-1]) + len(whole) > most:
            found.append([])
        found[-1].extend(whole)
    return [torch.tensor(part) for part in found]
