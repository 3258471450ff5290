"""Handles of CUDA memory: each is opened or refused, and the sender gets its memory back whatever becomes of them.

`Ledger` counts as torch does, in the place of its shared memory; tensors of the CPU stand for CUDA's.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import itertools
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses import FakeTensorMode

from rlinf import Actor, ActorSystem, endpoint
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.transport import copies
from rlinf.runtime.values.p2p import Handles, unshareable
from rlinf.runtime.values.pickler import BULK_BYTES, INLINE_BYTES, IpcRef, reading_codec
from tests.runtime.worlds import until

SIZE = INLINE_BYTES // 4
"""Elements of 4 bytes of the smallest tensor that goes by a handle."""


class Ledger:
    """Torch's counts of receivers, by handle: what `reduce_tensor` and what it returns do to them."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.lowered: dict[int, int] = {}
        self.kept: dict[int, torch.Tensor] = {}
        """The senders' memory that torch has not come to free."""
        self.killed: set[int] = set()
        self._numbers = itertools.count()
        self._cache: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def reduce(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        if any(known() is storage for known in self._cache.values()):
            raise RuntimeError("Attempted to send CUDA tensor received from another process")
        number = next(self._numbers)
        self.counts[number], self.kept[number] = 1, tensor
        handle = storage.data_ptr()
        return _rebuild, (*range(7), handle, *range(3), "file", number, "event", True)

    def rebuild(self, handle: int, number: int) -> torch.Tensor:
        assert self.counts[number] == 1, "opened after it was let go of"
        known = self._cache.get(handle)
        if known is not None and (storage := known()) is not None:
            self.lower("file", number)
            return torch.empty(0).set_(storage)  # type: ignore[call-overload,no-any-return]
        tensor = self.kept[number].clone()
        storage = tensor.untyped_storage()
        self._cache[handle] = weakref.ref(storage)
        codec = reading_codec()
        assert codec is not None
        weakref.finalize(storage, self._dropped, codec.host.rank, number)
        return tensor

    def _dropped(self, host: int, number: int) -> None:
        if host not in self.killed:
            self.lower("file", number)

    def lower(self, file: str, number: int) -> None:
        assert file == "file"
        self.counts[number] -= 1
        assert self.counts[number] >= 0, "lowered twice: another tensor may have this counter by now"

    def collect(self) -> None:
        for number in [number for number in self.kept if not self.counts[number]]:
            del self.kept[number]


_ledger: Ledger


def _rebuild(*args: Any) -> torch.Tensor:
    return _ledger.rebuild(args[7], args[12])


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ledger]:
    global _ledger
    _ledger = ledger = Ledger()

    def route(codec: Any, tensor: torch.Tensor, host: int) -> str:
        return "ipc" if tensor.nbytes >= INLINE_BYTES else "inline"

    monkeypatch.setattr("torch.multiprocessing.reductions.reduce_tensor", ledger.reduce)
    monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter", ledger.lower)
    monkeypatch.setattr(torch.cuda, "ipc_collect", ledger.collect)
    monkeypatch.setattr("rlinf.runtime.values.codec.Codec.route", route)
    yield ledger
    assert not any(ledger.counts.values())


class Holder(Actor):
    async def setup(self) -> None:
        self.held: list[torch.Tensor] = []

    @endpoint
    async def hold(self, tensor: torch.Tensor) -> None:
        self.held.append(tensor)

    @endpoint
    async def total(self, tensor: torch.Tensor) -> float:
        return float(tensor.sum())

    @endpoint
    async def make(self, fill: float) -> torch.Tensor:
        return torch.full((SIZE,), fill)

    @endpoint
    async def pass_on(self, tensor: torch.Tensor, to: Any) -> float:
        total: float = await to.total(tensor)
        return total

    @endpoint
    async def drop(self) -> None:
        self.held.clear()


def _out(system: ActorSystem) -> dict[int, int]:
    assert system._network is not None
    return {number: each._host.values.handles.out for number, each in system._network.systems.items()}


async def test_500_sends_half_of_them_discarded_and_a_holder_killed_leave_nothing_behind(ledger: Ledger) -> None:
    async with ActorSystem.local(3, serialize=True) as system:
        near, doomed = await system.spawn(Holder, hosts=[1, 2], name="holder")
        for number in range(125):
            await asyncio.gather(near.hold(torch.full((SIZE,), 1.0)), doomed.hold(torch.full((SIZE,), 2.0)))
            wanted, dropped = near.make(float(number)), near.make(-1.0)
            dropped.want()
            dropped.cancel()
            assert (await wanted)[0] == number
            del wanted
        assert len(ledger.counts) == 500
        await until(lambda: _out(system) == {0: 250, 1: 0, 2: 0})  # those that are held
        await near.drop()
        await until(lambda: len(ledger.kept) == 125)
        ledger.killed.add(2)
        system._host.lost(2, "killed by the test")
        assert ledger.kept == {}
        assert _out(system)[0] == 0
        await system._network.system(2)._host.cells[doomed._actor].actor.drop()  # type: ignore[union-attr]


