"""The one protocol behind which text is generated: requests in, finished samples out, in order of completion.

Token ids in, token ids out; text is never re-encoded. Every token carries the version of the weights that made it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rlinf.data.weights import Weights


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen and when an answer ends."""

    max_new_tokens: int
    """An answer without an end token is cut after this many tokens."""
    temperature: float = 1.0
    """Logits are divided by it; 0 takes the likeliest token."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end an answer; the one that did is its last token."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 1")
        if not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature} must be at least 0 (0 takes the likeliest token)")


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One answer wanted."""

    id: int
    """Given back with the answer; unique among the requests under way."""
    prompt_ids: np.ndarray
    """int64 [prompt], at least one token."""
    sampling: Sampling
    """How to answer."""
    seed: int = 0
    """Of the random choices: the same seed gives the same answer, whatever shares the batch, up to rounding."""


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One finished answer."""

    id: int
    """The request's."""
    response_ids: np.ndarray
    """int64 [response], the end token included if one was reached."""
    logprobs: np.ndarray
    """Of each token, nats, float32 [response]: under softmax(logits / temperature), or softmax(logits) if that is 0."""
    versions: np.ndarray
    """Of the weights that made each token, int32 [response]."""
    truncated: bool
    """No end token came within `max_new_tokens`."""


class Engine(Protocol):
    """Generates text with one model."""

    version: int
    """Of the weights in use."""

    def generate(self, requests: Iterable[Request] | AsyncIterable[Request]) -> AsyncGenerator[Completion, None]:
        """Answer requests, which may still be coming; yields each answer as soon as it is finished."""
        ...

    async def load(self, weights: Weights) -> None:
        """Switch to other weights, all of them or, with a ValueError, none. Answers under way go on with the new."""
        ...
