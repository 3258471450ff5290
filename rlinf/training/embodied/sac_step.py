"""Optimizer steps of soft actor-critic: transitions in, a changed policy out. Blocking code, no actor.

All that is trained is one module, so that one optimizer and one checkpoint hold it: the policy with its critics, the
target critics, which follow them slowly, and the temperature. Each loss changes its own part alone.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rlinf.algos.losses import sac as losses
from rlinf.algos.losses.sac import pessimistic, polyak, soft_target
from rlinf.algos.tensor.loss_sum import LossSum
from rlinf.models.policy.base import Stored, at_level
from rlinf.models.policy.noise import uniforms
from rlinf.models.policy.sac import SoftPolicy
from rlinf.training.embodied.replay_buffer import Rows
from rlinf.training.optimizer import minimize, share_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SacSettings:
    """Settings of soft actor-critic and its relatives."""

    lr: float = 3e-4
    """Learning rate of the actor."""
    critic_lr: float | None = None
    """Of the critics; None takes lr."""
    alpha_lr: float | None = None
    """Of the temperature; None takes lr, and 0 keeps the temperature as it is."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""
    grad_clip: float = math.inf
    """Gradients of a larger norm are scaled down to it."""
    gamma: float = 0.99
    """Discount of each action."""
    tau: float = 0.005
    """Share of the way that the target critics go with each step."""
    alpha: float = 1.0
    """First temperature, reward per nat."""
    target_entropy: float | None = None
    """What the temperature keeps the entropy at, nats; None: minus the numbers in a chunk of actions."""
    subset: int | None = None
    """How many target critics, drawn anew each step, the smallest prediction is taken of, and the actor then follows
    the mean of all critics (REDQ, RLPD); None: all of them, and the actor follows the smallest."""

    def __post_init__(self) -> None:
        for name in ("gamma", "tau"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"soft actor-critic: {name}={getattr(self, name)} must be between 0 and 1")
        if not self.alpha > 0.0:
            raise ValueError(f"soft actor-critic: alpha={self.alpha} must be more than 0; its logarithm is learned")


class SacModule(nn.Module):
    """All that soft actor-critic trains."""

    def __init__(self, policy: SoftPolicy, alpha: float):
        super().__init__()
        self.policy = policy
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

    def __init__(self, policy: SoftPolicy, settings: SacSettings, mesh: DeviceMesh | None = None):
        if settings.subset is not None and not 1 <= settings.subset <= policy.config.critics:
            raise ValueError(
                f"soft actor-critic: subset={settings.subset} must be between 1 and policy.settings.critics="
                f"{policy.config.critics}"
            )
        self.policy, self.settings, self._mesh = policy, settings, mesh
        self.module = SacModule(policy, settings.alpha)
        self._actor, self._critic, self._alpha = policy.without_critic(), policy.of_critic(), [self.module.log_alpha]
        numbers = policy.config.chunk * policy.config.action_size
        self._entropy = -float(numbers) if settings.target_entropy is None else settings.target_entropy
        rates = ((self._actor, settings.lr), (self._critic, settings.critic_lr), (self._alpha, settings.alpha_lr))
        groups = [{"params": part, "lr": settings.lr if rate is None else rate} for part, rate in rates]
        self.optimizer = torch.optim.AdamW(groups, betas=settings.betas, weight_decay=0.0)

    @property
    def alpha(self) -> Tensor:
        """The temperature, without gradient."""
        return self.module.log_alpha.detach().exp()[0]

    def learn(self, batch: Rows, seed: int, *, actor: bool = True) -> LossSum:
        """One step of the critics and, if asked for, of the actor and the temperature.

        Every rank calls it with the same batch, and computes on its share; what is drawn depends on the seed and on the
        place in the batch alone.

        Args:
            batch: of `trajectory.transitions`, B rows.
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
        share, counts = share_of(torch.arange(size), self._mesh)
        mine = {name: rows[share].to(device) for name, rows in batch.items()}
        now, after = noise[share].to(device).chunk(2, 1)
        mask = torch.full((len(share),), counts, device=device)
        seen = _inputs(mine, "seen.")
        values = self.policy.critic(self.policy.judged(seen, mine["actions"]))
        gathered = self._step(losses.critics(values, self.target(mine, after, generator), mask), self._critic)
        self._move_targets()
        if actor:
            gathered = gathered.watching(self._actor_step(seen, now, mask).metrics)
        return gathered

    @torch.no_grad()
    def target(self, batch: Rows, noise: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """What the critics are to predict, [B].

            y = sum over the chunk of gamma^i r_i  +  gamma^steps (1 - terminated) (Q'(s', a') - alpha log pi(a'|s'))

        A chunk whose episode was cut before its last action is discounted by the actions that were done.

        Args:
            batch: of `trajectory.transitions`, B rows.
            noise: of the actions that would follow, in [0, 1), float64 [B, C x A].
            generator: of the critics drawn.
        """
        following = _inputs(batch, "following.")
        drawn = self.policy.draw(following, noise)
        values = self.module.target(self.policy.judged(following, drawn.made))
        gamma, rewards = self.settings.gamma, batch["rewards"]
        discounts = gamma ** torch.arange(rewards.shape[1], device=rewards.device)
        return soft_target(
            (rewards * discounts).sum(1),
            batch["terminated"],
            pessimistic(values, subset=self.settings.subset, generator=generator),
            at_level(drawn.logprobs, "chunk"),
            gamma=gamma,
            alpha=self.alpha,
            steps=batch["steps"],
        )

    def _actor_step(self, seen: Stored, noise: Tensor, mask: Tensor) -> LossSum:
        drawn = self.policy.draw(seen, noise)
        logprobs = at_level(drawn.logprobs, "chunk")
        values = self.policy.critic(self.policy.judged(seen, drawn.made))
        value = pessimistic(values) if self.settings.subset is None else values.mean(0)
        gathered = self._step(losses.actor(logprobs, value, mask, alpha=self.alpha), self._actor)
        if self.settings.alpha_lr == 0.0:
            return gathered
        loss = losses.temperature(self.module.log_alpha[0], logprobs, mask, target_entropy=self._entropy)
        return gathered.watching(self._step(loss, self._alpha).metrics)

    def _step(self, loss: LossSum, parameters: list[nn.Parameter]) -> LossSum:
        return minimize(loss, parameters, self.optimizer, mesh=self._mesh, grad_clip=self.settings.grad_clip)[0]

    @torch.no_grad()
    def _move_targets(self) -> None:
        for target, source in zip(self.module.target.parameters(), self._critic, strict=True):
            target.copy_(polyak(target, source, tau=self.settings.tau))


def _inputs(rows: Rows, prefix: str) -> Stored:
    return {name.removeprefix(prefix): row for name, row in rows.items() if name.startswith(prefix)}
