"""Bare `torch.distributed.rpc`: what one gets from `rpc_async` awaited in asyncio, with nothing above it.

Two processes. The caller's done-callback runs on an RPC thread and wakes the event loop by `call_soon_threadsafe`;
the callee runs a plain function on an RPC thread, which is the least that a call can cost.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
import uvloop
from torch.distributed import rpc

from benchmarks.peers import common

PEER = "peer"


def add_one(value: int) -> int:
    return value + 1


def ends(tensor: torch.Tensor) -> float:
    """The sum of the first and last element: proof that the whole tensor of this very call arrived."""
    return float(tensor[0] + tensor[-1])


def call(function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any) -> None:
        if not result.done():
            result.set_result(value)

    answer = rpc.rpc_async(PEER, function, args=args)
    answer.add_done_callback(lambda done: loop.call_soon_threadsafe(settle, done.value()))
    return result


async def measure(groups: set[str]) -> dict[str, float]:
    rows: dict[str, float] = {}
    if "calls" in groups:
        rows |= common.call_rows(await common.latencies(lambda: call(add_one, 1), common.CALL_SECONDS))

        async def burst() -> None:
            await asyncio.gather(*[call(add_one, 1) for _ in range(common.CONCURRENT)])

        rows["concurrent"] = await common.rate(burst, common.CONCURRENT)
    if "cold" in groups:
        await call(add_one, 1)
        fresh = [torch.full((common.SIZES["100MB"] // 4,), float(number)) for number in range(5)]

        async def send(number: float) -> None:
            assert await call(ends, fresh[int(number)]) == 2 * number

        rows["cold_100MB"] = common.median(await common.first(send))
    if "tensors" in groups:
        for size, count in common.SIZES.items():
            tensor = torch.ones(count // 4)
            rows[f"tensor_{size}"] = await _send(tensor)
    return rows


async def _send(tensor: torch.Tensor) -> float:
    async def send() -> None:
        tensor[0] += 1
        expected = float(tensor[0] + tensor[-1])
        assert await call(ends, tensor) == expected

    return common.median(await common.latencies(send, common.TENSOR_SECONDS))


def main() -> None:
    is_peer = os.environ.get("RANK") == "1"
    starts_peer = "MASTER_ADDR" not in os.environ
    if starts_peer:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        peer = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.peers.bare_rpc", *sys.argv[1:]], env=os.environ | {"RANK": "1"}
        )
    groups = common.parse_groups()
    sockets = {"_transports": ["uv"], "_channels": ["basic"]} if os.environ.get("BENCH_RPC_TRANSPORT") == "uv" else {}
    options = rpc.TensorPipeRpcBackendOptions(**sockets)
    rpc.init_rpc(PEER if is_peer else "caller", rank=int(is_peer), world_size=2, rpc_backend_options=options)
    if is_peer:
        rpc.shutdown()
        return
    rows = uvloop.run(measure(groups))
    rpc.shutdown()
    if starts_peer:
        peer.wait()
    common.report("bare rpc_async", torch.__version__, rows)


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
