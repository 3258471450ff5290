"""What a plan says about devices of live groups: their bytes, once measured, and what devices ever held."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf import ActorSystem, endpoint
from rlinf.runtime.actor.actor import Actor
from rlinf.runtime.base.clock import run_virtual
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.devices.lease_manager import LeaseManager, Tenant
from rlinf.runtime.devices.memory import DeviceMemory
from tests.runtime.programs.roles import book, role, run

both_worlds = pytest.mark.parametrize("serialize", [False, True], ids=["local", "serialize"])


@both_worlds
def test_a_role_that_was_found_bigger_moves_others_off_at_once(serialize):
    async def main(system):
        a = await role(system, "a", [0], resident_bytes=40, parked_bytes=5, move=1.0)
        b = await role(system, "b", [0], hosts=[1], resident_bytes=40, parked_bytes=5, move=1.0)
        await asyncio.gather(a[0].compute_on(), b[0].compute_on())
        assert book.moves == []
        await system.resize("a", resident_bytes=70)
        assert book.moves == ["-b[0]"]
        assert await system.device_memory() == {0: DeviceMemory(100, 70, 5, 80)}
        await b[0].compute_on()
        assert book.moves == ["-b[0]", "-a[0]", "+b[0]"]
        assert (await system.device_memory())[0].peak == 80

    run(main, memory={0: 100}, serialize=serialize)


def test_roles_that_were_found_smaller_stay_beside_each_other():
    async def main(system):
        a = await role(system, "a", [0], resident_bytes=60, parked_bytes=10)
        b = await role(system, "b", [0], resident_bytes=60, parked_bytes=10)
        await system.resize(a, resident_bytes=50, parked_bytes=0)
        await system.resize(b, resident_bytes=50)
        book.moves.clear()
        for _ in range(3):
            await a[0].compute_on()
            await b[0].compute_on()
        assert book.moves == ["+a[0]"]
        assert await system.device_memory() == {0: DeviceMemory(100, 100, 0, 100)}

    run(main, memory={0: 100})


def test_parked_bytes_that_were_measured_count_from_the_next_parking():
    async def main(system):
        await role(system, "a", [0], resident_bytes=60)
        b = await role(system, "b", [0], resident_bytes=60)
        await system.resize("a", parked_bytes=30)
        await b[0].compute_on()
        assert (await system.device_memory())[0] == DeviceMemory(100, 60, 30, 90)

    run(main, memory={0: 100})


def test_bytes_that_can_never_fit_are_refused_with_the_reason_and_nothing_changes():
    async def main(system):
        a = await role(system, "a", [0], resident_bytes=60, parked_bytes=10)
        await role(system, "b", [0], resident_bytes=60, parked_bytes=10)
        before = await system.device_memory()
        with pytest.raises(UserError, match=r"cannot resize tenant 'a\[0\]'.*it needs 95 of 100 bytes, and 10 parked"):
            await system.resize("a", resident_bytes=95)
        with pytest.raises(UserError, match=r"cannot resize tenant 'a\[0\]': 'b\[0\]' could never be loaded"):
            await system.resize("a", parked_bytes=50)
        with pytest.raises(UserError, match=r"0 <= parked_bytes <= resident_bytes"):
            await system.resize("a", parked_bytes=70)
        assert await system.device_memory() == before
        await a[0].compute_on()

    run(main, memory={0: 100})


def test_ranks_that_would_not_fit_beside_each_other_are_refused():
    async def main(system):
        pair = await role(system, "pair", [0, 0], resident_bytes=50)
        with pytest.raises(
            UserError, match=r"pair\[0\], pair\[1\] can never be loaded on device 0 together.*102 of 100"
        ):
            await system.resize(pair, resident_bytes=51)

    run(main, memory={0: 100})


def test_a_group_without_devices_has_no_bytes():
    async def main(system):
        await role(system, "a", [0])
        await system.spawn(Plain, hosts=[0], name="plain")
        with pytest.raises(UserError, match=r"plain\[0\] has no devices"):
            await system.resize("plain", resident_bytes=1)
        with pytest.raises(UserError, match="nobody"):
            await system.resize("nobody", resident_bytes=1)

    run(main)


class Plain(Actor):
    @endpoint
    async def nothing(self) -> None: ...


def test_a_resize_waits_for_who_works_there():
    async def main(system):
        await role(system, "a", [0], resident_bytes=40)
        b = await role(system, "b", [0], resident_bytes=40, seconds=5.0)
        working = asyncio.ensure_future(_work(b))
        await asyncio.sleep(1.0)
        await system.resize("a", resident_bytes=90)
        assert asyncio.get_running_loop().time() == 5.0
        await working
        assert book.moves == ["-b[0]"]

    run(main, memory={0: 100})


async def _work(group):
    await group[0].compute_on()


async def test_memory_and_bytes_are_asked_for_from_any_host(system: ActorSystem) -> None:
    await system.spawn(Asker, hosts=[0], name="sized", devices=[7], resident_bytes=50)
    asker = (await system.spawn(Asker, hosts=[1], name="asker"))[0]
    assert await asker.grow("sized", 80) == (80, 80)
    await system.resize("sized", resident_bytes=20)
    assert (await system.device_memory())[7][1:] == (20, 0, 80)
    assert await asker.fine("sized", 3) is None
    assert system.service._cell.host.cells[(await system.get("sized"))[0]._actor].granularity.items == 3


class Asker(Actor):
    @endpoint
    async def grow(self, name: str, resident: int) -> tuple[int, int]:
        await self.system.resize(name, resident_bytes=resident)
        memory = (await self.system.device_memory())[7]
        return memory.resident, memory.peak

    @endpoint
    async def fine(self, name: str, items: int) -> None:
        await self.system.regulate(name, items=items)


size = st.tuples(st.integers(0, 10), st.integers(0, 10)).map(lambda pair: (max(pair), min(pair)))
act = st.tuples(st.integers(0, 2), st.none() | size, st.integers(0, 3))


@settings(max_examples=150, deadline=None)
@given(st.lists(size, min_size=3, max_size=3), st.lists(act, max_size=12))
def test_no_device_ever_holds_more_than_it_has_whoever_grows_and_shrinks(sizes, acts):
    async def main():
        async def move(name: str) -> None:
            await asyncio.sleep(1.0)

        manager = LeaseManager({0: 10, 1: 10}, move, move)
        on = [{0}, {1}, {0, 1}]
        there = {}
        for number, (resident, parked) in enumerate(sizes):
            try:
                manager.register(Tenant(f"t{number}", frozenset(on[number]), resident, parked))
            except ValueError:  # it can never fit
                continue
            there[number] = (resident, parked)

        async def step(number: int, new: tuple[int, int] | None, start: int) -> None:
            await asyncio.sleep(start)
            if new is None:
                lease = await manager.acquire([f"t{number}"], "work")
                await asyncio.sleep(2.0)
                manager.release(lease)
                return
            try:
                await manager.resize([manager.tenant(f"t{number}").resized(*new)], "resize")
            except ValueError:
                return

        await asyncio.gather(*(step(*each) for each in acts if each[0] in there))
        for device in manager.statistics().devices.values():
            assert device.resident + device.parked <= device.peak <= device.capacity
        assert manager.holders() == manager.waiting() == []

    run_virtual(main())
