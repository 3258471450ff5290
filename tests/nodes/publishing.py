"""A trainer on the first of two machines publishes weights to two processes on the other; says their bytes.

After the first few, which change altogether, every version changes in one element of a hundred.
"""

from __future__ import annotations

import torch

import rlinf
from rlinf import Actor, endpoint
from rlinf.data.differences import Differences
from rlinf.data.weights import Weights
from rlinf.training.weight_sync import publish
from tests.training.programs.remote import Toy

VERSIONS = 3


class Trainer(Actor):
    async def setup(self) -> None:
        self.differences = Differences("trainer[0]", self.note)

    @endpoint
    async def weights(self, version: int) -> Weights | None:
        all_of_it = torch.full((6_000_000,), float(min(version, VERSIONS)))
        all_of_it[version : version * 600_000 : 100] += 1
        how = {"bucket_bytes": 8 << 20, "differences": self.differences if version >= VERSIONS else None}
        return await publish(self, lambda _: [("all", all_of_it)], version, **how)


async def main(system) -> None:
    (trainer,) = await system.spawn(Trainer, hosts=[0], name="trainer")
    toys = await system.spawn(Toy, hosts=[2, 3], name="toys")
    published = 0
    for version in range(1, VERSIONS + 1):
        weights = trainer.weights(version)
        assert await toys.load(weights) == version
        published += (await weights).nbytes
        del weights
    differences = 0
    for version in range(VERSIONS + 1, VERSIONS + 4):
        weights = trainer.weights(version)
        assert await toys.load(weights) == version
        change = (await weights).lineage.change
        assert change.nbytes < (await weights).nbytes / 50
        assert await toys.have() == [(version, [float((await weights).buckets[0].sum())])] * 2
        differences += change.nbytes
        del weights, change
    published += differences
    print("published", published, flush=True)


if __name__ == "__main__":
    from tests.nodes import publishing  # under its own name, so that what it defines can be sent

    rlinf.run(publishing.main)
