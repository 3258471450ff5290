"""LeRobot's data sets, versions 2 (2.0, 2.1) and 3: read episode by episode, and written as 2.1 or 3.0.

| | version 2 | version 3 |
|---|---|---|
| rows | a parquet file for each episode | files with many episodes |
| videos | one for each episode and camera | files with many episodes, each from a timestamp on |
| episodes | `meta/episodes.jsonl` | `meta/episodes/chunk-*/file-*.parquet` |
| tasks | `meta/tasks.jsonl` | `meta/tasks.parquet` |

Reading makes `Episodes` of a directory with `meta/info.json`. Features become ours by a mapping, such as
{observation.images.front: rgb, observation.state: state, action: actions}. A frame's number follows from its timestamp
in its video, never from how many were decoded before it.

Writing makes a directory of episodes of single actions, one after the other; only one is in memory. What the format
cannot hold is lost: the observation after the last action. Whether an episode solved its task, and whether the task
ended with it, are noted in columns of our own (`success`, `terminated`) of the episodes' table, which LeRobot ignores.
"""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.config.reading import parse_json
from rlinf.data.demonstrations import episode as episodes
from rlinf.data.demonstrations.statistics import Accumulator

INFO = "meta/info.json"
_HOLE = re.compile(r"\{(\w+)(?::0?\d{1,2}d)?\}")
"""Gaps that a path's template may have: a name, and how many digits its number has."""
_REST = re.compile(r"[{}]")


@dataclass(frozen=True, slots=True)
class Feature:
    """One column of a data set."""

    dtype: str
    """`video`, `image`, or a type of numbers such as `float32`."""
    shape: tuple[int, ...]
    """Shape of one row; pictures are height, width, channels."""

    @property
    def picture(self) -> bool:
        """It is a camera's."""
        return self.dtype in ("video", "image")


@dataclass(frozen=True, slots=True)
class Info:
    """`meta/info.json`."""

    version: int
    """2 or 3."""
    fps: float
    """Rows per second."""
    data: str
    """Template of the path of a file with rows."""
    video: str | None
    """Template of the path of a video; None where there are none."""
    chunk: int
    """Episodes in a directory, in version 2."""
    features: Mapping[str, Feature]
    """By name."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an episode is."""

    index: int
    """Its number in the data set."""
    length: int
    """Rows, T."""
    tasks: tuple[str, ...]
    """The task, in words; several where that changes within the episode, none if only its rows say."""
    file: Path
    """That has its rows."""
    videos: Mapping[str, tuple[Path, float]]
    """By camera: the video, and the second in it at which the episode begins."""
    success: bool | None
    """True if the task was solved, as our own writer notes it; None in data sets of others."""
    terminated: bool | None
    """True if the task ended with the episode, as our own writer notes it; None in data sets of others."""


def read_info(directory: Path) -> Info:
    """Read the description that the data set has of itself.

    Raises:
        ValueError: a field is missing or of another kind, or it is of a version that is not known.
    """
    file = directory / INFO
    with episodes.broken(file, "the text"):
        raw = parse_json(file.read_text(encoding="utf-8"))
    with episodes.broken(file, "codebase_version"):
        version = int(re.fullmatch(r"v?(\d+)(\.\d+)*", str(raw["codebase_version"]))[1])  # type: ignore[index]
        if version not in (2, 3):
            raise ValueError(f"{raw['codebase_version']} is not known: versions 2 and 3 are")
    with episodes.broken(file, "fps"):
        fps = float(raw["fps"])
        if not 0 < fps < 1e6:
            raise ValueError(f"{fps} is no number of rows per second")
    with episodes.broken(file, "features"):
        features = {
            str(name): Feature(str(each["dtype"]), tuple(int(size) for size in each["shape"]))
            for name, each in raw["features"].items()
        }
    with episodes.broken(file, "data_path"):
        data, video = str(raw["data_path"]), raw.get("video_path")
        chunk = max(1, int(raw.get("chunks_size", 1000)))
    return Info(version, fps, data, None if video is None else str(video), chunk, features)


