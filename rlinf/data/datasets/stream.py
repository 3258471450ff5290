"""Endless supplies of prompts from rows, with positions that a checkpoint saves.

In: rows. Out: prompts, as many as are asked for. Rows become prompts when they are drawn, so a large data set costs
nothing at the start.

`PromptStream` is for rows of any order: every row once per pass, in an order drawn from (seed, pass).
`IteratedStream` is for rows that only come one after the other (generators, sockets, data sets too large to index):
an iterable or async iterable of mappings, shuffled within a buffer of bounded size. Where the iterable ends, the next
pass begins it again. A saved stream goes on by reading again, from the start of its pass, the rows that were read
before; a checksum tells whether they are the same.
"""

from __future__ import annotations

import asyncio
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic

import numpy as np

from rlinf.data.datasets.prompts import Drawn, Item, Maker, Outcome
from rlinf.data.datasets.source import DataError, Iterated, Row, Rows, canonical, checked, counted, fingerprint
from rlinf.data.rng import permutation

_KEPT = 16_384
"""Prompts that are kept for later passes: some 50 MB. Small data sets, which come round often, are encoded once."""
_KEPT_BYTES = 256 << 20
"""Bytes of pictures that are kept with them."""
MOST_UNUSABLE = 100
"""Rows one after the other of which no prompt can be made before a stream gives up: so many in a row are no accident,
but a template or a column that fits none."""


class Counted(ABC):
    """A stream of prompts that counts the rows that it leaves out, cuts or cannot write.

    Args:
        name: of its data, for errors.
        seed: of the orders.
        most: rows in a row that are left out before it gives up; of those that cannot be used, `MOST_UNUSABLE`.
    """

    def __init__(self, name: str, seed: int, most: int):
        self.position = 0
        """Rows drawn so far; a prompt's id is the position of its row."""
        self.dropped = 0
        """Rows that were left out since their prompts were too long."""
        self.truncated = 0
        """Prompts that were cut."""
        self.unusable = 0
        """Rows that were left out since no prompt can be made of them."""
        self.remark = ""
        """Why, of the first of them."""
        self.unknown = 0
        """Rows handed out most of whose text the tokenizer does not know."""
        self.unknown_remark = ""
        """Remark on the first of them."""
        self._name, self._seed, self._most = name, seed, most
        self._fruitless: list[str] = []  # why the rows since the last prompt were left out; empty of those too long

    @property
    @abstractmethod
    def maker(self) -> Maker[Any]:
        """Makes prompts of rows."""

    def _count(self, outcomes: Iterable[Outcome[Item]]) -> Iterator[Item]:
        """Count what became of rows; those that are prompts.

        Raises:
            DataError: too many in a row are left out.
        """
        for outcome in outcomes:
            self.truncated += outcome.cut
            self.unknown += bool(outcome.unknown)
            self.unknown_remark = self.unknown_remark or outcome.unknown
            if outcome.prompt is not None:
                self._fruitless.clear()
                yield outcome.prompt
                continue
            self._fruitless.append(outcome.reason)
            self.dropped += not outcome.reason
            self.unusable += bool(outcome.reason)
            self.remark = self.remark or outcome.reason
        if len(self._fruitless) >= self._most or sum(map(bool, self._fruitless)) >= MOST_UNUSABLE:
            raise nothing_usable(self._name, self.maker, self._fruitless)

    def _counts(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in _COUNTERS}

    def _load_counts(self, state: Mapping[str, Any]) -> None:
        for name in _COUNTERS:
            setattr(self, name, {"unusable": 0, "unknown": 0, **state}[name])  # older checkpoints lack these two


_COUNTERS = ("position", "dropped", "truncated", "unusable", "unknown")


