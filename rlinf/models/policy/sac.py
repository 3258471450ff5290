"""Policies for soft actor-critic and its kin: on states, on pictures, and steering a frozen policy; and their critics.

`SoftPolicy` is a squashed normal distribution, with critics of a state and a chunk of actions:

    u ~ N(mean(s), sigma(s)^2)        a = tanh(u)        log pi(a|s) = log N(u; mean, sigma^2) - log(1 - tanh(u)^2)

(arXiv:1812.05905, appendix C). What is stored of an action is u: a says little of it where tanh is flat. The critics
are an ensemble computed side by side, [M, N] for N rows, and stand under `critic`: they judge actions, and do not
bootstrap episodes as other policies' values do, so `value_level` is null.

A gripper is closed or opened, and half of that is nothing: with `gripper` the last number of an action is a choice,
-1, 0 or 1, of which critics of its own say what each is worth (HIL-SERL, arXiv:2410.21845, section 3.2). It is the one
worth most by their mean; the actor and the other critics have to do with the other numbers alone.

`SoftPixelsPolicy` looks at pictures. The critics' convolutions are trained by the critics alone; the actor looks at
what the convolutions give, and sends no gradient into them (SAC-AE, arXiv:1910.01741; DrQ, arXiv:2004.13649). Target
critics have a copy of the convolutions.

`SteeredPolicy` steers a frozen policy: it chooses the noise that a flow policy denoises, or what is added to its
actions.

    noise:     a = flow(o, w)               w = reach x tanh(u)      (DSRL, arXiv:2506.15799)
    residual:  a = clip(base(o) + reach x tanh(u))                   (arXiv:1812.03201)

Of what a flow denoises, the numbers behind the chunk and behind its actions start from 0. Only u is learned, with
critics of states and u, by sac or crossq; nothing is differentiated through the frozen policy, and it is not asked
while learning. Its weights are neither trained nor published nor saved: every process reads them from their directory,
which must stay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf.models.policy.actor_critic import GAIN, Exact, linear, orthogonal, perceptron
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
    normals,
)

_MOMENTUM = 0.99  # of running statistics, as CrossQ has it: they follow within some hundred steps
_EPSILON = 1e-3
_FREE_STEPS = 1000  # batches normalised by their own statistics alone, until the running ones mean something
_MOST_RATIO, _MOST_SHIFT = 3.0, 5.0  # of batch renormalisation, arXiv:1702.03275 section 4


class BatchRenorm(Exact):
    """Batch renormalisation of every member of an ensemble by itself (arXiv:1702.03275, algorithm 1).

        training:  y = scale * ((x - mean_B) / std_B * r + d) + offset      r = std_B / std, d = (mean_B - mean) / std,
                                                                            both cut off and without gradient
        else:      y = scale * (x - mean) / std + offset

    Args:
        count: members, M.
        width: of a row.
    """

    mean: Tensor
    """Running mean, float32 [M, 1, width]."""
    variance: Tensor
    """Running variance, float32 [M, 1, width]."""
    batches: Tensor
    """Batches seen, int64 []."""

    def __init__(self, count: int, width: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(count, 1, width))
        self.offset = nn.Parameter(torch.zeros(count, 1, width))
        self.register_buffer("mean", torch.zeros(count, 1, width))
        self.register_buffer("variance", torch.ones(count, 1, width))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, *, training: bool) -> Tensor:
        """Normalise rows, float32 [M, N, width]; running statistics change only in training."""
        if not training:
            normal = (x - self.mean) * torch.rsqrt(self.variance + _EPSILON)
            return torch.addcmul(self.offset, normal, self.scale)
        variance, mean = torch.var_mean(x, dim=1, keepdim=True, correction=0)
        normal = (x - mean) * torch.rsqrt(variance + _EPSILON)
        with torch.no_grad():
            free = (self.batches < _FREE_STEPS).to(x.dtype)
            inverse = torch.rsqrt(self.variance + _EPSILON)
            ratio = (torch.sqrt(variance + _EPSILON) * inverse).clamp(1.0 / _MOST_RATIO, _MOST_RATIO)
            shift = ((mean - self.mean) * inverse).clamp(-_MOST_SHIFT, _MOST_SHIFT)
            ratio, shift = torch.lerp(ratio, torch.ones_like(ratio), free), shift * (1.0 - free)
            self.mean.lerp_(mean, 1.0 - _MOMENTUM)
            self.variance.lerp_(variance, 1.0 - _MOMENTUM)
            self.batches += 1
        return torch.addcmul(self.offset, torch.addcmul(shift, normal, ratio), self.scale)


class Ensemble(nn.Module):
    """Perceptrons of one shape with weights of their own, computed in one multiplication per layer.

    Args:
        count: how many, M.
        inputs: width of what they look at, the same for all.
        hidden: widths of the hidden layers, each followed by ReLU.
        layer_norm: normalise hidden layers before it, without a learned scale.
        batch_norm: normalise by batch renormalisation what comes in, and hidden layers after ReLU (CrossQ,
            arXiv:1902.05605).
    """

    def __init__(
        self, count: int, inputs: int, hidden: Sequence[int], *, layer_norm: bool = False, batch_norm: bool = False
    ):
        super().__init__()
        self._layer_norm = layer_norm
        widths = [inputs, *hidden, 1]
        self.weights, self.offsets = nn.ParameterList(), nn.ParameterList()
        for number, (width, following) in enumerate(pairwise(widths)):
            gain = GAIN if number < len(hidden) else 1.0
            layers = [linear(width, following, gain) for _ in range(count)]
            self.weights.append(torch.stack([layer.weight.detach().T for layer in layers]))
            self.offsets.append(torch.zeros(count, 1, following))
        self.norms = nn.ModuleList([BatchRenorm(count, width) for width in widths[:-1]] if batch_norm else [])

    def forward(self, x: Tensor, *, training: bool = False) -> Tensor:
        """Value of each row by each perceptron of the ensemble.

        Args:
            x: float32 [N, inputs].
            training: normalise by the statistics of this batch, and let the running ones follow; only matters with
                `batch_norm`.

        Returns:
            float32 [M, N].
        """
        hidden = x.expand(len(self.weights[0]), *x.shape)
        last = len(self.weights) - 1
        for number, (weight, offset) in enumerate(zip(self.weights, self.offsets, strict=True)):
            if self.norms:
                hidden = self.norms[number](hidden, training=training)
            hidden = torch.baddbmm(offset, hidden, weight)
            if number < last:
                hidden = functional.layer_norm(hidden, hidden.shape[-1:]) if self._layer_norm else hidden
                hidden = functional.relu(hidden)
        return hidden[..., 0]


class Convolutions(nn.Module):
    """Encoder of pictures: convolutions of 3 x 3 that halve height and width each.

    Args:
        image: height, width and channels of pictures.
        channels: of each convolution.

    Attributes:
        size: numbers that a picture becomes.
    """

    def __init__(self, image: tuple[int, int, int], channels: Sequence[int]):
        super().__init__()
        height, width, inputs = image
        layers: list[nn.Module] = []
        for outputs in channels:
            layers += [orthogonal(nn.Conv2d(inputs, outputs, kernel_size=3, stride=2, padding=1)), nn.ReLU()]
            inputs, height, width = outputs, -(-height // 2), -(-width // 2)
        self.layers = nn.Sequential(*layers, nn.Flatten())
        self.size = inputs * height * width

    def forward(self, pictures: Tensor) -> Tensor:
        """uint8 [N, H, W, channels] to float32 [N, size]."""
        features: Tensor = self.layers(pictures.movedim(-1, 1).float() / 255.0 - 0.5)
        return features


class Trunk(nn.Sequential):
    """Brings what pictures show down to a few numbers between -1 and 1 (SAC-AE and DrQ, arXiv:2004.13649)."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(linear(inputs, outputs, 1.0), nn.LayerNorm(outputs), nn.Tanh())


