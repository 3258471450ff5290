"""The decode batch: rows join, are extended by a token per step, and leave when their answers end.

Flows in: requests (`newcomers`). Flows out: completions (`finished`). Plain blocking code that wakes nobody:
every method runs in the compute thread, one at a time; the event loop fills and empties the queues, and sets flags, at
any time. Below the batch lie the keys and values of conversations between their turns (`Conversations`), so that a turn
reads only what is new, and what decodes rows (`DecodeState`): here in bands of like length, one call of the model after
the other, on CPUs and for every kind of model; on GPUs by `graphs.py`.

What a row computes depends, to the last bit, on which rows share its steps; that is a function of the requests and of
when they joined, counted in steps, never of time: `advance` may return whenever it likes, but comes back for newcomers
at the very step at which they are due.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from rlinf.data.routes import fitted
from rlinf.data.sample import PrefixKey
from rlinf.data.weights import Weights
from rlinf.engines.base import Completion, Finish, PartialAnswer, Request, StepStats, StopTexts
from rlinf.engines.grammars import Constraint, Grammars
from rlinf.engines.transformers.cache import Band, CachedText, Conversations, Layers
from rlinf.engines.transformers.drafts import Drafts, Proposal
from rlinf.engines.transformers.model import ModelForward, pad_left, rectangles
from rlinf.engines.transformers.sampling import DRAWS, Allowed, Rules, choose_allowed, to_host
from rlinf.engines.usual_lengths import UsualLengths

logger = logging.getLogger(__name__)


class Sampled(NamedTuple):
    """One token more of some answers, on the host."""

    slots: np.ndarray
    """Slot of each row, -1 for rows that have ended, int64 [rows]."""
    tokens: np.ndarray
    """int64 [rows]"""
    logprobs: np.ndarray
    """float32 [rows]"""
    log_mass: np.ndarray | None
    """Log of the probability that the form of each answer left, see `Completion.log_mass`, float32 [rows]; None if no
    answer has a form."""
    version: int | np.ndarray
    """Version of the weights that made them: of all, or int32 [rows]."""


class Slots:
    """Answers in flight, each in a slot.

    Args:
        slots: how many there may be.
        stop_texts: finds them; None if there will be none.
        grammars: keep answers within their forms; None if no answer has one.
    """

    def __init__(self, slots: int, stop_texts: StopTexts | None, grammars: Grammars | None = None):
        self.requests: dict[int, Request] = {}
        """By slot, in the order in which they came."""
        self.lengths = np.zeros(slots + 1, dtype=np.int64)
        """Tokens answered, int64 [slots + 1]. The last slot, also known as -1, is of rows that have ended."""
        self.last = np.zeros(slots + 1, dtype=np.int64)
        """Newest token, int64 [slots + 1]."""
        self.prompts = np.zeros(slots + 1, dtype=np.int64)
        """Tokens of the prompt, int64 [slots + 1]."""
        self.shifts = np.zeros(slots + 1, dtype=np.int64)
        """How much further on than its number a token of the answer stands, int64 [slots + 1], see `Layers.shifts`."""
        self.draws = np.zeros(slots + 1, dtype=DRAWS)
        """How each answer's tokens are chosen, [slots + 1]."""
        self.draws["temperature"] = self.draws["top_p"] = 1
        self.constraints: dict[int, Constraint] = {}
        """By slot, of answers that have a form: where in its grammar they are."""
        self._stop_texts, self._grammars = stop_texts, grammars
        self._free = list(range(slots - 1, -1, -1))
        self._texts: set[int] = set()  # slots with stop texts
        self._limits = np.ones(slots + 1, dtype=np.int64)
        self._least = np.zeros(slots + 1, dtype=np.int64)
        self._stops = np.full((slots + 1, 1), -1, dtype=np.int64)
        self._tokens = np.empty((slots + 1, 1), dtype=np.int64)
        self._logprobs = np.empty((slots + 1, 1), dtype=np.float32)
        self._versions = np.empty((slots + 1, 1), dtype=np.int32)
        self._routes: dict[int, list[np.ndarray]] = {}  # of each text from its beginning, piece by piece

    @property
    def free(self) -> int:
        """Slots without an answer."""
        return len(self._free)

    def open(self, requests: Sequence[Request], answers_here: dict[Request, PartialAnswer] | None = None) -> np.ndarray:
        """Begin answers, or continue those that were begun; returns their slots, int64 [requests].

        Args:
            requests: them.
            answers_here: what was answered here, of those that were; it is taken out.
        """
        begun_answers = [
            request.partial if answers_here is None else answers_here.pop(request, request.partial)
            for request in requests
        ]
        samplings = [request.sampling for request in requests]
        self._widen(max(s.max_new_tokens for s in samplings), max(len(s.stop_ids) for s in samplings))
        slots = np.array([self._free.pop() for _ in requests], dtype=np.int64)
        self.requests.update(zip(slots.tolist(), requests, strict=True))
        self.lengths[slots] = 0
        self.prompts[slots] = [len(request.prompt_ids) for request in requests]
        self.draws[slots] = [
            (request.seed, s.temperature, s.top_k, s.top_p, s.min_p)
            for request, s in zip(requests, samplings, strict=True)
        ]
        self._limits[slots] = [s.max_new_tokens for s in samplings]
        self._least[slots] = [s.min_new_tokens for s in samplings]
        width = self._stops.shape[1]
        self._stops[slots] = [s.stop_ids + (-1,) * (width - len(s.stop_ids)) for s in samplings]
        self._texts.update(slot for slot, s in zip(slots.tolist(), samplings, strict=True) if s.stop_texts)
        for slot, request, answered in zip(slots.tolist(), requests, begun_answers, strict=True):
            if answered is not None:
                if answered.routes is not None:
                    self._routes[slot] = [answered.routes]
                count = self.lengths[slot] = len(answered.response_ids)
                self._tokens[slot, :count], self.last[slot] = answered.response_ids, answered.response_ids[-1]
                self._logprobs[slot, :count], self._versions[slot, :count] = answered.logprobs, answered.versions
            if (form := request.sampling.form) and self._grammars is not None:
                so_far = ((), ()) if answered is None else (answered.response_ids.tolist(), answered.masses)
                self.constraints[slot] = self._grammars.constraint(form, request.sampling.stop_ids, *so_far)
        return slots

    def allowed(self, slots: np.ndarray, device: torch.device) -> Allowed | None:
        """Compute which tokens answers in slots, int64 [rows], may have next; None if all may have all."""
        rows = [row for row, slot in enumerate(slots.tolist()) if slot in self.constraints] if self.constraints else []
        if not rows or self._grammars is None:
            return None
        tokens = self._grammars.allowed([self.constraints[int(slots[row])] for row in rows])
        return Allowed.of(np.array(rows), tokens, device)

    def _log_mass(self, slot: int, count: int) -> np.ndarray | None:
        """See `Completion.log_mass`."""
        constraint = self.constraints.get(slot)
        return None if constraint is None else np.array(constraint.log_mass[:count], np.float32)

    def partial(self, slot: int) -> Request:
        """The request with its tokens so far."""
        count = int(self.lengths[slot])
        tokens, logprobs, versions = (
            array[slot, :count].copy() for array in (self._tokens, self._logprobs, self._versions)
        )
        more = self._routes_of(slot, count), self._log_mass(slot, count)
        partial = PartialAnswer(tokens, logprobs, versions, *more) if count else None
        return replace(self.requests[slot], partial=partial)

    def routed(self, slots: Sequence[int], end: int, routes: np.ndarray) -> None:
        """A text was read up to `end`, or its last part was: what is known of it already stays as it is, since its
        tokens were drawn from what those experts gave.

        Args:
            slots: of the answers to it.
            end: tokens of the text so far.
            routes: of its last tokens, [read, layers, experts per token].
        """
        for slot in slots:
            pieces = self._routes.setdefault(slot, [])
            tokens, start = sum(map(len, pieces)), end - len(routes)
            if start > tokens:  # of what was read for an earlier turn, that turn's answer tells
                pieces.append(fitted(routes[:0], start - tokens))
            if (new := routes[max(0, tokens - start) :]).size:
                pieces.append(new)

    def routed_step(self, slots: np.ndarray, routes: np.ndarray) -> None:
        """The newest token of each answer was read; int64 [rows], and [rows, layers, experts per token]."""
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                self._routes[slot].append(routes[row : row + 1])

    def _routes_of(self, slot: int, answered: int) -> np.ndarray | None:
        """Routes of all that was read for so many tokens, [prompt + answered - 1, layers, experts per token]."""
        pieces = self._routes.get(slot)
        if not pieces:
            return None
        self._routes[slot] = [whole] = [np.concatenate(pieces)]
        return whole[: int(self.prompts[slot]) + answered - 1]

    def add(self, sampled: Sampled) -> list[tuple[int, Finish]]:
        """Take in a step's tokens.

        Returns:
            Positions in `drawn.slots` of the answers that ended, in order, and why.
        """
        slots, tokens, logprobs, log_mass, version = sampled
        places = self.lengths[slots]
        self._tokens[slots, places] = tokens
        self._logprobs[slots, places] = logprobs
        self._versions[slots, places] = version
        self.last[slots] = tokens
        lengths = places + 1
        self.lengths[slots] = lengths
        self.lengths[-1] = 0
        stopped = (self._stops[slots] == tokens[:, None]).any(axis=1) & (lengths >= self._least[slots])
        ended = (stopped | (lengths >= self._limits[slots])) & (slots >= 0)
        finishes: dict[int, Finish] = {}
        if self._texts:
            finishes = {row: "text" for row in np.flatnonzero(slots >= 0).tolist() if self._text_ends(int(slots[row]))}
        if log_mass is not None:
            finishes |= dict.fromkeys(self._left_form(slots.tolist(), tokens.tolist(), log_mass.tolist()), "abort")
        if not finishes and not ended.any():
            return []
        for row in np.flatnonzero(ended).tolist():
            if stopped[row] or row not in finishes:
                finishes[row] = "stop" if stopped[row] else "length"
        return sorted(finishes.items())

    def _left_form(self, slots: Sequence[int], tokens: Sequence[int], log_mass: Sequence[float]) -> Iterator[int]:
        """Take in the tokens of answers that have a form; yields rows of those that cannot go on in it."""
        for row, slot in enumerate(slots):
            if (constraint := self.constraints.get(slot)) is None:
                continue
            constraint.take(tokens[row], log_mass[row])
            if constraint.problem is not None:
                id = self.requests[slot].id
                logger.warning("request %d is ended: its form cannot be kept: %s", id, constraint.problem)
                yield row

    def adapters(self, slots: Iterable[int]) -> list[str | None]:
        """Names of the adapters that answer in slots; None for the model itself, and in a slot without an answer."""
        return [None if (request := self.requests.get(slot)) is None else request.adapter for slot in slots]

    def close(self, slots: np.ndarray, finishes: Sequence[Finish]) -> list[tuple[Request, Completion]]:
        """End answers and free their slots, int64 [ended]."""
        lengths = self.lengths[slots].tolist()
        span = slice(0, max(lengths, default=0))
        tokens, logprobs, versions = (array[slots, span] for array in (self._tokens, self._logprobs, self._versions))
        closed = []
        for row, (slot, length, finish) in enumerate(zip(slots.tolist(), lengths, finishes, strict=True)):
            request = self.requests.pop(slot)
            answer = tokens[row, :length], logprobs[row, :length], versions[row, :length]
            more = self._routes_of(slot, length), self._log_mass(slot, length)
            closed.append((request, Completion(request.id, *answer, finish, *more)))
            self._routes.pop(slot, None)
            self.constraints.pop(slot, None)
            self._texts.discard(slot)
            self._free.append(slot)
        return closed

    def since(self, slot: int, count: int) -> list[int]:
        """Tokens of an answer behind so many."""
        tokens: list[int] = self._tokens[slot, count : self.lengths[slot]].tolist()
        return tokens

    def room(self, slots: np.ndarray) -> int:
        """Tokens that the one of these answers may still get that may get most."""
        return int((self._limits[slots] - self.lengths[slots]).max())

    def text_ids(self, slot: int) -> np.ndarray:
        """All that has been read of a text: its prompt and the answer without its newest token, int64 [tokens]."""
        prompt, answered = self.requests[slot].prompt_ids, int(self.lengths[slot]) - 1
        return prompt if answered < 1 else np.concatenate([prompt, self._tokens[slot, :answered]])

    def _text_ends(self, slot: int) -> bool:
        """True if the newest token completed a stop text of this answer."""
        length = int(self.lengths[slot])
        if slot not in self._texts or length < self._least[slot]:
            return False
        assert self._stop_texts is not None
        stops = self.requests[slot].sampling.stop_texts
        # A text of n characters has at most 4n bytes, and a token that shows has at least one. The rest is for tokens
        # that show nothing and for a character that the cut tears.
        tail = self._tokens[slot, max(0, length - 4 * max(map(len, stops)) - 8) : length].tolist()
        return self._stop_texts.complete(tail, stops)

    def _widen(self, room: int, stops: int) -> None:
        self._tokens, self._logprobs, self._versions = (
            _wider(array, room) for array in (self._tokens, self._logprobs, self._versions)
        )
        if stops > self._stops.shape[1]:
            narrow = self._stops
            self._stops = np.full((len(narrow), stops), -1, dtype=np.int64)
            self._stops[:, : narrow.shape[1]] = narrow


