"""A policy for soft actor-critic from pictures: the critics' convolutions are trained by the critics alone.

The actor looks at what the convolutions give, and sends no gradient into them (SAC-AE, arXiv:1910.01741; DrQ,
arXiv:2004.13649). Target critics have a copy of the convolutions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rlinf.models.policy.base import Observation, PolicyConfig, Stored, looked_at
from rlinf.models.policy.off_policy.critics import Convolutions, PictureCritics, Trunk
from rlinf.models.policy.off_policy.soft import SoftConfig, SoftPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftPixelsConfig(SoftConfig):
    """Of `SoftPixelsPolicy`."""

    image: tuple[int, int, int]
    """Height, width and channels of the observation's "rgb": 3 for one camera, 6 for two."""
    state_size: int = 0
    """Numbers in the observation's "state"; 0 does not look at it."""
    channels: tuple[int, ...] = (32, 32, 32)
    """Of the convolutions; each halves height and width."""
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
        self.critic: nn.Module = PictureCritics(eyes, config.picture_features, self._ensemble(features))

    def inputs(self, observation: Observation, instructions: Sequence[str] | None = None) -> Stored:
        """Pictures as bytes; the state as it came."""
        found = {"rgb": looked_at(observation, "rgb", self.config.image, "policy soft_pixels")}
        if self.config.state_size:
            found["state"] = looked_at(observation, "state", (self.config.state_size,), "policy soft_pixels").float()
        return found

    def features(self, inputs: Stored) -> Tensor:
        """What the actor makes of the convolutions' result, beside the state."""
        with torch.no_grad():
            shown = self.critic.eyes(inputs["rgb"])  # type: ignore[operator]
        found: Tensor = self.trunk(shown)
        return torch.cat([found, inputs["state"]], 1) if self.config.state_size else found

    def judged(self, inputs: Stored, made: Tensor) -> Stored:
        """ "rgb", uint8 [N, H, W, 3 k], and "rest", the state and the actions, float32 [N, S + C x A]."""
        actions = torch.tanh(made).flatten(1)
        rest = torch.cat([inputs["state"], actions], 1) if self.config.state_size else actions
        return {"rgb": inputs["rgb"], "rest": rest}
