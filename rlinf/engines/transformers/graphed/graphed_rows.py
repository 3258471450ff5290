"""Rows that are decoded on a GPU: the step is a graph, and its tokens are told while the next one runs.

Flows in: texts to read, and which answers have ended. Flows out: logits after the texts, then a token per row and step.
Plain blocking code that wakes nobody, used by the decode batch in the compute thread; `end` may come from the event
loop and touches no tensor.

**A step late.** A step is started before the tokens of the one before are known here. So when an answer ends, its row
has one token more under way, which is never told: the row's slot is -1 by then. Who joins, and where rows lie, changes
only when nothing is under way. What a row computes is still a function of the requests and of steps, never of time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlinf.engines.transformers.conversations import Reader
from rlinf.engines.transformers.graphed.paged_cache import PAGE, PagedCache
from rlinf.engines.transformers.graphed.reading import read, runs
from rlinf.engines.transformers.graphed.recording import ReadBack, Recorder, Recording, upload
from rlinf.engines.transformers.graphed.step import Step, from_told
from rlinf.engines.transformers.llama_forward import LeanForward
from rlinf.engines.transformers.sampling import Rules
from rlinf.engines.transformers.slots import Drawn, Slots

_AHEAD = 16
"""Steps for which rows get pages ahead, so that the table is uploaded once in so many steps."""


@dataclass(slots=True, eq=False)
class _UnderWay:
    """A step that was started and not told."""

    slots: np.ndarray
    """Of its rows, -1 for those that have ended since, int64 [rows]."""
    told: ReadBack
    """What it drew."""
    version: int
    """Of the weights that it reads."""


class GraphedRows:
    """The rows of a decode batch, in graphs; see `decode_batch.Rows` for what the methods do.

    Args:
        forward: the model.
        recorder: makes the graphs.
        max_rows: answers in flight at a time.
        page: tokens of a page of keys and values.
        max_tokens: of keys and values that answers in flight may come to; None for no bound.
    """

    def __init__(
        self,
        forward: LeanForward,
        recorder: Recorder,
        max_rows: int,
        page: int = PAGE,
        max_tokens: int | None = None,
    ):
        self._forward, self._recorder, self._max_rows = forward, recorder, max_rows
        self._sizes = row_sizes(max_rows)
        block = forward.blocks[0]
        shape = len(forward.blocks), block.keys, block.head
        self.cache = PagedCache(*shape, max_rows, forward.dtype, forward.device, page, max_tokens)
        """Keys and values."""
        self._step: Step | None = None
        self._recordings: dict[tuple[int, ...], Recording] = {}
        self._addresses: tuple[int, ...] = ()
        self._members: list[int] = []  # slots in the order of their rows, of answers that have been read
        self._rows = np.empty(0, dtype=np.int64)  # slot of each row, -1 for ballast
        self._tokens = np.zeros(max_rows + 1, dtype=np.int64)  # that each slot has in the cache once all steps are done
        self._kind: Rules | None = None
        self._stale = True  # rows have come, or where something lies has changed
        self._ended = False  # rows have ended, and the device does not know
        self._under_way: _UnderWay | None = None

    @property
    def width(self) -> int:
        return len(self._rows)

    def read(self, readers: Iterable[Reader], records: Slots) -> Iterator[tuple[np.ndarray, Tensor, int]]:
        self._stale = True
        for run in runs(readers):
            which = np.array([slot for reader in run for slot in reader.slots], dtype=np.int64)
            lengths = np.array([len(reader.text) for reader in run for _ in reader.slots], dtype=np.int64)
            self._have_room(lengths, which)
            self._tokens[which] = lengths
            self._members += which.tolist()
            logits = read(self._forward, self.cache, run)
            source = torch.tensor([number for number, reader in enumerate(run) for _ in reader.slots])
            yield which, logits.index_select(0, source.to(logits.device)), sum(len(reader.unread) for reader in run)

    def joined(self) -> None:
        """Nothing to do: the next step lays the rows out."""

    def step(self, records: Slots) -> Drawn | None:
        if self._changes():
            if self._under_way is not None:
                return self.settle()
            self._lay_out(records)
        assert self._step is not None
        assert self._kind is not None
        self._tell_device()
        recording = self._recordings[self._key(len(self._rows), self._kind)]
        recording.replay()
        if self._kind.top_k is not None:
            self._step.draw(recording.output, self._kind)
        started = _UnderWay(self._rows.copy(), ReadBack(self._step.told), self._forward.version)
        self._tokens[self._rows] += 1
        self._tokens[-1] = 0  # of ballast
        before, self._under_way = self._under_way, started
        return None if before is None else _drawn(before)

    def settle(self) -> Drawn | None:
        before, self._under_way = self._under_way, None
        return None if before is None else _drawn(before)

    def end(self, slots: np.ndarray) -> None:
        self.cache.release(slots)
        gone = set(slots.tolist())
        self._members = [slot for slot in self._members if slot not in gone]
        for rows in (self._rows, *(() if self._under_way is None else (self._under_way.slots,))):
            rows[np.isin(rows, slots)] = -1
        self._ended = True

    def kept(self, slot: int, tokens: int) -> Sequence[tuple[Tensor, Tensor]]:
        return self.cache.copies(slot, tokens)

    def forget(self) -> None:
        self._under_way = None  # of rows that nobody asks for; what it writes lies before all that is asked from now on
        self.cache.clear()
        self._members, self._rows = [], np.empty(0, dtype=np.int64)
        self._stale = True

    def park(self) -> None:
        self.forget()
        self.cache.drop()
        self._step = None
        self._forget_recordings()

    def _changes(self) -> bool:
        """Whether rows have to be laid out anew before the next step: they have come or moved, or fewer rows do."""
        if self._stale or self._size() < len(self._rows):
            return True
        slots = self._rows[self._rows >= 0]
        return not self.cache.fits(self._tokens[slots] + 1, slots)

    def _size(self) -> int:
        return next(size for size in self._sizes if size >= len(self._members))

    def _lay_out(self, records: Slots) -> None:
        """Give every answer a row, in memory for some steps ahead, with a recording of so many rows."""
        members = np.array(self._members, dtype=np.int64)
        self._have_room(self._tokens[members] + _AHEAD, members)
        step = self._step = self._step or Step(self._forward, self.cache, self._sizes[-1])
        size = self._size()
        self._rows = np.full(size, -1, dtype=np.int64)
        self._rows[: len(members)] = members
        rows = self._rows
        kind = self._kind = Rules.of(records.draws[rows], self._forward.device)
        self._forward.reach(self.cache.width * self.cache.page)
        if (addresses := self._forward.addresses()) != self._addresses:
            self._forget_recordings()
            self._addresses = addresses
        if (key := self._key(size, kind)) not in self._recordings:
            step.alive.zero_()  # a recording is tried out, on rows that nobody has
            model = step.model(size)
            work = model if kind.top_k is not None else lambda: step.draw(model(), kind)
            self._recordings[key] = self._recorder.record(key, work)
        answered = records.lengths[rows]
        step.lay_out(records.last[rows], self._tokens[rows], answered, rows >= 0, records.draws[rows])
        upload(step.table[:size], self.cache.table[rows])
        self._stale = self._ended = False

    def _tell_device(self) -> None:
        """Upload who has ended, and new pages."""
        assert self._step is not None
        rows = self._rows
        slots = rows[rows >= 0]
        if self._ended:
            upload(self._step.alive[: len(rows)], (rows >= 0).astype(np.int64))
            self._ended = False
        if ((self._tokens[slots] + 1) > self.cache.owned[slots] * self.cache.page).any():
            ahead = self._tokens[slots] + _AHEAD
            self.cache.extend(ahead if self.cache.fits(ahead, slots) else self._tokens[slots] + 1, slots)
            upload(self._step.table[: len(rows)], self.cache.table[rows])

    def _have_room(self, tokens: np.ndarray, slots: np.ndarray) -> None:
        if self.cache.extend(tokens, slots):
            self._step = None
            self._forget_recordings()

    def _forget_recordings(self) -> None:
        self._recordings.clear()
        self._recorder.clear()

    @staticmethod
    def _key(rows: int, kind: Rules) -> tuple[int, ...]:
        return rows, kind.temperatures is not None, kind.greedy is not None, kind.top_k is not None


def _drawn(step: _UnderWay) -> Drawn:
    return Drawn(step.slots, *from_told(step.told.wait(), len(step.slots)), step.version)


def row_sizes(max_rows: int) -> list[int]:
    """Numbers of rows for which steps are recorded, the last of them at least `max_rows`: 8, 16, 32, 48, 64, 96, ..."""
    sizes = [8, 16, 32]
    while sizes[-1] < max_rows:
        power = 1 << (sizes[-1].bit_length() - 1)
        sizes.append(sizes[-1] + (power // 2))
    return sizes[: next(number for number, size in enumerate(sizes) if size >= max_rows) + 1]