def _wider(array: np.ndarray, columns: int) -> np.ndarray:
    if columns <= array.shape[1]:
        return array
    wide = np.empty((len(array), columns), dtype=array.dtype)  # pages that are never written are never taken
    wide[:, : array.shape[1]] = array
    return wide


class PrefillJob(NamedTuple):
    """A text to be read, once for all answers that begin with it."""

    unread: np.ndarray
    """Tokens of it that have to be read, int64 [unread]."""
    text: np.ndarray
    """All of it, int64 [tokens]."""
    slots: list[int]
    """Slots of the answers."""
    cached: CachedText | None
    """Tokens of its beginning that have been read already."""

    def continuing(self, cached: CachedText | None) -> PrefillJob:
        """Copy that reads on from a cached text; itself if that has no more of it than was read."""
        shared = 0 if cached is None else cached.shared(self.text)
        more = shared > len(self.text) - len(self.unread)
        return self._replace(unread=self.text[shared:], cached=cached) if more else self


def side_by_side(jobs: Iterable[PrefillJob], *, pads: bool = True) -> Iterator[list[PrefillJob]]:
    """Which texts to read together, longest first: alike in what is unread and, where they go on, in all; see
    `rectangles` for `pads`."""

    def alike(job: PrefillJob) -> int:
        return 0 if job.cached is None else len(job.text).bit_length()

    ordered = sorted(jobs, key=lambda job: (alike(job), -len(job.unread)))
    for _, some in itertools.groupby(ordered, alike):
        yield from rectangles(list(some), pads=pads)


