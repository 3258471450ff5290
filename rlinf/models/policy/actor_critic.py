"""Actor-critic policies on states (`MlpPolicy`) and pictures (`CnnPolicy`), and the distributions of their actions.

A policy on top says what its features are; actor, critic and distribution are here. Real numbers are drawn from normal
distributions, whose standard deviation is a parameter that does not depend on the state; choices among a few from
categorical ones. Draws, from uniform numbers, their log-probs and entropies are all [N, C, A], by the same operations
for drawing and for scoring. "made" is an action in the policy's own terms, which trainers store; `actions` turns it
into numbers for the environment.

Layers are perceptrons with orthogonal first weights, for pictures behind convolutions. The running scale of states is
buffers, so it is saved and published with the weights. It changes in `update` alone, never by being used: within an
update of the weights it stands still.

The memory of an episode is a gated recurrent unit. Memories travel with observations: a policy returns its memory with
a decision, the environments' actor shows it again with the next observation, and forgets it where an episode ended. So
nobody else has to know of it, checkpoints of environments have it, and a trainer finds it with the rows that it learns
from.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn

from rlinf.algos.advantages import Reduce
from rlinf.algos.loss_sum import one_of
from rlinf.models.policy.base import Drawn, Evaluated, Observation, Policy, PolicyConfig, Stored, looked_at, normals

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)
T = TypeVar("T")

GAIN = math.sqrt(2.0)
"""Gain of hidden layers (Saxe et al., arXiv:1312.6120; usual in PPO, arXiv:2005.12729 section 3)."""

_LEAST_VARIANCE = 1e-8  # a number that never varies is centred, and divided by 1e-4 at the most


def linear(inputs: int, outputs: int, gain: float = GAIN) -> nn.Linear:
    """A layer with orthogonal weights of that gain, and no offset."""
    return orthogonal(nn.Linear(inputs, outputs), gain)


def orthogonal(layer: Layer, gain: float = GAIN) -> Layer:
    """The layer, started with orthogonal weights of that gain, and no offset."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def perceptron(
    inputs: int, hidden: Sequence[int], outputs: int | None, *, gain: float, activation: Callable[[], nn.Module]
) -> nn.Sequential:
    """Layers of `hidden` units, each followed by the activation.

    Args:
        inputs: width of what comes in.
        hidden: widths of the hidden layers.
        outputs: width of a last layer without activation; None for none.
        gain: of the last layer's first weights; 0 starts it as the constant 0.
        activation: makes one.
    """
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [linear(inputs, width), activation()]
        inputs = width
    if outputs is not None:
        layers.append(linear(inputs, outputs, gain))
    return Layers(*layers)


class Layers(nn.Sequential):
    """Layers one after the other. Plain linear ones are computed without calling them as modules, which takes as long
    as they do on a few rows."""

    def forward(self, x: Tensor) -> Tensor:
        """The last layer's output."""
        for layer in self._modules.values():
            if type(layer) is nn.Linear and not (layer._forward_hooks or layer._forward_pre_hooks):
                own: dict[str, Any] = layer._parameters  # a module's attribute takes as long as a small operation
                x = nn.functional.linear(x, own["weight"], own["bias"])
            elif type(layer) is nn.Tanh and not layer._forward_hooks:
                x = x.tanh()
            else:
                x = layer(x)
        return x


