"""Ranks that work before and after something that the test does to their ports: `besieged.py FILE`."""

import asyncio
import os
import sys

import rlinf
from rlinf import Actor, endpoint


class Peer(Actor):
    @endpoint
    async def ask(self, group):
        return await group.say()

    @endpoint
    async def say(self):
        return self.rank


async def main(system):
    group = await system.spawn(Peer, name="peer")
    print("ready", flush=True)
    while not os.path.exists(sys.argv[1]):
        await asyncio.sleep(0.05)
    everybody = list(range(len(group)))
    assert await group.ask(group) == [everybody] * len(group)
    print("unharmed", flush=True)


rlinf.run(main)
