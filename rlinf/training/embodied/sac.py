"""Optimizer steps of soft actor-critic, CrossQ and implicit Q-learning: transitions in, a changed policy out.

All that is trained is one module, so that one optimizer and one checkpoint hold it: the policy with its critics, the
target critics, which follow them slowly, and the temperature. Each loss changes its own part alone.

Implicit Q-learning (arXiv:2110.06169) learns from data alone, and from what is acted later. It never judges an action
that the data do not show, so nothing is expected of actions that nobody tried.

Blocking code, no actor.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rlinf.algos import critic_losses
from rlinf.algos.critic_losses import pessimistic, soft_target
from rlinf.algos.loss_sum import LossSum
from rlinf.data.rng import mix
from rlinf.models.policy.actor_critic import perceptron
from rlinf.models.policy.base import at_level, uniforms
from rlinf.models.policy.sac import SoftPolicy
from rlinf.training.embodied.replay import (
    IqlSettings,
    Rows,
    SacSettings,
    follow,
    inputs_of,
    optimizer_of,
    rewards_of,
    shifts,
)
from rlinf.training.optimizer import minimize, share_of


class SacModule(nn.Module):
    """Module of all that soft actor-critic trains.

    Args:
        policy: with critics.
        alpha: first temperature.
        targets: keep target critics.
    """

    def __init__(self, policy: SoftPolicy, alpha: float, *, targets: bool = True):
        super().__init__()
        self.policy = policy
        if targets:
            self.target = copy.deepcopy(policy.critic).requires_grad_(False)
        # One number in a row: checkpoints take what the optimizer keeps of numbers without a shape for counters.
        self.log_alpha = nn.Parameter(torch.tensor([math.log(alpha)], device=next(policy.parameters()).device))


class SacLearner:
    """Trains a policy in place.

    Args:
        policy: with critics, on its device.
        settings: see `SacSettings`.
        mesh: ranks that each have a copy; None for one.
    """

    Settings = SacSettings
    targets = True
    """Keeps target critics."""

    def __init__(self, policy: SoftPolicy, settings: SacSettings, mesh: DeviceMesh | None = None):
        if settings.subset is not None and not 1 <= settings.subset <= policy.config.critics:
            raise ValueError(
                f"soft actor-critic: subset={settings.subset} must be between 1 and policy.settings.critics="
                f"{policy.config.critics}"
            )
        if self.targets and policy.config.batch_norm:
            raise ValueError("soft actor-critic: policy.settings.batch_norm is for algorithm: crossq alone")
        if settings.gripper_penalty and not policy.config.gripper:
            raise ValueError(
                f"soft actor-critic: gripper_penalty={settings.gripper_penalty} is for a policy that chooses what its "
                "gripper does: set policy.settings.gripper=true"
            )
        self.policy, self.settings, self._mesh = policy, settings, mesh
        self.module = SacModule(policy, settings.alpha, targets=self.targets)
        self._actor, self._critic, self._alpha = policy.without_critic(), policy.of_critic(), [self.module.log_alpha]
        numbers = policy.config.chunk * policy.numbers
        self._entropy = -float(numbers) if settings.target_entropy is None else settings.target_entropy
        parts = ((self._actor, None), (self._critic, settings.critic_lr), (self._alpha, settings.alpha_lr))
        self.optimizer = optimizer_of(settings, *parts)

    @property
    def alpha(self) -> Tensor:
        """The temperature, without gradient."""
        return self.module.log_alpha.detach().exp()[0]

    def numbers(self) -> dict[str, float]:
        """Metrics besides those of the losses."""
        return {"alpha": float(self.alpha)}

    def learn(self, batch: Rows, seed: int, *, actor: bool = True) -> LossSum:
        """One step of the critics and, if asked for, of the actor and the temperature.

        Every rank calls it with the same batch, and computes on its share; what is drawn depends on the seed and on the
        place in the batch alone.

        Args:
            batch: of `replay.transitions`, B rows, and to imitate anybody `others`, bool [B]: they did these.
            seed: of what is drawn.
            actor: step actor and temperature too.

        Returns:
            A sum that has the metrics of all losses and all ranks.

        Raises:
            FloatingPointError: a loss or its gradient is not finite; that step was not taken.
        """
        size, device = len(batch["steps"]), self.module.log_alpha.device
        generator = torch.Generator().manual_seed(seed)
        noise = uniforms(generator, size, 2 * self.policy.randomness, torch.device("cpu"))
        batch = shifts(batch, self.settings.shift, generator)
        share, counts = share_of(torch.arange(size), self._mesh)
        mine = {name: rows[share].to(device) for name, rows in batch.items()}
        now, after = noise[share].to(device).chunk(2, 1)
        mask = torch.full((len(share),), counts, device=device)
        gathered = self._step(self._critic_loss(mine, after, mask, generator), self._critic)
        if self.targets:
            follow(self.module.target, self.policy.critic, self.settings.tau)
        if actor:
            gathered = gathered.watching(self._actor_step(mine, now, mask).metrics)
        return gathered

    @torch.no_grad()
    def target(self, batch: Rows, noise: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Target of the critics, [B].

            y = sum over the chunk of gamma^i r_i  +  gamma^steps (1 - terminated) (Q'(s', a') - alpha log pi(a'|s'))

        without the entropy, the last term, where `backup_entropy` is false; and cut to `returns`.

        A chunk whose episode was cut before its last action is discounted by the actions that were done.

        Args:
            batch: of `replay.transitions`, B rows.
            noise: of the actions that would follow, in [0, 1), float64 [B, C x A].
            generator: of the critics drawn.
        """
        following = inputs_of(batch, "following.")
        actions, logprobs = self.policy.proposed(following, noise)
        return self._target(batch, self.module.target(self.policy.judged(following, actions)), logprobs, generator)

    def _target(self, batch: Rows, values: Tensor, logprobs: Tensor, generator: torch.Generator | None) -> Tensor:
        gamma = self.settings.gamma
        return soft_target(
            rewards_of(batch, gamma),
            batch["terminated"],
            pessimistic(values, subset=self.settings.subset, generator=generator),
            at_level(logprobs, "chunk"),
            gamma=gamma,
            alpha=self.alpha if self.settings.backup_entropy else 0.0,
            steps=batch["steps"],
            returns=self.settings.returns,
        )

    def _critic_loss(self, mine: Rows, noise: Tensor, mask: Tensor, generator: torch.Generator) -> LossSum:
        values = self.policy.critic(self.policy.judged(inputs_of(mine, "seen."), mine["actions"]))
        loss = critic_losses.critics(values, self.target(mine, noise, generator), mask)
        return loss.plus(self._gripper_loss(mine, mask, generator)) if self.policy.config.gripper else loss

    def _gripper_loss(self, mine: Rows, mask: Tensor, generator: torch.Generator) -> LossSum:
        """The loss of the gripper's values, whose reward is less by the penalty where it was told to move."""
        settings = self.settings
        critic: Any = self.policy.critic
        target: Any = self.module.target
        choice = mine["actions"][:, 0, -1]  # -1, 0 or 1
        with torch.no_grad():
            following = inputs_of(mine, "following.")
            best = critic.choices(following).mean(0).argmax(0)
            ahead = target.choices(following)[:, best, torch.arange(len(best), device=best.device)]
        return critic_losses.choices(
            critic.choices(inputs_of(mine, "seen.")),
            choice.long() + 1,
            rewards_of(mine, settings.gamma) - settings.gripper_penalty * choice.abs(),
            pessimistic(ahead, subset=settings.subset, generator=generator),
            mask,
            discount=settings.gamma ** mine["steps"] * ~mine["terminated"],
            returns=_with_penalties(settings),
        )

    def _imitation(self, mine: Rows, mask: Tensor) -> LossSum:
        """The loss of the likeliest moves where others showed theirs, of those actions of a chunk that they did."""
        likeliest, _ = self.policy.proposed(inputs_of(mine, "seen."), None)
        theirs = mine["actions"][..., : self.policy.numbers]
        done = torch.arange(theirs.shape[1], device=theirs.device) < mine["steps"][:, None]
        moves, theirs = (torch.where(done[..., None], torch.tanh(each), 0.0) for each in (likeliest, theirs))
        return critic_losses.likeness(moves.flatten(1), theirs.flatten(1), mask & mine["others"])

    def _actor_step(self, mine: Rows, noise: Tensor, mask: Tensor) -> LossSum:
        inputs = inputs_of(mine, "seen.")
        actions, numbers = self.policy.proposed(inputs, noise)
        logprobs = at_level(numbers, "chunk")
        values = self.policy.critic(self.policy.judged(inputs, actions))
        value = pessimistic(values) if self.settings.subset is None else values.mean(0)
        loss = critic_losses.actor(logprobs, value, mask, alpha=self.alpha)
        if self.settings.imitation:
            loss = loss.plus(self._imitation(mine, mask), self.settings.imitation)
        gathered = self._step(loss, self._actor)
        if self.settings.alpha_lr == 0.0:
            return gathered
        loss = critic_losses.temperature(self.module.log_alpha[0], logprobs, mask, target_entropy=self._entropy)
        return gathered.watching(self._step(loss, self._alpha).metrics)

    def _step(self, loss: LossSum, parameters: list[nn.Parameter]) -> LossSum:
        return minimize(loss, parameters, self.optimizer, mesh=self._mesh, grad_clip=self.settings.grad_clip)[0]


