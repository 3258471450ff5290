"""Big tensors on every route: what arrives is what was sent, in order, and the loop does not wait for copies."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import threading
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rlinf import Actor, ActorSystem, endpoint
from rlinf.runtime.base.clock import run_virtual
from rlinf.runtime.base.errors import ActorDied, RuntimeFault, UserError
from rlinf.runtime.transport import copies
from rlinf.runtime.transport.arena import Arena
from rlinf.runtime.transport.link import CAST, Frame, Link, LocalTransport, Respond
from rlinf.runtime.values.p2p import GroupBulk
from rlinf.runtime.values.pickler import COPY_BYTES, GroupRef
from tests.runtime.worlds import nothing_left, until

BIG = 1 << 20
"""Elements of 4 bytes: more than the loop copies itself, and than a process group needs to be worth it."""
SMALL = 40_000
"""Elements of 4 bytes: copied by the loop."""


class Far(Actor):
    async def setup(self) -> None:
        self.seen: list[Any] = []

    @endpoint
    async def echo(self, value: Any) -> Any:
        return value

    @endpoint
    async def total(self, value: Any) -> float:
        return float(value.sum())

    @endpoint
    async def note(self, value: Any) -> None:
        self.seen.append(float(value.sum()) if isinstance(value, torch.Tensor) else value)

    @endpoint
    async def noted(self) -> list[Any]:
        return self.seen

    @endpoint
    async def make(self, fill: float) -> torch.Tensor:
        return torch.full((BIG,), fill)

    @endpoint
    async def make_and_change(self, count: int) -> torch.Tensor:
        made = torch.ones(count)
        asyncio.get_running_loop().call_soon(made.zero_)
        return made


class UntaggedBulk:
    """Tensors go as NCCL moves them: the n-th that is received is the n-th that was sent, whatever its tag."""

    def __init__(self, host: Any, wires: dict[Any, deque[asyncio.Future[torch.Tensor]]]):
        self.host = host
        self.wires = wires
        self.tags = itertools.count()

    def _next(self, source: int, target: int, end: str) -> asyncio.Future[torch.Tensor]:
        mine, other = self.wires[source, target, end], self.wires[source, target, "RS"["SR".index(end)]]
        if mine:
            return mine.popleft()
        future: asyncio.Future[torch.Tensor] = self.host.loop.create_future()
        other.append(future)
        return future

    def announce(self, tensor: torch.Tensor) -> GroupRef:
        return GroupRef(self.host.rank, next(self.tags), "cpu", tensor.dtype, tuple(tensor.shape))

    def send(self, tensor: torch.Tensor, ref: GroupRef, host: int, after: asyncio.Future[None] | None) -> None:
        self.host.own(self._send(tensor, self._next(self.host.rank, host, "S"), after))

    async def _send(
        self, tensor: torch.Tensor, arrival: asyncio.Future[torch.Tensor], after: asyncio.Future[None] | None
    ) -> None:
        if after is not None:
            await asyncio.shield(after)
        await asyncio.sleep(0)  # reads later, as a group's thread does
        arrival.set_result(tensor.clone())

    def receive(self, ref: GroupRef) -> asyncio.Future[torch.Tensor]:
        return asyncio.shield(self._next(ref.source, self.host.rank, "R"))


@contextlib.asynccontextmanager
async def opened(route: str) -> AsyncIterator[tuple[ActorSystem, Any]]:
    """Two hosts between which big tensors go by this route, and an actor on the second one."""
    async with ActorSystem.local(2, serialize=True) as system:
        assert system._network is not None
        wires: dict[Any, deque[asyncio.Future[torch.Tensor]]] = defaultdict(deque)
        for number in (0, 1):
            host = system._network.system(number)._host
            if route == "arena full":
                assert host.values.arena is not None
                host.values.arena.limit = 1000
            if route in ("group", "rpc"):
                host.places[number] = dataclasses.replace(host.places[number], machine=f"machine {number}")
                host.codec.place = host.places[number]
            if route == "group":
                host.codec.bulk = UntaggedBulk(host, wires)
        async with system.scope():
            (far,) = await system.spawn(Far, hosts=[1], name="far")
            yield system, far
        await nothing_left(system)


ROUTES = ["arena", "arena full", "group", "rpc"]
each_route = pytest.mark.parametrize("route", ROUTES)

# What arrives is what was sent --------------------------------------------------------------------------------------


def _strided(count: int) -> torch.Tensor:
    return torch.ones(count, 2)[:, 0]


def _array(count: int) -> Any:
    return np.ones(count, np.float32)


@each_route
@pytest.mark.parametrize("count", [10, SMALL, BIG])
@pytest.mark.parametrize("make", [torch.ones, _strided, _array])
async def test_a_value_is_what_it_was_at_the_call(route: str, count: int, make: Callable[[int], Any]) -> None:
    async with opened(route) as (_, far):
        value = make(count)
        first = far.total(value)
        value[:] = 2
        second = far.total(value)
        value[:] = 3
        assert await asyncio.gather(first, second) == [count, 2 * count]
        assert float(value.sum()) == 3 * count


@each_route
@pytest.mark.parametrize("count", [10, SMALL, BIG])
async def test_a_result_is_what_it_was_at_the_return(route: str, count: int) -> None:
    async with opened(route) as (_, far):
        got = await far.make_and_change(count)
        assert float(got.sum()) == count
        del got


@each_route
async def test_a_tensor_that_was_sent_can_be_written_to_where_it_lies(route: str) -> None:
    async with opened(route) as (_, far):
        value = torch.ones(BIG)
        before = torch._C._data_address(value)  # type: ignore[attr-defined]
        assert await far.total(value) == BIG
        value.fill_(2)
        assert torch._C._data_address(value) == before  # type: ignore[attr-defined]


@each_route
async def test_every_shape_of_big_tensor_arrives(route: str) -> None:
    async with opened(route) as (system, far):
        base = torch.arange(4.0 * BIG).reshape(4, BIG)
        for tensor in [base, base.T, base[:, ::2], base[1:3, 5:], base[:1].expand(3, -1), torch.complex(base, base)]:
            assert torch.equal(await far.echo(tensor), tensor)
        conjugate = torch.complex(base, base).conj()
        assert torch.equal(await far.echo(conjugate), conjugate)
        routes = {span.what for span in system._host.tracer.dump() if span.kind == "payload"}
        assert routes == {route} if route != "arena full" else routes == {"arena full", "rpc"}


async def test_a_value_that_cannot_be_pickled_sends_nothing_by_a_process_group() -> None:
    async with opened("group") as (_, far):
        with pytest.raises(UserError, match="lambda"):
            far.echo([torch.full((BIG,), 1.0), lambda: 0])
        assert await far.total(torch.full((BIG,), 2.0)) == 2 * BIG


async def test_tensors_of_a_reply_that_nobody_reads_are_received_in_its_turn() -> None:
    async with opened("group") as (_, far):
        wanted, dropped = far.make(1.0), far.make(2.0)
        dropped.want()
        dropped.cancel()
        assert (await wanted).mean() == 1
        assert (await far.make(3.0)).mean() == 3


class _Groups:
    """Process groups that take a while to be made, and note what is posted to them."""

    def __init__(self, order: list[Any]):
        self.order = order
        self.made = asyncio.ensure_future(asyncio.sleep(1.0, self))

    def backend(self, *_: Any) -> str:
        return "gloo"

    async def group(self, *_: Any) -> Any:
        return await asyncio.shield(self.made)

    async def send(self, tensor: torch.Tensor, host: int, tag: int) -> None:
        self.order.append(("send", tag))

    async def recv(self, tensor: torch.Tensor, source: int, tag: int) -> torch.Tensor:
        self.order.append(("receive", tag))
        return tensor


def test_what_comes_while_a_process_group_is_made_does_not_overtake_what_waits_for_it() -> None:
    order: list[Any] = []

    async def main() -> None:
        async with ActorSystem.local(2, serialize=True) as system:
            host, groups = system._host, _Groups(order)
            bulk = GroupBulk(host, groups)  # type: ignore[arg-type]

            def both(_: Any = None) -> None:
                ref = bulk.announce(torch.ones(2))
                bulk.send(torch.ones(2), ref, 1, None)
                bulk.receive(dataclasses.replace(ref, source=1))

            groups.made.add_done_callback(both)
            both()
            both()
            await asyncio.sleep(2.0)

    run_virtual(main())
    assert [tag for kind, tag in order if kind == "send"] == [0, 1, 2]
    assert [tag for kind, tag in order if kind == "receive"] == [0, 1, 2]


async def test_a_send_waits_for_the_copy_of_its_tensor_and_those_behind_it_wait_too() -> None:
    order: list[Any] = []
    async with ActorSystem.local(2, serialize=True) as system:
        groups = _Groups(order)
        groups.made.cancel()
        groups.made = asyncio.ensure_future(asyncio.sleep(0, groups))
        bulk, copied = GroupBulk(system._host, groups), asyncio.get_running_loop().create_future()  # type: ignore[arg-type]
        for after in (copied, None):
            bulk.send(torch.ones(2), bulk.announce(torch.ones(2)), 1, after)
        for _ in range(20):
            await asyncio.sleep(0)
        assert order == []
        copied.set_result(None)
        await until(lambda: order == [("send", 0), ("send", 1)])


# Copies are made by other threads -----------------------------------------------------------------------------------


class BigCopies(TorchDispatchMode):
    """Notes what torch copies in this thread, if it is more than the loop may."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name()
        if name in ("aten::copy_", "aten::clone", "aten::_to_copy") and result.nbytes > COPY_BYTES:
            self.found.append((name, result.nbytes))
        return result


