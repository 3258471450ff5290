"""How finely roles that share a device take it: `items` and `lease_items`, in virtual time on modelled devices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf import Stream, endpoint
from rlinf.runtime.base.calls import current_call
from rlinf.runtime.base.errors import UserError
from tests.runtime.programs.roles import Role, book, role, run

both_worlds = pytest.mark.parametrize("serialize", [False, True], ids=["local", "serialize"])


def trickle(count: int, pause: float = 1.0) -> Stream[int]:
    """Items that come one by one, so that whoever works on them has to wait for each."""

    async def items() -> AsyncIterator[int]:
        for number in range(count):
            await asyncio.sleep(pause)
            yield number

    return Stream.of(items())


def turns(name: str) -> list[int]:
    """How many items each turn of a role on the device had."""
    names = [used.partition("[")[0] for _, _, _, used in sorted(book.uses)]
    return [len(list(group)) for who, group in groupby(names) if who == name]


async def chain(system: Any, count: int, *, mapped: bool = False, **consumer: Any) -> Any:
    """A producer and a consumer on one device, and items that trickle into it."""
    a = await role(system, "a", [0], seconds=0.05)
    b = await role(system, "b", [0], hosts=[1], seconds=0.05, **consumer)
    made = a.generate(trickle(count))
    return await (b.compute_on.map(made).collect() if mapped else b[0].consume(made))


@both_worlds
@pytest.mark.parametrize("mapped", [False, True], ids=["call", "map"])
def test_a_consumer_of_eight_items_takes_the_device_once_where_that_of_one_item_takes_it_eight_times(serialize, mapped):
    found = {}
    for items in (1, 8):

        async def main(system, items=items):
            assert await chain(system, 16, mapped=mapped, items=items) == list(range(16))

        run(main, serialize=serialize)
        found[items] = turns("b")
    assert found[1] == [1] * 16
    assert found[8] == [8, 8]


@both_worlds
def test_a_call_that_reads_ahead_in_a_stage_of_its_own_waits_for_as_many(serialize):
    async def main(system):
        a = await role(system, "a", [0], seconds=0.05)
        b = await system.spawn(Ahead, hosts=[1], name="b", devices=[0], seconds=0.05, items=4)
        assert await b[0].consume(a.generate(trickle(14))) == list(range(14))

    run(main, serialize=serialize)
    assert turns("b") == [4, 4, 4, 2]


class Ahead(Role):
    """A task of its host reads its input, as that of a trainer whose ranks get their work in rounds."""

    @endpoint(device=True)
    async def consume(self, items: Any) -> list[Any]:
        async def read() -> AsyncIterator[Any]:
            async for item in items:
                yield item

        return await super().consume(Stream.of(read()))


def test_the_end_of_a_stream_is_enough_however_few_its_items():
    async def main(system):
        assert await chain(system, 3, items=8) == [0, 1, 2]
        for group in ("a", "b"):
            await system.kill(await system.get(group))
        assert await chain(system, 3, items=8, mapped=True) == [0, 1, 2]

    run(main)
    assert turns("b") == [3, 3]


def test_a_stream_without_items_takes_no_longer_than_its_end():
    async def main(system):
        b = await role(system, "b", [0], items=8)
        assert await b[0].consume(trickle(0)) == []
        assert await b.compute_on.map(trickle(0)).collect() == []

    assert run(main) == 0.0


def test_several_workers_of_a_map_wait_for_the_items_of_all_together():
    """Each has one in hand: the four of them are what the lease is taken for, and nobody waits for a fifth."""

    async def main(system):
        other = await role(system, "other", [0], seconds=0.2)
        b = await role(system, "b", [0], seconds=0.2, items=4)
        gate = await system.channel("gate")

        async def items() -> AsyncIterator[int]:
            async for item in gate:
                yield item

        mapped = asyncio.ensure_future(b.compute_on.map(Stream.of(items()), concurrency=4).collect())
        for number in range(4):
            await asyncio.sleep(1.0)
            await gate.put(number)
        await asyncio.sleep(1.0)
        assert turns("b") == [4]  # though the stream has not ended
        await other[0].compute_on()
        gate.close()
        assert sorted(await mapped) == [0, 1, 2, 3]

    run(main)


async def _consume(group: Any, items: Any) -> Any:
    return await group[0].consume(items)


def test_a_call_that_gave_its_devices_away_and_is_cancelled_while_it_waits_for_more_items_gives_them_back():
    async def main(system):
        a, b, c = [await role(system, name, [0], seconds=0.2, items=k) for name, k in (("a", 1), ("b", 4), ("c", 1))]
        items = a.generate(trickle(9))
        cancelled = asyncio.ensure_future(_consume(b, items))
        await asyncio.sleep(7.0)  # four are done, two of the next four have come
        assert turns("b") == [4]
        cancelled.cancel()
        assert await c[0].consume(items) == list(range(4, 9))

    run(main)


# Offering ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 3, 8])
@both_worlds
def test_a_map_offers_its_device_after_so_many_items(serialize, most):
    async def main(system):
        a, b = [
            await role(system, name, [0], hosts=[host], seconds=0.3, lease_items=most) for host, name in enumerate("ab")
        ]
        done = await asyncio.gather(*(group.compute_on.map(Stream.of(range(24))).collect() for group in (a, b)))
        assert [len(items) for items in done] == [24, 24]

    run(main, serialize=serialize)
    assert turns("a") == turns("b") == [most] * (24 // most)


@pytest.mark.parametrize("endpoint", ["consume", "generate"])
@both_worlds
def test_a_call_with_work_at_hand_offers_its_device_after_so_many_items(serialize, endpoint):
    """With `lease_items` unset it keeps the device until it is dry."""

    async def work(group):
        if endpoint == "consume":
            return await group[0].consume(Stream.of(range(12)))
        return await group[0].generate(range(12)).collect()

    found = {}
    for most in (None, 4):

        async def main(system, most=most):
            a, b = [
                await role(system, name, [0], hosts=[host], seconds=0.3, lease_items=most)
                for host, name in enumerate("ab")
            ]
            assert await asyncio.gather(work(a), work(b)) == [list(range(12))] * 2

        run(main, serialize=serialize)
        found[most] = turns("a") + turns("b")
    assert found == {None: [12, 12], 4: [4] * 6}


def test_a_device_that_nobody_waits_for_is_not_given_away():
    async def main(system):
        a = await role(system, "a", [0], seconds=0.3, lease_items=2)
        await a[0].consume(Stream.of(range(12)))
        spans = system._host.tracer.dump()
        assert len([span for span in spans if span.kind == "lease" and span.what == "a[0].consume"]) == 1

    run(main)


class Engine(Role):
    """Its device works beside the call, as an engine that batches requests does."""

    @endpoint(device=True)
    async def generate(self, items: Any) -> AsyncIterator[int]:
        call = current_call.get()
        made: asyncio.Queue[int] = asyncio.Queue()

        async def advance() -> None:
            for number in items:
                async with call.lease.computing():
                    await self.work(0.1)
                made.put_nowait(number)

        working = asyncio.create_task(advance())
        for _ in items:
            yield await made.get()
        await working


def test_what_an_actor_computes_beside_is_finished_before_it_offers_its_device():
    async def main(system):
        engine = await system.spawn(Engine, hosts=[0], name="engine", devices=[0], lease_items=2)
        other = await role(system, "other", [0], seconds=0.1)
        made = asyncio.ensure_future(engine[0].generate(range(6)).collect())
        while not made.done():
            await other[0].compute_on()
        assert await made == list(range(6))

    run(main)  # its book sees that the two never use the device at the same time
    assert max(turns("engine")) <= 3
    assert len(turns("other")) >= 2


def test_ranks_that_work_in_step_keep_their_devices_while_they_have_work():
    """One of them cannot leave: the others may need it to come to their own turn."""

    async def items() -> AsyncIterator[int]:
        for number in range(8):
            yield number
        await asyncio.sleep(100.0)  # that there are no more is known late

    async def main(system):
        pair = await system.spawn(InStep, hosts=[0, 1], name="pair", devices=[0, 1], items=3, lease_items=1)
        other = await role(system, "other", [0], seconds=0.1)
        working = asyncio.ensure_future(_call(pair.together, Stream.of(items()).deal(2)))
        await asyncio.sleep(0.15)
        await other[0].compute_on()
        assert asyncio.get_running_loop().time() < 1.0
        assert await working == [4, 4]

    run(main)
    assert turns("pair") == [8]


async def _call(endpoint: Any, streams: Any) -> Any:
    return await endpoint(streams)


class InStep(Role):
    """Its ranks meet after every item."""

    meeting: asyncio.Barrier | None = None

    @endpoint(device=True)
    async def together(self, streams: Any) -> int:
        InStep.meeting = InStep.meeting or asyncio.Barrier(2)
        count = 0
        async for _ in streams[self.rank]:
            await self.work(0.1)
            await InStep.meeting.wait()
            count += 1
        InStep.meeting = None
        return count


# Any program -------------------------------------------------------------------------------------------------------

few = st.integers(1, 9)
stage = st.fixed_dictionaries(
    {
        "device": st.integers(0, 1),
        "items": few,
        "lease_items": st.none() | few,
        "capacity": st.sampled_from([1, 3, 256]),
        "how": st.sampled_from(["generate", "map", "batch", "wide"]),
    }
)


@settings(max_examples=60, deadline=None)
@given(
    stages=st.lists(stage, min_size=1, max_size=3),
    last=stage,
    count=st.integers(0, 20),
    pause=st.sampled_from([0.0, 0.3]),
    first=st.none() | st.integers(0, 12),
    hasty=st.none() | st.integers(0, 40),
)
def test_whatever_the_granularity_every_item_comes_through_and_nobody_waits_for_ever(
    stages, last, count, pause, first, hasty
):
    """Streams that end early, consumers that are cancelled, fewer items than are waited for, tiny streams:
    virtual time tells at once when nothing can ever happen again."""

    async def main(system):
        stream = trickle(count, pause)
        for number, each in enumerate(stages):
            stream = _through(await _role(system, f"s{number}", each), stream, each)
        if first is not None:
            stream = stream.take(first)
        consumer = await _role(system, "consumer", last)
        if hasty is not None:
            leaving = await _role(system, "leaving", last)
            task = asyncio.ensure_future(_consume(leaving, stream))
            await asyncio.sleep(0.1 * hasty)
            task.cancel()
            await asyncio.wait([task])
        got = await consumer[0].consume(stream)
        expected = count if first is None else min(first, count)
        if hasty is None:
            assert len(got) == expected
        assert len(set(got)) == len(got) <= expected

    run(main)


async def _role(system: Any, name: str, given: dict[str, Any]) -> Any:
    return await role(
        system, name, [given["device"]], seconds=0.1, items=given["items"], lease_items=given["lease_items"]
    )


def _through(group: Any, stream: Any, given: dict[str, Any]) -> Any:
    if given["how"] == "generate":
        return group[0].generate.bounded(given["capacity"])(stream)
    if given["how"] == "batch":
        return group.batch.bounded(given["capacity"]).map(stream, batch=4)
    return group.compute_on.bounded(given["capacity"]).map(stream, concurrency=4 if given["how"] == "wide" else None)


# Bad numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numbers", [{"items": 0}, {"lease_items": 0}, {"items": 1.5}, {"items": None}])
def test_a_granularity_that_makes_no_sense_is_refused(numbers):
    async def main(system):
        (name,) = numbers
        with pytest.raises(UserError, match=f"{name}={numbers[name]}:.*whole number"):
            await role(system, "a", [0], **numbers)

    run(main)
