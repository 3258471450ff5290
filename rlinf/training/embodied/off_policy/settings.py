"""Settings of off-policy learning, and the optimizer that they ask for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from rlinf.training.adamw import adamw_of_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicySettings:
    """What all off-policy learners are told."""

    lr: float = 3e-4
    """Learning rate of the actor."""
    critic_lr: float | None = None
    """Of the critics; None takes lr."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""
    grad_clip: float = math.inf
    """Gradients of a larger norm are scaled down to it."""
    gamma: float = 0.99
    """Discount of each action."""
    tau: float = 0.005
    """Share of the way that the target critics go with each step."""
    shift: int = 0
    """Pictures are moved at random by so many pixels at most, in height and width (DrQ)."""

    def __post_init__(self) -> None:
        for name in ("gamma", "tau"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"off-policy: {name}={getattr(self, name)} must be between 0 and 1")
        if self.shift < 0:
            raise ValueError(f"off-policy: shift={self.shift} must not be below 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class SacSettings(OffPolicySettings):
    """Settings of soft actor-critic and its relatives."""

    alpha_lr: float | None = None
    """Learning rate of the temperature; None takes lr, and 0 keeps the temperature as it is."""
    alpha: float = 1.0
    """First temperature, reward per nat."""
    target_entropy: float | None = None
    """What the temperature keeps the entropy at, nats; None: minus the numbers in a chunk of actions."""
    subset: int | None = None
    """How many target critics, drawn anew each step, the smallest prediction is taken of, and the actor then follows
    the mean of all critics (REDQ, RLPD); None: all of them, and the actor follows the smallest."""

    def __post_init__(self) -> None:
        OffPolicySettings.__post_init__(self)  # super() does not work in a dataclass with slots
        if not self.alpha > 0.0:
            raise ValueError(f"soft actor-critic: alpha={self.alpha} must be more than 0; its logarithm is learned")


@dataclass(frozen=True, slots=True, kw_only=True)
class IqlSettings(OffPolicySettings):
    """Settings of implicit Q-learning."""

    expectile: float = 0.7
    """Which expectile of the data's actions a state is worth, above 0 and below 1: higher is more optimistic."""
    beta: float = 3.0
    """Inverse temperature of the actor's weights, 1 / reward; 0 is behaviour cloning."""

    def __post_init__(self) -> None:
        OffPolicySettings.__post_init__(self)
        if not (0.0 < self.expectile < 1.0 and self.beta >= 0.0):
            raise ValueError(
                f"iql: expectile={self.expectile} must be between 0 and 1, and beta={self.beta} not below 0"
            )


def optimizer_of(
    settings: OffPolicySettings, *parts: tuple[Sequence[nn.Parameter], float | None]
) -> torch.optim.Optimizer:
    """Adam, with a learning rate for each part: parameters, and their rate, or None for `settings.lr`."""
    rates = [(part, settings.lr if rate is None else rate) for part, rate in parts]
    return adamw_of_parts(rates, betas=settings.betas, weight_decay=0.0)
