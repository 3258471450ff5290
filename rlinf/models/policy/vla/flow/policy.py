"""What all policies that act by denoising share: drawing, scoring, imitation, and starts that somebody else chooses.

A policy on top says what it computes once for an observation (`context`), its velocity field, how denoised numbers
become the environment's actions, and what its critic looks at. What is stored of a decision is the whole chain,
"actions" float32 [N, K + 1, H, D], and which step drew, "drew" int64 [N]. Of the H actions and D numbers that are
denoised, the first C and A are done and count in log-probs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlinf.algos.tensor.loss_sum import LossSum
from rlinf.models.policy.base import Drawn, Evaluated, Level, Observation, Policy, PolicyConfig, Stored
from rlinf.models.policy.layers import perceptron
from rlinf.models.policy.noise import Generator, normals, uniforms
from rlinf.models.policy.vla.flow.matching import (
    Chain,
    Denoising,
    Method,
    Velocity,
    follow,
    rescore,
    sample,
    training_pair,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowConfig(PolicyConfig):
    """Of policies that act by denoising."""

    level: Level = "chunk"
    """What has a log-prob of its own; the chunk in pi_RL (arXiv:2510.25889)."""
    method: Method = "flow_sde"
    """What draws: one random step of the chain by an SDE (flow_sde, flow_cps), or every step, with standard deviations
    that are learned (flow_noise)."""
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
        """What is computed once for an observation, whatever is denoised."""

    @abstractmethod
    def velocity(self, context: Any) -> Velocity:
        """The field in openpi's time, for the rows of a context."""

    @abstractmethod
    def emitted(self, x: Tensor, inputs: Stored) -> Tensor:
        """Denoised numbers [N, C, A] as actions in [-1, 1], [N, C, A]."""

    @abstractmethod
    def values(self, context: Any, features: Tensor | None) -> Tensor | None:
        """What the critic says, [N] or [N, C]; None without one.

        Args:
            context: of `context`.
            features: of the steps that drew, [N, steps, H, F]; None where `reads_chain` is false.
        """

    imitates_padding: bool = True
    """Whether numbers behind the action count in `imitate`, so that they stay at 0."""
    reads_chain: bool = False
    """Whether the critic looks at features of the field, as that of pi0 does, or at the context alone."""

    # What follows from it ---------------------------------------------------------------------------------------------

    @property
    def randomness(self) -> int:
        """Numbers of the chain, and one that chooses the step."""
        return self.how.normals(self.horizon * self.width) + 1

    def draw(self, inputs: Stored, noise: Tensor | None) -> Drawn:
        """See `Policy.draw`. The likeliest chain starts from 0, the middle of all starts, and draws 0 in every step."""
        rows = next(iter(inputs.values()))
        shape = (len(rows), -1, self.horizon, self.width)
        if noise is None:
            drew = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
            numbers = torch.zeros(len(rows), self.randomness - 1, device=rows.device).view(shape)
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
            velocity, seen = self.velocity(context), []

            def watched(x: Tensor, t: Tensor) -> Any:
                seen.append(found := velocity(x, t))
                return found

            rows = next(iter(observation.values()))
            follow(watched, self.how.steps, torch.zeros(len(rows), self.horizon, self.width, device=rows.device))
            features = torch.stack([each.features for each in seen], 1)
        found = self.values(context, features)
        if found is None:
            raise ValueError("policy: value_level is null, so there is no critic to ask for values")
        return (found if found.ndim == 1 else found[:, 0]).float()

    def encode(self, actions: Tensor, inputs: Stored) -> Tensor:
        """The numbers that the chain is to end with, [N, H, D].

        Behind the chunk the last action is repeated, and behind its numbers there are zeros.
        """
        found = self.denoised(actions.float(), inputs)
        last = found[:, -1:].expand(-1, self.horizon - found.shape[1], -1)
        return nn.functional.pad(torch.cat([found, last], 1), (0, self.width - found.shape[2]))

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
        drawn = uniforms(generator, rows, numbers + 1, actions.device)
        noise = normals(drawn[:, :-1]).view(actions.shape)
        x, t, wanted = training_pair(actions, noise, drawn[:, -1])
        found = self.velocity(self.context(stored))(x, t).velocity
        counted = self.width if self.imitates_padding else self.config.action_size
        error = (found - wanted).square()[:, : self.config.chunk, :counted]
        kept = torch.ones_like(error) if mask is None else mask[..., None].expand(error.shape).to(error.dtype)
        return LossSum((error * kept).sum(), kept.sum(dtype=torch.float64))

    def steered(self, inputs: Stored, start: Tensor) -> Tensor:
        """What the ODE makes of a start that somebody else chose: a policy over starts (DSRL, arXiv:2506.15799).

        Args:
            inputs: of `inputs`, N rows.
            start: the noise, float32 [N, H, D].

        Returns:
            Actions in [-1, 1], [N, C, A].
        """
        made = follow(self.velocity(self.context(inputs)), self.how.steps, start)
        return self.emitted(self._done(made), inputs)

    def _judged(self, context: Any, chain: Chain) -> Tensor | None:
        found = self.values(context, chain.features if self.reads_chain else None)
        return None if found is None else found.float()

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
        made = self.net(features.to(next(self.net.parameters()).dtype))
        return (low + (high - low) * (torch.tanh(made.float()) + 1.0) / 2.0).exp()
