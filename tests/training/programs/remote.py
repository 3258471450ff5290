"""Receivers on two hosts that believe they are different machines: weights go by process group, all or none."""

from __future__ import annotations

import dataclasses
import sys

import torch

import rlinf
from rlinf import endpoint
from rlinf.data.weights import Weights
from rlinf.runtime.system import torchrun
from rlinf.training.weight_sync import LoadRefused, Receiver


class Toy(Receiver):
    """Keeps what it is sent."""

    async def check_weights(self, weights: Weights) -> None:
        if self.rank == 1 and weights.version == 99:
            raise ValueError("not this one")

    async def switch_weights(self, weights: Weights) -> None:
        self.weights = weights

    @endpoint
    async def have(self) -> tuple[int, list[float]]:
        return self.weights.version, [float(tensor.sum()) for _, tensor in self.weights.named()]


async def main(system) -> None:
    toys = await system.spawn(Toy, hosts=[0, 1], name="toys")
    named = {"small": torch.randn(10), "big": torch.randn(600_000), "half": torch.randn(900_000).bfloat16()}
    want = [float(tensor.sum()) for tensor in named.values()]
    for version in (1, 2):
        assert await toys.load(Weights.pack(named.items(), version, bucket_bytes=2 << 20)) == version
        assert await toys.have() == [(version, want)] * 2
    failure = ""
    try:
        await toys.load(Weights.pack(named.items(), 99))
    except LoadRefused as error:
        failure = str(error)
    assert "rank 1 (host 1), checking that they fit: ValueError: not this one" in failure, failure
    assert await toys.have() == [(2, want)] * 2
    damaged = Weights.pack(named.items(), 3)
    damaged.buckets[0][5] += 1
    failure = ""
    try:
        await toys.load(damaged)
    except LoadRefused as error:
        failure = str(error)
    assert "verifying the checksums: WeightsDamaged: bucket 0 of 2 of the weights of version 3" in failure, failure
    routes = {span.what for span in system._host.tracer.dump() if span.kind == "payload"}
    assert "group" in routes, routes
    print("all as expected")


if __name__ == "__main__":
    real_here = torchrun.here
    torchrun.here = lambda number, **rest: dataclasses.replace(real_here(number, **rest), machine=f"machine {number}")
    from tests.training.programs import remote  # under its own name, so that what it defines can be sent

    rlinf.run(remote.main)
    sys.exit(0)