def read_places(directory: Path, info: Info) -> list[Place]:
    """Where every episode is, in the order of their numbers.

    Raises:
        ValueError: a file of `meta` is missing or broken.
    """
    places = _places_2(directory, info) if info.version == 2 else _places_3(directory, info)
    return sorted(places, key=lambda place: place.index)


def _places_2(directory: Path, info: Info) -> Iterator[Place]:
    file = directory / "meta" / "episodes.jsonl"
    cameras = [name for name, feature in info.features.items() if feature.dtype == "video"]
    for number, row in enumerate(_lines(file)):
        with episodes.broken(file, f"line {number + 1}"):
            index = int(row["episode_index"])
            named = {"episode_index": index, "episode_chunk": index // info.chunk}
            videos = {}
            for camera in cameras:
                videos[camera] = (_path(directory, str(info.video), {**named, "video_key": camera}), 0.0)
            yield _place(row, index, _path(directory, info.data, named), videos)


def _places_3(directory: Path, info: Info) -> Iterator[Place]:
    with episodes.needs("reading LeRobot's data sets"):
        import pyarrow.parquet as pq
    cameras = [name for name, feature in info.features.items() if feature.dtype == "video"]
    files = sorted((directory / "meta" / "episodes").glob("chunk-*/file-*.parquet"))
    if not files:
        raise ValueError(f"{directory / 'meta' / 'episodes'}: there is no chunk-*/file-*.parquet")
    for file in files:
        with episodes.broken(file, "rows"):
            schema = pq.read_schema(file).names
            rows = pq.read_table(file, columns=[name for name in schema if not name.startswith("stats/")]).to_pylist()
        for number, row in enumerate(rows):
            with episodes.broken(file, f"row {number}"):
                named = {"chunk_index": row["data/chunk_index"], "file_index": row["data/file_index"]}
                videos = {}
                for camera in cameras:
                    about = f"videos/{camera}/"
                    at = {name: row[about + name] for name in ("chunk_index", "file_index")}
                    path = _path(directory, str(info.video), {**at, "video_key": camera})
                    videos[camera] = (path, float(row[f"{about}from_timestamp"]))
                yield _place(row, int(row["episode_index"]), _path(directory, info.data, named), videos)


def _place(row: Mapping[str, Any], index: int, file: Path, videos: Mapping[str, tuple[Path, float]]) -> Place:
    length, tasks = int(row["length"]), row.get("tasks") or []
    if length < 1:
        raise ValueError(f"length: {length} rows are no episode")
    texts = tuple(dict.fromkeys(str(each) for each in tasks if each)) if isinstance(tasks, list | tuple) else ()
    flags = [row.get(name) if isinstance(row.get(name), bool) else None for name in ("success", "terminated")]
    return Place(index, length, texts, file, videos, *flags)


def read_tasks(directory: Path, info: Info) -> dict[int, str]:
    """The texts of tasks by their numbers, for data sets that name them in rows alone; {} where there is no file."""
    lines, table = directory / "meta" / "tasks.jsonl", directory / "meta" / "tasks.parquet"
    if info.version == 2:
        if not lines.is_file():
            return {}
        with episodes.broken(lines, "task_index, task"):
            return {int(row["task_index"]): str(row["task"]) for row in _lines(lines)}
    if not table.is_file():
        return {}
    with episodes.needs("reading LeRobot's data sets"):
        import pyarrow.parquet as pq
    with episodes.broken(table, "task_index, task"):
        tasks = {}
        for row in pq.read_table(table).to_pylist():
            text = next(value for value in row.values() if isinstance(value, str))  # pandas' index, whatever its name
            tasks[int(row["task_index"])] = text
        return tasks


def _lines(file: Path) -> Iterator[Any]:
    with episodes.broken(file, "the text"):
        text = file.read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines()):
        if line.strip():
            with episodes.broken(file, f"line {number + 1}"):
                row = parse_json(line)
                if not isinstance(row, dict):
                    raise ValueError(f"{line:.40} is no object")
            yield row


