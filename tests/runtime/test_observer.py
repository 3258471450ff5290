"""Where the time of a step went and who is at what: read off spans, on every host, on one clock."""

from __future__ import annotations

import asyncio
import itertools
import time

from hypothesis import given
from hypothesis import strategies as st

from rlinf import Actor, ActorSystem, endpoint
from rlinf.runtime.base.clock import run_virtual
from rlinf.runtime.observe.spans import Tracer
from rlinf.runtime.system.observer import Watch, busy, recent, union, without

intervals = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 12)).map(lambda pair: (float(pair[0]), float(sum(pair)))), max_size=12
)


def covered(times: list[tuple[float, float]]) -> set[float]:
    """The unit cells that intervals with whole ends cover: an independent picture of the same time."""
    return {float(cell) for start, end in times for cell in range(int(start), int(end))}


@given(intervals)
def test_a_union_covers_the_same_time_in_order_and_apart(times):
    merged = union(times)
    assert covered(merged) == covered(times)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(merged))


@given(intervals, intervals)
def test_what_is_left_is_the_time_of_the_first_outside_the_second(times, others):
    assert covered(list(without(union(times), union(others)))) == covered(times) - covered(others)


def times_of(spans) -> dict[tuple[str, str], list[tuple[float, float]]]:
    return {(part.actor, part.endpoint): list(part.intervals) for part in busy(spans)}


def test_an_endpoint_that_computes_is_busy_only_while_it_computes():
    spans = [
        ("trainer[0]", "train", 0.0, 10.0, {"caller": "flow"}),
        ("trainer[0] compute", "learn", 1.0, 2.0, None),
        ("trainer[0] compute", "learn", 2.0, 4.0, None),
        ("trainer[0]", "weights", 10.0, 12.0, {"caller": "flow"}),
        ("trainer[0] compute", "pack", 10.5, 11.0, None),
    ]
    assert times_of(spans) == {("trainer[0]", "train"): [(1.0, 4.0)], ("trainer[0]", "weights"): [(10.5, 11.0)]}


def test_an_endpoint_whose_work_is_elsewhere_is_busy_while_it_waits_for_no_queue_and_no_device():
    spans = [
        ("rollout[0]", "generate", 0.0, 10.0, {"caller": "flow"}),
        ("rollout[0]", "wait for stream@0.1", 1.0, 2.0, None),
        ("rollout[0]", "wait for space in rollout.generate@0.2", 5.0, 6.0, None),
        ("rollout[0] lease", "wait for lease", 8.0, 9.0, None),
    ]
    assert times_of(spans) == {("rollout[0]", "generate"): [(0.0, 1.0), (2.0, 5.0), (6.0, 8.0), (9.0, 10.0)]}


def test_of_a_mapped_endpoint_the_items_count():
    spans = [
        ("judge[0]", "score", 0.0, 10.0, {"caller": "flow"}),
        ("judge[0]", "score", 2.0, 3.0, {"caller": "judge[0].score#0.7"}),
        ("judge[0]", "score", 2.5, 4.0, {"caller": "judge[0].score#0.7"}),
    ]
    assert times_of(spans) == {("judge[0]", "score"): [(2.0, 4.0)]}


def test_what_is_computed_in_a_call_that_is_not_over_is_told_apart():
    assert times_of([("rollout[0] compute", "advance", 1.0, 2.0, None)]) == {("rollout[0]", "compute"): [(1.0, 2.0)]}


def test_tracks_that_are_no_actors_do_not_count():
    spans = [
        ("payload", "arena", 0.0, 1.0, None),
        ("flow", "step 1", 0.0, 1.0, None),
        ("observer[0]", "busy", 0, 1, None),
    ]
    assert busy(spans) == []


def test_recent_spans_are_found_however_many_there_are():
    tracer = Tracer()
    for number in range(5000):
        tracer.span("a[0]", "x", number - 0.5, float(number))
    assert [span[3] for span in recent(tracer, 4997.0)] == [4999.0, 4998.0, 4997.0]
    assert len(recent(tracer, 1000.0)) == 4000
    assert len(recent(tracer, 0.0)) == 5000