@each_route
@pytest.mark.parametrize("make", [torch.ones, _strided])
async def test_the_loop_copies_nothing_big(route: str, make: Callable[[int], Any]) -> None:
    async with opened(route) as (_, far):
        value, parts = make(BIG), [torch.ones(SMALL) for _ in range(20)]
        with BigCopies() as big:
            sent = far.note(value)
            several = far.note(parts)
        await asyncio.gather(sent, several)
        assert big.found == []


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Copies wait for it."""
    real, event = copies._copy, threading.Event()

    def late(to: torch.Tensor, source: torch.Tensor) -> None:
        assert event.wait(60)
        real(to, source)

    monkeypatch.setattr(copies, "_copy", late)
    return event


async def test_the_loop_goes_on_and_messages_keep_their_order_while_copies_are_made(gate: threading.Event) -> None:
    async with opened("arena") as (system, far):
        (near,) = await system.spawn(Far, hosts=[0], name="near")
        calls = [far.note("first"), far.note(torch.ones(BIG)), far.note("second"), far.note(torch.zeros(BIG))]
        dropped = far.note("third")
        dropped.cancel()  # must not come to the other host before the call
        del dropped
        calls.append(far.note("last"))
        together = asyncio.gather(*calls)
        assert await near.echo(1) == 1
        await until(calls[0].done)
        assert not any(call.done() for call in calls[1:])
        gate.set()
        await together
        noted = await far.noted()
        assert [each for each in noted if each != "third"] == ["first", BIG, "second", 0, "last"]


async def test_closing_does_not_wait_for_a_copy_and_sends_nothing_half_made(gate: threading.Event) -> None:
    async with ActorSystem.local(2, serialize=True) as system:
        (far,) = await system.spawn(Far, hosts=[1], name="far")
        calls = [far.note(torch.ones(BIG)), far.note(1)]
        waits = asyncio.gather(*calls, return_exceptions=True)
        await asyncio.sleep(0)
    assert [type(end) for end in await waits] == [ActorDied] * 2
    gate.set()


async def test_a_host_that_is_lost_during_a_copy_fails_the_calls_that_wait_for_it(gate: threading.Event) -> None:
    async with ActorSystem.local(2, serialize=True) as system:
        (far,) = await system.spawn(Far, hosts=[1], name="far")
        waits = asyncio.gather(far.note(torch.ones(BIG)), far.note(1), return_exceptions=True)
        await asyncio.sleep(0)
        system._host.lost(1, "killed by the test")
        assert [type(end) for end in await waits] == [ActorDied] * 2
        gate.set()


async def test_a_copy_that_fails_is_an_error_of_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(to: torch.Tensor, source: torch.Tensor) -> None:
        raise MemoryError("no more of it")

    async with opened("arena") as (_, far):
        with monkeypatch.context() as patch:
            patch.setattr(copies, "_copy", fail)
            with pytest.raises(RuntimeFault, match=r"copied.*from.*no"):
                await far.total(torch.ones(BIG))
        assert await far.total(torch.ones(BIG)) == BIG


@pytest.mark.skipif(not Arena.available(), reason="needs memfd")
def test_a_copy_holds_nothing_once_it_is_done(gate: threading.Event) -> None:
    arena, left, told = Arena(0), [], threading.Event()
    (begun,) = copies.start([(arena.empty(BIG), torch.ones(BIG))])

    def done(_: Any) -> None:
        left.append(arena.statistics().slots)
        told.set()

    begun.add_done_callback(done)
    assert arena.statistics().slots == 1
    gate.set()
    assert told.wait(60)
    assert left == [0]


@settings(max_examples=200)
@given(st.lists(st.sampled_from(["post", "lazily", "hold", "hold nothing", "done", "tick", "moment"]), max_size=30))
def test_messages_keep_their_order_whatever_is_held_back(steps: list[str]) -> None:
    arrived: list[int] = []

    async def main() -> None:
        loop, network = asyncio.get_running_loop(), dict[int, LocalTransport]()
        ends = [LocalTransport(number, network) for number in (0, 1)]
        there, link = Link(0, ends[1], _Arrivals(loop, arrived)), Link(1, ends[0], _Arrivals(loop, []))
        ends[0].bind(_Receiver(link))
        ends[1].bind(_Receiver(there))
        held: list[tuple[asyncio.Future[None], int]] = []
        numbers = itertools.count()
        for step in steps:
            if step in ("post", "lazily"):
                (link.post if step == "post" else link.post_lazily)((CAST, next(numbers)))
            elif step == "hold":
                held.append((loop.create_future(), next(numbers)))
                link.hold_back(held[-1][0])
                link.post((CAST, held[-1][1]))
            elif step == "hold nothing":
                held.append((loop.create_future(), -1))
                link.hold_back(held[-1][0])
            elif step == "done" and held:
                held.pop(len(held) // 2)[0].set_result(None)
            else:
                await asyncio.sleep(0 if step == "tick" else 1.0)
            assert not {number for _, number in held} & set(arrived)
        for ready, _ in held:
            loop.call_later(1.0, ready.set_result, None)
        await link.drained()
        assert arrived == list(range(next(numbers)))

    run_virtual(main())


class _Arrivals:
    """A host as a link sees it: keeps the second entries of messages."""

    def __init__(self, loop: asyncio.AbstractEventLoop, arrived: list[int]):
        self.loop, self.arrived = loop, arrived

    def deliver(self, link: Link, message: Any) -> None:
        self.arrived.append(message[1])

    def leaves_unawaited(self, message: list[Any]) -> None:
        raise AssertionError(message)


class _Receiver:
    """Hands frames to a link."""

    def __init__(self, link: Link):
        self.link = link

    def receive(self, source: int, frame: Frame, respond: Respond) -> None:
        self.link.receive(frame, respond)

    def lost(self, host: int, reason: str) -> None:
        raise AssertionError(reason)


# What a process may use of the machine ------------------------------------------------------------------------------


@pytest.mark.skipif(not Arena.available(), reason="needs memfd")
def test_processes_of_a_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Arena(0).limit
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert Arena(0).limit == whole // 8
