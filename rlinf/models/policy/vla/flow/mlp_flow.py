"""A small flow-matching policy on the state alone: a perceptron is the velocity field.

For toys, and as the policy that is steered (DSRL). Its critic looks at the state, not at the chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rlinf.algos.advantages import Reduce
from rlinf.models.policy.base import Observation, PolicyConfig, Stored, looked_at
from rlinf.models.policy.layers import RunningNorm, perceptron
from rlinf.models.policy.vla.flow.matching import Field, Velocity, sinusoids
from rlinf.models.policy.vla.flow.policy import FlowConfig, FlowPolicy

_TIMES = 16  # numbers that a time becomes
_FEATURES = 32  # for each action, in the last hidden layer


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpFlowConfig(FlowConfig):
    """Of `MlpFlowPolicy`."""

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
        self.trunk = perceptron(
            config.state_size + numbers + _TIMES, (*config.hidden, config.chunk * _FEATURES), None, gain=1.0,
            activation=nn.SiLU,
        )  # fmt: skip
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
            known = torch.cat([context, x.flatten(1), sinusoids(t, _TIMES, 0.1, 4.0)], 1)
            features = self.trunk(known).view(len(x), self.horizon, _FEATURES)
            return Field(self.out(features), features)

        return field

    def emitted(self, x: Tensor, inputs: Stored) -> Tensor:
        """The numbers themselves, cut to [-1, 1]."""
        return x.clamp(-1.0, 1.0)

    def values(self, context: Tensor, features: Tensor | None) -> Tensor | None:
        """See `FlowPolicy.values`."""
        if self.critic is None:
            return None
        found: Tensor = self.critic(context)
        return found if self.config.value_level == "action" else found[:, 0]
