"""An actor on every host, calls to all of them and a stream over all: `many.py ITEMS`; prints "all as expected"."""

import asyncio
import sys
import threading

import rlinf
from rlinf import Actor, Stream, endpoint


class Worker(Actor):
    @endpoint
    async def double(self, number):
        await asyncio.sleep(0.01)  # long enough for others to take their share
        return 2 * number, self.host

    @endpoint
    async def threads(self):
        return threading.active_count()


async def main(system):
    workers = await system.spawn(Worker, name="worker")
    assert len(await workers.threads()) == system.hosts
    assert [host for _, host in await workers.double(1)] == list(range(system.hosts))
    items = range(int(sys.argv[1]))
    found = await workers.double.map(Stream.of(items), concurrency=1).collect()
    assert sorted(value for value, _ in found) == [2 * number for number in items]
    assert {host for _, host in found} == set(range(system.hosts))
    print("all as expected", flush=True)


if __name__ == "__main__":
    rlinf.run(main)
