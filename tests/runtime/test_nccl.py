"""Groups over NCCL, by a model of its rules: every exchange ends with the right bytes, and failures end for all."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf import ActorSystem
from rlinf.runtime.transport import process_groups
from rlinf.runtime.transport.collectives import Collectives
from rlinf.runtime.transport.process_groups import (
    CollectiveError,
    CollectiveTimeout,
    GlooLine,
    Group,
    Lines,
    NcclLines,
    WaitingThreads,
)
from rlinf.runtime.values.p2p import GroupBulk
from rlinf.runtime.values.pickler import GroupRef
from tests.runtime.nccl_model import Communicator, Event, Machine, Network, Ticket
from tests.training.device_watch import pretended

HOSTS = (0, 1, 2)
PATIENCE = 20.0
"""Seconds after which an exchange has got stuck; it takes some milliseconds."""


class Devices:
    """The hosts' ends of groups over modelled NCCL, in one process."""

    def __init__(self, pool: int = 32):
        self.machine = Machine(pool)
        self.networks: dict[Any, Network] = {}
        self.ends: list[Communicator] = []
        self.groups: dict[str, list[Group]] = defaultdict(list)
        self.threads = [WaitingThreads(f"host {host}") for host in HOSTS]

    def connect(self, host: int, name: str, members: tuple[int, ...]) -> Callable[[str, tuple[int, ...]], Communicator]:
        def connect(kind: str, positions: tuple[int, ...]) -> Communicator:
            hosts = tuple(members[position] for position in positions)
            network = self.networks.setdefault((name, kind, hosts), Network(self.machine, hosts))
            self.ends.append(Communicator(network, host))
            return self.ends[-1]

        return connect

    def lines(self, host: int, name: str, members: tuple[int, ...]) -> Lines:
        device = torch.device("cuda", host)
        return NcclLines(self.connect(host, name, members), members.index(host), len(members), device, PATIENCE)

    def group(self, host: int, name: str = "all", members: tuple[int, ...] = HOSTS, **options: Any) -> Group:
        options = {"lines": self.lines(host, name, members), "deadline": PATIENCE, **options}
        return Group(name, members, host, threads=self.threads[host], **options)


@contextlib.contextmanager
def modelled(pool: int = 32) -> Iterator[Devices]:
    devices = Devices(pool)
    with devices.machine.patched():
        yield devices
    for threads in devices.threads:
        threads.close()


# Groups -------------------------------------------------------------------------------------------------------------

Step = tuple[int, int]
"""A tensor that goes from one host to another; from one host to itself: a broadcast from it."""
exchanges = st.lists(st.tuples(st.sampled_from(HOSTS), st.sampled_from(HOSTS)), min_size=1, max_size=10)


async def exchange(devices: Devices, steps: list[Step], seed: int) -> None:
    """Each host begins its operations in an order of its own, which keeps only that of each direction, and that of the
    broadcasts; it goes on without some of the receives. What arrives is what was sent."""
    drawn = random.Random(seed)
    groups = [devices.group(host) for host in HOSTS]
    calls: list[Any] = []

    async def host(rank: int) -> None:
        mine = [(number, step) for number, step in enumerate(steps) if rank in step or step[0] == step[1]]
        order = [_line(step) for _, step in mine]
        drawn.shuffle(order)
        for line in order:
            entry = next(entry for entry in mine if _line(entry[1]) == line)
            mine.remove(entry)
            number, (source, target) = entry
            value = torch.full((3,), float(number))
            if source == target:
                coming = value if rank == source else torch.full((3,), -1.0)
                calls.append((number, asyncio.ensure_future(groups[rank].broadcast(coming, source))))
            elif rank == source:
                calls.append((None, asyncio.ensure_future(groups[rank].send(value, target))))
            else:
                receiving = asyncio.ensure_future(groups[rank].recv(torch.full((3,), -1.0), source))
                calls.append((number, receiving))
                if drawn.random() < 0.2:
                    asyncio.get_running_loop().call_soon(receiving.cancel)
            for _ in range(drawn.randrange(4)):
                await asyncio.sleep(0)

    await asyncio.gather(*map(host, HOSTS))
    await asyncio.wait([call for _, call in calls])
    for number, call in calls:
        if not call.cancelled():
            got = call.result()
            assert number is None or got.tolist() == [number] * 3
    await asyncio.gather(*(group.close() for group in groups))


