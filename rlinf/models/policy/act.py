"""ACT (arXiv:2304.13705) as a policy: an L1 regression of chunks, in LeRobot's directories and in its numbers.

It imitates as its authors do, by the distance from the demonstrated numbers and a latent that is drawn in training
alone. To learn by acting its actions are the means of normal distributions with learned deviations, which a directory
of lerobot has no place for, as it has none for the value head: that reads what is encoded, without gradient.

A state that an environment shows is the robot's numbers and, where a checkpoint looks at the world's, those behind
them. Actions are in the robot's units by the directory's statistics, and by the simulator's bounds in [-1, 1].
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf.algos.loss_sum import LossSum
from rlinf.models.policy import lerobot
from rlinf.models.policy.act_network import ACTIVATIONS, SIZES, ActNetwork
from rlinf.models.policy.actor_critic import Normal
from rlinf.models.policy.base import (
    Drawn,
    Evaluated,
    Generator,
    Observation,
    PolicyConfig,
    Stored,
    looked_at,
    normals,
    uniforms,
)
from rlinf.models.policy.published import to_be_read
from rlinf.models.policy.resnet import BACKBONES
from rlinf.models.policy.robots import cameras, resized

logger = logging.getLogger(__name__)

_KINDS = {"VISUAL": "MEAN_STD", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
"""LeRobot's kinds of normalisation for ACT; without pictures also of ENV, the world's state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActConfig(lerobot.LeRobotConfig):
    """Configuration of `ActPolicy`."""

    kind: ClassVar[str] = "act"
    log_std: float = -2.0
    """Logarithm of the standard deviations that learning by acting begins with, on the scale of normalised actions."""

    def __post_init__(self) -> None:
        PolicyConfig.__post_init__(self)  # super() does not work in a dataclass with slots
        sizes, about = self.sizes, self.about
        for key, choices in (("vision_backbone", BACKBONES), ("feedforward_activation", ACTIVATIONS)):
            if sizes[key] not in choices:
                raise ValueError(f"policy act: model.{key}={sizes[key]!r} must be one of {', '.join(choices)}")
        if about.get("replace_final_stride_with_dilation"):
            raise ValueError("policy act: model.replace_final_stride_with_dilation is not for these ResNets")
        if self.chunk > sizes["chunk_size"]:
            raise ValueError(
                f"policy act: chunk={self.chunk} is more than the model.chunk_size={sizes['chunk_size']} actions that "
                "are predicted"
            )
        self.check_directory()

    @property
    def sizes(self) -> dict[str, Any]:
        """Sizes of the network."""
        return {name: self.model.get(name, value) for name, value in SIZES.items()}

    @property
    def about(self) -> dict[str, Any]:
        """The whole config.json, as lerobot reads it."""
        # lerobot's ACT takes none that sees nothing of the world
        features = lerobot.features(self.image, self.state_size, self.action_size)
        kinds = _KINDS if self.image is not None else {**_KINDS, "ENV": "MEAN_STD"}
        features["normalization_mapping"] = kinds
        steps = {"n_action_steps": self.chunk, "pretrained_backbone_weights": None}
        return {"type": "act", "n_obs_steps": 1, **features, **steps, **self.sizes, **self.model}