class Exact(nn.Module):
    """A module whose buffers keep their dtype when the model around it is computed in another one."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:  # what `to`, `half`, `cuda` call
        def moved(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            return result if result.dtype == tensor.dtype else tensor.to(result.device)

        return super()._apply(moved, recurse)


class Derived:
    """A value that follows from some tensors, computed once for as long as nobody replaces them or writes to them."""

    def __init__(self) -> None:
        self._of: list[tuple[Tensor, int]] = []
        self._value: Any = None

    def of(self, tensors: Sequence[Tensor], compute: Callable[[], T]) -> T:
        """The value as it is by now.

        Args:
            tensors: from which it follows.
            compute: makes it.
        """
        alike = len(self._of) == len(tensors) and all(
            before is now and version == now._version for (before, version), now in zip(self._of, tensors, strict=True)
        )
        if not alike:
            self._of, self._value = [(each, each._version) for each in tensors], compute()
        value: T = self._value
        return value


class RunningNorm(Exact):
    """(x - mean) / sqrt(max(variance, 1e-8)), cut off at +-limit. Before the first update: x, cut off.

    Args:
        size: numbers in a row.
        limit: what the result is cut off at; a constant that jumps for the first time would else be enormous.
    """

    count: Tensor
    """Rows seen, float64 []."""
    mean: Tensor
    """Mean of each number, float64 [size]."""
    squares: Tensor
    """Sum of squared distances from the mean, float64 [size]."""

    def __init__(self, size: int, limit: float = 10.0):
        super().__init__()
        self.limit = limit
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("squares", torch.zeros(size, dtype=torch.float64))
        self._scale = Derived()

    def forward(self, x: Tensor) -> Tensor:
        """Normalise rows, float32 [N, size]."""
        scale = self._scale.of(self.statistics, lambda: self.variance.clamp(min=_LEAST_VARIANCE).rsqrt())
        return ((x - self.mean.to(x.dtype)) * scale.to(x.dtype)).clamp(-self.limit, self.limit)

    @property
    def statistics(self) -> tuple[Tensor, Tensor, Tensor]:
        """All that it knows: `count`, `mean` and `squares`."""
        return self.count, self.mean, self.squares

    @property
    def variance(self) -> Tensor:
        """Variance of each number, float64 [size]; 1 before the first update."""
        return torch.where(self.count > 0, self.squares / self.count.clamp(min=1.0), 1.0)

    @torch.no_grad()
    def update(self, x: Tensor, mask: Tensor | None = None, reduce: Reduce | None = None) -> None:
        """Take more rows in (Chan, Golub and LeVeque, 1979: sums about the old mean, moved to the new one).

        Args:
            x: [N, size].
            mask: which rows count, bool [N]; None for all.
            reduce: adds a float64 tensor of sums up over ranks; None if this is all. Ranks that hold the same
                statistics before hold the same ones after.
        """
        rows = (x if mask is None else x[mask.bool()]).double() - self.mean
        sums = torch.cat([rows.new_tensor([len(rows)]), rows.sum(0), rows.square().sum(0)])
        sums = sums if reduce is None else reduce(sums)
        count, total, squares = sums[0], *sums[1:].chunk(2)
        if count == 0:
            return
        # Old rows have sum 0 about the old mean; so do all together about the new one, `shift` further on.
        everything = self.count + count
        shift = total / everything
        self.squares += squares - everything * shift.square()
        self.squares.clamp_(min=0.0)  # rounding
        self.mean += shift
        self.count.copy_(everything)


_HALF_LOG_TAU = 0.5 * math.log(2.0 * math.pi)
_IMPOSSIBLE = -1e9
"""Logit of a choice that a number does not have: its probability is exactly 0, and 0 times it is no NaN."""


class Distribution(ABC):
    """Independent distributions of all numbers in N chunks of actions."""

    @abstractmethod
    def likeliest(self) -> Tensor:
        """The mode of the distribution, [N, C, A]: what `drawn` returns most often."""

    @abstractmethod
    def sample(self, noise: Tensor) -> Tensor:
        """Draw from uniform numbers in [0, 1), float64 [N, C x A]; [N, C, A]."""

    @abstractmethod
    def actions(self, sample: Tensor) -> Tensor:
        """Drawn actions as numbers for the environment, in [-1, 1], float32 [N, C, A]."""

    @abstractmethod
    def logprobs(self, sample: Tensor) -> Tensor:
        """Log-prob or log-density of each number that was drawn, nats, [N, C, A]."""

    @abstractmethod
    def entropy(self) -> Tensor:
        """Entropy of each number's distribution, nats, [N, C, A]."""


class Normal(Distribution):
    """Normal distributions. A draw is cut to [-1, 1] for the environment alone: its density is that of the uncut
    number, so the surrogate's gradient needs no correction for the cut.

    Args:
        mean: [N, C, A].
        log_std: logarithm of the standard deviations, [C, A].
    """

    def __init__(self, mean: Tensor, log_std: Tensor):
        self._mean, self._log_std = mean, log_std

    def likeliest(self) -> Tensor:
        return self._mean

    def sample(self, noise: Tensor) -> Tensor:
        return self._mean + self._log_std.exp() * normals(noise).view_as(self._mean)

    def actions(self, sample: Tensor) -> Tensor:
        return sample.clamp(-1.0, 1.0)

    def logprobs(self, sample: Tensor) -> Tensor:
        """log N(x; mean, sigma^2) = -((x - mean) / sigma)^2 / 2 - log sigma - log(2 pi) / 2"""
        away = (sample - self._mean) * torch.exp(-self._log_std)
        return torch.addcmul(-_HALF_LOG_TAU - self._log_std, away, away, value=-0.5)  # the constants once, not by row

    def entropy(self) -> Tensor:
        """1/2 log(2 pi e sigma^2), whatever is seen."""
        return (self._log_std + (0.5 + _HALF_LOG_TAU)).expand_as(self._mean)