def filled(template: str, named: Mapping[str, Any]) -> str:
    """A path's template with its holes filled.

    Raises:
        ValueError: it has others.
    """
    rest = _HOLE.sub(lambda hole: "" if hole[1] in named else hole[0], template)
    if _REST.search(rest):
        raise ValueError(f"the path {template!r} has more to fill in than {', '.join(named)}")
    return template.format(**named)


def _path(directory: Path, template: str, named: Mapping[str, Any]) -> Path:
    """A file of the data set, and of nothing else."""
    path = directory / filled(template, named)
    if not path.resolve().is_relative_to(directory.resolve()):
        raise ValueError(f"the path {template!r} leads out of the data set")
    return path


logger = logging.getLogger(__name__)

KEYS = ("timestamp", "frame_index", "episode_index", "index", "task_index", "next.done", "next.success")
"""Columns that every data set has, or that say how an episode ended."""
_OWN = "observation."
_MOST_OFF_RATE = 0.1
"""Share by which the rows of an episode may be slower or quicker than the data set's rate in the mean."""
_MOST_APART = 1e-3
"""Seconds by which a row's timestamp may differ from its number divided by the rate; data sets keep them as float32."""


class LeRobot(episodes.Episodes):
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
        with episodes.broken(path / INFO, "features"):
            for feature in (feature for feature, name in self._names.items() if name != episodes.IGNORED):
                if feature not in features:
                    raise ValueError(f"there is no {feature!r}; there are {', '.join(features)}")
        tasks: dict[int, str] = {}
        if any(len(place.tasks) != 1 for place in self.places):
            tasks = read_tasks(path, self.info)
        self._tasks, self._told_of_times = tasks, False
        only = next(iter(tasks.values())) or None if len(tasks) == 1 else None
        one = [place.tasks[0] if len(place.tasks) == 1 else None if place.tasks else only for place in self.places]
        self.abouts = [
            episodes.About(place.length, place.success, text) for place, text in zip(self.places, one, strict=True)
        ]

    def read(self, index: int, *, pictures: bool = True) -> episodes.Demonstration:
        place, about = self.places[index], self.abouts[index]
        used = {
            name: ours
            for name, ours in self._names.items()
            if ours != episodes.IGNORED and (pictures or not self.info.features[name].picture)
        }
        table = self._rows(place, used)
        arrays: dict[str, Tensor] = {}
        for name in used:
            feature = self.info.features[name]
            if feature.dtype == "video":
                file, start = place.videos[name]
                arrays[name] = read_frames(file, round(start * self.info.fps), place.length, self.info.fps)
            else:
                with episodes.broken(place.file, name):
                    arrays[name] = self._column(table, name, feature)
        with episodes.broken(place.file, "next.success, next.done, task_index"):
            success, terminated = place.success, place.terminated
            if success is None and "next.success" in table.column_names:
                success = any(table["next.success"].to_pylist())
            if terminated is None:
                terminated = bool(success)
            words = about.instruction
            if words is None and self._tasks:  # LeRobot keeps a task for each row
                words = episodes.instruction_of(
                    [self._tasks.get(int(row), "") for row in table["task_index"].to_pylist()]
                )
        with episodes.broken(place.file, "features"):
            facts = episodes.About(place.length, success, words)
            return episodes.assembled(arrays, used, place.length, facts, terminated, pictures=pictures)

    def _rows(self, place: Place, used: Mapping[str, str]) -> Any:
        """The rows of an episode, as a table; checked to be all of them, in order, at the rate of the data set."""
        with episodes.needs("reading LeRobot's data sets"):
            import pyarrow.parquet as pq
        with episodes.broken(place.file, "rows"):
            schema = pq.read_schema(place.file).names
            columns = [name for name in schema if name in used or name in KEYS]
            # only the row groups that may have it are read, by their statistics
            table = pq.read_table(place.file, columns=columns, filters=[("episode_index", "=", place.index)])
        with episodes.broken(place.file, "frame_index"):
            if table["frame_index"].to_pylist() != list(range(place.length)):
                raise ValueError(
                    f"of episode {place.index} it has {len(table)} rows, not each of 0 to {place.length - 1} once, in "
                    "order"
                )
        if "timestamp" in table.column_names:
            with episodes.broken(place.file, "timestamp"):
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
        problem = f"row {int(apart.argmax())} is {apart.max():.4f} s off {self.info.fps:g} per second"
        between = np.diff(times) * self.info.fps
        regular = bool((between > 0).all()) and abs(float(between.mean()) - 1) <= _MOST_OFF_RATE
        if videos or not regular:
            raise ValueError(
                f"{problem}; frames of videos are found by the rate, so write frame_index / fps there if rows and "
                "frames belong together one by one"
            )
        if not self._told_of_times:
            self._told_of_times = True
            logger.warning("%s: %s; rows are taken one after the other, whatever their times", self.path, problem)

    def _column(self, table: Any, name: str, feature: Feature) -> Tensor:
        if name not in table.column_names:
            raise KeyError(name)
        cells = table[name].to_pylist() if feature.picture else None
        if cells is not None:
            return pictures_of(cells, self.path)
        column = np.asarray(table[name].to_pylist())
        if column.dtype == object or column.dtype.kind not in "biuf":
            raise ValueError("its rows are not numbers of one shape")
        size = int(np.prod(feature.shape, dtype=np.int64))
        if column.size != len(table) * size:
            raise ValueError(f"its rows have {column.size / len(table):g} numbers, and meta/info.json says {size}")
        shape = () if feature.shape in ((), (1,)) and column.ndim == 1 else feature.shape
        return torch.from_numpy(column.astype(_numpy(feature.dtype), copy=False).reshape(len(table), *shape))


