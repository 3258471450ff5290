"""LeRobot's directories, beside the weights: what normalises numbers around a policy, read and written back.

    config.json                     type, features, normalization_mapping: how each kind of feature is normalised
    policy_preprocessor.json        the steps before the policy, each with the file of its numbers
    policy_postprocessor.json       the steps behind it
    policy_preprocessor_step_3_normalizer_processor.safetensors     `observation.state.mean` and so on

Numbers of features are mappings of lists: `{"observation.state": {"mean": [...], "std": [...]}, "action": {...}}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, load_file, save
from torch import Tensor

from rlinf.models.policy.robots import Scale

PROCESSORS = ("policy_preprocessor", "policy_postprocessor")
"""Beginnings of the names of the files in which lerobot keeps what happens around a policy, statistics included."""
FILES = tuple(f"{name}*" for name in PROCESSORS)
"""Patterns of these files."""
LEROBOT = "lerobot"
"""Name of the statistics that stand there."""
STATE, WORLD, ACTION, PICTURES = "observation.state", "observation.environment_state", "action", "observation.image"
"""Names of features: of the robot's state, the world's, actions, and how those of pictures begin."""
SCALES: Mapping[str, Scale] = {"QUANTILES": "q01_q99", "MEAN_STD": "mean_std", "MIN_MAX": "min_max"}
"""Our names of lerobot's kinds of normalisation; others are none of ours, but for IDENTITY, which is none at all."""
EPSILON = 1e-8
"""What lerobot adds to deviations."""


def said_in(directory: Path) -> dict[str, Any]:
    """A directory's config.json.

    Raises:
        ValueError: it is damaged.
    """
    path = directory / "config.json"
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(about, dict):
        raise ValueError(f"{path} must be an object of JSON")
    return about


def numbers_in(directory: Path) -> dict[str, dict[str, list[float]]]:
    """The numbers of the steps that normalise, by feature; none where there are no such files.

    Raises:
        ValueError: a file is damaged.
    """
    rows: dict[str, Tensor] = {}
    for begin in PROCESSORS:
        path = directory / f"{begin}.json"
        try:
            steps = json.loads(path.read_text(encoding="utf-8"))["steps"] if path.is_file() else []
            for file in (Path(str(step["state_file"])) for step in steps if "state_file" in step):
                if file.is_absolute() or ".." in file.parts:
                    raise ValueError(f"state_file={str(file)!r} lies outside of the directory")
                rows |= load_file(directory / file)
        except Exception as error:  # a file that may hold anything
            raise ValueError(f"{path} or a file that it names is damaged: {error}") from error
    numbers: dict[str, dict[str, list[float]]] = {}
    for name, row in rows.items():
        feature, _, statistic = name.rpartition(".")
        numbers.setdefault(feature, {})[statistic] = row.flatten().tolist()
    return numbers


def statistics_of_processors(directory: Path) -> dict[str, Any]:
    """Statistics of the state and of actions, as those of the asset `lerobot`; none without any of actions."""
    numbers = numbers_in(directory)
    parts = {name: numbers[feature] for name, feature in (("state", STATE), ("actions", ACTION)) if feature in numbers}
    return {LEROBOT: parts} if "actions" in parts else {}


def with_numbers(files: Mapping[str, bytes], numbers: Mapping[str, Mapping[str, Any]]) -> dict[str, bytes]:
    """Files of processors that change where features are to be normalised by other numbers.

    Args:
        files: contents of all files by name.
        numbers: by feature; what the files have of other features stays.
    """
    changed: dict[str, bytes] = {}
    for begin in PROCESSORS:
        steps = json.loads(files.get(f"{begin}.json", b'{"steps": []}'))["steps"]
        for file in (str(step["state_file"]) for step in steps if "state_file" in step):
            before = load(files[file])
            after = dict(before)
            for feature, row in numbers.items():
                wanted = {f"{feature}.{name}": torch.tensor(each) for name, each in row.items()}
                had = {name: each for name, each in before.items() if name.rpartition(".")[0] == feature}
                same = wanted.keys() <= had.keys() and all(torch.equal(had[name], wanted[name]) for name in wanted)
                if had and not same:
                    after = {name: each for name, each in after.items() if name not in had} | wanted
            if after.keys() != before.keys() or any(after[name] is not before[name] for name in before):
                changed[file] = save(after)
    return changed


def processors(about: Mapping[str, Any], numbers: Mapping[str, Mapping[str, Tensor]]) -> dict[str, bytes]:
    """Files of processors that rename nothing and normalise by some numbers.

    Args:
        about: config.json, with features and `normalization_mapping`.
        numbers: by feature, in the shape in which they normalise it.
    """
    kinds, outputs = about["normalization_mapping"], about["output_features"]
    device = {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}}
    rows = {f"{feature}.{name}": each for feature, row in numbers.items() for name, each in row.items()}
    files: dict[str, bytes] = {}

    def write(begin: str, features: Mapping[str, Any], kind: str, steps: list[dict[str, Any]], place: int) -> None:
        file = f"{begin}_step_{place}_{kind}_processor.safetensors"
        config = {"eps": EPSILON, "features": features, "norm_map": kinds}
        steps.insert(place, {"registry_name": f"{kind}_processor", "config": config, "state_file": file})
        files[f"{begin}.json"] = (json.dumps({"name": begin, "steps": steps}, indent=2) + "\n").encode()
        files[file] = save({name: each.float().contiguous() for name, each in rows.items()})

    before = [
        {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
        {"registry_name": "to_batch_processor", "config": {}},
        device,
    ]
    write(PROCESSORS[0], {**about["input_features"], **outputs}, "normalizer", before, 3)
    write(PROCESSORS[1], outputs, "unnormalizer", [device], 0)
    return files
