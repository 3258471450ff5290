"""A policy on the state alone: perceptrons, whose standard deviation does not depend on what is seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rlinf.models.policy.actor_critic import ActorCritic, ActorCriticConfig
from rlinf.models.policy.base import Observation, PolicyConfig, Stored, looked_at


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpConfig(ActorCriticConfig):
    """Of `MlpPolicy`."""

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
