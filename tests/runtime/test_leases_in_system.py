"""Device endpoints run while their actors hold their devices: alone, in turn, and without ever starving each other.

All in virtual time, on modelled actors whose work takes seconds.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rlinf import Actor, ActorSystem, Stream, endpoint
from rlinf.runtime.actor.host import Host
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.transport.link import CALL, REPLIES, REPLY, Link
from tests.runtime.programs.roles import Role, book, role, run
from tests.runtime.worlds import until

pytestmark = pytest.mark.worlds("local", "serialize", "lane")

both_worlds = pytest.mark.parametrize("serialize", [False, True], ids=["local", "serialize"])


@both_worlds
def test_two_roles_on_one_device_take_turns(serialize):
    async def main(system):
        a, b = await role(system, "a", [0]), await role(system, "b", [0], hosts=[1])
        await asyncio.gather(*(group[0].compute_on() for group in (a, b, a, b)))

    assert run(main, serialize=serialize) == 2.0  # calls of the one that has the device join it while nobody waits
    assert book.order() == ["a", "b"]


@both_worlds
def test_roles_on_different_devices_do_not_wait_for_each_other(serialize):
    async def main(system):
        a, b = await role(system, "a", [0]), await role(system, "b", [1])
        await asyncio.gather(a[0].compute_on(), b[0].compute_on())

    assert run(main, serialize=serialize) == 1.0


def test_endpoints_without_a_device_never_wait():
    async def main(system):
        a, b = await role(system, "a", [0]), await role(system, "b", [0])
        await asyncio.gather(a[0].compute_on(), b[0].aside(), b[0].aside())

    assert run(main) == 1.0


def test_actors_without_declared_devices_never_wait():
    async def main(system):
        a = await system.spawn(Role, hosts=[0], name="a")
        b = await system.spawn(Role, hosts=[0], name="b")
        await asyncio.gather(a[0].compute_on(), b[0].compute_on())

    assert run(main) == 1.0


def test_a_failing_endpoint_gives_its_devices_back():
    async def main(system):
        a, b = await role(system, "a", [0]), await role(system, "b", [0])
        with pytest.raises(ValueError, match=r"device.*wrong"):
            await a[0].fail()
        await b[0].compute_on()

    assert run(main) == 2.0


# Memory ----------------------------------------------------------------------------------------------------------


def test_roles_that_fit_together_stay_loaded():
    async def main(system):
        a = await role(system, "a", [0], resident_bytes=40, parked_bytes=5)
        b = await role(system, "b", [0], resident_bytes=60, parked_bytes=5)
        for _ in range(3):
            await a[0].compute_on()
            await b[0].compute_on()

    run(main, memory={0: 100})
    assert book.moves == []  # what `setup` loads stays


@both_worlds
def test_a_role_is_moved_only_when_the_next_does_not_fit_beside_it(serialize):
    async def main(system):
        a = await role(system, "a", [0], resident_bytes=60, parked_bytes=10, move=1.0)
        b = await role(system, "b", [0], hosts=[1], resident_bytes=60, parked_bytes=10, move=1.0)
        await a[0].compute_on()
        await a[0].compute_on()
        await b[0].compute_on()
        await a[0].aside()  # needs no device

    run(main, memory={0: 100}, serialize=serialize)
    assert book.moves == ["-a[0]", "-b[0]", "+a[0]", "-a[0]", "+b[0]"]


def test_a_role_that_can_never_fit_is_refused_with_the_fix():
    async def main(system):
        await role(system, "small", [0], resident_bytes=30, parked_bytes=30)
        with pytest.raises(UserError, match=r"'big\[0\]'.*0.*give"):
            await role(system, "big", [0], resident_bytes=80)
        await role(system, "big", [0], resident_bytes=70)  # the name is free

    run(main, memory={0: 100})


def test_ranks_that_cannot_be_loaded_together_are_refused_with_the_fix():
    async def main(system):
        with pytest.raises(UserError, match=r"pair\[0\], pair\[1\].*0 together.*120.*100"):
            await role(system, "pair", [0, 0], resident_bytes=60)

    run(main, memory={0: 100})


# Groups ----------------------------------------------------------------------------------------------------------


@both_worlds
def test_group_calls_get_the_devices_of_all_ranks_at_once(serialize):
    async def main(system):
        a = await role(system, "a", [0, 1])
        b = await role(system, "b", [1, 0])  # in the opposite order
        await asyncio.gather(*(group.compute_on() for group in (a, b) * 5))

    assert run(main, serialize=serialize) in (2.0, 10.0)
    starts = {}
    for start, _, device, name in book.uses:
        starts.setdefault((start, name[0]), set()).add(device)
    assert all(devices == {0, 1} for devices in starts.values())


def test_a_rank_whose_argument_needs_the_device_of_the_others_is_not_starved():
    """The group asks for its devices when all its ranks are ready, so that rank 1's argument can still be computed."""

    async def main(system):
        judge = await role(system, "judge", [0, 1])
        rollout = await role(system, "rollout", [1])
        busy = rollout[0].compute_on("first")
        assert await judge.each.compute_on([busy, rollout[0].compute_on("second")]) == ["first", "second"]

    run(main)


