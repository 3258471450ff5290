"""Policies that draw every number of an action from a normal distribution of its own.

The mean follows from what is seen, the standard deviation is a parameter. A policy on top says what its features are;
actor, critic and distribution are here. What is stored of an action is the number drawn, before it is cut to [-1, 1]:
its log-prob is that of the uncut number, so the surrogate's gradient needs no correction for the cut.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from rlinf.algos.advantages import Reduce
from rlinf.algos.validation import one_of
from rlinf.models.policy.base import Drawn, Evaluated, Observation, Policy, PolicyConfig, Stored
from rlinf.models.policy.layers import RunningNorm, perceptron
from rlinf.models.policy.noise import normals

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "silu": nn.SiLU}
_LOG_STD = (-5.0, 2.0)  # beyond, ratios of neighbouring policies are numbers without meaning, or actions are noise
_HALF_LOG_TAU = 0.5 * math.log(2.0 * math.pi)


@dataclass(frozen=True, slots=True, kw_only=True)
class GaussianConfig(PolicyConfig):
    """Of a policy with normal distributions."""

    hidden: tuple[int, ...] = (256, 256)
    """Widths of the hidden layers."""
    activation: Literal["tanh", "relu", "silu"] = "tanh"
    """Between layers."""
    shared: bool = False
    """Actor and critic share the hidden layers, or each has its own."""
    log_std: float = -0.5
    """Logarithm of the first standard deviation; actions reach from -1 to 1."""
    normalise: bool = True
    """Bring states to mean 0 and variance 1 by what was seen up to the last training step."""

    def __post_init__(self) -> None:
        PolicyConfig.__post_init__(self)  # super() does not work in a dataclass with slots
        one_of("policy", "activation", self.activation, ACTIVATIONS)
        if not self.hidden or min(self.hidden) < 1:
            raise ValueError(f"policy: hidden={list(self.hidden)} must be widths of at least one layer")
        if not _LOG_STD[0] <= self.log_std <= _LOG_STD[1]:
            raise ValueError(f"policy: log_std={self.log_std} must be between {_LOG_STD[0]:g} and {_LOG_STD[1]:g}")


class GaussianPolicy(Policy):
    """Actor, critic and distribution on top of features.

    Args:
        config: see `GaussianConfig`.
        features: width of what `features` returns.
        state_size: numbers in the observation's "state"; 0 if it is not looked at.
    """

    def __init__(self, config: GaussianConfig, features: int, state_size: int):
        super().__init__(config)
        numbers = config.chunk * config.action_size
        activation, hidden = ACTIVATIONS[config.activation], list(config.hidden)
        own: list[int] = [] if config.shared else hidden
        width = hidden[-1] if config.shared else features
        self.norm = RunningNorm(state_size) if config.normalise and state_size else None
        self.trunk = perceptron(features, hidden if config.shared else [], None, gain=1.0, activation=activation)
        # Means near 0 at first, whatever is seen: exploration is the standard deviation's.
        self.actor = perceptron(width, own, numbers, gain=0.01, activation=activation)
        self.log_std = nn.Parameter(torch.full((config.chunk, config.action_size), float(config.log_std)))
        self.critic: nn.Module | None = None
        if config.value_level is not None:
            outputs = config.chunk if config.value_level == "action" else 1
            # All values 0 at first: until it has learned something, a critic should not make advantages worse.
            self.critic = perceptron(width, own, outputs, gain=0.0, activation=activation)

    @abstractmethod
    def features(self, inputs: Stored) -> Tensor:
        """What is seen, for actor and critic, float32 [N, features]."""

    def encode(self, actions: Tensor) -> Tensor:
        """The numbers themselves."""
        return actions

    def draw(self, inputs: Stored, noise: Tensor | None) -> Drawn:
        """See `Policy.draw`."""
        mean, values = self._heads(inputs)
        log_std = self._log_std()
        drawn = mean if noise is None else mean + log_std.exp() * normals(noise).view_as(mean)
        return Drawn(drawn.clamp(-1.0, 1.0), drawn, _log_density(drawn, mean, log_std), values)

    def score(self, stored: Stored) -> Evaluated:
        """See `Policy.score`."""
        mean, values = self._heads(stored)
        log_std = self._log_std()
        # 1/2 log(2 pi e sigma^2), whatever is seen
        entropy = (log_std + (0.5 + _HALF_LOG_TAU)).expand_as(mean)
        return Evaluated(_log_density(stored["actions"], mean, log_std), entropy, values)

    @torch.no_grad()
    def value(self, observation: Observation, instructions: Sequence[str] | None = None) -> Tensor:
        """See `Policy.value`."""
        found = self._values(self.trunk(self.features(self.inputs(observation, instructions))))
        if found is None:
            raise ValueError("policy: value_level is null, so there is no critic to ask for values")
        return found if found.ndim == 1 else found[:, 0]

    def adapt(self, stored: Stored, mask: Tensor | None = None, reduce: Reduce | None = None) -> None:
        """Take the states of this step into the running scale."""
        if self.norm is not None:
            self.norm.update(stored["state"], mask, reduce)

    def scaled(self, state: Tensor) -> Tensor:
        """The state at a scale that layers like, float32 [N, state_size]."""
        return state if self.norm is None else self.norm(state)

    def _heads(self, inputs: Stored) -> tuple[Tensor, Tensor | None]:
        """Means [N, C, A] and values, by the same operations for drawing and for scoring, so equal to the last bit."""
        hidden = self.trunk(self.features(inputs))
        mean: Tensor = self.actor(hidden).view(-1, self.config.chunk, self.config.action_size)
        return mean, self._values(hidden)

    def _values(self, hidden: Tensor) -> Tensor | None:
        if self.critic is None:
            return None
        values: Tensor = self.critic(hidden)
        return values if self.config.value_level == "action" else values[:, 0]

    def _log_std(self) -> Tensor:
        return self.log_std.clamp(*_LOG_STD)


def _log_density(x: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """log N(x; mean, sigma^2) = -((x - mean) / sigma)^2 / 2 - log sigma - log(2 pi) / 2"""
    away = (x - mean) * torch.exp(-log_std)
    return torch.addcmul(-_HALF_LOG_TAU - log_std, away, away, value=-0.5)  # the constants once, not row by row
