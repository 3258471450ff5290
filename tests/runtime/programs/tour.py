"""A bit of everything on four hosts; prints "all as expected"."""

import asyncio
import json
import sys

import pytest
import torch

import rlinf
from rlinf import Actor, Stream, endpoint
from rlinf.runtime.base.errors import ActorDied, UserError


class Worker(Actor):
    async def setup(self, start=0):
        self.value = start

    @endpoint
    async def add(self, n):
        self.value += n
        return self.value

    @endpoint
    async def square(self, n):
        await asyncio.sleep(0.002)  # long enough for others to take their share
        return n * n, self.host

    @endpoint
    async def count(self, n):
        for i in range(n):
            yield i

    @endpoint
    async def total(self, items):
        return sum([item async for item in items])

    @endpoint
    async def tensor(self, size):
        return torch.arange(size)

    @endpoint
    async def sum(self, tensor):
        return await self.compute(lambda: int(tensor.sum()))

    @endpoint
    async def helpers(self, name):
        helper = await self.system.spawn(Worker, hosts=[0, 3], name=name, start=10)
        return await helper.add(1)

    @endpoint
    async def put(self, channel, value):
        await channel.put(value)

    @endpoint
    async def found(self, name):
        return await (await self.system.get(name)).add(0)


async def main(system):
    group = await system.spawn(Worker, name="worker", start=3)
    assert await group.add(1) == [4, 4, 4, 4]
    assert await group.each.add([1, 2, 3, 4]) == [5, 6, 7, 8]
    assert await group[3].add(group[2].add(group[1].add(0))) == 8 + 7 + 6
    assert await group[2].found("worker") == [5, 6, 7 + 6, 21]

    squares = await group.square.map(Stream.of(range(200)), concurrency=2).collect()
    assert sorted(square for square, _ in squares) == [n * n for n in range(200)]
    assert {host for _, host in squares} == {0, 1, 2, 3}
    assert await group[1].total(group[2].count(1000)) == 499500

    big = group[1].tensor(1_000_000)
    assert await group[2].sum(big) == sum(range(1_000_000))
    assert await group[3].sum(group[3].tensor(10)) == 45

    assert await group[1].helpers("helpers") == [11, 11]
    with pytest.raises(UserError, match="taken"):
        await system.spawn(Worker, hosts=[2], name="helpers")
    async with system.scope():
        brief = await system.spawn(Worker, hosts=[2], name="brief")
        assert await brief[0].add(1) == 1
    with pytest.raises(ActorDied, match="brief"):
        await brief[0].add(1)

    channel = await system.channel("mail", capacity=2)
    puts = asyncio.gather(*(group[rank].put(channel, rank) for rank in range(4)))
    assert sorted([await channel.get() for _ in range(4)]) == [0, 1, 2, 3]
    await puts

    await system.trace(sys.argv[1])
    with open(sys.argv[1]) as file:
        assert {event["pid"] for event in json.load(file)["traceEvents"]} == {0, 1, 2, 3}
    print("all as expected")


if __name__ == "__main__":
    rlinf.run(main)
