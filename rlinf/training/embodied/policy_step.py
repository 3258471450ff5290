"""Optimizer steps of a policy on minibatches of decisions: clipped policy losses and a critic's. Blocking, no actor.

In: minibatches. Out: a changed policy, and the sums of all ranks. Every rank has the whole policy and computes on its
share of a minibatch; `training/optimizer.py` adds the gradients up.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from rlinf.algos.apply import loss_of, value_loss_of
from rlinf.algos.spec import AlgorithmSpec
from rlinf.algos.tensor.batches import MicroBatch
from rlinf.algos.tensor.loss_sum import LossSum
from rlinf.models.policy.base import Policy
from rlinf.training.embodied.trajectory_batch import TrajectoryBatch
from rlinf.training.optimizer import minimize, sum_over_ranks


class PolicyLearner:
    """Takes AdamW's steps on a policy, with a bound on the gradient's norm.

    Args:
        policy: trained in place.
        mesh: ranks that each have a copy; None for one.
        lr: learning rate.
        critic_lr: of what only values need; None: `lr`.
        betas: decay of the running means of the gradient and of its square.
        weight_decay: decoupled weight decay.
        grad_clip: a gradient with a larger global norm is scaled down to it.
        value_coef: weight of the critic's loss beside the policy's.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        mesh: DeviceMesh | None = None,
        lr: float,
        critic_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        grad_clip: float = 0.5,
        value_coef: float = 0.5,
    ):
        self.policy = policy
        self._mesh, self._grad_clip, self._value_coef = mesh, grad_clip, value_coef
        groups = [
            {"params": [each for each in parameters if each.requires_grad], "lr": rate}
            for parameters, rate in ((policy.without_critic(), lr), (policy.of_critic(), critic_lr or lr))
        ]
        groups = [group for group in groups if group["params"]]
        # on a CPU the default is a dozen small operations per tensor, which took as long as the backward pass
        on_cpu = all(parameter.device.type == "cpu" for parameter in policy.parameters())
        self.optimizer = torch.optim.AdamW(
            groups, lr=lr, betas=betas, weight_decay=weight_decay, fused=True if on_cpu else None
        )

    def learn(self, mine: TrajectoryBatch, spec: AlgorithmSpec) -> tuple[LossSum, dict[str, float]]:
        """One optimizer step on a minibatch; each rank must, with its share of the same one.

        Args:
            mine: this rank's share, at least one decision; one that is `silent` where there is no work for it.
            spec: the algorithm.

        Returns:
            What gathered on all ranks, and `loss`, `grad_norm` (before clipping), `lr`.

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
            loss = policy_loss.plus(value_loss, self._value_coef * float(weights[0] / weights[1]))
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        gathered, norm = minimize(loss, parameters, self.optimizer, mesh=self._mesh, grad_clip=self._grad_clip)
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