def _line(step: Step) -> Any:
    return "all" if step[0] == step[1] else step


@settings(max_examples=80, deadline=None)
@given(exchanges, st.integers(0, 1 << 20))
def test_every_exchange_ends_with_the_right_bytes(steps: list[Step], seed: int) -> None:
    with modelled() as devices:
        asyncio.run(asyncio.wait_for(exchange(devices, steps, seed), PATIENCE))


async def test_a_receive_that_is_posted_early_leaves_the_default_stream_alone() -> None:
    with modelled() as devices:
        receiving = asyncio.ensure_future(devices.group(0).recv(torch.zeros(2), 1))
        sender = devices.group(1)
        await asyncio.sleep(0.02)
        computed = Event(devices.machine)
        computed.record(devices.machine.current(0))
        assert computed.ticket is not None
        assert computed.ticket.passed
        assert not receiving.done()
        await sender.send(torch.ones(2), 0)
        assert (await receiving).tolist() == [1, 1]


@pytest.mark.parametrize("operation", ["send", "broadcast"])
async def test_what_is_sent_is_what_the_default_stream_makes_of_it(operation: str) -> None:
    """The tensor is still being computed when it is sent."""
    with modelled() as devices:
        one, other = devices.group(0, members=(0, 1)), devices.group(1, members=(0, 1))
        value, computing = torch.zeros(2), Ticket()
        devices.machine.enqueue(devices.machine.current(0), ("wait", computing))
        if operation == "send":
            calls = [one.send(value, 1), other.recv(torch.zeros(2), 0)]
        else:
            calls = [one.broadcast(value, 0), other.broadcast(torch.zeros(2), 0)]
        ends = [asyncio.ensure_future(call) for call in calls]
        await asyncio.sleep(0.05)
        assert not any(end.done() for end in ends)
        with devices.machine.changed:
            value.fill_(7)
            computing.passed = True
            devices.machine.advance()
        assert (await asyncio.gather(*ends))[1].tolist() == [7, 7]
        assert sorted(device for device, _ in devices.machine.recorded) == [0, 1]  # kept from being used again


async def test_a_failure_aborts_the_communicator_and_all_members_learn_its_cause() -> None:
    with modelled() as devices:
        groups: list[Group] = []

        def tell(why: str) -> None:
            for group in groups[1:]:
                group.fail(why)

        groups += [devices.group(0, deadline=0.2, tell=tell), devices.group(1), devices.group(2)]
        late = asyncio.ensure_future(groups[1].broadcast(torch.ones(1), 2))  # would wait for PATIENCE
        with pytest.raises(CollectiveTimeout, match=r"1.*on.*0:.*after 0.2") as first:
            await groups[0].recv(torch.ones(1), 1)
        with pytest.raises(CollectiveError, match=r"broadcast.*2:.*given.*1"):
            await asyncio.wait_for(late, 10)
        with pytest.raises(CollectiveTimeout) as again:
            await groups[0].send(torch.ones(1), 1)
        assert again.value is first.value
        await asyncio.gather(*(group.close() for group in groups))
        assert {end.device for end in devices.ends if "abort" in end.calls} == {0, 1}
        assert all(not threads._busy for threads in devices.threads)  # none is left inside of NCCL


async def test_closing_aborts_what_is_under_way_and_leaves_in_order_otherwise() -> None:
    with modelled() as devices:
        one, other = devices.group(0), devices.group(1)
        await asyncio.gather(one.send(torch.ones(1), 1), other.recv(torch.ones(1), 0))
        waiting = asyncio.ensure_future(other.recv(torch.ones(1), 0))
        await asyncio.sleep(0.02)
        await asyncio.gather(one.close(), other.close())
        with pytest.raises(CollectiveError, match="was closed"):
            await waiting
        assert [end.calls[0] for end in sorted(devices.ends, key=lambda end: end.device)] == ["shutdown", "abort"]


