"""ACT (arXiv:2304.13705) as a policy: an L1 regression of chunks, in LeRobot's directories and in its numbers.

It imitates as its authors do, by the distance from the demonstrated numbers and a latent that is drawn in training
alone. To learn by acting its actions are the means of normal distributions with learned deviations, which a directory
of lerobot has no place for, as it has none for the value head: that reads what is encoded, without gradient.

A state that an environment shows is the robot's numbers and, where a checkpoint looks at the world's, those behind
them. Actions are in the robot's units by the directory's statistics, and by the simulator's bounds in [-1, 1].
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf.algos.loss_sum import LossSum
from rlinf.data.demonstrations.statistics import FeatureStatistics
from rlinf.models.policy import lerobot
from rlinf.models.policy.act_network import ACTIVATIONS, SIZES, ActNetwork
from rlinf.models.policy.actor_critic import Normal, perceptron
from rlinf.models.policy.base import (
    Drawn,
    Evaluated,
    Generator,
    Observation,
    Policy,
    PolicyConfig,
    Stored,
    looked_at,
    normals,
    uniforms,
)
from rlinf.models.policy.published import to_be_read
from rlinf.models.policy.resnet import BACKBONES
from rlinf.models.policy.robots import RobotActions, Scaling, cameras, resized

logger = logging.getLogger(__name__)

_KINDS = {"VISUAL": "MEAN_STD", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
"""LeRobot's kinds of normalisation for ACT; without pictures also of ENV, the world's state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActConfig(PolicyConfig):
    """Configuration of `ActPolicy`. A directory says all but the simulator's bounds."""

    image: tuple[int, int, int] | None = None
    """Height, width and channels of the observation's "rgb": 3 for each camera; null without pictures."""
    state_size: int = 0
    """Numbers of the observation's "state"; 0 does not look at it."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """LeRobot's config.json, or some of its keys, such as `chunk_size` and `dim_model`; others are as LeRobot's."""
    statistics: Mapping[str, Any] = field(default_factory=dict)
    """Statistics of `state` and `actions`, or by the names of LeRobot's features; empty: numbers are used as they are,
    and actions are in [-1, 1]."""
    pictures: Mapping[str, Any] | None = None
    """Mean and deviation of the pictures of each camera, by its name; null for ImageNet's, as LeRobot trains."""
    gripper: str = "same"
    """Convention of the gripper."""
    log_std: float = -2.0
    """Logarithm of the standard deviations that learning by acting begins with, on the scale of normalised actions."""
    critic_hidden: tuple[int, ...] = (256,)
    """Widths of the value head's hidden layers."""
    action_low: tuple[float, ...] = ()
    """Least value of each number of an action in the simulator; without, -1."""
    action_high: tuple[float, ...] = ()
    """Greatest values; without, 1."""

    def __post_init__(self) -> None:
        PolicyConfig.__post_init__(self)  # super() does not work in a dataclass with slots
        sizes, about = self.sizes, self.about
        for key, choices in (("vision_backbone", BACKBONES), ("feedforward_activation", ACTIVATIONS)):
            if sizes[key] not in choices:
                raise ValueError(f"policy act: model.{key}={sizes[key]!r} must be one of {', '.join(choices)}")
        if about.get("replace_final_stride_with_dilation"):
            raise ValueError("policy act: model.replace_final_stride_with_dilation is not for these ResNets")
        lerobot.check_kinds(about, "act")
        if self.chunk > sizes["chunk_size"]:
            raise ValueError(
                f"policy act: chunk={self.chunk} is more than the model.chunk_size={sizes['chunk_size']} actions that "
                "are predicted"
            )
        lerobot.check_fit(about, "act", self)

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


