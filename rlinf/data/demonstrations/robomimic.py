"""Demonstrations of robomimic, and LIBERO's own: HDF5 files with a group `data/demo_0` for each episode.

A group holds `actions` [T, A], `obs` and maybe `next_obs` (arrays of T rows each), `rewards` and `dones` [T]. The task
in words stands at the group (`ep_meta`, `lang`) or at `data` (`problem_info`, `language_instruction`: LIBERO's).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlinf.config.reading import parse_json
from rlinf.data.demonstrations import episode as base

ENDINGS = (".hdf5", ".h5")
"""Of files of this format, and of ManiSkill's, beside which a JSON file of the same name lies."""
_STATES = (
    ("ee_states", "gripper_states"),
    ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos", "object"),
)
"""Arrays that are the state, if all are there: those of LIBERO's published policies, and robomimic's own choice."""
_CAMERAS = ("_image", "_rgb")
_FIRST = "agentview"


class Robomimic(base.Episodes):
    """A file, or all of a directory in the order of their names, as of a suite of LIBERO, whose tasks are files.

    By default `actions` are actions, `rewards` rewards, and all pictures below `obs` rgb, those of agentview first. The
    state is `ee_states` and `gripper_states` (LIBERO), or the place and turn of the gripper, its fingers and `object`
    (robomimic); where not all of them are there, all numbers below `obs`. A mapping names arrays by their path in the
    group, such as {obs/object: state, obs/agentview_image: rgb, actions: actions}.

    LIBERO keeps pictures as OpenGL draws them, from below, and says so; they are turned by half a turn, as its
    simulator's are here and for the policies published for it. An episode succeeded if it has a reward; where rewards
    are others than 0 and 1, nobody says.
    """

    format = "robomimic"

    def __init__(self, path: Path, names: Mapping[str, str] | None = None):
        super().__init__(path, names)
        files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.suffix in ENDINGS)
        self._places = [(file, group, about) for file in files for group, about in _abouts(file)]
        self.abouts = [about for *_, about in self._places]

    def read(self, index: int, *, pictures: bool = True) -> base.Demonstration:
        file, group, about = self._places[index]
        with base.broken(file, f"data/{group}"), _opened(file) as content:
            data = content["data"]
            upside_down = _text(data.attrs, "macros_image_convention") == "opengl"
            recorded = dict(_arrays(data[group]))
            names = _own_names(recorded) if self.names is None else self.names
            arrays = {}
            for name in names:
                if name not in recorded or names[name] == base.IGNORED:
                    continue
                picture = recorded[name].dtype == np.uint8 and recorded[name].ndim == 4
                if not picture or pictures:
                    rows = recorded[name][()]
                    if (last := recorded.get(f"next_{name}")) is not None:
                        rows = np.concatenate([rows, last[-1:]])
                    rows = rows[:, ::-1, ::-1] if picture and upside_down else rows
                    arrays[name] = torch.from_numpy(np.ascontiguousarray(rows))
            ended = bool(np.any(recorded["dones"][()])) if "dones" in recorded else bool(about.success)
            return base.assembled(arrays, names, about.rows, about, ended, pictures=pictures)


def _opened(file: Path) -> Any:
    with base.needs("reading demonstrations of robomimic and LIBERO"):
        import h5py
    return h5py.File(file, "r")


def _abouts(file: Path) -> list[tuple[str, base.About]]:
    """The episodes of a file by the names of their groups, in the order of their numbers.

    Raises:
        ValueError: there is none, or one has no actions.
    """
    with base.broken(file, "the file"), _opened(file) as content:
        groups = [name for name in content.get("data", ()) if name.removeprefix("demo_").isdecimal()]
        if not groups:
            raise ValueError(
                "it holds neither data/demo_0 and so on, as robomimic's and LIBERO's files do, nor lies a JSON file of "
                f"the same name beside it ({file.with_suffix('.json').name}), as beside ManiSkill's"
            )
        task = parse_json(_text(content["data"].attrs, "problem_info") or "{}").get("language_instruction")
        abouts = []
        for group in sorted(groups, key=lambda name: int(name.removeprefix("demo_"))):
            with base.broken(file, f"data/{group}"):
                episode = content["data"][group]
                rows = len(episode["actions"])
                if not rows:
                    raise ValueError("actions has no row")
                success = None
                if "rewards" in episode:
                    rewards = np.asarray(episode["rewards"])
                    success = bool(rewards.any()) if np.isin(rewards, (0, 1)).all() else None
                words = parse_json(_text(episode.attrs, "ep_meta") or "{}").get("lang") or task
                words = "".join(words) if words else None  # older files of LIBERO's have a list of letters
                abouts.append((group, base.About(rows, success, words)))
        return abouts


def _text(attributes: Mapping[str, Any], name: str) -> str | None:
    return base.text_of(attributes[name]) if name in attributes else None


def _arrays(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The arrays of an episode by their path in its group."""
    for name, each in group.items():
        if hasattr(each, "items"):
            yield from _arrays(each, f"{prefix}{name}/")
        elif each.dtype.kind in "biuf":
            yield f"{prefix}{name}", each


def _own_names(arrays: Mapping[str, Any]) -> dict[str, str]:
    """Our names for the arrays of an episode, if nobody says otherwise."""
    below = [name for name in arrays if name.startswith("obs/")]
    pictures = [name for name in below if name.endswith(_CAMERAS) and arrays[name].dtype == np.uint8]
    pictures.sort(key=lambda name: (_FIRST not in name, name))
    states = [name for name in below if name not in pictures and arrays[name].ndim < 3]
    for wanted in ([f"obs/{name}" for name in choice] for choice in _STATES):
        if set(wanted) <= set(states):
            states = wanted
    names = dict.fromkeys(states, base.STATE) | dict.fromkeys(pictures, base.RGB)
    others = {"actions": base.ACTIONS, "rewards": base.REWARDS}
    return names | {name: ours for name, ours in others.items() if name in arrays}


__all__ = ["ENDINGS", "Robomimic"]
