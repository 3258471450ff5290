"""A trainer over all ranks of a job that replicas join, and leave or are lost in the middle of a step."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any, ClassVar

import torch

import rlinf
from rlinf.actors.replicas import far_side
from rlinf.joining.connection import connect
from tests.actors import toys
from tests.actors.programs.ranks import Apprentice

TOKEN = os.environ["RLINF_JOIN_TOKEN"] = "of this job"
HOW: dict[str, Any] = {
    "model": toys.configuration(), "tokenizer": toys.ALPHABET, "lr": 0.01, "micro_batch_tokens": 20, "precise": True,
    "sharding": "replicate", "order": "free", "epochs": 2, "algorithm": "grpo_tis",
}  # fmt: skip
BATCHES = [toys.told(toys.groups(8, seed)) for seed in range(3)]


class Helped(Apprentice):
    """Learns in float64, by a back end that is fsdp's but for its name."""

    def _check_joining(self, settings: Any) -> None: ...


class Seen(far_side.FarSide):
    """Counts micro-batches; the replica to which the second one comes dies of it, where that is wanted."""

    computed: ClassVar[list[int]] = []
    deadly = False

    async def _compute(self, number: int, command: Any, version: int) -> None:
        self.computed.append(number)
        if self.deadly and len(self.computed) == 2:
            self._connection.abandon()
            await asyncio.get_running_loop().create_future()
        await super()._compute(number, command, version)


async def main(system: rlinf.ActorSystem) -> None:
    """Train alone and helped; rank 0 has the replicas in tasks of its own."""
    alone = await system.spawn(Apprentice, name="alone", **HOW)
    helped = await system.spawn(Helped, name="helped", **HOW, join="127.0.0.1:0")
    replicas = helped[0]._owner.cells[helped[0]._actor].actor._joined
    far_side.FarSide = Seen  # type: ignore[misc]
    host, port = replicas._listener.how.split()[2].split(":")
    tasks, found = [], []
    for _ in range(2):
        ready = asyncio.Event()
        connection = await connect(host, int(port), TOKEN)
        tasks.append(asyncio.create_task(far_side.replicate(connection, Apprentice, ready.set, asyncio.Event())))
        await ready.wait()
    for number, batch in enumerate(BATCHES):
        Seen.computed, Seen.deadly = [], number == 1
        expected = await alone.train(rlinf.Stream.of(batch))
        metrics = await helped.train(rlinf.Stream.of(batch))
        found.append({"expected": expected, "metrics": metrics, "computed": len(Seen.computed)})
    results = {"steps": found, "there": len(replicas.there)}
    results |= {"alone": await alone.inspect(), "helped": await helped.inspect()}
    torch.save(results, sys.argv[1])
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    rlinf.run(main)