def input_of(jobs: Sequence[PrefillJob], device: torch.device) -> tuple[Tensor, Tensor | None, Layers | None]:
    """The tokens to read, which of them and of those before are no padding, and the past, as `ModelForward.read` wants
    them.

    Of every text that goes on, as many tokens are read as of the one with most unread: so that all keys stand side by
    side without gaps.
    """
    unread = len(jobs[0].unread)
    ids, real = pad_left([job.text[-unread:] for job in jobs], device)
    cached = [job.cached for job in jobs if job.cached is not None]
    if not cached:
        return ids, real, None
    lengths = np.array([len(job.text) for job in jobs])
    columns = int(lengths.max())
    real = torch.from_numpy(np.arange(columns) >= columns - lengths[:, None]).to(device)
    return ids, real, _past(cached, lengths - unread, columns - unread)


def _past(cached: Sequence[CachedText], lengths: np.ndarray, columns: int) -> Layers:
    """The first tokens of each, so many, aligned at their ends in so many columns."""
    spans = [
        (row, one, int(length)) for row, (one, length) in enumerate(zip(cached, lengths, strict=True)) if length > 0
    ]

    def joined(layer: int, which: int) -> Tensor:
        like = cached[0].pairs[layer][which]
        wide = like.new_zeros((len(cached), like.shape[0], columns, like.shape[2]))
        for row, one, length in spans:
            wide[row, :, columns - length :] = one.pairs[layer][which][:, :length]
        return wide

    return Layers([(joined(layer, 0), joined(layer, 1)) for layer in range(len(cached[0].pairs))])


