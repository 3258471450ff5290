"""Two hosts that believe they are on different machines: big tensors must go by process group, small ones must not."""

import dataclasses
import sys

import torch

import rlinf
from rlinf import Actor, endpoint
from rlinf.runtime import run as running

real_here = running.here
running.here = lambda number, **rest: dataclasses.replace(real_here(number, **rest), machine=f"machine {number}")


class Echo(Actor):
    @endpoint
    async def echo(self, value):
        return value

    @endpoint
    async def make(self, size: int):
        return torch.arange(size, dtype=torch.float32)


async def main(system):
    echo = await system.spawn(Echo, hosts=[0, 1], name="echo")
    tensors = {"a": torch.randn(600_000), "b": [torch.ones(4), torch.randn(3, 200_000).t()]}
    for _ in range(3):
        back = await echo[1].echo(tensors)
        assert torch.equal(back["a"], tensors["a"])
        assert torch.equal(back["b"][1], tensors["b"][1])
    # Both directions at once, promises and group sends mixed: nobody may wait for the other's receive.
    made = [echo[1].make(400_000 + i) for i in range(4)]
    there = [echo[1].echo([echo[0].make(300_000 + i), torch.zeros(500_000)]) for i in range(4)]
    for i, promise in enumerate(there):
        assert len((await promise)[0]) == 300_000 + i
    for i, promise in enumerate(made):
        assert torch.equal(await promise, torch.arange(400_000 + i, dtype=torch.float32))
    medium = await echo[1].echo(torch.ones(10_000))
    assert medium.sum() == 10_000
    host = system._host
    routes = {name for track, name, *_ in host.tracer.dump()[2] if track == "payload"}
    assert routes == {"group", "rpc", "inline"}, routes
    print("routes:", *sorted(routes))


if __name__ == "__main__":
    rlinf.run(main)
    sys.exit(0)
