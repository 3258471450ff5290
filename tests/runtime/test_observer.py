"""Where the time of a step went and who is at what: read off spans, on every host, on one clock."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf import Actor, ActorSystem, endpoint
from rlinf.runtime.base.clock import run_virtual
from rlinf.runtime.observe.perfetto import offsets
from rlinf.runtime.observe.spans import Tracer, busy, union, without
from rlinf.runtime.system.host_service import Service
from rlinf.runtime.system.observer import Watch
from tests.growth import in_one_pass
from tests.spans import call, compute, payload, step, wait, wait_for_lease

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


def test_what_is_left_is_found_in_one_pass():
    """Taking 50,000 holes out of 50,000 intervals copied what was left of the holes each time: 20 s."""

    def holes(count):
        many = [(float(at), at + 0.5) for at in range(count)]
        return lambda: list(without(many, [(start + 0.1, start + 0.2) for start, _ in many]))

    assert len(holes(1000)()) == 2000
    assert in_one_pass(holes, 6000)


def test_a_step_of_many_calls_and_computations_is_read_in_one_pass():
    def calls(many):
        spans = [call("a[0]", "work", at, at + many) for at in map(float, range(many))]
        spans += [compute("a[0]", "other", "f", at, at + 0.5) for at in map(float, range(many))]
        spans += [wait("a[0]", "work", "q", at, at + 0.5) for at in map(float, range(many))]
        return lambda: busy(spans)

    assert len(calls(1000)()) == 2
    assert in_one_pass(calls, 2500)


def times_of(spans) -> dict[tuple[str, str], list[tuple[float, float]]]:
    return {(part.actor, part.endpoint): list(part.intervals) for part in busy(spans)}


def test_an_endpoint_that_computes_is_busy_only_while_it_computes():
    spans = [
        call("trainer[0]", "train", 0.0, 10.0),
        compute("trainer[0]", "train", "learn", 1.0, 2.0),
        compute("trainer[0]", "train", "learn", 2.0, 4.0),
        call("trainer[0]", "weights", 10.0, 12.0),
        compute("trainer[0]", "weights", "pack", 10.5, 11.0),
    ]
    assert times_of(spans) == {("trainer[0]", "train"): [(1.0, 4.0)], ("trainer[0]", "weights"): [(10.5, 11.0)]}


def test_an_endpoint_whose_work_is_elsewhere_is_busy_while_it_waits_for_no_queue_and_no_device():
    spans = [
        call("rollout[0]", "generate", 0.0, 10.0),
        wait("rollout[0]", "generate", "stream@0.1", 1.0, 2.0),
        wait("rollout[0]", "generate", "space in rollout.generate@0.2", 5.0, 6.0),
        wait_for_lease("rollout[0]", "generate", 8.0, 9.0),
    ]
    assert times_of(spans) == {("rollout[0]", "generate"): [(0.0, 1.0), (2.0, 5.0), (6.0, 8.0), (9.0, 10.0)]}


def test_what_is_computed_while_no_call_runs_is_told_apart():
    assert times_of([compute("rollout[0]", "", "advance", 1.0, 2.0)]) == {("rollout[0]", "compute"): [(1.0, 2.0)]}


def test_tracks_that_are_no_actors_do_not_count():
    assert busy([payload("arena", 0.0), step(1, 0.0, 1.0), wait("flow", "", "mail", 0.0, 1.0)]) == []


def test_recent_spans_are_found_however_many_there_are():
    tracer = Tracer()
    for number in range(5000):
        tracer.span("call", "a[0]", "x", "flow", number - 0.5, float(number))
    assert [span.end for span in tracer.ended_since(4997.0)] == [4999.0, 4998.0, 4997.0]
    assert len(tracer.ended_since(1000.0)) == 4000
    assert len(tracer.ended_since(0.0)) == 5000


class Worker(Actor):
    @endpoint
    async def work(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    @endpoint
    async def grind(self, began: threading.Event, go_on: threading.Event) -> None:
        await self.compute(hold, began, go_on)


def hold(began: threading.Event, go_on: threading.Event) -> None:
    began.set()
    go_on.wait()


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


class Engine(Actor):
    """Its loop computes for whatever call runs, as an engine's does."""

    async def setup(self) -> None:
        self.asked: asyncio.Queue[asyncio.Future[None]] = asyncio.Queue()
        self.loop = asyncio.create_task(self.serve())

    async def serve(self) -> None:
        while True:
            answer = await self.asked.get()
            await self.compute(time.sleep, 0.002)
            answer.set_result(None)

    @endpoint
    async def generate(self) -> None:
        self.asked.put_nowait(answer := asyncio.get_running_loop().create_future())
        await answer
        await self.compute(time.sleep, 0.002)

    async def close(self) -> None:
        self.loop.cancel()


