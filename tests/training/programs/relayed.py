"""Two machines of two hosts each, as far as they know: weights cross from one to the other once, by a process group."""

from __future__ import annotations

import dataclasses
import sys

import torch

import rlinf
from rlinf import Actor, endpoint
from rlinf.data.weights import Weights
from rlinf.runtime.system import torchrun
from tests.training.programs.remote import Toy


class Trainer(Actor):
    """Makes weights, and counts what leaves its host."""

    @endpoint
    async def weights(self, version: int) -> Weights:
        named = {"big": torch.arange(600_000.0), "half": torch.ones(900_000, dtype=torch.bfloat16)}
        return Weights.pack(named.items(), version, bucket_bytes=2 << 20, empty=self.empty_shared)

    @endpoint
    async def sent(self) -> list[int]:
        spans = self._cell.host.tracer.dump()
        return [span.bytes for span in spans if (span.kind, span.what) == ("payload", "group")]


class Where(Toy):
    """Tells in whose memory its weights lie."""

    @endpoint
    async def shared(self) -> bool:
        codec = self._cell.host.codec
        return all(codec.is_shared(bucket) for bucket in self.weights.buckets)


async def main(system) -> None:
    (trainer,) = await system.spawn(Trainer, hosts=[1], name="trainer")
    toys = await system.spawn(Where, hosts=[2, 3, 0], name="toys")
    bytes_of_one = 0
    for version in (1, 2, 3):
        weights = trainer.weights(version)
        assert await toys.load(weights) == version
        have = await toys.have()
        assert have == [have[0]] * 3, have
        assert have[0][0] == version
        assert await toys.shared() == [True] * 3
        bytes_of_one += (await weights).nbytes
        del weights
    assert sum(await trainer.sent()) == bytes_of_one, (await trainer.sent(), bytes_of_one)
    print("all as expected")


if __name__ == "__main__":
    real_here = torchrun.here
    torchrun.here = lambda number, **rest: dataclasses.replace(
        real_here(number, **rest), machine=f"machine {number // 2}"
    )
    from tests.training.programs import relayed  # under its own name, so that what it defines can be sent

    rlinf.run(relayed.main)
    sys.exit(0)
