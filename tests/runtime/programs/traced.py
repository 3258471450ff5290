"""Calls, waits, leases and payloads on two hosts, and their trace: `traced.py PATH`."""

import asyncio
import sys

import torch

import rlinf
from rlinf import Actor, Stream, endpoint


class Worker(Actor):
    async def setup(self, other=None):
        self.other = other

    @endpoint
    async def outer(self):
        await asyncio.sleep(0.01)
        await self.other.inner()
        await asyncio.sleep(0.01)

    @endpoint
    async def inner(self):
        await asyncio.sleep(0.03)

    @endpoint(device=True)
    async def work(self):
        await asyncio.sleep(0.5)  # long enough for the other host to ask for the device meanwhile

    @endpoint
    async def score(self, number):
        await asyncio.sleep(0.01)
        return number

    @endpoint
    async def size(self, tensor):
        return len(tensor)

    @endpoint
    async def fill(self, channel):
        await asyncio.sleep(0.02)
        await channel.put(1)


async def main(system):
    inside = await system.spawn(Worker, hosts=[1], name="inside", devices=[0])
    outside = await system.spawn(Worker, hosts=[0], name="outside", devices=[0], other=inside[0])
    await asyncio.gather(outside[0].outer(), outside[0].outer())
    await asyncio.gather(inside[0].work(), outside[0].work())
    assert sorted(await inside.score.map(Stream.of(range(5))).collect()) == list(range(5))
    assert await inside[0].size(torch.zeros(1_000_000)) == 1_000_000
    channel = await system.channel("mail")
    waiting = asyncio.ensure_future(channel.get())
    await asyncio.sleep(0)  # it waits before anybody is told to fill it: the wait is the longer of the two
    await asyncio.gather(waiting, inside[0].fill(channel))
    await system.trace(sys.argv[1])


if __name__ == "__main__":
    rlinf.run(main)
