"""How many Python functions an awaited call takes, on either side of a lane and within a process, and what it costs.

    torchrun --nproc-per-node 2 -m benchmarks.call_path
    python -m benchmarks.call_path

Without torchrun, in a program's own loop: calls gathered beside all that transformers imports, and an item of a map.

Functions are counted by a profiler, one call after the other, and are the same on every machine; those that a call
enters now and then (a message that has to be confirmed) count by their share. Busy waiting is left out of the count: it
is what a process does while it has nothing to do. Processor time is that of both processes, without the profiler, in
bursts of 256 calls, and one by one.
"""

from __future__ import annotations

import asyncio
import cProfile
import importlib
import os
import pstats
import time
from typing import Any

import torch

import rlinf
from rlinf import Actor, ActorSystem, Stream, endpoint

CALLS = 2000
BURST = 256
TURNS = 12
WAITING = ("_turn", "computing")
"""Functions of busy waiting."""


class Counted(Actor):
    async def setup(self) -> None:
        self.profile = cProfile.Profile()

    @endpoint
    async def ping(self, value: Any = None) -> Any:
        return value

    @endpoint
    async def seconds(self) -> float:
        return time.process_time()

    @endpoint
    async def begin(self) -> None:
        self.profile.enable()

    @endpoint
    async def end(self) -> list[tuple[float, str]]:
        self.profile.disable()
        return functions(self.profile)


def functions(profile: cProfile.Profile) -> list[tuple[float, str]]:
    """Python functions by how often a call enters them, from once in twenty on."""
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    rows = [
        (entry[1] / CALLS, f"{os.path.basename(file)}:{line} {name}")
        for (file, line, name), entry in stats.items()
        if not file.startswith("~") and name not in WAITING and entry[1] > CALLS / 20
    ]
    return sorted(rows, reverse=True)


def table(side: str, rows: list[tuple[float, str]]) -> None:
    print(f"{side}: {sum(count for count, _ in rows):.0f} Python functions")
    for count, name in rows:
        print(f"    {count:4.1f}  {name}")


async def cost(title: str, near: Any, far: Any, value: Any, at_once: int) -> None:
    """Print the processor time of a call, its median wall time and the slowest in a hundred."""

    async def burst() -> None:
        if at_once == 1:
            await near.ping(value)
        else:
            await asyncio.gather(*[near.ping(value) for _ in range(at_once)])

    rounds = CALLS if at_once == 1 else 60
    for _ in range(rounds // 10):
        await burst()
    here, there, walls = time.process_time(), await far.seconds(), []
    for _ in range(rounds):
        start = time.perf_counter()
        await burst()
        walls.append((time.perf_counter() - start) / at_once * 1e6)
    here, there = time.process_time() - here, await far.seconds() - there
    walls.sort()
    caller, callee = (seconds / rounds / at_once * 1e6 for seconds in (here, there))
    print(
        f"{title:32s} processor {caller:6.2f} + {callee:6.2f} us   p50 {walls[len(walls) // 2]:7.2f} us   "
        f"p99 {walls[int(len(walls) * 0.99)]:8.2f} us"
    )


def in_process(title: str, seconds: list[float], count: int) -> None:
    each = sorted(1e6 * one / count for one in seconds)
    print(f"{title:40s} processor {each[len(each) // 2]:6.2f} us each, worst of {len(each)} turns {each[-1]:6.2f} us")


async def in_own_loop() -> None:
    """Measure in a loop that is not the runtime's own, whose program has not frozen what it imported."""
    importlib.import_module("transformers.models.auto.modeling_auto")
    async with ActorSystem.local() as system:
        (actor,) = await system.spawn(Counted)

        async def gathered() -> None:
            await asyncio.gather(*[actor.ping(number) for number in range(CALLS)])

        async def mapped() -> None:
            assert len(await actor.ping.map(Stream.of(list(range(CALLS)))).collect()) == CALLS

        for title, work in (
            (f"{CALLS} calls gathered", gathered),
            (f"an item of {CALLS}, mapped and collected", mapped),
        ):
            turns = []
            for _ in range(TURNS):
                start = time.process_time()
                await work()
                turns.append(time.process_time() - start)
            in_process(title, turns[1:], CALLS)
        profile = cProfile.Profile()
        profile.enable()
        await mapped()
        profile.disable()
        table("mapped and collected, an item", functions(profile))


async def main(system: Any) -> None:
    (near,), (far,) = (
        await system.spawn(Counted, hosts=[0], name="near"),
        await system.spawn(Counted, hosts=[1], name="far"),
    )
    await cost("one by one", far, far, 1, 1)
    await cost("one by one, a tensor of 1 KB", far, far, torch.zeros(250), 1)
    await cost(f"{BURST} at once", far, far, 1, BURST)
    await cost(f"{BURST} at once, in a process", near, far, 1, BURST)
    for target, side in ((far, "caller"), (near, "in a process")):
        for _ in range(200):
            await target.ping(1)
        await far.begin()
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(CALLS):
            await target.ping(1)
        profile.disable()
        there = await far.end()
        table(side, [row for row in functions(profile) if not row[1].endswith((" main", " program"))])
        if target is far:
            table("callee", there)


if __name__ == "__main__":
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        rlinf.run(main)
    else:
        asyncio.run(in_own_loop())
