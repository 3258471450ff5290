"""Calls that would keep devices from each other: awaited from within each other, or ended before they began.

In virtual time: what waits for ever is a `Deadlock` at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlinf import Stream, endpoint
from rlinf.runtime.base.errors import ActorDied
from tests.runtime.programs.roles import Role, book, role, run

both_worlds = pytest.mark.parametrize("serialize", [False, True], ids=["local", "serialize"])


class Caller(Role):
    """Its device calls await others."""

    @endpoint(device=True)
    async def outer(self, *inner: Any) -> Any:
        """Works, makes a call that some (actor, endpoint, arguments...) name, and works again."""
        await self.work()
        actor, method, *args = inner
        got = await getattr(actor, method)(*args)
        await self.work()
        return got

    @endpoint(device=True)
    async def outer_of_rank(self, group: Any) -> int:
        await self.work()
        await group[self.rank].compute_on()
        await self.work()
        return self.rank

    @endpoint(device=True)
    async def outer_of_item(self, item: int) -> int:
        await self.work()
        return await self.other.compute_on(item)

    @endpoint(device=True)
    async def promising(self, other: Any) -> AsyncIterator[list[Any]]:
        for number in (0, 2):
            yield [other.compute_on(number), other.compute_on(number + 1)]

    @endpoint
    async def use_other(self, other: Any) -> None:
        self.other = other

    @endpoint(device=True)
    async def busy_outer(self, other: Any) -> None:
        """What it computes beside keeps the devices."""

        async def compute() -> None:
            async with self.computing():
                await self.work(5.0)

        beside = asyncio.create_task(compute())
        await asyncio.sleep(0.1)
        await other.compute_on()
        await beside

    def computing(self) -> Any:
        (call,) = [call for call in self._cell.calls if call.name.endswith("busy_outer")]
        assert call.lease is not None
        return call.lease.computing()


async def caller(system: Any, name: str, devices: Any, **more: Any) -> Any:
    hosts = [rank % system.hosts for rank in range(len(devices))]
    return await system.spawn(Caller, **({"hosts": hosts, "name": name, "devices": devices} | more))


# A call within a call ----------------------------------------------------------------------------------------------


@both_worlds
def test_a_device_call_may_await_one_that_needs_its_device(serialize):
    async def main(system):
        a = await caller(system, "a", [0], resident_bytes=60)
        b = await role(system, "b", [0], hosts=[1], resident_bytes=60)
        assert await a[0].outer(b[0], "compute_on", 7) == 7

    assert run(main, memory={0: 100}, serialize=serialize) == pytest.approx(3.01)  # one of them at a time
    assert book.order() == ["a", "b", "a"]
    assert book.moves == ["-a[0]", "-b[0]", "+a[0]", "-a[0]", "+b[0]", "-b[0]", "+a[0]"]


@both_worlds
def test_a_rank_may_await_a_call_of_its_own_within_one_of_its_group(serialize):
    async def main(system):
        a = await caller(system, "a", [0, 1])
        assert await a.outer_of_rank(a) == [0, 1]

    run(main, serialize=serialize)


def test_a_group_may_await_another_group_on_the_same_devices():
    async def main(system):
        a, b = await caller(system, "a", [0, 1]), await role(system, "b", [1, 0])
        assert await a.outer(b, "compute_on", 3) == [[3, 3], [3, 3]]

    run(main)


@both_worlds
@pytest.mark.parametrize("concurrency", [1, 3])
def test_an_endpoint_that_is_mapped_may_await_a_call_that_needs_its_device(serialize, concurrency):
    async def main(system):
        a = await caller(system, "a", [0])
        b = await role(system, "b", [0], hosts=[1])
        await a[0].use_other(b[0])
        found = await a.outer_of_item.map(Stream.of(range(6)), concurrency=concurrency).collect()
        assert sorted(found) == list(range(6))

    run(main, serialize=serialize)


def test_what_a_call_computes_beside_is_finished_before_the_call_that_it_awaits_gets_the_device():
    async def main(system):
        a, b = await caller(system, "a", [0]), await role(system, "b", [0])
        await a[0].busy_outer(b[0])

    assert run(main) == pytest.approx(6.01)


def test_a_device_call_that_awaits_another_keeps_its_device_if_nobody_wants_it():
    async def main(system):
        a, b = await caller(system, "a", [0]), await role(system, "b", [1])
        await a[0].outer(b[0], "compute_on")
        spans = system._host.tracer.dump()
        assert len([span for span in spans if (span.kind, span.what) == ("lease", "a[0].outer")]) == 1

    assert run(main) == 3.0


def test_a_device_call_that_is_cancelled_while_it_awaits_another_leaves_no_lease():
    async def main(system):
        a, b = await caller(system, "a", [0]), await role(system, "b", [0], seconds=10.0)
        outer = asyncio.ensure_future(a[0].outer(b[0], "compute_on"))
        await asyncio.sleep(3.0)
        outer.cancel()
        await b[0].compute_on()

    assert run(main) == pytest.approx(13.0)


def test_a_generator_may_yield_what_other_calls_on_its_device_will_return():
    async def main(system):
        a, b = await caller(system, "a", [0]), await role(system, "b", [0])
        assert await a[0].promising(b[0]).collect() == [[0, 1], [2, 3]]

    run(main)


chains = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(chains=chains, devices=st.lists(st.sampled_from([0, 1]), min_size=4, max_size=4), tight=st.booleans())
@example(chains=[[0, 1, 0], [1, 0, 1]], devices=[0, 1, 0, 0], tight=True)
def test_however_calls_await_each_other_nobody_waits_for_ever_and_no_device_is_used_by_two(chains, devices, tight):
    """Each chain is of actors of which every one awaits the next; four of them share two devices."""

    async def main(system):
        actors = [
            (await caller(system, f"a{k}", [device], hosts=[k % 2], resident_bytes=60 if tight else 10, seconds=0.3))[0]
            for k, device in enumerate(devices)
        ]

        async def follow(number: int, chain: list[int]) -> None:
            *others, last = chain
            inner: list[Any] = [actors[last], "compute_on", number]
            for k in reversed(others):
                inner = [actors[k], "outer", *inner]
            actor, method, *args = inner
            assert await getattr(actor, method)(*args) == number

        await asyncio.gather(*(follow(number, chain) for number, chain in enumerate(chains)))

    run(main, memory={0: 100, 1: 100})


# Ranks that end before they ask ------------------------------------------------------------------------------------


class Unreadable:
    """Cannot be read where it arrives."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise ValueError("these bytes are no argument")