class Worker(Actor):
    @endpoint
    async def work(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    @endpoint
    async def grind(self) -> None:
        await self.compute(time.sleep, 0.02)


def test_a_step_tells_what_was_done_on_all_hosts_within_it():
    async def main():
        async with ActorSystem.local(2) as system:
            group = await system.spawn(Worker, hosts=[0, 1], name="worker")
            watch = await Watch.start(system)
            await group[0].work(5.0)  # before the step: not part of it
            watch.begins()
            await asyncio.gather(group[0].work(1.0), group[1].work(3.0))
            lap = await watch.ends("step 1")
            watch.begins()
            await group[1].work(0.5)
            return lap, await watch.ends("step 2")

    (first, second), _ = run_virtual(main())
    assert {(part.actor, part.intervals) for part in first.busy} == {
        ("worker[0]", ((5.0, 6.0),)),
        ("worker[1]", ((5.0, 8.0),)),
    }
    assert (first.start, first.end) == (5.0, 8.0)
    assert [(part.actor, part.intervals) for part in second.busy] == [("worker[1]", ((8.0, 8.5),))]


def test_a_look_shows_what_everybody_is_at():
    async def main():
        async with ActorSystem.local(2) as system:
            group = await system.spawn(Worker, hosts=[0, 1], name="worker")
            watch = await Watch.start(system)
            call = asyncio.ensure_future(group[1].work(10.0))
            await asyncio.sleep(4.0)
            moment = await watch.look()
            await call
            return moment

    moment, _ = run_virtual(main())
    assert [(state.actor, state.host, state.doing, state.since) for state in moment.actors] == [
        ("worker[0]", 0, "idle", None),
        ("worker[1]", 1, "running work", 4.0),
    ]


class Source(Actor):
    @endpoint
    async def numbers(self):
        for number in range(3):
            yield number
        await asyncio.sleep(5.0)

    @endpoint
    async def drain(self, numbers) -> int:
        return sum([number async for number in numbers])


def test_a_look_shows_queues_and_who_waits_for_them():
    async def main():
        async with ActorSystem.local(1) as system:
            source = await system.spawn(Source, name="source")
            sink = await system.spawn(Source, name="sink")
            watch = await Watch.start(system)
            stream = source.numbers()
            await asyncio.sleep(1.0)
            before = await watch.look()
            total = asyncio.ensure_future(sink[0].drain(stream))
            await asyncio.sleep(1.0)
            after = await watch.look()
            assert await total == 3
            return before, after

    (before, after), _ = run_virtual(main())
    queue = next(queue for queue in before.queues if queue.name.startswith("source.numbers"))
    assert (queue.put, queue.ready) == (3, 3)
    assert {state.actor: state.doing for state in after.actors}["sink[0]"] == "waiting for source.numbers"


async def test_a_computing_actor_says_what_it_computes():
    async with ActorSystem.local(1) as system:
        group = await system.spawn(Worker, name="worker")
        watch = await Watch.start(system)
        watch.begins()
        call = asyncio.ensure_future(group[0].grind())
        await asyncio.sleep(0.005)
        assert (await watch.look()).actors[0].doing == "computing sleep"
        await call
        lap = await watch.ends("step 1")
    assert [(part.actor, part.endpoint) for part in lap.busy] == [("worker[0]", "grind")]
    ((start, end),) = lap.busy[0].intervals
    assert end - start >= 0.019


async def test_without_tracing_a_step_still_has_its_time():
    async with ActorSystem.local(1, trace=False) as system:
        group = await system.spawn(Worker, name="worker")
        watch = await Watch.start(system)
        watch.begins()
        await group[0].work(0.01)
        lap = await watch.ends("step 1")
    assert lap.busy == ()
    assert lap.end - lap.start >= 0.009
