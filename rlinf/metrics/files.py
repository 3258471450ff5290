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
        # half a surrogate pair, which a reward's remark may have, becomes the escape by which JSON writes it
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace")

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write one line per row; NaN and infinity become null, because JSON has no word for them."""
        self._file.writelines(f"{json.dumps(_plain(row), ensure_ascii=False)}\n" for row in rows)
        self._file.flush()

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
