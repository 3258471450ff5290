"""Settings of OpenVLA's policies, and the sizes that a checkpoint's config.json says.

In: keys of a configuration, and the contents of config.json. Out: checked settings, with what is not set taken from the
row of the embodiment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlinf.models.policy.base import Level, PolicyConfig
from rlinf.models.policy.vla.embodiment.table import Embodiment, embodiment

PUBLISHED: Mapping[str, Any] = {
    "model_type": "openvla",
    "vision_backbone_id": "dinosiglip-vit-so-224px",
    "llm_backbone_id": "llama2-7b-pure",
    "arch_specifier": "no-align+fused-gelu-mlp",
    "image_resize_strategy": "resize-naive",
    "image_sizes": [224, 224],
    "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
    "use_fused_vision_backbone": True,
    "pad_token_id": 32000,
    "pad_to_multiple_of": 64,
    "n_action_bins": 256,
    "text_config": {"model_type": "llama", "vocab_size": 32064, "pad_token_id": 32000},
}
"""What OpenVLA-7B's config.json says of the network, OpenVLA-OFT's alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenVlaConfig(PolicyConfig):
    """Of `OpenVlaPolicy`. What is null, or 0 for `chunk`, is taken from the embodiment's row of the table."""

    model: ClassVar[str] = "openvla"

    image: tuple[int, int, int]
    """Height, width and channels of the observation's "rgb": 3 for each camera."""
    embodiment: str
    """The simulator, by a name of the table: libero, maniskill …; plain for one without a row."""
    chunk: int = 0
    """Actions that are decided at a time, C."""
    level: Level = "token"
    """What has a log-prob of its own: each number of an action, each action, or the chunk."""
    action_low: tuple[float, ...] = ()
    """Least value of each number of an action, in the simulator's units; the environment says it."""
    action_high: tuple[float, ...] = ()
    """Greatest value of each."""
    statistics: str | None = None
    """The data set, by its name in the checkpoint's statistics, whose scale actions are on; null for the row's, or
    for the only one."""
    crop: float | None = None
    """Share of the area in the middle of pictures that the model is shown."""
    gripper: str | None = None
    """Convention of the gripper, by its name in `embodiment/grippers.py`."""
    views: int | None = None
    """Cameras that the model looks at, the first ones of the observation."""
    prompt_length: int | None = None
    """Tokens that prompts are padded to."""
    instruction: str = ""
    """What to do where the environment does not say."""
    temperature: float = 1.0
    """Logits are divided by it, when drawing as when scoring; more than 0."""
    top_k: int = 0
    """Only so many of the likeliest bins can be drawn; 0 for all."""
    network: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json that say what the network is like; those that are missing are OpenVLA-7B's. `vision_sizes`
    changes the sizes that `timm_model_ids` stand for."""
    norm_stats: Mapping[str, Any] = field(default_factory=dict)
    """Statistics of actions and states by data set, as in config.json or dataset_statistics.json."""

    def __post_init__(self) -> None:
        row = embodiment(self.model, self.embodiment)
        if self.chunk == 0:
            object.__setattr__(self, "chunk", row.chunk)
        PolicyConfig.__post_init__(self)  # super() does not work in a dataclass with slots
        where = f"policy {self.model}"
        if self.image[2] < 3 or self.image[2] % 3:
            raise ValueError(f"{where}: image={list(self.image)} must have 3 channels for each camera")
        if not self.temperature > 0:
            raise ValueError(f"{where}: temperature={self.temperature} must be more than 0")
        if self.top_k < 0:
            raise ValueError(f"{where}: top_k={self.top_k} must be at least 1, or 0 for all")
        if len(self.action_low) != len(self.action_high):
            raise ValueError(f"{where}: action_low and action_high must be as long as each other")

    @property
    def row(self) -> Embodiment:
        """The embodiment's row, with what is set here in place of it."""
        row = embodiment(self.model, self.embodiment)
        own: dict[str, Any] = {
            "crop": self.crop,
            "gripper": self.gripper,
            "cameras": self.views,
            "prompt_length": self.prompt_length,
            "chunk": self.chunk,
        }
        size = row.action_size if row.picked is not None else self.action_size
        set_here = {name: value for name, value in own.items() if value is not None}
        return dataclasses.replace(row, action_size=size, **set_here)

    @property
    def sizes(self) -> dict[str, Any]:
        """config.json's keys, complete."""
        text = {**PUBLISHED["text_config"], **self.network.get("text_config", {})}
        return {**PUBLISHED, **self.network, "text_config": text}