def _with_penalties(settings: SacSettings) -> critic_losses.Returns | None:
    """Least and greatest return with the gripper's penalties, which it can earn with every action."""
    if settings.returns is None or not settings.gripper_penalty:
        return settings.returns
    low, high = settings.returns
    return (low - settings.gripper_penalty / (1.0 - settings.gamma) if settings.gamma < 1.0 else -math.inf, high)


class CrossQLearner(SacLearner):
    """Soft actor-critic without target critics: batch normalisation keeps the critics from running after themselves.

    What was done and what would follow are judged in one batch, so that both are normalised by the same statistics
    (CrossQ, arXiv:1902.05605, section 3). Arguments are those of `SacLearner`.
    """

    targets = False

    def __init__(self, policy: SoftPolicy, settings: SacSettings, mesh: DeviceMesh | None = None):
        if not policy.config.batch_norm:
            raise ValueError("crossq: it stands on batch normalisation: set policy.settings.batch_norm=true")
        if mesh is not None and mesh.size() > 1:
            raise ValueError(
                f"crossq: batch normalisation needs whole batches, and {mesh.size()} ranks would each see a part: "
                "set placement.trainer to a single host or device"
            )
        super().__init__(policy, settings, mesh)

    def _critic_loss(self, mine: Rows, noise: Tensor, mask: Tensor, generator: torch.Generator) -> LossSum:
        following = inputs_of(mine, "following.")
        with torch.no_grad():
            actions, logprobs = self.policy.proposed(following, noise)
        now = self.policy.judged(inputs_of(mine, "seen."), mine["actions"])
        values, ahead = self.policy.critic(_both(now, self.policy.judged(following, actions)), training=True).chunk(
            2, 1
        )
        return critic_losses.critics(values, self._target(mine, ahead.detach(), logprobs, generator), mask)


