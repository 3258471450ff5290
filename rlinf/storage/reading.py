"""Reads a run's metrics.jsonl while it grows: new lines, rows and curves.

Lines that a file has got since the last look.

In: a file to which a run adds lines, which may be cut, replaced or removed. Out: blocks of whole lines, each once.

metrics.jsonl as columns: small, and quickly made into curves.

metrics.jsonl while a run writes it.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from rlinf.config.reading import open_regular, parse_json

logger = logging.getLogger(__name__)

BLOCK = 1 << 20
"""Bytes read at once: far more than a line has, and little beside a run's memory."""
LONGEST = 1 << 26
"""Bytes of a line. A longer one is no row of a run, whose longest are conversations of some megabytes, and is left out:
a file without line ends must not fill memory."""
_MARK = 64
"""Bytes before the place reached that are compared, so that a file that was written anew is told from one that grew."""


class Appended:
    """A file that grows.

    Args:
        path: of it; it may come later.
        forget: called when the file no longer begins with what was read: it was cut, replaced or removed, as a run does
            that begins anew or goes on from a checkpoint. All of it is then read again.
    """

    def __init__(self, path: Path, forget: Callable[[], None] = lambda: None) -> None:
        self.path, self._forget = path, forget
        self._identity: tuple[int, int] | None = None
        self._offset, self._mark = 0, b""
        self._skipping = False  # in the midst of a line that is too long
        self.left_out = 0
        """Lines that were longer than `LONGEST`."""

    def blocks(self) -> Iterator[tuple[int, bytes]]:
        """Yield what has been added since the last call: (offset in the file, whole lines).

        A last line without its end waits until that is written. Lines longer than `LONGEST` are left out.
        """
        try:
            file = open_regular(self.path, links=False)
        except OSError:
            self._anew()
            return
        with file:
            if not self._goes_on(file.fileno()):
                self._anew()
            longest = BLOCK
            while block := os.pread(file.fileno(), longest, self._offset):
                if self._skipping:
                    end = block.find(b"\n") + 1
                    self._skipping = not end
                    self._reached(block, end or len(block))
                    continue
                end = block.rfind(b"\n") + 1
                if end:
                    start, longest = self._offset, BLOCK
                    self._reached(block, end)
                    yield start, block[:end]
                elif len(block) >= LONGEST:
                    self._skip(block)
                    longest = BLOCK
                elif len(block) < longest:
                    return
                else:
                    longest = min(2 * longest, LONGEST)

    def _reached(self, block: bytes, end: int) -> None:
        """All before the place `end` of a block is done with."""
        self._offset += end
        self._mark = block[max(0, end - _MARK) : end]

    def _skip(self, block: bytes) -> None:
        """The line that begins with a block is too long."""
        self._skipping = True
        self.left_out += 1
        logger.warning("%s: a line of more than %d MB is left out: no run writes one", self.path, LONGEST >> 20)
        self._reached(block, len(block))

    def _goes_on(self, file: int) -> bool:
        """True if an open file begins with what was read."""
        now = os.fstat(file)
        same, self._identity = self._identity in (None, (now.st_dev, now.st_ino)), (now.st_dev, now.st_ino)
        if not same or now.st_size < self._offset:
            return False
        return os.pread(file, len(self._mark), self._offset - len(self._mark)) == self._mark

    def _anew(self) -> None:
        if self._offset:
            self._offset, self._mark = 0, b""
            self._skipping, self.left_out = False, 0
            self._forget()


Row = dict[str, Any]
"""One line of metrics.jsonl."""
Column = NDArray[np.float64]

MOST_ROWS = 1 << 16
"""Rows that are kept, 42 MB at 80 metrics. Of a longer run two neighbours become one, their mean, ever again."""
DIGITS = 5
"""Significant ones of a point: more than a chart can show."""