def test_a_slice_of_a_group_takes_the_devices_of_its_ranks_alone():
    async def main(system):
        a = await role(system, "a", [0, 1, 2])
        b = await role(system, "b", [2])
        await asyncio.gather(a[:2].compute_on(), b[0].compute_on())

    assert run(main, hosts=3) == 1.0


# Streams ---------------------------------------------------------------------------------------------------------


@both_worlds
def test_a_map_keeps_its_lease_while_there_is_work_and_gives_it_back_when_it_would_wait(serialize):
    async def main(system):
        a, b = await role(system, "a", [0], seconds=0.01), await role(system, "b", [0], hosts=[1], seconds=0.01)
        first = a.compute_on.map(Stream.of(range(20)))
        second = b.compute_on.map(first)
        assert sorted(await second.collect()) == list(range(20))

    run(main, serialize=serialize)
    assert len(book.order()) <= 6  # not a switch per item


def test_two_maps_with_much_work_take_turns():
    async def main(system):
        a, b = await role(system, "a", [0], seconds=0.1), await role(system, "b", [0], seconds=0.1)
        done = await asyncio.gather(
            a.compute_on.map(Stream.of(range(50))).collect(), b.compute_on.map(Stream.of(range(50))).collect()
        )
        assert [len(items) for items in done] == [50, 50]

    assert run(main) == pytest.approx(10.0)
    assert 10 <= len(book.order()) <= 30  # a turn is a few items long


def test_concurrent_calls_of_a_map_do_not_keep_others_out():
    async def main(system):
        a, b = await role(system, "a", [0], seconds=0.3), await role(system, "b", [0])
        mapped = asyncio.ensure_future(a.compute_on.map(Stream.of(range(40)), concurrency=4).collect())
        await asyncio.sleep(1.0)
        start = asyncio.get_running_loop().time()
        await b[0].compute_on()
        assert asyncio.get_running_loop().time() - start < 2.5
        assert len(await mapped) == 40

    run(main)


def test_a_bounded_generator_goes_on_when_its_consumer_needs_its_device():
    async def main(system):
        a, b = await role(system, "a", [0]), await role(system, "b", [0])
        items = a.generate.bounded(2)(range(10))
        assert await b[0].consume(items) == list(range(10))

    run(main)


@both_worlds
def test_a_consumer_gives_its_device_to_its_producer_while_it_waits(serialize):
    """Asked in the worst order: the consumer first, then the stages before it."""

    async def main(system):
        a, b, c = [
            await role(system, name, [0], hosts=[host], seconds=0.2) for name, host in (("a", 0), ("b", 1), ("c", 0))
        ]
        gate = await system.channel("gate")
        consumed = c[0].consume(b.compute_on.map(a.generate(_from(gate))))
        for number in range(6):
            await asyncio.sleep(1.0)
            await gate.put(number)
        gate.close()
        assert await consumed == list(range(6))

    run(main, serialize=serialize)


def _from(channel: Any) -> Stream[Any]:
    async def items() -> AsyncIterator[Any]:
        async for item in channel:
            yield item

    return Stream.of(items())


@both_worlds
@pytest.mark.parametrize("capacity", [1, 2, 256])
def test_grpo_on_one_device_never_deadlocks(serialize, capacity):
    """Every role on the only device, none fits beside another, streams as small as can be."""

    async def step(rollout, judge, reference, trainer):
        samples = rollout.generate.bounded(capacity)(range(12))
        scored = judge.aside.map(samples)
        scored = reference.batch.bounded(capacity).map(scored, batch=4)
        return await trainer[0].consume(scored)

    async def main(system):
        big = {"resident_bytes": 70, "parked_bytes": 10, "move": 0.5}
        rollout = await role(system, "rollout", [0], **big)
        judge = await system.spawn(Role, hosts=[1], name="judge", seconds=0.1)
        reference = await role(system, "reference", [0], hosts=[1], **big)
        trainer = await role(system, "trainer", [0], hosts=[1], seconds=0.2, **big)
        for _ in range(2):
            assert sorted(await step(rollout, judge, reference, trainer)) == list(range(12))

    seconds = run(main, memory={0: 100}, serialize=serialize)
    assert book.order() == ["rollout", "reference", "trainer"] * 2  # a switch is never made for nothing
    assert len(book.moves) == 14
    assert seconds < 40


