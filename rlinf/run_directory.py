"""The directory of one run: what lies where, and how it gets there whole.

    outputs/<name>/
      resolved.yaml  metrics.jsonl  trace.json
      checkpoints/step_000100/hf/   latest -> step_000100

Whatever is written in more than one piece is written aside and renamed, so a reader never meets half of it. An earlier
run of the same name is moved out of the way, never overwritten.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


class RunDirectory:
    """Paths of one run, and the few ways in which something is written there."""

    def __init__(self, path: Path, moved: Path | None = None) -> None:
        self.path = path
        self.moved = moved
        """Where an earlier run of the same name now lies, if there was one."""
        self.resolved = path / "resolved.yaml"
        self.metrics = path / "metrics.jsonl"
        self.trace = path / "trace.json"
        self.checkpoints = path / "checkpoints"

    @classmethod
    def create(cls, path: Path) -> RunDirectory:
        """Make a run directory; an earlier one with results in it is renamed to `<name>.previous-<n>`.

        Raises:
            OSError: it cannot be made.
        """
        moved = None
        if path.exists() and _holds_results(path):
            names = (path.with_name(f"{path.name}.previous-{number}") for number in itertools.count(1))
            moved = next(name for name in names if not name.exists())
            path.rename(moved)
        directory = cls(path, moved)
        directory.checkpoints.mkdir(parents=True, exist_ok=True)
        return directory

    def write_text(self, path: Path, text: str) -> None:
        """Replace a file in one step."""
        aside = path.with_name(f".{path.name}.partial")
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)

    @contextlib.contextmanager
    def checkpoint(self, step: int) -> Iterator[Path]:
        """A directory to fill; named `step_<step>` and pointed to by `latest` if the block ends well, else removed."""
        final = self.checkpoints / f"step_{step:06d}"
        aside = self.checkpoints / f".{final.name}.partial"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        try:
            yield aside
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        if final.exists():
            shutil.rmtree(final)
        aside.rename(final)
        self._point_latest_at(final)

    @property
    def latest(self) -> Path:
        """The link to the newest whole checkpoint."""
        return self.checkpoints / "latest"

    def _point_latest_at(self, checkpoint: Path) -> None:
        aside = self.checkpoints / ".latest.partial"
        aside.unlink(missing_ok=True)
        os.symlink(checkpoint.name, aside)
        aside.replace(self.latest)


def _holds_results(path: Path) -> bool:
    """Whether anything but a configuration is there: a run that failed at its start leaves no more than that."""
    files = (file for file in path.rglob("*") if file.is_file() and file.name != "resolved.yaml")
    return any(file.stat().st_size > 0 for file in files)
