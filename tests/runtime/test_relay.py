"""Big values between machines: one copy to each machine, handed on in a tree, gone when the owner drops them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from rlinf import Actor, ActorSystem, endpoint
from rlinf.runtime.base.errors import ActorDied
from rlinf.runtime.values import relay
from rlinf.runtime.values.pickler import ValueRef
from rlinf.runtime.values.relay import FAN_OUT, RELAY_BYTES
from tests.runtime.worlds import nothing_left

BIG = RELAY_BYTES // 4
"""Elements of 4 bytes."""


@dataclass
class Batch:
    """What is sent: a tensor among other things."""

    names: list[str]
    rows: torch.Tensor


class Maker(Actor):
    @endpoint
    async def make(self, count: int) -> Batch:
        return Batch(["a"], torch.arange(float(count)))

    @endpoint
    async def fail(self) -> Batch:
        raise LookupError("nothing to make it of")


class Reader(Actor):
    async def setup(self) -> None:
        self.held: list[Batch] = []

    @endpoint
    async def total(self, batch: Batch) -> float:
        batch.names.append("read")  # one's own containers may be changed
        assert batch.names == ["a", "read"]
        return float(batch.rows.sum())

    @endpoint
    async def hold(self, batch: Batch) -> int:
        self.held.append(batch)
        return int(batch.rows.data_ptr())


class Net:
    """Hosts on machines that are not, and what goes between them."""

    def __init__(self, system: ActorSystem, machines: list[int]):
        assert system._network is not None
        self.system = system
        self.machines = machines
        self.hosts = [system._network.system(number)._host for number in range(len(machines))]
        self.bytes: Counter[tuple[int, int]] = Counter()
        """Of tensors, from host to host on another machine."""
        for host in self.hosts:
            place = dataclasses.replace(host.places[host.rank], machine=f"machine {machines[host.rank]}")
            host.places[host.rank] = host.codec.place = place
            host.codec.route = self._counting(host.rank, host.codec.route)  # type: ignore[method-assign]

    def _counting(self, source: int, route: Any) -> Any:
        def counted(tensor: torch.Tensor, target: int) -> Any:
            if self.machines[source] != self.machines[target]:
                self.bytes[source, target] += tensor.nbytes
            return route(tensor, target)

        return counted

    def received(self) -> dict[int, int]:
        """Bytes that came to each machine from others."""
        found: Counter[int] = Counter()
        for (_, target), count in self.bytes.items():
            found[self.machines[target]] += count
        return dict(found)

    def sent(self) -> dict[int, int]:
        """Bytes that each host sent to other machines."""
        found: Counter[int] = Counter()
        for (source, _), count in self.bytes.items():
            found[source] += count
        return dict(found)


@contextlib.asynccontextmanager
async def opened(machines: list[int], *, clean: bool = True) -> AsyncIterator[tuple[Net, Any, Any]]:
    """One host per entry, on the machine of that number; a maker on host 1, readers from host 2 on."""
    async with ActorSystem.local(len(machines), serialize=True) as system:
        net = Net(system, machines)
        async with system.scope():
            (maker,) = await system.spawn(Maker, hosts=[1], name="maker")
            readers = await system.spawn(Reader, hosts=list(range(2, len(machines))), name="readers")
            net.bytes.clear()
            yield net, maker, readers
        if clean:
            await nothing_left(system)


def total(count: int) -> float:
    return float(torch.arange(float(count)).sum())


async def test_every_machine_gets_one_copy_and_none_sends_more_than_a_few() -> None:
    async with opened([0, 0] + [1 + host // 4 for host in range(32)]) as (net, maker, readers):
        batch = maker.make(BIG)
        assert await asyncio.gather(*[reader.total(batch) for reader in readers]) == [total(BIG)] * 32
        assert net.received() == dict.fromkeys(range(1, 9), 4 * BIG)
        assert max(net.sent().values()) == FAN_OUT * 4 * BIG
        assert await readers[31].total(batch) == total(BIG)  # asked for later: it is there
        assert net.received() == dict.fromkeys(range(1, 9), 4 * BIG)
        del batch


async def test_hosts_of_the_owners_machine_need_no_copy_of_their_own() -> None:
    async with opened([0, 0, 0, 1, 1]) as (net, maker, readers):
        batch = maker.make(BIG)
        assert await asyncio.gather(*[reader.total(batch) for reader in readers]) == [total(BIG)] * 3
        assert net.received() == {1: 4 * BIG}
        del batch


@pytest.fixture
def on_cards(monkeypatch):
    """Every value lies on a GPU, of which each host has one, or shares one with the next. Counts what was sent."""
    monkeypatch.setattr(relay, "on_gpu", lambda tensor: True)

    def given(net: Net, shared: int = 1) -> Counter[tuple[int, int]]:
        sent: Counter[tuple[int, int]] = Counter()

        def counting(source: int, route: Any) -> Any:
            def counted(tensor: torch.Tensor, target: int) -> Any:
                sent[source, target] += 1
                return route(tensor, target)

            return counted

        for host in net.hosts:
            place = dataclasses.replace(host.places[host.rank], device=f"card {host.rank // shared}")
            host.places[host.rank] = host.codec.place = place
            host.codec.route = counting(host.rank, host.codec.route)  # type: ignore[method-assign]
        return sent

    return given


async def test_every_card_gets_one_copy_one_crosses_to_each_machine_and_no_card_sends_more_than_a_few(on_cards) -> None:
    machines = [host // 8 for host in range(32)]
    async with opened(machines) as (net, maker, readers):
        sent = on_cards(net)
        batch = maker.make(BIG)
        assert await asyncio.gather(*[reader.total(batch) for reader in readers]) == [total(BIG)] * 30
        assert Counter(target for _, target in sent) == Counter(range(2, 32))  # host 0 asked for nothing
        across = [(source, target) for source, target in sent if machines[source] != machines[target]]
        assert Counter(machines[target] for _, target in across) == {1: 1, 2: 1, 3: 1}
        assert max(Counter(source for source, _ in sent).values()) <= 2 * FAN_OUT
        del batch


async def test_hosts_that_share_a_card_have_one_copy_between_them(on_cards) -> None:
    async with opened([0] * 8) as (net, maker, readers):
        sent = on_cards(net, shared=2)
        batch = maker.make(BIG)
        assert await asyncio.gather(*[reader.total(batch) for reader in readers]) == [total(BIG)] * 6
        assert sum(source // 2 != target // 2 for source, target in sent) == 3
        del batch


async def test_a_card_whose_giver_is_lost_gets_its_copy_from_the_owner(on_cards) -> None:
    async with opened([0] * 8, clean=False) as (net, maker, readers):
        on_cards(net)
        batch = maker.make(BIG)
        assert await asyncio.gather(*[reader.total(batch) for reader in readers[:2]]) == [total(BIG)] * 2
        for host in net.hosts:
            if host.rank != 2:
                host.lost(2, "killed by the test")
        rest = [reader.total(batch) for reader in readers][2:]
        assert await asyncio.gather(*rest) == [total(BIG)] * 4
        del batch, rest


async def test_on_a_machine_a_value_lies_once_in_memory() -> None:
    async with opened([0, 0, 1, 1, 1]) as (net, maker, readers):
        if net.hosts[0].values.arena is None:
            pytest.skip("needs shared memory")
        batch = maker.make(BIG)
        await asyncio.gather(*[reader.hold(batch) for reader in readers])
        await asyncio.gather(*[reader.hold(batch) for reader in readers])
        assert sum(host.values.arena.statistics().slots for host in net.hosts[2:]) == 1
        del batch


async def test_small_values_come_straight_from_their_owner_and_nobody_keeps_them() -> None:
    async with opened([0, 0, 1, 1, 2]) as (net, maker, readers):
        batch = maker.make(10)
        assert await asyncio.gather(*[reader.total(batch) for reader in readers]) == [45.0] * 3
        assert net.received() == {1: 80, 2: 40}
        assert not any(host.values.relay.copies for host in net.hosts)
        del batch


async def test_an_error_in_place_of_a_value_reaches_everybody() -> None:
    async with opened([0, 0, 1, 1, 2]) as (_, maker, readers):
        batch = maker.fail()
        ends = await asyncio.gather(*[reader.total(batch) for reader in readers], return_exceptions=True)
        assert [str(end) for end in ends] == ["nothing to make it of"] * 3
        del batch


async def test_a_machine_whose_first_asker_gives_up_gets_the_value_all_the_same() -> None:
    async with opened([0, 0, 1, 1, 1, 2, 3, 3]) as (_, maker, readers):
        for moment in range(30):
            batch = maker.make(BIG)
            first, *rest = [reader.total(batch) for reader in readers]
            ends = asyncio.gather(*rest)
            first.want()
            for _ in range(moment):
                await asyncio.sleep(0)
            first.cancel()
            assert await ends == [total(BIG)] * 5, moment
            del batch, first, rest, ends


async def test_a_machine_whose_keeper_is_lost_gets_another_copy() -> None:
    async with opened([0, 0, 1, 1, 1, 2, 3, 3, 4, 4], clean=False) as (net, maker, readers):
        batch = maker.make(BIG)
        assert await readers[0].total(batch) == total(BIG)
        assert list(net.hosts[2].values.relay.copies) == [batch.key]
        for host in net.hosts:
            if host.rank != 2:
                host.lost(2, "killed by the test")
        rest = [reader.total(batch) for reader in readers][1:]
        assert await asyncio.gather(*rest) == [total(BIG)] * 7
        del batch, rest


async def test_whoever_asks_too_late_is_told() -> None:
    async with opened([0, 0, 1, 1]) as (net, maker, readers):
        batch = maker.make(BIG)
        assert await readers[0].total(batch) == total(BIG)
        ref = ValueRef(1, batch.key)
        del batch
        await nothing_of(net, ref.key)
        with pytest.raises(ActorDied, match="is gone"):
            await net.hosts[2].values.relay.fetch(ref)


async def nothing_of(net: Net, key: Any) -> None:
    while any(key in host.values.relay.copies or key in host.values.kept for host in net.hosts):
        await asyncio.sleep(0.002)
