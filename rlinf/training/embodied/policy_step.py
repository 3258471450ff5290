"""Optimizer steps of a policy on minibatches of decisions: clipped policy losses and a critic's. Blocking, no actor.

In: minibatches. Out: a changed policy, and the sums of all ranks. Every rank has the whole policy and computes on its
share of a minibatch; `training/optimizer.py` adds the gradients up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.distributed.device_mesh import DeviceMesh

from rlinf.algos.apply import loss_of, value_loss_of
from rlinf.algos.spec import AlgorithmSpec
from rlinf.algos.tensor.batches import MicroBatch
from rlinf.algos.tensor.loss_sum import LossSum
from rlinf.models.policy.base import Policy
from rlinf.training.embodied.trajectory_batch import TrajectoryBatch
from rlinf.training.learning_rate import Schedule, lr_factor
from rlinf.training.optimizer import minimize, sum_over_ranks


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
        rates = ((policy.without_critic(), settings.lr), (policy.of_critic(), settings.critic_lr or settings.lr))
        groups = [{"params": [each for each in part if each.requires_grad], "lr": rate} for part, rate in rates]
        # on a CPU the default is a dozen small operations per tensor, which took as long as the backward pass
        on_cpu = all(parameter.device.type == "cpu" for parameter in policy.parameters())
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=settings.lr,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True if on_cpu else None,
        )
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

    def learn(self, mine: TrajectoryBatch, spec: AlgorithmSpec) -> tuple[LossSum, dict[str, float]]:
        """One optimizer step on a minibatch; each rank must, with its share of the same one.

        Args:
            mine: this rank's share, at least one decision; one that is `silent` where there is no work for it.
            spec: the algorithm.

        Returns:
            The sums of all ranks, and `loss`, `grad_norm` (before clipping), `lr`; no numbers, and no step, where no
            decision of any rank counts.

        Raises:
            FloatingPointError: the loss or the gradient is not finite; the weights have not changed.
        """
        policy_loss, value_loss = self._losses(mine, spec)
        weights = torch.stack([each.weight for each in (policy_loss, value_loss or policy_loss)]).double()
        weights = sum_over_ranks(weights, self._mesh)
        if float(weights[0]) == 0:
            return policy_loss.detach(), {}
        loss = policy_loss
        if value_loss is not None and float(weights[1]) > 0:  # each is divided by its own count
            loss = policy_loss.plus(value_loss, self.settings.value_coef * float(weights[0] / weights[1]))
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        gathered, norm = minimize(loss, parameters, self.optimizer, mesh=self._mesh, grad_clip=self.settings.grad_clip)
        lr = float(self.optimizer.param_groups[0]["lr"])
        return gathered, {"loss": float(gathered.mean()), "grad_norm": norm, "lr": lr}

    def _losses(self, mine: TrajectoryBatch, spec: AlgorithmSpec) -> tuple[LossSum, LossSum | None]:
        found = self.policy.evaluate(mine.stored)
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
