"""A rollout in virtual time whose tokens say which weights made them, and a run that is killed and goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlinf.data.in_flight import InFlight, Kept, Rules
from rlinf.data.sample import Group, Prompt, Sample
from rlinf.data.step import Step
from rlinf.runtime.streams.stream import each

TOKEN = 1.0
"""Seconds."""


@dataclass(eq=False)
class Begun:
    """A prompt with the tokens of its answers so far, as versions."""

    prompt: Prompt
    answers: list[list[int]]


class Rollout:
    """Answers prompts, a token of every answer in a second; weights change in mid-answer.

    Args:
        lengths: tokens of the answers to prompt k, taken in turn.
        n: answers of a prompt.
        rows: prompts that are answered at a time.
        version: of its weights.
    """

    def __init__(self, lengths: list[int], n: int, rows: int, version: int) -> None:
        self.lengths, self.n, self.version = lengths, n, version
        self.room = asyncio.Semaphore(rows)
        self.begun: dict[int, Begun] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.done: asyncio.Queue[int | None] = asyncio.Queue()
        self.made = 0  # tokens

    async def answers(self, prompts: Any) -> AsyncIterator[Group]:
        reading = asyncio.create_task(self._read(prompts))
        try:
            while (number := await self.done.get()) is not None:
                if (begun := self.begun.get(number)) is not None:  # it may have been dropped at the last moment
                    yield group(begun.prompt, begun.answers)
        finally:
            for task in (reading, *self.tasks.values()):
                task.cancel()
            await asyncio.gather(reading, *self.tasks.values(), return_exceptions=True)

    async def _read(self, prompts: Any) -> None:
        async for one in each(prompts):
            begun = one if isinstance(one, Begun) else Begun(one, [[] for _ in range(self.n)])
            begun = Begun(begun.prompt, [list(answer) for answer in begun.answers])
            self.begun[begun.prompt.id] = begun
            self.tasks[begun.prompt.id] = asyncio.create_task(self._answer(begun))
        await asyncio.gather(*self.tasks.values())
        self.done.put_nowait(None)

    async def _answer(self, begun: Begun) -> None:
        number = begun.prompt.id
        wanted = [self.lengths[(number * self.n + index) % len(self.lengths)] for index in range(self.n)]
        async with self.room:
            while any(len(answer) < length for answer, length in zip(begun.answers, wanted, strict=True)):
                await asyncio.sleep(TOKEN)
                for answer, length in zip(begun.answers, wanted, strict=True):
                    if len(answer) < length:
                        answer.append(self.version)
                        self.made += 1
        self.done.put_nowait(number)

    async def load(self, version: int) -> None:
        await asyncio.sleep(0.25)
        self.version = version

    # As a keeper -------------------------------------------------------------------------------------------------

    async def partials(self) -> dict[int, tuple[Any, ...]]:
        await asyncio.sleep(0.1)
        return {
            number: (Begun(one.prompt, [list(answer) for answer in one.answers]),)
            for number, one in self.begun.items()
            if any(one.answers)
        }

    async def settled(self, ids: Any) -> None:
        for number in ids:
            self.begun.pop(number, None)
            self.tasks.pop(number, None)

    async def drop(self, ids: Any) -> int:
        tokens = 0
        for number in ids:
            if (one := self.begun.pop(number, None)) is not None:
                self.tasks.pop(number).cancel()
                tokens += sum(map(len, one.answers))
        return tokens

    async def split(self) -> None:
        return

    async def pause(self) -> None:
        return

    async def unpause(self) -> None:
        return

    def rest(self, partial: tuple[Any, ...], samples: Any) -> tuple[Any, ...]:
        assert not samples  # of no group a part has come
        return partial


class Keeper:
    """A rollout as its `InFlight` asks it."""

    def __init__(self, rollout: Rollout) -> None:
        self.partials, self.settled, self.drop, self.split, self.rest = (
            rollout.partials, rollout.settled, rollout.drop, rollout.split, rollout.rest,
        )  # fmt: skip
        self._rollout = rollout

    async def version(self) -> int:
        return self._rollout.version


def prompt(number: int) -> Prompt:
    return Prompt(number, np.array([number + 1]), text=str(number))


def group(asked: Prompt, answers: list[list[int]]) -> Group:
    """Its samples; tokens are the versions that made them."""
    return Group(
        asked,
        tuple(
            Sample(
                asked, index, np.asarray(versions, np.int64), np.zeros(len(versions), np.float32),
                np.asarray(versions, np.int32), "", False, reward=float(index), outcome="ok",
            )
            for index, versions in enumerate(answers)
        ),
    )  # fmt: skip


@dataclass
class Books:
    """What a run says it has drawn and dropped."""

    drawn_ids: list[int] = field(default_factory=list)
    dropped_samples: list[tuple[int, str, tuple[int, ...] | None]] = field(default_factory=list)
    masked_tokens: int = 0

    def drawn(self, ids, answers):
        self.drawn_ids += ids

    def dropped(self, prompt_id, reason, indices=None, tokens=0):
        self.dropped_samples.append((prompt_id, reason, None if indices is None else tuple(sorted(indices))))

    def masked(self, tokens):
        self.masked_tokens += tokens

    def copy(self):
        return Books(list(self.drawn_ids), list(self.dropped_samples), self.masked_tokens)


@dataclass
class Run:
    """A run that is killed and goes on from its last checkpoint: what outlives a process."""

    rules: Rules
    steps: int
    every: int
    """Steps between checkpoints."""
    n: int
    rows: int
    lengths: list[int]
    learning: list[float]
    """Seconds that each step learns, taken in turn."""
    checkpoint: Any = None
    trained: list[list[Group]] = field(default_factory=list)
    books: Books = field(default_factory=Books)
    position: int = 0
    tokens: int = 0
    """Learned."""
    repeated: int = 0
    """Tokens of checkpoints that were made once more."""
    oldest: int = 0
    """Versions."""
    metrics: list[dict[str, float]] = field(default_factory=list)

    async def draw(self, count):
        await asyncio.sleep(0)
        first, self.position = self.position, self.position + count
        return [prompt(number) for number in range(first, self.position)]

    async def go_on(self, killed_after: float | None = None) -> None:
        """One process: from the last checkpoint until it is killed or done."""
        done, kept = 0, None
        self.position, self.books = 0, Books()
        if self.checkpoint is not None:
            done, self.position, kept, books = self.checkpoint
            self.books = books.copy()
        del self.trained[done:], self.metrics[done:]
        rollout = Rollout(self.lengths, self.n, self.rows, done)
        self.rollout = rollout
        in_flight = InFlight(
            self.rules, draw=self.draw, keeper=Keeper(rollout), ledger=self.books, end=self.steps, snapshot=kept
        )
        running = asyncio.create_task(self.train(in_flight, rollout, done))
        await asyncio.wait([running], timeout=killed_after)
        running.cancel()
        found = (await asyncio.gather(running, return_exceptions=True))[0]
        await in_flight.close()
        if isinstance(found, Exception):
            raise found
        if kept is not None and not killed_after:
            held = {one.id: tokens_of(one) for one in kept.entries}
            learned = {each.prompt.id: sum(len(one.versions) for one in each.samples) for each in self.learned(done)}
            after = {one.id: tokens_of(one) for one in (await in_flight.state()).entries}
            total = sum(learned.values()) + sum(after.values())
            self.repeated += max(0, rollout.made - (total - sum(held.values())))

    def learned(self, done: int = 0) -> list[Group]:
        return [group for groups in self.trained[done:] for group in groups]

    async def train(self, in_flight: InFlight, rollout: Rollout, done: int) -> None:
        for index in range(done, self.steps):
            step = Step(index, (), self.n, in_flight=in_flight)
            batch = in_flight.next_batch(step, rollout.answers, rollout)
            groups = await batch.groups.collect()
            for one in groups:
                for sample in one.samples:
                    versions = sample.column("versions")
                    self.tokens += len(versions)
                    if len(versions):
                        self.oldest = max(self.oldest, index - int(versions.min()))
            await asyncio.sleep(self.learning[index % len(self.learning)])
            self.trained.append(groups)
            self.metrics.append(batch.metrics)
            await in_flight.publish(rollout, index + 1)
            if (index + 1) % self.every == 0:
                kept = await in_flight.state()
                self.checkpoint = (index + 1, self.position, kept, self.books.copy())


def tokens_of(entry: Any) -> int:
    """Tokens that a checkpoint holds of it."""
    if entry.result is not None:
        return sum(len(sample.versions) for group in entry.result for sample in group.samples)
    return sum(len(answer) for begun in entry.partial for answer in begun.answers)


def balanced(run: Run, kept: Kept) -> None:
    """Every sample of every prompt was learned from once, dropped once, or is in flight."""
    state: dict[tuple[int, int], int] = {(number, index): 0 for number in run.books.drawn_ids for index in range(run.n)}
    for one in run.learned():
        for sample in one.samples:
            state[one.prompt.id, sample.index] += 1
    for number, _, indices in run.books.dropped_samples:
        for index in range(run.n) if indices is None else indices:
            state[number, index] += 1
    for entry in kept.entries:
        for index in range(run.n):
            state[entry.id, index] += 1
    assert set(state.values()) <= {1}, {key: count for key, count in state.items() if count != 1}
