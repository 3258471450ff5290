"""Whole programs in virtual time: random ones lose nothing and leave nothing, pipelines take exactly their time."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gc
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlinf import Actor, ActorSystem, Channel, Stream, endpoint
from rlinf.runtime.base.calls import current_scope
from rlinf.runtime.base.clock import run_virtual
from rlinf.runtime.transport.link import Frame, LocalTransport
from tests.runtime.worlds import nothing_left

# Random programs ---------------------------------------------------------------------------------------------------

Item = tuple[int, ...]
"""Where an item comes from and which stages it went through: unique in its program."""
RANKS = 3
STAGES = 2


def takes(item: Item, stage: int) -> float:
    """Virtual seconds that a stage needs for an item: some none, most a bit, some long."""
    return (0.0, 0.25, 0.5, 1.0, 0.125, 0.0, 3.0)[(sum(item) * 7 + stage) % 7]


def copies(item: Item) -> int:
    """How many items a spreading stage makes of one."""
    return sum(item) % 3


class Stager(Actor):
    """Does all kinds of stages, in modelled time."""

    @endpoint
    async def step(self, item: Item, *, stage: int) -> Item:
        await asyncio.sleep(takes(item, stage))
        return (*item, stage)

    @endpoint
    async def step_all(self, items: list[Item], *, stage: int) -> list[Item]:
        await asyncio.sleep(max(takes(item, stage) for item in items))
        return [(*item, stage) for item in items]

    @endpoint
    async def spread(self, item: Item, *, stage: int) -> AsyncIterator[Item]:
        for copy in range(copies(item)):
            await asyncio.sleep(takes(item, stage) / 2)
            yield (*item, stage, copy)

    @endpoint
    async def make(self, items: list[Item]) -> AsyncIterator[Item]:
        for item in items:
            await asyncio.sleep(takes(item, 0))
            yield item

    @endpoint
    async def feed(self, channel: Channel, items: list[Item]) -> None:
        for item in items:
            await asyncio.sleep(takes(item, 0))
            await channel.put(item, weight=float(len(item)))

    @endpoint
    async def drain(self, channel: Channel) -> list[Item]:
        return [item async for item in channel]

    @endpoint
    async def keep(self, stream: Stream[Item], log: Any) -> None:
        async for item in stream:
            await asyncio.sleep(takes(item, 1))
            log.done(item)

    @endpoint
    async def add(self, *numbers: int) -> int:
        await asyncio.sleep(0.25 * (sum(numbers) % 3))
        return sum(numbers)


class Log:
    """What consumers have finished. It stays in the process, whatever is pickled around it."""

    all: dict[int, list[Item]] = {}  # noqa: RUF012

    def __init__(self, number: int):
        self.number = number

    def done(self, item: Item) -> None:
        Log.all.setdefault(self.number, []).append(tuple(item))

    @property
    def items(self) -> list[Item]:
        return Log.all.get(self.number, [])


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline, and how it is run."""

    kind: str
    group: int
    concurrency: int
    capacity: int
    size: int


@dataclass(frozen=True)
class Pipeline:
    """Items of a source, through stages, to a sink."""

    source: str
    n: int
    stages: tuple[Stage, ...]
    sink: str


@dataclass(frozen=True)
class Queue:
    """Producers and consumers around a channel."""

    producers: int
    consumers: int
    n: int
    capacity: int | None


@dataclass(frozen=True)
class Calls:
    """A tree of calls over promises that nobody awaits in between."""

    depth: int


@dataclass(frozen=True)
class Part:
    """Something that a program does at the same time as all else."""

    what: Any
    begins: float
    cancelled_after: float | None


@dataclass(frozen=True)
class Program:
    """Parts that run together, and ranks that die meanwhile: (when, which group, which rank)."""

    parts: tuple[Part, ...]
    deaths: tuple[tuple[float, int, int], ...]
    serialize: bool
    latency: int | None
    """Seed of the delays between hosts; None for none."""