class PromptStream(Counted, Generic[Item]):
    """Prompts without end.

    `position` says where the stream is: set it, or load a saved state, and it goes on from there, to the token.

    Args:
        rows: what to draw from.
        maker: makes prompts of them.
        seed: of the orders.
        shuffle: False keeps the rows' own order.

    Raises:
        DataError: there is no row.
    """

    def __init__(self, rows: Rows, maker: Maker[Item], *, seed: int = 0, shuffle: bool = True):
        if not len(rows):
            raise DataError(f"{rows.name}: there is no row to draw from")
        super().__init__(rows.name, seed, 2 * len(rows))  # first in one pass and last in the next is the widest gap
        self._maker, self._rows, self._shuffle = maker, rows, shuffle
        self._pass = -1
        self._order = np.empty(0, dtype=np.int64)
        self._fingerprint: str | None = None
        self._made: dict[int, Outcome[Item]] = {}
        self._held = 0  # bytes of their pictures

    @property
    def maker(self) -> Maker[Item]:
        return self._maker

    def take(self, count: int) -> list[Item]:
        """The next `count` prompts.

        Raises:
            DataError: a row cannot be used, or not one prompt is short enough.
        """
        prompts: list[Item] = []
        while len(prompts) < count:
            items = [self._next() for _ in range(count - len(prompts))]
            self._make(items)
            prompts += self._count(self._made[each.index].at(each.id, self.maker) for each in items)
        return prompts

    async def draw(self, count: int) -> list[Item]:
        """The next `count` prompts, made in a thread; see `take`."""
        return await asyncio.to_thread(self.take, count)

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on from here, as JSON: position, counts, and what the position refers to."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self._rows)
        data = {"seed": self._seed, "shuffle": self._shuffle, "rows": len(self._rows), "fingerprint": self._fingerprint}
        return {**self._counts(), **data}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a saved stream was.

        Raises:
            DataError: the data set, the seed or the order is another than when it was saved, so that the position
                would mean other prompts.
        """
        now = self.state_dict()
        changed = [
            f"{name} was {state[name]!r} and is {now[name]!r}"
            for name in ("rows", "fingerprint", "seed", "shuffle")
            if state[name] != now[name]
        ]
        if changed:
            raise another_data_set(self._name, "; ".join(changed))
        self._load_counts(state)

    def _make(self, items: list[Drawn]) -> None:
        """Make prompts of the rows that are not at hand, and keep them for when they come round again."""
        if len(self._made) > _KEPT or self._held > _KEPT_BYTES:
            self._made.clear()
            self._held = 0
        first: dict[int, Drawn] = {}  # a row that comes several times at once is made once, too
        for each in items:
            if each.index not in self._made:
                first.setdefault(each.index, each)
        for index, outcome in zip(first, self._maker.make(list(first.values())).outcomes(first.values()), strict=True):
            self._made[index] = outcome
            prompt = getattr(outcome.prompt, "prompt", outcome.prompt)  # some are groups of one's
            self._held += sum(len(image.content) for image in getattr(prompt, "images", ()))

    def _next(self) -> Drawn:
        which, at = divmod(self.position, len(self._rows))
        if which != self._pass:
            self._pass = which
            if self._shuffle:
                self._order = permutation(len(self._rows), self._seed, which)
        index = int(self._order[at]) if self._shuffle else at
        item = Drawn.of(self._rows, self.position, index)
        self.position += 1
        return item


def another_data_set(name: str, difference: str) -> DataError:
    """The error for a checkpoint of other data."""
    return DataError(
        f"{name} is not the data set of the checkpoint ({difference}): bring that back, or start a new run from the "
        "checkpoint's model"
    )


def nothing_usable(name: str, maker: Maker[Any], reasons: Sequence[str]) -> DataError:
    """The error for data of which nothing is left.

    Args:
        name: of the data set.
        maker: of its prompts.
        reasons: why the rows were left out, in order; empty of those that are too long.
    """
    if first := next((reason for reason in reasons if reason), ""):
        return DataError(f"{name}: {len(reasons):,} rows one after the other cannot be used; the first: {first}")
    return DataError(
        f"{name}: every {maker.unit} is longer than {maker.limit}; change that, or set data.overlong to truncate"
    )


def left_out(stream: Counted) -> dict[str, str]:
    """A line for each kind of row that a stream has not handed out as it was, or that the tokenizer does not know, by
    the metric that counts them."""
    lines: dict[str, str] = {}
    if not stream.position:  # nothing was drawn, so a stream may not know yet what makes its prompts
        return lines
    if stream.dropped:
        lines["data/dropped"] = f"{_too_long(stream, stream.dropped)} left out"
    if stream.truncated:
        lines["data/truncated"] = f"{_too_long(stream, stream.truncated)} cut at the {stream.maker.cut_at}"
    if stream.unusable:
        first = f"; the first: {stream.remark}" if stream.remark else ""
        lines["data/unusable"] = (
            f"{counted(stream.unusable, 'unusable row')} {_were(stream.unusable)} left out (data.unusable){first}"
        )
    if stream.unknown:
        first = f"; the first: {stream.unknown_remark}" if stream.unknown_remark else ""
        lines["data/unknown"] = (
            f"{counted(stream.unknown, 'row')} can hardly be read: the tokenizer (model.tokenizer) knows less than "
            f"half of a text{first}"
        )
    return lines


def _too_long(stream: Counted, count: int) -> str:
    """So many of what is longer than the limit, in words."""
    noun, _, rest = stream.maker.units.partition(" ")
    return f"{counted(count, noun.removesuffix('s'))} {rest} {stream.maker.limit} {_were(count)}"


def _were(count: int) -> str:
    return "was" if count == 1 else "were"


BUFFER = 1024
"""Rows that a shuffle buffer holds if nobody says: a few megabytes, and a few steps' worth of prompts."""
_END: Any = object()
_MOST_FRUITLESS = 100_000
"""Rows in a row that are too long before the stream gives up: one that never ends has no pass to go by."""


