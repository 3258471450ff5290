"""Ours: the same rows as the peers, measured through the public surface of `rlinf`.

Started by `benchmarks.runtime` as `torchrun --nproc-per-node 2 -m benchmarks.runtime_rlinf`; host 0 measures, host 1
answers.
"""

from __future__ import annotations

import asyncio
import time
from importlib.metadata import version

import torch

import rlinf
from benchmarks.peers import common
from rlinf import Actor, ActorGroup, ActorSystem, Channel, Stream, endpoint


class Peer(Actor):
    @endpoint
    async def add_one(self, value: int) -> int:
        return value + 1

    @endpoint
    async def cpu_seconds(self) -> float:
        return time.process_time()

    @endpoint
    async def ends(self, tensor: torch.Tensor) -> float:
        """The sum of the first and last element: proof that the whole tensor of this very call arrived."""
        return float(tensor[0] + tensor[-1])

    @endpoint
    async def shared_ones(self, count: int) -> torch.Tensor:
        return self.empty_shared((count,)).fill_(1)

    @endpoint
    async def put_and_get(self, channel: Channel) -> list[float]:
        """Times of putting one item into a channel of the other host and getting it back."""

        async def put_and_get() -> None:
            await channel.put(1)
            assert await channel.get() == 1

        return await common.latencies(put_and_get, common.CALL_SECONDS)

    @endpoint
    async def count_to(self, count: int):
        for i in range(count):
            yield i

    @endpoint
    async def work(self, item: int) -> int:
        """A stage of the pipeline: holds this actor's compute thread for exactly as long as a device would be held."""
        await self.compute(_stage)
        return item

    @endpoint
    async def produce(self, count: int):
        for i in range(count):
            await self.compute(_stage)
            yield i

    @endpoint
    async def work_alone(self, count: int) -> float:
        """Seconds that `count` stages take here with nothing around them."""
        start = time.perf_counter()
        await self.compute(_stages, count)
        return time.perf_counter() - start


def _stage() -> None:
    time.sleep(common.STAGE)


def _stages(count: int) -> None:
    for _ in range(count):
        _stage()


async def calls(near: ActorGroup, far: ActorGroup) -> dict[str, float]:
    there, here = far[0], near[0]
    rows = common.call_rows(await common.latencies(lambda: there.add_one(1), common.CALL_SECONDS))
    rows["local_p50"] = common.median(await common.latencies(lambda: here.add_one(1), common.CALL_SECONDS))

    async def burst() -> None:
        await asyncio.gather(*[there.add_one(1) for _ in range(common.CONCURRENT)])

    rows["concurrent"] = await common.rate(burst, common.CONCURRENT)
    return rows


async def cold(far: ActorGroup) -> dict[str, float]:
    """The first five big tensors that a process ever sends."""
    there = far[0]
    await there.add_one(1)
    fresh = [torch.full((common.SIZES["100MB"] // 4,), float(number)) for number in range(5)]

    async def send(number: float) -> None:
        assert await there.ends(fresh[int(number)]) == 2 * number

    return {"cold_100MB": common.median(await common.first(send))}


async def idle(far: ActorGroup) -> dict[str, float]:
    """The part of a core that a host takes which has nothing to do."""
    start, before = time.perf_counter(), await far[0].cpu_seconds()
    await asyncio.sleep(common.IDLE_SECONDS)
    return {"idle": (await far[0].cpu_seconds() - before) / (time.perf_counter() - start)}


async def tensors(near: ActorGroup, far: ActorGroup) -> dict[str, float]:
    there = far[0]
    rows = {}
    for size, count in common.SIZES.items():
        rows[f"tensor_{size}"] = await _send(far, torch.ones(count // 4))

    shared = await near[0].shared_ones(common.SIZES["100MB"] // 4)

    async def hand_over() -> None:
        assert await there.ends(shared) == 2

    rows["handover"] = common.median(await common.latencies(hand_over, common.TENSOR_SECONDS))
    return rows


async def _send(far: ActorGroup, tensor: torch.Tensor) -> float:
    there = far[0]

    async def send() -> None:
        tensor[0] += 1
        expected = float(tensor[0] + tensor[-1])
        assert await there.ends(tensor) == expected

    return common.median(await common.latencies(send, common.TENSOR_SECONDS))


async def queues(system: ActorSystem, far: ActorGroup) -> dict[str, float]:
    channel = await system.channel("benchmark")
    rows = {"queue": common.median(await far[0].put_and_get(channel))}
    count = 10_000

    async def stream() -> None:
        total = 0
        async for item in far[0].count_to(count):
            total += item
        assert total == count * (count - 1) // 2

    rows["stream"] = await common.rate(stream, count)
    return rows


async def overlap(near: ActorGroup, far: ActorGroup) -> dict[str, float]:
    """Two stages of 10 ms, one on each host. Ideal: the slower host's sleeps alone, plus one item to fill the pipe."""
    count = common.PIPELINE_ITEMS
    alone = max(await asyncio.gather(near[0].work_alone(count), far[0].work_alone(count)))
    ideal = alone * (count + 1) / count
    start = time.perf_counter()
    items: Stream[int] = near[0].produce(count)
    assert len(await far.work.map(items).collect()) == count
    return {"overlap": (time.perf_counter() - start) / ideal - 1}


async def main(system: ActorSystem) -> None:
    groups = common.parse_groups()
    near = await system.spawn(Peer, hosts=[0], name="near")
    far = await system.spawn(Peer, hosts=[1], name="far")
    rows: dict[str, float] = {}
    if "calls" in groups:
        rows |= await calls(near, far)
    if "cold" in groups:
        rows |= await cold(far)
    if "tensors" in groups:
        rows |= await tensors(near, far)
    if "queues" in groups:
        rows |= await queues(system, far)
    if "overlap" in groups:
        rows |= await overlap(near, far)
    if "idle" in groups:
        rows |= await idle(far)
    common.report("rlinf", version("rlinf"), rows)


if __name__ == "__main__":
    rlinf.run(main)