moments = st.sampled_from([0.0, 0.125, 0.25, 0.3, 0.5, 0.75, 1.0, 2.0, 3.5])
stages = st.builds(
    Stage,
    kind=st.sampled_from(["step", "step", "step_all", "spread", "lists", "tee"]),
    group=st.integers(0, STAGES - 1),
    concurrency=st.sampled_from([1, 2, 4]),
    capacity=st.sampled_from([1, 2, 256]),
    size=st.integers(2, 5),
)
pipelines = st.builds(
    Pipeline,
    source=st.sampled_from(["list", "generator", "iterable", "actor", "actors"]),
    n=st.integers(0, 12),
    stages=st.lists(stages, max_size=3).map(tuple),
    sink=st.sampled_from(["collect", "keep", "tee", "deal", "take", "batch"]),
)
queues = st.builds(Queue, st.integers(1, 3), st.integers(1, 3), st.integers(0, 8), st.sampled_from([None, 1, 2]))
parts = st.builds(
    Part,
    st.one_of(pipelines, pipelines, pipelines, queues, st.builds(Calls, st.integers(1, 4))),
    moments,
    st.one_of(st.none(), st.none(), moments),
)
programs = st.builds(
    Program,
    st.lists(parts, min_size=1, max_size=3).map(tuple),
    st.lists(st.tuples(moments, st.integers(0, STAGES - 1), st.integers(1, RANKS - 1)), max_size=3).map(tuple),
    st.booleans(),
    st.one_of(st.none(), st.integers(0, 1000)),
)


@contextlib.contextmanager
def latency(seed: int | None) -> Iterator[None]:
    """Between hosts every message takes its own time, and may be overtaken."""
    random = Random(seed)

    def delay() -> float:
        return random.choice((0.0, 0.0, 0.001, 0.01, 0.1, 0.4))

    def send(self: LocalTransport, host: int, frame: Frame, answered: Callable[[Frame | None], None]) -> None:
        loop = asyncio.get_running_loop()

        def answered_later(answer: Frame | None) -> None:
            loop.call_later(delay(), answered, answer)

        loop.call_later(delay(), self._hand_over, host, self._copied(frame), answered_later)

    with contextlib.nullcontext() if seed is None else mock.patch.object(LocalTransport, "send", send):
        yield


