"""The one protocol behind which text is generated: requests in, finished samples out, in order of completion.

Token ids in, token ids out; text is never re-encoded. Every token carries the version of the weights that made it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from rlinf.data.weights import Weights

Finish = Literal["stop", "text", "length", "abort"]
"""Why an answer ended: a stop token (its last token), a stop text, the length limit, or `abort`."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen and when an answer ends."""

    max_new_tokens: int
    """An answer without an end token is cut after this many tokens."""
    temperature: float = 1.0
    """Logits are divided by it; 0 takes the likeliest token."""
    top_k: int = 0
    """Only so many of the likeliest tokens are drawn from; 0 for all."""
    top_p: float = 1.0
    """Only the likeliest tokens that together have this probability are drawn from; 1 for all."""
    min_p: float = 0.0
    """Only tokens at least so likely, relative to the likeliest, are drawn from; 0 for all."""
    min_new_tokens: int = 0
    """No stop token or text ends an answer before it has so many tokens."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end an answer; the one that did is its last token."""
    stop_texts: tuple[str, ...] = ()
    """Texts that end an answer once its decoded tokens contain one; they stay in the answer."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 1")
        if not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature} must be at least 0 (0 takes the likeliest token)")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be at least 0 (0 draws from all tokens)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1 (1 draws from all tokens)")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} must be from 0 to 1 (0 draws from all tokens)")
        if self.min_new_tokens < 0:
            raise ValueError(f"min_new_tokens={self.min_new_tokens} must be at least 0")
        if isinstance(self.stop_texts, str) or not all(self.stop_texts):
            raise ValueError(f"stop_texts={self.stop_texts!r} must be a tuple of texts, none of them empty")


@dataclass(frozen=True, slots=True, eq=False)
class Begun:
    """What there is of an answer that an engine has begun; see `Completion` for the fields."""

    response_ids: np.ndarray
    """int64 [begun], at least one token, none of which ended the answer."""
    logprobs: np.ndarray
    """float32 [begun]"""
    versions: np.ndarray
    """int32 [begun]"""


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
    """Of the random choices: the same seed gives the same answer, whatever shares the batch, up to rounding. Token k is
    drawn with random number k of the seed, so an answer goes on elsewhere as it would have gone on here."""
    begun: Begun | None = None
    """What another engine has answered so far; it is read, not made again, and is part of the completion."""

    def ended(self, finish: Finish) -> Completion:
        """Its end as it came, without a token more."""
        begun = self.begun or Begun(np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.int32))
        return Completion(self.id, begun.response_ids, begun.logprobs, begun.versions, finish)


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One finished answer."""

    id: int
    """The request's."""
    response_ids: np.ndarray
    """int64 [response], the end token included if one was reached."""
    logprobs: np.ndarray
    """Of each token, nats, float32 [response]: under softmax(logits / temperature), or softmax(logits) if that is 0.

    Under the whole softmax, also where top_k, top_p or min_p left tokens out: it is what a trainer computes again, and
    it stays finite for every token when the two differ a little. With those limits a token was drawn with a higher
    probability than this says, so importance ratios are off by the left-out mass: train with plain temperature."""
    versions: np.ndarray
    """Of the weights that made each token, int32 [response]."""
    finish: Finish
    """Why it ended."""

    @property
    def truncated(self) -> bool:
        """The length limit cut it."""
        return self.finish == "length"


class Engine(Protocol):
    """Generates text with one model."""

    version: int
    """Of the weights in use."""

    def generate(self, requests: Iterable[Request] | AsyncIterable[Request]) -> AsyncGenerator[Completion, None]:
        """Answer requests, which may still be coming; yields each answer as soon as it is finished.

        Calls may overlap: their requests share the batch. Closing the generator aborts what it has not yielded.
        """
        ...

    async def abort(self, ids: Iterable[int] | None = None) -> None:
        """End requests that have come; each is still yielded, with `finish="abort"` and its tokens so far.

        None ends all of them, and no more are read from where they come.
        """
        ...

    async def take_out(self, ids: Iterable[int]) -> list[Request]:
        """Let go of requests that have come, for another engine to go on with: none of them is yielded here.

        Returns:
            Those that had not ended, each with what there is of its answer in `begun`; given to `generate` of any
            engine with the same weights, they end as they would have ended here, up to rounding. (An engine around a
            server aborts them and keeps their tokens; to go on, it sends prompt and tokens as one prompt and asks for
            so many fewer. It may offer this only if the server's random numbers are counted by token as well.)
        """
        ...

    async def pause(self) -> None:
        """Stop after the step under way; nothing is lost. Returns when the device is idle."""
        ...

    async def resume(self) -> None:
        """Go on."""
        ...

    async def load(self, weights: Weights) -> None:
        """Switch to other weights, all of them or, with a ValueError, none. Answers under way go on with the new.

        An engine that sleeps keeps them until it wakes.
        """
        ...

    async def sleep(self) -> None:
        """Give the device's memory back: key-value caches are dropped, weights move to the host."""
        ...

    async def wake(self) -> None:
        """Be ready again after `sleep`; answers under way are read again from their tokens."""
        ...
