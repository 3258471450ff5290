"""An engine of which only the time is modelled, and a rollout of such engines: the real actor, protocol and decisions.

A step of n rows takes `step + row·n` seconds, and each row gets a token of it; reading takes `token` seconds per token
and holds up all rows. How long an answer becomes is a function of its seed, as in a real engine. Virtual time.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlinf.actors.rollout import Rollout
from rlinf.data.rng import mix
from rlinf.data.sample import Group, Sample
from rlinf.data.weights import Weights
from rlinf.engines.base import Completion, Engine, EngineSetup, PartialAnswer, Request
from rlinf.placement.rescale import DecodeCost
from rlinf.runtime.actor.actor import endpoint
from rlinf.runtime.streams.stream import each


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of answers: log-normal, with a factor that all answers to a prompt share, and cut at a limit."""

    median: float
    """Tokens."""
    spread: float
    """Of the logarithm."""
    limit: int
    """Tokens."""
    alike: float = 0.5
    """Share of the variance that is the prompt's."""

    def of(self, prompt: int, seed: int) -> int:
        """Tokens of one answer."""
        own, theirs = random.Random(seed).gauss(0, 1), random.Random(prompt).gauss(0, 1)
        deviation = math.sqrt(self.alike) * theirs + math.sqrt(1 - self.alike) * own
        return max(2, min(self.limit, round(self.median * math.exp(self.spread * deviation))))


@dataclass(slots=True, eq=False)
class _Call:
    reading: bool = True
    rows: int = 0
    finished: list[Completion] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Row:
    request: Request
    call: _Call
    begun: float
    """Tokens that rows have got since the beginning, when it came."""
    ends: float
    """The same, when it will end."""


class ModelledEngine(Engine):
    """An engine without a model: it has no weights, cannot be paused, and aborts nothing."""

    hands_over = True
    version = 0

    def __init__(self, setup: EngineSetup, *, law: DecodeCost, lengths: Lengths):
        self.max_rows = setup.max_rows
        self._law, self._lengths = law, lengths
        self._rows: dict[int, _Row] = {}
        self._tokens = 0.0  # that a row has got that was always there
        self._since = 0.0
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    async def batches(self, requests: Any) -> AsyncGenerator[list[Completion], None]:
        call = _Call()
        reader = asyncio.create_task(self._read(call, requests))
        try:
            while call.reading or call.rows or call.finished:
                changed = self._changed
                if call.finished:
                    finished, call.finished = call.finished, []
                    yield finished
                else:
                    await changed.wait()
            await reader
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def take_out(self, ids: Iterable[int]) -> list[Request]:
        self._pass()
        taken = []
        for id in ids:
            if (row := self._rows.pop(id, None)) is not None:
                row.call.rows -= 1
                taken.append(replace(row.request, partial=_partial(row.request, int(self._tokens - row.begun))))
        self._wake()
        return taken

    async def _read(self, call: _Call, requests: Any) -> None:
        try:
            async for request in each(requests):
                while len(self._rows) >= self.max_rows:
                    await self._changed.wait()
                self._pass()
                have = request.answered
                reading = self._law.token * (len(request.prompt_ids) + have)
                self._since += reading
                self.stats = self.stats.read(len(request.prompt_ids) + have, reading)
                left = self._lengths.of(int(request.prompt_ids[0]), request.seed) - have
                self._rows[request.id] = _Row(request, call, self._tokens, self._tokens + left)
                call.rows += 1
                self._wake()
        finally:
            call.reading = False
            self._wake()

    async def partial(self, ids: Iterable[int]) -> list[Request]:
        raise NotImplementedError

    async def abort(self, ids: Iterable[int] | None = None) -> None:
        raise NotImplementedError

    async def pause(self) -> None:
        raise NotImplementedError

    async def resume(self) -> None:
        raise NotImplementedError

    async def check(self, weights: Weights) -> None:
        raise NotImplementedError

    async def load(self, weights: Weights) -> None:
        raise NotImplementedError

    def _pass(self) -> None:
        """Account for the steps since the last time."""
        now = asyncio.get_running_loop().time()
        rows = len(self._rows)
        if not rows:
            self._since = max(self._since, now)
        elif now > self._since:
            seconds = self._law.step + self._law.row * rows
            steps = (now - self._since) / seconds
            self.stats = self.stats.stepped(rows, seconds, steps)
            self._tokens += steps
            self._since = now

    def _wake(self) -> None:
        """Hand out what has ended, and wait for the next end."""
        loop = asyncio.get_running_loop()
        self._pass()
        for id in [id for id, row in self._rows.items() if row.ends <= self._tokens + 1e-6]:
            row = self._rows.pop(id)
            row.call.rows -= 1
            row.call.finished.append(_completion(row.request, self._lengths))
        if self._timer is not None:
            self._timer.cancel()
        if self._rows:
            seconds = self._law.step + self._law.row * len(self._rows)
            left = min(row.ends for row in self._rows.values()) - self._tokens
            self._timer = loop.call_at(max(self._since, loop.time()) + max(left, 0) * seconds, self._wake)
        self._changed.set()
        self._changed = asyncio.Event()


def _partial(request: Request, more: int) -> PartialAnswer | None:
    have = more + request.answered
    made = (np.broadcast_to(dtype(0), have) for dtype in (np.int64, np.float32, np.int32))
    return PartialAnswer(*made) if have else None


def _completion(request: Request, lengths: Lengths) -> Completion:
    count = lengths.of(int(request.prompt_ids[0]), request.seed)
    ids, logprobs, versions = (np.broadcast_to(dtype(0), count) for dtype in (np.int64, np.float32, np.int32))
    return Completion(request.id, ids, logprobs, versions, "length" if count == lengths.limit else "stop")


class ModelledRollout(Rollout):
    """The real rollout around modelled engines."""

    engine = f"{__name__}.ModelledEngine"
    """What generates."""

    async def setup(self, *, law: DecodeCost, lengths: Lengths, **settings: Any) -> None:  # type: ignore[override]
        """Everything else is as in the rollout."""
        await super().setup(
            model={}, tokenizer={"characters": "0"}, engine=self.engine, max_new_tokens=lengths.limit,
            engine_args={"law": law, "lengths": lengths}, **settings,
        )  # fmt: skip
        self._ends: list[float] = []
        self._moved = 0

    @endpoint(device=True)
    async def generate(self, prompts: Any, n: int = 1, **settings: Any) -> AsyncIterator[Group]:  # type: ignore[override]
        """As the rollout, remembering when it ended."""
        async for group in super().generate(prompts, n, **settings):
            yield group
        self._ends.append(asyncio.get_running_loop().time())

    @endpoint
    async def rescale_take(self, key: Any, groups: Any, version: int) -> Any:
        """As the rollout, counting."""
        self._moved += sum(len(group.left) for group in groups)
        return await super().rescale_take(key, groups, version)

    @endpoint
    async def ended(self) -> tuple[float, int]:
        """When the last call ended, in seconds, and how many answers came from other ranks."""
        return self._ends[-1], self._moved

    async def _groups(self, answered: Any) -> list[Group]:
        groups = []
        for asked in answered:
            samples = [
                Sample(asked.prompt, index, done.response_ids, done.logprobs, done.versions, "", done.truncated)
                for index, done in sorted(asked.done.items())
            ]
            groups.append(Group(asked.prompt, tuple(samples)))
        return groups


def expected(lengths: Lengths, prompt: int, index: int) -> int:
    """Tokens of a sample, whoever makes it."""
    return lengths.of(prompt, mix(0, prompt, index))
