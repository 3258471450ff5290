"""Optimizer steps of a policy on minibatches of decisions: clipped policy losses and a critic's. Blocking, no actor.

In: minibatches. Out: a changed policy, and the sums of all ranks. Every rank has the whole policy and computes on its
share of a minibatch; `training/optimizer.py` adds the gradients up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from rlinf.algos.apply import loss_of, value_loss_of
from rlinf.algos.spec import AlgorithmSpec
from rlinf.algos.tensor.batches import MicroBatch
from rlinf.algos.tensor.loss_sum import LossSum
from rlinf.models.policy.base import Policy
from rlinf.training.embodied.trajectory_batch import TrajectoryBatch
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
        values = found.values.reshape(mine.returns.shape)
        return loss, value_loss_of(spec, values, mine.values, mine.returns, mine.value_mask)