# Giving up -------------------------------------------------------------------------------------------------------


@both_worlds
@pytest.mark.parametrize("turns", [*range(12), None])
def test_a_call_that_is_cancelled_while_it_waits_leaves_no_lease(serialize, turns):
    async def main(system):
        a, b = await role(system, "a", [0, 1]), await role(system, "b", [0], hosts=[1])
        holder = asyncio.ensure_future(a.compute_on()) if turns is None else None
        await asyncio.sleep(0.5)
        waiting = [asyncio.ensure_future(b[0].compute_on()), asyncio.ensure_future(a.compute_on())]
        for _ in range(turns or 0):
            await asyncio.sleep(0)
        if turns is None:
            await asyncio.sleep(0.25)
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        if holder is not None:
            await holder
        await asyncio.gather(b[0].compute_on(), a.compute_on())

    run(main, serialize=serialize)


def test_a_killed_role_gives_its_devices_back():
    async def main(system):
        a, b = await role(system, "a", [0]), await role(system, "b", [0])
        working, waiting = asyncio.ensure_future(a[0].compute_on()), asyncio.ensure_future(b[0].compute_on())
        await asyncio.sleep(0.5)
        await system.kill(a)
        await waiting
        assert asyncio.get_running_loop().time() == 1.5
        await asyncio.wait([working])
        await role(system, "a", [0])

    run(main)


def test_a_lost_host_gives_its_devices_back():
    async def main(system):
        a, b = await role(system, "a", [0], hosts=[1], seconds=100), await role(system, "b", [0], hosts=[0])
        working = a[0].compute_on()
        working.want()
        await asyncio.sleep(0.5)
        await system._network.system(1)._host.transport.close(False)
        await b[0].compute_on()
        assert working.exception() is not None

    assert run(main) < 5.0


def test_what_goes_wrong_in_onload_reaches_the_caller():
    async def main(system):
        broken = await system.spawn(Broken, hosts=[1], name="broken", devices=[0], resident_bytes=60)
        await role(system, "other", [0], resident_bytes=60)
        with pytest.raises(OSError, match=r"such weights") as caught:
            await broken[0].compute_on()
        assert any("onload of tenant 'broken[0]'" in note for note in caught.value.__notes__)

    run(main, memory={0: 100})


class Broken(Role):
    async def onload(self) -> None:
        raise OSError("no such weights")


# In every world, in real time ------------------------------------------------------------------------------------


class Clocked(Actor):
    """Notes when it works; all hosts of a machine share the clock."""

    async def setup(self) -> None:
        self.uses: list[tuple[float, float]] = []

    @endpoint(device=True)
    async def work(self, seconds: float = 0.01) -> None:
        start = time.monotonic()
        await self.compute(time.sleep, seconds)
        self.uses.append((start, time.monotonic()))

    @endpoint
    async def used(self) -> list[tuple[float, float]]:
        return self.uses


async def overlaps(a: Any, b: Any) -> bool:
    mine, theirs = await a.used(), await b.used()
    return any(start < other_end and other < end for start, end in mine for other, other_end in theirs)


async def test_actors_of_two_hosts_share_a_device_in_turn(system: ActorSystem) -> None:
    a = (await system.spawn(Clocked, hosts=[0], name="a", devices=[0]))[0]
    b = (await system.spawn(Clocked, hosts=[1], name="b", devices=[0]))[0]
    await asyncio.gather(*(actor.work() for _ in range(5) for actor in (a, b)))
    assert not await overlaps(a, b)
    assert len(await a.used()) == len(await b.used()) == 5


async def test_groups_over_two_hosts_in_opposite_order_do_not_deadlock(system: ActorSystem) -> None:
    a = await system.spawn(Clocked, hosts=[0, 1], name="a", devices=[0, 1])
    b = await system.spawn(Clocked, hosts=[0, 1], name="b", devices=[1, 0])
    await asyncio.gather(*(group.work() for _ in range(5) for group in (a, b)))
    assert not await overlaps(a[0], b[1])
    assert not await overlaps(a[1], b[0])