class Runner:
    """Runs a program, and says what must come out of each part."""

    def __init__(self, system: ActorSystem, program: Program):
        self.system, self.program = system, program
        self.groups: list[Any] = []
        self.numbers = iter(range(1000))

    async def run(self) -> None:
        spawn = self.system.spawn
        self.makers = await spawn(Stager, hosts=[1, 2], name="maker")
        self.groups = [await spawn(Stager, hosts=[0, 1, 2], name=f"stage{i}") for i in range(STAGES)]
        running = [asyncio.ensure_future(self.part(i, part)) for i, part in enumerate(self.program.parts)]
        dying = [asyncio.ensure_future(self.die(*death)) for death in self.program.deaths]
        await asyncio.gather(*running, *dying)

    async def die(self, when: float, group: int, rank: int) -> None:
        await asyncio.sleep(when)
        await self.system.kill(self.groups[group][rank : rank + 1])

    async def part(self, index: int, part: Part) -> None:
        await asyncio.sleep(part.begins)
        if isinstance(part.what, Pipeline):
            work = self.pipeline(index, part.what)
        else:
            work = self.queue(index, part.what) if isinstance(part.what, Queue) else self.calls(part.what)
        if part.cancelled_after is None:
            await work
        else:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(part.cancelled_after):
                    await work

    async def pipeline(self, index: int, pipeline: Pipeline) -> None:
        items = [(index, n) for n in range(pipeline.n)]
        stream = self.source(pipeline.source, items)
        expected: list[Item] = items
        for number, stage in enumerate(pipeline.stages):
            stream, expected = self.stage(number, stage, stream, expected)
        log = Log(index)
        Log.all[index] = []
        got = await self.sink(pipeline.sink, stream, log)
        if pipeline.sink == "take":
            assert len(got) == min(3, len(expected))
            assert not collections.Counter(got) - collections.Counter(expected)
        else:
            assert collections.Counter(got) == collections.Counter(expected)

    def source(self, kind: str, items: list[Item]) -> Stream[Any]:
        async def generator() -> AsyncIterator[Item]:
            for item in items:
                await asyncio.sleep(takes(item, 0))
                yield item

        if kind == "actor":
            made: Stream[Any] = self.makers[0].make(items)
        elif kind == "actors":
            made = self.makers.each.make([items[::2], items[1::2]])
        else:
            source: Any = {"list": items, "iterable": iter(items), "generator": generator()}[kind]
            made = Stream.of(source)
        return made

    def stage(self, number: int, stage: Stage, stream: Any, expected: list[Item]) -> tuple[Any, list[Item]]:
        group = self.groups[stage.group]
        if stage.kind == "lists":
            return Stream.of(flattened(stream.batch(stage.size))), expected
        if stage.kind == "tee":
            kept, dropped = stream.tee()
            del dropped
            return kept, expected
        batch = stage.size if stage.kind == "step_all" else None
        mapped = (
            getattr(group, stage.kind)
            .bounded(stage.capacity)
            .map(stream, batch=batch, concurrency=stage.concurrency, stage=number)
        )
        if stage.kind == "spread":
            return mapped, [(*item, number, copy) for item in expected for copy in range(copies(item))]
        return mapped, [(*item, number) for item in expected]

    async def sink(self, kind: str, stream: Any, log: Log) -> list[Item]:
        if kind == "collect":
            return list(await stream.collect())
        if kind == "take":
            return list(await stream.take(3).collect())
        if kind == "batch":
            return [item for part in await stream.batch(3).collect() for item in part]
        if kind == "tee":
            left, right = await asyncio.gather(*(branch.collect() for branch in stream.tee()))
            assert collections.Counter(left) == collections.Counter(right)
            return list(left)
        if kind == "deal":
            shares = await asyncio.gather(*(share.collect() for share in stream.deal(3, weight=sum)))
            assert len({len(share) for share in shares}) == 1
            return [item for share in shares for item in share if item is not None]
        await self.kept(stream, log)
        return log.items

    async def kept(self, stream: Any, log: Log) -> None:
        """Consumers that die give back what they have in hand; the flow takes the place of the last one."""
        calls = [ref.keep(stream, log) for ref in self.groups[0]]
        await asyncio.gather(*calls, return_exceptions=True)
        async for item in stream:
            log.done(item)

    async def queue(self, index: int, queue: Queue) -> None:
        channel = await self.system.channel(f"channel {index}", capacity=queue.capacity)
        shares = [[(index, p, n) for n in range(queue.n)] for p in range(queue.producers)]
        feeding = [self.makers[p % 2].feed(channel, share) for p, share in enumerate(shares)]
        draining = [self.makers[c % 2].drain(channel) for c in range(queue.consumers)]
        await asyncio.gather(*feeding)
        channel.close()
        got = [tuple(item) for part in await asyncio.gather(*draining) for item in part]
        assert collections.Counter(got) == collections.Counter(item for share in shares for item in share)

    async def calls(self, calls: Calls) -> None:
        level = [self.makers[n % 2].add(n) for n in range(2**calls.depth)]
        while len(level) > 1:
            pairs = zip(level[::2], level[1::2], strict=True)
            level = [self.makers[n % 2].add(left, right) for n, (left, right) in enumerate(pairs)]
        assert await level[0] == sum(range(2**calls.depth))


async def flattened(lists: Any) -> AsyncIterator[Item]:
    async for part in lists:
        for item in part:
            yield item


async def run_program(program: Program) -> None:
    async with ActorSystem.local(RANKS, serialize=program.serialize, trace=False) as system:
        async with system.scope() as scope:
            token = current_scope.set(scope)
            try:
                await Runner(system, program).run()
            finally:
                current_scope.reset(token)
        await nothing_left(system)
    assert asyncio.all_tasks() == {asyncio.current_task()}


DROPPED_AT_THE_END = Program((Part(Calls(4), 0.0, 0.0), Part(Calls(1), 0.0, None)), (), False, 1)
"""A handle goes as the program ends, and word of that takes its time."""


@example(DROPPED_AT_THE_END)
@example(
    Program(
        (
            Part(Pipeline("list", 0, (), "collect"), 0.0, None),
            Part(Calls(3), 0.0, 0.0),
            Part(Pipeline("list", 0, (), "collect"), 0.0, None),
        ),
        (),
        False,
        1,
    )
)
@given(programs)
@settings(max_examples=50)
def test_random_programs_lose_nothing_and_leave_nothing(program: Program) -> None:
    check_program(program)