_BALLAST = 1 / 8
"""Ended rows are computed on until they are so large a share of their band: then moving others into their place is
cheaper. Newcomers take the places of those that are left."""
_ALIKE = 128
"""Rows no longer than this share a band whatever their lengths: attention over so few columns costs next to nothing."""


@dataclass(slots=True, eq=False)
class _View:
    """All rows of all bands side by side, made anew when rows join or move."""

    slots: np.ndarray
    """Slot of each row, -1 once it has ended, int64 [rows]."""
    ids: Tensor
    """The token that each reads next, int64 [rows]."""
    positions: Tensor
    """Position of that token in its text, int64 [rows]."""
    answered: Tensor
    """Which token of its answer the row draws next, int64 [rows]."""
    rules: Rules
    """How it draws."""
    ended: list[int] = field(default_factory=list)
    """Rows that have ended since the last step."""


class BandedRows:
    """The rows of a decode batch, in bands of like length; see `DecodeState` for what the methods do.

    Args:
        forward: the model.
    """

    def __init__(self, forward: ModelForward):
        self.bands: list[Band] = []
        """Not empty, each."""
        self.drafts: Drafts | None = None
        """Drafts to read besides, of a forward that `verifies`."""
        self._forward = forward
        self._view: _View | None = None

    @property
    def width(self) -> int:
        return sum(len(band) for band in self.bands)

    def read(self, jobs: Iterable[PrefillJob], records: Slots) -> Iterator[tuple[np.ndarray, Tensor, int]]:
        self._tidy()
        self._view = None
        device = self._forward.device
        for rectangle in side_by_side(jobs, pads=self._forward.pads):
            ids, real, past = input_of(rectangle, device)
            images = [records.requests[job.slots[0]].images for job in rectangle]
            self._forward.rows_by(records.adapters(job.slots[0] for job in rectangle))
            logits, layers = self._forward.read(ids, real, images, past)
            if (routes := self._forward.routes()) is not None:
                of_texts = routes.reshape(*ids.shape, *routes.shape[1:])
                for job, of_text in zip(rectangle, of_texts, strict=True):
                    records.routed(job.slots, len(job.text), of_text[-len(job.text) :])
            which = np.array([slot for job in rectangle for slot in job.slots], dtype=np.int64)
            lengths = np.array([len(job.text) for job in rectangle for _ in job.slots], dtype=np.int64)
            source = torch.tensor([number for number, job in enumerate(rectangle) for _ in job.slots], device=device)
            records.shifts[which] = 0 if layers.shifts is None else layers.shifts[source.cpu().numpy()]
            self._band_for(int(lengths.max()), layers, records.room(which)).place(which, lengths, layers, source)
            yield which, logits.index_select(0, source), ids.numel()

    def joined(self) -> None:
        """Make one band of two that have become alike: rows grow by equal lengths, so in proportion they draw near."""
        merged: list[Band] = []
        for band in sorted((band for band in self.bands if band.live), key=lambda band: -band.width):
            if merged and _alike(merged[-1].width, band.width):
                merged[-1].absorb(band)
            else:
                merged.append(band)
        self.bands = merged

    def step(self, records: Slots) -> Iterator[Sampled]:
        self._tidy()
        view = self._view = self._view or self._look(records)
        if view.ended:  # ballast must not walk off the end of a table of positions
            view.positions[view.ended] = 0
            view.ended.clear()
        proposal = None if self.drafts is None else self.drafts.propose(records, view.slots)
        whole, counts = (view, None) if proposal is None else (_drafted(view, proposal, records), proposal.counts)
        for band, some in self._of_bands(counts):
            band.reserve(some)
        adapters = records.adapters(whole.slots.tolist())
        self._forward.rows_by(adapters)
        logits = self._forward.step(whole.ids, whole.positions, self.bands)
        if (routes := self._forward.routes()) is not None:
            records.routed_step(view.slots, routes)
        allowed = records.allowed(whole.slots, logits.device)
        tokens, *numbers = choose_allowed(
            self._forward.allowed(logits), whole.rules, whole.answered, allowed, padding=self._forward.padding
        )
        ids, logprobs, log_mass = to_host(tokens, *numbers)
        sampled = Sampled(whole.slots, ids, logprobs, log_mass, self._forward.versions_of(adapters))
        if proposal is not None and self.drafts is not None:
            counts = proposal.right(ids)
            self.drafts.took(proposal, counts)
        for band, some in self._of_bands(counts):
            band.advance(some)
        if counts is not None:
            assert proposal is not None
            yield from _told(sampled, view, proposal, counts)
            self._view = None
            return
        view.ids = tokens
        view.positions += 1
        view.answered += 1
        yield sampled

    def _of_bands(self, counts: np.ndarray | None) -> Iterator[tuple[Band, np.ndarray | None]]:
        """Bands, and what is said of their rows, int64 [rows] of all."""
        start = 0
        for band in self.bands:
            yield band, None if counts is None else counts[start : start + len(band)]
            start += len(band)

    def settle(self) -> None:
        return None

    def end(self, slots: np.ndarray) -> None:
        for band in self.bands:
            if len(here := np.flatnonzero(np.isin(band.slots, slots))):
                band.end(here)
        if self._view is not None and len(rows := np.flatnonzero(np.isin(self._view.slots, slots))):
            self._view.slots[rows] = -1
            self._view.ended += rows.tolist()

    def cached(self, slot: int, tokens: int) -> Sequence[tuple[Tensor, Tensor]]:
        band, row = next((band, row) for band in self.bands for row in np.flatnonzero(band.slots == slot).tolist())
        return band.row(row, tokens)

    def forget(self) -> None:
        self.bands, self._view = [], None

    def park(self) -> None:
        self.forget()

    def _look(self, records: Slots) -> _View:
        device = self._forward.device
        slots = np.concatenate([band.slots for band in self.bands])
        answered = records.lengths[slots]
        positions = np.maximum(records.prompts[slots] + answered - 1 + records.shifts[slots], 0)
        return _View(
            slots,
            ids=torch.from_numpy(records.last[slots]).to(device),
            positions=torch.from_numpy(positions).to(device),
            answered=torch.from_numpy(answered).to(device),
            rules=Rules.of(records.draws[slots], device),
        )

    def _tidy(self) -> None:
        """Drop the rows that have ended where they have become too many."""
        for band in self.bands:
            ended = len(band) - band.live
            if ended and ended >= _BALLAST * len(band):
                band.compact()
                self._view = None
        if not all(len(band) for band in self.bands):
            self.bands = [band for band in self.bands if len(band)]
            self._view = None

    def _band_for(self, width: int, layers: Layers, room: int) -> Band:
        """The band where rows of this width belong."""
        for band in self.bands:
            if _alike(band.width, width):
                return band
        self.bands.append(Band(layers, room))
        return self.bands[-1]