async def test_what_devices_hold_is_asked_for_from_any_host(system: ActorSystem) -> None:
    await system.spawn(Clocked, hosts=[0], name="sized", devices=[7], resident_bytes=50, parked_bytes=20)
    asker = (await system.spawn(Asker, hosts=[1], name="asker"))[0]
    assert await asker.memory(7) == (await system.device_memory())[7][1:] == (50, 0, 50)


class Asker(Actor):
    @endpoint
    async def memory(self, device: int) -> tuple[int, int, int]:
        return (await self.system.device_memory())[device][1:]


async def test_calls_cancelled_at_any_moment_leave_no_lease(system: ActorSystem) -> None:
    a = await system.spawn(Clocked, hosts=[0, 1], name="a", devices=[0, 1])
    b = (await system.spawn(Clocked, hosts=[1], name="b", devices=[0]))[0]
    for turn in range(40):
        calls = [asyncio.create_task(_call(call)) for call in (a.work, b.work, a.work)]
        for _ in range(turn % 20):
            await asyncio.sleep(0)
        if turn >= 20:
            await asyncio.sleep(0.001 * (turn - 20))
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
    await asyncio.gather(a.work(), b.work())
    manager = system.service.manager
    await until(lambda: not manager.holders() and not manager.waiting() and not system.service._tickets)


async def _call(endpoint: Any) -> None:
    await endpoint(0.002)


# Messages ----------------------------------------------------------------------------------------------------------


def test_a_hand_over_between_two_hosts_away_from_the_controller_is_a_release_and_a_grant(monkeypatch):
    """Whoever waits has asked before, and whoever holds has been told: only these two messages lie in between."""
    moved: list[tuple[int, int, str]] = []
    deliver = Host.deliver

    def noted(host: Host, link: Link, message: Any) -> None:
        what = {CALL: "call", REPLY: "reply", REPLIES: "reply"}.get(message[0])
        moved.append((link.peer, host.rank, what or message[2]))
        deliver(host, link, message)

    monkeypatch.setattr(Host, "deliver", noted)

    async def main(system):
        a, b = await role(system, "a", [0], hosts=[1]), await role(system, "b", [0], hosts=[2])
        await asyncio.sleep(1.0)
        uses = [asyncio.ensure_future(_use(group)) for group in (a, b)]
        await asyncio.sleep(0.5)
        moved.clear()
        await uses[0]
        await asyncio.sleep(0.5)
        assert sorted(moved) == [
            (0, 2, "reply"),  # the grant
            (1, 0, "lease_release"),
            (1, 0, "reply"),  # of the call that ended
        ]
        moved.clear()
        await uses[1]
        await asyncio.sleep(1.0)
        assert sorted(moved) == [(2, 0, "lease_release"), (2, 0, "reply")]

    run(main, hosts=3, serialize=True)


async def _use(group: Any) -> None:
    await group[0].compute_on()


# GPUs that processes share ---------------------------------------------------------------------------------------


def on_gpus(system, *gpus):
    """Have hosts be on GPUs of these ids."""
    places = system._host.places
    for number, gpu in enumerate(gpus):
        places[number] = dataclasses.replace(places[number], device=gpu)


@pytest.mark.parametrize(("second", "seconds"), [("gpu a", 2.0), ("gpu b", 1.0), ("cpu", 1.0)])
def test_two_processes_on_one_gpu_have_one_device_between_them(second, seconds):
    async def main(system):
        on_gpus(system, "gpu a" if second != "cpu" else "cpu", second)
        a, b = await role(system, "a", [0]), await role(system, "b", [1], hosts=[1])
        await asyncio.gather(a[0].compute_on(), b[0].compute_on())

    assert run(main) == seconds


def test_what_two_processes_load_on_one_gpu_counts_against_its_memory_together():
    async def main(system):
        on_gpus(system, "gpu a", "gpu a")
        a = await role(system, "a", [0], resident_bytes=60, parked_bytes=5)
        b = await role(system, "b", [1], hosts=[1], resident_bytes=60, parked_bytes=5)
        for _ in range(2):
            await a[0].compute_on()
            await b[0].compute_on()
        assert book.moves == ["-a[0]", *(["-b[0]", "+a[0]", "-a[0]", "+b[0]"] * 2)]  # b's setup loads b
        with pytest.raises(UserError, match=r"c\[0\], c\[1\].*0 together.*120.*100"):
            await role(system, "c", [0, 1], resident_bytes=60)

    run(main, memory={0: 100, 1: 100})
