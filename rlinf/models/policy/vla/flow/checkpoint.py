"""Directories of pi0 and pi0.5 as openpi writes them, and lerobot: sizes, statistics and names of tensors.

config.json                     action_dim, action_horizon … (lerobot: max_action_dim, chunk_size …)
model.safetensors               names as in `paligemma`; lerobot puts `model.` before all of them
<asset id>/norm_stats.json      statistics of states and actions, also below assets/
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf.data.safetensors_io import write_text
from rlinf.models.policy.published import read_tensors, tensor_files, tensor_shapes

PREFIX = "model."
"""What lerobot puts before names."""
UNUSED = "paligemma_with_expert.gemma_expert.lm_head.weight"
"""A tensor of checkpoints that no computation reads."""
WORDS = "paligemma_with_expert.paligemma.lm_head.weight"
"""The embedding of words."""
_TIED = (
    "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight",
    "paligemma_with_expert.gemma_expert.model.embed_tokens.weight",
)  # copies of the two that some programs write too
_MAIN = "paligemma_with_expert.paligemma.model."
_STATS = "norm_stats.json"
_LEROBOT_SCALES = {"QUANTILES": "q01_q99", "MEAN_STD": "mean_std", "MIN_MAX": "min_max"}
"""Our names of lerobot's kinds of normalisation; others are none of ours."""


def settings_in(directory: Path, scale: str) -> dict[str, Any]:
    """Keys of `PiConfig` that a directory says: sizes by the shapes of its tensors, and its statistics.

    Args:
        directory: of the checkpoint.
        scale: of numbers, as the policy normalises them.

    Raises:
        ValueError: a file is damaged, the tensors are not those of such a model, or numbers are on another scale.
    """
    try:
        about = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{directory / 'config.json'} is damaged: {error}") from error
    shapes = {ours(name): shape for name, shape in tensor_shapes(tensor_files(directory)).items()}
    _check_normalisation(directory, about, scale)
    try:
        found: dict[str, Any] = {
            "width": shapes["action_in_proj.weight"][1],
            "vision": _vision(shapes, about),
            "language": _gemma(shapes, f"{_MAIN}language_model.") | {"vocab_size": shapes[WORDS][0]},
            "expert": _gemma(shapes, "paligemma_with_expert.gemma_expert.model."),
            "statistics": statistics_in(directory),
        }
    except (KeyError, IndexError, ZeroDivisionError) as error:
        raise ValueError(f"{directory} lacks {error}: it is no checkpoint of pi0 or pi0.5") from error
    for key in ("action_horizon", "chunk_size"):
        if isinstance(about.get(key), int):
            found["horizon"] = about[key]
    return found


def _check_normalisation(directory: Path, about: Mapping[str, Any], scale: str) -> None:
    """Refuse a directory of lerobot that says that its numbers are normalised in another way than ours are."""
    kinds: Mapping[str, Any] = about.get("normalization_mapping") or {}
    for feature in ("STATE", "ACTION"):
        kind = kinds.get(feature)
        if kind is not None and _LEROBOT_SCALES.get(str(kind)) != scale:
            raise ValueError(
                f"{directory / 'config.json'}: normalization_mapping says {feature}: {kind}, and this kind of policy "
                f"is normalised by {scale}: it was trained on another scale"
            )


def statistics_in(directory: Path) -> dict[str, Any]:
    """Statistics of each asset, `{"physical-intelligence/libero": {"state": {...}, "actions": {...}}}`.

    Raises:
        ValueError: a file is damaged.
    """
    found: dict[str, Any] = {}
    for path in sorted(directory.rglob(_STATS)):
        asset = path.parent.relative_to(directory).as_posix().removeprefix("assets/")
        try:
            found[asset] = json.loads(path.read_text(encoding="utf-8"))["norm_stats"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error
    return found


def tensors_of(directory: Path, unused: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Names without prefix, and tensors, one at a time; what is not read by any computation goes to `unused`."""
    named = dict(sorted(tensor_files(directory).items()))
    words = {ours(name) for name in named}
    for name, tensor in read_tensors(named):
        own = ours(name)
        if own == UNUSED:
            unused[own] = tensor.clone()  # of the file that a checkpoint may replace
        elif own == _TIED[0] and WORDS not in words:
            yield WORDS, tensor
        elif own not in _TIED:
            yield own, tensor


def prefix_in(directory: Path) -> str:
    """What stands before the names of its tensors."""
    return PREFIX if all(name.startswith(PREFIX) for name in tensor_files(directory)) else ""


def ours(name: str) -> str:
    """A name without lerobot's prefix."""
    return name.removeprefix(PREFIX)


def write_beside(directory: Path, config: Any, has_config: bool) -> None:
    """Statistics, and a config.json where none was read.

    Args:
        directory: there already.
        config: a `PiConfig`.
        has_config: config.json is there.
    """
    for asset, statistics in config.statistics.items():
        (directory / asset).mkdir(parents=True, exist_ok=True)
        write_text(directory / asset / _STATS, json.dumps({"norm_stats": statistics}, indent=2) + "\n")
    if not has_config:
        about = {"action_dim": config.width, "action_horizon": config.horizon, "precision": "bfloat16"}
        heads = {"vision_heads": config.vision["num_attention_heads"]} if "num_attention_heads" in config.vision else {}
        write_text(directory / "config.json", json.dumps(about | heads, indent=2) + "\n")


def unused_like(state: Mapping[str, Tensor], expert_width: int) -> Tensor:
    """What stands for the unused tensor in a policy that was not read: openpi refuses a file without it."""
    words = state[WORDS]
    return torch.zeros(words.shape[0], expert_width, dtype=words.dtype)


def _gemma(shapes: Mapping[str, tuple[int, ...]], prefix: str) -> dict[str, Any]:
    """Sizes of a stack; all published ones have one head for keys and values, so its width is that of a head."""
    layers = len({name.split(".layers.")[1].split(".")[0] for name in shapes if name.startswith(f"{prefix}layers.")})
    first = f"{prefix}layers.0."
    heads, head = shapes[f"{first}self_attn.q_proj.weight"][0], shapes[f"{first}self_attn.k_proj.weight"][0]
    inner, width = shapes[f"{first}mlp.up_proj.weight"]
    return {
        "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads // head, "num_key_value_heads": 1, "head_dim": head,
    }  # fmt: skip


def _vision(shapes: Mapping[str, tuple[int, ...]], about: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of the encoder; heads are 72 wide, or as many as config.json says."""
    prefix = f"{_MAIN}vision_tower.vision_model."
    width, _, patch, _ = shapes[f"{prefix}embeddings.patch_embedding.weight"]
    side = round(shapes[f"{prefix}embeddings.position_embedding.weight"][0] ** 0.5) * patch
    layers = {name.split(".layers.")[1].split(".")[0] for name in shapes if name.startswith(f"{prefix}encoder.layers.")}
    heads = about.get("vision_heads", max(1, width // 72))
    inner = shapes[f"{prefix}encoder.layers.0.mlp.fc1.weight"][0]
    return {
        "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": len(layers),
        "num_attention_heads": heads, "image_size": side, "patch_size": patch,
    }  # fmt: skip