def test_the_settings_of_torch_let_the_runtime_speak_first(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}

    class Backend:
        class Options:
            pass

        def __init__(self, store: Any, position: int, size: int, options: Any):
            made.update(vars(options), members=(position, size))

    class Store:
        def set_timeout(self, limit: timedelta) -> None:
            made["store"] = limit

    monkeypatch.setattr(process_groups.dist, "ProcessGroupNCCL", Backend, raising=False)
    monkeypatch.setenv("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "1234")
    for name in process_groups.settings(300.0):
        if name != "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC":
            monkeypatch.delenv(name, raising=False)
    process_groups.communicator(Store(), 1, 2, 300.0)
    assert made["members"] == (1, 2)
    assert made["store"].total_seconds() == 300
    assert made["_timeout"].total_seconds() > 300
    assert process_groups.os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"  # never throws in a thread of its own
    assert process_groups.os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == "1234"  # what the user says
    assert float(process_groups.settings(300.0)["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"]) > made["_timeout"].total_seconds()


class Registered:
    """A group of a mesh, as torch knows it."""

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def abort(self) -> None:
        self.aborted.set()


async def _meshed(told: list[Any]) -> tuple[Collectives, Registered]:
    collectives = Collectives(None, 0, 1, tell=lambda *what: told.append(what))
    await collectives.mesh("trainer", [0])
    collectives._leave("trainer")
    await asyncio.gather(*collectives._leaving)
    collectives._lines["trainer"] = [group := Registered()]
    return collectives, group


async def test_the_failure_of_one_rank_aborts_the_mesh_on_all_of_them() -> None:
    told: list[Any] = []
    collectives, group = await _meshed(told)
    mesh = asyncio.ensure_future(asyncio.sleep(0, SimpleNamespace(mesh=torch.tensor([0, 1, 3]), _pg_registry={})))
    collectives._made["trainer"] = "a mesh of three", mesh
    await mesh
    collectives.failed("nobody's", "who knows")
    collectives.failed("trainer", "rank 0 ran out of memory")
    assert told == [(host, "trainer", "rank 0 ran out of memory") for host in (1, 3)]
    await asyncio.gather(*collectives._leaving)
    assert group.aborted.is_set()
    told.clear()
    collectives.failed("trainer", "rank 1 ran out of memory", tell=False)  # by another one
    assert told == []
    collectives._lines.clear()
    await collectives.close()


async def test_a_mesh_that_cannot_be_left_in_order_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    collectives, group = await _meshed([])
    left: list[Any] = []

    def destroy(groups: list[Any]) -> None:
        assert groups[0].aborted.wait(20)
        left.append(groups.pop())

    monkeypatch.setattr("rlinf.runtime.transport.collectives.destroy", destroy)
    await collectives.close()
    assert left == [group]


@pytest.mark.parametrize(("writes", "copied"), [(True, ("cpu", "cuda")), (False, ("cuda", "cpu"))])
def test_what_gloo_moves_between_two_hosts_of_a_gpu_crosses_the_bus_once_at_each(
    writes: bool, copied: tuple[str, str]
) -> None:
    with pretended() as watch:
        tensor = torch.empty(1000, device="cuda")
        GlooLine(None, 1.0).post(tensor, lambda backend, data: mock.Mock(), writes, None)()
    assert {way: size for way, size in watch.copied.items() if size} == {copied: tensor.nbytes}


@pytest.mark.parametrize(
    ("gpus", "backend"),
    [(["a", "b"], "nccl"), (["a", "a"], "gloo"), (["cpu", "cpu"], "nccl"), (["a", "b", "a"], "gloo")],
)
def test_two_hosts_on_one_gpu_use_gloo(gpus: list[str], backend: str) -> None:
    asyncio.run(_check_backend(gpus, backend))


async def _check_backend(gpus: list[str], backend: str) -> None:
    collectives = Collectives(None, 0, len(gpus), gpu=gpus.__getitem__)
    assert collectives.backend("cuda", range(len(gpus))) == backend
    assert collectives.backend("cpu", range(len(gpus))) == "gloo"
    assert collectives.backend("cuda", [0]) == "nccl"


# Big tensors beside messages ----------------------------------------------------------------------------------------


class Bulk(GroupBulk):
    """Takes CPU tensors for those of the host's GPU."""

    def announce(self, tensor: torch.Tensor) -> GroupRef:
        return dataclasses.replace(super().announce(tensor), device="cuda")

    def _empty(self, ref: GroupRef) -> torch.Tensor:
        return torch.full(ref.shape, -1.0)


class ModelledCollectives:
    def __init__(self, devices: Devices, host: int):
        self.devices, self.host = devices, host
        self.groups: dict[str, Group] = {}
        self.peers: dict[str, list[Group]] = devices.groups

    def backend(self, device_type: str, ranks: list[int]) -> str:
        return "nccl"

    def failed(self, name: str, why: str) -> None:
        for group in self.peers[name]:
            group.fail(why)

    async def group(self, name: str, ranks: list[int], backend: str) -> Group:
        await asyncio.sleep(0)
        if name not in self.groups:
            self.groups[name] = self.devices.group(self.host, name, tuple(ranks))
            self.peers[name].append(self.groups[name])
        return self.groups[name]


@contextlib.asynccontextmanager
async def hosts(devices: Devices) -> AsyncIterator[list[Bulk]]:
    async with ActorSystem.local(len(HOSTS), serialize=True) as system:
        assert system._network is not None
        ends = [system._network.system(number)._host for number in HOSTS]
        bulks = [Bulk(host, ModelledCollectives(devices, host.rank)) for host in ends]  # type: ignore[arg-type]
        for host, bulk in zip(ends, bulks, strict=True):
            host.codec.bulk = bulk
        yield bulks


async def transfers(devices: Devices, steps: list[Step], seed: int) -> None:
    """Messages with tensors, all at once; each comes in the order of its direction, some time later."""
    drawn = random.Random(seed)
    async with hosts(devices) as bulks:
        coming: list[tuple[int, asyncio.Future[torch.Tensor]]] = []
        wires: dict[Step, list[tuple[int, GroupRef]]] = {}
        for number, (source, target) in enumerate(steps):
            tensor = torch.full((2,), float(number))
            ref = bulks[source].announce(tensor)
            bulks[source].send(tensor, ref, target, None)
            wires.setdefault((source, target), []).append((number, ref))
        while wires:
            way = drawn.choice(sorted(wires))
            number, ref = wires[way].pop(0)
            coming.append((number, bulks[way[1]].receive(ref)))
            if not wires[way]:
                del wires[way]
            for _ in range(drawn.randrange(6)):
                await asyncio.sleep(0)
        for number, arrival in coming:
            assert (await arrival).tolist() == [number] * 2


async def test_a_receiver_without_room_fails_the_sender_at_once() -> None:
    with modelled() as devices:
        async with hosts(devices) as bulks:

            def full(ref: GroupRef) -> torch.Tensor:
                raise RuntimeError("CUDA out of memory")

            bulks[1]._empty = full  # type: ignore[method-assign]
            ref = bulks[0].announce(torch.ones(2))
            sending = bulks[0]._host.own(bulks[0]._send(torch.ones(2), ref, 1, None))
            with pytest.raises(RuntimeError, match=r"out.*memory"):
                await asyncio.wait_for(bulks[1].receive(ref), 60)
            with pytest.raises(CollectiveError, match=r"1.*tensor.*shape \[2\]: CUDA"):
                await asyncio.wait_for(sending, 60)
            again = bulks[1].receive(dataclasses.replace(bulks[0].announce(torch.ones(2)), tag=7))
            bulks[1].begun(0, 7)
            with pytest.raises(RuntimeError, match=r"out.*memory"):
                await asyncio.wait_for(again, 60)  # the GPU is free again


@settings(max_examples=60, deadline=None)
@given(exchanges, st.integers(0, 1 << 20))
def test_transfers_end_even_if_a_device_has_a_single_stream(steps: list[Step], seed: int) -> None:
    steps = [(source, target) for source, target in steps if source != target]
    with modelled(pool=1) as devices:
        asyncio.run(asyncio.wait_for(transfers(devices, steps, seed), PATIENCE))