async def test_memory_that_is_sent_twice_is_returned_once_for_each(ledger: Ledger) -> None:
    async with ActorSystem.local(2, serialize=True) as system:
        (far,) = await system.spawn(Holder, hosts=[1], name="holder")
        same = torch.full((SIZE,), 1.0)
        for _ in range(3):
            await far.hold(same)
        await until(lambda: _out(system)[0] == 1)  # what the first one opened serves them all
        assert sorted(ledger.counts.values()) == [0, 0, 1]
        await far.drop()
        await until(lambda: _out(system)[0] == 0)
        assert ledger.kept == {}


async def test_what_came_by_a_handle_is_copied_to_be_sent_on(ledger: Ledger) -> None:
    async with ActorSystem.local(3, serialize=True) as system:
        first, last = await system.spawn(Holder, hosts=[1, 2], name="holder")
        assert await first.pass_on(torch.full((SIZE,), 2.0), last) == 2 * SIZE
        await until(lambda: not any(_out(system).values()))
        assert ledger.kept == {}


async def test_a_handle_that_does_not_leave_is_taken_back(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(to: torch.Tensor, source: torch.Tensor) -> None:
        raise MemoryError("no more of it")

    def mixed(codec: Any, tensor: torch.Tensor, host: int) -> str:
        return "ipc" if tensor.nbytes == INLINE_BYTES else "rpc"

    monkeypatch.setattr("rlinf.runtime.values.codec.Codec.route", mixed)
    async with ActorSystem.local(2, serialize=True) as system:
        (far,) = await system.spawn(Holder, hosts=[1], name="holder")
        with pytest.raises(UserError, match="lambda"):
            far.hold([torch.ones(SIZE), lambda: 0])
        assert ledger.counts == {}  # handles are made last
        with monkeypatch.context() as patch, contextlib.suppress(Exception):
            patch.setattr(copies, "_copy", fail)  # of the big one beside it
            await far.hold([torch.ones(SIZE), torch.ones(1 << 20)])
        assert ledger.counts == {0: 0}
        assert ledger.kept == {}


class Unreadable:
    """Can be pickled, and not read again."""

    def __reduce__(self) -> Any:
        return _explode, ()


def _explode() -> None:
    raise LookupError("exploded while it was read")


async def test_an_argument_that_cannot_be_read_and_an_actor_that_ends_return_their_handles(ledger: Ledger) -> None:
    async with ActorSystem.local(2, serialize=True) as system:
        group = await system.spawn(Holder, hosts=[1], name="holder")
        with pytest.raises(LookupError):
            await group.hold([Unreadable(), torch.ones(SIZE)])
        assert sum(ledger.counts.values()) == 0
        calls = [group[0].hold(torch.ones(SIZE)) for _ in range(4)]
        calls[1].cancel()
        await system.kill(group)
        await asyncio.gather(*calls, return_exceptions=True)
        assert len(ledger.counts) == 5
        del calls, group
        await until(lambda: gc.collect() >= 0 and _out(system)[0] == 0)
        assert ledger.kept == {}


@pytest.mark.parametrize(
    ("setting", "refused"),
    [
        ({}, None),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, None),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, None),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64, expandable_segments:True"}, "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, "backend:cudaMallocAsync"),
    ],
)
def test_settings_that_keep_memory_from_being_shared_are_known(setting: dict[str, str], refused: str | None) -> None:
    found = unshareable(setting)
    assert found == (refused and f"{next(iter(setting))}={refused}")


@pytest.mark.parametrize("setting", ["", "expandable_segments:True"])
async def test_the_route_of_a_cuda_tensor_of_one_gpu(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", setting)
    async with ActorSystem.local(2, serialize=True) as system:
        said: list[str] = []
        host = system._host
        host.complain = lambda text, error=None: said.append(text)  # type: ignore[method-assign]
        for number in (0, 1):
            host.places[number] = dataclasses.replace(host.places[number], device="GPU-1")
        host.codec.place = host.places[0]
        with FakeTensorMode():
            small, big = (torch.empty(count, device="cuda") for count in (SIZE - 1, SIZE))
            for _ in range(2):
                assert host.codec.route(small, 1) == "inline"
                assert host.codec.route(big, 1) == ("rpc" if setting else "ipc")
        assert [text.split()[0] for text in said] == ([f"PYTORCH_CUDA_ALLOC_CONF={setting}"] if setting else [])


async def test_a_handle_is_opened_on_the_receivers_own_gpu_whatever_number_the_sender_gives_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlinf.runtime.values.p2p.own_device", lambda: torch.device("cuda", 3))
    opened: list[tuple[Any, ...]] = []

    def rebuild(*args: Any) -> torch.Tensor:
        opened.append(args)
        return torch.ones(1)

    Handles(0, lambda owner, number: None).open(IpcRef(1, -1, rebuild, tuple("abcdefghijklmno")))
    assert opened == [(*"abcdef", 3, *"hijklmno")]


@pytest.mark.parametrize(("device", "route"), [("GPU-2", "group"), ("cpu", "rpc")])
async def test_the_route_of_a_cuda_tensor_to_another_device(device: str, route: str) -> None:
    async with ActorSystem.local(2, serialize=True) as system:
        host = system._host
        for number, where in ((0, "GPU-1"), (1, device)):
            host.places[number] = dataclasses.replace(host.places[number], device=where)
        host.codec.place, host.codec.bulk = host.places[0], mock.Mock()
        with FakeTensorMode():
            assert host.codec.route(torch.empty(BULK_BYTES, device="cuda"), 1) == route
