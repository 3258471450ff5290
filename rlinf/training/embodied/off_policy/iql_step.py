"""Optimizer steps of implicit Q-learning (arXiv:2110.06169): from data alone, and from what is acted later.

Transitions in, a changed policy out. No action is ever judged that the data do not show, so nothing is expected of
actions that nobody tried. Blocking code, no actor.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rlinf.algos.losses import sac as losses
from rlinf.algos.losses.sac import pessimistic, soft_target
from rlinf.algos.tensor.loss_sum import LossSum
from rlinf.data.rng import mix
from rlinf.models.policy.layers import perceptron
from rlinf.models.policy.off_policy.soft import SoftPolicy
from rlinf.training.embodied.off_policy.batches import follow, inputs_of, rewards_of
from rlinf.training.embodied.off_policy.replay_buffer import Rows
from rlinf.training.embodied.off_policy.settings import IqlSettings, optimizer_of
from rlinf.training.optimizer import minimize, share_of


class IqlModule(nn.Module):
    """All that implicit Q-learning trains: the policy with its critics, their targets, and the value of a state."""

    def __init__(self, policy: SoftPolicy):
        super().__init__()
        self.policy = policy
        self.target = copy.deepcopy(policy.critic).requires_grad_(False)
        with torch.random.fork_rng(devices=[]):  # the same on every rank
            torch.manual_seed(mix(policy.config.seed, 1))
            self.value = perceptron(policy.config.state_size, policy.config.hidden, 1, gain=1.0, activation=nn.ReLU)
        self.value.to(next(policy.parameters()).device)


class IqlLearner:
    """Trains a policy in place.

    Args:
        policy: with critics of states, on its device.
        settings: see `IqlSettings`.
        mesh: ranks that each have a copy; None for one.
    """

    Settings = IqlSettings

    def __init__(self, policy: SoftPolicy, settings: IqlSettings, mesh: DeviceMesh | None = None):
        if type(policy) is not SoftPolicy or policy.config.batch_norm:
            raise ValueError("iql: it learns from states: take policy.type=soft, without batch_norm")
        self.policy, self.settings, self._mesh = policy, settings, mesh
        self.module = IqlModule(policy)
        self._actor, self._critic = policy.without_critic(), policy.of_critic()
        self._value = list(self.module.value.parameters())
        rate = settings.critic_lr
        self.optimizer = optimizer_of(settings, (self._actor, None), (self._critic, rate), (self._value, rate))

    def numbers(self) -> dict[str, float]:
        """Metrics besides those of the losses: none."""
        return {}

    def learn(self, batch: Rows, seed: int, *, actor: bool = True) -> LossSum:
        """One step of values, critics and, if asked for, the actor. Nothing is drawn: `seed` changes nothing.

        Every rank calls it with the same batch, and computes on its share.

        Args:
            batch: of `transitions.transitions`, B rows.
            seed: not used.
            actor: step the actor too.

        Returns:
            A sum that has the metrics of all losses and all ranks.

        Raises:
            FloatingPointError: a loss or its gradient is not finite; that step was not taken.
        """
        device = self._value[0].device
        share, counts = share_of(torch.arange(len(batch["steps"])), self._mesh)
        mine = {name: rows[share].to(device) for name, rows in batch.items()}
        mask = torch.full((len(share),), counts, device=device)
        seen, following = inputs_of(mine, "seen."), inputs_of(mine, "following.")
        judged = self.policy.judged(seen, mine["actions"])
        with torch.no_grad():
            expected = pessimistic(self.module.target(judged))
        values = self._worth(seen["state"])
        advantages = expected - values.detach()
        gathered = self._step(losses.expectile(values, expected, mask, tau=self.settings.expectile), self._value)
        targets = self._target(mine, following["state"])
        loss = losses.critics(self.policy.critic(judged), targets, mask)
        gathered = gathered.watching(self._step(loss, self._critic).metrics)
        follow(self.module.target, self.policy.critic, self.settings.tau)
        if actor:
            logprobs = self.policy.evaluate({**seen, "actions": mine["actions"]}, level="chunk").logprobs
            loss = losses.weighted_likelihood(logprobs, advantages, mask, beta=self.settings.beta)
            gathered = gathered.watching(self._step(loss, self._actor).metrics)
        return gathered

    @torch.no_grad()
    def _target(self, mine: Rows, following: Tensor) -> Tensor:
        """y = r + gamma^steps (1 - terminated) V(s'), [B] (eq. 6)."""
        ahead, gamma = self._worth(following), self.settings.gamma
        none = torch.zeros_like(ahead)
        earned = rewards_of(mine, gamma)
        return soft_target(earned, mine["terminated"], ahead, none, gamma=gamma, alpha=0.0, steps=mine["steps"])

    def _worth(self, state: Tensor) -> Tensor:
        found: Tensor = self.module.value(state)
        return found[:, 0]

    def _step(self, loss: LossSum, parameters: list[nn.Parameter]) -> LossSum:
        return minimize(loss, parameters, self.optimizer, mesh=self._mesh, grad_clip=self.settings.grad_clip)[0]
