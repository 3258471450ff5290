"""Every host calls every other; prints what came of it."""

import time

import rlinf
from rlinf import Actor, endpoint


class Guest(Actor):
    @endpoint
    async def greet(self, whom):
        return [await ref.name(self.host) for ref in whom]

    @endpoint
    async def name(self, caller):
        return caller, self.host


async def main(system):
    start = time.perf_counter()
    guests = await system.spawn(Guest)
    spawned = time.perf_counter()
    greetings = await guests.greet(guests)
    done = time.perf_counter()
    hosts = range(system.hosts)
    assert greetings == [[(caller, host) for host in hosts] for caller in hosts]
    print(f"{system.hosts**2} calls answered")
    print(f"spawn {spawned - start:.3f} s, all pairs {done - spawned:.3f} s", flush=True)


if __name__ == "__main__":
    began = time.perf_counter()
    rlinf.run(main)
