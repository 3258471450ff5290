"""Policies of an actor and a critic on top of features: the actor says what each number of an action is drawn from.

A policy on top says what its features are; actor, critic and distribution are here. Real numbers are drawn from normal
distributions, whose standard deviation is a parameter; choices from categorical ones (`distributions.py`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rlinf.algos.advantages import Reduce
from rlinf.algos.validation import one_of
from rlinf.models.policy.base import Drawn, Evaluated, Observation, Policy, PolicyConfig, Stored
from rlinf.models.policy.layers import RunningNorm, perceptron
from rlinf.models.policy.parts.distributions import Categorical, Distribution, Normal, check_choices, chosen
from rlinf.models.policy.parts.memory import MEMORY, Memory

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "silu": nn.SiLU}
_LOG_STD = (-5.0, 2.0)  # beyond, ratios of neighbouring policies are numbers without meaning, or actions are noise

_LEAST_VARIANCE = 1e-4  # of returns; a critic of returns that hardly differ is to stay as it is


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorCriticConfig(PolicyConfig):
    """Of a policy of an actor and a critic."""

    hidden: tuple[int, ...] = (256, 256)
    """Widths of the hidden layers."""
    activation: Literal["tanh", "relu", "silu"] = "tanh"
    """Between layers."""
    shared: bool = False
    """Actor and critic share the hidden layers, or each has its own."""
    log_std: float = -0.5
    """Logarithm of the first standard deviation; actions reach from -1 to 1. Choices have none."""
    normalise_values: bool = False
    """The critic predicts returns of mean 0 and variance 1 by what was seen (PopArt, arXiv:1602.07714), so that the
    scale of rewards does not matter to it."""
    memory: int = 0
    """Numbers that are remembered of an episode from one decision to the next, by a gated recurrent unit between
    features and hidden layers; 0 remembers nothing."""
    sequence: int = 16
    """Decisions in a row that gradients go back through where there is a memory; it divides policy.horizon."""
    choices: tuple[int, ...] | None = None
    """How many choices each number of an action stands for, A of them; null where numbers are real. The environment
    says it."""
    normalise: bool = True
    """Bring states to mean 0 and variance 1 by what was seen up to the last training step."""

    def __post_init__(self) -> None:
        PolicyConfig.__post_init__(self)  # super() does not work in a dataclass with slots
        one_of("policy", "activation", self.activation, ACTIVATIONS)
        if not self.hidden or min(self.hidden) < 1:
            raise ValueError(f"policy: hidden={list(self.hidden)} must be widths of at least one layer")
        if not _LOG_STD[0] <= self.log_std <= _LOG_STD[1]:
            raise ValueError(f"policy: log_std={self.log_std} must be between {_LOG_STD[0]:g} and {_LOG_STD[1]:g}")
        if self.memory < 0 or self.sequence < 1:
            raise ValueError(f"policy: memory={self.memory} must be at least 0 and sequence={self.sequence} at least 1")
        if self.choices is not None:
            check_choices(self.choices, self.action_size)


class ActorCritic(Policy):
    """Actor, critic and distribution on top of features.

    Args:
        config: see `ActorCriticConfig`.
        features: width of what `features` returns.
        state_size: numbers in the observation's "state"; 0 if it is not looked at.
    """

    counts: Tensor
    """Choices of each number, int64 [A]."""

    def __init__(self, config: ActorCriticConfig, features: int, state_size: int):
        super().__init__(config)
        outputs = config.chunk * config.action_size * (1 if config.choices is None else max(config.choices))
        activation, hidden = ACTIVATIONS[config.activation], list(config.hidden)
        own: list[int] = [] if config.shared else hidden
        self.memory = Memory(features, config.memory) if config.memory else None
        features = config.memory or features
        width = hidden[-1] if config.shared else features
        self.norm = RunningNorm(state_size) if config.normalise and state_size else None
        self.trunk = perceptron(features, hidden if config.shared else [], None, gain=1.0, activation=activation)
        # Means near 0 at first, or equal choices, whatever is seen: exploration is the distribution's.
        self.actor = perceptron(width, own, outputs, gain=0.01, activation=activation)
        if config.choices is None:
            self.log_std = nn.Parameter(torch.full((config.chunk, config.action_size), float(config.log_std)))
        else:  # not saved: the configuration says it
            self.register_buffer("counts", torch.tensor(config.choices), persistent=False)
        self.critic: nn.Sequential | None = None
        self.returns = RunningNorm(1) if config.normalise_values and config.value_level is not None else None
        if config.value_level is not None:
            levels = config.chunk if config.value_level == "action" else 1
            # All values 0 at first: until it has learned something, a critic should not make advantages worse.
            self.critic = perceptron(width, own, levels, gain=0.0, activation=activation)

    @abstractmethod
    def features(self, inputs: Stored) -> Tensor:
        """What is seen, for actor and critic, float32 [N, features]."""

    def encode(self, actions: Tensor, inputs: Stored) -> Tensor:
        """The numbers themselves, or the choices that they stand for."""
        return actions if self.config.choices is None else chosen(actions, self.counts)

    def draw(self, inputs: Stored, noise: Tensor | None) -> Drawn:
        """See `Policy.draw`."""
        hidden, memory = self._hidden(inputs)
        found, values = self._heads(hidden)
        made = found.likeliest() if noise is None else found.drawn(noise)
        return Drawn(found.actions(made), made, found.logprobs(made), values, memory=memory)

    def score(self, stored: Stored) -> Evaluated:
        """See `Policy.score`."""
        if self.memory is None or stored[MEMORY].ndim == 2:
            hidden, actions = self._hidden(stored)[0], stored["actions"]
        else:  # sequences of decisions, [B, L, ...]
            rows = {name: each.flatten(0, 1) for name, each in stored.items()}
            seen = self.features(rows).unflatten(0, stored[MEMORY].shape[:2])
            hidden, actions = self.trunk(self.memory.along(seen, stored[MEMORY]).flatten(0, 1)), rows["actions"]
        found, values = self._heads(hidden)
        return Evaluated(found.logprobs(actions), found.entropy(), values)

    @torch.no_grad()
    def value(self, observation: Observation, instructions: Sequence[str] | None = None) -> Tensor:
        """See `Policy.value`."""
        found = self._values(self._hidden(self.inputs(observation, instructions))[0])
        if found is None:
            raise ValueError("policy: value_level is null, so there is no critic to ask for values")
        return found if found.ndim == 1 else found[:, 0]

    def adapt(self, stored: Stored, mask: Tensor | None = None, reduce: Reduce | None = None) -> None:
        """Take the states of this step into the running scale."""
        if self.norm is not None:
            self.norm.update(stored["state"], mask, reduce)

    @torch.no_grad()
    def adapt_values(self, returns: Tensor) -> None:
        """Take returns into the running scale, and move the critic's last layer against it (arXiv:1602.07714, eq. 9 and
        10), with which w' = w s / s' and b' = (s b + m - m') / s'."""
        if self.returns is None or self.critic is None:
            return
        before = self._scale_of_returns()
        self.returns.update(returns[:, None])
        (mean, scale), (new_mean, new_scale) = before, self._scale_of_returns()
        last: Any = self.critic[-1]
        last.weight.mul_(scale / new_scale)
        last.bias.copy_((scale * last.bias + mean - new_mean) / new_scale)

    @property
    def value_scale(self) -> Tensor | float:
        """The standard deviation of returns, where values are normalised."""
        return 1.0 if self.returns is None else self._scale_of_returns()[1]

    def _scale_of_returns(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation, float32 []."""
        assert self.returns is not None
        return self.returns.mean[0].float(), self.returns.variance[0].clamp(min=_LEAST_VARIANCE).sqrt().float()

    def scaled(self, state: Tensor) -> Tensor:
        """The state at a scale that layers like, float32 [N, state_size]."""
        return state if self.norm is None else self.norm(state)

    def demonstrated(
        self, observation: Observation, actions: Tensor, instructions: Sequence[str] | None = None
    ) -> Stored:
        """See `Policy.demonstrated`; a policy with a memory cannot tell what it would have remembered."""
        if self.memory is not None:
            raise ValueError(
                "policy: memory is set, and demonstrations are learned from decision by decision: leave it out"
            )
        return super().demonstrated(observation, actions, instructions)

    @property
    def sequence(self) -> int:
        """See `Policy.sequence`."""
        return 1 if self.memory is None else int(self.config.sequence)

    def looked(self, found: Stored, observation: Observation) -> Stored:
        """What is kept of an observation, with what is remembered."""
        if self.memory is None:
            return found
        return {**found, MEMORY: self.memory.shown(observation, next(iter(found.values())))}

    def _hidden(self, inputs: Stored) -> tuple[Tensor, Tensor | None]:
        """Hidden layers that actor and critic share, [N, width], and what is remembered behind a decision."""
        seen = self.features(inputs)
        if self.memory is None:
            return self.trunk(seen), None
        remembered, memory = self.memory(seen, inputs[MEMORY])
        return self.trunk(remembered), memory

    def _heads(self, hidden: Tensor) -> tuple[Distribution, Tensor | None]:
        """Distributions [N, C, A] and values, by the same operations for drawing and for scoring, so equal to the last
        bit."""
        config, said = self.config, self.actor(hidden)
        if config.choices is None:
            mean = said.view(-1, config.chunk, config.action_size)
            return Normal(mean, self.log_std.clamp(*_LOG_STD)), self._values(hidden)
        logits = said.view(-1, config.chunk, config.action_size, max(config.choices))
        return Categorical(logits, self.counts), self._values(hidden)

    def _values(self, hidden: Tensor) -> Tensor | None:
        if self.critic is None:
            return None
        values: Tensor = self.critic(hidden)
        if self.returns is not None:
            mean, scale = self._scale_of_returns()
            values = mean + scale * values
        return values if self.config.value_level == "action" else values[:, 0]
