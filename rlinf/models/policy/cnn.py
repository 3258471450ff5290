"""A policy on pictures, and on the state where there is one: convolutions, then perceptrons as in `mlp`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from rlinf.models.policy.actor_critic import ActorCritic, ActorCriticConfig
from rlinf.models.policy.base import Observation, PolicyConfig, Stored, looked_at
from rlinf.models.policy.layers import linear, orthogonal


@dataclass(frozen=True, slots=True, kw_only=True)
class CnnConfig(ActorCriticConfig):
    """Of `CnnPolicy`."""

    image: tuple[int, int, int]
    """Height, width and channels of the observation's "rgb": 3 for one camera, 6 for two."""
    state_size: int = 0
    """Numbers in the observation's "state"; 0 does not look at it."""
    channels: tuple[int, ...] = (16, 32, 64)
    """Of the convolutions; each halves height and width."""
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
        found = {"rgb": looked_at(observation, "rgb", self.config.image, "policy cnn")}
        if self.config.state_size:
            found["state"] = looked_at(observation, "state", (self.config.state_size,), "policy cnn").float()
        return self.looked(found, observation)

    def features(self, inputs: Stored) -> Tensor:
        """What the picture shows, and the state at the running scale."""
        seen: Tensor = self.eyes(inputs["rgb"].movedim(-1, 1).float() / 127.5 - 1.0)
        return torch.cat([seen, self.scaled(inputs["state"])], 1) if self.config.state_size else seen
