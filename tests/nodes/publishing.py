"""A trainer on the first of two machines publishes weights to two processes on the other; says their bytes."""

from __future__ import annotations

import torch

import rlinf
from rlinf import Actor, endpoint
from rlinf.data.weights import Weights
from tests.training.programs.remote import Toy

VERSIONS = 3


class Trainer(Actor):
    @endpoint
    async def weights(self, version: int) -> Weights:
        named = {"all": torch.full((6_000_000,), float(version))}
        return Weights.pack(named.items(), version, bucket_bytes=8 << 20, empty=self.empty_shared)


async def main(system) -> None:
    (trainer,) = await system.spawn(Trainer, hosts=[0], name="trainer")
    toys = await system.spawn(Toy, hosts=[2, 3], name="toys")
    published = 0
    for version in range(1, VERSIONS + 1):
        weights = trainer.weights(version)
        assert await toys.load(weights) == version
        published += (await weights).nbytes
        del weights
    print("published", published, flush=True)


if __name__ == "__main__":
    from tests.nodes import publishing  # under its own name, so that what it defines can be sent

    rlinf.run(publishing.main)
