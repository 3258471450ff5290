"""What one rank of a rollout has in flight, by call of `generate`: groups of answers that are not finished, and
finished ones of which nobody has said yet that they arrived.

Flows in: prompts, and partial groups of another rank or of a checkpoint. Flows out: groups whose answers have all
ended; partial groups for other ranks and checkpoints. Who wakes whom: every use of the engine is a task that passes on
what has finished, one batch at a time, to whoever iterates `complete`; so is a hand-over, which passes on nothing. The
iteration ends when none of them is left.

The single answers that one rank of a rollout has under way, by the names that their callers gave them.

Flows in: requests of `answer`. Flows out: completions; how far the others are. Who wakes whom: the engine wakes the
caller of each.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Collection,
    Coroutine,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from transformers import PreTrainedTokenizerBase

from rlinf.data.sample import Group, Prompt, Sample, read_only
from rlinf.engines.base import Completion, Engine, PartialAnswer, Request, Sampling
from rlinf.placement.rescale import Bundle, Load
from rlinf.runtime.streams.stream import Consumer, Stream, each

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class PartialGroup:
    """The answers to one prompt, until all have ended; `generate` continues it in place of a prompt."""

    prompt: Prompt
    """What is answered."""
    done: dict[int, Completion] = field(default_factory=dict)
    """The finished answers, by index."""
    left: dict[int, Request] = field(default_factory=dict)
    """The others, by index; on its way, each with its tokens so far. Empty: all have ended, and `generate` puts the
    group out at once."""
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
        listed: `InFlight` tells of its groups, and has them settled and dropped.
    """

    def __init__(self, engine: Engine, ids: Iterator[int], *, listed: bool = True):
        self.listed = listed
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
        self._dropped: dict[int, PartialGroup] = {}  # by the same numbers, while their answers are being ended
        self._ready: dict[PartialGroup, None] = {}  # complete, and not put out yet
        self._out: dict[PartialGroup, None] = {}  # put out, and not settled yet
        self._places: dict[int, _Place] = {}  # of requests that the engine has, by id
        self._news: asyncio.Queue[list[PartialGroup] | PartialGroup | _End] = asyncio.Queue()
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
        """The unfinished answers of a group; each is in flight from when it is taken. Without any it is complete."""
        if not group.left:
            self._ready[group] = None
            self._news.put_nowait(group)
            return
        number = next(self._ids)
        self._groups[number] = group
        for index, request in list(group.left.items()):
            if number not in self._groups:  # dropped meanwhile
                return
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
        """Groups of which all answers have ended; once per batch of the engine's, so perhaps none. Last come those of
        which some have ended and others were never asked for, because of `abort`."""
        while self._running:
            news = await self._news.get()
            if isinstance(news, _End):
                self._running -= 1
                if news.error is not None:
                    raise news.error
            elif isinstance(news, PartialGroup):
                yield [news]
            else:
                self._room.release()
                yield news
        self.over = True
        if rest := [replace(group, left={}) for group in self._groups.values() if group.done]:
            self._groups.clear()
            self._ready.update(dict.fromkeys(rest))
            yield rest

    def puts_out(self, group: PartialGroup) -> bool:
        """A complete group is put out now, and kept until it is settled; False: no, it was dropped."""
        if group not in self._ready:
            return False
        del self._ready[group]
        self._out[group] = None
        return True

    async def close(self) -> None:
        """End everything."""
        self.over = True
        self._tell_noted()
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
        complete = self._note(completions)
        await self._room.acquire()
        self._news.put_nowait(complete)

    def _note(self, completions: Sequence[Completion]) -> list[PartialGroup]:
        complete: list[PartialGroup] = []
        for completion in completions:
            place = self._places.pop(completion.id)
            group = self._groups.get(place.group) or self._dropped[place.group]
            group.done[place.answer] = completion
            del group.left[place.answer]
            if not group.left and place.group in self._groups:
                complete.append(self._groups.pop(place.group))
        self._ready.update(dict.fromkeys(complete))
        self._tell_noted()
        return complete

    def _tell_noted(self) -> None:
        self._noted.set()
        self._noted = asyncio.Event()

    # Partial groups ----------------------------------------------------------------------------------------------

    async def partial(self) -> list[PartialGroup]:
        """All groups in flight with what there is of their answers, as a checkpoint keeps them, and then all that are
        complete and not settled, with nothing left; they go on here."""
        begun = {request.id: request for request in await self._engine.partial(list(self._places))}
        return [
            replace(group, done=dict(group.done), left={at: begun.get(one.id, one) for at, one in group.left.items()})
            for group in (*self._groups.values(), *self._ready, *self._out)
        ]

    def settled(self, answers: Mapping[int, Collection[int] | None]) -> None:
        """Keep these no more, which were put out: by prompt the indices of answers, None for all of them."""
        for group in [group for group in self._out if group.prompt.id in answers]:
            some = answers[group.prompt.id]
            if some is None or group.done.keys() <= set(some):
                del self._out[group]

    def split(self, least: int) -> int:
        """Let the finished answers come as a group of their own where there are so many, and as many others go on."""
        parts = [one for one in self._groups.values() if min(len(one.done), len(one.left)) >= least]
        for group in parts:
            part = replace(group, left={})
            group.done = {}
            self._ready[part] = None
            self._news.put_nowait(part)
        return len(parts)

    async def drop(self, prompts: Collection[int]) -> dict[int, int]:
        """End the answers to these prompts, and put out nothing of them any more.

        Returns:
            How many tokens there were, by prompt, for those that this call has and has not put out.
        """
        dropped = {number: group for number, group in self._groups.items() if group.prompt.id in prompts}
        for number in dropped:
            self._dropped[number] = self._groups.pop(number)
        ready = [group for group in self._ready if group.prompt.id in prompts]
        for group in ready:
            del self._ready[group]
        tokens = Counter({group.prompt.id: 0 for group in (*dropped.values(), *ready)})
        wanted = {id: place for id, place in self._places.items() if place.group in dropped}
        if not self._engine.hands_over:
            await self._engine.abort(wanted)
        else:
            for request in await self._engine.take_out(wanted):
                tokens[dropped[self._places.pop(request.id).group].prompt.id] += request.answered
        while not (self.over or self._places.keys().isdisjoint(wanted)):  # ended, and on their way to `_note`
            await self._noted.wait()
        for group in (*dropped.values(), *ready):
            tokens[group.prompt.id] += sum(len(one.response_ids) for one in group.done.values())
        for number in dropped:
            del self._dropped[number]
        return dict(tokens)

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
        groups = {number: self._groups.pop(number) for number in taken if number in self._groups}
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

    @property
    def _listed(self) -> list[Generation]:
        return [call for call in self.calls.values() if call.listed]

    async def partial(self) -> list[PartialGroup]:
        """The groups of all listed calls, with what there is of their answers."""
        return [group for call in self._listed for group in await call.partial()]

    def settled(self, answers: Mapping[int, Collection[int] | None]) -> None:
        """See `Generation.settled`."""
        for call in self._listed:
            call.settled(answers)

    def split(self, least: int) -> int:
        """See `Generation.split`."""
        return sum(call.split(least) for call in self._listed)

    async def drop(self, prompts: Collection[int]) -> dict[int, int]:
        """See `Generation.drop`."""
        tokens: Counter[int] = Counter()
        for call in self._listed:
            tokens.update(await call.drop(prompts))
        return dict(tokens)