class MetricRows(Sequence[Row]):
    """Rows of metrics, by step. A metric that a row does not have, or that is no finite number, is left out of it."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self._count = 0
        self._steps: NDArray[np.int64] = np.empty(0, np.int64)
        self._columns: dict[str, Column] = {}
        self.add(rows)

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows. One of a step that is there adds to it; one without a whole number as its `step` is left out."""
        named = (row for row in rows if type(row.get("step")) is int)
        for names, alike in groupby(named, key=tuple):
            table = _numbers([list(row.values()) for row in alike])
            steps = table[:, names.index("step")].astype(np.int64)
            values = {name: table[:, place] for place, name in enumerate(names) if name != "step"}
            last = self._steps[self._count - 1] if self._count else steps[0] - 1
            if steps[0] > last and bool((np.diff(steps) > 0).all()):
                self._append(steps, values)
            else:
                for row, step in enumerate(steps.tolist()):
                    self._put(step, {name: column[row : row + 1] for name, column in values.items()})
        while self._count > MOST_ROWS:
            self._halve()

    @property
    def names(self) -> list[str]:
        """Names of all metrics that some row has, in alphabetical order."""
        return sorted(name for name in self._columns if not np.isnan(self.column(name)).all())

    @property
    def steps(self) -> list[int]:
        """Steps of the rows."""
        return self._steps[: self._count].tolist()

    def column(self, name: str) -> Column:
        """Values of a metric, [rows]; NaN where a row has none."""
        column = self._columns.get(name)
        return np.full(self._count, np.nan) if column is None else column[: self._count]

    def values(self, name: str, after: int = 0) -> list[float]:
        """The values that a metric has in later steps, in order; of all of the run's own, if it is not said which."""
        column = self.column(name)[int(np.searchsorted(self._steps[: self._count], after, "right")) :]
        return column[~np.isnan(column)].tolist()

    def after(self, step: int) -> list[Row]:
        """The rows of later steps."""
        return self[int(np.searchsorted(self._steps[: self._count], step, "right")) :]

    def curves(self, most: int) -> dict[str, Any]:
        """Curves of so many points at most, each the mean over a part of the rows.

        Returns:
            `steps`, `elapsed` (seconds), `env_steps` and `metrics` by name, all of one length; null where a metric has
            no value in a part, and for all environment steps if they were not counted.
        """
        count = min(self._count, most)
        if not count:
            return {"steps": [], "elapsed": [], "env_steps": [], "metrics": {}}
        starts = np.arange(count) * self._count // count
        ends = np.append(starts[1:], self._count) - 1
        steps, elapsed = self._steps[ends], self.column("timing/elapsed")[ends]
        total = np.nancumsum(self.column("timing/step"))[ends]
        acted = self.column("env_steps/total")[ends]
        acted = np.where(np.isnan(acted) & (steps <= 0), 0.0, acted)
        return {
            "steps": steps.tolist(),
            "elapsed": _plain(np.where(np.isnan(elapsed) | (elapsed == 0), total, elapsed)),
            "env_steps": None if np.isnan(acted).any() else [int(each) for each in acted],
            "metrics": {name: _plain(_means(self.column(name), starts)) for name in self.names},
        }

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, place: int) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> list[Row]: ...
    def __getitem__(self, place: int | slice) -> Row | list[Row]:
        if isinstance(place, slice):
            return [self._row(each) for each in range(*place.indices(self._count))]
        if not -self._count <= place < self._count:
            raise IndexError(place)
        return self._row(place % self._count)

    def __iter__(self) -> Iterator[Row]:
        return (self._row(place) for place in range(self._count))

    def _row(self, place: int) -> Row:
        row: Row = {"step": int(self._steps[place])}
        for name, column in self._columns.items():
            if not math.isnan(value := float(column[place])):
                row[name] = value
        return row

    def _append(self, steps: NDArray[np.int64], values: Mapping[str, Column]) -> None:
        count = self._count + len(steps)
        if count > len(self._steps):
            more = max(1024, 2 * count) - self._count
            self._steps = np.append(self._steps[: self._count], np.zeros(more, np.int64))
            for name in self._columns:
                self._columns[name] = np.append(self.column(name), np.full(more, np.nan))
        for name, column in values.items():
            if name not in self._columns:
                self._columns[name] = np.full(len(self._steps), np.nan)
            self._columns[name][self._count : count] = column
        self._steps[self._count : count] = steps
        self._count = count

    def _put(self, step: int, values: Mapping[str, Column]) -> None:
        """One row where it belongs; what a row of the same step says besides stays."""
        place = int(np.searchsorted(self._steps[: self._count], step))
        if place == self._count or self._steps[place] != step:
            later = slice(place, self._count)
            steps = self._steps[later].copy()
            later_columns = {name: each[later].copy() for name, each in self._columns.items()}
            for column in self._columns.values():
                column[later] = np.nan
            self._count = place
            self._append(
                np.array([step, *steps]), {name: np.append(np.nan, each) for name, each in later_columns.items()}
            )
        for name, (value,) in values.items():
            if name not in self._columns:
                self._columns[name] = np.full(len(self._steps), np.nan)
            if not math.isnan(value):
                self._columns[name][place] = value

    def _halve(self) -> None:
        starts = np.arange(0, self._count, 2)
        ends = np.append(starts[1:], self._count) - 1
        columns = {name: _means(self.column(name), starts) for name in self._columns}
        steps, self._count, self._columns = self._steps[ends], 0, {}
        self._append(steps, columns)


