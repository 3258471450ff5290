"""A policy for soft actor-critic: a squashed normal distribution, and critics of a state and a chunk of actions.

    u ~ N(mean(s), sigma(s)^2)        a = tanh(u)        log pi(a|s) = log N(u; mean, sigma^2) - log(1 - tanh(u)^2)

(arXiv:1812.05905, appendix C). What is stored of an action is u: a says little of it where tanh is flat. The critics
are an ensemble computed side by side, and stand under `critic`: they judge actions, and do not bootstrap episodes as
other policies' values do, so `value_level` is null.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf.models.policy.base import (
    Drawn,
    Evaluated,
    Level,
    Observation,
    Policy,
    PolicyConfig,
    Stored,
    ValueLevel,
    looked_at,
)
from rlinf.models.policy.layers import perceptron
from rlinf.models.policy.noise import normals
from rlinf.models.policy.off_policy.critics import Ensemble

_LOG_STD = (-5.0, 2.0)  # narrower densities than e^-5 make the critics' slopes useless; wider ones only saturate tanh
_MOST = 0.999  # demonstrated actions are cut to it: at 1, u would be at infinity
_HALF_LOG_TAU = 0.5 * math.log(2.0 * math.pi)
_NODES, _SHARES = np.polynomial.hermite_e.hermegauss(16)  # of an integral over N(0, 1): enough for 3 digits of entropy


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftConfig(PolicyConfig):
    """Of `SoftPolicy`."""

    state_size: int
    """Numbers in the observation's "state", S."""
    level: Level = "chunk"
    """What has a log-prob of its own; soft actor-critic knows chunks alone."""
    value_level: ValueLevel | None = None
    """Always null: the critics judge actions."""
    hidden: tuple[int, ...] = (256, 256)
    """Widths of the hidden layers, of the actor as of every critic."""
    critics: int = 2
    """How many there are: 2 for soft actor-critic, 10 for REDQ and RLPD."""
    layer_norm: bool = False
    """Normalise the critics' hidden layers, which keeps values bounded beside the data (RLPD, arXiv:2302.02948)."""
    batch_norm: bool = False
    """Batch renormalisation of the critics' layers, for crossq alone."""
    log_std: float = 0.0
    """Logarithm of the first standard deviation, before tanh; with 0 actions are spread almost evenly."""

    def __post_init__(self) -> None:
        PolicyConfig.__post_init__(self)  # super() does not work in a dataclass with slots
        if self.critics < 1 or not self.hidden or min(self.hidden) < 1:
            raise ValueError(
                f"policy soft: critics={self.critics} and the widths hidden={list(self.hidden)} must be at least 1"
            )
        if self.layer_norm and self.batch_norm:
            raise ValueError("policy soft: layer_norm and batch_norm exclude each other: set one of them")
        if self.value_level is not None:
            raise ValueError("policy soft: value_level must be null: its critics judge actions, not states alone")
        if not _LOG_STD[0] < self.log_std < _LOG_STD[1]:
            raise ValueError(f"policy soft: log_std={self.log_std} must be between {_LOG_STD[0]:g} and {_LOG_STD[1]:g}")


