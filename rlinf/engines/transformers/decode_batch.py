"""The decode batch: rows join, are extended by a token per step, and leave when their answers end.

Flows in: requests (`newcomers`). Flows out: completions (`finished`). Plain blocking code that wakes nobody: every
method runs in the compute thread, one at a time; the event loop fills and empties the queues, and sets flags, at any
time.

What a row computes depends, to the last bit, on which rows share its steps; that is a function of the requests and of
when they joined, counted in steps, never of time: `advance` may return whenever it likes, but comes back for newcomers
at the very step at which they are due.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlinf.data.sample import PrefixKey
from rlinf.data.weights import Weights
from rlinf.engines.base import Completion, Finish, Request, StepStats
from rlinf.engines.transformers.conversations import Conversations, Kept, Reader, laid_out, side_by_side
from rlinf.engines.transformers.kv_cache import Band, Layers
from rlinf.engines.transformers.model_forward import ModelForward
from rlinf.engines.transformers.sampling import Rules, choose
from rlinf.engines.transformers.slots import Decode, Slots

_QUIET = 0.002
"""Seconds for which finished answers may wait in the thread. Handing over to the event loop costs about 0.1 ms."""
_LONGEST = 0.02
"""Seconds after which the thread is free for others, whether or not an answer has finished."""
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
    """Of that token in its text, int64 [rows]."""
    answered: Tensor
    """Which token of its answer the row draws next, int64 [rows]."""
    rules: Rules
    """How it draws."""


class Batch:
    """The state of generation.

    Args:
        forward: the model; its `version` is read at every step, so weights may change between steps.
        max_rows: answers in flight at a time.
        decode: turns tokens into text, for stop texts.
        max_tokens: of KV cache for answers in flight and for conversations between turns, together; None for no bound.
        keep_tokens: of KV cache for conversations between turns; None for what answers in flight leave, or as much as
            `max_rows` of the longest answers may come to where there is no bound.
    """

    def __init__(
        self,
        forward: ModelForward,
        max_rows: int,
        decode: Decode | None = None,
        max_tokens: int | None = None,
        keep_tokens: int | None = None,
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
        self.interrupted = False
        """Set by anyone to have `advance` return after its step."""
        self.paused = False
        """Set by anyone to have `advance` do nothing."""
        self.asleep = False
        """Parked: `advance` does nothing."""
        self.tokens = 0
        """Of KV cache that the answers in flight may come to."""
        self.stats = StepStats()
        """How long steps and reading took; replaced as a whole, so that the event loop may read it at any moment."""
        self._decode = decode
        self._slots = Slots(max_rows, decode)
        self._bands: list[Band] = []
        self._view: _View | None = None
        self._unread = False  # the keys and values of what is in flight were given back
        self._conversations = Conversations()
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
        if self.newcomers:
            self._join()
        free, taken = due
        while self.live and not self.interrupted and not (self._slots.free >= free and self.tokens <= taken):
            self._step()
            passed = time.perf_counter() - start
            if passed > _LONGEST or (self.finished and passed > _QUIET):
                break
        self.interrupted = False
        if not self.live:  # what comes next must not find traces of what was; and the memory is free for others
            self._forget()

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
        return [*(request for request in self.newcomers if request.id in ids), *joined]

    def take_out(self, ids: Collection[int]) -> tuple[list[Request], list[Request]]:
        """Forget these requests; returns them as they came, and with their tokens so far."""
        partial = self.partial(ids)
        taken = {request for request in self.requests() if request.id in ids}
        self._remove(taken, None)
        return list(taken), partial

    def _remove(self, requests: set[Request], finish: Finish | None) -> None:
        """End these answers; with a reason they count as finished, without they are forgotten."""
        for _ in range(len(self.newcomers)):
            request = self.newcomers.popleft()
            if request not in requests:
                self.newcomers.append(request)
            elif finish is not None:
                self.finished.append((request, request.ended(finish)))
        slots = np.array([slot for slot, one in self._slots.requests.items() if one in requests], dtype=np.int64)
        self._close(slots, [finish or "abort"] * len(slots), keep=finish is not None)
        self._view = None
        for band in self._bands:
            band.end(np.flatnonzero(np.isin(band.slots, slots)))
        if not self.live:  # nobody may advance for a while, and the memory is free for others
            self._forget()

    def requests(self) -> list[Request]:
        """All in flight, newcomers included."""
        return [*self._slots.requests.values(), *self.newcomers]

    def clear(self) -> list[Request]:
        """Forget everything, after an error; returns the requests whose answers are lost."""
        lost = self.requests()
        self.newcomers.clear()
        self._conversations.forget(None)
        self._forget()
        self._slots = Slots(self.max_rows, self._decode)
        self.tokens = 0
        return lost

    def park(self) -> None:
        """Give back the memory of keys and values, and move the weights to the host's."""
        self._forget()
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
        self.forward.load(weights)
        self._weights += 1
        self._conversations.forget(None)
        if reread:
            self._forget()

    def _forget(self) -> None:
        """Give back the memory of keys and values: what is still in flight is read again before the next token, once
        however much happens until then."""
        self._bands, self._view, self._unread = [], None, True

    def _reread(self) -> None:
        """Read all answers in flight anew, with the weights as they are now."""
        self._unread = False
        for _ in self._read(list(self._slots.requests)):
            pass

    def _join(self) -> None:
        """Read what the newcomers have, and draw the first tokens of those that have only a prompt."""
        self._tidy()
        self._view = None
        requests = [self.newcomers.popleft() for _ in range(len(self.newcomers))]
        slots = self._slots.open(requests).tolist()
        self.tokens += sum(request.cache_tokens for request in requests)
        for some, logits in self._read(slots):
            if len(new := np.flatnonzero(self._slots.lengths[some] == 0)):
                if len(new) < len(some):
                    some, logits = some[new], logits[torch.from_numpy(new).to(logits.device)]
                rules = Rules.of(self._slots.draws[some], self.forward.device)
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
        self.stats = self.stats.stepped(len(view.slots), time.perf_counter() - start)

    def _extend(self, slots: np.ndarray, tokens: Tensor, logprobs: Tensor) -> list[int]:
        """Add a token to each answer; those that end leave. Returns their rows.

        Raises:
            FloatingPointError: the model gave logits that are not finite.
        """
        told = logprobs.cpu().numpy()
        if len(lost := slots[~np.isfinite(told) & (slots >= 0)]):
            raise FloatingPointError(self._not_finite(lost))
        ended = self._slots.add(slots, tokens.cpu().numpy(), told, self.forward.version)
        rows = [row for row, _ in ended]
        if rows:
            gone = slots[rows]
            self._keep(gone)
            self._close(gone, [finish for _, finish in ended], keep=True)
            for band in self._bands:
                if len(here := np.flatnonzero(np.isin(band.slots, gone))):
                    band.end(here)
        return rows

    def _close(self, slots: np.ndarray, finishes: Sequence[Finish], *, keep: bool) -> None:
        closed = self._slots.close(slots, finishes)
        self.tokens -= sum(request.cache_tokens for request, _ in closed)
        if keep:
            self.finished += closed

    def _not_finite(self, slots: np.ndarray) -> str:
        request, answered = self._slots.requests[int(slots[0])], int(self._slots.lengths[slots[0]])
        return (
            f"the engine's model gave logits that are not finite, for {len(slots)} of {self.live} answers: first for "
            f"token {answered} of the answer to request {request.id}, whose prompt has {len(request.prompt_ids)} "
            f"tokens, with weights of version {self.forward.version} in {self.forward.dtype}. If that version is 0, "
            "look at the model's files, else at the training step that made it (its loss and gradient norm); finite "
            "weights may overflow where rollout.dtype is narrow"
        )

    def _keep(self, slots: np.ndarray) -> None:
        """Keep what these answers have read, of those that belong to conversations; int64 [ended]."""
        for slot in slots.tolist():
            request = self._slots.requests[slot]
            if request.conversation is None or request.images or self._read_with[slot] != self._weights:
                continue
            self._longest = max(self._longest, request.cache_tokens)
            ids = self._slots.text_ids(slot)
            if len(ids) > (spare := self._spare(request.cache_tokens)):
                continue
            band, row = next((band, row) for band in self._bands for row in np.flatnonzero(band.slots == slot).tolist())
            self._conversations.keep(request.conversation, Kept(ids, band.row(row)))
            self._conversations.shrink(spare)

    def _spare(self, ending: int = 0) -> int:
        """Tokens that may be kept of conversations, once an answer has left that may have come to `ending` tokens."""
        left = self.max_rows * self._longest if self._max_tokens is None else self._max_tokens - self.tokens + ending
        return max(0, left if self._keep_tokens is None else min(left, self._keep_tokens))

    def _look(self) -> _View:
        records, device = self._slots, self.forward.device
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
        """Read what is known of these answers into the bands: what is equal (tokens and images) once, and what goes on
        from a kept conversation from there.

        Yields:
            Slots, int64 [some], and the logits after the text of each, [some, vocabulary].
        """
        readers: dict[PrefixKey, Reader] = {}
        for slot in slots:
            request, text = self._slots.requests[slot], self._slots.text_ids(slot)
            key = request.prefix_key(text)
            reader = readers.get(key) or Reader(text, text, [], None)
            readers[key] = reader.going_on(self._conversations.taken(request))
            reader.slots.append(slot)
        self._conversations.shrink(self._spare())
        for rectangle in side_by_side(readers.values(), pads=self.forward.pads):
            start = time.perf_counter()
            ids, real, past = laid_out(rectangle, self.forward.device)
            images = [self._slots.requests[reader.slots[0]].images for reader in rectangle]
            logits, read = self.forward.read(ids, real, images, past)
            which = np.array([slot for reader in rectangle for slot in reader.slots], dtype=np.int64)
            lengths = np.array([len(reader.text) for reader in rectangle for _ in reader.slots], dtype=np.int64)
            source = torch.tensor(
                [number for number, reader in enumerate(rectangle) for _ in reader.slots], device=self.forward.device
            )
            room = self._slots.room(which)
            self._band_for(int(lengths.max()), read, room).place(which, lengths, read, source)
            self._read_with[which] = self._weights
            yield which, logits.index_select(0, source)
            taken = time.perf_counter() - start  # the device is done: it was asked for the logits
            self.stats = self.stats.read(ids.numel(), taken)

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