class ShuffleBuffer:
    """Rows in a random order, as far as the buffer reaches: each that comes in puts another one out.

    Args:
        size: rows that are held; 0 keeps the order.
        key: whole numbers that draw the order.
    """

    def __init__(self, size: int, *key: int):
        self._random = np.random.default_rng(key)
        self._size = size
        self._rows: list[tuple[int, Row]] = []

    def push(self, row: tuple[int, Row]) -> tuple[int, Row] | None:
        """Take a row in; returns one that goes out, or None while the buffer fills."""
        if self._size == 0:
            return row
        if len(self._rows) < self._size:
            self._rows.append(row)
            return None
        index = int(self._random.integers(self._size))
        out, self._rows[index] = self._rows[index], row
        return out

    def pop(self) -> tuple[int, Row] | None:
        """One more row when no more come in; None if there is none left."""
        if not self._rows:
            return None
        index = int(self._random.integers(len(self._rows)))
        self._rows[index], self._rows[-1] = self._rows[-1], self._rows[index]
        return self._rows.pop()


class IteratedStream(Counted, Generic[Item]):
    """Prompts from an iterable, with the interface of `PromptStream`.

    Args:
        rows: where they come from.
        maker: makes what makes prompts of them, once the first row is known.
        seed: of the orders.
        buffer: rows that the shuffle buffer holds; 0 keeps the order.
    """

    def __init__(
        self, rows: Iterated, maker: Callable[[Sequence[Row]], Maker[Item]], *, seed: int = 0, buffer: int = BUFFER
    ):
        super().__init__(rows.name, seed, _MOST_FRUITLESS)
        self._maker_of, self._rows, self._size = maker, rows, buffer
        self._maker: Maker[Item] | None = None
        self._pass = -1
        self._drawn = 0  # rows of this pass that went out
        self._read = 0  # rows of this pass that came in
        self._saved: Mapping[str, Any] | None = None

    @property
    def maker(self) -> Maker[Item]:
        """Makes prompts of rows. Raises `DataError` before the first row was read."""
        if self._maker is None:
            raise DataError(f"{self._name}: no row was read yet, so nothing is known about its columns")
        return self._maker

    def take(self, count: int) -> list[Item]:
        """The next `count` prompts.

        Raises:
            DataError: a row cannot be used; the iterable has ended for good, or is async.
        """
        if self._rows.is_async:
            raise DataError(f"{self._name} is an async iterable: await `draw` instead of calling `take`")
        for _ in range(self._to_replay()):
            self._next()
        self._replayed()
        prompts: list[Item] = []
        while len(prompts) < count:
            prompts += self._prompts([self._next() for _ in range(count - len(prompts))])
        return prompts

    async def draw(self, count: int) -> list[Item]:
        """The next `count` prompts; those of a plain iterable are made in a thread. See `take`."""
        if not self._rows.is_async:
            return await asyncio.to_thread(self.take, count)
        for _ in range(self._to_replay()):
            await self._next_async()
        self._replayed()
        prompts: list[Item] = []
        while len(prompts) < count:
            prompts += self._prompts([await self._next_async() for _ in range(count - len(prompts))])
        return prompts

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on from here, as JSON."""
        if self._saved is not None:
            return dict(self._saved)
        self._ready()
        now = {"drawn": self._drawn, "read": self._read, "checksum": self._checksum}
        return {**self._counts(), "seed": self._seed, "buffer": self._size, "pass": self._pass, **now}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a saved stream was. The rows of its pass so far are read again when the next are drawn.

        Raises:
            DataError: the seed or the buffer is another, so that the order would be; or, when the rows are read again,
                they are others.
        """
        for name, now in (("seed", self._seed), ("buffer", self._size)):
            if state[name] != now:
                raise another_data_set(self._name, f"{name} was {state[name]!r} and is {now!r}")
        self._saved = dict(state)
        self._load_counts(state)

    def _begin(self, which: int) -> None:
        """Begin a pass."""
        opened = self._rows.open()
        self._source: Any = aiter(opened) if self._rows.is_async else iter(opened)  # type: ignore[arg-type]
        self._pass = which
        self._buffer = ShuffleBuffer(self._size, self._seed, which)
        self._drawn = self._read = self._checksum = 0
        self._ended = False

    def _ready(self) -> None:
        if self._pass < 0:
            self._begin(0)

    def _next(self) -> Drawn:
        while (out := self._left() if self._ended else self._put(next(self._source, _END))) is None:
            continue
        return self._drawn_row(*out)

    async def _next_async(self) -> Drawn:
        while (out := self._left() if self._ended else self._put(await anext(self._source, _END))) is None:
            continue
        return self._drawn_row(*out)

    def _put(self, row: Any) -> tuple[int, Row] | None:
        """Take in what the source gave; returns what the buffer puts out for it."""
        if row is _END:
            self._ended = True
            return None
        index = self._read
        row = checked(row, self._where(index))
        if self._maker is None:
            self._maker = self._maker_of([row])
        self._read += 1
        self._checksum = zlib.crc32(canonical(row), self._checksum)
        return self._buffer.push((index, row))

    def _left(self) -> tuple[int, Row] | None:
        """One of the rows that are left when the source has ended; after the last, the next pass begins."""
        out = self._buffer.pop()
        if out is None:
            if self._read == 0:
                raise DataError(f"{self._name} gave no row at all")
            self._begin(self._pass + 1)
        return out

    def _drawn_row(self, index: int, row: Row) -> Drawn:
        item = Drawn(self.position, index, row, self._where(index))
        self.position += 1
        self._drawn += 1
        return item

    def _where(self, index: int) -> str:
        return f"{self._name}, row {index + 1}"

    def _prompts(self, items: list[Drawn]) -> Iterator[Item]:
        return self._count(self.maker.make(items).outcomes(items))

    def _to_replay(self) -> int:
        """How many rows went out before a saved state that was loaded and not reached yet; its pass is begun."""
        self._ready()
        if self._saved is None:
            return 0
        self._begin(self._saved["pass"])
        return int(self._saved["drawn"])

    def _replayed(self) -> None:
        """The rows before a saved state were drawn again: see that they were the same."""
        saved, self._saved = self._saved, None
        if saved is None:
            return
        if (self._pass, self._read, self._checksum) != (saved["pass"], saved["read"], saved["checksum"]):
            raise another_data_set(self._name, "its first rows are others")
        self.position = saved["position"]