@pytest.mark.repeated
@pytest.mark.timeout(600)
@given(programs)
@settings(max_examples=500)
def test_many_random_programs_lose_nothing_and_leave_nothing(program: Program) -> None:
    check_program(program)


def check_program(program: Program) -> None:
    with latency(program.latency):
        run_virtual(run_program(program))


def test_what_is_left_does_not_depend_on_how_long_garbage_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    collect = gc.collect
    monkeypatch.setattr(gc, "collect", lambda: (time.sleep(0.05), collect()))
    with latency(DROPPED_AT_THE_END.latency):
        run_virtual(run_program(DROPPED_AT_THE_END))


# Exact times -------------------------------------------------------------------------------------------------------


class Modelled(Actor):
    """Takes as long as it is told to."""

    async def setup(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.served = 0

    @endpoint
    async def work(self, item: Any) -> Any:
        self.served += 1
        await asyncio.sleep(self.seconds)
        return item

    @endpoint
    async def work_all(self, items: list[Any]) -> list[Any]:
        self.served += len(items)
        await asyncio.sleep(self.seconds)
        return items

    @endpoint
    async def count(self) -> int:
        return self.served


async def _pipeline(items: Iterable[Any], *stages: tuple[float, list[int]], serialize: bool = False) -> list[Any]:
    async with ActorSystem.local(serialize=serialize) as system:
        stream: Any = Stream.of(items)
        for number, (seconds, hosts) in enumerate(stages):
            group = await system.spawn(Modelled, hosts=hosts, name=f"stage{number}", seconds=seconds)
            stream = group.work.map(stream, concurrency=1)
        return list(await stream.collect())


@pytest.mark.parametrize("serialize", [False, True])
def test_a_three_stage_pipeline_takes_exactly_its_slowest_stage_and_the_ends(serialize: bool) -> None:
    got, seconds = run_virtual(_pipeline(range(300), (1.0, [0]), (3.0, [1]), (2.0, [2]), serialize=serialize))
    assert got == list(range(300))
    assert seconds == (1.0 + 3.0 + 2.0) + 299 * 3.0


def test_more_ranks_make_a_stage_as_fast_as_its_neighbours() -> None:
    got, seconds = run_virtual(_pipeline(range(300), (1.0, [0]), (3.0, [0, 1, 2]), (1.0, [1])))
    assert got == list(range(300))
    assert seconds == 300 + 3.0 + 1.0


@pytest.mark.parametrize("seconds", [1.0, 0.0625])
def test_a_rank_elsewhere_takes_no_more_than_its_share(seconds: float) -> None:
    _, took = run_virtual(_pipeline(range(40), (seconds, [0, 1])))
    assert took == 20 * seconds


def test_batches_go_to_whoever_is_free() -> None:
    async def main() -> tuple[int, list[int]]:
        async with ActorSystem.local() as system:
            slow = await system.spawn(Modelled, hosts=[1], name="slow", seconds=9.0)
            fast = await system.spawn(Modelled, hosts=[2], name="fast", seconds=1.0)
            items = Stream.of(range(100))
            done = await asyncio.gather(
                *(group.work_all.map(items, batch=10, concurrency=1).collect() for group in (slow, fast))
            )
            return len(done[0]) + len(done[1]), [(await group.count())[0] for group in (slow, fast)]

    (total, shares), took = run_virtual(main())
    assert total == 100
    assert shares == [10, 90]
    assert took == 9.0


def test_two_slices_interleave_by_gather_alone() -> None:
    async def main() -> None:
        async with ActorSystem.local() as system:
            simulator = await system.spawn(Modelled, hosts=[0], name="simulator", seconds=1.0)
            policy = await system.spawn(Modelled, hosts=[1], name="policy", seconds=1.0)

            async def rollout(steps: int) -> None:
                for step in range(steps):
                    await policy[0].work(simulator[0].work(step))

            await asyncio.gather(rollout(10), rollout(10))

    _, took = run_virtual(main())
    assert took == 20.0