class ActPolicy(Policy):
    """Looks at "rgb", uint8 [N, H, W, 3 k], and "state", float32 [N, S]; the checkpoint says at which of them."""

    Config: ClassVar[type[PolicyConfig]] = ActConfig
    published = ("config.json", "*.safetensors")
    small_files: ClassVar[tuple[str, ...]] = ("config.json", *lerobot.FILES, "train_config.json")
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
        self.critic: nn.Module | None = None
        if config.value_level is not None:
            outputs = config.chunk if config.value_level == "action" else 1
            self.critic = perceptron(
                config.sizes["dim_model"], config.critic_hidden, outputs, gain=0.0, activation=nn.ReLU
            )
        self._around = lerobot.Processors(config.about, config.statistics, config.pictures)
        self._robot = self.actions_of(config, self._around.actions)

    # Directories ------------------------------------------------------------------------------------------------------

    @classmethod
    def published_settings(cls, directory: Path) -> dict[str, Any]:
        """See `Policy.published_settings`.

        Raises:
            ValueError: it is of another policy, or has no statistics.
        """
        settings = lerobot.opened(directory, "act")
        if settings["model"].get("temporal_ensemble_coeff") is not None:
            logger.warning("%s: temporal_ensemble_coeff is not done here: chunks are not averaged", directory)
        return settings

    @classmethod
    def with_statistics(cls, name: str, statistics: Mapping[str, FeatureStatistics], episodes: int) -> dict[str, Any]:
        """See `Policy.with_statistics`; lerobot's files have no place for the name, and are float32."""
        return {"statistics": lerobot.counted(statistics)}

    @classmethod
    def actions_of(cls, config: ActConfig, scaling: Scaling | None) -> RobotActions:
        """See `Policy.actions_of`."""
        return lerobot.robot_actions(config, scaling)

    def write_published(self, directory: Path, state: Mapping[str, Tensor]) -> None:
        """See `Policy.write_published`; processors with the statistics that it acts by."""
        super().write_published(directory, state)
        self._around.write(directory, self.files)

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

    def encode(self, actions: Tensor, inputs: Stored) -> Tensor:
        """Normalised numbers, [N, C, A]."""
        return self._robot.to_model(actions)

    def draw(self, inputs: Stored, noise: Tensor | None) -> Drawn:
        """See `Policy.draw`."""
        around, values = self._heads(inputs)
        numbers = around.likeliest() if noise is None else around.sample(noise)
        return Drawn(self._robot.to_simulator(numbers), numbers, around.logprobs(numbers), values)

    def score(self, stored: Stored) -> Evaluated:
        """See `Policy.score`."""
        around, values = self._heads(stored)
        return Evaluated(around.logprobs(stored["actions"]), around.entropy(), values)

    @torch.no_grad()
    def value(self, observation: Observation, instructions: Sequence[str] | None = None) -> Tensor:
        """See `Policy.value`."""
        inputs = self.inputs(observation)
        values = self._values(self.model.encoded(*self._seen(inputs), self._middle(inputs))[0])
        if values is None:
            raise ValueError("policy: value_level is null, so there is no critic to ask for values")
        return values if values.ndim == 1 else values[:, 0]

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
        return Normal(mean, self.log_std), self._values(encoded)

    def _values(self, encoded: Tensor) -> Tensor | None:
        """Values [N] or [N, C] by the mean of what is encoded."""
        if self.critic is None:
            return None
        values: Tensor = self.critic(encoded.detach().float().mean(1))
        return values if self.config.value_level == "action" else values[:, 0]

    def _middle(self, inputs: Stored) -> Tensor:
        """The latent where nothing is demonstrated, [N, L]."""
        rows = next(iter(inputs.values()))
        return torch.zeros(len(rows), self.model.latents, device=rows.device)

    def _seen(self, inputs: Stored) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Pictures, the robot's state and the world's, as the network takes them."""
        pictures = self._around.pictures(inputs["rgb"]) if "rgb" in inputs else None
        if "state" not in inputs:
            return pictures, None, None
        own, world = self._around.states(inputs["state"])
        return pictures, own if own.shape[1] else None, world if world.shape[1] else None