CHOICES = 3
"""Choices of a gripper: close, stay, open, which are -1, 0 and 1 in an action."""


class StateCritics(nn.Module):
    """An ensemble that looks at states, and one whose members say what each choice of a gripper is worth.

    Args:
        ensemble: looks at the state and the actions.
        gripper: looks at the state, one member for each of `CHOICES` of each critic.
    """

    def __init__(self, ensemble: Ensemble, gripper: Ensemble):
        super().__init__()
        self.ensemble, self.gripper = ensemble, gripper

    def forward(self, judged: Tensor, *, training: bool = False) -> Tensor:
        """Value of each row by each critic, float32 [M, N]."""
        values: Tensor = self.ensemble(judged, training=training)
        return values

    def choices(self, inputs: Stored) -> Tensor:
        """Value of each choice of the gripper by each critic, float32 [M, CHOICES, N], from what the policy looks
        at."""
        values: Tensor = self.gripper(inputs["state"])
        return values.unflatten(0, (-1, CHOICES))


class PictureCritics(nn.Module):
    """An ensemble that looks at pictures by way of convolutions of its own, which it trains.

    Args:
        eyes: the convolutions.
        features: numbers that a picture comes down to.
        ensemble: looks at these, the state and the actions.
        gripper: looks at these and the state, one member for each of `CHOICES` of each critic; None: nothing is
            chosen.
    """

    def __init__(self, eyes: Convolutions, features: int, ensemble: Ensemble, gripper: Ensemble | None = None):
        super().__init__()
        self.eyes, self.trunk, self.ensemble = eyes, Trunk(eyes.size, features), ensemble
        self.gripper = gripper

    def forward(self, judged: Stored, *, training: bool = False) -> Tensor:
        """Value of each row by each critic, float32 [M, N].

        Args:
            judged: "rgb", uint8 [N, H, W, 3 k], and "rest", float32 [N, ...], state and actions.
            training: see `Ensemble.forward`.
        """
        features = self.trunk(self.eyes(judged["rgb"]))
        values: Tensor = self.ensemble(torch.cat([features, judged["rest"]], 1), training=training)
        return values

    def choices(self, inputs: Stored) -> Tensor:
        """See `StateCritics.choices`."""
        assert self.gripper is not None
        features = self.trunk(self.eyes(inputs["rgb"]))
        values: Tensor = self.gripper(torch.cat([features, inputs["state"]], 1) if "state" in inputs else features)
        return values.unflatten(0, (-1, CHOICES))