def _drafted(view: _View, proposal: Proposal, records: Slots) -> _View:
    """The rows with their drafts, token by token."""
    rows, depths = (torch.from_numpy(numbers).to(view.ids.device) for numbers in (proposal.rows, proposal.depths))
    ids, slots = view.ids[rows], view.slots[proposal.rows]
    ids[depths > 0] = torch.from_numpy(proposal.tokens).to(ids.device)
    rules = Rules.of(records.draws[slots], ids.device)
    return _View(slots, ids, view.positions[rows] + depths, view.answered[rows] + depths, rules)


def _told(sampled: Sampled, view: _View, proposal: Proposal, counts: np.ndarray) -> Iterator[Sampled]:
    """Tokens that were drawn behind drafts, one of each row at a time, of so many of each, int64 [rows]."""
    firsts = np.cumsum(proposal.counts) - proposal.counts
    for number in range(int(counts.max())):
        slots, at = np.where(counts > number, view.slots, -1), firsts + np.minimum(number, counts - 1)
        version = sampled.version if isinstance(sampled.version, int) else sampled.version[at]
        log_mass = None if sampled.log_mass is None else sampled.log_mass[at]
        yield Sampled(slots, sampled.tokens[at], sampled.logprobs[at], log_mass, version)


def _alike(one: int, other: int) -> bool:
    longer = max(one, other)
    return longer <= _ALIKE or longer <= 2 * min(one, other)


_QUIET = 0.002
"""Seconds for which finished answers may wait in the thread. Handing over to the event loop costs about 0.1 ms."""
_LONGEST = 0.02
"""Seconds after which the thread is free for others, whether or not an answer has finished."""


class DecodeState(Protocol):
    """The answers in flight as the device has them: what was read of each, and one token more for all at a time.

    `BandedRows` decodes any model; `GraphedRows` is for GPUs, and returns a step's tokens while it computes the next.
    """

    drafts: Drafts | None
    """Drafts that a step reads; None for none."""

    @property
    def width(self) -> int:
        """Rows that a step computes, ended ones included."""
        ...

    def read(self, jobs: Iterable[PrefillJob], records: Slots) -> Iterator[tuple[np.ndarray, Tensor, int]]:
        """Read texts and give each answer a row.

        Yields:
            Slots, int64 [some], the logits after the text of each, [some, vocabulary], and how many tokens were read.
        """
        ...

    def joined(self) -> None:
        """All newcomers were read."""
        ...

    def step(self, records: Slots) -> Iterable[Sampled]:
        """Compute one token more for every row, or some; yields the oldest tokens that were not told yet, if there are
        any, one of each row at a time.

        Rows that have ended meanwhile have slot -1 there.
        """
        ...

    def settle(self) -> Sampled | None:
        """The tokens that were computed and not told."""
        ...

    def end(self, slots: np.ndarray) -> None:
        """These answers have ended, int64 [ended]: nothing more is told of them."""
        ...

    def cached(self, slot: int, tokens: int) -> Sequence[tuple[Tensor, Tensor]]:
        """Copies of the keys and values of an answer's text, of so many tokens, each [key-value heads, tokens, head
        size], per layer."""
        ...

    def forget(self) -> None:
        """No row is there any more."""
        ...

    def park(self) -> None:
        """Forget all rows, and give all memory back."""
        ...


