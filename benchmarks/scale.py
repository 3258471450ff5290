"""`python -m benchmarks.scale`: what one controller does for 1,000 hosts, in microseconds of this machine's CPU.

All hosts live in one process and loop, under the virtual clock; frames between them take `LATENCY`, which costs no
time here. The loop's callbacks are timed one by one, and those that run in the controller's name counted as its own:
the flow, its messages, its queues. What other hosts do is not.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import platform
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlinf import Actor, ActorSystem, Stream, endpoint
from rlinf.runtime.base.calls import CONTROLLER, _current_host
from rlinf.runtime.base.clock import run_virtual
from rlinf.runtime.transport.link import Frame, LocalTransport

RESULTS = Path(__file__).resolve().parent / "results"
LATENCY = 1e-4
"""Virtual seconds that a frame takes: a good network between machines."""
ITEM_SECONDS = 0.05
"""Virtual seconds that an item takes a host."""
ITEMS_PER_HOST = 10


@dataclass(frozen=True, slots=True)
class Row:
    """Cost of one kind of work."""

    work: str
    """Name of the work."""
    count: int
    """How often."""
    controller: float
    """Microseconds of the controller's CPU for one."""
    all_hosts: float
    """Microseconds of CPU for one, of all hosts together."""
    virtual: float
    """Virtual seconds that all of them took."""


class Worker(Actor):
    """Takes time, not CPU."""

    @endpoint
    async def ping(self) -> int:
        """Answers at once."""
        return self.host

    @endpoint
    async def work(self, item: int) -> int:
        """One item of a stream."""
        await asyncio.sleep(ITEM_SECONDS)
        return item


class Share:
    """Seconds of the loop's callbacks, by whether they run in the controller's name."""

    def __init__(self) -> None:
        self.controller = self.all = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Time every callback of the loop."""
        run = asyncio.events.Handle._run

        def timed(handle: Any) -> None:
            host = handle._context.get(_current_host)
            began = time.thread_time()
            run(handle)
            took = time.thread_time() - began
            self.all += took
            if host is None or host.rank == CONTROLLER:
                self.controller += took

        asyncio.events.Handle._run = timed  # type: ignore[method-assign]
        try:
            yield
        finally:
            asyncio.events.Handle._run = run  # type: ignore[method-assign]


class DelayedTransport(LocalTransport):
    """Frames take `LATENCY`, and arrive in the name of the host that gets them."""

    def send(self, host: int, frame: Frame, answered: Callable[[Frame | None], None]) -> None:
        def back(answer: Frame | None) -> None:
            loop.call_later(LATENCY, answered, answer, context=self._receiver._context)  # type: ignore[union-attr]

        loop = asyncio.get_running_loop()
        context = self._network[host]._receiver._context.copy()  # type: ignore[union-attr]
        context.run(_current_host.set, self._network[host]._receiver)
        loop.call_later(LATENCY, self._hand_over, host, frame, back, context=context)


async def rows(hosts: int) -> list[Row]:
    """Measure everything on so many hosts."""
    found: list[Row] = []

    async def measure(work: str, count: int, done: Callable[[], Awaitable[Any]]) -> Any:
        share, began = Share(), asyncio.get_running_loop().time()
        with share.measured():
            result = await done()
        took = asyncio.get_running_loop().time() - began
        found.append(Row(work, count, share.controller / count * 1e6, share.all / count * 1e6, took))
        return result

    async with ActorSystem.local(hosts) as system:
        for each in system._network.systems.values():  # type: ignore[union-attr]
            each._host.transport.__class__ = DelayedTransport
        group = await measure("spawn an actor on each host", hosts, lambda: system.spawn(Worker, name="worker"))
        await measure("call each host, first time", hosts, lambda: group.ping())
        await measure("call each host", hosts, lambda: group.ping())
        items = ITEMS_PER_HOST * hosts
        work = lambda: group.work.map(Stream.of(range(items)), concurrency=1).collect()  # noqa: E731
        assert sorted(await measure("item of a stream over all", items, work)) == list(range(items))
        await measure("stall report, per host", hosts, system.stall_report)
        began = time.thread_time()
    end = (time.thread_time() - began) / hosts * 1e6
    return [*found, Row("end, per host", hosts, end, end, 0.0)]


def save(found: dict[int, list[Row]]) -> Path:
    """Write the rows beside those of other benchmarks."""
    path = RESULTS / f"{datetime.date.today().isoformat()}-scale.json"
    told = {hosts: [asdict(row) for row in some] for hosts, some in found.items()}
    path.write_text(
        json.dumps({"python": platform.python_version(), "latency": LATENCY, "hosts": told}, indent=1) + "\n"
    )
    return path


def main() -> None:
    """Print a table for each size."""
    parser = argparse.ArgumentParser(description="What one controller does for many hosts")
    parser.add_argument("--hosts", type=int, nargs="+", default=[100, 1000], help="numbers of hosts")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<date>-scale.json")
    options = parser.parse_args()
    found = {}
    for hosts in options.hosts:
        found[hosts], _ = run_virtual(rows(hosts))
        print(f"{hosts} hosts {'controller µs':>34} {'all hosts µs':>14} {'virtual s':>10}")
        for row in found[hosts]:
            print(f"  {row.work:<30} {row.controller:>12.1f} {row.all_hosts:>14.1f} {row.virtual:>10.4f}")
    if options.save:
        print(f"saved {save(found)}")


if __name__ == "__main__":
    main()
