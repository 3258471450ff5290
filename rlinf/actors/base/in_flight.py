"""What one rank of a rollout has in flight: groups of answers that are not finished, by call of `generate`.

Flows in: prompts, and partial groups of another rank or of a checkpoint. Flows out: groups whose answers have all
ended; partial groups for other ranks and checkpoints. Who wakes whom: every use of the engine is a task that passes on
what has finished, one batch at a time, to whoever iterates `complete`; so is a hand-over, which passes on nothing. The
iteration ends when none of them is left.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterable, AsyncIterator, Collection, Coroutine, Hashable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from rlinf.data.sample import Prompt
from rlinf.engines.base import Completion, Engine, Request, Sampling
from rlinf.placement.tail_migration import Bundle, Load


@dataclass(slots=True, eq=False)
class PartialGroup:
    """The answers to one prompt, until all have ended; `generate` continues it in place of a prompt."""

    prompt: Prompt
    """What is answered."""
    done: dict[int, Completion] = field(default_factory=dict)
    """The finished answers, by index."""
    left: dict[int, Request] = field(default_factory=dict)
    """The others, by index; on its way, each with its tokens so far."""
    temperature: float = 1.0
    """At which they are sampled."""


class _Place(NamedTuple):
    """Whose answer a request of the engine is."""

    group: int
    """Number of its group in this call."""
    answer: int
    """Which of the group's answers."""
    since: float
    """Decode steps that the engine had made when it got the request."""


@dataclass(frozen=True, slots=True)
class _End:
    """A task has ended."""

    error: BaseException | None
    """Why, unless well."""


class Generation:
    """What one call of `generate` has in flight on this rank; made inside of it.

    Args:
        engine: answers.
        ids: names for requests and groups, unique among all calls.
    """

    def __init__(self, engine: Engine, ids: Iterator[int]):
        self.exhausted = False
        """All prompts have been read."""
        self.aborted = False
        """Everything is to end where it stands."""
        self.over = False
        """It takes nothing in any more."""
        self.stays = False
        """It could not be handed over once, and is not to be tried again."""
        self._engine, self._ids = engine, ids
        self._groups: dict[int, PartialGroup] = {}
        self._places: dict[int, _Place] = {}  # of requests that the engine has, by id
        self._news: asyncio.Queue[list[Completion] | _End] = asyncio.Queue()
        self._room = asyncio.Semaphore()  # the engine waits for our reader
        self._tasks: set[asyncio.Task[Any]] = set()
        self._running = 0
        self._noted = asyncio.Event()
        self._context = contextvars.copy_context()  # of the call, and with it of its lease

    # Answering ---------------------------------------------------------------------------------------------------

    def asked(self, prompt: Prompt, seeds: Iterable[int], sampling: Sampling) -> PartialGroup:
        """A new group, one answer per seed."""
        ids, images = prompt.token_ids, prompt.images
        requests = (Request(next(self._ids), ids, sampling, seed, images=images) for seed in seeds)
        return PartialGroup(prompt, {}, dict(enumerate(requests)), sampling.temperature)

    def continued(self, group: PartialGroup) -> PartialGroup:
        """A group that was begun elsewhere, its requests named anew."""
        left = {index: replace(request, id=next(self._ids)) for index, request in group.left.items()}
        return replace(group, done=dict(group.done), left=left)

    def requests(self, group: PartialGroup) -> Iterator[Request]:
        """The unfinished answers of a group; each is in flight from when it is taken."""
        number = next(self._ids)
        self._groups[number] = group
        for index, request in list(group.left.items()):
            self._places[request.id] = _Place(number, index, self._engine.stats.steps)
            yield request

    def start(self, requests: Iterable[Request] | AsyncIterable[Request]) -> None:
        """Have the engine answer them."""
        self.run(self._answer(requests))

    def run(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something beside: `complete` does not end before it, and fails if it does."""
        self._running += 1
        task = asyncio.create_task(work, context=self._context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def complete(self) -> AsyncIterator[list[PartialGroup]]:
        """Groups of which all answers have ended; once per batch of the engine's, so perhaps none."""
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
    def rest(self) -> list[PartialGroup]:
        """Groups of which some answers have ended and others were never asked for, because of `abort`."""
        return [group for group in self._groups.values() if group.done]

    async def close(self) -> None:
        """End everything."""
        self.over = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

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

    def _note(self, completions: Sequence[Completion]) -> Iterator[PartialGroup]:
        for completion in completions:
            place = self._places.pop(completion.id)
            group = self._groups[place.group]
            group.done[place.answer] = completion
            del group.left[place.answer]
            if not group.left:
                yield self._groups.pop(place.group)
        self._noted.set()
        self._noted = asyncio.Event()

    # Partial groups ----------------------------------------------------------------------------------------------

    async def partial(self) -> list[PartialGroup]:
        """All groups in flight with what there is of their answers, as a checkpoint keeps them; they go on here."""
        begun = {request.id: request for request in await self._engine.partial(list(self._places))}
        return [
            replace(group, done=dict(group.done), left={at: begun.get(one.id, one) for at, one in group.left.items()})
            for group in self._groups.values()
        ]

    def load(self, rank: int) -> Load:
        """What is left, by group."""
        places: dict[int, list[tuple[_Place, Request]]] = {}
        for place in self._places.values():
            places.setdefault(place.group, []).append((place, self._groups[place.group].left[place.answer]))
        steps = self._engine.stats.steps
        bundles = tuple(_bundle(number, some, steps) for number, some in places.items())
        return Load(rank, self._engine.max_rows, self._engine.max_tokens, bundles)

    async def take_out(self, numbers: Collection[int]) -> dict[int, PartialGroup]:
        """Drop groups, by number, for another rank; returns those that are still unfinished when it is done."""
        wanted = {id: place for id, place in self._places.items() if place.group in numbers}
        taken: dict[int, dict[int, Request]] = {}
        for request in await self._engine.take_out(wanted):
            place = self._places.pop(request.id)
            taken.setdefault(place.group, {})[place.answer] = request
        while not self._places.keys().isdisjoint(wanted):  # finished, and on their way through `complete`
            await self._noted.wait()
        groups = {number: self._groups.pop(number) for number in taken}
        return {number: replace(group, left=taken[number]) for number, group in groups.items()}

    def take_in(self, groups: Iterable[PartialGroup]) -> None:
        """Continue groups of another rank, or what it did not take."""
        requests = [request for group in groups for request in self.requests(self.continued(group))]
        if self.aborted:
            self.run(self._pass_on([request.ended("abort") for request in requests]))
        else:
            self.start(requests)


class InFlight:
    """Everything that one rank has in flight, by call of `generate`."""

    def __init__(self) -> None:
        self.calls: dict[Hashable, Generation] = {}
        """By their name on all ranks, if they have one."""

    def abort(self) -> None:
        """Note that everything is to end where it stands."""
        for call in self.calls.values():
            call.aborted = True

    async def partial(self) -> list[PartialGroup]:
        """The groups of all calls, with what there is of their answers."""
        return [group for call in list(self.calls.values()) for group in await call.partial()]


def _bundle(number: int, left: Sequence[tuple[_Place, Request]], steps: float) -> Bundle:
    """What a group still lacks. A row gets at most a token per step, fewer if it waited for its place."""
    answered = [
        int(min(steps - place.since, request.sampling.max_new_tokens)) + request.answered for place, request in left
    ]
    read = sum(len(request.prompt_ids) for _, request in left) + sum(answered)
    return Bundle(number, len(left), sum(request.cache_tokens for _, request in left), read, max(answered))
