"""Answers in flight, kept on this side of a server: their tokens so far, and when each has ended.

Flows in: requests and chunks of tokens. Flows out: completions; what is left to ask for. Nobody waits here.

The server streams tokens and is not believed about the end: this side knows the rules (`Sampling`), and a server that
stops early, for an end token of its own or because it dies, is asked to go on from the tokens that there are.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import numpy as np

from rlinf.data.routing.routes import joined
from rlinf.engines.base import Completion, Finish, PartialAnswer, Request, StopTexts
from rlinf.engines.served.server import Ask, Chunk

_SEEDS = (1 << 31) - 1
"""Servers take seeds of 32 bits."""


class Row:
    """One request in flight.

    Args:
        request: what is asked.
        reader: finds stop texts; None where there are none.
        banned: tokens that a server is asked never to draw.
        padding: ids that the model has and its tokenizer has not. An answer is cut before one: servers would need a
            bias for hundreds of ids with every request, against what a trained model all but never draws.
    """

    def __init__(
        self,
        request: Request,
        reader: StopTexts | None,
        banned: tuple[int, ...] = (),
        padding: frozenset[int] = frozenset(),
    ) -> None:
        self.request = request
        self.finish: Finish | None = None
        """Why it has ended; None while it goes on."""
        self.taken = False
        """Somebody else goes on with it: no completion comes of it here."""
        self.alone = False
        """Its caller waits for it alone, so `take_out` leaves it."""
        self.scope: asyncio.Timeout | None = None
        """Around the stream that is open for it, if one is."""
        self.lost = self.deaths = 0
        """Streams that were lost, and deaths of the server over it, in a row without a new token."""
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self._routes: list[np.ndarray | None] = []  # as far as each ask told, from the beginning of the text
        self._reader, self._banned, self._padding = reader, banned, padding
        if (partial := request.partial) is not None:
            self.tokens, self.logprobs = partial.response_ids.tolist(), partial.logprobs.tolist()
            self.versions, self._routes = partial.versions.tolist(), [partial.routes]

    @property
    def over(self) -> bool:
        """Nothing more is wanted of a server."""
        return self.finish is not None or self.taken

    def interrupt(self) -> None:
        """Leave the stream that is open for it, at once."""
        if self.scope is not None:
            self.scope.reschedule(asyncio.get_running_loop().time())

    def ask(self, id: str) -> Ask:
        """What is asked for next: the rest, or, before stop tokens and texts count, the tokens up to there."""
        sampling, answered = self.request.sampling, len(self.tokens)
        free = sampling.min_new_tokens - 1 - answered  # tokens that may be anything
        if free > 0:
            ends: tuple[int, ...] = ()
            count = min(free, sampling.max_new_tokens - answered)
        else:
            ends, count = sampling.stop_ids, sampling.max_new_tokens - answered
        rules = replace(sampling, max_new_tokens=count, min_new_tokens=0, stop_ids=ends, stop_texts=())
        ids, seed = [*self.request.prompt_ids.tolist(), *self.tokens], self.request.seed
        return Ask(id, ids, rules, seed % _SEEDS, seed, answered, self.request.images, self._banned)

    def take(self, chunk: Chunk, version: int) -> int:
        """Append tokens up to where the answer ends; returns how many they were."""
        before = len(self.tokens)
        if chunk.routes is not None:
            self._routes.append(chunk.routes)
        if not all(one is not None and math.isfinite(one) for one in chunk.logprobs):
            raise FloatingPointError(
                f"request {self.request.id}: a log-prob among tokens {before} to {before + len(chunk.tokens) - 1}, "
                f"which weights of version {version} made, is no finite number: these weights are broken"
            )
        for token, logprob in zip(chunk.tokens, chunk.logprobs, strict=True):
            if self.over:
                break
            if int(token) in self._padding:
                self._cut(int(token))
                break
            self.tokens.append(int(token))
            self.logprobs.append(float(logprob))
            self.versions.append(version)
            self.finish = self._ended()
        return len(self.tokens) - before

    def _cut(self, token: int) -> None:
        """End before a token that the tokenizer has not."""
        if not self.tokens:
            raise FloatingPointError(
                f"request {self.request.id}: the answer begins with the token id {token}, which the tokenizer has not: "
                "the weights are broken, or another model's"
            )
        self.finish = "length"

    def _ended(self) -> Finish | None:
        sampling = self.request.sampling
        if len(self.tokens) >= sampling.min_new_tokens:
            if self.tokens[-1] in sampling.stop_ids:
                return "stop"
            if self._reader is not None and self._reader.complete(self.tokens, sampling.stop_texts):
                return "text"
        return "length" if len(self.tokens) >= sampling.max_new_tokens else None

    @property
    def partial(self) -> Request:
        """The request with its tokens so far."""
        return replace(self.request, partial=PartialAnswer(*self._arrays, self._told) if self.tokens else None)

    @property
    def completion(self) -> Completion:
        """The answer as it ended."""
        assert self.finish is not None
        return Completion(self.request.id, *self._arrays, self.finish, self._told)

    @property
    def _told(self) -> np.ndarray | None:
        """Experts of what was read so far; what no ask has told of is unknown there."""
        return joined(len(self.request.prompt_ids) + len(self.tokens) - 1, self._routes)

    @property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return np.array(self.tokens, np.int64), np.array(self.logprobs, np.float32), np.array(self.versions, np.int32)


class Call:
    """One `batches` in progress."""

    def __init__(self) -> None:
        self.news: asyncio.Queue[tuple[Row | None, Exception | None]] = asyncio.Queue()
        """Rows that are over, and None when the reading is; with what went wrong, if anything."""
        self.tasks: set[asyncio.Task[None]] = set()
        """One per row that was let in."""
        self.running = 0
        """Rows that were read and whose end is not noted."""
        self.reading = True
        """There may be more requests."""
        self.error: Exception | None = None
        """What ends the call."""

    def ended(self, news: tuple[Row | None, Exception | None]) -> list[Row]:
        """Note this and all other news; returns the rows that have an answer."""
        rows: list[Row] = []
        while True:
            row, error = news
            self.error = self.error or error
            if row is None:
                self.reading = False
            else:
                self.running -= 1
                if row.finish is not None and error is None and not row.taken:
                    rows.append(row)
            if self.news.empty():
                return rows
            news = self.news.get_nowait()
