"""What a host's actors did since a moment ago: read off spans that ended, and off what is under way."""

from __future__ import annotations

import asyncio
import itertools
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf import Actor, ActorSystem, endpoint
from rlinf.runtime.base.clock import run_virtual
from rlinf.runtime.base.errors import StallError
from rlinf.runtime.observe.spans import CALLED, recent, union
from rlinf.runtime.system.observer import Watch
from tests.spans import call, compute, item

whole = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 12)).map(lambda pair: (float(pair[0]), float(sum(pair)))), max_size=12
)


def told(spans, start, end, seen=None):
    found = recent(spans, start, end, {} if seen is None else seen)
    return {(part.actor, part.endpoint): list(part.intervals) for part in found}


def test_it_waits_in_a_second_in_which_it_does_not_compute_if_it_was_seen_to_compute_before():
    seen = {}
    told([call("a[0]", "train", 0.0, 10.0), compute("a[0]", "train", "f", 2.0, 4.0)], 0.0, 10.0, seen)
    assert told([call("a[0]", "train", 0.0, 11.0)], 10.0, 11.0, seen) == {("a[0]", CALLED): [(10.0, 11.0)]}


def test_of_a_mapped_endpoint_items_count():
    seen = {}
    spans = [call("j[0]", "score", 0.0, 10.0), item("j[0]", "score", 3.0, 5.0, "x")]
    assert told(spans, 0.0, 10.0, seen)["j[0]", "score"] == [(3.0, 5.0)]
    assert ("j[0]", "score") not in told([call("j[0]", "score", 0.0, 11.0)], 10.0, 11.0, seen)


@given(whole, st.integers(1, 20))
def test_gaps_are_closed_and_nothing_else(times, gap):
    joined = union(times, float(gap))
    assert all(later[0] - earlier[1] >= gap for earlier, later in itertools.pairwise(joined))
    assert all(any(start <= one and other <= end for start, end in joined) for one, other in times)
    edges = {edge for pair in times for edge in pair}
    assert {edge for pair in joined for edge in pair} <= edges


@given(whole, st.lists(st.integers(1, 80).map(float), min_size=1, max_size=6))
def test_increments_add_up_to_the_whole(times, cuts):
    """However time is cut into seconds, the parts say the same as one look at the end would."""
    spans = [compute("a[0]", "train", "f", start, end) for start, end in times]
    at, cells = 0.0, set()
    for cut in sorted({*cuts, 80.0}):
        reaching = [span._replace(end=min(span.end, cut)) for span in spans if span.end >= at and span.start < cut]
        for start, end in told(reaching, at, cut).get(("a[0]", "train"), []):
            cells |= {*range(int(start), int(end))}
        at = cut
    assert cells == {cell for start, end in times for cell in range(int(start), int(end))}


class Worker(Actor):
    @endpoint
    async def work(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    @endpoint
    async def double(self, value: float) -> float:
        await asyncio.sleep(value)
        return 2 * value

    @endpoint
    async def numbers(self):
        for number in (1.0, 50.0):
            yield number

    @endpoint
    async def sum(self, numbers) -> float:
        return sum([number async for number in numbers])


def test_a_host_says_what_is_under_way_and_who_waits_for_queues_on_other_hosts():
    async def main():
        async with ActorSystem.local(2, serialize=True) as system:
            source = await system.spawn(Worker, hosts=[0], name="source")
            doubler = await system.spawn(Worker, hosts=[0], name="doubler")
            summer = await system.spawn(Worker, hosts=[1], name="summer")
            watch = await Watch.start(system)
            total = asyncio.ensure_future(summer[0].sum(doubler.double.map(source.numbers())))
            await asyncio.sleep(20.0)
            since = watch.now() - 5.0
            near, far = await watch.look_back(0, since), await watch.look_back(1, since)
            assert await total == 102.0
            return near, far

    (back, beyond), _ = run_virtual(main())
    busy = {(part.actor, part.endpoint): sum(end - start for start, end in part.intervals) for part in back.busy}
    assert busy["doubler[0]", "double"] == pytest.approx(5.0), "an item that is not done yet"
    assert busy["doubler[0]", CALLED] == pytest.approx(5.0)
    assert [part.endpoint for part in beyond.busy if part.actor == "summer[0]"] == [CALLED], "it waits"
    assert {state.actor: state.doing for state in beyond.actors}["summer[0]"] == "waiting for doubler.double"
    (queue,) = [queue for queue in back.queues if queue.name.startswith("doubler.double")]
    assert (queue.waiting_to_take, queue.waiting_to_put) == (("summer[0]",), ())
    assert back.memory.used > 1_000_000
    assert back.memory.total is not None
    assert back.memory.owner != beyond.memory.owner, "as if they were two processes"
    assert {state.actor: state.doing for state in back.actors}["doubler[0]"] == "running double"


async def test_a_computation_that_goes_on_is_busy_up_to_now():
    begun, seen = threading.Event(), threading.Event()

    def thinking():
        begun.set()
        assert seen.wait(30)

    class Thinker(Actor):
        @endpoint
        async def think(self) -> None:
            await self.compute(thinking)

    async with ActorSystem.local(1) as system:
        group = await system.spawn(Thinker, name="thinker")
        watch = await Watch.start(system)
        call = asyncio.ensure_future(group[0].think())
        assert await asyncio.to_thread(begun.wait, 30)
        back = await watch.look_back(0, watch.now() - 1.0)
        seen.set()
        await call
    (part,) = [part for part in back.busy if part.endpoint == "think"]
    assert part.intervals[-1][1] == pytest.approx(back.end)


def test_a_program_that_is_paused_has_not_stalled():
    async def main(paused):
        async with ActorSystem.local(1, stall_after=10.0) as system:
            channel = await system.channel("orders")
            system.paused = paused
            asyncio.get_running_loop().call_later(100.0, channel.put_nowait, "go on")
            return await channel.get()

    assert run_virtual(main(paused=True))[0] == "go on"
    with pytest.raises(StallError, match=r"nothing.*moved"):
        run_virtual(main(paused=False))