class SoftPolicy(Policy):
    """Looks at "state", float32 [N, S]."""

    Config: ClassVar[type[PolicyConfig]] = SoftConfig
    nodes: Tensor
    shares: Tensor

    def __init__(self, config: SoftConfig):
        super().__init__(config)
        self._make_networks()
        # Not saved: they follow from the formula.
        self.register_buffer("nodes", torch.tensor(_NODES, dtype=torch.float32), persistent=False)
        self.register_buffer("shares", torch.tensor(_SHARES / _SHARES.sum(), dtype=torch.float32), persistent=False)

    def _make_networks(self) -> None:
        """Make `actor` and `critic`."""
        if self.config.state_size < 1:
            raise ValueError(f"policy soft: state_size={self.config.state_size} must be at least 1")
        self.actor = self._head(self.config.state_size)
        self.critic: nn.Module = self._ensemble(self.config.state_size)

    def _head(self, features: int) -> nn.Sequential:
        """From features to means and spreads of all numbers of a chunk."""
        numbers, (low, high) = self.config.chunk * self.config.action_size, _LOG_STD
        made = perceptron(features, self.config.hidden, 2 * numbers, gain=0.01, activation=nn.ReLU)
        last: Any = made[-1]
        with torch.no_grad():
            last.bias[numbers:] = math.atanh(2.0 * (self.config.log_std - low) / (high - low) - 1.0)
        return made

    def _ensemble(self, features: int) -> Ensemble:
        """Critics of features and a chunk of actions."""
        config = self.config
        inputs = features + config.chunk * config.action_size
        norms = {"layer_norm": config.layer_norm, "batch_norm": config.batch_norm}
        return Ensemble(config.critics, inputs, config.hidden, **norms)

    def inputs(self, observation: Observation, instructions: Sequence[str] | None = None) -> Stored:
        """The state as it came."""
        return {"state": looked_at(observation, "state", (self.config.state_size,), "policy soft").float()}

    def encode(self, actions: Tensor, inputs: Stored) -> Tensor:
        """What tanh makes them from; actions are cut to +-0.999 first."""
        return torch.atanh(actions.clamp(-_MOST, _MOST))

    def draw(self, inputs: Stored, noise: Tensor | None) -> Drawn:
        """See `Policy.draw`; differentiable, by way of the actions too (reparametrised).

        Without noise it is tanh of the mean, as is usual: the median of what is drawn, and not quite the likeliest.
        """
        made, logprobs = self.proposed(inputs, noise)
        return Drawn(torch.tanh(made), made, logprobs, None)

    def proposed(self, inputs: Stored, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """What critics are asked about: u and its log-probs, [N, C, A] each; `draw` without the actions themselves."""
        mean, log_std = self._heads(inputs)
        made = mean if noise is None else mean + log_std.exp() * normals(noise).view_as(mean)
        return made, _log_density(made, mean, log_std)

    def features(self, inputs: Stored) -> Tensor:
        """What `actor` looks at, float32 [N, ...]."""
        return inputs["state"]

    def score(self, stored: Stored) -> Evaluated:
        """See `Policy.score`. The entropy, H(N) + E log(1 - tanh(u)^2), is integrated by Gauss and Hermite's rule."""
        mean, log_std = self._heads(stored)
        places = mean[..., None] + log_std.exp()[..., None] * self.nodes
        entropy = log_std + (0.5 + _HALF_LOG_TAU) + (_log_slope(places) * self.shares).sum(-1)
        return Evaluated(_log_density(stored["actions"], mean, log_std), entropy, None)

    def value(self, observation: Observation, instructions: Sequence[str] | None = None) -> Tensor:
        """There is none: see `judged`."""
        raise ValueError("policy soft: its critics judge actions, so there is no value of an observation alone")

    def judged(self, inputs: Stored, made: Tensor) -> Any:
        """What the critics, or a copy of them, look at.

        Args:
            inputs: of `inputs`, N rows.
            made: actions before tanh, [N, C, A].

        Returns:
            float32 [N, S + C x A]; of other policies whatever their critics take.
        """
        return torch.cat([inputs["state"], torch.tanh(made).flatten(1)], 1)

    def _heads(self, inputs: Stored) -> tuple[Tensor, Tensor]:
        """Means and logarithms of standard deviations, [N, C, A] each; the same operations for drawing and scoring."""
        mean, spread = self.actor(self.features(inputs)).chunk(2, -1)
        low, high = _LOG_STD
        log_std = low + 0.5 * (high - low) * (torch.tanh(spread) + 1.0)  # bounded, with a slope everywhere
        shape = (-1, self.config.chunk, self.config.action_size)
        return mean.view(shape), log_std.view(shape)


def _log_density(u: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """log pi(tanh(u)), number by number."""
    return -0.5 * ((u - mean) * torch.exp(-log_std)).square() - log_std - _HALF_LOG_TAU - _log_slope(u)


def _log_slope(u: Tensor) -> Tensor:
    """log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2 u)), without the cancellation for large u."""
    return 2.0 * (math.log(2.0) - u - functional.softplus(-2.0 * u))