def _numpy(dtype: str) -> np.dtype[Any]:
    kind = np.dtype(dtype)
    if kind.kind not in "biuf":
        raise ValueError(f"{dtype} is no type of numbers")
    return kind


def _own_names(features: Mapping[str, Feature]) -> dict[str, str]:
    """Our names for the features of a data set, if nobody says otherwise."""
    names = {}
    for name, feature in features.items():
        if feature.picture:
            names[name] = episodes.RGB
        elif name == "observation.state":
            names[name] = episodes.STATE
        elif name == "action":
            names[name] = episodes.ACTIONS
        elif name == "next.reward":
            names[name] = episodes.REWARDS
        elif name.startswith(_OWN):
            names[name] = name.removeprefix(_OWN)
    return names


CAMERAS = ("main", "wrist")
"""Names of the first two cameras of `rgb`; others are numbered."""
_FILE_BYTES = 100 << 20
"""Bytes of rows in a file of version 3, before compression, as LeRobot has it by default."""
_FILE_FRAMES = 20_000
"""Frames in a video of version 3: a few hundred MB at the usual sizes."""
_CHUNK = 1000
"""Files in a directory."""
_QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
"""That LeRobot writes since its version 0.4."""
_LOOKED_AT = 64
"""Frames of an episode, and rows and columns of each, that statistics of pictures look at, at most."""


def write_lerobot(
    directory: Path,
    demonstrations: Iterable[episodes.Demonstration],
    *,
    fps: float = 10.0,
    version: int = 3,
    videos: bool = True,
) -> int:
    """Write a data set.

    Args:
        directory: empty or not there.
        demonstrations: at least one, all with the same arrays.
        fps: rows per second; LeRobot dates every row by it.
        version: 3, or 2 for 2.1.
        videos: pictures become H.264, which loses some of their sharpness; False keeps them as PNG in the rows.

    Returns:
        How many episodes were written.

    Raises:
        ValueError: there is none, they differ, or were recorded in chunks.
    """
    writer = (_Version3 if version == 3 else _Version2)(directory, fps, videos)
    try:
        for demo in episodes.alike(demonstrations, "LeRobot"):
            writer.add(demo)
    finally:
        writer.close()
    writer.finish()
    return writer.episodes


