"""The learning of a policy that acts: minibatches of decisions in, optimizer steps out. Blocking code, no actor.

Every rank has the whole policy and computes on its share of a minibatch. Gradients of un-normalised sums are added over
ranks, one collective after the other, and divided once: it does not matter how many ranks share a minibatch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rlinf.algos.apply import loss_of, value_loss_of
from rlinf.algos.spec import AlgorithmSpec
from rlinf.algos.tensor.batches import MicroBatch
from rlinf.algos.tensor.loss_sum import LossSum
from rlinf.models.policy.base import Policy, Stored
from rlinf.training.optimizer import minimize


@dataclass(frozen=True, slots=True, eq=False)
class Lesson:
    """What there is to learn from: D decisions, whichever environments and times they are from."""

    stored: Stored
    """Of the policy, D rows."""
    logprobs: Tensor
    """Under the policy that acted, nats, [D, tokens]; a token is what has a log-prob of its own."""
    advantages: Tensor
    """[D, tokens]"""
    mask: Tensor
    """Which tokens count, bool [D, tokens]."""
    sequences: Tensor | None
    """Episode of each token, for losses that average over episodes, [D, tokens]."""
    values: Tensor | None
    """What the critic expected, [D, values]; None without one."""
    returns: Tensor | None
    """What it is to expect, [D, values]."""
    value_mask: Tensor | None
    """Which values count, bool [D, values]."""

    def __len__(self) -> int:
        return len(self.mask)

    def rows(self, chosen: Tensor) -> Lesson:
        """Some of the decisions.

        Args:
            chosen: which, int64 [d].
        """

        def of(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[chosen]

        return Lesson(
            {name: tensor[chosen] for name, tensor in self.stored.items()},
            self.logprobs[chosen],
            self.advantages[chosen],
            self.mask[chosen],
            of(self.sequences),
            of(self.values),
            of(self.returns),
            of(self.value_mask),
        )

    def silent(self) -> Lesson:
        """The same decisions, of which none counts."""
        value_mask = None if self.value_mask is None else torch.zeros_like(self.value_mask)
        return replace(self, mask=torch.zeros_like(self.mask), value_mask=value_mask)


class PolicyLearner:
    """Trains a policy with AdamW and a bound on the gradient's norm.

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
        self._mesh = mesh if mesh is not None and mesh.size() > 1 else None
        self._grad_clip, self._value_coef = grad_clip, value_coef
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

    def learn(self, mine: Lesson, spec: AlgorithmSpec) -> tuple[LossSum, dict[str, float]]:
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
        weights = torch.stack([policy_loss.weight, value_loss.weight if value_loss is not None else policy_loss.weight])
        weights = self._added(weights.double())
        if float(weights[0]) == 0:
            return policy_loss.detach(), {}
        loss = policy_loss
        if value_loss is not None and float(weights[1]) > 0:  # each is divided by its own count
            loss = policy_loss.plus(value_loss, self._value_coef * float(weights[0] / weights[1]))
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        gathered, norm = minimize(loss, parameters, self.optimizer, mesh=self._mesh, grad_clip=self._grad_clip)
        lr = float(self.optimizer.param_groups[0]["lr"])
        return gathered, {"loss": float(gathered.mean()), "grad_norm": norm, "lr": lr}

    def _added(self, sums: Tensor) -> Tensor:
        """Sums of all ranks, float64."""
        if self._mesh is not None:
            dist.all_reduce(sums, group=self._mesh.get_group())
        return sums

    def _losses(self, mine: Lesson, spec: AlgorithmSpec) -> tuple[LossSum, LossSum | None]:
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
