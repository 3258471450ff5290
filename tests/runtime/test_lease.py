"""Leases are granted in order, as sets, within memory, and survive cancellation and failure."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.runtime.base.clock import run_virtual
from rlinf.runtime.devices.lease_manager import Claim, DeviceMemory, Lease, LeaseError, LeaseManager, Tenant


class World:
    """Devices with real bytes, moved by callbacks that take virtual time and check every rule that they can see."""

    def __init__(self, memory: dict[int, int] | None = None, seconds: float = 1.0, moves: Iterable[str] = ()) -> None:
        self.memory = memory or {}
        self.seconds = seconds
        self.tenants: dict[str, Tenant] = {}
        self.bytes: dict[str, int] = {}
        self.loaded: set[str] = set()
        self.moving: dict[str, str] = {}
        self.log: list[str] = []
        self.failing: list[str] = list(moves)
        """Moves that fail, each once, half way."""
        self.manager = LeaseManager(memory, self.offload, self.onload)

    def add(self, name: str, devices: Iterable[int], resident: int = 0, parked: int = 0) -> None:
        tenant = Tenant(name, frozenset(devices), resident, parked)
        self.manager.register(tenant)
        self.tenants[name] = tenant
        self.bytes[name] = 0

    def remove(self, name: str) -> None:
        self.manager.unregister(name)
        del self.tenants[name], self.bytes[name]
        self.loaded.discard(name)

    def used(self, device: int) -> int:
        return sum(self.bytes[name] for name, tenant in self.tenants.items() if device in tenant.devices)

    def check(self) -> None:
        for device, capacity in self.memory.items():
            assert self.used(device) <= capacity, f"device {device} is overfull"
            by_book = self.manager.memory()[device]
            assert self.used(device) <= by_book.resident + by_book.parked <= capacity

    def needs(self, device: int) -> int:
        """Bytes by which a grant that is being prepared does not fit on `device` as it is."""
        names = {name for claim in self.manager.holders() if claim.moving for name in claim.names}
        mine = [self.tenants[name] for name in names if device in self.tenants[name].devices]
        more = sum(tenant.resident_bytes - self.bytes[tenant.name] for tenant in mine)
        return self.used(device) + more - self.memory.get(device, 10**9)

    async def offload(self, name: str) -> None:
        tenant = self.tenants[name]
        assert not any(name in claim.names for claim in self.manager.holders()), f"{name} is active"
        assert any(self.needs(device) > 0 for device in tenant.devices), f"{name} need not go"
        assert name in self.loaded or f"!{name}" in self.log, f"{name} is not loaded"
        await self.move(name, "-")
        if name in self.tenants:
            self.bytes[name] = tenant.parked_bytes
        self.check()

    async def onload(self, name: str) -> None:
        assert name not in self.loaded
        self.bytes[name] = self.tenants[name].resident_bytes
        self.check()
        await self.move(name, "+")
        self.loaded.add(name)

    async def move(self, name: str, sign: str) -> None:
        assert name not in self.moving, f"{name} moves twice at a time"
        self.log.append(sign + name)
        self.loaded.discard(name)
        self.moving[name] = sign
        try:
            await asyncio.sleep(self.seconds)
            if sign + name in self.failing:
                self.failing.remove(sign + name)
                self.log.append("!" + name)
                raise OSError(f"no {sign}{name}")
        finally:
            del self.moving[name]

    async def hold(self, names: str, seconds: float, log: list[str] | None = None, who: str = "") -> None:
        """Take a lease of `names` (one letter each), hold it for `seconds`."""
        lease = await self.manager.acquire(list(names), who or names)
        try:
            assert set(names) <= self.loaded
            if log is not None:
                log.append(f"{who or names}@{now():g}")
            await asyncio.sleep(seconds)
        finally:
            self.manager.release(lease)


def now() -> float:
    return asyncio.get_running_loop().time()


def world(memory: dict[int, int] | None = None, **tenants: Any) -> World:
    """A world in which moves take no time and everything fits, unless said otherwise."""
    made = World(memory, seconds=1.0 if memory else 0.0)
    for name, arguments in tenants.items():
        made.add(name, *arguments)
    return made


def virtually(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        run_virtual(test())

    run.__name__ = test.__name__
    return run


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def start(*coroutines: Coroutine[Any, Any, Any]) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(coroutine) for coroutine in coroutines]


async def granted(awaitable: Awaitable[Lease]) -> Lease:
    """The lease of a request that must not have to wait."""
    before = now()
    async with asyncio.timeout(0):
        lease = await awaitable
    assert now() == before
    return lease


# -- order -------------------------------------------------------------------------------------------------------


@virtually
async def test_nothing_to_wait_for_takes_no_turn_of_the_loop() -> None:
    w = world(a=({0},), b=({0},), none=((),))
    await asyncio.gather(w.hold("a", 0), w.manager.acquire(["none"], "loads it"))
    turned = list[int]()
    asyncio.get_running_loop().call_soon(turned.append, 1)
    lease = await w.manager.acquire(["a"], "me")
    w.manager.release(lease)
    w.manager.release(lease)
    w.manager.release(await w.manager.acquire(["a", "a"], "me"))
    assert not turned
    assert (await granted(w.manager.acquire(["none"], "me"))).devices == frozenset()


# -- sharing -----------------------------------------------------------------------------------------------------


@virtually
async def test_calls_for_the_same_tenants_share_the_devices_until_the_last_is_done() -> None:
    w, log = world(a=({0},), b=({0},), c=({1},)), list[str]()
    first = await w.manager.acquire(["a", "c"], "one")
    second = await granted(w.manager.acquire(["c", "a"], "two"))
    (other,) = start(w.hold("b", 1, log))
    await asyncio.sleep(1)
    w.manager.release(first)
    w.manager.release(first)
    await asyncio.sleep(1)
    assert log == []
    w.manager.release(second)
    await other
    assert log == ["b@2"]


# -- wanted ------------------------------------------------------------------------------------------------------


@virtually
async def test_a_lease_knows_while_a_conflicting_request_waits() -> None:
    w, calls = world(a=({0, 1},), b=({1},), c=({2},)), list[str]()
    lease = await w.manager.acquire(["a"], "holder")
    twin = await w.manager.acquire(["a"], "twin")
    lease.on_wanted(lambda: calls.append("lease"))
    twin.on_wanted(lambda: calls.append("twin"))
    await w.hold("c", 1)
    assert not lease.wanted.is_set()
    tasks = start(w.hold("b", 1), w.hold("b", 1), w.hold("a", 1))
    await turns()
    assert lease.wanted.is_set()
    assert calls == ["lease", "twin"]
    lease.on_wanted(lambda: calls.append("late"))
    await turns()
    assert calls == ["lease", "twin", "late"]
    for task in tasks:
        task.cancel()
    await turns()
    assert not lease.wanted.is_set()
    for _ in range(2):
        (last,) = start(w.hold("b", 1))
        await lease.wanted.wait()
        last.cancel()
        await turns()
        assert not lease.wanted.is_set()
    assert calls[3:] == ["lease", "late", "twin"] * 2
    (last,) = start(w.hold("b", 1))
    await lease.wanted.wait()
    w.manager.release(lease)
    w.manager.release(twin)
    await last


@virtually
async def test_a_lease_is_wanted_from_its_first_moment_if_others_wait_behind_it() -> None:
    w = world(a=({0},), b=({0},), c=({0},))
    first = await w.manager.acquire(["a"], "a")
    second, _ = start(w.manager.acquire(["b"], "b"), w.hold("c", 0))
    await turns()
    w.manager.release(first)
    lease = await second
    assert lease.wanted.is_set()
    w.manager.release(lease)


@virtually
async def test_a_lease_is_no_longer_wanted_by_a_request_that_is_cancelled_as_another_device_becomes_free() -> None:
    w = world(a=({0},), b=({1},))
    first, second = await w.manager.acquire(["a"], "a"), await w.manager.acquire(["b"], "b")
    (both,) = start(w.manager.acquire(["a", "b"], "both"))
    await second.wanted.wait()
    both.cancel()
    w.manager.release(first)
    assert not second.wanted.is_set()


# -- memory ------------------------------------------------------------------------------------------------------


@virtually
async def test_the_least_recently_used_make_room_and_no_more_than_need_be() -> None:
    w = world({0: 10}, a=({0}, 3), b=({0}, 3), c=({0}, 3), d=({0}, 5))
    for name in "abca":
        await w.hold(name, 0)
    await w.hold("d", 0)
    assert w.log == ["+a", "+b", "+c", "-b", "-c", "+d"]


@virtually
async def test_a_small_tenant_is_spared_if_a_larger_one_has_to_go_anyway() -> None:
    w = world({0: 10}, a=({0}, 1), b=({0}, 8), c=({0}, 9))
    for name in "abc":
        await w.hold(name, 0)
    assert w.log == ["+a", "+b", "-b", "+c"]


@virtually
async def test_moves_on_different_devices_run_at_the_same_time() -> None:
    w = World({0: 10, 1: 10})
    for device in (0, 1):
        w.add(f"rollout[{device}]", {device}, 9)
        w.add(f"trainer[{device}]", {device}, 9, 1)
    rollouts, trainers = ["rollout[0]", "rollout[1]"], ["trainer[0]", "trainer[1]"]
    w.manager.release(await w.manager.acquire(rollouts, "r"))
    assert now() == 1
    w.manager.release(await w.manager.acquire(trainers, "t"))
    assert now() == 3
    assert w.manager.memory()[0] == DeviceMemory(10, 9, 0, 9)
    w.manager.release(await w.manager.acquire(rollouts, "r"))
    assert now() == 5
    assert w.manager.memory()[1] == DeviceMemory(10, 9, 1, 10)


@virtually
async def test_two_newcomers_wait_for_one_offload_of_a_tenant_that_spans_their_devices() -> None:
    w, log = world({0: 10, 1: 10}, s=({0, 1}, 8), a=({0}, 8), b=({1}, 8)), list[str]()
    await w.hold("s", 0)
    await asyncio.gather(w.hold("a", 1, log), w.hold("b", 1, log))
    assert w.log == ["+s", "-s", "+a", "+b"]
    assert log == ["a@3", "b@3"]


@virtually
async def test_who_is_on_the_way_out_for_another_device_leaves_before_anybody_else_has_to() -> None:
    w, log = (
        world({0: 10, 1: 10}, x=({0}, 4), y=({0}, 4), s=({0, 1}, 2), a=({1}, 9), b=({0}, 2), c=({0}, 6)),
        list[str](),
    )
    for name in "xys":
        await w.hold(name, 0)
    first, second = start(w.hold("a", 0, log), w.hold("b", 0, log))  # a needs s to go; so b need not send x away
    await asyncio.gather(first, second)
    assert w.log == ["+x", "+y", "+s", "-s", "+a", "+b"]


@virtually
async def test_nobody_waits_for_a_move_that_is_not_needed() -> None:
    w, log = world({0: 10, 1: 10}, x=({0}, 8), s=({0, 1}, 2), a=({1}, 9), c=({0}, 6)), list[str]()
    for name in "xs":
        await w.hold(name, 0)
    w.seconds = 5
    (first,) = start(w.hold("a", 0))  # s goes, slowly
    await asyncio.sleep(0.5)
    w.seconds = 1
    await w.hold("c", 0, log)  # x makes room for c, with s or without
    assert w.log == ["+x", "+s", "-s", "-x", "+c"]
    assert log == ["c@4.5"]
    await first


@virtually
async def test_a_tenant_that_can_never_be_loaded_is_refused_at_once() -> None:
    w = world({0: 10}, a=({0}, 6, 2), b=({0}, 6, 2))
    with pytest.raises(ValueError, match=r"'c'.*0:.*7.*10.*\(a: 2.*2\)"):
        w.add("c", {0, 1}, 7)
    with pytest.raises(ValueError, match=r"register.*'c':.*0"):
        w.add("c", {0}, 3, 3)
    with pytest.raises(ValueError, match="registered already"):
        w.add("a", {1}, 1)
    with pytest.raises(ValueError, match="parked_bytes"):
        Tenant("d", frozenset({0}), 1, 2)
    w.add("c", {0}, 6)
    await asyncio.gather(*(w.hold(name, 1) for name in "abc"))


@virtually
async def test_tenants_that_do_not_fit_together_fail_clearly_and_block_nobody() -> None:
    w = world({0: 10}, a=({0}, 6), b=({0}, 6))
    with pytest.raises(LeaseError, match=r"device 0 together: 2.*10"):
        await w.manager.acquire(["a", "b"], "greedy")
    await w.hold("a", 1)
    with pytest.raises(ValueError, match=r"'x'.*registered"):
        await w.manager.acquire(["x"], "me")
    with pytest.raises(ValueError, match="no tenants"):
        await w.manager.acquire([], "me")


# -- cancellation and failure ------------------------------------------------------------------------------------


@virtually
async def test_cancelling_while_tenants_move_finishes_the_move_before_others_get_the_devices() -> None:
    for cancel_at, expected in ((0.5, ["-a", "+c"]), (1.5, ["-a", "+b", "-b", "+c"])):
        w, log = world({0: 10}, a=({0}, 9), b=({0}, 9), c=({0}, 9)), list[str]()
        await w.hold("a", 0)
        before = now()
        second, third = start(w.hold("b", 1), w.hold("c", 1, log))
        await asyncio.sleep(cancel_at)
        second.cancel()
        await turns()
        assert second.cancelled()
        assert [claim.who for claim in w.manager.waiting()] == ["c"]
        await third
        assert w.log[1:] == expected
        assert log == [f"c@{before + len(expected):g}"]
        assert w.manager.holders() == []


@virtually
async def test_a_request_for_the_same_tenants_takes_over_what_a_cancelled_one_began() -> None:
    w, log = world({0: 10}, a=({0}, 9), b=({0}, 9)), list[str]()
    await w.hold("a", 0)
    (first,) = start(w.hold("b", 1))
    await asyncio.sleep(0.5)
    first.cancel()
    await turns()
    await w.hold("b", 1, log)
    assert w.log == ["+a", "-a", "+b"]
    assert log == ["b@3"]


@virtually
async def test_a_request_cancelled_in_the_very_tick_of_its_grant_gives_the_devices_back() -> None:
    w, log = world(a=({0},), b=({0},), c=({0},)), list[str]()
    await asyncio.gather(*(w.hold(name, 0) for name in "ac"))
    lease = await w.manager.acquire(["a"], "a")
    second, third = start(w.hold("b", 1, log), w.hold("c", 1, log))
    await turns()
    w.manager.release(lease)  # grants b ...
    second.cancel()  # ... which learns of this first
    await third
    assert log == ["c@0"]
    assert "+b" in w.log
    w.log.clear()
    w.remove("b")
    w.add("b", {0})
    lease = await w.manager.acquire(["a"], "a")
    second, third = start(w.hold("b", 1, log), w.hold("c", 1, log))
    await turns()
    second.cancel()
    w.manager.release(lease)  # must not be granted to b any more
    await third
    assert log == ["c@0", "c@1"]
    assert w.log == []


@virtually
async def test_a_failing_move_reaches_who_asked_and_leaves_the_manager_usable() -> None:
    w = world({0: 10}, a=({0}, 9), b=({0}, 9))
    w.failing = ["+a", "-a", "+b"]
    outcomes = []
    for name in "aabbba":
        try:
            await w.hold(name, 1)
            outcomes.append("ok")
        except OSError as error:
            outcomes.append(f"{error}; {error.__notes__[0]}")
        assert w.manager.holders() == w.manager.waiting() == []
        w.check()
    assert outcomes == [
        "no +a; raised by the onload of tenant 'a' on devices [0]",
        "ok",
        "no -a; raised by the offload of tenant 'a' on devices [0]",
        "no +b; raised by the onload of tenant 'b' on devices [0]",
        "ok",
        "ok",
    ]


@virtually
async def test_all_who_share_a_grant_get_its_failure_and_the_next_request_goes_on() -> None:
    w, log = world({0: 10, 1: 10}, a=({0}, 9), b=({1}, 9), c=({0}, 9)), list[str]()
    w.failing = ["+a", "+b"]
    first, second, third = start(w.hold("ab", 1), w.hold("ab", 1), w.hold("c", 1, log))
    results = await asyncio.gather(first, second, return_exceptions=True)
    assert [str(result) for result in results] == ["no +a", "no +a"]
    assert isinstance(results[0], OSError)
    assert "OSError('no +b')" in results[0].__notes__[1]
    await third
    assert log == ["c@3"]


# -- comings, goings and reports ---------------------------------------------------------------------------------


@virtually
async def test_reports_say_who_holds_and_who_waits_since_when() -> None:
    w = world({0: 10, 1: 10}, a=({0}, 9, 2), b=({0, 1}, 8))
    await w.hold("a", 1)
    first, second = start(w.hold("b", 5, who="train"), w.hold("a", 1, who="roll"))
    await asyncio.sleep(0.5)
    assert w.manager.holders() == [Claim("train", ("b",), (0, 1), 2.0, ("offload of a",))]
    assert w.manager.waiting() == [Claim("roll", ("a",), (0,), 2.0)]
    await asyncio.sleep(1)
    assert w.manager.holders() == [Claim("train", ("b",), (0, 1), 2.0, ("onload of b",))]
    assert w.manager.memory() == {0: DeviceMemory(10, 8, 2, 10), 1: DeviceMemory(10, 8, 0, 8)}
    await asyncio.sleep(1)
    assert w.manager.holders() == [Claim("train", ("b",), (0, 1), 4.0)]
    await asyncio.gather(first, second)


@virtually
async def test_an_unregistered_tenant_frees_its_bytes_and_fails_who_waits_for_it() -> None:
    w, log = world({0: 10}, a=({0}, 9, 3), b=({0}, 5), c=({0}, 7)), list[str]()
    lease = await w.manager.acquire(["a"], "holder")
    first, second, third = start(w.hold("b", 1), w.hold("bc", 1), w.hold("c", 1, log))
    await turns()
    w.manager.unregister("b")
    for task in (first, second):
        with pytest.raises(LeaseError, match=r"'b'.*unregistered"):
            await task
    w.remove("a")
    with pytest.raises(ValueError, match=r"lease.*released"):
        w.add("a", {1}, 1)
    with pytest.raises(ValueError, match="no tenant 'a'"):
        w.manager.unregister("a")
    assert w.manager.memory() == {0: DeviceMemory(10, 0, 0, 9)}
    w.manager.release(lease)
    await third
    assert log == ["c@2"]
    w.add("a", {0}, 2)
    await w.hold("a", 1)


@virtually
async def test_a_tenant_unregistered_while_it_moves_accounts_for_nothing_and_is_never_leased() -> None:
    w = world({0: 10}, a=({0}, 9, 1), b=({0}, 9), c=({0}, 9))
    await w.hold("a", 0)
    (task,) = start(w.hold("b", 1))
    await asyncio.sleep(0.5)
    w.remove("a")
    w.remove("b")
    with pytest.raises(LeaseError, match=r"'b'.*unregistered"):
        await task
    assert w.manager.memory()[0] == DeviceMemory(10, 0, 0, 9)
    await w.hold("c", 1)


@virtually
async def test_closing_fails_who_waits_and_ends_moves_but_not_leases() -> None:
    w = world({0: 10, 1: 10}, a=({0}, 9), b=({0}, 9), c=({1}, 9), d=({1}, 9))
    lease = await w.manager.acquire(["a"], "holder")
    await w.hold("c", 0)
    (held,) = start(w.hold("c", 1))
    waiting = start(w.hold("b", 1), w.hold("bd", 1), w.hold("d", 1), w.hold("c", 1))
    await asyncio.sleep(0.5)
    await asyncio.gather(w.manager.close(), w.manager.close())
    for result in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(result, LeaseError)
        assert "was closed" in str(result)
    with pytest.raises(LeaseError, match="closed"):
        await w.manager.acquire(["a"], "late")
    w.manager.release(lease)
    await held
    assert now() == 3
    assert w.manager.holders() == w.manager.waiting() == []


@virtually
async def test_closing_cancels_moves_under_way() -> None:
    w = world({0: 10}, a=({0}, 9), b=({0}, 9))
    (starting,) = start(w.hold("a", 1))
    await asyncio.sleep(0.5)
    await w.manager.close()
    assert (now(), w.moving) == (0.5, {})
    with pytest.raises(LeaseError, match=r"closed.*waited"):
        await starting


# -- random programs ---------------------------------------------------------------------------------------------


@dataclass
class Request:
    start: float
    names: str
    hold: float
    cancel: float | None


@dataclass
class Run:
    """Plays random requests against a world, and checks the rules at every grant."""

    world: World
    pending: dict[str, tuple[int, str, set[str]]] = field(default_factory=dict)
    """Per request: its order, its tenants, and who had devices reserved when it was made."""
    held: list[str] = field(default_factory=list)
    numbers: int = 0
    granted: int = 0

    def devices(self, names: Iterable[str]) -> frozenset[int]:
        return frozenset().union(*(self.world.tenants[name].devices for name in names))

    def fits(self, names: Iterable[str]) -> bool:
        def total(device: int) -> int:
            here = [tenant for tenant in self.world.tenants.values() if device in tenant.devices]
            return sum(t.resident_bytes if t.name in names else t.parked_bytes for t in here)

        return all(total(device) <= capacity for device, capacity in self.world.memory.items())

    def check_grant(self, me: str) -> None:
        order, names, _ = self.pending.pop(me)
        devices = self.devices(names)
        for claim in self.world.manager.waiting():  # one that is granted may still wait for its turn of the loop
            others_order, others_names, before = self.pending[claim.who]
            overtaken = others_order < order and me not in before and devices & self.devices(others_names)
            assert not overtaken, f"{names} overtook {others_names}"
        for others_names in self.held:
            assert others_names == names or not self.devices(others_names) & devices
        assert set(names) <= self.world.loaded
        self.world.check()
        self.granted += 1

    async def play(self, request: Request) -> None:
        await asyncio.sleep(request.start)
        self.numbers += 1
        me, names = str(self.numbers), "".join(sorted(request.names))
        before = {claim.who for claim in self.world.manager.holders()}
        self.pending[me] = (self.numbers, names, before)
        try:
            lease = await self.world.manager.acquire(list(request.names), me)
        except LeaseError:
            assert not self.fits(names)
            return
        except OSError:
            return
        else:
            self.check_grant(me)
        finally:
            self.pending.pop(me, None)
        self.held.append(names)
        try:
            await asyncio.sleep(request.hold)
        finally:
            self.held.remove(names)
            self.world.manager.release(lease)

    async def play_all(self, requests: list[Request]) -> None:
        tasks = start(*(self.play(request) for request in requests))
        for task, request in zip(tasks, requests, strict=True):
            if request.cancel is not None:
                asyncio.get_running_loop().call_later(request.start + request.cancel, task.cancel)
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        while self.world.moving:  # what a cancelled request has begun
            await asyncio.sleep(0.25)
        await turns()
        assert self.world.manager.waiting() == self.world.manager.holders() == []
        self.world.check()
        await self.world.manager.close()


# Multiples of a quarter of a second, so that many things happen in the same instant.
TIMES = st.integers(0, 24).map(lambda quarters: quarters / 4)
NAMES = "abcdef"


@st.composite
def worlds(draw: st.DrawFn) -> tuple[World, list[Request]]:
    memory = {device: draw(st.integers(4, 20)) for device in range(draw(st.integers(1, 4)))}
    failing = draw(st.lists(st.tuples(st.sampled_from("+-"), st.sampled_from(NAMES)).map("".join), max_size=3))
    made = World(memory, draw(st.sampled_from([0.0, 0.25, 1.0])), failing)
    for name in NAMES:
        devices = draw(st.sets(st.sampled_from([*memory, 9]), min_size=1, max_size=3))
        resident = draw(st.integers(0, 10))
        with contextlib.suppress(ValueError):
            made.add(name, devices, resident, draw(st.integers(0, min(resident, 2))))
    if not made.tenants:
        made.add("a", {0}, 1)
    requests = st.builds(
        Request,
        start=TIMES,
        names=st.sets(st.sampled_from(sorted(made.tenants)), min_size=1, max_size=3).map("".join),
        hold=TIMES,
        cancel=st.one_of(st.none(), st.none(), TIMES),
    )
    return made, draw(st.lists(requests, min_size=1, max_size=25))


@settings(max_examples=80, deadline=None)
@given(worlds())
def test_random_programs_keep_every_rule_and_lose_no_wake_up(drawn: tuple[World, list[Request]]) -> None:
    check_rules(*drawn)


@pytest.mark.repeated
@settings(max_examples=1000, deadline=None)
@given(worlds())
def test_many_random_programs_keep_every_rule(drawn: tuple[World, list[Request]]) -> None:
    check_rules(*drawn)


def check_rules(made: World, requests: list[Request]) -> None:
    run_virtual(Run(made).play_all(requests))  # a lost wake-up would be a Deadlock


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 4), st.lists(st.sampled_from(NAMES), max_size=30))
def test_equal_tenants_of_one_device_are_a_least_recently_used_cache(room: int, uses: list[str]) -> None:
    expected: list[str] = []
    cache: OrderedDict[str, None] = OrderedDict()
    for name in uses:
        if name not in cache:
            if len(cache) == room:
                expected.append("-" + cache.popitem(last=False)[0])
            expected.append("+" + name)
        cache[name] = None
        cache.move_to_end(name)

    made = world({0: 10 * room}, **{name: ({0}, 10) for name in NAMES})

    async def main() -> None:
        for name in uses:
            await made.hold(name, 1)

    run_virtual(main())
    assert made.log == expected