class _Writer:
    """Base of the writers of both versions."""

    version = ""

    def __init__(self, directory: Path, fps: float, videos: bool):
        with episodes.needs("writing LeRobot's data sets"):
            import pyarrow  # noqa: F401  (before anything is written)
        self.directory, self.fps, self.videos = directory, fps, videos
        self.episodes = self.frames = 0
        self.tasks: dict[str, int] = {}
        self.features: dict[str, dict[str, Any]] = {}
        self._all: dict[str, Accumulator] = {}
        (directory / "meta").mkdir(parents=True, exist_ok=True)

    def add(self, demo: episodes.Demonstration) -> None:
        """Write an episode."""
        numbers, pictures = _split(demo)
        count, first = len(demo.actions), self.frames
        if not self.features:
            self.features = _features(numbers, pictures, self.videos)
        words = demo.instructions or ("",) * count
        tasks = np.array([self.tasks.setdefault(text, len(self.tasks)) for text in words])
        columns = _columns(numbers, pictures, self.features)
        index = np.arange(count)
        columns |= {
            "timestamp": (index / self.fps).astype(np.float32),
            "frame_index": index,
            "episode_index": np.full(count, self.episodes),
            "index": first + index,
            "task_index": tasks,
        }
        stats = self._statistics(numbers, pictures)
        about = {"episode_index": self.episodes, "tasks": [*dict.fromkeys(words)], "length": count}
        about |= {"success": demo.success, "terminated": demo.terminated}
        self.put(about, columns, pictures if self.videos else {}, stats)
        self.episodes, self.frames = self.episodes + 1, first + count

    def put(
        self, about: dict[str, Any], columns: dict[str, Any], videos: Mapping[str, Tensor], stats: Mapping[str, Any]
    ) -> None:
        """Write the files of an episode."""
        raise NotImplementedError

    def close(self) -> None:
        """Close what is open."""

    def finish(self) -> None:
        """Write what is said of all episodes."""
        raise NotImplementedError

    def _statistics(self, numbers: Mapping[str, Tensor], pictures: Mapping[str, Tensor]) -> dict[str, Any]:
        """Statistics of an episode, which are added to those of all; pictures from 0 to 1 by channel, thinned out."""
        statistics = {}
        for name, rows in numbers.items():
            statistics[name] = self._added(name, rows.flatten(1), ())
        for name, rows in pictures.items():
            frame, down, across = (max(1, size // _LOOKED_AT) for size in rows.shape[:3])
            statistics[name] = self._added(name, rows[::frame, ::down, ::across].reshape(-1, 3) / 255.0, (3, 1, 1))
        return statistics

    def _added(self, name: str, rows: Tensor, shape: tuple[int, ...]) -> dict[str, Any]:
        self._all.setdefault(name, Accumulator()).add(rows)
        mine = Accumulator()
        mine.add(rows)
        return _as_lists(mine, shape)

    def _info(self, more: Mapping[str, Any]) -> None:
        info = {
            "codebase_version": self.version,
            "robot_type": "unknown",
            "total_episodes": self.episodes,
            "total_frames": self.frames,
            "total_tasks": len(self.tasks),
            "chunks_size": _CHUNK,
            "fps": int(self.fps) if self.fps == int(self.fps) else self.fps,
            "splits": {"train": f"0:{self.episodes}"},
            **more,
            "features": self.features,
        }
        _write_json(self.directory / "meta" / "info.json", info)  # last: without it nothing is read

    def _all_statistics(self) -> dict[str, Any]:
        pictures = {name for name, each in self.features.items() if each["dtype"] in ("video", "image")}
        return {name: _as_lists(each, (3, 1, 1) if name in pictures else ()) for name, each in self._all.items()}


class _Version2(_Writer):
    """Files for each episode."""

    version = "v2.1"
    data = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
    video = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"

    def __init__(self, directory: Path, fps: float, videos: bool):
        super().__init__(directory, fps, videos)
        self._lines: dict[str, list[dict[str, Any]]] = {"episodes": [], "episodes_stats": []}

    def put(
        self, about: dict[str, Any], columns: dict[str, Any], videos: Mapping[str, Tensor], stats: Mapping[str, Any]
    ) -> None:
        import pyarrow.parquet as pq

        index = about["episode_index"]
        named = {"episode_chunk": index // _CHUNK, "episode_index": index}
        pq.write_table(_table(columns), _made(self.directory / self.data.format(**named)))
        for name, pictures in videos.items():
            file = _made(self.directory / self.video.format(**named, video_key=name))
            with VideoWriter(file, pictures.shape[1:3], self.fps) as video:
                video.add(pictures)
        self._lines["episodes"].append(about)
        self._lines["episodes_stats"].append({"episode_index": index, "stats": stats})

    def finish(self) -> None:
        self._lines["tasks"] = [{"task_index": number, "task": text} for text, number in self.tasks.items()]
        for name, rows in self._lines.items():
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (self.directory / "meta" / f"{name}.jsonl").write_text(text, encoding="utf-8")
        cameras = sum(each["dtype"] == "video" for each in self.features.values())
        counts = {"total_videos": cameras * self.episodes, "total_chunks": (self.episodes - 1) // _CHUNK + 1}
        self._info({**counts, "data_path": self.data, "video_path": self.video if self.videos else None})


class _Version3(_Writer):
    """Files with many episodes, begun anew when rows or frames become too many."""

    version = "v3.0"
    data = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
    video = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"

    def __init__(self, directory: Path, fps: float, videos: bool):
        super().__init__(directory, fps, videos)
        self._number = 0
        self._rows: Any = None  # the file that is being written
        self._bytes = self._begun = 0
        self._videos: dict[str, VideoWriter] = {}
        self._abouts: list[dict[str, Any]] = []

    def put(
        self, about: dict[str, Any], columns: dict[str, Any], videos: Mapping[str, Tensor], stats: Mapping[str, Any]
    ) -> None:
        import pyarrow.parquet as pq

        table = _table(columns)
        if self._rows is not None and (self._bytes > _FILE_BYTES or self.frames - self._begun > _FILE_FRAMES):
            self.close()
            self._number += 1
        at = {"chunk_index": self._number // _CHUNK, "file_index": self._number % _CHUNK}
        if self._rows is None:
            self._rows = pq.ParquetWriter(_made(self.directory / self.data.format(**at)), table.schema)
            self._bytes, self._begun = 0, self.frames
            for name, pictures in videos.items():
                file = _made(self.directory / self.video.format(**at, video_key=name))
                self._videos[name] = VideoWriter(file, pictures.shape[1:3], self.fps)
        self._rows.write_table(table)  # a row group of its own, so that it is read alone
        self._bytes += table.nbytes
        count, before = about["length"], self.frames - self._begun
        row = {**about, "dataset_from_index": self.frames, "dataset_to_index": self.frames + count}
        row |= {f"data/{name}": value for name, value in at.items()}
        for name, pictures in videos.items():
            self._videos[name].add(pictures)
            row |= {f"videos/{name}/{key}": value for key, value in at.items()}
            row |= {f"videos/{name}/from_timestamp": before / self.fps}
            row |= {f"videos/{name}/to_timestamp": (before + count) / self.fps}
        row |= {f"stats/{name}/{kind}": value for name, each in stats.items() for kind, value in each.items()}
        self._abouts.append({**row, "meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0})

    def close(self) -> None:
        if self._rows is not None:
            self._rows.close()
        for video in self._videos.values():
            video.close()
        self._rows, self._videos = None, {}

    def finish(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        meta = self.directory / "meta"
        pq.write_table(pa.Table.from_pylist(self._abouts), _made(meta / "episodes/chunk-000/file-000.parquet"))
        tasks = {"task_index": list(self.tasks.values()), "task": list(self.tasks)}
        pq.write_table(pa.table(tasks, metadata=_metadata_of_pandas("task", "task_index")), meta / "tasks.parquet")
        _write_json(meta / "stats.json", self._all_statistics())
        sizes = {"data_files_size_in_mb": _FILE_BYTES >> 20, "video_files_size_in_mb": 200}
        self._info({**sizes, "data_path": self.data, "video_path": self.video if self.videos else None})


def _split(demo: episodes.Demonstration) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The columns of an episode: numbers, and pictures by camera, T rows each."""
    numbers, pictures = {"action": demo.actions[:, 0]}, {}
    for name, rows in demo.observation.items():
        if name == episodes.RGB:
            for number, camera in enumerate(rows[:-1].split(3, -1)):
                called = CAMERAS[number] if number < len(CAMERAS) else f"camera_{number}"
                pictures[f"observation.images.{called}"] = camera
        else:
            numbers["observation.state" if name == episodes.STATE else f"observation.{name}"] = rows[:-1]
    numbers["next.reward"] = demo.rewards
    return numbers, pictures


def _features(numbers: Mapping[str, Tensor], pictures: Mapping[str, Tensor], videos: bool) -> dict[str, dict[str, Any]]:
    features: dict[str, dict[str, Any]] = {}
    for name, rows in numbers.items():
        dtype = str(rows.dtype).removeprefix("torch.")
        features[name] = {"dtype": dtype, "shape": list(rows.shape[1:]) or [1], "names": None}
    for name, rows in pictures.items():
        kind = "video" if videos else "image"
        features[name] = {"dtype": kind, "shape": list(rows.shape[1:]), "names": ["height", "width", "channels"]}
    numbered = ("frame_index", "episode_index", "index", "task_index")
    own = {"timestamp": "float32", **dict.fromkeys(numbered, "int64")}
    return features | {name: {"dtype": dtype, "shape": [1], "names": None} for name, dtype in own.items()}


def _columns(
    numbers: Mapping[str, Tensor], pictures: Mapping[str, Tensor], features: Mapping[str, Any]
) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name, rows in numbers.items():
        columns[name] = rows.numpy().reshape(-1) if features[name]["shape"] == [1] else rows.numpy()
    for name, rows in pictures.items():
        if features[name]["dtype"] == "image":
            columns[name] = [{"bytes": png_of(picture), "path": None} for picture in rows]
    return columns


def _table(columns: Mapping[str, Any]) -> Any:
    import pyarrow as pa

    return pa.table({name: _array(rows) for name, rows in columns.items()})


def _array(rows: Any) -> Any:
    """A column: numbers, lists of them of one length (of lists, for more dimensions), or pictures."""
    import pyarrow as pa

    if not isinstance(rows, np.ndarray):
        return pa.array(rows, pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    column = pa.array(np.ascontiguousarray(rows).reshape(-1))
    for size in reversed(rows.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column


def _as_lists(rows: Accumulator, shape: tuple[int, ...]) -> dict[str, Any]:
    """Statistics as LeRobot has them, of its quantiles too: policies that normalise by those refuse a set without."""
    result = rows.done()
    numbers: dict[str, Any] = {kind: getattr(result, kind).numpy() for kind in ("min", "max", "mean", "std")}
    numbers |= zip(_QUANTILES, rows.quantiles([*_QUANTILES.values()]), strict=True)
    return {kind: (each.reshape(shape) if shape else each).tolist() for kind, each in numbers.items()} | {
        "count": [result.count]
    }


def _metadata_of_pandas(index: str, number: str) -> dict[str, str]:
    """Metadata by which pandas, with which LeRobot reads this table, takes the column of texts for the index."""
    columns = [
        {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": stored, "metadata": None}
        for name, kind, stored in ((number, "int64", "int64"), (index, "unicode", "object"))
    ]
    return {"pandas": json.dumps({"index_columns": [index], "column_indexes": [], "columns": columns})}


def _made(file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    return file


def _write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=4) + "\n", encoding="utf-8")


# Videos and pictures --------------------------------------------------------------------------------------------------

_SLACK = 0.25
"""How far a frame's timestamp may be off its number, in frames: containers round timestamps to their own time base."""


def read_frames(file: Path, first: int, count: int, fps: float) -> Tensor:
    """Neighbouring frames of a video.

    Args:
        file: the video.
        first: number of the first one: its timestamp times `fps`.
        count: how many, n.
        fps: frames per second.

    Returns:
        uint8 [n, H, W, 3], RGB.

    Raises:
        ValueError: the file cannot be decoded, or lacks one of them.
    """
    with episodes.needs("reading videos"):
        import av
    frames: list[Any] = [None] * count
    with episodes.broken(file, f"frames {first} to {first + count - 1}"), av.open(str(file)) as container:
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        base = stream.time_base
        if base is None:
            raise ValueError("it has no time base")
        start = stream.start_time or 0
        # to the key frame before the first one wanted; half a frame earlier, since timestamps are rounded
        container.seek(
            max(start, start + int((Fraction(first) - Fraction(1, 2)) / Fraction(fps) / base)), stream=stream
        )
        for frame in container.decode(stream):
            if frame.pts is None:
                raise ValueError("a frame has no timestamp")
            place = float((frame.pts - start) * base) * fps
            number = round(place)
            if abs(place - number) > _SLACK:
                raise ValueError(f"a frame stands at {place:.2f} frames of {fps:g} a second, between two of them")
            if first <= number < first + count:
                frames[number - first] = frame.to_ndarray(format="rgb24")
            if number >= first + count - 1:
                break
        missing = [first + place for place, picture in enumerate(frames) if picture is None]
        if missing:
            raise ValueError(f"it has no frame {missing[0]}, and lacks {len(missing)} of these in all")
        return torch.from_numpy(np.stack(frames))


class VideoWriter:
    """Writes a video, part by part: H.264 in MP4, which loses some of the colours' sharpness.

    Args:
        file: to write.
        size: height and width.
        fps: frames per second.
    """

    def __init__(self, file: Path, size: Sequence[int], fps: float):
        with episodes.needs("writing videos"):
            import av
        self._av, self._file, self._frames = av, file, 0
        self._container = av.open(str(file), "w")
        height, width = size
        self._stream: Any = self._container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1000))
        self._stream.width, self._stream.height = width, height
        # half as many colours as points need even sizes
        self._stream.pix_fmt = "yuv420p" if height % 2 == width % 2 == 0 else "yuv444p"
        # every second frame is a key frame, which makes any of them quick to reach
        self._stream.options = {"crf": "18", "g": "2", "bf": "0"}

    def add(self, pictures: Tensor) -> None:
        """Append frames, uint8 [n, H, W, 3]."""
        with episodes.broken(self._file, "video"):
            for row in pictures.numpy():
                frame = self._av.VideoFrame.from_ndarray(np.ascontiguousarray(row), format="rgb24")
                frame.pts = self._frames
                self._frames += 1
                self._container.mux(self._stream.encode(frame))

    def close(self) -> None:
        """Write what is left."""
        with episodes.broken(self._file, "video"):
            if self._frames:
                self._container.mux(self._stream.encode())
            self._container.close()

    def __enter__(self) -> VideoWriter:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def png_of(picture: Tensor) -> bytes:
    """A picture as PNG, without loss; uint8 [H, W, 3]."""
    with episodes.needs("writing pictures"):
        from PIL import Image
    file = io.BytesIO()
    Image.fromarray(picture.numpy()).save(file, "png")
    return file.getvalue()


def pictures_of(cells: Sequence[Any], directory: Path) -> Tensor:
    """Pictures out of a column: each the bytes of a PNG or JPEG, a path, or a struct of both.

    Args:
        cells: of the column.
        directory: that paths are relative to.

    Returns:
        uint8 [n, H, W, 3].

    Raises:
        ValueError: one cannot be read.
    """
    with episodes.needs("reading pictures"):
        from PIL import Image
    pictures = []
    for cell in cells:
        content, path = (cell.get("bytes"), cell.get("path")) if isinstance(cell, dict) else (cell, None)
        if isinstance(content, str):
            content, path = None, content
        if content is None and path is None:
            raise ValueError("a picture has neither bytes nor a path")
        if content is None and not (directory / str(path)).resolve().is_relative_to(directory.resolve()):
            raise ValueError(f"the picture {path!r} lies outside of the data set")
        with Image.open(directory / str(path) if content is None else io.BytesIO(content)) as picture:
            pictures.append(np.asarray(picture.convert("RGB")))
    return torch.from_numpy(np.stack(pictures))
