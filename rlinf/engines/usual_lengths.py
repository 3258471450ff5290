"""How long answers usually are, by which an engine reserves room for those to come.

An engine that reserves room for the longest answer that it was asked for has most of its cache empty, since few answers
are so long. Room for the mean of what has been seen lets in as many as fit together, as lengths of many even out; where
they do not, the engine puts answers back that came last, and goes on with them later.
"""

from __future__ import annotations

import math

import numpy as np

from rlinf.engines.base import Request

_LATELY = 512
"""Answers that are remembered, of each kind."""
_ENOUGH = 32
"""Answers below which the longest is reserved for."""


class UsualLengths:
    """Lengths of the answers of the calls under way that have ended lately, of requests with about the same limit."""

    def __init__(self) -> None:
        self._kinds: dict[int, _Lately] = {}

    def clear(self) -> None:
        """Forget all: see `rlinf.engines.base.Reserving`."""
        self._kinds.clear()

    def ended(self, request: Request, tokens: int) -> None:
        """Note an answer that has ended by itself, with so many tokens."""
        self._kinds.setdefault(_kind(request), _Lately()).add(tokens)

    def reserve(self, request: Request, answered: int = 0) -> int:
        """Tokens of KV cache that a request will come to: expected, not at most.

        Args:
            request: it.
            answered: tokens of its answer so far; those that were longer than that tell how long it becomes.
        """
        lately, answered = self._kinds.get(_kind(request)), max(answered, request.answered)
        expected = None if lately is None else lately.expected(answered)
        return request.cache_tokens if expected is None else min(request.cache_tokens, _tokens(request, expected))


def _kind(request: Request) -> int:
    return request.sampling.max_new_tokens.bit_length()


def _tokens(request: Request, answered: int) -> int:
    return len(request.prompt_ids) + answered - 1


class _Lately:
    """The last answers of one kind, the oldest overwritten."""

    def __init__(self) -> None:
        self._tokens = np.zeros(_LATELY, dtype=np.int64)
        self._count = 0
        self._sum = 0

    def add(self, tokens: int) -> None:
        place = self._count % _LATELY
        self._sum += tokens - int(self._tokens[place])
        self._tokens[place] = tokens
        self._count += 1

    def expected(self, answered: int) -> int | None:
        """Mean tokens of those with more than `answered`; None if they are too few."""
        count = min(self._count, _LATELY)
        if answered <= 0:
            return None if count < _ENOUGH else math.ceil(self._sum / count)
        longer = self._tokens[self._tokens > answered]
        return None if len(longer) < _ENOUGH else math.ceil(float(longer.mean()))