def one_by_one(prompts: Iterable[T] | AsyncIterable[T]) -> AsyncIterator[T]:
    """The same, of a stream nothing ahead: what one rank takes before it has rows for it, no other can begin with."""
    return Consumer(prompts, prefetch=False) if isinstance(prompts, Stream) else each(prompts)


def _bundle(number: int, left: Sequence[tuple[_Place, Request]], steps: float) -> Bundle:
    """What a group still lacks. A row gets at most a token per step, fewer if it waited for its place."""
    answered = [
        int(min(steps - place.since, request.sampling.max_new_tokens)) + request.answered for place, request in left
    ]
    read = sum(len(request.prompt_ids) for _, request in left) + sum(answered)
    return Bundle(number, len(left), sum(request.cache_tokens for _, request in left), read, max(answered))


def groups_of(answered: Sequence[PartialGroup], tokenizer: PreTrainedTokenizerBase) -> list[Group]:
    """The samples of each prompt, in order of their index; none where it was aborted before one began.

    Args:
        answered: all answers of each have ended.
        tokenizer: decodes them.
    """
    return [
        Group(
            group.prompt,
            tuple(
                _sample(group.prompt, index, completion, group.temperature, tokenizer)
                for index, completion in sorted(group.done.items())
                if len(completion.response_ids)
            ),
        )
        for group in answered
    ]


def _sample(
    prompt: Prompt, index: int, completion: Completion, temperature: float, tokenizer: PreTrainedTokenizerBase
) -> Sample:
    kept = completion.response_ids[:-1] if completion.finish == "stop" else completion.response_ids
    return Sample(
        prompt=prompt,
        index=index,
        response_ids=read_only(completion.response_ids),  # of whoever takes it: what is learned is what was sampled
        logprobs=read_only(completion.logprobs),
        versions=read_only(completion.versions),
        # Special tokens inside the answer stay visible: a reward must not take "12<pad>34" for "1234".
        text=str(tokenizer.decode(kept, skip_special_tokens=False)),
        truncated=completion.finish in ("length", "abort"),
        temperature=temperature,
        routes=completion.routes,
    )


class SingleAnswers:
    """Answers to single requests.

    Args:
        engine: answers.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._names: dict[int, str] = {}  # of requests under way, by id

    async def answer(self, request: Request, name: str | None) -> Completion:
        """Answer a request.

        Args:
            request: what is asked. An engine that cannot go on with its partial answer makes all of it.
            name: by which `partial` tells how far it is; None: it does not.

        Raises:
            ValueError, Exception: as `Engine.answer`.
        """
        if request.partial is not None and not self._engine.hands_over:
            request = replace(request, partial=None)
        if name is None:
            return await self._engine.answer(request)
        self._names[request.id] = name
        try:
            return await self._engine.answer(request)
        finally:
            del self._names[request.id]

    async def partial(self) -> dict[str, PartialAnswer]:
        """How far answers are, by name; those without a token are left out."""
        found: dict[str, PartialAnswer] = {}
        # One that ends while the engine is asked is not in what the engine says. Asking once more for those that were
        # not gives its completion the time to leave before this reply does.
        for _ in range(2):
            missing = {id: name for id, name in self._names.items() if name not in found}
            for request in await self._engine.partial(missing) if missing else ():
                if request.partial is not None:
                    found[missing[request.id]] = request.partial
        return found
