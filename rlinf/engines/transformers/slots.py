"""The answers in flight on the host: their tokens so far, and when they end.

Flows in: requests, then tokens, one per row and step. Flows out: which answers they ended, and completions. Nobody
waits here. Arrays by slot, so that a step costs a few numpy operations however many rows there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from rlinf.data.routing.routes import fitted
from rlinf.engines.base import Completion, Finish, PartialAnswer, Request, StopTexts
from rlinf.engines.transformers.sampling import DRAWS


class Drawn(NamedTuple):
    """One token more of some answers, on the host."""

    slots: np.ndarray
    """Of each row, -1 for rows that have ended, int64 [rows]."""
    tokens: np.ndarray
    """int64 [rows]"""
    logprobs: np.ndarray
    """float32 [rows]"""
    version: int
    """Of the weights that made them."""


class Slots:
    """Answers in flight, each in a slot.

    Args:
        slots: how many there may be.
        reader: finds stop texts; None if there will be none.
    """

    def __init__(self, slots: int, reader: StopTexts | None):
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
        self._reader = reader
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

    def open(self, requests: Sequence[Request]) -> np.ndarray:
        """Begin answers, or continue those that were begun elsewhere; returns their slots, int64 [requests]."""
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
        for slot, request in zip(slots.tolist(), requests, strict=True):
            if (partial := request.partial) is not None:
                if partial.routes is not None:
                    self._routes[slot] = [partial.routes]
                count = self.lengths[slot] = len(partial.response_ids)
                self._tokens[slot, :count], self.last[slot] = partial.response_ids, partial.response_ids[-1]
                self._logprobs[slot, :count], self._versions[slot, :count] = partial.logprobs, partial.versions
        return slots

    def partial(self, slot: int) -> Request:
        """The request with its tokens so far."""
        count = int(self.lengths[slot])
        tokens, logprobs, versions = (
            array[slot, :count].copy() for array in (self._tokens, self._logprobs, self._versions)
        )
        partial = PartialAnswer(tokens, logprobs, versions, self._routes_of(slot, count)) if count else None
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
            known, start = sum(map(len, pieces)), end - len(routes)
            if start > known:  # of what was read for an earlier turn, that turn's answer tells
                pieces.append(fitted(routes[:0], start - known))
            if (new := routes[max(0, known - start) :]).size:
                pieces.append(new)

    def routed_step(self, slots: np.ndarray, routes: np.ndarray) -> None:
        """The newest token of each answer was read; int64 [rows], and [rows, layers, experts per token]."""
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                self._routes[slot].append(routes[row : row + 1])

    def _routes_of(self, slot: int, answered: int) -> np.ndarray | None:
        """Of all that was read for so many tokens, [prompt + answered - 1, layers, experts per token]."""
        pieces = self._routes.get(slot)
        if not pieces:
            return None
        self._routes[slot] = [whole] = [np.concatenate(pieces)]
        return whole[: int(self.prompts[slot]) + answered - 1]

    def add(self, drawn: Drawn) -> list[tuple[int, Finish]]:
        """Take in a step's tokens.

        Returns:
            Positions in `drawn.slots` of the answers that ended, in order, and why.
        """
        slots, tokens, logprobs, version = drawn
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
        found: dict[int, Finish] = {}
        if self._texts:
            found = {row: "text" for row in np.flatnonzero(slots >= 0).tolist() if self._text_ends(int(slots[row]))}
        if not found and not ended.any():
            return []
        for row in np.flatnonzero(ended).tolist():
            if stopped[row] or row not in found:
                found[row] = "stop" if stopped[row] else "length"
        return sorted(found.items())

    def close(self, slots: np.ndarray, finishes: Sequence[Finish]) -> list[tuple[Request, Completion]]:
        """End answers and free their slots, int64 [ended]."""
        lengths = self.lengths[slots].tolist()
        span = slice(0, max(lengths, default=0))
        tokens, logprobs, versions = (array[slots, span] for array in (self._tokens, self._logprobs, self._versions))
        closed = []
        for row, (slot, length, finish) in enumerate(zip(slots.tolist(), lengths, finishes, strict=True)):
            request = self.requests.pop(slot)
            answer = tokens[row, :length], logprobs[row, :length], versions[row, :length]
            closed.append((request, Completion(request.id, *answer, finish, self._routes_of(slot, length))))
            self._routes.pop(slot, None)
            self._texts.discard(slot)
            self._free.append(slot)
        return closed

    def room(self, slots: np.ndarray) -> int:
        """Tokens that the one of these answers may still get that may get most."""
        return int((self._limits[slots] - self.lengths[slots]).max())

    def text_ids(self, slot: int) -> np.ndarray:
        """All that has been read of a text: its prompt and the answer without its newest token, int64 [tokens]."""
        prompt, answered = self.requests[slot].prompt_ids, int(self.lengths[slot]) - 1
        return prompt if answered < 1 else np.concatenate([prompt, self._tokens[slot, :answered]])

    def _text_ends(self, slot: int) -> bool:
        """Whether the newest token completed a stop text of this answer."""
        length = int(self.lengths[slot])
        if slot not in self._texts or length < self._least[slot]:
            return False
        assert self._reader is not None
        stops = self.requests[slot].sampling.stop_texts
        # A text of n characters has at most 4n bytes, and a token that shows has at least one. The rest is for tokens
        # that show nothing and for a character that the cut tears.
        tail = self._tokens[slot, max(0, length - 4 * max(map(len, stops)) - 8) : length].tolist()
        return self._reader.complete(tail, stops)

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
