"""The files of a run that grow, read as they do: its metrics, and where in samples.jsonl the answers of a step are.

In: a run's directory. Out: rows in memory, and answers that are read when somebody asks for them. Who wakes whom:
nobody; `update` reads what was added.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from rlinf.metrics.files import METRICS, SAMPLES
from rlinf.metrics.reading.appended import Appended
from rlinf.metrics.reading.metric_rows import MetricRows, Row

_STEP = re.compile(rb'\{"step": ?(-?\d{1,15})[,}]')
_HELD_OUT = re.compile(rb'"kind": ?"held-out"')


class RunFiles:
    """A run's files that grow.

    Args:
        directory: of the run; none of the files need be there.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.metrics = MetricFile(directory / METRICS)
        self.samples = SampleIndex(directory / SAMPLES)

    def update(self) -> None:
        """Read what was added. It blocks: 0.4 s for 10,000 steps of 80 metrics."""
        self.metrics.update()
        self.samples.update()


class MetricFile:
    """metrics.jsonl, as far as it was written."""

    def __init__(self, path: Path) -> None:
        self._file = Appended(path, self._forget)
        self.rows = MetricRows()
        """Of all steps, 0 included."""
        self.times_anew = 0
        """How often the file did not begin any more with what had been read of it."""

    def update(self) -> None:
        """Read what was added."""
        for _, block in self._file.blocks():
            self.rows.add(objects(block.splitlines()))

    def _forget(self) -> None:
        self.rows = MetricRows()
        self.times_anew += 1


class SampleIndex:
    """samples.jsonl, of which only places are kept: the file of a long run is large."""

    def __init__(self, path: Path) -> None:
        self._file = Appended(path, self._forget)
        self._sampled: dict[int, list[range]] = {}
        self._held_out: dict[int, list[range]] = {}
        self.times_anew = 0
        """How often the file did not begin any more with what had been read of it."""

    def update(self) -> None:
        """Look through what was added."""
        for offset, block in self._file.blocks():
            for line in block.splitlines(keepends=True):
                if (step := _step(line)) is not None:
                    index = self._held_out if _HELD_OUT.search(line) else self._sampled
                    _extend(index.setdefault(step, []), range(offset, offset + len(line)))
                offset += len(line)

    @property
    def steps(self) -> list[int]:
        """With answers to prompts of training, in order."""
        return sorted(self._sampled)

    @property
    def held_out_steps(self) -> list[int]:
        """With answers to held-out problems, in order."""
        return sorted(self._held_out)

    def rows(self, step: int, most: int | None = None) -> list[Row]:
        """The answers of a step to prompts of training, so many at most."""
        return list(islice(self._read(self._sampled.get(step, ()), step), most))

    def held_out(self, step: int, most: int | None = None) -> list[Row]:
        """The answers of a step to held-out problems, so many at most."""
        return list(islice(self._read(self._held_out.get(step, ()), step), most))

    def _read(self, places: Iterable[range], step: int) -> Iterator[Row]:
        try:
            file = self._file.path.open("rb")
        except OSError:
            return
        with file:
            for place in places:
                file.seek(place.start)
                for line in iter(file.readline, b""):
                    yield from (row for row in objects([line]) if row.get("step") == step)  # it may have been replaced
                    if file.tell() >= place.stop:
                        break

    def _forget(self) -> None:
        self._sampled, self._held_out = {}, {}
        self.times_anew += 1


def objects(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON objects among lines; what is none is left out."""
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:  # bytes that are no UTF-8, too
            continue
        if isinstance(row, dict):
            yield row


def _step(line: bytes) -> int | None:
    """Of a row; quickly where it comes first, as it does in files of ours."""
    if (found := _STEP.match(line)) is not None:
        return int(found[1])
    step = next((row.get("step") for row in objects([line])), None)
    return step if type(step) is int else None


def _extend(places: list[range], more: range) -> None:
    if places and places[-1].stop == more.start:
        places[-1] = range(places[-1].start, more.stop)
    else:
        places.append(more)
