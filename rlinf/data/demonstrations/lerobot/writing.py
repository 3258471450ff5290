"""Writes LeRobot's data sets, versions 2.1 and 3.0.

In: episodes of single actions, one after the other; only one is in memory. Out: a directory. What the format cannot
hold is lost: what was seen after the last action. Whether an episode solved its task, and whether the task ended with
it, are noted in columns of our own (`success`, `terminated`) of the episodes' table, which LeRobot passes over.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from rlinf.data.demonstrations.episode import Demonstration, mistake_between
from rlinf.data.demonstrations.lerobot.videos import VideoWriter, png_of
from rlinf.data.demonstrations.source import RGB, STATE, needs, plain
from rlinf.data.demonstrations.statistics import Accumulator

CAMERAS = ("main", "wrist")
"""Names of the first two cameras of `rgb`; others are numbered."""
_FILE_BYTES = 100 << 20
"""Of rows in a file of version 3, before compression, as LeRobot has it by default."""
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
    demonstrations: Iterable[Demonstration],
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
    first: Demonstration | None = None
    try:
        for number, shown in enumerate(demonstrations):
            first = plain(shown, "LeRobot") if first is None else first
            if (mistake := mistake_between(shown, first)) is not None:
                raise ValueError(f"episode {number} does not go with the others: {mistake}")
            writer.add(plain(shown, "LeRobot"))
    finally:
        writer.close()
    if first is None:
        raise ValueError("there is no episode to write")
    writer.finish()
    return writer.episodes


class _Writer:
    """What both versions have in common."""

    version = ""

    def __init__(self, directory: Path, fps: float, videos: bool):
        with needs("writing LeRobot's data sets"):
            import pyarrow  # noqa: F401  (before anything is written)
        self.directory, self.fps, self.videos = directory, fps, videos
        self.episodes = self.frames = 0
        self.tasks: dict[str, int] = {}
        self.features: dict[str, dict[str, Any]] = {}
        self._all: dict[str, Accumulator] = {}
        (directory / "meta").mkdir(parents=True, exist_ok=True)

    def add(self, shown: Demonstration) -> None:
        """Write an episode."""
        numbers, pictures = _split(shown)
        count, first = len(shown.actions), self.frames
        if not self.features:
            self.features = _features(numbers, pictures, self.videos)
        words = shown.instructions or ("",) * count
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
        about |= {"success": shown.success, "terminated": shown.terminated}
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
        """Of an episode, and added to those of all; pictures from 0 to 1 by channel, thinned out."""
        found = {}
        for name, rows in numbers.items():
            found[name] = self._added(name, rows.flatten(1), ())
        for name, rows in pictures.items():
            frame, down, across = (max(1, size // _LOOKED_AT) for size in rows.shape[:3])
            found[name] = self._added(name, rows[::frame, ::down, ::across].reshape(-1, 3) / 255.0, (3, 1, 1))
        return found

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


def _split(shown: Demonstration) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The columns of an episode: numbers, and pictures by camera, T rows each."""
    numbers, pictures = {"action": shown.actions[:, 0]}, {}
    for name, rows in shown.observation.items():
        if name == RGB:
            for number, camera in enumerate(rows[:-1].split(3, -1)):
                called = CAMERAS[number] if number < len(CAMERAS) else f"camera_{number}"
                pictures[f"observation.images.{called}"] = camera
        else:
            numbers["observation.state" if name == STATE else f"observation.{name}"] = rows[:-1]
    numbers["next.reward"] = shown.rewards
    return numbers, pictures


def _features(numbers: Mapping[str, Tensor], pictures: Mapping[str, Tensor], videos: bool) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, rows in numbers.items():
        dtype = str(rows.dtype).removeprefix("torch.")
        found[name] = {"dtype": dtype, "shape": list(rows.shape[1:]) or [1], "names": None}
    for name, rows in pictures.items():
        kind = "video" if videos else "image"
        found[name] = {"dtype": kind, "shape": list(rows.shape[1:]), "names": ["height", "width", "channels"]}
    own = {
        "timestamp": "float32",
        "frame_index": "int64",
        "episode_index": "int64",
        "index": "int64",
        "task_index": "int64",
    }
    return found | {name: {"dtype": dtype, "shape": [1], "names": None} for name, dtype in own.items()}


def _columns(
    numbers: Mapping[str, Tensor], pictures: Mapping[str, Tensor], features: Mapping[str, Any]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, rows in numbers.items():
        found[name] = rows.numpy().reshape(-1) if features[name]["shape"] == [1] else rows.numpy()
    for name, rows in pictures.items():
        if features[name]["dtype"] == "image":
            found[name] = [{"bytes": png_of(picture), "path": None} for picture in rows]
    return found


def _table(columns: Mapping[str, Any]) -> Any:
    import pyarrow as pa

    return pa.table({name: _array(rows) for name, rows in columns.items()})


def _array(rows: Any) -> Any:
    """A column: numbers, lists of them of one length (of lists, for more dimensions), or pictures."""
    import pyarrow as pa

    if not isinstance(rows, np.ndarray):
        return pa.array(rows, pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    found = pa.array(np.ascontiguousarray(rows).reshape(-1))
    for size in reversed(rows.shape[1:]):
        found = pa.FixedSizeListArray.from_arrays(found, size)
    return found


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
