"""Reads LeRobot's data sets episode by episode.

In: a directory with `meta/info.json`. Out: `Episodes`. Features become ours by a mapping, such as
{observation.images.front: rgb, observation.state: state, action: actions}.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.data.demonstrations.episode import Demonstration, instruction_of
from rlinf.data.demonstrations.lerobot.layout import INFO, Feature, Place, read_info, read_places, read_tasks
from rlinf.data.demonstrations.lerobot.videos import pictures_of, read_frames
from rlinf.data.demonstrations.source import (
    ACTIONS,
    IGNORED,
    REWARDS,
    RGB,
    STATE,
    About,
    Episodes,
    assembled,
    broken,
    needs,
)

logger = logging.getLogger(__name__)

KEYS = ("timestamp", "frame_index", "episode_index", "index", "task_index", "next.done", "next.success")
"""Columns that every data set has, or that say how an episode ended."""
_OWN = "observation."
_MOST_OFF_RATE = 0.1
"""Share by which the rows of an episode may be slower or quicker than the data set's rate in the mean."""
_MOST_APART = 1e-3
"""Seconds by which a row's timestamp may differ from its number divided by the rate; data sets keep them as float32."""


class LeRobot(Episodes):
    """A LeRobot data set. By default `action` becomes actions, `next.reward` rewards, `observation.state` state, all
    cameras together rgb in the order of `meta/info.json`; any other `observation.NAME` keeps its name."""

    format = "lerobot"

    def __init__(self, path: Path, names: Mapping[str, str] | None = None):
        super().__init__(path, names)
        self.info = read_info(path)
        self.places = read_places(path, self.info)
        if not self.places:
            raise ValueError(f"{path / 'meta'}: there is no episode")
        features = self.info.features
        self._names = _own_names(features) if names is None else dict(names)
        with broken(path / INFO, "features"):
            for feature in (feature for feature, name in self._names.items() if name != IGNORED):
                if feature not in features:
                    raise ValueError(f"there is no {feature!r}; there are {', '.join(features)}")
        tasks: dict[int, str] = {}
        if any(len(place.tasks) != 1 for place in self.places):
            tasks = read_tasks(path, self.info)
        self._tasks, self._told_of_times = tasks, False
        only = next(iter(tasks.values())) or None if len(tasks) == 1 else None
        one = [place.tasks[0] if len(place.tasks) == 1 else None if place.tasks else only for place in self.places]
        self.abouts = [About(place.length, place.success, text) for place, text in zip(self.places, one, strict=True)]

    def read(self, index: int, *, pictures: bool = True) -> Demonstration:
        place, about = self.places[index], self.abouts[index]
        used = {
            name: ours
            for name, ours in self._names.items()
            if ours != IGNORED and (pictures or not self.info.features[name].picture)
        }
        table = self._rows(place, used)
        arrays: dict[str, Tensor] = {}
        for name in used:
            feature = self.info.features[name]
            if feature.dtype == "video":
                file, start = place.videos[name]
                arrays[name] = read_frames(file, round(start * self.info.fps), place.length, self.info.fps)
            else:
                with broken(place.file, name):
                    arrays[name] = self._column(table, name, feature)
        with broken(place.file, "next.success, next.done, task_index"):
            success, terminated = place.success, place.terminated
            if success is None and "next.success" in table.column_names:
                success = any(table["next.success"].to_pylist())
            if terminated is None:
                terminated = bool(success)
            words = about.instruction
            if words is None and self._tasks:  # LeRobot keeps a task for each row
                words = instruction_of([self._tasks.get(int(row), "") for row in table["task_index"].to_pylist()])
        with broken(place.file, "features"):
            told = About(place.length, success, words)
            return assembled(arrays, used, place.length, told, terminated, pictures=pictures)

    def _rows(self, place: Place, used: Mapping[str, str]) -> Any:
        """The rows of an episode, as a table; checked to be all of them, in order, at the rate of the data set."""
        with needs("reading LeRobot's data sets"):
            import pyarrow.parquet as pq
        with broken(place.file, "rows"):
            schema = pq.read_schema(place.file).names
            columns = [name for name in schema if name in used or name in KEYS]
            # only the row groups that may have it are read, by their statistics
            table = pq.read_table(place.file, columns=columns, filters=[("episode_index", "=", place.index)])
        with broken(place.file, "frame_index"):
            if table["frame_index"].to_pylist() != list(range(place.length)):
                raise ValueError(
                    f"of episode {place.index} it has {len(table)} rows, not each of 0 to {place.length - 1} once, in "
                    "order"
                )
        if "timestamp" in table.column_names:
            with broken(place.file, "timestamp"):
                self._check_times(
                    table["timestamp"].to_numpy(), any(self.info.features[name].dtype == "video" for name in used)
                )
        return table

    def _check_times(self, times: np.ndarray, videos: bool) -> None:
        """Refuse rows whose times are not those of the data set's rate where frames of a video are found by it.

        Elsewhere nothing goes by time: clocks of real robots are told of once, and taken as they are.
        """
        apart = np.abs(times - np.arange(len(times)) / self.info.fps)
        if bool((apart <= _MOST_APART).all()):
            return
        told = f"row {int(apart.argmax())} is {apart.max():.4f} s off {self.info.fps:g} per second"
        between = np.diff(times) * self.info.fps
        regular = bool((between > 0).all()) and abs(float(between.mean()) - 1) <= _MOST_OFF_RATE
        if videos or not regular:
            raise ValueError(
                f"{told}; frames of videos are found by the rate, so write frame_index / fps there if rows and frames "
                "belong together one by one"
            )
        if not self._told_of_times:
            self._told_of_times = True
            logger.warning("%s: %s; rows are taken one after the other, whatever their times", self.path, told)

    def _column(self, table: Any, name: str, feature: Feature) -> Tensor:
        if name not in table.column_names:
            raise KeyError(name)
        cells = table[name].to_pylist() if feature.picture else None
        if cells is not None:
            return pictures_of(cells, self.path)
        found = np.asarray(table[name].to_pylist())
        if found.dtype == object or found.dtype.kind not in "biuf":
            raise ValueError("its rows are not numbers of one shape")
        size = int(np.prod(feature.shape, dtype=np.int64))
        if found.size != len(table) * size:
            raise ValueError(f"its rows have {found.size / len(table):g} numbers, and meta/info.json says {size}")
        shape = () if feature.shape in ((), (1,)) and found.ndim == 1 else feature.shape
        return torch.from_numpy(found.astype(_numpy(feature.dtype), copy=False).reshape(len(table), *shape))


def _numpy(dtype: str) -> np.dtype[Any]:
    found = np.dtype(dtype)
    if found.kind not in "biuf":
        raise ValueError(f"{dtype} is no type of numbers")
    return found


def _own_names(features: Mapping[str, Feature]) -> dict[str, str]:
    """Our names for the features of a data set, if nobody says otherwise."""
    found = {}
    for name, feature in features.items():
        if feature.picture:
            found[name] = RGB
        elif name == "observation.state":
            found[name] = STATE
        elif name == "action":
            found[name] = ACTIONS
        elif name == "next.reward":
            found[name] = REWARDS
        elif name.startswith(_OWN):
            found[name] = name.removeprefix(_OWN)
    return found
