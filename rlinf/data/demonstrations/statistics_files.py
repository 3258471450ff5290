"""The files in which published checkpoints keep statistics of the data that they were trained on.

| form | file | who reads it |
|---|---|---|
| `openvla` | `dataset_statistics.json` | OpenVLA, OpenVLA-OFT: `action`, `proprio`, by the name of the data set |
| `openpi` | `norm_stats.json` | pi0, pi0.5: `state`, `actions` |
| `groot` | `metadata.json` | GR00T: `state` and `action` by parts of the body, by the tag of the robot |

In: statistics by feature. Out: one of these, whole or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlinf.data.demonstrations.source import ACTIONS, STATE
from rlinf.data.demonstrations.statistics import FeatureStatistics

FILES = {"openvla": "dataset_statistics.json", "openpi": "norm_stats.json", "groot": "metadata.json"}
"""By form."""
GROOT_TAGS = ("new_embodiment", "gr1", "oxe_droid", "agibot_genie1")
"""Names of robots that GR00T N1.5's authors read; ours may have any."""
Part = tuple[int, int]
"""From and to which number of a feature."""


def as_openvla(found: Mapping[str, FeatureStatistics], name: str, episodes: int) -> dict[str, Any]:
    """As OpenVLA's checkpoints have them.

    Args:
        found: with actions, and the state if there is one.
        name: of the data set, which is the key that a policy un-normalises by.
        episodes: how many there are.
    """
    mine: dict[str, Any] = {"action": _openvla(found[ACTIONS])}
    if STATE in found:
        mine["proprio"] = _openvla(found[STATE])
    return {name: {**mine, "num_transitions": found[ACTIONS].count, "num_trajectories": episodes}}


def as_openpi(found: Mapping[str, FeatureStatistics]) -> dict[str, Any]:
    """As openpi's checkpoints have them; `found` has actions, and the state if there is one."""
    wanted = {name: found[name] for name in (STATE, ACTIONS) if name in found}
    return {"norm_stats": {name: _numbers(each, "mean", "std", "q01", "q99") for name, each in wanted.items()}}


def as_groot(
    found: Mapping[str, FeatureStatistics],
    tag: str,
    parts: Mapping[str, Mapping[str, Part]] | None = None,
    cameras: Mapping[str, Sequence[int]] | None = None,
    fps: float = 10.0,
) -> dict[str, Any]:
    """As GR00T's checkpoints have them, below `experiment_cfg`.

    Args:
        found: with actions, and the state if there is one.
        tag: of the robot.
        parts: by `state` and `action`: which numbers are which part of the body. None makes one part of each.
        cameras: height, width and channels by name.
        fps: rows per second.
    """
    given = {"state": found.get(STATE), "action": found[ACTIONS]}
    statistics: dict[str, Any] = {}
    modalities: dict[str, Any] = {
        "video": {
            name: {"resolution": [int(shape[1]), int(shape[0])], "channels": int(shape[2]), "fps": fps}
            for name, shape in (cameras or {}).items()
        }
    }
    for name, each in given.items():
        if each is None:
            continue
        cut = (parts or {}).get(name) or {name: (0, len(each.mean))}
        numbers = _numbers(each, "max", "min", "mean", "std", "q01", "q99")
        statistics[name] = {
            part: {kind: values[low:high] for kind, values in numbers.items()} for part, (low, high) in cut.items()
        }
        modalities[name] = {
            part: {"absolute": name == "state", "rotation_type": None, "shape": [high - low], "continuous": True}
            for part, (low, high) in cut.items()
        }
    return {tag: {"statistics": statistics, "modalities": modalities, "embodiment_tag": tag}}


def write_statistics(path: Path, content: Mapping[str, Any]) -> None:
    """Write such a file; what is at that path stays until the new one is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.part")
    unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(path)


def _openvla(found: FeatureStatistics) -> dict[str, Any]:
    return {**_numbers(found, "mean", "std", "max", "min", "q01", "q99"), "mask": found.mask.tolist()}


def _numbers(found: FeatureStatistics, *kinds: str) -> dict[str, list[float]]:
    return {kind: getattr(found, kind).tolist() for kind in kinds}
