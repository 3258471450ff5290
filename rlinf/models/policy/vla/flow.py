"""Denoising as a stochastic policy: the chain of K steps from noise to actions, its log-probs and entropy.

A velocity field v(x, t) and random numbers give a `Chain`, whose log-probs `rescore` computes again with gradient.
Time t runs from 1 (noise) to 0 (actions) as in openpi, with x_t = t noise + (1 - t) actions and v = noise - actions; a
field of the opposite convention passes through `mirrored`. A step of d = 1/K from t first predicts both ends,

    actions = x - v t        noise = x + v (1 - t)

and then goes to N(w0 actions + w1 noise, std^2), with w0 = 1 - (t - d) and

    ODE         w1 = t - d                     std = 0
    flow_sde    w1 = t - d - s^2 d / (2 t)     std = s sqrt(d), s = a sqrt(t / (1 - t)); at t = 1, 1 - t is d
    flow_cps    w1 = (t - d) cos(a pi / 2)     std = (t - d) sin(a pi / 2)
    flow_noise  w1 = t - d                     std from a network

(pi_RL, arXiv:2510.25889, section 4; flow_cps: arXiv:2509.05952). With flow_noise every step draws, and the log-prob is
the mean over the start and all steps. With the others one step draws, another one for each row, the rest are ODE steps,
and the log-prob is that of the step alone. Which step it is follows from the row's own random numbers: a row does not
depend on the batch that it is in. The published code takes one step for the whole batch; each row's law is the same.

`FlowPolicy` has what these policies share: drawing, scoring, imitation, and starts that another policy chooses. A
policy on top says what it computes once for an observation (`context`), its velocity field, how denoised numbers become
the environment's actions, and what its critic looks at. What is stored of a decision is the whole chain, "actions"
float32 [N, K + 1, H, D], and which step drew, "drew" int64 [N]. Of the H actions and D numbers that are denoised, the
first C and A are done and count in log-probs.

`MlpFlowPolicy` is a small one on the state alone, for toys, and as the policy that is steered (DSRL): a perceptron is
the velocity field, and the critic looks at the state, not at the chain.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor, nn

from rlinf.algos.advantages import Reduce
from rlinf.algos.loss_sum import LossSum
from rlinf.models.policy.actor_critic import RunningNorm, perceptron
from rlinf.models.policy.base import (
    Drawn,
    Evaluated,
    Generator,
    Level,
    Observation,
    Policy,
    PolicyConfig,
    Stored,
    looked_at,
    normals,
    uniforms,
)

Method = Literal["flow_sde", "flow_cps", "flow_noise"]
METHODS = ("flow_sde", "flow_cps", "flow_noise")
_HALF_LOG_TAU = 0.5 * math.log(2.0 * math.pi)


@dataclass(frozen=True, slots=True, eq=False)
class Field:
    """Output of a velocity network at one place x and time t of a chain."""

    velocity: Tensor
    """noise - actions, float32 [N, H, D]."""
    features: Tensor
    """Hidden states that the velocity is made from, [N, H, F]; heads for values and noise look at them."""


Velocity: TypeAlias = Callable[[Tensor, Tensor], Field]
"""Field of places [N, H, D] at times [N]."""
Deviation: TypeAlias = Callable[[Tensor], Tensor]
"""Standard deviations [N, H, D] of a step of flow_noise, from features [N, H, F]."""


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """Denoising steps that were done, and how likely what was drawn in them is."""

    states: Tensor
    """From noise to actions, [N, K + 1, H, D]."""
    drew: Tensor
    """Step that drew, int64 [N]; 0 for flow_noise, where all do."""
    logprobs: Tensor
    """Nats, [N, H, D]."""
    entropy: Tensor
    """Entropy of the distributions that were drawn from, nats, [N, H, D]."""
    features: Tensor
    """Features of the steps that drew, [N, 1 or K, H, F]."""


@dataclass(frozen=True, slots=True)
class Denoising:
    """Settings of a chain of denoising steps: method, steps and noise; see the table at the top of the module."""

    method: Method
    """Method of drawing."""
    steps: int
    """K, at least 1; flow_cps needs 2, since its last step never draws."""
    noise_level: float
    """a, which scales the noise of flow_sde and flow_cps."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"flow policy: method={self.method!r} must be one of {', '.join(METHODS)}")
        least = 2 if self.method == "flow_cps" else 1
        if self.steps < least:
            raise ValueError(f"flow policy: steps={self.steps} must be at least {least} for {self.method}")
        if self.method != "flow_noise" and not self.noise_level > 0.0:
            raise ValueError(f"flow policy: noise_level={self.noise_level} must be more than 0 for {self.method}")
        if self.method == "flow_cps" and not self.noise_level <= 1.0:
            raise ValueError(f"flow policy: noise_level={self.noise_level} must be at most 1 for flow_cps")

    @property
    def every(self) -> bool:
        """True if every step draws."""
        return self.method == "flow_noise"

    @property
    def can_draw(self) -> int:
        """The first so many steps can draw; the last one of flow_cps has a standard deviation of 0."""
        return self.steps - (self.method == "flow_cps")

    def normals(self, numbers: int) -> int:
        """Standard normal numbers that a chain of `numbers` = H x D needs for a row: its start, and what it draws."""
        return numbers * (1 + (self.steps if self.every else 1))

    def time(self, step: Tensor) -> Tensor:
        """t before steps, float32 in the shape of `step`."""
        return (self.steps - step).float() / self.steps

    def move(self, x: Tensor, velocity: Tensor, step: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of one step of each row; the latter without the network's part of flow_noise.

        Args:
            x: before it, [N, H, D].
            velocity: there, [N, H, D].
            step: which, int64 [N].
            draws: whether it is one that draws, or an ODE step, bool [N].

        Returns:
            Mean [N, H, D], standard deviation [N, 1, 1].
        """
        t, d = self.time(step), 1.0 / self.steps
        after = self.time(step + 1)
        to_noise, std = after, torch.zeros_like(t)
        if self.method == "flow_sde":
            s2 = self.noise_level**2 * t / torch.where(step == 0, torch.full_like(t, d), 1.0 - t)
            to_noise = torch.where(draws, after - s2 * d / (2.0 * t), after)
            std = torch.where(draws, (s2 * d).sqrt(), std)
        elif self.method == "flow_cps":
            angle = self.noise_level * math.pi / 2.0
            to_noise = torch.where(draws, after * math.cos(angle), after)
            std = torch.where(draws, after * math.sin(angle), std)
        t, after, to_noise, std = (each[:, None, None] for each in (t, after, to_noise, std))
        return (1.0 - after) * (x - velocity * t) + to_noise * (x + velocity * (1.0 - t)), std


def sample(
    velocity: Velocity, how: Denoising, start: Tensor, noise: Tensor, drew: Tensor, deviation: Deviation | None = None
) -> Chain:
    """Go from noise to actions, drawing on the way.

    Args:
        velocity: the field.
        how: the steps.
        start: noise, [N, H, D]; zeros for the likeliest.
        noise: standard normal numbers, [N, 1, H, D], for flow_noise [N, K, H, D]; zeros for the likeliest chain.
        drew: step that draws, from 0 to `how.can_draw` - 1, int64 [N]; -1 for none. Not read for flow_noise.
        deviation: of flow_noise.
    """
    x, states = start, [start]
    scores: list[tuple[Tensor, Tensor, Tensor]] = []
    for number in range(how.steps):
        step = torch.full_like(drew, number)
        draws = torch.ones_like(drew, dtype=torch.bool) if how.every else drew == step
        field = velocity(x, how.time(step))
        mean, std = how.move(x, field.velocity, step, draws)
        if deviation is not None:
            std = deviation(field.features)
        x = mean + std * noise[:, number if how.every else 0]
        states.append(x)
        likely = (*density(x, mean, std), field.features)
        if how.every or not scores:
            scores.append(likely)
        else:
            scores[0] = _either(draws, likely, scores[0])
    return _chain(how, torch.stack(states, 1), drew, scores)


def rescore(velocity: Velocity, how: Denoising, states: Tensor, drew: Tensor, deviation: Deviation | None) -> Chain:
    """Log-probs of a chain that was made, with gradient: one evaluation of the field, or K for flow_noise.

    Args:
        velocity, how, deviation: as for `sample`.
        states: the chain, [N, K + 1, H, D].
        drew: step that drew, int64 [N].
    """
    rows = torch.arange(len(states), device=states.device)
    scores = []
    for step in [torch.full_like(drew, number) for number in range(how.steps)] if how.every else [drew]:
        x = states[rows, step]
        field = velocity(x, how.time(step))
        mean, std = how.move(x, field.velocity, step, torch.ones_like(step, dtype=torch.bool))
        std = std if deviation is None else deviation(field.features)
        scores.append((*density(states[rows, step + 1], mean, std), field.features))
    return _chain(how, states, drew, scores)


def follow(velocity: Velocity, steps: int, start: Tensor) -> Tensor:
    """Actions that the ODE alone makes of a start: x <- x - v / K, K times.

    Args:
        velocity: the field.
        steps: K.
        start: noise, [N, H, D].
    """
    x = start
    for number in range(steps):
        t = torch.full((len(x),), (steps - number) / steps, device=x.device)
        x = x - velocity(x, t).velocity / steps
    return x


def mirrored(velocity: Velocity) -> Velocity:
    """The field in openpi's time of one in which t = 0 is noise, t = 1 is actions, and v = actions - noise (GR00T)."""

    def turned(x: Tensor, t: Tensor) -> Field:
        field = velocity(x, 1.0 - t)
        return Field(-field.velocity, field.features)

    return turned


def training_pair(actions: Tensor, noise: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sample a training pair of flow matching: a place on the way from noise to actions, its time, and the velocity
    there.

        t = 0.999 b + 0.001 with b ~ Beta(1.5, 1)        x = t noise + (1 - t) actions        v = noise - actions

    (arXiv:2410.24164, section 4 and appendix B). b is u^(2/3), the inverse of its distribution function u = b^1.5.

    Args:
        actions, noise: [N, H, D].
        uniform: u in [0, 1), [N].

    Returns:
        x [N, H, D], t [N], v [N, H, D].
    """
    t = 0.999 * uniform.float() ** (2.0 / 3.0) + 0.001
    share = t[:, None, None]
    return share * noise + (1.0 - share) * actions, t, noise - actions


def sinusoids(t: Tensor, size: int, shortest: float, longest: float) -> Tensor:
    """Times as sines, then cosines, of periods spread evenly on a logarithmic scale, float32 [N, size].

    Angles go up to 2 pi t / shortest, of which float32 would leave four decimals: computed in float64, as openpi does.

    Args:
        t: [N].
        size: even.
        shortest, longest: periods; 4e-3 and 4 in pi0.
    """
    share = torch.linspace(0.0, 1.0, size // 2, dtype=torch.float64, device=t.device)
    angles = t.double()[:, None] * (2.0 * math.pi / (shortest * (longest / shortest) ** share))
    return torch.cat([angles.sin(), angles.cos()], 1).float()


def density(x: Tensor, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """Give log N(x; mean, std^2) and its entropy, [N, H, D]; what rows that do not draw get is not read."""
    log_std = std.clamp(min=1e-12).log()
    away = (x - mean) * torch.exp(-log_std)
    entropy = (log_std + (0.5 + _HALF_LOG_TAU)).expand_as(mean)
    return -0.5 * away.square() - log_std - _HALF_LOG_TAU, entropy


def _either(
    draws: Tensor, new: tuple[Tensor, Tensor, Tensor], old: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    first, second, third = (torch.where(draws[:, None, None], one, two) for one, two in zip(new, old, strict=True))
    return first, second, third


def _chain(how: Denoising, states: Tensor, drew: Tensor, scores: list[tuple[Tensor, Tensor, Tensor]]) -> Chain:
    logprobs, entropy = torch.stack([each[0] for each in scores], 1), torch.stack([each[1] for each in scores], 1)
    features = torch.stack([each[2] for each in scores], 1)
    if not how.every:
        return Chain(states, drew, logprobs[:, 0], entropy[:, 0], features)
    # the start's own term, N(0, 1), belongs to the joint probability
    start = -0.5 * states[:, 0].square() - _HALF_LOG_TAU
    terms = how.steps + 1
    joint = (start + logprobs.sum(1)) / terms
    return Chain(states, drew, joint, (entropy.sum(1) + (0.5 + _HALF_LOG_TAU)) / terms, features)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowConfig(PolicyConfig):
    """Configuration of policies that act by denoising."""

    level: Level = "chunk"
    """The unit that has a log-prob of its own; the chunk in pi_RL (arXiv:2510.25889)."""
    method: Method = "flow_sde"
    """Method of drawing: one random step of the chain by an SDE (flow_sde, flow_cps), or every step, with standard
    deviations that are learned (flow_noise)."""
    steps: int = 4
    """Denoising steps, K."""
    noise_level: float = 0.5
    """How much flow_sde and flow_cps draw; a in the formulas of `matching`."""
    noise_std: tuple[float, float] = (0.08, 0.16)
    """Least and greatest standard deviation that flow_noise learns."""

    def __post_init__(self) -> None:
        PolicyConfig.__post_init__(self)  # super() does not work in a dataclass with slots
        Denoising(self.method, self.steps, self.noise_level)
        low, high = self.noise_std
        if not 0.0 < low < high:
            raise ValueError(f"flow policy: noise_std={[low, high]} must rise, from more than 0")


class FlowPolicy(Policy):
    """A policy that denoises H x D numbers.

    Args:
        config: see `FlowConfig`.
        horizon: H, actions that are denoised together; at least the chunk.
        width: D, numbers of each; at least `action_size`.
        features: F, width of the field's features.
    """

    def __init__(self, config: FlowConfig, *, horizon: int, width: int, features: int):
        super().__init__(config)
        if horizon < config.chunk or width < config.action_size:
            raise ValueError(
                f"flow policy: chunk={config.chunk} and action_size={config.action_size} must be at most what is "
                f"denoised, {horizon} actions of {width} numbers"
            )
        self.how = Denoising(config.method, config.steps, config.noise_level)
        self.horizon, self.width = horizon, width
        self.deviation = NoiseNet(features, width, config.noise_std) if self.how.every else None

    # What a policy fills in -------------------------------------------------------------------------------------------

    @abstractmethod
    def context(self, inputs: Stored) -> Any:
        """Compute once for an observation what every denoising step needs."""

    @abstractmethod
    def velocity(self, context: Any) -> Velocity:
        """The field in openpi's time, for the rows of a context."""

    @abstractmethod
    def emitted(self, x: Tensor, inputs: Stored) -> Tensor:
        """Denoised numbers [N, C, A] as actions in [-1, 1], [N, C, A]."""

    @abstractmethod
    def values(self, context: Any, features: Tensor | None) -> Tensor | None:
        """Values by the critic, [N] or [N, C]; None without one.

        Args:
            context: of `context`.
            features: of the steps that drew, [N, steps, H, F]; None where `reads_chain` is false.
        """

    imitates_padding: bool = True
    """True if numbers behind the action count in `imitate`, so that they stay at 0."""
    reads_chain: bool = False
    """True if the critic looks at features of the field, as that of pi0 does; false if at the context alone."""

    # What follows from it ---------------------------------------------------------------------------------------------

    @property
    def randomness(self) -> int:
        """Numbers of the chain, and one that chooses the step."""
        return self.how.normals(self.horizon * self.width) + 1

    @property
    def starts(self) -> int:
        """The numbers that the chain begins with."""
        return self.horizon * self.width

    def draw(self, inputs: Stored, noise: Tensor | None) -> Drawn:
        """See `Policy.draw`. The likeliest chain starts from 0, the middle of all starts, and draws 0 in every step;
        from a random start all steps are the ODE's, as authors evaluate."""
        rows = next(iter(inputs.values()))
        shape = (len(rows), -1, self.horizon, self.width)
        if noise is None:
            drew = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
            numbers = torch.zeros(len(rows), self.randomness - 1, device=rows.device).view(shape)
        elif noise.shape[1] == self.starts:
            drew = torch.full((len(rows),), -1, dtype=torch.int64, device=rows.device)
            numbers = nn.functional.pad(normals(noise), (0, self.randomness - 1 - self.starts)).view(shape)
        else:
            drew = (noise[:, -1] * self.how.can_draw).long()
            numbers = normals(noise[:, :-1]).view(shape)
        context = self.context(inputs)
        chain = sample(self.velocity(context), self.how, numbers[:, 0], numbers[:, 1:], drew, self.deviation)
        actions = self.emitted(self._done(chain.states[:, -1]), inputs)
        return Drawn(actions, chain.states, self._done(chain.logprobs), self._judged(context, chain), {"drew": drew})

    def score(self, stored: Stored) -> Evaluated:
        """See `Policy.score`; only the step that drew is computed again, or all of them for flow_noise.

        Raises:
            ValueError: the rows are demonstrations, which no chain led to.
        """
        if "drew" not in stored:
            raise ValueError("flow policy: demonstrated actions have no log-probs; `imitate` learns from them")
        context = self.context(stored)
        chain = rescore(self.velocity(context), self.how, stored["actions"], stored["drew"], self.deviation)
        return Evaluated(self._done(chain.logprobs), self._done(chain.entropy), self._judged(context, chain))

    @torch.no_grad()
    def value(self, observation: Observation, instructions: Sequence[str] | None = None) -> Tensor:
        """See `Policy.value`. A critic that reads the chain gets that of the ODE from 0, averaged over its steps."""
        context = self.context(self.inputs(observation, instructions))
        features = None
        if self.reads_chain and self.config.value_level is not None:
            velocity, fields = self.velocity(context), []

            def watched(x: Tensor, t: Tensor) -> Any:
                fields.append(values := velocity(x, t))
                return values

            rows = next(iter(observation.values()))
            follow(watched, self.how.steps, torch.zeros(len(rows), self.horizon, self.width, device=rows.device))
            features = torch.stack([each.features for each in fields], 1)
        values = self.values(context, features)
        if values is None:
            raise ValueError("policy: value_level is null, so there is no critic to ask for values")
        return (values if values.ndim == 1 else values[:, 0]).float()

    def encode(self, actions: Tensor, inputs: Stored) -> Tensor:
        """The numbers that the chain is to end with, [N, H, D].

        Behind the chunk the last action is repeated, and behind its numbers there are zeros.
        """
        chain = self.denoised(actions.float(), inputs)
        last = chain[:, -1:].expand(-1, self.horizon - chain.shape[1], -1)
        return nn.functional.pad(torch.cat([chain, last], 1), (0, self.width - chain.shape[2]))

    def denoised(self, actions: Tensor, inputs: Stored) -> Tensor:
        """Actions in [-1, 1] as the numbers that denoising ends with, the inverse of `emitted`; [N, C, A] both."""
        return actions

    def imitate(self, stored: Stored, mask: Tensor | None = None, generator: Generator = None) -> LossSum:
        """The loss of flow matching, (v(x, t) - (noise - actions))^2, at a random time and noise for each row.

        A likelihood of demonstrations cannot be computed from a chain that led elsewhere; this bounds one
        (arXiv:2410.24164, section 4). All D numbers count, as in openpi, or, without `imitates_padding`, those of the
        action.

        Args:
            stored: of `demonstrated`.
            mask: which actions count, bool [N, C]; None for all.
            generator: of times and noise, as for `act`.
        """
        actions = stored["actions"]
        rows, numbers = len(actions), self.horizon * self.width
        random = uniforms(generator, rows, numbers + 1, actions.device)
        noise = normals(random[:, :-1]).view(actions.shape)
        x, t, wanted = training_pair(actions, noise, random[:, -1])
        velocity = self.velocity(self.context(stored))(x, t).velocity
        counted = self.width if self.imitates_padding else self.config.action_size
        error = (velocity - wanted).square()[:, : self.config.chunk, :counted]
        weights = torch.ones_like(error) if mask is None else mask[..., None].expand(error.shape).to(error.dtype)
        return LossSum((error * weights).sum(), weights.sum(dtype=torch.float64))

    def steered(self, inputs: Stored, start: Tensor) -> Tensor:
        """Actions that the ODE makes of a given start: for a policy over starts (DSRL, arXiv:2506.15799).

        Args:
            inputs: of `inputs`, N rows.
            start: the noise, float32 [N, H, D].

        Returns:
            Actions in [-1, 1], [N, C, A].
        """
        actions = follow(self.velocity(self.context(inputs)), self.how.steps, start)
        return self.emitted(self._done(actions), inputs)

    def _judged(self, context: Any, chain: Chain) -> Tensor | None:
        values = self.values(context, chain.features if self.reads_chain else None)
        return None if values is None else values.float()

    def _done(self, x: Tensor) -> Tensor:
        """The part that the environment sees, [N, C, A] of [N, H, D]."""
        return x[:, : self.config.chunk, : self.config.action_size].float()


class NoiseNet(nn.Module):
    """Standard deviations of flow_noise: features > 128 > 64 > D with tanh, within bounds on a logarithmic scale.

        std = exp(log low + (log high - log low) (tanh(net) + 1) / 2)

    (ReinFlow, arXiv:2505.22094, as pi_RL uses it.) The evaluated policy does not need it.
    """

    def __init__(self, features: int, width: int, bounds: tuple[float, float]):
        super().__init__()
        self.net = perceptron(features, (128, 64), width, gain=1.0, activation=nn.Tanh)
        self.bounds = bounds

    def forward(self, features: Tensor) -> Tensor:
        """Standard deviations [N, H, D] of a step, from features [N, H, F]."""
        low, high = torch.tensor(self.bounds, device=features.device).log().unbind()
        log_std = self.net(features.to(next(self.net.parameters()).dtype))
        return (low + (high - low) * (torch.tanh(log_std.float()) + 1.0) / 2.0).exp()


_TIMES = 16  # numbers that a time becomes
_FEATURES = 32  # for each action, in the last hidden layer


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpFlowConfig(FlowConfig):
    """Configuration of `MlpFlowPolicy`."""

    state_size: int
    """Numbers in the observation's "state", S."""
    hidden: tuple[int, ...] = (256, 256)
    """Widths of the hidden layers, of the field as of the critic."""
    normalise: bool = True
    """Bring states to mean 0 and variance 1 by what was seen up to the last training step."""

    def __post_init__(self) -> None:
        FlowConfig.__post_init__(self)
        if self.state_size < 1 or not self.hidden or min(self.hidden) < 1:
            raise ValueError(
                f"policy flow: state_size={self.state_size} and the widths hidden={list(self.hidden)} must be at least "
                "1"
            )


class MlpFlowPolicy(FlowPolicy):
    """Looks at "state", float32 [N, S]."""

    Config: ClassVar[type[PolicyConfig]] = MlpFlowConfig

    def __init__(self, config: MlpFlowConfig):
        super().__init__(config, horizon=config.chunk, width=config.action_size, features=_FEATURES)
        numbers = config.chunk * config.action_size
        self.norm = RunningNorm(config.state_size) if config.normalise else None
        inputs, widths = config.state_size + numbers + _TIMES, (*config.hidden, config.chunk * _FEATURES)
        self.trunk = perceptron(inputs, widths, None, gain=1.0, activation=nn.SiLU)
        self.out = nn.Linear(_FEATURES, config.action_size)
        self.critic: nn.Module | None = None
        if config.value_level is not None:
            outputs = config.chunk if config.value_level == "action" else 1
            self.critic = perceptron(config.state_size, config.hidden, outputs, gain=0.0, activation=nn.Tanh)

    def inputs(self, observation: Observation, instructions: Sequence[str] | None = None) -> Stored:
        """The state as it came."""
        return {"state": looked_at(observation, "state", (self.config.state_size,), "policy flow").float()}

    def adapt(self, stored: Stored, mask: Tensor | None = None, reduce: Reduce | None = None) -> None:
        """Take the states of this step into the running scale."""
        if self.norm is not None:
            self.norm.update(stored["state"], mask, reduce)

    def context(self, inputs: Stored) -> Tensor:
        """The state at the running scale, [N, S]."""
        return inputs["state"] if self.norm is None else self.norm(inputs["state"])

    def velocity(self, context: Tensor) -> Velocity:
        """See `FlowPolicy.velocity`."""

        def field(x: Tensor, t: Tensor) -> Field:
            inputs = torch.cat([context, x.flatten(1), sinusoids(t, _TIMES, 0.1, 4.0)], 1)
            features = self.trunk(inputs).view(len(x), self.horizon, _FEATURES)
            return Field(self.out(features), features)

        return field

    def emitted(self, x: Tensor, inputs: Stored) -> Tensor:
        """The numbers themselves, cut to [-1, 1]."""
        return x.clamp(-1.0, 1.0)

    def values(self, context: Tensor, features: Tensor | None) -> Tensor | None:
        """See `FlowPolicy.values`."""
        if self.critic is None:
            return None
        result: Tensor = self.critic(context)
        return result if self.config.value_level == "action" else result[:, 0]