def _both(first: Any, second: Any) -> Any:
    """The rows of what critics look at, one below the other."""
    if isinstance(first, Mapping):
        return {name: torch.cat([first[name], second[name]]) for name in first}
    return torch.cat([first, second])


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
        if type(policy) is not SoftPolicy or policy.config.batch_norm or policy.config.gripper:
            raise ValueError("iql: it learns from states: take policy.type=soft, without batch_norm and gripper")
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
            batch: of `replay.transitions`, B rows.
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
        inputs, following = inputs_of(mine, "seen."), inputs_of(mine, "following.")
        judged = self.policy.judged(inputs, mine["actions"])
        with torch.no_grad():
            expected = pessimistic(self.module.target(judged))
        values = self._worth(inputs["state"])
        advantages = expected - values.detach()
        gathered = self._step(critic_losses.expectile(values, expected, mask, tau=self.settings.expectile), self._value)
        targets = self._target(mine, following["state"])
        loss = critic_losses.critics(self.policy.critic(judged), targets, mask)
        gathered = gathered.watching(self._step(loss, self._critic).metrics)
        follow(self.module.target, self.policy.critic, self.settings.tau)
        if actor:
            logprobs = self.policy.evaluate({**inputs, "actions": mine["actions"]}, level="chunk").logprobs
            loss = critic_losses.weighted_likelihood(logprobs, advantages, mask, beta=self.settings.beta)
            gathered = gathered.watching(self._step(loss, self._actor).metrics)
        return gathered

    @torch.no_grad()
    def _target(self, mine: Rows, following: Tensor) -> Tensor:
        """y = r + gamma^steps (1 - terminated) V(s'), [B] (eq. 6)."""
        ahead, gamma = self._worth(following), self.settings.gamma
        none = torch.zeros_like(ahead)
        earned = rewards_of(mine, gamma)
        return soft_target(
            earned,
            mine["terminated"],
            ahead,
            none,
            gamma=gamma,
            alpha=0.0,
            steps=mine["steps"],
            returns=self.settings.returns,
        )

    def _worth(self, state: Tensor) -> Tensor:
        value: Tensor = self.module.value(state)
        return value[:, 0]

    def _step(self, loss: LossSum, parameters: list[nn.Parameter]) -> LossSum:
        return minimize(loss, parameters, self.optimizer, mesh=self._mesh, grad_clip=self.settings.grad_clip)[0]
