"""Groups with names work in any overlap and order, fail with names, and carry FSDP2 over any subset of the hosts."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import threading
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import pytest_asyncio
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.fsdp import fully_shard

from rlinf import Actor, ActorSystem, endpoint
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.processes.supervisor import Worker
from rlinf.runtime.transport import process_groups
from rlinf.runtime.transport.collectives import CollectiveError, Collectives, CollectiveTimeout

HOSTS = 3
pytestmark = pytest.mark.asyncio(loop_scope="module")

Scenario = Callable[[Collectives, int], Any]


class Host:
    """One process of the job, in a child of the test."""

    def __init__(self, rank: int, port: int):
        torch.set_num_threads(1)
        self.rank = rank
        self._runner = asyncio.Runner()
        store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=30))
        self._collectives = Collectives(store, rank, HOSTS, deadline=20.0)

    def run(self, scenario: str) -> Any:
        coroutine = globals()[scenario](self._collectives, self.rank)
        return self._runner.run(asyncio.wait_for(coroutine, 25))

    def close(self) -> None:
        self._runner.run(self._collectives.close())


class Job:
    def __init__(self, port: int):
        kwargs = [{"rank": rank, "port": port} for rank in range(HOSTS)]
        self.hosts = [Worker(f"{__name__}:Host", kwargs[rank], name=f"host{rank}") for rank in range(HOSTS)]

    async def __call__(self, scenario: Scenario, ranks: tuple[int, ...] = (0, 1, 2)) -> list[Any]:
        """Run a scenario on hosts at the same time."""
        return await asyncio.gather(*(self.hosts[rank].call("run", scenario.__name__, timeout=30) for rank in ranks))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def job() -> AsyncIterator[Job]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = Job(store.port)
    await asyncio.gather(*(host.start() for host in job.hosts))
    yield job
    await asyncio.gather(*(host.stop() for host in job.hosts))


# Making groups ---------------------------------------------------------------------------------------------------


async def overlap(c: Collectives, rank: int) -> list[float]:
    """Host 0 makes both its groups at once, and host 1 comes to its one only when host 2 has long finished."""
    if rank == 0:
        pairs = await asyncio.gather(c.group("a", [0, 1]), c.group("b", [0, 2]))
    elif rank == 1:
        await c.group("alone", [1])
        late = await c.group("c", [2, 1])
        await late.recv(torch.empty(1), src=2)
        pairs = [await c.group("a", [0, 1])]
    else:
        pairs = [await c.group("b", [0, 2])]
        await (await c.group("c", [2, 1])).send(torch.ones(1), dst=1)
    assert await c.group(pairs[0].name, pairs[0].ranks) is pairs[0]
    first = [float(await pair.broadcast(torch.tensor([10.0**rank]), src=pair.ranks[0])) for pair in pairs]
    return first + [float(await pair.broadcast(torch.tensor([10.0**rank]), src=pair.ranks[1])) for pair in pairs]


async def test_groups_may_overlap_and_be_made_in_any_order_and_number(job: Job) -> None:
    assert await job(overlap) == [[1.0, 1.0, 10.0, 100.0], [1.0, 10.0], [1.0, 100.0]]


async def incomplete(c: Collectives, rank: int) -> str:
    with pytest.raises(CollectiveTimeout) as caught:
        await c.group("incomplete", [0, 1, 2], deadline=0.5)
    return str(caught.value)


async def test_a_group_that_does_not_come_together_names_who_is_missing(job: Job) -> None:
    (text,) = await job(incomplete, (0,))
    assert "'incomplete' of hosts [0, 1, 2]" in text
    assert "hosts [1, 2]" in text


async def quarrel(c: Collectives, rank: int) -> str:
    with pytest.raises(UserError) as caught:
        await c.group("quarrel", [0, 1] if rank == 0 else [1, 2])
    return str(caught.value)


async def test_hosts_that_mean_different_things_by_a_name_all_learn_both(job: Job) -> None:
    texts = await job(quarrel, (0, 1))
    assert texts[0] == texts[1]
    assert "hosts [0, 1] over gloo" in texts[0]
    assert "hosts [1, 2] over gloo" in texts[0]


# Operations ------------------------------------------------------------------------------------------------------


async def values(c: Collectives, rank: int) -> dict[str, Any]:
    group = await c.group("values", [2, 0, 1])
    sent = [torch.arange(6.0).reshape(2, 3).t(), torch.tensor(7), torch.tensor([True, False]), torch.ones(2).bfloat16()]
    got = [tensor if rank == 1 else torch.zeros_like(tensor) for tensor in sent]
    await asyncio.gather(*(group.broadcast(tensor, src=1) for tensor in got))
    weight = nn.Parameter(torch.full((2,), float(rank)))
    await group.broadcast(weight, src=2)
    return {
        "broadcast": all(torch.equal(a, b) for a, b in zip(got, sent, strict=True)),
        "parameter": weight.tolist(),
    }


async def test_a_broadcast_gives_all_members_the_value_of_one(job: Job) -> None:
    assert await job(values) == [{"broadcast": True, "parameter": [2.0, 2.0]}] * 3


async def crossing(c: Collectives, rank: int) -> list[float]:
    group = await c.group("crossing", [0, 1])
    first, second, third = torch.full((1,), rank + 1.0), torch.full((1,), rank + 2.0), torch.zeros(1)
    if rank == 0:  # waits for both messages, in the wrong order, and for a broadcast that comes before them
        a, b, _ = await asyncio.gather(
            group.recv(first, src=1, tag=2), group.recv(second, src=1, tag=1), group.broadcast(third, src=1)
        )
        return [float(a), float(b), float(third)]
    await group.broadcast(third.fill_(5.0), src=1)
    await group.send(first, dst=0, tag=1)
    await group.send(second, dst=0, tag=2)
    return []


async def test_operations_under_way_do_not_hold_up_each_other(job: Job) -> None:
    assert (await job(crossing, (0, 1)))[0] == [3.0, 2.0, 5.0]


async def repeated(c: Collectives, rank: int) -> int:
    """How many threads 50 operations begin, one after the other."""
    group = await c.group("repeated", [0, 1])
    begun = 0
    start = threading.Thread.start

    def counted(thread: threading.Thread) -> None:
        nonlocal begun
        begun += 1
        start(thread)

    threading.Thread.start = counted  # type: ignore[method-assign]
    try:
        for _ in range(50):
            await group.broadcast(torch.ones(1), src=0)
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]
    return begun


async def test_operations_do_not_begin_a_thread_each(job: Job) -> None:
    assert max(await job(repeated, (0, 1))) <= 1


async def through_host_memory(c: Collectives, rank: int) -> list[Any]:
    """Two hosts on one GPU: their tensors are not where gloo works."""
    with mock.patch.object(process_groups, "_in_host_memory", return_value=False):
        group = await c.group("one gpu", [0, 1], c.backend("cpu", [0, 1]))
        value = torch.full((3,), float(rank)).bfloat16()
        await group.broadcast(value, src=1)
        got = torch.zeros(2, 2).t()
        if rank == 0:
            await group.send(torch.arange(4.0).reshape(2, 2), dst=1)
        else:
            await group.recv(got, src=0)
        return [value.tolist(), got.tolist()]


async def test_tensors_that_are_not_in_host_memory_are_copied_through_it(job: Job) -> None:
    nothing = [[0.0, 0.0], [0.0, 0.0]]
    assert await job(through_host_memory, (0, 1)) == [[[1.0] * 3, nothing], [[1.0] * 3, [[0.0, 1.0], [2.0, 3.0]]]]


async def deserted(c: Collectives, rank: int) -> list[Any]:
    group = await c.group("deserted", [0, 2], deadline=1.0)
    if rank == 2:
        return []
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticking = asyncio.create_task(tick())
    with pytest.raises(CollectiveTimeout) as caught:
        await group.broadcast(torch.ones(1), src=2)
    ticking.cancel()
    with pytest.raises(CollectiveTimeout) as again:
        await group.send(torch.ones(1), dst=2)
    return [str(caught.value), ticks > 1, str(again.value)]


async def test_a_missing_member_ends_in_an_error_that_names_group_operation_and_hosts(job: Job) -> None:
    (text, others_ran, again), _ = await job(deserted, (0, 2))
    assert all(
        part in text for part in ("broadcast from host 2", "'deserted' of hosts [0, 2]", "on host 0", "after 1 s")
    )
    assert others_ran
    assert again == text, "the group is broken: nobody waits once more"


async def leaving(c: Collectives, rank: int) -> list[str]:
    group = await c.group("leaving", [0, 1])
    await group.broadcast(torch.ones(1), src=0)
    if rank == 1:
        await group.close()
        return []
    texts = []
    with pytest.raises(CollectiveError) as lost:
        await group.recv(torch.ones(1), src=1)
    texts.append(str(lost.value))
    other = await c.group("leaving", [0, 1])
    with pytest.raises(CollectiveError) as again:
        await other.recv(torch.ones(1), src=1)
    return [*texts, str(again.value)]


async def test_a_member_that_leaves_fails_the_others_at_once(job: Job) -> None:
    lost, again = (await job(leaving, (0, 1)))[0]
    assert "recv from host 1" in lost
    assert "'leaving' of hosts [0, 1]" in lost
    assert again == lost


async def closing(c: Collectives, rank: int) -> str:
    group = await c.group("closing", [1, 2])
    if rank == 2:
        return ""
    waiting = asyncio.create_task(group.recv(torch.ones(1), src=2))
    await asyncio.sleep(0.05)
    await group.close()
    with pytest.raises(CollectiveError) as caught:
        await waiting
    return str(caught.value)


async def test_closing_ends_operations_under_way(job: Job) -> None:
    assert "was closed" in (await job(closing, (1, 2)))[0]


# Meshes ----------------------------------------------------------------------------------------------------------

BATCH = torch.linspace(-1, 1, 32).reshape(4, 8)


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))


def gradients(model: nn.Module) -> list[list[float]]:
    grads = [parameter.grad for parameter in model.parameters()]
    return [getattr(grad, "full_tensor", lambda grad=grad: grad)().flatten().tolist() for grad in grads]


def shard(model: nn.Sequential, mesh: Any) -> nn.Sequential:
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


async def sharded(c: Collectives, rank: int) -> list[Any]:
    """Hosts 0 and 2 share an actor and a critic, hosts 1 and 2 a judge; each role trains in a thread of its own."""
    names = {"critic": [0, 2], "actor": [0, 2]} if rank == 0 else {"judge": [1, 2]}
    if rank == 2:
        names = {"actor": [0, 2], "judge": [1, 2], "critic": [0, 2]}
    meshes = dict(zip(names, await asyncio.gather(*(c.mesh(name, names[name]) for name in names)), strict=True))
    models = {name: shard(network(len(name)), meshes[name]) for name in sorted(names)}

    def train(name: str) -> tuple[list[list[float]], float]:
        mesh, model = meshes[name], models[name]
        for _ in range(5):
            model.zero_grad()
            rows = BATCH[mesh.get_local_rank() :: 2]
            model(rows).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        return gradients(model), float(norm.full_tensor())

    results = await asyncio.gather(*(asyncio.to_thread(train, name) for name in names))
    return list(zip(names, results, strict=True))


async def test_fsdp_on_overlapping_meshes_gives_the_gradients_of_one_process(job: Job) -> None:
    trained = await job(sharded)
    assert sorted(name for host in trained for name, _ in host) == sorted(["actor", "critic", "judge"] * 2)
    for name, (found, norm) in (entry for host in trained for entry in host):
        model = network(len(name))
        model(BATCH).square().mean().backward()
        for mine, expected in zip(found, gradients(model), strict=True):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(expected))
        expected_norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
        assert norm == pytest.approx(float(expected_norm), rel=1e-5)


async def grid(c: Collectives, rank: int) -> list[Any]:
    """A mesh of two dimensions, whose lines are groups of their own."""
    mesh = await c.mesh("grid", [2, 0], shape=(2, 1), dims=("replicate", "shard"))
    total = torch.ones(1)
    dist.all_reduce(total, group=mesh["grid.replicate"].get_group())
    return [mesh.get_coordinate(), float(total), dist.get_world_size(mesh["grid.shard"].get_group())]


async def test_a_mesh_may_have_several_dimensions(job: Job) -> None:
    assert await job(grid, (0, 2)) == [[(1, 0), 2.0, 1], [(0, 0), 2.0, 1]]


async def without_group(c: Collectives, rank: int) -> list[Any]:
    await c.mesh("lone", [rank])
    for call in (dist.barrier, lambda: dist.all_reduce(torch.ones(1)), lambda: dist.broadcast_object_list([1])):
        with pytest.raises(UserError, match=r"without.*group"):
            call()
    return [dist.get_rank(), dist.get_world_size()]


async def test_a_collective_without_a_group_is_refused(job: Job) -> None:
    assert await job(without_group, (1,)) == [[1, 3]]


def taken() -> tuple[int, int, int]:
    """Groups that torch knows, threads and descriptors of this process."""
    gc.collect()  # modules that are spread over a mesh lie in cycles
    return len(c10d._world.pg_map), len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


async def moving(c: Collectives, rank: int) -> list[Any]:
    """A role is spread over one mesh after the other: what is taken after two of them, and after two more."""
    await c.mesh("stays", [0, 1])
    found: list[tuple[int, int, int]] = []
    for number in range(4):
        mesh = await c.mesh(f"moves {number}", [0, 1])
        shard(network(0), mesh)(BATCH).sum().backward()
        del mesh
        await c.release(f"moves {number}")
        await asyncio.gather(*c._leaving)
        if number == 1:  # the first move starts what torch starts once
            found.append(taken())
    deadline = asyncio.get_running_loop().time() + 10
    while any(now > before for now, before in zip(taken(), found[0], strict=True)):
        if asyncio.get_running_loop().time() > deadline:
            break
        await asyncio.sleep(0.01)  # threads of torch's, and the other host, close theirs a moment later
    found.append(taken())
    with pytest.raises(UserError, match=r"closed; take"):
        await c.mesh("moves 0", [0, 1])
    return found


async def test_a_mesh_that_was_released_leaves_nothing_behind(job: Job) -> None:
    for before, after in await job(moving, (0, 1)):
        assert all(now <= then for then, now in zip(before, after, strict=True)), (before, after)


async def interrupted(c: Collectives, rank: int) -> bool:
    """Released before the other hosts came: the thread that makes it notices only later."""
    if rank == 1:
        making = asyncio.create_task(c.mesh("interrupted", [1, 2]))
        await asyncio.to_thread(c._own_store().wait, ["mesh/interrupted.shard/1-2/here/1"])
        await c.release("interrupted")
        await asyncio.to_thread(c._own_store().set, "interrupted is released", "")
        with pytest.raises(asyncio.CancelledError):
            await making
        await c.group("interrupted, after", [1, 2])
        deadline = asyncio.get_running_loop().time() + 60
        while any("interrupted" in name for name in c10d._world.pg_names.values()):
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.01)  # a thread of torch's is what changes it
        return "interrupted" not in c._lines
    await asyncio.to_thread(c._own_store().wait, ["interrupted is released"])
    await c.mesh("interrupted", [1, 2])
    await c.group("interrupted, after", [1, 2])
    return True


async def test_a_mesh_that_is_released_while_it_is_made_is_left_once_it_is(job: Job) -> None:
    assert await job(interrupted, (1, 2)) == [True, True]


class Spread(Actor):
    async def setup(self, mesh: str, fails: bool = False) -> None:
        self.model = shard(network(0), await self.system.collectives.mesh(mesh, [self.host]))
        if fails:
            raise ValueError("no weights")

    @endpoint
    async def learn(self) -> None:
        self.model(BATCH).sum().backward()


async def test_the_meshes_of_an_actor_end_with_it_however_often_it_moves() -> None:
    async with ActorSystem.local(2) as system:
        found = []
        for number in range(6):
            host = number % 2
            group = await system.spawn(Spread, hosts=[host], name="trainer", mesh=f"mesh {number}")
            await group.learn()
            await system.kill(group)
            with pytest.raises(ValueError, match="no weights"):
                await system.spawn(Spread, hosts=[host], mesh=f"failed {number}", fails=True)
            await asyncio.gather(*(f for each in system._network.systems.values() for f in each.collectives._leaving))
            del group
            found.append(taken())
    assert len(set(found[2:])) == 1, found  # each host's first


# One process -----------------------------------------------------------------------------------------------------


async def test_a_group_of_one_needs_no_network() -> None:
    group = await Collectives(None, 2, 4).group("alone", [2])
    assert (await group.broadcast(torch.ones(2), src=2)).tolist() == [1, 1]
    with pytest.raises(UserError, match=r"send.*itself"):
        await group.send(torch.ones(1), dst=2)
    with pytest.raises(UserError, match=r"host 1.*member"):
        await group.broadcast(torch.ones(1), src=1)
    await group.close()
    with pytest.raises(CollectiveError, match="closed"):
        await group.broadcast(torch.ones(1), src=2)


async def test_hosts_in_one_process_cannot_form_bigger_groups() -> None:
    with pytest.raises(UserError, match=r"process.*host"):
        await Collectives(None, 0, 2).group("both", [0, 1])


async def test_what_a_name_or_list_of_hosts_cannot_be() -> None:
    collectives = Collectives(None, 0, 2)
    await collectives.group("name", [0])
    with pytest.raises(UserError, match=r"hosts \[0\].*gloo.*cannot.*\[0\]"):
        await collectives.group("name", [0], "nccl")
    with pytest.raises(UserError, match="no member"):
        await collectives.group("others", [1])
    with pytest.raises(UserError, match="different hosts"):
        await collectives.group("twice", [0, 0])
    with pytest.raises(UserError, match="from 0 to 1"):
        await collectives.group("far", [0, 7])
    with pytest.raises(UserError, match=r"names.*dimensions"):
        await collectives.mesh("flat", [0], shape=(1, 1))


async def check_local_mesh(device: str) -> None:
    hosts = [Collectives(None, rank, 2) for rank in range(2)]
    for host in hosts:
        mesh = await host.mesh("trainer", [host.rank], device)
        model = network(0)
        twin = copy.deepcopy(model).to(device)
        shard(model, mesh)(BATCH.to(device)).sum().backward()
        twin(BATCH.to(device)).sum().backward()
        for mine, expected in zip(gradients(model), gradients(twin), strict=True):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(expected))
    for host in hosts:
        await host.close()
    assert not dist.is_initialized()


async def test_each_host_of_one_process_may_have_a_mesh_of_its_own() -> None:
    await check_local_mesh("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
async def test_a_mesh_of_one_gpu_trains() -> None:
    await check_local_mesh("cuda")


async def on_gpus(c: Collectives, rank: int) -> list[float]:
    torch.cuda.set_device(rank)
    group = await c.group("gpus", [0, 1], "nccl")
    total = torch.full((2,), rank + 1.0, device="cuda")
    await group.broadcast(total, src=1)
    torch.cuda.synchronize()
    return total.tolist()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices: NCCL takes one rank per device")
async def test_nccl_groups_carry_cuda_tensors(job: Job) -> None:
    assert await job(on_gpus, (0, 1)) == [[2.0, 2.0]] * 2