class Categorical(Distribution):
    """A choice for each number of an action: choice k of n is the number (2 k + 1) / n - 1, the middle of the k-th of n
    equal parts of [-1, 1].

    Args:
        logits: [N, C, A, K], K being the largest n; those of choices that a number does not have are not looked at.
        counts: n of each number, int64 [A].
        even: all have K choices.
    """

    def __init__(self, logits: Tensor, counts: Tensor, *, even: bool = False):
        if not even:
            there = torch.arange(logits.shape[-1], device=logits.device) < counts[:, None]
            logits = torch.where(there, logits, _IMPOSSIBLE)
        self._log = logits.log_softmax(-1)
        self._counts, self._even = counts, even

    def likeliest(self) -> Tensor:
        return self._log.argmax(-1)

    def sample(self, noise: Tensor) -> Tensor:
        """By the inverse of the distribution function: the choice below which the probabilities sum up to the noise."""
        sums = self._log.double().exp().cumsum(-1)
        below = (sums <= noise.view(sums.shape[:-1])[..., None]).sum(-1)
        last = sums.shape[-1] - 1 if self._even else self._counts - 1
        return below.clamp(max=last)  # where rounding leaves the whole sum below 1

    def actions(self, sample: Tensor) -> Tensor:
        if self._even:
            return _middles(self._log.shape[-1], sample.device).take(sample)
        return (2 * sample + 1) / self._counts - 1.0

    def logprobs(self, sample: Tensor) -> Tensor:
        return self._log.gather(-1, sample[..., None]).squeeze(-1)

    def entropy(self) -> Tensor:
        return -(self._log.exp() * self._log).sum(-1)


@lru_cache
def _middles(count: int, device: torch.device) -> Tensor:
    """The number of each of so many choices, see `Categorical`, float32 [count]."""
    return (2 * torch.arange(count, device=device) + 1) / torch.tensor(count, device=device) - 1.0


def chosen(actions: Tensor, counts: Tensor) -> Tensor:
    """The choices that numbers stand for, the inverse of `Categorical.actions`, int64.

    Args:
        actions: in [-1, 1], [..., A].
        counts: choices of each number, int64 [A].
    """
    parts = torch.floor((actions.double() + 1.0) / 2.0 * counts).long()
    return torch.minimum(parts.clamp(min=0), counts - 1)


def check_choices(choices: Sequence[int], action_size: int) -> None:
    """Check the counts of choices.

    Raises:
        ValueError: there are not as many as numbers in an action, or one is less than 1.
    """
    if len(choices) != action_size or min(choices, default=1) < 1:
        raise ValueError(
            f"policy: choices={list(choices)} must say for each of the action_size={action_size} numbers of an action "
            f"how many choices it has, at least 1"
        )


MEMORY = "memory"
"""Name in observations and stored rows, float32 [N, M + 1]: M numbers, and how many decisions of its episode they are
of. Nothing is remembered where that count is 0, as at the beginning, where it may be missing altogether."""


