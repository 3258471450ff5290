"""The answers of one `generate` on one rank: asked of the engine, gathered into groups, moved from and to other ranks.

Flows in: requests from the stream of prompts, and unfinished groups that another rank hands over. Flows out: groups
whose answers have all ended; unfinished groups for other ranks. Who wakes whom: every call of the engine is a task that
passes on what has finished, one batch at a time, to whoever iterates `complete`; so is a hand-over, of which nothing
comes. The iteration ends when none of them is left.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterable, AsyncIterator, Collection, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from rlinf.data.sample import Prompt
from rlinf.engines.base import Completion, Request, Sampling
from rlinf.engines.transformers.engine import TransformersEngine
from rlinf.placement.tail_migration import Bundle, Load


@dataclass(slots=True, eq=False)
class Asked:
    """A prompt that is being answered."""

    id: int
    """Names it, on this rank."""
    prompt: Prompt
    """What was asked."""
    done: list[tuple[int, Completion]] = field(default_factory=list)
    """Its finished answers, with their index."""


@dataclass(frozen=True, slots=True, eq=False)
class Unfinished:
    """A group on its way to another rank."""

    prompt: Prompt
    """What was asked."""
    done: tuple[tuple[int, Completion], ...]
    """Its finished answers, with their index."""
    left: tuple[tuple[int, Request], ...]
    """The others, with what there is of them."""


@dataclass(slots=True, eq=False)
class _Place:
    """Whose answer a request is."""

    asked: Asked
    """Of this prompt."""
    index: int
    """Which of its answers."""
    request: Request
    """As it was given to the engine."""
    since: int
    """Decode steps that the engine had made by then."""


@dataclass(frozen=True, slots=True)
class _End:
    """A task has ended."""

    error: BaseException | None
    """Why, unless well."""


class Answering:
    """What one call of `generate` has under way on this rank; made inside of it.

    Args:
        engine: answers.
        ids: names for requests and prompts, unique among all calls.
        n: answers per prompt.
    """

    def __init__(self, engine: TransformersEngine, ids: Iterator[int], n: int):
        self.exhausted = False
        """The prompts have come to their end."""
        self.aborted = False
        """Everything is to end where it stands."""
        self.over = False
        """Nothing is taken in any more."""
        self.stays = False
        """It could not be handed over once, and is not to be tried again."""
        self._engine, self._ids, self._n = engine, ids, n
        self._under_way: dict[int, _Place] = {}  # by request
        self._unfinished: dict[int, Asked] = {}  # those with a finished answer, in order of the first
        self._news: asyncio.Queue[list[Completion] | _End] = asyncio.Queue()
        self._room = asyncio.Semaphore()  # the engine waits for our reader
        self._tasks: set[asyncio.Task[Any]] = set()
        self._running = 0
        self._noted = asyncio.Event()
        self._context = contextvars.copy_context()  # of the call, and with it of its lease

    # Answering ---------------------------------------------------------------------------------------------------

    def requests(self, prompt: Prompt, seeds: Iterable[int], rules: Sampling) -> Iterator[Request]:
        """One request per answer, each under way from when it is taken."""
        asked = Asked(next(self._ids), prompt)
        for index, seed in enumerate(seeds):
            yield self._place(asked, index, Request(next(self._ids), prompt.token_ids, rules, seed))

    def start(self, requests: Iterable[Request] | AsyncIterable[Request]) -> None:
        """Have the engine answer them."""
        self.run(self._answer(requests))

    def run(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Do something beside: until it has ended, so has `complete` not, and its failure is the failure of that."""
        self._running += 1
        task = asyncio.create_task(work, context=self._context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def complete(self) -> AsyncIterator[list[Asked]]:
        """Prompts of which all answers have ended, as they do; once per batch of the engine's, so perhaps none."""
        while self._running:
            news = await self._news.get()
            if isinstance(news, _End):
                self._running -= 1
                if news.error is not None:
                    raise news.error
            else:
                self._room.release()
                yield list(self._note(news))
        self.over = True

    @property
    def rest(self) -> list[Asked]:
        """Prompts of which some answers have ended and others were never asked for, because of `abort`."""
        return list(self._unfinished.values())

    async def close(self) -> None:
        """End everything."""
        self.over = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _place(self, asked: Asked, index: int, request: Request) -> Request:
        self._under_way[request.id] = _Place(asked, index, request, self._engine.pace.steps)
        return request

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        self._news.put_nowait(_End(None if task.cancelled() else task.exception()))

    async def _answer(self, requests: Iterable[Request] | AsyncIterable[Request]) -> None:
        async with aclosing(self._engine.batches(requests)) as batches:
            async for completions in batches:
                await self._pass_on(completions)

    async def _pass_on(self, completions: list[Completion]) -> None:
        await self._room.acquire()
        self._news.put_nowait(completions)

    def _note(self, completions: Sequence[Completion]) -> Iterator[Asked]:
        for completion in completions:
            place = self._under_way.pop(completion.id)
            asked = place.asked
            asked.done.append((place.index, completion))
            self._unfinished[asked.id] = asked
            if len(asked.done) == self._n:
                yield self._unfinished.pop(asked.id)
        self._noted.set()
        self._noted = asyncio.Event()

    # Moving ------------------------------------------------------------------------------------------------------

    def load(self, rank: int) -> Load:
        """What is left, by group."""
        places: dict[int, list[_Place]] = {}
        for place in self._under_way.values():
            places.setdefault(place.asked.id, []).append(place)
        steps = self._engine.pace.steps
        bundles = tuple(_bundle(id, some, steps) for id, some in places.items())
        return Load(rank, self._engine.max_rows, self._engine.max_tokens, bundles)

    async def take_out(self, ids: Collection[int]) -> dict[int, Unfinished]:
        """Let go of groups, by their id; of those that are still unfinished when it is done."""
        wanted = {number: place for number, place in self._under_way.items() if place.asked.id in ids}
        left: dict[int, list[tuple[int, Request]]] = {}
        for request in await self._engine.take_out(wanted):
            place = self._under_way.pop(request.id)
            left.setdefault(place.asked.id, []).append((place.index, request))
        while not self._under_way.keys().isdisjoint(wanted):  # finished, and on their way through `complete`
            await self._noted.wait()
        groups = {place.asked.id: place.asked for place in wanted.values()}
        for id in left:
            self._unfinished.pop(id, None)
        return {id: Unfinished(groups[id].prompt, tuple(groups[id].done), tuple(some)) for id, some in left.items()}

    def take_in(self, groups: Sequence[Unfinished]) -> None:
        """Go on with groups of another rank, or with what it did not take."""
        requests = []
        for group in groups:
            asked = Asked(next(self._ids), group.prompt, list(group.done))
            if asked.done:
                self._unfinished[asked.id] = asked
            requests += [
                self._place(asked, index, replace(request, id=next(self._ids))) for index, request in group.left
            ]
        if self.aborted:
            self.run(self._pass_on([request.ended("abort") for request in requests]))
        else:
            self.start(requests)


def _bundle(id: int, places: Sequence[_Place], steps: int) -> Bundle:
    """What a group still lacks. A row gets at most a token per step, fewer if it waited for its place."""
    answered = [
        min(steps - place.since, place.request.sampling.max_new_tokens)
        + (0 if place.request.begun is None else len(place.request.begun.response_ids))
        for place in places
    ]
    prompts = [len(place.request.prompt_ids) for place in places]
    need = sum(
        prompt + place.request.sampling.max_new_tokens - 1 for prompt, place in zip(prompts, places, strict=True)
    )
    return Bundle(id, len(places), need, sum(prompts) + sum(answered), max(answered))
