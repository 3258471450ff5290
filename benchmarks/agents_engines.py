"""Inference servers beside their bars: how fast weights get in, and how long a restart takes.

`await measured("sglang")` gives the rows; `python -m benchmarks.agents_engines [sglang] [vllm]` prints them. Needs
`make sglang`, `make vllm`.

* Weights: bytes per second of `engine.load`, all of it (standstill, copy, checksums on the far side, the server's own
  copy), beside the copy rate of the route: the same buckets copied into shared memory by the same code, and once more
  by torch, as the server has to.
* Restart: from SIGKILL to the next token of an answer in flight, beside a cold start: from making the engine to the
  first token of its first answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import sys
import time
from dataclasses import dataclass

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlinf.data.weights import Weights
from rlinf.engines.base import Completion, Engine, EngineSetup, Request, Sampling, lacking, make
from rlinf.engines.served.shared_memory import SharedMemory

ROUNDS = 5
"""Changes of weights that are timed; the median counts."""
BUCKET_BYTES = 64 << 20
"""Size of a bucket of the weights: several buckets, so that copying and loading overlap."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement beside its bar."""

    what: str
    """Name of the measurement."""
    value: float
    """In `unit`."""
    beside: float
    """The figure that it is compared with, in `unit`."""
    unit: str
    """GB/s or s."""
    bar: str
    """Bar of the ratio of the two."""

    @property
    def ratio(self) -> float:
        """`value` over `beside`."""
        return self.value / self.beside


def model(hidden: int = 1024, layers: int = 8) -> torch.nn.Module:
    """A Qwen2 of random weights: by default 0.1 billion of them, 0.5 GB."""
    config = AutoConfig.for_model(
        "qwen2", vocab_size=8192, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, intermediate_size=3 * hidden, max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


async def measured(engine: str) -> list[Row]:
    """Start a server, change its weights, kill it."""
    made = model()
    setup = EngineSetup("bench[0]", {}, lambda: contextlib.nullcontext(made), max_rows=8, max_length=512)
    start = time.perf_counter()
    server = await make(engine, setup)
    try:
        await server.answer(asked(0, 1))
        cold = time.perf_counter() - start
        weights = [Weights.pack(made.named_parameters(), 1 + i, bucket_bytes=BUCKET_BYTES) for i in range(2)]
        rate, copies = await weights_rates(server, weights)
        restart = await restart_seconds(server)
    finally:
        await server.close()
    return [
        Row("weights into the server", rate, copies, "GB/s", ">= 0.5"),
        Row("restart to the first token", restart, cold, "s", "<= 1.2"),
    ]


def asked(number: int, tokens: int) -> Request:
    """A request for so many tokens."""
    return Request(number, np.array([1, 2, 3]), Sampling(tokens))


async def weights_rates(server: Engine, weights: list[Weights]) -> tuple[float, float]:
    """GB/s of `load`, and of copying the same into shared memory and once more, by turns; medians.

    The first round, which makes the shared memory, is not counted.
    """
    memory, loads, copies = SharedMemory(), [], []
    out = [torch.empty_like(bucket) for bucket in weights[0].buckets]
    for number in range(ROUNDS + 1):
        start = time.perf_counter()
        await server.load(weights[number % 2])
        loads.append(time.perf_counter() - start)
        start = time.perf_counter()
        for index, bucket in enumerate(weights[0].buckets):
            memory.copy(weights[0], index)
            out[index].copy_(bucket)
        copies.append(time.perf_counter() - start)
    memory.close()
    size = weights[0].nbytes / 1e9
    return size / statistics.median(loads[1:]), size / statistics.median(copies[1:])


async def restart_seconds(server: Engine) -> float:
    """Seconds from SIGKILL to the next token of an answer in flight."""
    answer = asyncio.create_task(server.answer(asked(1, 400)))
    try:
        begun = await tokens_beyond(server, answer, 0)
        start = time.perf_counter()
        os.kill(server.child.child.pid, 9)  # type: ignore[attr-defined]  # of served engines
        await tokens_beyond(server, answer, begun + 8)  # what was on its way when it died may still come
        return time.perf_counter() - start
    finally:
        answer.cancel()
        await asyncio.wait([answer])


async def tokens_beyond(server: Engine, answer: asyncio.Task[Completion], count: int) -> int:
    """Wait until the answer in flight has more tokens than that; returns how many."""
    while not answer.done():
        for request in await server.partial([1]):  # none before the call has begun
            if request.answered > count:
                return request.answered
        await asyncio.sleep(0.01)
    raise RuntimeError(f"the answer ended before it had more than {count} tokens: {answer.result()}")


def main() -> None:
    """Print the rows of the engines that are named, or of all whose environments are there."""
    for engine in sys.argv[1:] or ("sglang", "vllm"):
        if reason := lacking(engine):
            print(f"{engine} is left out: {reason}")
            continue
        for row in asyncio.run(measured(engine)):
            print(
                f"{engine}: {row.what}: {row.value:.2f} {row.unit} beside {row.beside:.2f}: {row.ratio:.2f}, to be "
                f"{row.bar}",
                flush=True,
            )


if __name__ == "__main__":
    main()
