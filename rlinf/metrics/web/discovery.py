"""Which runs there are below the directories that were named.

In: directories of runs, or of directories of runs. Out: those of runs, and what a list says of each without reading
them whole.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlinf.config.reading import open_regular, parse_json, read_bytes
from rlinf.metrics.files import ENVIRONMENT, METRICS
from rlinf.metrics.reading.metric_file import objects
from rlinf.metrics.web.life import LIVE, job_of, status

DEPTH = 3
"""How far below a named directory runs are looked for: outputs/experiment/seed/run."""
_END = 1 << 16
"""Bytes at the end of metrics.jsonl in which its last line is looked for; one of 80 metrics has 3,000."""
_STEPS = re.compile(r"^steps:[ \t]*(\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Found:
    """A run directory."""

    id: str
    """Of the run in addresses."""
    name: str
    """For people: its path below the directory that was named."""
    directory: Path


def is_run(directory: Path) -> bool:
    """Whether a run writes, or has written, to a directory."""
    return any(os.path.isfile(directory / name) for name in (METRICS, LIVE))  # False where one may not look


def runs_in(named: Sequence[Path]) -> list[Found]:
    """The runs in and below directories, each once, in the order of their names."""
    found = {path.resolve(): name for directory in named for path, name in _below(directory)}
    return [Found(_id(path), name, path) for path, name in found.items()]


@dataclass(frozen=True, slots=True)
class Summary:
    """What a list says of a run."""

    id: str
    name: str
    directory: str
    status: str
    """See `life.status`."""
    step: int
    """The last that is over."""
    steps: int | None
    """That there are to be; None if nobody said."""


def summary(run: Found) -> Summary:
    """What a list says of a run. It reads the end of a file, and little else."""
    step, steps = _last_step(run.directory / METRICS), _planned(run.directory)
    return Summary(run.id, run.name, str(run.directory), status(job_of(run.directory), step, steps), step, steps)


def _below(named: Path) -> Iterator[tuple[Path, str]]:
    """(directory, name) of runs."""
    top = named.resolve()
    if is_run(top):
        yield top, top.name
        return
    for directory in _walk(top, DEPTH):
        yield directory, directory.relative_to(top).as_posix()


def _walk(directory: Path, depth: int) -> Iterator[Path]:
    try:
        entries = sorted(
            entry.path for entry in os.scandir(directory) if not entry.name.startswith(".") and _is_directory(entry)
        )
    except OSError:
        return
    for path in map(Path, entries):
        if is_run(path):
            yield path
        elif depth > 1:
            yield from _walk(path, depth - 1)


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _id(path: Path) -> str:
    """The same for a path each time, and nothing but letters and digits."""
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:12]


def _last_step(metrics: Path) -> int:
    try:
        with open_regular(metrics, links=False) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _END))
            end = file.read()
    except OSError:
        return 0
    whole = end[: end.rfind(b"\n") + 1].splitlines()
    return next((row["step"] for row in objects(reversed(whole)) if type(row.get("step")) is int), 0)


def _planned(directory: Path) -> int | None:
    try:
        told = parse_json(read_bytes(directory / ENVIRONMENT, links=False))
        if isinstance(told, dict) and type(told.get("steps")) is int:
            return int(told["steps"])
        found = _STEPS.search(read_bytes(directory / "resolved.yaml", links=False).decode("utf-8", errors="replace"))
    except (OSError, ValueError):
        return None
    return None if found is None else int(found[1])
