"""GR00T N1.5 as a policy that acts and learns (arXiv:2503.14734; learning by acting as in pi_RL, arXiv:2510.25889).

    pictures, instruction ─▶ Eagle (SigLIP, 12 layers of Qwen3) ─▶ self-attention ─┐
    state ─▶ one token ─┐                                                          ▼
    32 tokens of its own ├─▶ diffusion transformer, K times ─▶ actions, 16 of 32 numbers each
    noisy actions ───────┘

It reads the authors' directory and writes the same back. Its time runs from noise to actions, so the field is mirrored.
The critic looks at what the backbone says, averaged over tokens, and at the state's token, both without gradient.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rlinf.data.demonstrations.statistics import FeatureStatistics
from rlinf.data.demonstrations.statistics_files import as_groot, write_statistics
from rlinf.models.policy.base import Observation, PolicyConfig, Stored, looked_at
from rlinf.models.policy.layers import perceptron
from rlinf.models.policy.published import to_be_read
from rlinf.models.policy.vla.embodiment.actions import RobotActions
from rlinf.models.policy.vla.embodiment.images import cameras, normalised, resized
from rlinf.models.policy.vla.embodiment.statistics import Scaling, padded
from rlinf.models.policy.vla.embodiment.table import embodiment
from rlinf.models.policy.vla.flow.matching import Field, Velocity, mirrored
from rlinf.models.policy.vla.flow.policy import FlowPolicy
from rlinf.models.policy.vla.gr00t.action_head import ActionHead
from rlinf.models.policy.vla.gr00t.backbone import Eagle
from rlinf.models.policy.vla.gr00t.config import (
    CONFIG,
    EAGLE,
    METADATA,
    ROBOTS,
    Gr00tConfig,
    robot_of,
    scalings_of,
    settings_in,
)
from rlinf.models.policy.vla.gr00t.prompts import Prompts

_HALF = (0.5, 0.5, 0.5)
_CRITIC = (1024, 512, 256)
_INNER = "backbone.eagle_model.vision_model."
"""transformers has no inner vision_model any more; the authors' names have."""


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """What is computed once for an observation."""

    context: Tensor
    """Tokens that the action head attends to, [N, L, width]."""
    before: Tensor
    """The state's token and the learned ones, [N, 1 + T, width]."""