class Batch:
    """The state of generation.

    Args:
        forward: the model; weights may change between steps.
        rows: decodes it.
        max_rows: answers in flight at a time.
        stop_texts: finds them; None where there will be none.
        max_tokens: of KV cache for answers in flight and for conversations between turns, together; None for no bound.
        keep_tokens: of KV cache for conversations between turns; None for what answers in flight leave, or as much as
            `max_rows` of the longest answers may come to where there is no bound.
        grammars: keep answers within their forms; None where none has any.
        usual: how long answers are, which is what room is reserved for.
    """

    def __init__(
        self,
        forward: ModelForward,
        rows: DecodeState,
        max_rows: int,
        stop_texts: StopTexts | None = None,
        max_tokens: int | None = None,
        keep_tokens: int | None = None,
        grammars: Grammars | None = None,
        usual: UsualLengths | None = None,
    ):
        self.forward = forward
        self.max_rows = max_rows
        self.forgotten: deque[Collection[int] | None] = deque()
        """Conversations, put there by the event loop, of which nothing is to be kept; None for all."""
        self.finished: deque[tuple[Request, Completion]] = deque()
        """Answers that have ended, in that order, for the event loop to take."""
        self.newcomers: deque[Request] = deque()
        """Put there by the event loop, to join at the beginning of the next `advance`."""
        self.unwanted: deque[Request] = deque()
        """Requests, put there by the event loop, that nobody wants answered any more."""
        self.watched: set[Request] = set()
        """Requests, put there by the event loop, whose tokens are told as they come."""
        self.new_tokens: deque[tuple[Request, int]] = deque()
        """Their new tokens, for the event loop to take when `advance` has returned."""
        self.interrupted = False
        """Set by anyone to have `advance` return after its step."""
        self.paused = False
        """Set by anyone to have `advance` do nothing."""
        self.asleep = False
        """Parked: `advance` does nothing."""
        self.tokens = 0
        """Tokens of KV cache that are reserved for the answers in flight."""
        self.put_back: deque[Request] = deque()
        """Answers that had to make room for older ones, and go on before any newcomer."""
        self.put_backs = 0
        """How often an answer had to."""
        self.stats = StepStats()
        """How long steps and reading took; replaced as a whole, so that the event loop may read it at any moment."""
        self._empty = partial(Slots, max_rows, stop_texts, grammars)
        self._slots = self._empty()
        self._rows = rows
        self._unread = False  # the keys and values of what is in flight were given back
        self._conversations = Conversations()
        self._usual = usual or UsualLengths()
        self._reserved = np.zeros(max_rows + 1, dtype=np.int64)  # of `tokens`, for the answer of each slot
        self._begun: dict[Request, PartialAnswer] = {}  # what those that were put back have so far
        self._max_tokens, self._keep_tokens = max_tokens, keep_tokens
        self._longest = 0  # that a turn of a conversation came to
        self._weights = 0  # counts the weights that were loaded
        self._read_with = np.zeros(max_rows + 1, dtype=np.int64)  # which of them read the text of each slot

    @property
    def live(self) -> int:
        """Answers in flight."""
        return self.max_rows - self._slots.free

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
        if self._unread:
            self._reread()
        if self.newcomers or self._may_return():
            self._join()
        free, tokens = due
        while self.live and not self.interrupted:
            if self.put_back:  # whoever waits outside comes after them
                if self._may_return():
                    self._join()
            elif self._slots.free >= free and self.tokens <= tokens:
                break
            self._step()
            passed = time.perf_counter() - start
            if passed > _LONGEST or (self.finished and passed > _QUIET):
                break
        self.interrupted = False
        if not self.live:  # what comes next must not find traces of what was; and the memory is free for others
            self._forget()

    @torch.inference_mode()
    def settle(self) -> None:
        """Have the device idle, and take in the tokens that were computed and not told."""
        if (sampled := self._rows.settle()) is not None:
            self._extend(sampled)

    def drop(self) -> None:
        """Forget the answers and the conversations that nobody wants any more."""
        while self.forgotten:
            self._conversations.forget(self.forgotten.popleft())
        if self.unwanted:
            self._remove({self.unwanted.popleft() for _ in range(len(self.unwanted))}, None)

    def abort(self, ids: Collection[int] | None) -> None:
        """End these requests (None: all) where they stand; they count as finished."""
        self._remove({request for request in self.requests() if ids is None or request.id in ids}, "abort")

    def partial(self, ids: Collection[int]) -> list[Request]:
        """These requests, those of them that are here, each with its tokens so far."""
        joined = [self._slots.partial(slot) for slot, request in self._slots.requests.items() if request.id in ids]
        waiting = [replace(request, partial=self._begun[request]) for request in self.put_back if request.id in ids]
        return [*(request for request in self.newcomers if request.id in ids), *joined, *waiting]

    def take_out(self, ids: Collection[int]) -> tuple[list[Request], list[Request]]:
        """Forget these requests; returns them as they came, and with their tokens so far."""
        partial = self.partial(ids)
        requests = {request for request in self.requests() if request.id in ids}
        self._remove(requests, None)
        return list(requests), partial

    def _remove(self, requests: set[Request], finish: Finish | None) -> None:
        """End these answers; with a reason they count as finished, without they are forgotten."""
        for queue in (self.newcomers, self.put_back):
            for _ in range(len(queue)):
                request = queue.popleft()
                if request not in requests:
                    queue.append(request)
                    continue
                answered = self._begun.pop(request, request.partial)
                if finish is not None:
                    self.finished.append((request, replace(request, partial=answered).ended(finish)))
        slots = np.array([slot for slot, one in self._slots.requests.items() if one in requests], dtype=np.int64)
        self._close(slots, [finish or "abort"] * len(slots), keep=finish is not None)
        self._rows.end(slots)
        if not self.live:  # nobody may advance for a while, and the memory is free for others
            self._forget()

    def requests(self) -> list[Request]:
        """All in flight, newcomers included, and those that were put back."""
        return [*self._slots.requests.values(), *self.newcomers, *self.put_back]

    def clear(self) -> list[Request]:
        """Forget everything, after an error; returns the requests whose answers are lost."""
        lost = self.requests()
        for those in (self.newcomers, self.put_back, self._begun):
            those.clear()
        self._reserved[:] = 0
        self._conversations.forget(None)
        self._forget()
        if self._rows.drafts is not None:
            self._rows.drafts.clear()
        self._slots = self._empty()
        self.tokens = 0
        return lost

    def park(self) -> None:
        """Give back the memory of keys and values, and move the weights to the host's."""
        self.settle()
        self._forget()
        self._rows.park()
        self._conversations.forget(None)
        self.asleep = True
        self.forward.park()

    def unpark(self) -> None:
        """Undo `park`: move the weights back."""
        if self.asleep:
            self.forward.unpark()
            self.asleep = False

    def load(self, weights: Weights, reread: bool) -> None:
        """Switch to other weights; if told so, forget the keys and values that the old ones made."""
        if weights.adapter is not None:  # nobody answers by the old ones but those who go on with the new
            self.settle()
            return self.forward.load(weights)
        if reread:
            self.settle()
        self.forward.load(weights)
        self._weights += 1
        self._conversations.forget(None)
        if reread:
            self._forget()

    def unload(self, adapter: str) -> bool:
        """Hold adapters no more; False: they are not here, or somebody is answered by them."""
        adapters = self.forward.adapters
        if (
            adapters is None
            or adapter not in adapters.versions
            or any(one.adapter == adapter for one in self.requests())
        ):
            return False
        self.settle()
        adapters.unload(adapter)
        return True

    def _forget(self) -> None:
        """Give back the memory of keys and values: what is still in flight is read again before the next token, once
        however much happens until then."""
        self._rows.forget()
        self._unread = True

    def _reread(self) -> None:
        """Read all answers in flight anew, with the weights as they are now."""
        self._unread = False
        for _ in self._read(list(self._slots.requests)):
            pass

    def _join(self) -> None:
        """Read what the newcomers have, and draw the first tokens of those that have only a prompt."""
        self.settle()
        requests: list[Request] = []
        reserved: list[int] = []
        while self._may_return(sum(reserved), len(requests)):
            reserved.append(self._needed_by(self.put_back[0]))
            requests.append(self.put_back.popleft())
        reserved += map(self._needed_by, self.newcomers)
        requests += self.newcomers
        self.newcomers.clear()
        opened = self._slots.open(requests, self._begun)
        self._reserved[opened] = reserved
        self.tokens += sum(reserved)
        slots = opened.tolist()
        for some, logits in self._read(slots):
            if len(new := np.flatnonzero(self._slots.lengths[some] == 0)):
                if len(new) < len(some):
                    some, logits = some[new], logits[torch.from_numpy(new).to(logits.device)]
                rules = Rules.of(self._slots.draws[some], self.forward.device)
                logits = self.forward.allowed(logits)
                first = torch.zeros(len(some), dtype=torch.int64, device=logits.device)
                allowed = self._slots.allowed(some, logits.device)
                result = choose_allowed(logits, rules, first, allowed, padding=self.forward.padding)
                versions = self.forward.versions_of(self._slots.adapters(some.tolist()))
                ids, logprobs, log_mass = to_host(*result)
                self._extend(Sampled(some, ids, logprobs, log_mass, versions))
        self._rows.joined()

    def _needed_by(self, request: Request) -> int:
        """Tokens to reserve for an answer that is to join."""
        if self._max_tokens is None:
            return request.cache_tokens
        partial = self._begun.get(request)
        return self._usual.reserve(request, 0 if partial is None else len(partial.response_ids))

    def _may_return(self, tokens: int = 0, rows: int = 0) -> bool:
        """There is room for the first of those that were put back, besides so many tokens and rows that return too."""
        if not self.put_back or self._slots.free <= rows:
            return False
        if self._max_tokens is None or not (self.live or rows):
            return True
        return self.tokens + tokens + self._needed_by(self.put_back[0]) <= self._max_tokens

    def _make_room(self) -> None:
        """Have room for the next token of every answer: reserve more for those that became longer than expected, and
        put back those that came last, if that is too much. They keep their tokens; what was read is read again."""
        if self._max_tokens is None:
            return
        requests = self._slots.requests
        slots = np.fromiter(requests, np.int64, len(requests))
        needed = self._slots.prompts[slots] + self._slots.lengths[slots]  # the next step reads the newest token
        for slot in slots[needed > self._reserved[slots]].tolist():
            more = self._usual.reserve(requests[slot], int(self._slots.lengths[slot])) - int(self._reserved[slot])
            self._reserved[slot] += more
            self.tokens += more
        if (tokens := int(needed.sum())) <= self._max_tokens - self._conversations.tokens:
            return
        self._conversations.shrink(max(0, self._max_tokens - tokens))
        first_put_back = max(1, int(np.searchsorted(np.cumsum(needed), self._max_tokens, side="right")))
        put_back = slots[first_put_back:][::-1]
        for slot in put_back.tolist():
            request = self._slots.partial(slot)
            assert request.partial is not None  # it was drawn a token when it joined
            self._begun[requests[slot]] = request.partial
            self.put_back.appendleft(requests[slot])
        self.put_backs += len(put_back)
        self._close(put_back, ["abort"] * len(put_back), keep=False)
        self._rows.end(put_back)

    def _step(self) -> None:
        """One token more for every row, or some."""
        start = time.perf_counter()
        width = 0
        for sampled in self._rows.step(self._slots):  # none: the first of several is told with the next
            width = width or self._rows.width
            self._extend(sampled)
        if width:
            self.stats = self.stats.stepped(width, time.perf_counter() - start)
            if (drafts := self._rows.drafts) is not None:
                self.stats = self.stats._replace(draft_tokens=drafts.reads, right_tokens=drafts.right)
            self._make_room()

    def _extend(self, sampled: Sampled) -> None:
        """Add a token to each answer; those that end leave.

        Raises:
            FloatingPointError: the model gave logits that are not finite.
        """
        slots = sampled.slots
        if len(lost := slots[~np.isfinite(sampled.logprobs) & (slots >= 0)]):
            raise FloatingPointError(self._not_finite(lost, int(np.max(sampled.version))))
        ended = self._slots.add(sampled)
        if self.watched:
            self._tell(sampled, {row for row, _ in ended})
        if ended:
            ended_slots = slots[[row for row, _ in ended]]
            self._keep(ended_slots)
            self._close(ended_slots, [finish for _, finish in ended], keep=True)
            self._rows.end(ended_slots)

    def _tell(self, sampled: Sampled, ended: Collection[int]) -> None:
        """Tell the new tokens of answers that are watched and go on."""
        for row, (slot, token) in enumerate(zip(sampled.slots.tolist(), sampled.tokens.tolist(), strict=True)):
            if slot >= 0 and row not in ended and (request := self._slots.requests[slot]) in self.watched:
                self.new_tokens.append((request, token))

    def _close(self, slots: np.ndarray, finishes: Sequence[Finish], *, keep: bool) -> None:
        closed = self._slots.close(slots, finishes)
        if (drafts := self._rows.drafts) is not None:
            for slot, (request, answer) in zip(slots.tolist(), closed, strict=True):
                drafts.ended(slot, request, answer.response_ids if answer.finish != "abort" else None)
        self.tokens -= int(self._reserved[slots].sum())
        self._reserved[slots] = 0
        if keep:
            self.finished += closed
            for request, answer in closed if self._max_tokens is not None else ():
                if answer.finish != "abort":
                    self._usual.ended(request, len(answer.response_ids))

    def _not_finite(self, slots: np.ndarray, version: int) -> str:
        request, answered = self._slots.requests[int(slots[0])], int(self._slots.lengths[slots[0]])
        return (
            f"the engine's model gave logits that are not finite, for {len(slots)} of {self.live} answers: first for "
            f"token {answered} of the answer to request {request.id}, whose prompt has {len(request.prompt_ids)} "
            f"tokens, with weights of version {version} in {self.forward.dtype}. If that version is 0, "
            "look at the model's files, else at the training step that made it (its loss and gradient norm); finite "
            "weights may overflow where rollout.dtype is narrow"
        )

    def _keep(self, slots: np.ndarray) -> None:
        """Keep what these answers have read, of those that belong to conversations; int64 [ended]."""
        for slot in slots.tolist():
            request = self._slots.requests[slot]
            if (
                request.conversation is None
                or request.images
                or request.adapter
                or self._read_with[slot] != self._weights
            ):
                continue
            self._longest = max(self._longest, request.cache_tokens)
            ids = self._slots.text_ids(slot)
            if len(ids) > (spare := self._spare(int(self._reserved[slot]))):
                continue
            self._conversations.keep(request.conversation, CachedText(ids, self._rows.cached(slot, len(ids))))
            self._conversations.shrink(spare)

    def _spare(self, ending: int = 0) -> int:
        """Tokens that may be kept of conversations, once an answer has left that may have come to `ending` tokens."""
        room = self.max_rows * self._longest if self._max_tokens is None else self._max_tokens - self.tokens + ending
        return max(0, room if self._keep_tokens is None else min(room, self._keep_tokens))

    def _read(self, slots: Sequence[int]) -> Iterator[tuple[np.ndarray, Tensor]]:
        """Read what is known of these answers into the bands: what is equal (tokens and images) once, and what goes on
        from a kept conversation from there.

        Yields:
            Slots, int64 [some], and the logits after the text of each, [some, vocabulary].
        """
        jobs: dict[tuple[PrefixKey, str | None], PrefillJob] = {}
        for slot in slots:
            request, text = self._slots.requests[slot], self._slots.text_ids(slot)
            key = request.prefix_key(text), request.adapter
            job = jobs.get(key) or PrefillJob(text, text, [], None)
            jobs[key] = job.continuing(self._conversations.taken(request))
            job.slots.append(slot)
        self._conversations.shrink(self._spare())
        start = time.perf_counter()
        for which, logits, tokens in self._rows.read(jobs.values(), self._slots):
            self._read_with[which] = self._weights
            yield which, logits
            now = time.perf_counter()  # the device is done: it was asked for the logits
            self.stats, start = self.stats.read(tokens, now - start), now
