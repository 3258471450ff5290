"""Programs that are going to be hurt: `drills.py NAME`. Rank 0 prints "ready" when it is time to."""

import asyncio
import ctypes
import os
import sys
import time

import torch
import torch.distributed as dist

import rlinf
from rlinf import Actor, endpoint
from rlinf.runtime.base.errors import ActorDied


class Victim(Actor):
    async def setup(self, fail=False):
        if fail and self.rank == 1:
            raise ValueError("setup went wrong")

    @endpoint
    async def wait(self):
        print("waiting", flush=True)
        await asyncio.Event().wait()

    @endpoint
    async def compute_long(self):
        print("computing", flush=True)
        await self.compute(time.sleep, 600)

    @endpoint
    async def block(self):
        print("blocking", flush=True)
        time.sleep(600)

    @endpoint
    async def fail(self):
        raise KeyError("an actor's own error")

    async def close(self):
        print(f"closed {self._cell.name}", flush=True)


class BadlyClosed(Actor):
    async def close(self):
        if self.rank == 1:
            raise OSError("close went wrong")


async def spawn(system, **more):
    return await system.spawn(Victim, name="victim", **more)


async def awaited(system):
    """Main waits for a call on the last host."""
    group = await spawn(system)
    call = group[-1].wait()
    print("ready", flush=True)
    try:
        await call
    finally:
        print("main left", flush=True)


async def unawaited(system):
    """Main waits for something else."""
    await spawn(system)
    print("ready", flush=True)
    await asyncio.Event().wait()


async def survives(system):
    """Main bears the loss of an actor, for a while."""
    group = await spawn(system)
    call = group[-1].wait()
    print("ready", flush=True)
    try:
        await call
    except ActorDied:
        print("cleaned up", flush=True)


async def raises(system):
    await spawn(system)
    raise ZeroDivisionError("main went wrong")


async def actor_raises(system):
    group = await spawn(system)
    await group[-1].fail()


async def setup_raises(system):
    await spawn(system, fail=True)


async def close_raises(system):
    await system.spawn(BadlyClosed)


async def close_raises_after_main(system):
    await system.spawn(BadlyClosed)
    raise ZeroDivisionError("main went wrong")


async def blocked(system):
    """The loop of host 1 does nothing for ten minutes."""
    group = await spawn(system)
    await group[1].block()


async def exits(system):
    await spawn(system)
    sys.exit(7)


async def busy(system):
    """Idle actors on every host, others compute or wait."""
    await system.spawn(Victim, name="idle")
    one = await system.spawn(Victim, name="one")
    two = await system.spawn(Victim, name="two")
    waiting = await system.spawn(Victim, name="waiting")
    calls = asyncio.gather(one.compute_long(), two.compute_long(), waiting.wait())
    print("ready", flush=True)
    await calls


async def stubborn(system):
    """Main itself does not end when it is cancelled."""
    await spawn(system)
    print("ready", flush=True)
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            print("main stays", flush=True)


async def stalls(system):
    group = await spawn(system)
    await group[-1].wait()


stalls_blocked = blocked


class Busy(Actor):
    """Keeps others waiting, though it is alive."""

    async def setup(self):
        self.seen = []

    @endpoint
    async def hold_the_interpreter(self, seconds):
        print("holding", flush=True)
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))  # with the GIL held, and the loop blocked

    @endpoint
    async def count(self, number):
        self.seen.append(number)
        return number

    @endpoint
    async def counted(self):
        return self.seen

    @endpoint
    async def sum_for_ever(self):
        mesh = await self.system.collectives.mesh("all", self.group.hosts)
        await self.compute(self._sum_for_ever, mesh.get_group())

    def _sum_for_ever(self, group):
        print("summing", flush=True)
        while True:
            dist.all_reduce(torch.ones(1000), group=group)


async def holds(system):
    busy = await system.spawn(Busy)
    await busy[1].hold_the_interpreter(float(os.environ["HOLDS"]))
    print("held", flush=True)


async def counts(system):
    """Calls go on, one after the other."""
    busy = await system.spawn(Busy)
    end, number = time.monotonic() + float(os.environ["COUNTS"]), 0
    print("ready", flush=True)
    while time.monotonic() < end:
        assert await busy[1].count(number) == number
        number += 1
        await asyncio.sleep(0.001)
    assert await busy[1].counted() == list(range(number))
    print("all counted", flush=True)


async def sums(system):
    busy = await system.spawn(Busy)
    await busy.sum_for_ever()


if __name__ == "__main__":
    rlinf.run(
        globals()[sys.argv[1]],
        stall_after=0.4 if "stalls" in sys.argv[1] else None,
        host_timeout=float(os.environ.get("HOST_TIMEOUT", "60")),
    )
