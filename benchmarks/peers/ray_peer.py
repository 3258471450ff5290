"""Ray: an async actor called from the driver. Where Ray has two usual ways, both are measured and the better counts.

Calls: `ray.get(...)` and `await ...`. Arrays: as an argument (inlined when small) and by `ray.put`, whose numpy array
the actor maps without a copy. Queue: `ray.util.queue.Queue`, blocking and async. Streams: a generator method.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import numpy as np
import ray
import uvloop
from ray.util.queue import Queue

from benchmarks.peers import common

_STORE = 3_000_000_000  # bytes of Ray's object store: holds a few of the largest arrays


@ray.remote(num_cpus=0, max_concurrency=1000)
class Peer:
    async def add_one(self, value: int) -> int:
        return value + 1

    async def ends(self, array: np.ndarray) -> float:
        return float(array[0] + array[-1])

    async def count_to(self, count: int):
        for i in range(count):
            yield i


async def measure_awaiting(groups: set[str], peer: ray.actor.ActorHandle, queue: Queue) -> dict[str, float]:
    rows: dict[str, float] = {}
    if "calls" in groups:
        rows |= common.call_rows(await common.latencies(lambda: peer.add_one.remote(1), common.CALL_SECONDS))

        async def burst() -> None:
            await asyncio.gather(*[peer.add_one.remote(1) for _ in range(common.CONCURRENT)])

        rows["concurrent"] = await common.rate(burst, common.CONCURRENT)
    if "queues" in groups:

        async def put_and_get() -> None:
            await queue.put_async(1)
            assert await queue.get_async() == 1

        rows["queue"] = common.median(await common.latencies(put_and_get, common.CALL_SECONDS))

        async def stream() -> None:
            items = peer.count_to.options(num_returns="streaming").remote(1000)
            assert sum([await item async for item in items]) == 499_500

        rows["stream"] = await common.rate(stream, 1000)
    return rows


def measure_blocking(groups: set[str], peer: ray.actor.ActorHandle, queue: Queue) -> dict[str, float]:
    rows: dict[str, float] = {}
    if "calls" in groups:
        rows |= common.call_rows(
            common.latencies_blocking(lambda: ray.get(peer.add_one.remote(1)), common.CALL_SECONDS)
        )

        def burst() -> None:
            ray.get([peer.add_one.remote(1) for _ in range(common.CONCURRENT)])

        times = common.latencies_blocking(burst, common.RATE_SECONDS)
        rows["concurrent"] = common.CONCURRENT / common.median(times)
    if "queues" in groups:

        def put_and_get() -> None:
            queue.put(1)
            assert queue.get() == 1

        rows["queue"] = common.median(common.latencies_blocking(put_and_get, common.CALL_SECONDS))

        def stream() -> None:
            items = peer.count_to.options(num_returns="streaming").remote(1000)
            assert sum(ray.get(item) for item in items) == 499_500

        rows["stream"] = 1000 / common.median(common.latencies_blocking(stream, common.RATE_SECONDS))
    if "tensors" in groups:
        for size, count in common.SIZES.items():
            array = np.ones(count // 4, np.float32)
            ways: list[Callable[[np.ndarray], object]] = [lambda array: array, ray.put]
            rows[f"tensor_{size}"] = min(_send(peer, array, way) for way in ways)
        stored = ray.put(np.ones(common.SIZES["100MB"] // 4, np.float32))
        rows["handover"] = common.median(
            common.latencies_blocking(lambda: ray.get(peer.ends.remote(stored)), common.TENSOR_SECONDS)
        )
    return rows


def _send(peer: ray.actor.ActorHandle, array: np.ndarray, way: Callable[[np.ndarray], object]) -> float:
    def send() -> None:
        array[0] += 1
        assert ray.get(peer.ends.remote(way(array))) == float(array[0] + array[-1])

    return common.median(common.latencies_blocking(send, common.TENSOR_SECONDS))


def main() -> None:
    groups = common.parse_groups()
    ray.init(
        num_cpus=os.cpu_count(), include_dashboard=False, log_to_driver=False, object_store_memory=_STORE,
        _metrics_export_port=None, logging_level="error",
    )  # fmt: skip
    peer, queue = Peer.remote(), Queue(actor_options={"num_cpus": 0})
    blocking = measure_blocking(groups, peer, queue)
    awaiting = uvloop.run(measure_awaiting(groups, peer, queue))
    ray.shutdown()
    rows = blocking | {row: _better(row, blocking.get(row, value), value) for row, value in awaiting.items()}
    common.report("ray", ray.__version__, rows)


def _better(row: str, first: float, second: float) -> float:
    return max(first, second) if row in ("concurrent", "stream") else min(first, second)


if __name__ == "__main__":
    main()