class ActPolicy(lerobot.LeRobotPolicy):
    """Looks at "rgb", uint8 [N, H, W, 3 k], and "state", float32 [N, S]; the checkpoint says at which of them."""

    Config: ClassVar[type[PolicyConfig]] = ActConfig
    own = ("critic.*", "log_std")
    float32 = ("critic.*", "log_std")

    def __init__(self, config: ActConfig):
        super().__init__(config)
        robot, world = lerobot.states_of(config.about)
        self._cameras = lerobot.cameras_of(config.about)
        with to_be_read():
            self.model = ActNetwork(
                config.sizes, pictures=bool(self._cameras), state=robot, world=world, numbers=config.action_size
            )
        self.log_std = nn.Parameter(torch.full((config.chunk, config.action_size), config.log_std))
        self.surround(config.sizes["dim_model"])

    # Directories ------------------------------------------------------------------------------------------------------

    @classmethod
    def published_settings(cls, directory: Path) -> dict[str, Any]:
        """See `Policy.published_settings`.

        Raises:
            ValueError: it is of another policy, or has no statistics.
        """
        settings = super().published_settings(directory)
        if settings["model"].get("temporal_ensemble_coeff") is not None:
            logger.warning("%s: temporal_ensemble_coeff is not done here: chunks are not averaged", directory)
        return settings

    def blocks(self) -> Sequence[nn.Module]:
        """Layers of the transformers."""
        return self.model.blocks()

    # What goes in, and what comes out ---------------------------------------------------------------------------------

    def inputs(self, observation: Observation, instructions: Sequence[str] | None = None) -> Stored:
        """Pictures at the checkpoint's size, and the state as it came."""
        config, stored = self.config, {}
        if names := self._cameras:
            pictures = cameras(looked_at(observation, "rgb", config.image, "policy act"))[:, : len(names)]
            _, height, width = config.about["input_features"][names[0]]["shape"]
            stored["rgb"] = resized(pictures, (height, width), "bilinear").contiguous()
        if config.state_size:
            stored["state"] = looked_at(observation, "state", (config.state_size,), "policy act").float()
        return stored

    def draw(self, inputs: Stored, noise: Tensor | None) -> Drawn:
        """See `Policy.draw`."""
        around, values = self._heads(inputs)
        numbers = around.likeliest() if noise is None else around.sample(noise)
        return Drawn(self.robot.to_simulator(numbers), numbers, around.logprobs(numbers), values)

    def score(self, stored: Stored) -> Evaluated:
        """See `Policy.score`."""
        around, values = self._heads(stored)
        return Evaluated(around.logprobs(stored["actions"]), around.entropy(), values)

    def imitate(self, stored: Stored, mask: Tensor | None = None, generator: Generator = None) -> LossSum:
        """The authors' loss: mean |a - a'| + kl_weight KL, with the latent of the demonstrated actions.

        As lerobot has it, what pads a chunk behind an episode's end is no error, and counts in the mean.

        Args:
            stored: of `demonstrated`.
            mask: which actions count, bool [N, C]; None for all.
            generator: of the latent, as for `act`.
        """
        actions, model = stored["actions"], self.model
        rows, chunk, numbers = actions.shape
        real = torch.ones(rows, chunk, dtype=torch.bool, device=actions.device) if mask is None else mask.bool()
        counts = real.any(1).to(actions.dtype)
        parts, latent = self._seen(stored), self._middle(stored)
        apart = torch.zeros(rows, device=actions.device)
        if model.vae_encoder is not None:
            noise = normals(uniforms(generator, rows, model.latents, actions.device))
            behind = model.horizon - chunk
            whole = functional.pad(actions, (0, 0, 0, behind))
            latent, apart = model.latent(whole, functional.pad(~real, (0, behind), value=True), parts[1], noise)
        error = (model.decoded(*model.encoded(*parts, latent))[:, :chunk] - actions).abs() * real[..., None]
        weight = self.config.about.get("kl_weight", 10.0) * chunk * numbers
        return LossSum(error.sum() + weight * (apart * counts).sum(), chunk * numbers * counts.double().sum())

    def _heads(self, inputs: Stored) -> tuple[Normal, Tensor | None]:
        """Distributions of the chunk's numbers, and values."""
        encoded, positions = self.model.encoded(*self._seen(inputs), self._middle(inputs))
        mean = self.model.decoded(encoded, positions)[:, : self.config.chunk]
        return Normal(mean, self.log_std), self.values(_mean(encoded))

    def features(self, inputs: Stored) -> Tensor:
        """Mean of what is encoded, [N, D]."""
        return _mean(self.model.encoded(*self._seen(inputs), self._middle(inputs))[0])

    def _middle(self, inputs: Stored) -> Tensor:
        """The latent where nothing is demonstrated, [N, L]."""
        rows = next(iter(inputs.values()))
        return torch.zeros(len(rows), self.model.latents, device=rows.device)

    def _seen(self, inputs: Stored) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Pictures, the robot's state and the world's, as the network takes them."""
        pictures = self.around.pictures(inputs["rgb"]) if "rgb" in inputs else None
        if "state" not in inputs:
            return pictures, None, None
        own, world = self.around.states(inputs["state"])
        return pictures, own if own.shape[1] else None, world if world.shape[1] else None


def _mean(encoded: Tensor) -> Tensor:
    return encoded.detach().float().mean(1)
