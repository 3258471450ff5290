"""metrics.jsonl, samples.jsonl and ledger.jsonl: what a run leaves for programs, one JSON object per line.

In: a step's metrics, or some of its samples. Out: lines on disk before the next step starts: a crash loses none.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlinf.config.reading import open_regular, parse_json

METRICS, SAMPLES, ENVIRONMENT, EXPLAINED = "metrics.jsonl", "samples.jsonl", "environment.json", "explained.jsonl"
ALARMS = "alarms.jsonl"
"""File names in a run directory."""


def replace_text(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Replace a file in one step, so that a reader never meets half of it.

    It is written aside first, in a file that is new: a link that stands there, in a directory of somebody else, leads
    nowhere else.

    Args:
        path: of the file.
        text: its content.
        mode: its permissions, less the umask.
    """
    aside = path.with_name(f".{path.name}.partial")
    aside.unlink(missing_ok=True)
    handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with open(handle, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(handle)
    aside.replace(path)


class JsonLines:
    """A file to which lines are added; each is flushed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab")
        self._size = os.fstat(self._file.fileno()).st_size

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write one line per row; NaN and infinity become null, because JSON has no word for them."""
        text = "".join(f"{json.dumps(_plain(row), ensure_ascii=False)}\n" for row in rows)
        lines = text.encode(errors="backslashreplace")  # half a surrogate pair, as JSON writes it
        self._file.write(lines)
        self._file.flush()
        self._size += len(lines)

    def damage(self) -> str | None:
        """What somebody has done to the file, as its name shows it; None if all lines are there.

        The file that is open goes on without its name, and takes lines that nobody will ever read.
        """
        try:
            size = os.stat(self._path).st_size
        except FileNotFoundError:
            return f"{self._path} is gone: it was moved or removed"
        return None if size >= self._size else f"{self._path} was cut short or replaced"

    def sync(self) -> None:
        """Have the lines on disk: they outlive the machine's end."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Nothing more will come."""
        self._file.close()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class MetricsFile(JsonLines):
    """metrics.jsonl: one line per step."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the line of a step."""
        self.add([{"step": step, **metrics}])


class SamplesFile(JsonLines):
    """samples.jsonl: a few lines per step, each one sampled answer.

    A line holds `step` and what the trainer tells of a sample: `prompt`, `response`, `answer`, `reward`, `outcome`,
    `advantage`, `length` (tokens), `versions` (of the weights that made it) and `group` (answers to its prompt,
    of which some may have no line).
    """

    def write(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add the lines of a step."""
        self.add({"step": step, **row} for row in rows)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines; a line cut short by a crash, and whatever is no object, is left out."""
    if not path.exists():
        return
    with io.TextIOWrapper(open_regular(path), encoding="utf-8", errors="replace") as file:
        for line in file:
            if (row := _row(line)) is not None:
                yield row


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _plain(value: Any) -> Any:
    """A value as JSON knows it: numbers that are not finite become null, arrays lists, all else text."""
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    if hasattr(value, "tolist"):  # numpy and torch, which this module need not import
        return _plain(value.tolist())
    return str(value)
