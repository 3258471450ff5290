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

from rlinf.data.demonstrations.statistics import FeatureStatistics
from rlinf.data.safetensors_io import write_text
from rlinf.models.policy.robots import Scale, Scaling

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
STATISTICS = ("mean", "std", "min", "max", "q01", "q99")
"""Statistics of a feature that kinds of normalisation need."""


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


def settings_of(about: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Keys of policies' configurations that a config.json says: `model`, itself, `chunk`, and sizes of features.

    Args:
        about: config.json.
        directory: that it lies in, for errors.

    Raises:
        ValueError: it lacks something.
    """
    try:
        inputs, outputs = about["input_features"], about["output_features"]
        pictures = [each["shape"] for each in inputs.values() if each["type"] == "VISUAL"]
        states = [inputs[name]["shape"][0] for name in (STATE, WORLD) if name in inputs]
        settings: dict[str, Any] = {"model": about, "chunk": about["n_action_steps"], "state_size": sum(states)}
        settings["action_size"] = outputs[ACTION]["shape"][0]
        if pictures:
            settings["image"] = (*pictures[0][1:3], 3 * len(pictures))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{directory / 'config.json'} lacks {error}: it is no policy of lerobot's") from error
    return settings


def statistics_of(about: Mapping[str, Any], directory: Path) -> dict[str, dict[str, Any]]:
    """Statistics by which a directory's policy normalises, by feature; those of features without any are empty.

    Raises:
        ValueError: there are none of actions, which need some.
    """
    numbers = numbers_in(directory)
    if ACTION not in numbers and about.get("normalization_mapping", {}).get("ACTION") != "IDENTITY":
        raise ValueError(
            f"{directory} has no {PROCESSORS[0]}.json with numbers of actions, without which they have no scale: a "
            "checkpoint of lerobot before 0.4 is brought up to date by its migrate_policy_normalization"
        )
    features = (*about["input_features"], ACTION)
    return {name: {key: row for key, row in numbers.get(name, {}).items() if key in STATISTICS} for name in features}


def counted(statistics: Mapping[str, FeatureStatistics]) -> dict[str, dict[str, list[float]]]:
    """Statistics of data as keys of configurations have them: rounded to float32, as files have them."""
    return {
        part: {name: getattr(each, name).float().tolist() for name in STATISTICS} for part, each in statistics.items()
    }


def by_feature(statistics: Mapping[str, Any], robot: int, world: int) -> dict[str, dict[str, Any]]:
    """Statistics of `state` and `actions`, or by feature, by feature; those of features without any are left out.

    Args:
        statistics: of a configuration.
        robot, world: numbers of the state that are the robot's, and those behind them.
    """
    rows = dict(statistics)
    if (state := rows.pop("state", None)) is not None:
        if robot:
            rows[STATE] = {name: row[:robot] for name, row in state.items()}
        if world:
            rows[WORLD] = {name: row[robot:] for name, row in state.items()}
    if "actions" in rows:
        rows[ACTION] = rows.pop("actions")
    return {name: row for name, row in rows.items() if row}


def scaling(kinds: Mapping[str, str], kind: str, numbers: Mapping[str, Any] | None, size: int) -> Scaling:
    """Between the robot's units and the model's scale.

    Args:
        kinds: config.json's `normalization_mapping`.
        kind: of the feature, such as STATE.
        numbers: its statistics; None: it is used as it is.
        size: its numbers.
    """
    how = kinds.get(kind, "IDENTITY")
    if how == "IDENTITY" or numbers is None:
        return Scaling(torch.zeros(size, dtype=torch.float64), torch.ones(size, dtype=torch.float64))
    return Scaling.of(numbers, SCALES[how], EPSILON)


def check_kinds(about: Mapping[str, Any], policy: str) -> None:
    """See that all kinds of normalisation are among those that there are here.

    Raises:
        ValueError: one is not.
    """
    if odd := [kind for kind in about["normalization_mapping"].values() if kind not in (*SCALES, "IDENTITY")]:
        raise ValueError(
            f"policy {policy}: model.normalization_mapping says {odd[0]}: numbers are normalised by one of "
            f"{', '.join(SCALES)}, or by IDENTITY not at all"
        )


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
        for file in (str(step["state_file"]) for step in steps if step.get("state_file") in files):
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


def write_beside(
    directory: Path,
    files: Mapping[str, bytes],
    about: Mapping[str, Any],
    numbers: Mapping[str, Mapping[str, Any]],
    pictures: Mapping[str, Mapping[str, Any]],
) -> None:
    """Write config.json and processors, as far as the files that have been written are others.

    Args:
        directory: there already, with these files.
        files: by name, as the policy's directory had them.
        about: config.json.
        numbers: statistics by feature, but for those of pictures.
        pictures: of those, a number for each channel.
    """
    if json.loads(files.get("config.json", b"{}")) != about:
        write_text(directory / "config.json", json.dumps(about, indent=2) + "\n")
    if f"{PROCESSORS[0]}.json" in files:
        written = with_numbers(files, numbers)
    else:
        colours = {
            name: {key: torch.tensor(row).view(3, 1, 1) for key, row in each.items()} for name, each in pictures.items()
        }
        flat = {name: {key: torch.tensor(row) for key, row in each.items()} for name, each in numbers.items()}
        written = processors(about, colours | flat)
    for name, content in written.items():
        (directory / name).write_bytes(content)
