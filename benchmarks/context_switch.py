"""Time to hand a device over, with nothing to load: `python -m benchmarks.context_switch`. The bar is 2 ms.

Two actors share a device and ask for it all the time, so that one always waits when the other is done. What counts is
how long the device stands still: from the end of the one's work to the start of the other's, in the slower direction.
In one process, and in two processes under torchrun, where word of a lease goes through the controller: there with both
actors away from the controller, as collocated roles mostly are, and with one in either process.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import rlinf
from benchmarks.contestants import run
from rlinf import Actor, ActorSystem, endpoint

BAR_MS = 2.0
ROUNDS = 15
"""Rounds, of whose medians the median counts: a neighbour's burst of work on a shared machine spoils a few of them."""
CALLS = 40
"""Calls of each actor in a round."""
WORK = 3e-3
"""Seconds for which the device is used: longer than a call needs to come and wait for it."""
PLACES = {"both away from the controller": (1, 1), "one in either process": (0, 1)}
"""Hosts of the two actors under torchrun; the controller is host 0."""
TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
    *("--master-port=0", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"),  # whatever else runs on this machine
)
MARK = "hand-overs "


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table; the fields are those of `benchmarks.placement`'s."""

    what: str
    bar: str
    found: str
    met: bool | None


class Holder(Actor):
    """Uses its device for a moment."""

    @endpoint(device=True)
    async def use(self) -> tuple[float, float]:
        """When the device was had and when it was given back, seconds of the machine's clock."""
        start = time.monotonic()
        await asyncio.sleep(WORK)
        return start, time.monotonic()


async def measured(system: ActorSystem, hosts: Sequence[int]) -> list[float]:
    """Median seconds of a hand-over between two actors on these hosts, for each round."""
    async with system.scope():
        pair = [
            (await system.spawn(Holder, hosts=[host], name=name, devices=[0]))[0]
            for name, host in zip(("left", "right"), hosts, strict=True)
        ]
        rounds = [await _round(pair) for _ in range(ROUNDS + 1)]
    return rounds[1:]  # the first one warms up


async def _round(pair: Sequence[Any]) -> float:
    """Median seconds from the end of a use to the start of the other actor's, in the slower direction."""

    async def busy(which: int, actor: Any) -> list[tuple[float, float, int]]:
        return [(start, end, which) for start, end in [await actor.use() for _ in range(CALLS)]]

    uses = sorted(itertools.chain(*await asyncio.gather(*itertools.starmap(busy, enumerate(pair)))))
    gaps: dict[int, list[float]] = {0: [], 1: []}
    for (_, end, giver), (start, _, taker) in itertools.pairwise(uses):
        if giver != taker:
            gaps[giver].append(start - end)
    if min(map(len, gaps.values())) < CALLS // 2:
        changes = sum(map(len, gaps.values()))
        raise RuntimeError(f"the device changed hands {changes} times in {2 * CALLS} calls: they did not compete")
    return max(map(statistics.median, gaps.values()))


async def _alone() -> list[float]:
    async with ActorSystem.local(1) as system:
        return await measured(system, (0, 0))


async def _under_torchrun(system: ActorSystem) -> None:
    for place, hosts in PLACES.items():
        print(MARK + json.dumps([place, await measured(system, hosts)]), flush=True)


def rows() -> list[Row]:
    """Measure; one row per place of the two actors."""
    found = [("in one process", asyncio.run(_alone()))]
    out = run([*TORCHRUN, "-m", "benchmarks.context_switch", "--worker"])
    found += [tuple(json.loads(line.removeprefix(MARK))) for line in out.splitlines() if line.startswith(MARK)]
    if len(found) != 1 + len(PLACES):
        raise RuntimeError(f"the processes under torchrun measured {len(found) - 1} of {len(PLACES)} places")
    return [_row(*each) for each in found]


def _row(place: str, rounds: list[float]) -> Row:
    middle = 1e3 * statistics.median(rounds)
    text = f"{middle:.2f} ms (rounds {1e3 * min(rounds):.2f} to {1e3 * max(rounds):.2f})"
    return Row(f"lease hand-over without offload work, {place}", f"<= {BAR_MS:g} ms", text, middle <= BAR_MS)


def main() -> int:
    """Print a line per place; 1 if one misses the bar."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--worker", action="store_true", help="a process of the job that torchrun runs")
    if parser.parse_args().worker:
        rlinf.run(_under_torchrun)
        return 0
    found = rows()
    for row in found:
        print(f"{row.what}: {row.found}, bar {row.bar}: {'met' if row.met else 'LOST'}")
    return int(any(row.met is False for row in found))


if __name__ == "__main__":
    sys.exit(main())