_LOG_STD = (-5.0, 2.0)  # narrower densities than e^-5 make the critics' slopes useless; wider ones only saturate tanh
_MOST = 0.999  # demonstrated actions are cut to it: at 1, u would be at infinity
_HALF_LOG_TAU = 0.5 * math.log(2.0 * math.pi)
_NODES, _SHARES = np.polynomial.hermite_e.hermegauss(16)  # of an integral over N(0, 1): enough for 3 digits of entropy


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftConfig(PolicyConfig):
    """Configuration of `SoftPolicy`."""

    state_size: int
    """Numbers in the observation's "state", S."""
    level: Level = "chunk"
    """The unit that has a log-prob of its own; soft actor-critic knows chunks alone."""
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
    gripper: bool = False
    """The last number of an action is a gripper's: close (-1), stay (0) or open (1), chosen by critics of its own."""

    def __post_init__(self) -> None:
        PolicyConfig.__post_init__(self)  # super() does not work in a dataclass with slots
        if self.gripper and (self.chunk != 1 or self.action_size < 2 or self.batch_norm):
            raise ValueError(
                f"policy soft: gripper=true needs a gripper behind other numbers of an action, decided one action at a "
                f"time, with target critics, and action_size={self.action_size}, chunk={self.chunk}, batch_norm="
                f"{self.batch_norm}: take gripper=false, or chunk=1 and algorithm=sac"
            )
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
        self.actor, ensemble = self._head(self.config.state_size), self._ensemble(self.config.state_size)
        gripper = self._gripper(self.config.state_size)
        self.critic: nn.Module = ensemble if gripper is None else StateCritics(ensemble, gripper)

    @property
    def numbers(self) -> int:
        """Numbers of an action that the actor decides: all but a gripper's choice."""
        return int(self.config.action_size) - int(self.config.gripper)

    def _head(self, features: int) -> nn.Sequential:
        """Return a new network from features to means and spreads of all numbers of a chunk."""
        numbers, (low, high) = self.config.chunk * self.numbers, _LOG_STD
        head = perceptron(features, self.config.hidden, 2 * numbers, gain=0.01, activation=nn.ReLU)
        last: Any = head[-1]
        with torch.no_grad():
            last.bias[numbers:] = math.atanh(2.0 * (self.config.log_std - low) / (high - low) - 1.0)
        return head

    def _ensemble(self, features: int) -> Ensemble:
        """Critics of features and a chunk of actions."""
        config = self.config
        inputs = features + config.chunk * self.numbers
        norms = {"layer_norm": config.layer_norm, "batch_norm": config.batch_norm}
        return Ensemble(config.critics, inputs, config.hidden, **norms)

    def _gripper(self, features: int) -> Ensemble | None:
        """Values of a gripper's choices; None without one."""
        config = self.config
        if not config.gripper:
            return None
        return Ensemble(config.critics * CHOICES, features, config.hidden, layer_norm=config.layer_norm)

    def inputs(self, observation: Observation, instructions: Sequence[str] | None = None) -> Stored:
        """The state as it came."""
        return {"state": looked_at(observation, "state", (self.config.state_size,), "policy soft").float()}

    def encode(self, actions: Tensor, inputs: Stored) -> Tensor:
        """Numbers from which tanh makes the actions, which are cut to +-0.999 first; of a gripper the nearest
        choice."""
        moves, choice = actions[..., : self.numbers], actions[..., self.numbers :]
        return torch.cat([torch.atanh(moves.clamp(-_MOST, _MOST)), choice.clamp(-1.0, 1.0).round()], -1)

    def draw(self, inputs: Stored, noise: Tensor | None) -> Drawn:
        """See `Policy.draw`; differentiable, by way of the actions too (reparametrised).

        Without noise it is tanh of the mean, as is usual: the median of what is drawn, and not quite the likeliest.
        """
        sample, logprobs = self.proposed(inputs, noise)
        actions = torch.tanh(sample)
        if not self.config.gripper:
            return Drawn(actions, sample, logprobs, None)
        with torch.no_grad():
            best = self.critic.choices(inputs).mean(0).argmax(0) - 1  # type: ignore[operator]
        choice = best.to(sample.dtype)[:, None, None]
        sure = torch.zeros_like(choice)  # the best choice is always made
        made, logprobs = torch.cat([sample, choice], -1), torch.cat([logprobs, sure], -1)
        return Drawn(torch.cat([actions, choice], -1), made, logprobs, None)

    def proposed(self, inputs: Stored, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """Actions for the critics to judge: u and its log-probs, [N, C, A] each, without a gripper's choice; `draw`
        without the actions themselves."""
        mean, log_std = self._heads(inputs)
        sample = mean if noise is None else mean + log_std.exp() * normals(noise).view_as(mean)
        return sample, _log_density(sample, mean, log_std)

    def features(self, inputs: Stored) -> Tensor:
        """Features that `actor` looks at, float32 [N, ...]."""
        return inputs["state"]

    @property
    def randomness(self) -> int:
        """See `Policy.randomness`: a gripper's choice is not drawn."""
        return int(self.config.chunk) * self.numbers

    def score(self, stored: Stored) -> Evaluated:
        """See `Policy.score`. The entropy, H(N) + E log(1 - tanh(u)^2), is integrated by Gauss and Hermite's rule.

        Raises:
            ValueError: a gripper's choice has no likelihood.
        """
        if self.config.gripper:
            raise ValueError(
                "policy soft: gripper=true is for algorithm: sac: what values choose has no likelihood to learn by"
            )
        mean, log_std = self._heads(stored)
        places = mean[..., None] + log_std.exp()[..., None] * self.nodes
        entropy = log_std + (0.5 + _HALF_LOG_TAU) + (_log_slope(places) * self.shares).sum(-1)
        return Evaluated(_log_density(stored["actions"], mean, log_std), entropy, None)

    def value(self, observation: Observation, instructions: Sequence[str] | None = None) -> Tensor:
        """There is none: see `judged`."""
        raise ValueError("policy soft: its critics judge actions, so there is no value of an observation alone")

    def judged(self, inputs: Stored, sample: Tensor) -> Any:
        """Input of the critics, or of a copy of them.

        Args:
            inputs: of `inputs`, N rows.
            sample: actions before tanh, [N, C, A], with or without a gripper's choice.

        Returns:
            float32 [N, S + C x A], A without the gripper; of other policies whatever their critics take.
        """
        return torch.cat([inputs["state"], self._moves(sample)], 1)

    def _moves(self, sample: Tensor) -> Tensor:
        """Actions without a gripper's choice, one behind the other, [N, C x A]."""
        return torch.tanh(sample[..., : self.numbers]).flatten(1)

    def _heads(self, inputs: Stored) -> tuple[Tensor, Tensor]:
        """Means and logarithms of standard deviations, [N, C, A] each; the same operations for drawing and scoring."""
        mean, spread = self.actor(self.features(inputs)).chunk(2, -1)
        low, high = _LOG_STD
        log_std = low + 0.5 * (high - low) * (torch.tanh(spread) + 1.0)  # bounded, with a slope everywhere
        shape = (-1, self.config.chunk, self.numbers)
        return mean.view(shape), log_std.view(shape)


def _log_density(u: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """log pi(tanh(u)), number by number."""
    return -0.5 * ((u - mean) * torch.exp(-log_std)).square() - log_std - _HALF_LOG_TAU - _log_slope(u)


def _log_slope(u: Tensor) -> Tensor:
    """log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2 u)), without the cancellation for large u."""
    return 2.0 * (math.log(2.0) - u - functional.softplus(-2.0 * u))


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftPixelsConfig(SoftConfig):
    """Configuration of `SoftPixelsPolicy`."""

    image: tuple[int, int, int]
    """Height, width and channels of the observation's "rgb": 3 for one camera, 6 for two."""
    state_size: int = 0
    """Numbers in the observation's "state"; 0 does not look at it."""
    channels: tuple[int, ...] = (32, 32, 32)
    """Channels of the convolutions; each halves height and width."""
    picture_features: int = 50
    """Numbers that a picture comes down to, for the actor and for the critics each."""

    def __post_init__(self) -> None:
        SoftConfig.__post_init__(self)
        height, width, channels = self.image
        least = 2 ** len(self.channels)
        if min(height, width) < least or channels < 1 or not self.channels:
            raise ValueError(
                f"policy soft_pixels: image={list(self.image)} must be at least {least} pixels high and wide, since "
                f"each of the {len(self.channels)} convolutions (channels={list(self.channels)}) halves it"
            )


class SoftPixelsPolicy(SoftPolicy):
    """Looks at "rgb", uint8 [N, H, W, 3 k], and at "state", float32 [N, S], if `state_size` is not 0."""

    Config: ClassVar[type[PolicyConfig]] = SoftPixelsConfig

    def _make_networks(self) -> None:
        config, eyes = self.config, Convolutions(self.config.image, self.config.channels)
        features = config.picture_features + config.state_size
        self.trunk = Trunk(eyes.size, config.picture_features)
        self.actor = self._head(features)
        critics = self._ensemble(features), self._gripper(features)
        self.critic: nn.Module = PictureCritics(eyes, config.picture_features, *critics)

    def inputs(self, observation: Observation, instructions: Sequence[str] | None = None) -> Stored:
        """Pictures as bytes; the state as it came."""
        stored = {"rgb": looked_at(observation, "rgb", self.config.image, "policy soft_pixels")}
        if self.config.state_size:
            stored["state"] = looked_at(observation, "state", (self.config.state_size,), "policy soft_pixels").float()
        return stored

    def features(self, inputs: Stored) -> Tensor:
        """Features of the picture, made by the actor from the convolutions' result, beside the state."""
        with torch.no_grad():
            pictures = self.critic.eyes(inputs["rgb"])  # type: ignore[operator]
        hidden: Tensor = self.trunk(pictures)
        return torch.cat([hidden, inputs["state"]], 1) if self.config.state_size else hidden

    def judged(self, inputs: Stored, sample: Tensor) -> Stored:
        """ "rgb", uint8 [N, H, W, 3 k], and "rest", the state and the actions, float32 [N, S + C x A]."""
        actions = self._moves(sample)
        rest = torch.cat([inputs["state"], actions], 1) if self.config.state_size else actions
        return {"rgb": inputs["rgb"], "rest": rest}


@dataclass(frozen=True, slots=True, kw_only=True)
class SteeredConfig(SoftConfig):
    """Configuration of `SteeredPolicy`; `chunk` and `action_size` are those of the frozen policy."""

    base: str
    """Directory of the frozen policy, as a checkpoint's `policy` or the authors' own."""
    how: Literal["noise", "residual"] = "noise"
    """Choose the noise of a flow policy, or add to the likeliest actions of any policy."""
    reach: float = 1.5
    """Greatest number of the noise, or what is added to an action at most; 0.2 is a good first residual."""

    def __post_init__(self) -> None:
        SoftConfig.__post_init__(self)
        if not self.reach > 0.0:
            raise ValueError(f"policy steered: reach={self.reach} must be more than 0")
        if self.gripper:
            raise ValueError("policy steered: gripper=true: the frozen policy moves the gripper; take gripper=false")


class SteeredPolicy(SoftPolicy):
    """Looks at "state", float32 [N, S], and at whatever the frozen policy looks at."""

    Config: ClassVar[type[PolicyConfig]] = SteeredConfig

    def __init__(self, config: SteeredConfig):
        super().__init__(config)
        self._frozen: list[Policy] = []  # in a list, so that it is no part of this module

    @property
    def base(self) -> Policy:
        """The frozen policy, on this one's device; read when it is first asked.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it decides other chunks, or has no noise to choose.
        """
        if not self._frozen:
            self._frozen.append(self._opened())
        return self._frozen[0].to(next(self.parameters()).device)

    def inputs(self, observation: Observation, instructions: Sequence[str] | None = None) -> Stored:
        """The state as it came, and what the frozen policy keeps of an observation."""
        theirs = {f"base.{name}": rows for name, rows in self.base.inputs(observation, instructions).items()}
        state = looked_at(observation, "state", (self.config.state_size,), "policy steered").float()
        same = theirs.get("base.state")
        if same is not None and same.shape == state.shape and torch.equal(same, state):
            del theirs["base.state"]  # kept once
        return {"state": state, **theirs}

    def encode(self, actions: Tensor, inputs: Stored) -> Tensor:
        """There is no way back from actions.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "policy steered: what was to be chosen for somebody else's actions is not known, so it cannot learn from "
            "demonstrations: remove off_policy.demonstrations and imitation.path; the frozen policy learns from them"
        )

    @torch.no_grad()
    def draw(self, inputs: Stored, noise: Tensor | None) -> Drawn:
        """See `Policy.draw`; not differentiable by way of the actions."""
        sample, logprobs = self.proposed(inputs, noise)
        start = self.config.reach * torch.tanh(sample)
        theirs = {name.removeprefix("base."): rows for name, rows in inputs.items() if name.startswith("base.")}
        theirs.setdefault("state", inputs["state"])
        base: Any = self.base
        if self.config.how == "noise":
            behind = (0, base.width - start.shape[2], 0, base.horizon - start.shape[1])
            actions = base.steered(theirs, torch.nn.functional.pad(start, behind))
        else:
            actions = base.draw(theirs, None).actions + start
        return Drawn(actions.clamp(-1.0, 1.0), sample, logprobs, None)

    def _opened(self) -> Policy:
        from rlinf.models.policy.build import load_policy  # which imports what policies there are

        frozen = load_policy(Path(self.config.base).expanduser()).eval().requires_grad_(False)
        mine, theirs = self.config, frozen.config
        if (mine.chunk, mine.action_size) != (theirs.chunk, theirs.action_size):
            raise ValueError(
                f"policy steered: base decides {theirs.chunk} actions of {theirs.action_size} numbers, and this policy "
                f"{mine.chunk} of {mine.action_size}: set chunk={theirs.chunk}, in the environment that base is for"
            )
        if mine.how == "noise" and not hasattr(frozen, "steered"):
            raise ValueError(
                f"policy steered: base={mine.base} is a {type(frozen).__name__}, which denoises nothing: take a flow "
                "policy, or how: residual"
            )
        return frozen
