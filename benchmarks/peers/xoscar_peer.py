"""xoscar: actors in the two processes of one pool, called from the pool's main process over its own sockets."""

from __future__ import annotations

import asyncio
from importlib.metadata import version

import numpy as np
import uvloop
import xoscar as xo

from benchmarks.peers import common


class Peer(xo.Actor):
    async def add_one(self, value: int) -> int:
        return value + 1

    async def ends(self, array: np.ndarray) -> float:
        return float(array[0] + array[-1])

    @xo.generator
    async def count_to(self, count: int):
        async def items():
            for i in range(count):
                yield i

        return items()


async def measure(groups: set[str]) -> dict[str, float]:
    rows: dict[str, float] = {}
    async with await xo.create_actor_pool("127.0.0.1", n_process=1) as pool:
        near = await xo.create_actor(Peer, uid="near", address=pool.external_address)
        far = await xo.create_actor(
            Peer, uid="far", address=pool.external_address, allocate_strategy=xo.allocate_strategy.ProcessIndex(1)
        )
        if "calls" in groups:
            rows |= common.call_rows(await common.latencies(lambda: far.add_one(1), common.CALL_SECONDS))
            rows["local_p50"] = common.median(await common.latencies(lambda: near.add_one(1), common.CALL_SECONDS))

            async def burst() -> None:
                await asyncio.gather(*[far.add_one(1) for _ in range(common.CONCURRENT)])

            rows["concurrent"] = await common.rate(burst, common.CONCURRENT)
        if "tensors" in groups:
            for size, count in common.SIZES.items():
                rows[f"tensor_{size}"] = await _send(far, np.ones(count // 4, np.float32))
        if "queues" in groups:

            async def stream() -> None:
                received = [item async for item in await far.count_to(1000)]
                assert len(received) == 1000

            rows["stream"] = await common.rate(stream, 1000)
    return rows


async def _send(far: xo.ActorRefType[Peer], array: np.ndarray) -> float:
    async def send() -> None:
        array[0] += 1
        expected = float(array[0] + array[-1])
        assert await far.ends(array) == expected

    return common.median(await common.latencies(send, common.TENSOR_SECONDS))


def main() -> None:
    groups = common.parse_groups()
    common.report("xoscar", version("xoscar"), uvloop.run(measure(groups)))


if __name__ == "__main__":
    main()
