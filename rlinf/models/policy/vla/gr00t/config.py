"""What GR00T is made of: the authors' configuration, Eagle's, and the statistics of robots.

In: `config.json`, `experiment_cfg/metadata.json` and Eagle's own files of a checkpoint. Out: settings of the policy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlinf.models.policy.vla.embodiment.statistics import Scaling
from rlinf.models.policy.vla.embodiment.table import embodiment
from rlinf.models.policy.vla.flow.policy import FlowConfig

CONFIG, METADATA, EAGLE = "config.json", "experiment_cfg/metadata.json", "eagle"
"""Files of a checkpoint, and the folder in it for Eagle's configuration and tokenizer. The authors keep the latter
beside their code (`gr00t/model/backbone/eagle2_hg_model`); it is to be copied."""
ROBOTS = {"new_embodiment": 31, "libero_franka": 31, "maniskill_widowx": 30, "gr1": 24, "oxe_droid": 17,
          "agibot_genie1": 26}  # fmt: skip
"""Which weights of the projectors are whose, by the name of the statistics."""
EAGLE_CONFIG: Mapping[str, Any] = {
    "image_token_index": 151669,
    "vision_config": {
        "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
        "image_size": 224, "patch_size": 14, "hidden_act": "gelu_pytorch_tanh", "vision_use_head": False,
    },
    "text_config": {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151680, "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""Of the published GR00T N1.5, where no `eagle/config.json` lies beside it."""


MODEL: Mapping[str, Any] = {
    "model_type": "gr00t_n1_5",
    "backbone_cfg": {"select_layer": 12},
    "action_head_cfg": {
        "action_dim": 32, "action_horizon": 16, "max_state_dim": 64, "hidden_size": 1024, "input_embedding_dim": 1536,
        "backbone_embedding_dim": 2048, "num_inference_timesteps": 4, "num_target_vision_tokens": 32,
        "num_timestep_buckets": 1000, "max_num_embodiments": 32, "max_seq_len": 1024,
        "diffusion_model_cfg": {
            "num_layers": 16, "num_attention_heads": 32, "attention_head_dim": 48, "output_dim": 1024,
            "cross_attention_dim": 2048, "interleave_self_attention": True, "norm_type": "ada_norm",
            "positional_embeddings": None,
        },
        "vl_self_attention_cfg": {
            "num_layers": 4, "num_attention_heads": 32, "attention_head_dim": 64, "positional_embeddings": None,
        },
    },
}  # fmt: skip
"""The published GR00T N1.5, where no checkpoint is named: for estimates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gr00tConfig(FlowConfig):
    """Of `Gr00tPolicy`."""

    model: Mapping[str, Any] = field(default_factory=lambda: MODEL)
    """The authors' config.json: `action_head_cfg` and `backbone_cfg`."""
    eagle: Mapping[str, Any] = field(default_factory=lambda: EAGLE_CONFIG)
    """Eagle's config.json: `vision_config`, `text_config`, `image_token_index`."""
    statistics: Mapping[str, Any] = field(default_factory=dict)
    """`metadata.json`: by robot, least and greatest of each number of its state and actions; none: numbers are as the
    model has them."""
    image: tuple[int, int, int]
    """Height, width and channels of the observation's "rgb": 3 for each camera."""
    state_size: int = 0
    """Numbers of the observation's "state"."""
    embodiment: str = "libero"
    """Simulator, a row of `vla/embodiment/table.py`."""
    robot: str | None = None
    """Name of the statistics; null takes the first of the row that the checkpoint has."""
    robot_id: int | None = None
    """Which weights of the projectors; null follows from `robot`."""
    prompt_length: int | None = None
    """Tokens that prompts are padded to; null as in the row. The model reads padding, so it changes what it does."""
    cameras: int | None = None
    """Pictures that the model looks at; null as in the row."""
    crop: float | None = None
    """Share of a picture's area that is kept in the middle; null as in the row."""
    instruction: str = "Perform the default behavior."
    """What to do where the environment does not say."""
    action_low: tuple[float, ...] = ()
    """Least value of each number of an action, in the simulator's units."""
    action_high: tuple[float, ...] = ()
    """Greatest value of each number of an action."""

    def __post_init__(self) -> None:
        FlowConfig.__post_init__(self)  # super() does not work in a dataclass with slots
        embodiment("gr00t", self.embodiment)
        for key in ("action_head_cfg", "backbone_cfg"):
            if key not in self.model:
                raise ValueError(f"policy gr00t: model lacks {key}; it is the authors' config.json")
        if (width := self.model["backbone_cfg"].get("project_to_dim")) is not None:
            raise ValueError(f"policy gr00t: backbone_cfg.project_to_dim={width} is of GR00T N1, not of N1.5")


def settings_in(directory: Path) -> dict[str, Any]:
    """What an authors' directory says: `model`, `eagle` if it lies there, `statistics`.

    Raises:
        ValueError: it is of another model, or damaged.
    """
    model = _read(directory / CONFIG)
    if model.get("model_type") not in (None, "gr00t_n1_5"):
        raise ValueError(
            f"{directory / CONFIG}: model_type={model.get('model_type')} is no GR00T N1.5, which is what there is here"
        )
    found = {"model": model}
    for key, file in (("eagle", f"{EAGLE}/{CONFIG}"), ("statistics", METADATA)):
        if (directory / file).is_file():
            found[key] = _read(directory / file)
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must be an object of JSON")
    return found


def robot_of(config: Gr00tConfig) -> str:
    """Name of the statistics that are used.

    Raises:
        ValueError: the checkpoint has none of that name, or several of which none is the row's.
    """
    known = [*config.statistics]
    wanted = (config.robot,) if config.robot else embodiment("gr00t", config.embodiment).statistics
    for name in wanted:
        if name in known or not known:
            return name
    if config.robot is None and len(known) == 1:
        return known[0]
    raise ValueError(
        f"policy gr00t: the checkpoint has statistics of {', '.join(known)}, not of {' or '.join(wanted)}: set "
        "policy.settings.robot"
    )


def scalings_of(config: Gr00tConfig) -> tuple[Scaling, Scaling] | None:
    """Between the robot's units and the model's scale, of the state and of actions; None without statistics."""
    if not config.statistics:
        return None
    robot = robot_of(config)
    try:
        found = config.statistics[robot]["statistics"]
        looks = config.state_size and embodiment("gr00t", config.embodiment).state_size
        parts = [_joined(found["state"] if looks else found.get("state", {})), _joined(found["action"])]
    except (KeyError, TypeError) as error:
        raise ValueError(f"policy gr00t: statistics of {robot} lack {error}") from error
    return Scaling.of(parts[0], "min_max"), Scaling.of(parts[1], "min_max")


def _joined(parts: Mapping[str, Any]) -> dict[str, list[float]]:
    """Least and greatest of numbers that are kept by name, such as x, y, z and gripper, one behind the other."""
    return {name: [float(each) for part in parts.values() for each in part[name]] for name in ("min", "max")}
