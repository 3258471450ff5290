"""A lease handed over between two processes that are both away from the controller, beside a plain call's round trip.

Flows in: three processes, `torchrun --nproc-per-node 3 -m benchmarks.runtime_handover`: the controller and a holder in
either of the others. Flows out: two numbers for `benchmarks.runtime`: `lease_handover`, seconds for which the device
stands still (its release travels to the controller, its grant from there), and `lease_round_trip`, seconds of an
awaited call from one of these processes to the controller, which are as many messages.
"""

from __future__ import annotations

import statistics
import time
from importlib.metadata import version
from typing import Any

import rlinf
from benchmarks.context_switch import measured
from benchmarks.peers import common
from rlinf import Actor, ActorSystem, endpoint

HOLDERS = (1, 2)
"""Hosts of the two that compete."""
CALLS = 200


class Caller(Actor):
    """Measures from where a holder is."""

    @endpoint
    async def nothing(self) -> None: ...

    @endpoint
    async def round_trip(self, other: Any) -> float:
        """Median seconds of an awaited call."""
        times = []
        for _ in range(CALLS):
            start = time.perf_counter()
            await other.nothing()
            times.append(time.perf_counter() - start)
        return statistics.median(times)


async def hand_over(system: ActorSystem) -> dict[str, float]:
    """Measure on a system of at least three hosts.

    Returns:
        `lease_handover` and `lease_round_trip`, seconds.
    """
    async with system.scope():
        controller, away = [
            (await system.spawn(Caller, hosts=[host], name=f"caller-{host}"))[0] for host in (0, HOLDERS[0])
        ]
        before = await away.round_trip(controller)
        handed = statistics.median(await measured(system, HOLDERS))
        return {"lease_handover": handed, "lease_round_trip": min(before, await away.round_trip(controller))}


async def main(system: ActorSystem) -> None:
    """Report both numbers as a contestant's turn does."""
    common.report("rlinf", version("rlinf"), await hand_over(system))


if __name__ == "__main__":
    rlinf.run(main)
