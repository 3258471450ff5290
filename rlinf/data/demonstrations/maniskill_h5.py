"""ManiSkill's trajectories: an HDF5 file with a group for each episode, and a JSON file of the same name beside it.

A group `traj_0` holds `actions` [T, A], `obs` (T + 1 rows: an array in mode `state`, otherwise groups of them),
`env_states` (groups, T + 1 rows), `success`, `terminated`, `truncated` [T] and, if they were recorded, `rewards` [T].
Read it keeps what it shows; written it holds everything but texts other than the task's name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.config.reading import parse_json
from rlinf.data.demonstrations import episode as base

_CAMERAS = "obs/sensor_data/"
FILE = "trajectory.h5"
"""Name of the file that is written."""


class ManiSkillH5(base.Episodes):
    """ManiSkill's trajectories.

    By default `obs` is the state; of groups, all arrays of numbers below `obs/agent` and `obs/extra` are, joined in the
    order of the file, and the pictures of all cameras are rgb. A mapping names arrays by their path in the group, such
    as {obs/agent/qpos: state, actions: actions}; `env_states/…` may stand in it, too.
    """

    format = "maniskill"

    def __init__(self, path: Path, names: Mapping[str, str] | None = None):
        super().__init__(path, names)
        self.file = _only_file(path)
        self._entries = _entries(self.file.with_suffix(".json"))
        self.abouts = [
            base.About(each["elapsed_steps"], each.get("success"), each.get("instruction")) for each in self._entries
        ]

    def read(self, index: int, *, pictures: bool = True) -> base.Demonstration:
        with base.needs("reading ManiSkill's trajectories"):
            import h5py
        about, group = self.abouts[index], f"traj_{self._entries[index]['episode_id']}"
        with base.broken(self.file, group), h5py.File(self.file, "r") as file:
            datasets = dict(_arrays(file[group]))
            flags = {
                name: np.asarray(datasets[name][()]).astype(bool)
                for name in ("success", "terminated")
                if name in datasets
            }
            names = _own_names(datasets) if self.names is None else self.names
            with base.broken(self.file, f"{group}/actions"):
                actions = next((theirs for theirs, ours in names.items() if ours == base.ACTIONS), "actions")
                rows = len(datasets[actions])
                if rows != about.rows:
                    raise ValueError(f"it has {rows} rows, and the JSON beside it says elapsed_steps={about.rows}")
            wanted = {theirs for theirs, ours in names.items() if ours != base.IGNORED}
            wanted = {name for name in wanted if pictures or name not in datasets or datasets[name].dtype != np.uint8}
            arrays = {theirs: torch.from_numpy(datasets[theirs][()]) for theirs in wanted if theirs in datasets}
            success = about.success
            if success is None and "success" in flags:
                success = bool(flags["success"].any())
            ended = bool(flags["terminated"].any()) if "terminated" in flags else bool(success)
            if not any(name.startswith(("obs", "env_states")) for name in names):
                raise ValueError(
                    "it shows nothing: it was recorded with obs_mode none. Replay it with "
                    "python -m mani_skill.trajectory.replay_trajectory --obs-mode state --save-traj"
                )
            return base.assembled(
                arrays, names, rows, base.About(rows, success, about.instruction), ended, pictures=pictures
            )


def write_maniskill(directory: Path, demonstrations: Iterable[base.Demonstration], *, task: str = "unknown") -> int:
    """Write `trajectory.h5` and `trajectory.json`.

    Args:
        directory: empty or not there.
        demonstrations: at least one, all with the same arrays.
        task: name of the environment.

    Returns:
        How many episodes were written.

    Raises:
        ValueError: there is none, they differ, or were recorded in chunks.
    """
    with base.needs("writing ManiSkill's trajectories"):
        import h5py
    directory.mkdir(parents=True, exist_ok=True)
    entries: list[dict[str, Any]] = []
    with h5py.File(directory / FILE, "w", track_order=True) as file:
        for number, demo in enumerate(base.alike(demonstrations, "ManiSkill")):
            group = file.create_group(f"traj_{number}", track_order=True)
            for name, rows in _datasets(demo).items():
                group.create_dataset(name, data=rows.numpy(), compression="gzip", compression_opts=5)
            entries.append(
                {
                    "episode_id": number,
                    "episode_seed": None,
                    "elapsed_steps": len(demo.actions),
                    "success": demo.success,
                    "instruction": demo.instruction,
                }
            )
    about = {"env_info": {"env_id": task, "env_kwargs": {}}, "source_type": "rlinf", "episodes": entries}
    (directory / FILE).with_suffix(".json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    return len(entries)


def _datasets(demo: base.Demonstration) -> dict[str, Tensor]:
    """An episode as ManiSkill names its arrays."""
    count = len(demo.actions)
    arrays = {"actions": demo.actions[:, 0], "rewards": demo.rewards[:, 0]}
    last = torch.arange(count) == count - 1
    arrays |= {"terminated": last & demo.terminated, "truncated": last & (not demo.terminated)}
    if demo.success is not None:
        arrays["success"] = last & demo.success
    if demo.observation.keys() == {base.STATE}:
        return {"obs": demo.observation[base.STATE], **arrays}
    for name, rows in demo.observation.items():
        if name == base.RGB:
            parts = {f"{_CAMERAS}camera_{number}/rgb": part for number, part in enumerate(rows.split(3, -1))}
        else:
            parts = {f"obs/extra/{name}" if name == base.STATE else f"obs/{name}": rows}
        arrays |= parts
    return arrays


def _own_names(arrays: Mapping[str, Any]) -> dict[str, str]:
    """Our names for the arrays of an episode, if nobody says otherwise."""
    names: dict[str, str] = {}
    for path in arrays:
        if path.startswith(_CAMERAS):
            if path.endswith("/rgb"):
                names[path] = base.RGB
        elif path == "obs" or path.startswith(("obs/agent/", "obs/extra/")):
            names[path] = base.STATE
        elif path.startswith("obs/") and "sensor_param" not in path:
            names[path] = path.removeprefix("obs/")
        elif path == "actions":
            names[path] = base.ACTIONS
        elif path == "rewards":
            names[path] = base.REWARDS
    return names


def _arrays(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All data sets below a group, by their path in it."""
    for name, each in group.items():
        if hasattr(each, "items"):
            yield from _arrays(each, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", each if each.dtype.kind != "O" else np.zeros(len(each))


def _only_file(path: Path) -> Path:
    if path.is_file():
        return path
    files = sorted([*path.glob("*.h5"), *path.glob("*.hdf5")])
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "none"
        raise FileNotFoundError(f"{path}: name one file with trajectories; there is {names}")
    return files[0]


def _entries(file: Path) -> list[dict[str, Any]]:
    """Read the JSON file's entry of every episode, checked."""
    with base.broken(file, "the text"):
        raw = parse_json(file.read_text(encoding="utf-8"))
    with base.broken(file, "episodes"):
        entries = list(raw["episodes"])
        if not entries:
            raise ValueError("there is none")
    for number, each in enumerate(entries):
        with base.broken(file, f"episodes[{number}]"):
            each["elapsed_steps"], each["episode_id"] = int(each["elapsed_steps"]), int(each["episode_id"])
            if each["elapsed_steps"] < 1:
                raise ValueError(f"elapsed_steps={each['elapsed_steps']} is no episode")
            if not isinstance(each.get("success"), bool | None):
                each["success"] = bool(np.any(each["success"]))
            each["instruction"] = base.instruction_from(each.get("instruction"))
    return entries