def test_a_rank_whose_arguments_cannot_be_read_does_not_keep_its_siblings_waiting():
    async def main(system):
        a = await role(system, "a", [0, 1])
        calls = a.each.compute_on(["fine", Unreadable()])
        assert await calls[0] == "fine"
        with pytest.raises(ValueError, match=r"these.*argument"):
            await calls[1]

    assert run(main, serialize=True) == 1.0


@both_worlds
def test_a_rank_that_is_cancelled_before_it_has_its_arguments_does_not_keep_its_siblings_waiting(serialize):
    async def main(system):
        a, slow = await role(system, "a", [0, 1]), await role(system, "slow", [2], seconds=100.0)
        late = slow[0].aside()
        calls = a.each.compute_on(["fine", late])
        first = asyncio.ensure_future(_value(calls[0]))
        await asyncio.sleep(1.0)
        calls[1].cancel()
        assert await first == "fine"
        assert asyncio.get_running_loop().time() == 2.0
        late.cancel()

    run(main, serialize=serialize)


async def _value(promise: Any) -> Any:
    return await promise


@both_worlds
def test_a_rank_that_was_closed_does_not_keep_its_siblings_waiting(serialize):
    async def main(system):
        a = await role(system, "a", [0, 1])
        await system.kill(a[1:])
        calls = a.compute_on("fine")
        assert await calls[0] == "fine"
        with pytest.raises(ActorDied, match=r"a\[1\].*1.*closed"):
            await calls[1]

    run(main, serialize=serialize)


@pytest.mark.parametrize("when", ["before the call", "after it"])
def test_a_rank_whose_host_is_lost_does_not_keep_its_siblings_waiting(when):
    async def main(system):
        a, slow = await role(system, "a", [0, 1], hosts=[0, 1]), await role(system, "slow", [2], hosts=[0])
        if when == "before the call":
            await system._network.system(1)._host.transport.close(False)
        calls = a.each.compute_on(["fine", slow[0].aside()])
        first = asyncio.ensure_future(_value(calls[0]))
        await asyncio.sleep(0.5)
        if when == "after it":
            await system._network.system(1)._host.transport.close(False)
        assert await first == "fine"
        with pytest.raises(ActorDied):
            await calls[1]

    run(main)


def test_a_group_call_whose_maker_is_lost_leaves_nothing():
    async def main(system):
        a = await role(system, "a", [0, 1], hosts=[0, 2])
        slow = await role(system, "slow", [2], hosts=[0], seconds=100.0)
        maker = await system.spawn(Maker, hosts=[1], name="maker")
        making = maker[0].make(a, slow[0])
        making.want()
        await asyncio.sleep(0.5)
        await system._network.system(1)._host.transport.close(False)
        await a.compute_on()
        assert making.exception() is not None

    run(main, hosts=3, serialize=True)


class Maker(Role):
    @endpoint
    async def make(self, group: Any, slow: Any) -> None:
        await group.each.compute_on(["fine", slow.aside()])


def test_a_rank_that_cannot_be_made_does_not_keep_the_others_in_their_setup():
    async def main(system):
        with pytest.raises(OSError, match=r"such weights"):
            await system.spawn(HalfBroken, hosts=[0, 1], name="half", devices=[0, 1])
        await role(system, "other", [0, 1])

    run(main, serialize=True)


class HalfBroken(Role):
    def __init__(self) -> None:
        HalfBroken.made += 1
        if HalfBroken.made == 2:
            raise OSError("no such weights")

    made = 0