def _numbers(rows: list[list[Any]]) -> Column:
    """Values as a table, [rows, names], NaN for what is no finite number."""
    try:
        table = np.array(rows)
        table = table.astype(np.float64) if table.dtype.kind in "fiub" else _each(rows)
    except (ValueError, OverflowError):  # lists among the values; whole numbers of any length
        table = _each(rows)
    return np.where(np.isfinite(table), table, np.nan)


def _each(rows: list[list[Any]]) -> Column:
    return np.array([[_number(value) for value in row] for row in rows], np.float64)


def _number(value: Any) -> float:
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan


def _means(column: Column, starts: NDArray[np.int64]) -> Column:
    """Return the mean of each part of a column that begins at `starts`, over its values that are not NaN."""
    numbers = ~np.isnan(column)
    counts = np.add.reduceat(numbers.astype(np.int64), starts)
    sums = np.add.reduceat(np.where(numbers, column, 0.0), starts)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def _plain(column: Column) -> list[float | None]:
    """Return a column as JSON values, in a few digits; None for NaN."""
    size = np.abs(np.where(np.isnan(column), 0.0, column))
    ordinary = (size > 1e-290) & (size < 1e290)  # beyond, powers of ten end
    places = DIGITS - 1 - np.floor(np.log10(np.where(ordinary, size, 1.0)))
    # Powers of ten with positive exponents are exact, so that what is divided by one has few digits.
    up, down = 10.0 ** np.maximum(places, 0), 10.0 ** np.maximum(-places, 0)
    short = np.round(np.where(ordinary, column, 0.0) * up / down) / up * down
    return [None if math.isnan(each) else each for each in np.where(ordinary, short, column).tolist()]


class MetricFile:
    """metrics.jsonl, as far as it was written.

    Args:
        path: of the file, which need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._file = Appended(path, self._forget)
        self.rows = MetricRows()
        """Of all steps, 0 included."""
        self.times_anew = 0
        """How often the file did not begin any more with what had been read of it."""

    @property
    def left_out(self) -> int:
        """Lines that no run writes: too long."""
        return self._file.left_out

    def update(self) -> None:
        """Read what was added. It blocks: 0.35 s for 10,000 steps of 80 metrics."""
        for _, block in self._file.blocks():
            self.rows.add(objects(block.splitlines()))

    def _forget(self) -> None:
        self.rows = MetricRows()
        self.times_anew += 1


def objects(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON objects among lines; what is none is left out."""
    for line in lines:
        try:
            row = parse_json(line)
        except ValueError:  # bytes that are no UTF-8, too
            continue
        if isinstance(row, dict):
            yield row