class Gr00tPolicy(FlowPolicy):
    """Looks at "rgb" and "state", reads the instruction, and denoises a chunk."""

    _blank: Tensor

    Config: ClassVar[type[PolicyConfig]] = Gr00tConfig
    published = (CONFIG, "*.safetensors")
    beside = (METADATA, f"{EAGLE}/*")
    needs_path = True
    imitates_padding = False  # the authors mask what the robot does not have
    own = ("critic.*", "deviation.*")
    float32 = ("critic.*", "deviation.*")
    trains = ("action_head.*", "critic.*", "deviation.*")
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0", "q_proj", "k_proj", "v_proj", "o_proj")

    def __init__(self, config: Gr00tConfig):
        head = config.model["action_head_cfg"]
        super().__init__(config, horizon=head["action_horizon"], width=head["action_dim"], features=head["hidden_size"])
        self.row = embodiment("gr00t", config.embodiment)
        robot = robot_of(config)
        self.robot = config.robot_id if config.robot_id is not None else ROBOTS.get(robot, ROBOTS["new_embodiment"])
        self.scalings = scalings_of(config)
        actions = None if self.scalings is None else self.scalings[1]
        self.actions = self.actions_of(config, actions)
        self.cameras = config.cameras or self.row.cameras
        # Without a state the authors take sines and cosines of zeros: 0 for each of the robot's numbers, then 1
        numbers = 0 if self.scalings is None or self.row.state_size else len(self.scalings[0].centre)
        self.register_buffer(
            "_blank", torch.cat([torch.zeros(1, numbers), torch.ones(1, numbers)], 1), persistent=False
        )
        with to_be_read():
            self.backbone = nn.Module()
            self.backbone.eagle_model = Eagle(config.eagle, config.model["backbone_cfg"]["select_layer"])
            self.action_head = ActionHead(head)
        self.critic: nn.Module | None = None
        if config.value_level is not None:
            seen = head["backbone_embedding_dim"] + head["input_embedding_dim"]
            outputs = config.chunk if config.value_level == "action" else 1
            self.critic = perceptron(seen, _CRITIC, outputs, gain=0.0, activation=nn.ReLU)
        self._prompts: Prompts | None = None

    # The authors' directory -------------------------------------------------------------------------------------------

    @classmethod
    def published_settings(cls, directory: Path) -> dict[str, Any]:
        """See `PublishedForm.published_settings`."""
        return settings_in(directory)

    @classmethod
    def with_statistics(cls, name: str, found: Mapping[str, FeatureStatistics], episodes: int) -> dict[str, Any]:
        """See `PublishedForm.with_statistics`."""
        return {"statistics": as_groot(found, name), "robot": name}

    @classmethod
    def actions_of(cls, config: Gr00tConfig, scaling: Scaling | None) -> RobotActions:
        """See `PublishedForm.actions_of`."""
        return RobotActions(embodiment("gr00t", config.embodiment), scaling, config.action_low, config.action_high)

    def open_published(self, directory: Path) -> None:
        """Take Eagle's tokenizer."""
        names = [name for name in self.files if name.startswith(f"{EAGLE}/") and name != f"{EAGLE}/{CONFIG}"]
        if names:
            length = self.config.prompt_length or self.row.prompt_length
            files = {name.removeprefix(f"{EAGLE}/"): self.files[name] for name in names}
            self._prompts = Prompts(files, self.cameras, self._eagle.patches, length)
            self._eagle.picture = self._prompts.picture

    def published_name(self, name: str) -> str:
        """See `PublishedForm.published_name`."""
        return name.replace(_INNER, f"{_INNER}vision_model.", 1) if name.startswith(_INNER) else name

    def write_published(self, directory: Path, state: Mapping[str, Tensor]) -> None:
        """See `PublishedForm.write_published`."""
        if json.loads(self.files.get(METADATA, b"{}")) != self.config.statistics:
            write_statistics(directory / METADATA, self.config.statistics)
        (directory / CONFIG).write_text(json.dumps(self.config.model, indent=2) + "\n", encoding="utf-8")
        words = "backbone.eagle_model.language_model"  # the authors' files have both names of what is tied
        head = state[f"{words}.model.embed_tokens.weight"].clone()
        super().write_published(directory, {f"{words}.lm_head.weight": head, **state})

    def blocks(self) -> Sequence[nn.Module]:
        """Layers of all four transformers."""
        return [
            *self._eagle.vision_model.encoder.layers,
            *self._eagle.language_model.model.layers,
            *self.action_head.vl_self_attention.transformer_blocks,
            *self.action_head.model.transformer_blocks,
        ]

    # What goes in -----------------------------------------------------------------------------------------------------

    def inputs(self, observation: Observation, instructions: Sequence[str] | None = None) -> Stored:
        """Pictures as bytes, the chat as tokens, the state as it came.

        Raises:
            ValueError: something is missing or has another shape, or there is no tokenizer.
        """
        if self._prompts is None:
            raise ValueError(
                f"policy gr00t: no tokenizer lies beside the checkpoint; copy Eagle's files to its folder {EAGLE}/"
            )
        rgb = looked_at(observation, "rgb", self.config.image, "policy gr00t")
        if rgb.shape[3] < 3 * self.cameras:
            raise ValueError(
                f"policy gr00t: pictures of {rgb.shape[3] // 3} cameras came, and {self.cameras} are looked at; set "
                "policy.settings.cameras"
            )
        texts = [self.config.instruction] * len(rgb) if instructions is None else instructions
        found = {"rgb": rgb, "text": self._prompts.encode(texts).to(rgb.device)}
        if self.config.state_size and self.row.state_size:
            found["state"] = looked_at(observation, "state", (self.config.state_size,), "policy gr00t").float()
        return found

    def denoised(self, actions: Tensor, inputs: Stored) -> Tensor:
        """See `FlowPolicy.denoised`."""
        return self.actions.to_model(actions)

    def emitted(self, x: Tensor, inputs: Stored) -> Tensor:
        """See `FlowPolicy.emitted`."""
        return self.actions.to_simulator(x)

    # What comes out ---------------------------------------------------------------------------------------------------

    def context(self, inputs: Stored) -> Read:
        """See `FlowPolicy.context`."""
        dtype = self.action_head.vlln.weight.dtype
        text = inputs["text"]
        said = self._eagle(self._pictures(inputs["rgb"]).to(dtype), text.clamp(min=0), text >= 0)
        state = self._blank.expand(len(text), -1) if "state" not in inputs else inputs["state"]
        if "state" in inputs and self.scalings is not None:
            state = self.scalings[0].normalised(state)
        before = self.action_head.tokens(padded(state, self._state_width).to(dtype), self.robot)
        return Read(self.action_head.read(said), before)

    def velocity(self, context: Read) -> Velocity:
        """See `FlowPolicy.velocity`."""

        def of_time(x: Tensor, t: Tensor) -> Field:
            made, hidden = self.action_head(context.context, context.before, x.to(context.before.dtype), t, self.robot)
            return Field(made.float(), hidden)

        return mirrored(of_time)

    def values(self, context: Read, features: Tensor | None) -> Tensor | None:
        """See `FlowPolicy.values`."""
        if self.critic is None:
            return None
        seen = torch.cat([context.context.mean(1), context.before[:, 0]], -1).detach()
        found: Tensor = self.critic(seen.float())
        return found if self.config.value_level == "action" else found[:, 0]

    @property
    def _eagle(self) -> Eagle:
        return self.backbone.eagle_model  # type: ignore[return-value]  # of a plain module, for the authors' names

    @property
    def _state_width(self) -> int:
        return self.action_head.state_encoder.layer1.W.shape[1]

    def _pictures(self, rgb: Tensor) -> Tensor:
        """Middle parts of the first cameras' pictures at the encoder's size, [N, k, 3, H, H]."""
        found = cameras(rgb)[:, : self.cameras]
        share = math.sqrt(self.config.crop or self.row.crop)
        height, width = (int(side * share) for side in found.shape[-2:])
        # torchvision's CenterCrop rounds, as the authors' transforms do
        above, left = round((found.shape[-2] - height) / 2), round((found.shape[-1] - width) / 2)
        found = found[..., above : above + height, left : left + width]
        return normalised(resized(found, self._eagle.side, "bilinear", rounded=False), _HALF, _HALF)
