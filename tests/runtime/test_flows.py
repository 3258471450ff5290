"""The edges of a flow's graph, as they were seen: who passed what to whom, how much, and when it left."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf import Actor, ActorSystem, Stream, endpoint
from rlinf.runtime.base.clock import run_virtual
from rlinf.runtime.observe.dataflow import MOST_TIMES, FlowBook, quantiles
from rlinf.runtime.system.observer import Lap, Moved, Watch

pytestmark = pytest.mark.worlds("local", "serialize", "lane")

both_worlds = pytest.mark.parametrize("serialize", [False, True], ids=["local", "serialize"])


class Rollout(Actor):
    @endpoint
    async def generate(self, count: int) -> Any:
        for number in range(count):
            await asyncio.sleep(1.0)
            yield number

    @endpoint
    async def answer(self, prompts: Any) -> Any:
        async for prompt in prompts:
            yield prompt

    @endpoint
    async def load(self, weights: Any) -> None: ...


class Judge(Actor):
    @endpoint
    async def score(self, item: Any) -> Any:
        await asyncio.sleep(0.5)
        return item

    @endpoint
    async def scores(self, items: Any) -> Any:
        return items


class Trainer(Actor):
    @endpoint
    async def train(self, batch: Any) -> int:
        if not isinstance(batch, Stream):
            return len(batch)
        own = Stream.of(_read(batch))  # as a trainer does that reads ahead in a stage of its own
        return len(await own.collect())

    @endpoint
    async def weights(self) -> str:
        return "weights"


async def _read(stream: Any) -> Any:
    async for item in stream:
        yield item


def lap_of(flow: Any, *, serialize: bool = False, before: Any = None, trace: bool = True) -> Lap:
    """What is seen of a flow over two rollouts, three judges and two trainers on three hosts."""

    async def main() -> Lap:
        async with ActorSystem.local(3, serialize=serialize, trace=trace) as system:
            rollout = await system.spawn(Rollout, hosts=[0, 1], name="rollout")
            judge = await system.spawn(Judge, hosts=[0, 1, 2], name="judge")
            trainer = await system.spawn(Trainer, hosts=[1, 2], name="trainer")
            watch = await Watch.start(system)
            if before is not None:
                await before(rollout, judge, trainer)
            watch.begins()
            await flow(rollout, judge, trainer)
            return await watch.ends("step 1")

    return run_virtual(main())[0]


def edges(lap: Lap) -> dict[tuple[str, str], int]:
    return {(flow.source, flow.target): flow.items for flow in lap.flows}


async def grpo(rollout: Any, judge: Any, trainer: Any) -> None:
    groups = judge.score.map(rollout.generate(4))
    await trainer[0].train(groups)
    weights = trainer.weights()
    await rollout.load(weights)


@both_worlds
def test_streams_and_promises_make_edges_without_ranks(serialize):
    assert edges(lap_of(grpo, serialize=serialize)) == {
        ("rollout.generate", "judge.score"): 8,
        ("judge.score", "trainer.train"): 8,
        ("trainer.weights", "rollout.load"): 2,  # both trainers' values; that two rollouts get them counts once
    }


@both_worlds
def test_what_passes_items_on_is_no_node(serialize):
    async def flow(rollout, judge, trainer):
        left, right = rollout.generate(6).take(9).tee()
        scored = judge.score.map(left.batch(2), concurrency=1)
        one, two = right.deal(2)
        await asyncio.gather(trainer[0].train(one), trainer[1].train(two), scored.batch(3).batch(1).collect())

    assert edges(lap_of(flow, serialize=serialize)) == {
        ("rollout.generate", "judge.score"): 9,  # of lists, what is in them
        ("rollout.generate", "trainer.train"): 10,  # with one that pads
        ("judge.score", "flow"): 5,
    }


@both_worlds
def test_what_the_flow_reads_or_makes_comes_from_the_flow(serialize):
    async def flow(rollout, judge, trainer):
        async def worthy():
            async for item in judge.score.map(rollout.answer(Stream.of(range(6)))):
                if item % 2:
                    yield item

        await trainer[1].train(Stream.of(worthy()))

    assert edges(lap_of(flow, serialize=serialize)) == {
        ("flow", "rollout.answer"): 6,
        ("rollout.answer", "judge.score"): 6,
        ("judge.score", "flow"): 6,
        ("flow", "trainer.train"): 3,
    }


@both_worlds
def test_promises_are_counted_from_rank_to_rank_and_in_containers(serialize):
    async def flow(rollout, judge, trainer):
        seen = judge[0].score(1)
        for number in range(5):
            seen = judge[number % 3].score(seen)
            await seen
        await trainer[0].train([trainer[1].weights(), {"last": rollout[0].load(judge[1].score(2))}])

    assert edges(lap_of(flow, serialize=serialize)) == {
        ("judge.score", "rollout.load"): 1,
        ("rollout.load", "trainer.train"): 1,
        ("trainer.weights", "trainer.train"): 1,
    }


def test_what_a_call_returns_un_awaited_goes_through_it():
    async def flow(rollout, judge, trainer):
        scores = await judge[0].scores(rollout[0].generate(2))
        assert await trainer[0].train(scores) == 2

    assert edges(lap_of(flow)) == {("rollout.generate", "trainer.train"): 2}


def test_times_say_when_items_left_the_source_since_the_step_began():
    async def before(rollout, judge, trainer):
        await asyncio.sleep(7.0)

    lap = lap_of(grpo, before=before)
    flows = {(flow.source, flow.target): flow for flow in lap.flows}
    assert lap.start == 7.0
    assert flows["rollout.generate", "judge.score"].released == (1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0)
    assert flows["judge.score", "trainer.train"].released == (1.5, 1.5, 2.5, 2.5, 3.5, 3.5, 4.5, 4.5)
    assert flows["trainer.weights", "rollout.load"].released == ()


def test_a_step_is_told_of_its_own_items_alone():
    async def main():
        async with ActorSystem.local(2) as system:
            rollout = await system.spawn(Rollout, hosts=[1], name="rollout")
            trainer = await system.spawn(Trainer, hosts=[0], name="trainer")
            watch = await Watch.start(system)
            laps = []
            training = asyncio.ensure_future(_call(trainer[0].train, rollout.generate(10)))  # over several steps
            for seconds in (3.5, 2.0, 4.75):
                watch.begins()
                await asyncio.sleep(seconds)
                laps.append(await watch.ends("step"))
            assert await training == 10
            return laps

    laps, _ = run_virtual(main())
    assert [flow.items for lap in laps for flow in lap.flows] == [3, 2, 5]
    assert [flow.released for lap in laps for flow in lap.flows] == [
        (1.0, 2.0, 3.0),
        (0.5, 1.5),
        (0.5, 1.5, 2.5, 3.5, 4.5),
    ]


async def _call(endpoint: Any, argument: Any) -> Any:
    return await endpoint(argument)


def test_without_tracing_nothing_is_seen():
    assert lap_of(grpo, trace=False).flows == ()


async def test_edges_are_seen_across_hosts(system: ActorSystem) -> None:
    rollout = await system.spawn(Rollout, hosts=[1], name="rollout")
    judge = await system.spawn(Judge, hosts=[0, 1], name="judge")
    trainer = await system.spawn(Trainer, hosts=[1], name="trainer")
    watch = await Watch.start(system)
    watch.begins()
    await trainer[0].train(judge.scores.map(rollout.answer(Stream.of(range(300)))))
    await rollout.load(trainer[0].weights())
    lap = await watch.ends("step 1")
    assert edges(lap) == {
        ("flow", "rollout.answer"): 300,
        ("rollout.answer", "judge.scores"): 300,
        ("judge.scores", "trainer.train"): 300,
        ("trainer.weights", "rollout.load"): 1,
    }
    for flow in lap.flows[:3]:
        assert list(flow.released) == sorted(flow.released)
        assert 0.0 <= flow.released[0] <= flow.released[-1] <= lap.end - lap.start


# Moves -------------------------------------------------------------------------------------------------------------


class Big(Actor):
    @endpoint(device=True)
    async def work(self) -> None:
        await asyncio.sleep(1.0)

    async def offload(self) -> None:
        await asyncio.sleep(2.0)

    async def onload(self) -> None:
        await asyncio.sleep(3.0)


def test_who_was_loaded_and_parked_is_told_as_far_as_within_the_step():
    async def main():
        async with ActorSystem.local(2, device_memory={0: 100}) as system:
            a = await system.spawn(Big, hosts=[1], name="a", devices=[0], resident_bytes=60)
            b = await system.spawn(Big, hosts=[1], name="b", devices=[0], resident_bytes=60)
            watch = await Watch.start(system)
            working = asyncio.ensure_future(_work(b))  # it is loaded already, by its setup
            await working
            start = watch.now()
            watch.begins()
            loading = asyncio.ensure_future(_work(a))
            await asyncio.sleep(4.0)
            first = await watch.ends("step 1")
            watch.begins()
            await loading
            return start, first, await watch.ends("step 2")

    (start, first, second), _ = run_virtual(main())
    assert first.moves == (Moved("b[0]", "offload", start, start + 2.0),)
    assert second.moves == (Moved("a[0]", "onload", start + 4.0, start + 5.0),)  # it began in the step before


async def _work(group: Any) -> None:
    await group[0].work()


# Counting ----------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=700), st.integers(0, 1100), st.integers(0, 1100))
def test_counts_of_a_time_are_right_within_the_thinning_and_times_ascend(pauses, one, other):
    now = 0.0
    book = FlowBook(lambda: now)
    counter = book.counter(("rollout.generate", (0, 1), 0))
    passed = []
    for pause in pauses:
        now += pause
        counter.add()
        passed.append(now)
    start, end = sorted((float(one), float(other)))
    whole = book.between(0.0, now).items
    assert sum(count for each in whole for _, count in each.points) == len(pauses)
    assert all(len(each.points) <= MOST_TIMES for each in whole)
    points = counter.between(start, end)
    assert [time for time, _ in points] == sorted(time for time, _ in points)
    there = bisect_right(passed, end) - bisect_right(passed, start)
    slack = 4 + 2 * (len(pauses) // (MOST_TIMES // 2)) + passed.count(start) + passed.count(end)
    assert abs(sum(count for _, count in points) - there) <= slack


@given(st.lists(st.tuples(st.integers(0, 50).map(float), st.integers(1, 5)), max_size=60), st.integers(1, 40))
def test_times_told_are_those_of_evenly_spaced_items(points, most):
    each = sorted(time for time, count in points for _ in range(count))
    told = quantiles(points, most)
    assert len(told) == min(most, len(each))
    if len(each) <= most:
        assert list(told) == each
    else:
        assert told[-1] == each[-1]
        for position, time in enumerate(told, 1):  # as many items had left by then as should have, and no fewer
            assert bisect_right(each, time) >= position * len(each) / most > each.index(time)


def test_a_book_that_nobody_reads_stays_small():
    now = 0.0
    book = FlowBook(lambda: now)
    counters = [book.counter(("a.b", (0, number), 0)) for number in range(3000)]
    for counter in counters:
        for _ in range(3):
            counter.add()
    assert len(book._counters) <= 1024
    assert len(book.between(0.0, 1.0).items) <= 1024