class Serves(Actor):
    """Has a server answer, and computes a little itself."""

    @endpoint
    async def answer(self, seconds: float) -> None:
        await self.compute(int)
        async with self.working():
            await asyncio.sleep(seconds)
        await asyncio.sleep(1.0)


def test_work_of_a_server_counts_as_that_of_the_endpoint_that_asks_it():
    async def main():
        async with ActorSystem.local() as system:
            serves = await system.spawn(Serves, name="serves")
            watch = await Watch.start(system)
            watch.begins()
            await asyncio.gather(*(serves.answer(seconds) for seconds in (2.0, 5.0)))
            return await watch.ends("step")

    lap, _ = run_virtual(main())
    (part,) = [part for part in lap.busy if part.endpoint == "answer"]
    assert sum(end - start for start, end in part.intervals) == pytest.approx(5.0, abs=0.01)
    assert lap.end - lap.start == pytest.approx(6.0, abs=0.01)


async def test_a_loop_that_outlives_its_call_computes_for_the_call_that_runs():
    async with ActorSystem.local(1) as system:
        group = await system.spawn(Engine, name="engine")
        call = group[0].generate()
        await call
        found = [span for span in system._host.tracer.dump() if span.kind == "compute"]
    assert [(span.actor, span.endpoint, span.what) for span in found] == [("engine[0]", "generate", "sleep")] * 2


@pytest.mark.parametrize("spans", [1, 6000])
def test_a_step_of_any_length_is_read_and_keeps_the_loop_going(spans):
    async def main():
        async with ActorSystem.local(2) as system:
            watch = await Watch.start(system)
            watch.begins()
            for number in range(spans):
                system._host.tracer.span("call", "a[0]", "x", "flow", number * 2e-6, number * 2e-6 + 1e-6)
            await asyncio.sleep(1.0)
            return await watch.ends("step 1")

    lap, _ = run_virtual(main())
    assert [(part.actor, len(part.intervals)) for part in lap.busy] == [("a[0]", spans)]


@pytest.mark.parametrize("machines", [1, 40])
def test_clocks_of_other_machines_are_compared_together(machines, monkeypatch):
    """Each answer takes 10 ms of virtual time, five answers a machine: together they take as long as one machine."""

    async def main():
        async with ActorSystem.local(2 * machines + 1) as system:
            host = system._host
            for number in range(1, 2 * machines + 1):
                host.places[number] = dataclasses.replace(host.places[number], machine=f"m{number // 2}")
            asked = []

            async def clock(self) -> float:
                asked.append(self._cell.host.rank)
                await asyncio.sleep(0.01)
                return self._cell.host.now() - 100.0

            monkeypatch.setattr(Service, "clock", endpoint(clock))
            began = host.now()
            ahead = await offsets(host, range(2 * machines + 1))
            return host.now() - began, ahead, asked

    (took, ahead, asked), _ = run_virtual(main())
    assert took == pytest.approx(0.05)
    assert len(asked) == 5 * (machines + 1)
    assert ahead.pop(0) == 0.0
    assert list(ahead.values()) == pytest.approx([100.0] * 2 * machines, abs=0.006)


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
        began, go_on = threading.Event(), threading.Event()
        call = asyncio.ensure_future(group[0].grind(began, go_on))
        await asyncio.to_thread(began.wait)
        seen = system._host.now()
        doing = (await watch.look()).actors[0].doing
        go_on.set()
        await call
        lap = await watch.ends("step 1")
    assert doing == "computing hold"
    assert [(part.actor, part.endpoint) for part in lap.busy] == [("worker[0]", "grind")]
    ((start, end),) = lap.busy[0].intervals
    assert start <= seen <= end


async def test_without_tracing_a_step_still_has_its_time():
    async with ActorSystem.local(1, trace=False) as system:
        group = await system.spawn(Worker, name="worker")
        watch = await Watch.start(system)
        watch.begins()
        await group[0].work(0.01)
        lap = await watch.ends("step 1")
    assert lap.busy == ()
    assert lap.end - lap.start >= 0.009