class Memory(nn.Module):
    """h_t = GRU(x_t, h_{t-1}) (Cho et al., arXiv:1406.1078), where h is 0 when an episode begins.

    Args:
        features: width of x.
        units: width of h, M.
    """

    def __init__(self, features: int, units: int):
        super().__init__()
        self.units = units
        self.cell = nn.GRUCell(features, units)
        nn.init.orthogonal_(self.cell.weight_ih)
        nn.init.orthogonal_(self.cell.weight_hh)
        nn.init.zeros_(self.cell.bias_ih)
        nn.init.zeros_(self.cell.bias_hh)

    def forward(self, x: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """One decision.

        Args:
            x: float32 [N, features].
            before: what was remembered, [N, M + 1].

        Returns:
            h, [N, M]; what is remembered now, [N, M + 1].
        """
        count = before[:, -1:]
        h = self.cell(x, torch.where(count > 0, before[:, :-1], 0.0))
        return h, torch.cat([h, count + 1.0], 1)

    def along(self, x: Tensor, before: Tensor) -> Tensor:
        """Several decisions in a row, from what was remembered at the first: gradients go back that far.

        Args:
            x: float32 [B, L, features].
            before: what was remembered at each when it was decided, [B, L, M + 1]; of all but the first only the counts
                are looked at, to begin anew where an episode began.

        Returns:
            h after each, [B, L, M].
        """
        outputs = []
        remembered = before[:, 0]
        for time in range(x.shape[1]):
            remembered = torch.cat([remembered[:, :-1], before[:, time, -1:]], 1)
            h, remembered = self(x[:, time], remembered)
            outputs.append(h)
        return torch.stack(outputs, 1)

    def shown(self, observation: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """The memory that comes with an observation of N rows, like `like`; nothing where there is none."""
        state = observation.get(MEMORY)
        return (
            like.new_zeros(len(like), self.units + 1, dtype=torch.float32) if state is None else state.to(like.device)
        )


ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "silu": nn.SiLU}
_LOG_STD = (-5.0, 2.0)  # beyond, ratios of neighbouring policies are numbers without meaning, or actions are noise

_LEAST_SPREAD = 1e-4  # of returns; a critic of returns that hardly differ is to stay as it is


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorCriticConfig(PolicyConfig):
    """Configuration of a policy of an actor and a critic."""

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
        self._scale = Derived()
        if config.value_level is not None:
            levels = config.chunk if config.value_level == "action" else 1
            # All values 0 at first: until it has learned something, a critic should not make advantages worse.
            self.critic = perceptron(width, own, levels, gain=0.0, activation=activation)

    @abstractmethod
    def features(self, inputs: Stored) -> Tensor:
        """Features of the observation, for actor and critic, float32 [N, features]."""

    def encode(self, actions: Tensor, inputs: Stored) -> Tensor:
        """The numbers themselves, or the choices that they stand for."""
        return actions if self.config.choices is None else chosen(actions, self.counts)

    def draw(self, inputs: Stored, noise: Tensor | None) -> Drawn:
        """See `Policy.draw`."""
        hidden, memory = self._hidden(inputs)
        distribution, values = self._heads(hidden)
        sample = distribution.likeliest() if noise is None else distribution.sample(noise)
        return Drawn(distribution.actions(sample), sample, distribution.logprobs(sample), values, memory=memory)

    def score(self, stored: Stored) -> Evaluated:
        """See `Policy.score`."""
        if self.memory is None or stored[MEMORY].ndim == 2:
            hidden, actions = self._hidden(stored)[0], stored["actions"]
        else:  # sequences of decisions, [B, L, ...]
            rows = {name: each.flatten(0, 1) for name, each in stored.items()}
            features = self.features(rows).unflatten(0, stored[MEMORY].shape[:2])
            hidden, actions = self.trunk(self.memory.along(features, stored[MEMORY]).flatten(0, 1)), rows["actions"]
        distribution, values = self._heads(hidden)
        return Evaluated(distribution.logprobs(actions), distribution.entropy(), values)

    @torch.no_grad()
    def value(self, observation: Observation, instructions: Sequence[str] | None = None) -> Tensor:
        """See `Policy.value`."""
        values = self._values(self._hidden(self.inputs(observation, instructions))[0])
        if values is None:
            raise ValueError("policy: value_level is null, so there is no critic to ask for values")
        return values if values.ndim == 1 else values[:, 0]

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
        returns = self.returns
        assert returns is not None
        return self._scale.of(
            returns.statistics,
            lambda: (returns.mean[0].float(), returns.variance[0].clamp(min=_LEAST_SPREAD).sqrt().float()),
        )

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

    def looked(self, inputs: Stored, observation: Observation) -> Stored:
        """Add the policy's memory, where it has one, to the stored part of an observation."""
        if self.memory is None:
            return inputs
        return {**inputs, MEMORY: self.memory.shown(observation, next(iter(inputs.values())))}

    def _hidden(self, inputs: Stored) -> tuple[Tensor, Tensor | None]:
        """Hidden layers that actor and critic share, [N, width], and what is remembered behind a decision."""
        features = self.features(inputs)
        if self.memory is None:
            return self.trunk(features), None
        remembered, memory = self.memory(features, inputs[MEMORY])
        return self.trunk(remembered), memory

    def _heads(self, hidden: Tensor) -> tuple[Distribution, Tensor | None]:
        """Distributions [N, C, A] and values, by the same operations for drawing and for scoring, so equal to the last
        bit."""
        config, output = self.config, self.actor(hidden)
        if config.choices is None:
            mean = output.view(-1, config.chunk, config.action_size)
            return Normal(mean, self.log_std.clamp(*_LOG_STD)), self._values(hidden)
        logits = output.view(-1, config.chunk, config.action_size, max(config.choices))
        return Categorical(logits, self.counts, even=len(set(config.choices)) == 1), self._values(hidden)

    def _values(self, hidden: Tensor) -> Tensor | None:
        if self.critic is None:
            return None
        values: Tensor = self.critic(hidden)
        if self.returns is not None:
            mean, scale = self._scale_of_returns()
            values = mean + scale * values
        return values if self.config.value_level == "action" else values[:, 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpConfig(ActorCriticConfig):
    """Configuration of `MlpPolicy`."""

    state_size: int
    """Numbers in the observation's "state", S."""


class MlpPolicy(ActorCritic):
    """Looks at "state", float32 [N, S]."""

    Config: ClassVar[type[PolicyConfig]] = MlpConfig

    def __init__(self, config: MlpConfig):
        if config.state_size < 1:
            raise ValueError(f"policy mlp: state_size={config.state_size} must be at least 1")
        super().__init__(config, features=config.state_size, state_size=config.state_size)

    def inputs(self, observation: Observation, instructions: Sequence[str] | None = None) -> Stored:
        """The state as it came."""
        state = looked_at(observation, "state", (self.config.state_size,), "policy mlp").float()
        return self.looked({"state": state}, observation)

    def features(self, inputs: Stored) -> Tensor:
        """The state at the running scale."""
        return self.scaled(inputs["state"])


@dataclass(frozen=True, slots=True, kw_only=True)
class CnnConfig(ActorCriticConfig):
    """Configuration of `CnnPolicy`."""

    image: tuple[int, int, int]
    """Height, width and channels of the observation's "rgb": 3 for one camera, 6 for two."""
    state_size: int = 0
    """Numbers in the observation's "state"; 0 does not look at it."""
    channels: tuple[int, ...] = (16, 32, 64)
    """Channels of the convolutions; each halves height and width."""
    picture_features: int = 128
    """Numbers that a picture comes down to."""
    activation: Literal["tanh", "relu", "silu"] = "relu"
    """Between layers."""


class CnnPolicy(ActorCritic):
    """Looks at "rgb", uint8 [N, H, W, 3 k], and at "state", float32 [N, S], if `state_size` is not 0.

    The convolutions serve actor and critic alike, also where `shared` gives each its own hidden layers.
    """

    Config: ClassVar[type[PolicyConfig]] = CnnConfig

    def __init__(self, config: CnnConfig):
        height, width, channels = config.image
        least = 2 ** len(config.channels)
        if min(height, width) < least or channels < 1 or not config.channels:
            raise ValueError(
                f"policy cnn: image={list(config.image)} must be at least {least} pixels high and wide, since each of "
                f"the {len(config.channels)} convolutions (channels={list(config.channels)}) halves it"
            )
        super().__init__(config, features=config.picture_features + config.state_size, state_size=config.state_size)
        layers: list[nn.Module] = []
        for outputs in config.channels:
            layers += [orthogonal(nn.Conv2d(channels, outputs, kernel_size=3, stride=2, padding=1)), nn.ReLU()]
            channels, height, width = outputs, -(-height // 2), -(-width // 2)
        flat = channels * height * width
        self.eyes = nn.Sequential(*layers, nn.Flatten(), linear(flat, config.picture_features), nn.ReLU())

    def inputs(self, observation: Observation, instructions: Sequence[str] | None = None) -> Stored:
        """Pictures as bytes, a quarter of their size as numbers; the state as it came."""
        stored = {"rgb": looked_at(observation, "rgb", self.config.image, "policy cnn")}
        if self.config.state_size:
            stored["state"] = looked_at(observation, "state", (self.config.state_size,), "policy cnn").float()
        return self.looked(stored, observation)

    def features(self, inputs: Stored) -> Tensor:
        """Features of the picture, beside the state at the running scale."""
        hidden: Tensor = self.eyes(inputs["rgb"].movedim(-1, 1).float() / 127.5 - 1.0)
        return torch.cat([hidden, self.scaled(inputs["state"])], 1) if self.config.state_size else hidden
