"""Where the files of a LeRobot data set are, and what its `meta` says, for both versions.

| | version 2 (2.0, 2.1) | version 3 |
|---|---|---|
| rows | a parquet file for each episode | files with many episodes |
| videos | one for each episode and camera | files with many episodes, each from a timestamp on |
| episodes | `meta/episodes.jsonl` | `meta/episodes/chunk-*/file-*.parquet` |
| tasks | `meta/tasks.jsonl` | `meta/tasks.parquet` |

In: a directory. Out: `Info`, and a `Place` for each episode.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf.config.reading import parse_json
from rlinf.data.demonstrations.source import broken, needs

INFO = "meta/info.json"
_HOLE = re.compile(r"\{(\w+)(?::0?\d{1,2}d)?\}")
"""What a path's template may leave open: a name, and how many digits its number has."""
_REST = re.compile(r"[{}]")


@dataclass(frozen=True, slots=True)
class Feature:
    """One column of a data set."""

    dtype: str
    """`video`, `image`, or a type of numbers such as `float32`."""
    shape: tuple[int, ...]
    """Of one row; pictures are height, width, channels."""

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
    """What was to be done, in words; several where that changes within the episode, none if only its rows say."""
    file: Path
    """That has its rows."""
    videos: Mapping[str, tuple[Path, float]]
    """By camera: the video, and the second in it at which the episode begins."""
    success: bool | None
    """As our own writer notes it; None in data sets of others."""
    terminated: bool | None
    """The same of whether the task ended with it."""


def read_info(directory: Path) -> Info:
    """What the data set says of itself.

    Raises:
        ValueError: a field is missing or of another kind, or it is of a version that is not known.
    """
    file = directory / INFO
    with broken(file, "the text"):
        raw = parse_json(file.read_text(encoding="utf-8"))
    with broken(file, "codebase_version"):
        version = int(re.fullmatch(r"v?(\d+)(\.\d+)*", str(raw["codebase_version"]))[1])  # type: ignore[index]
        if version not in (2, 3):
            raise ValueError(f"{raw['codebase_version']} is not known: versions 2 and 3 are")
    with broken(file, "fps"):
        fps = float(raw["fps"])
        if not 0 < fps < 1e6:
            raise ValueError(f"{fps} is no number of rows per second")
    with broken(file, "features"):
        features = {
            str(name): Feature(str(each["dtype"]), tuple(int(size) for size in each["shape"]))
            for name, each in raw["features"].items()
        }
    with broken(file, "data_path"):
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
        with broken(file, f"line {number + 1}"):
            index = int(row["episode_index"])
            named = {"episode_index": index, "episode_chunk": index // info.chunk}
            videos = {}
            for camera in cameras:
                videos[camera] = (_path(directory, str(info.video), {**named, "video_key": camera}), 0.0)
            yield _place(row, index, _path(directory, info.data, named), videos)


def _places_3(directory: Path, info: Info) -> Iterator[Place]:
    with needs("reading LeRobot's data sets"):
        import pyarrow.parquet as pq
    cameras = [name for name, feature in info.features.items() if feature.dtype == "video"]
    files = sorted((directory / "meta" / "episodes").glob("chunk-*/file-*.parquet"))
    if not files:
        raise ValueError(f"{directory / 'meta' / 'episodes'}: there is no chunk-*/file-*.parquet")
    for file in files:
        with broken(file, "rows"):
            schema = pq.read_schema(file).names
            rows = pq.read_table(file, columns=[name for name in schema if not name.startswith("stats/")]).to_pylist()
        for number, row in enumerate(rows):
            with broken(file, f"row {number}"):
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
        with broken(lines, "task_index, task"):
            return {int(row["task_index"]): str(row["task"]) for row in _lines(lines)}
    if not table.is_file():
        return {}
    with needs("reading LeRobot's data sets"):
        import pyarrow.parquet as pq
    with broken(table, "task_index, task"):
        found = {}
        for row in pq.read_table(table).to_pylist():
            text = next(value for value in row.values() if isinstance(value, str))  # pandas' index, whatever its name
            found[int(row["task_index"])] = text
        return found


def _lines(file: Path) -> Iterator[Any]:
    with broken(file, "the text"):
        text = file.read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines()):
        if line.strip():
            with broken(file, f"line {number + 1}"):
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
    found = directory / filled(template, named)
    if not found.resolve().is_relative_to(directory.resolve()):
        raise ValueError(f"the path {template!r} leads out of the data set")
    return found
