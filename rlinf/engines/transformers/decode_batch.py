"""The answers that are being generated: rows join, are extended by a token per step, and leave when they end.

Consumes tickets (`newcomers`). Produces completions (`finished`). Plain blocking code: every method runs in the compute
thread, one at a time; the event loop fills and empties the queues, and sets flags, whenever it likes.

What a row computes depends, to the last bit, on which rows share its steps; that is a function of the tickets and of
when they joined, counted in steps, never of time: `advance` may return whenever it likes, but comes back for newcomers
at the very step at which they are due.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rlinf.data.weights import Weights
from rlinf.engines.base import Completion, Finish, Request
from rlinf.engines.transformers.kv_cache import Band, Layers
from rlinf.engines.transformers.padding import pad_left, rectangles
from rlinf.engines.transformers.sampling import Rules, choose
from rlinf.engines.transformers.slots import Decode, Records, Ticket
from rlinf.engines.transformers.step_stats import Pace

_QUIET = 0.002
"""Seconds for which finished answers may wait in the thread. Handing over to the event loop costs about 0.1 ms."""
_LONGEST = 0.02
"""Seconds after which the thread is free for others, whether or not an answer has finished."""
_BALLAST = 1 / 8
"""Ended rows are computed on until they are so large a share of their band: then moving others into their place is
cheaper. Newcomers take the places of those that are left."""
_ALIKE = 128
"""Rows no longer than this share a band whatever their lengths: attention over so few columns costs next to nothing."""


class Forward(Protocol):
    """A model, as the batch sees it; `ModelForward` says more."""

    layers: int
    device: torch.device
    version: int

    def read(self, ids: Tensor, real: Tensor | None) -> tuple[Tensor, Layers]: ...

    def step(self, ids: Tensor, positions: Tensor, bands: Sequence[Band]) -> Tensor: ...

    def check(self, weights: Weights) -> None: ...

    def load(self, weights: Weights) -> None: ...

    def park(self) -> None: ...

    def unpark(self) -> None: ...


@dataclass(slots=True, eq=False)
class _View:
    """All rows of all bands side by side, made anew when rows join or move."""

    slots: np.ndarray
    """Slot of each row, -1 once it has ended, int64 [rows]."""
    ids: Tensor
    """The token that each reads next, int64 [rows]."""
    positions: Tensor
    """Of that token in its text, int64 [rows]."""
    answered: Tensor
    """Which token of its answer the row draws next, int64 [rows]."""
    rules: Rules
    """How it draws."""


class Batch:
    """The state of generation.

    Args:
        forward: the model; its `version` is read at every step, so weights may change between steps.
        max_rows: answers under way at a time.
        decode: turns tokens into text, for stop texts.
    """

    def __init__(self, forward: Forward, max_rows: int, decode: Decode | None = None):
        self.forward = forward
        self.max_rows = max_rows
        self.finished: deque[tuple[Ticket, Completion]] = deque()
        """Answers that have ended, in that order, for the event loop to take."""
        self.newcomers: deque[Ticket] = deque()
        """Put there by the event loop, to join at the beginning of the next `advance`."""
        self.left: deque[object] = deque()
        """Owners, put there by the event loop, who do not want their answers any more."""
        self.interrupted = False
        """Set by anyone to have `advance` return after its step."""
        self.paused = False
        """Set by anyone to have `advance` do nothing."""
        self.asleep = False
        """Parked: `advance` does nothing."""
        self.tokens = 0
        """Of cache that the answers under way may come to."""
        self.pace = Pace()
        """How long steps and reading took."""
        self._decode = decode
        self._records = Records(max_rows, decode)
        self._bands: list[Band] = []
        self._view: _View | None = None

    @property
    def live(self) -> int:
        """Answers under way."""
        return self.max_rows - self._records.free

    @torch.inference_mode()
    def advance(self, due: tuple[int, int]) -> None:
        """Let the newcomers join, then decode until somebody should look.

        Args:
            due: return at the step that leaves so many rows free, and no more than so many tokens of cache taken.
        """
        self.drop()
        if self.asleep or self.paused:
            return
        start = time.perf_counter()
        if self.newcomers:
            self._join()
        free, taken = due
        while self.live and not self.interrupted and not (self._records.free >= free and self.tokens <= taken):
            self._step()
            passed = time.perf_counter() - start
            if passed > _LONGEST or (self.finished and passed > _QUIET):
                break
        self.interrupted = False
        if not self.live:  # what comes next must not find traces of what was; and the memory is free for others
            self._forget()

    def drop(self) -> None:
        """Forget the answers of those who have left."""
        if self.left:
            left = {self.left.popleft() for _ in range(len(self.left))}
            self._remove({ticket for ticket in self.tickets() if ticket.owner in left}, None)

    def abort(self, ids: Collection[int] | None) -> None:
        """End these requests (None: all) where they stand; they count as finished."""
        self._remove({ticket for ticket in self.tickets() if ids is None or ticket.request.id in ids}, "abort")

    def take_out(self, ids: Collection[int]) -> list[tuple[Ticket, Request]]:
        """Forget these requests; each comes with what there is of its answer, for another engine to go on with."""
        taken = [(ticket, ticket.request) for ticket in self.newcomers if ticket.request.id in ids]
        taken += [
            (ticket, replace(ticket.request, begun=self._records.begun(slot)))
            for slot, ticket in self._records.tickets.items()
            if ticket.request.id in ids
        ]
        self._remove({ticket for ticket, _ in taken}, None)
        return taken

    def _remove(self, tickets: set[Ticket], finish: Finish | None) -> None:
        """End these answers; with a reason they count as finished, without they are forgotten."""
        for _ in range(len(self.newcomers)):
            ticket = self.newcomers.popleft()
            if ticket not in tickets:
                self.newcomers.append(ticket)
            elif finish is not None:
                self.finished.append((ticket, ticket.request.ended(finish)))
        slots = np.array([slot for slot, one in self._records.tickets.items() if one in tickets], dtype=np.int64)
        self._close(slots, [finish or "abort"] * len(slots), keep=finish is not None)
        self._view = None
        for band in self._bands:
            band.end(np.flatnonzero(np.isin(band.slots, slots)))
        if not self.live:  # nobody may advance for a while, and the memory is free for others
            self._forget()

    def tickets(self) -> list[Ticket]:
        """Of all answers under way, newcomers included."""
        return [*self._records.tickets.values(), *self.newcomers]

    def clear(self) -> list[Ticket]:
        """Forget everything, after an error; returns whose answers are lost."""
        lost = self.tickets()
        self.newcomers.clear()
        self._forget()
        self._records = Records(self.max_rows, self._decode)
        self.tokens = 0
        return lost

    def park(self) -> None:
        """Give back the memory of keys and values, and move the weights to the host's."""
        self._forget()
        self.asleep = True
        self.forward.park()

    def unpark(self) -> None:
        """Undo `park`: move the weights back, and read all answers under way again."""
        if self.asleep:
            self.forward.unpark()
            self.asleep = False
            self.reread()

    def load(self, weights: Weights, reread: bool) -> None:
        """Switch to other weights; if told so, read all answers under way again."""
        self.forward.load(weights)
        if reread and not self.asleep:
            self.reread()

    @torch.inference_mode()
    def reread(self) -> None:
        """Read all answers under way anew, with the weights as they are now."""
        self._forget()
        for _ in self._read(list(self._records.tickets)):
            pass

    def _forget(self) -> None:
        self._bands, self._view = [], None

    def _join(self) -> None:
        """Read what the newcomers have, and draw the first tokens of those that have only a prompt."""
        self._tidy()
        self._view = None
        tickets = [self.newcomers.popleft() for _ in range(len(self.newcomers))]
        slots = self._records.open(tickets).tolist()
        self.tokens += sum(ticket.need for ticket in tickets)
        for some, logits in self._read(slots):
            if len(new := np.flatnonzero(self._records.lengths[some] == 0)):
                if len(new) < len(some):
                    some, logits = some[new], logits[torch.from_numpy(new).to(logits.device)]
                rules = Rules.of(self._records.draws[some], self.forward.device)
                drawn = choose(logits, rules, torch.zeros(len(some), dtype=torch.int64, device=logits.device))
                self._extend(some, *drawn)
        self._merge()

    def _step(self) -> None:
        """One token more for every row."""
        self._tidy()
        start = time.perf_counter()
        view = self._view = self._view or self._look()
        for band in self._bands:
            band.reserve()
        logits = self.forward.step(view.ids, view.positions, self._bands)
        for band in self._bands:
            band.advance()
        tokens, logprobs = choose(logits, view.rules, view.answered)
        view.ids = tokens
        view.positions += 1
        view.answered += 1
        rows = self._extend(view.slots, tokens, logprobs)
        if rows:
            view.slots[rows] = -1
            view.positions[rows] = 0  # ballast must not walk off the end of a table of positions
        self.pace.stepped(len(view.slots), time.perf_counter() - start)

    def _extend(self, slots: np.ndarray, tokens: Tensor, logprobs: Tensor) -> list[int]:
        """Add a token to each answer; those that end leave. Returns their rows."""
        ended = self._records.add(slots, tokens.cpu().numpy(), logprobs.cpu().numpy(), self.forward.version)
        rows = [row for row, _ in ended]
        if rows:
            gone = slots[rows]
            self._close(gone, [finish for _, finish in ended], keep=True)
            for band in self._bands:
                if len(here := np.flatnonzero(np.isin(band.slots, gone))):
                    band.end(here)
        return rows

    def _close(self, slots: np.ndarray, finishes: Sequence[Finish], *, keep: bool) -> None:
        closed = self._records.close(slots, finishes)
        self.tokens -= sum(ticket.need for ticket, _ in closed)
        if keep:
            self.finished += closed

    def _look(self) -> _View:
        records, device = self._records, self.forward.device
        slots = np.concatenate([band.slots for band in self._bands])
        answered = records.lengths[slots]
        positions = np.maximum(records.prompts[slots] + answered - 1, 0)
        return _View(
            slots,
            ids=torch.from_numpy(records.last[slots]).to(device),
            positions=torch.from_numpy(positions).to(device),
            answered=torch.from_numpy(answered).to(device),
            rules=Rules.of(records.draws[slots], device),
        )

    def _tidy(self) -> None:
        """Drop the rows that have ended where they have become too many."""
        for band in self._bands:
            ended = len(band) - band.live
            if ended and ended >= _BALLAST * len(band):
                band.compact()
                self._view = None
        if not all(len(band) for band in self._bands):
            self._bands = [band for band in self._bands if len(band)]
            self._view = None

    def _read(self, slots: Sequence[int]) -> Iterator[tuple[np.ndarray, Tensor]]:
        """Read what is known of these answers into the bands, equal texts once.

        Yields:
            Slots, int64 [some], and the logits after the text of each, [some, vocabulary].
        """
        readers: dict[bytes, tuple[np.ndarray, list[int]]] = {}
        for slot in slots:
            text = self._records.text_ids(slot)
            readers.setdefault(text.tobytes(), (text, []))[1].append(slot)
        for rectangle in rectangles(sorted(readers.values(), key=lambda reader: -len(reader[0]))):
            start = time.perf_counter()
            ids, real = pad_left([text for text, _ in rectangle], self.forward.device)
            logits, read = self.forward.read(ids, real)
            which = np.array([slot for _, slots in rectangle for slot in slots], dtype=np.int64)
            lengths = np.array([len(text) for text, slots in rectangle for _ in slots], dtype=np.int64)
            source = torch.tensor(
                [number for number, (_, slots) in enumerate(rectangle) for _ in slots], device=self.forward.device
            )
            room = self._records.room(which)
            self._band_for(ids.shape[1], read, room).place(which, lengths, read, source)
            yield which, logits.index_select(0, source)
            self.pace.read(ids.numel(), time.perf_counter() - start)  # now that the device has done it: it was asked

    def _band_for(self, width: int, read: Layers, room: int) -> Band:
        """The band where rows of this width belong."""
        for band in self._bands:
            if _alike(band.width, width):
                return band
        self._bands.append(Band(read, room))
        return self._bands[-1]

    def _merge(self) -> None:
        """Make one band of two that have become alike: rows grow by equal lengths, so in proportion they draw near."""
        merged: list[Band] = []
        for band in sorted((band for band in self._bands if band.live), key=lambda band: -band.width):
            if merged and _alike(merged[-1].width, band.width):
                merged[-1].absorb(band)
            else:
                merged.append(band)
        self._bands = merged


def _alike(one: int, other: int) -> bool:
    longer = max(one, other)
    return longer <= _ALIKE or longer <= 2 * min(one, other)
