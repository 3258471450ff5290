"""Denoising as a stochastic policy: the chain of K steps from noise to actions, its log-probs and entropy.

In: a velocity field v(x, t) and random numbers. Out: a `Chain`, whose log-probs `rescore` finds again with gradient.
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
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

Method = Literal["flow_sde", "flow_cps", "flow_noise"]
METHODS = ("flow_sde", "flow_cps", "flow_noise")
_HALF_LOG_TAU = 0.5 * math.log(2.0 * math.pi)


@dataclass(frozen=True, slots=True, eq=False)
class Field:
    """What a network says at one place x and time t of a chain."""

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
    """Of the distributions that were drawn from, nats, [N, H, D]."""
    features: Tensor
    """Of the steps that drew, [N, 1 or K, H, F]."""


@dataclass(frozen=True, slots=True)
class Denoising:
    """How a chain is made: the table above."""

    method: Method
    """What draws."""
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
        """Whether every step draws."""
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
        drew: step that draws, from 0 to `how.can_draw` - 1, int64 [N]; not read for flow_noise.
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
        found = (*_density(x, mean, std), field.features)
        if how.every or not scores:
            scores.append(found)
        else:
            scores[0] = _either(draws, found, scores[0])
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
        scores.append((*_density(states[rows, step + 1], mean, std), field.features))
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
        found = velocity(x, 1.0 - t)
        return Field(-found.velocity, found.features)

    return turned


def training_pair(actions: Tensor, noise: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What flow matching is trained on: a place on the way from noise to actions, its time, and the velocity there.

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


def _density(x: Tensor, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """log N(x; mean, std^2) and its entropy, [N, H, D]; what rows that do not draw get is not read."""
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
