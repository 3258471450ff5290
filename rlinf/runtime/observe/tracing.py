"""Spans of all hosts in one file, and the clocks of all hosts beside one's own.

Flows in: outlines and compressed pieces, which hosts make of their spans when asked. Flows out: `trace.json`. Only a
few hosts are asked at once, and each piece is written before the next one is asked for, so this host's memory does not
grow with the number of hosts. Nobody is woken.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf.runtime.base.calls import SERVICE, Key
from rlinf.runtime.base.tasks import few_at_once

from .clocks import best_offset
from .perfetto import Extract, Outline, TraceFile, extracts, outline, pieces

if TYPE_CHECKING:
    from rlinf.runtime.base.ports import Host

SMALL = 64
"""Hosts that are asked at once for something small: round trips overlap, and the controller does not choke."""
WRITERS = 4
"""Hosts that are asked at once for a piece of a trace: one writes while others make theirs."""

logger = logging.getLogger(__name__)


def ask(host: Host, number: int, method: str, *args: Any) -> Any:
    """Call the actor that every host has."""
    return host.call(number, SERVICE, method, f"host.{method}", args, {})


async def offsets(host: Host, hosts: Iterable[int]) -> dict[int, float]:
    """By host, the seconds to add to its clock to get this one's: one host of each other machine is asked."""
    machines: dict[str, list[int]] = {}
    for number in hosts:
        machines.setdefault(host.places[number].machine, []).append(number)

    async def compare(machine: str) -> float:
        if machine == host.places[host.rank].machine:
            return 0.0
        return await best_offset(host.now, lambda: ask(host, machines[machine][0], "clock"))

    found = zip(machines.values(), await few_at_once(SMALL, compare, machines), strict=True)
    return {number: ahead for numbers, ahead in found for number in numbers}


async def write_trace(host: Host, path: str | Path, hosts: list[int], most: int) -> None:
    """Write the newest spans of these hosts, at most so many in all."""
    ahead = await offsets(host, hosts)
    told = await few_at_once(SMALL, lambda number: _outline(host, number), hosts)
    outlines = {number: (ahead[number], each) for number, each in zip(hosts, told, strict=True)}
    loop, writing = asyncio.get_running_loop(), asyncio.Lock()
    with TraceFile(path) as file:

        async def copy(extract: Extract) -> None:
            export = host.number()
            try:
                while piece := await ask(host, extract.host, "trace_piece", export, extract):
                    async with writing:
                        await loop.run_in_executor(None, file.add, piece)
            finally:
                host.cast(extract.host, SERVICE, "trace_end", export)

        parts = extracts(outlines, most)
        await few_at_once(WRITERS, copy, parts)
    if parts and parts[0].after > float("-inf"):
        there = sum(each.spans for each in told)
        logger.warning("%s has the newest %d of %d spans: a file takes %d at most", path, file.spans, there, most)


async def _outline(host: Host, number: int) -> Outline:
    found: Outline = await ask(host, number, "trace_outline")
    return found


class Exports:
    """A host's side: what it makes of its spans for the files that are being written."""

    def __init__(self, host: Host):
        self._host = host
        self._open: dict[Key, Iterator[bytes]] = {}

    async def outline(self) -> Outline:
        """What it has."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, lambda: outline(self._host.tracer.dump()))

    async def piece(self, export: Key, extract: Extract) -> bytes:
        """The next piece for a file; empty: that was all."""
        if export not in self._open:
            self._open[export] = self._pieces(extract)
        made = self._open[export]
        return await asyncio.get_running_loop().run_in_executor(None, next, made, b"")

    def end(self, export: Key) -> None:
        """The file is written, or given up."""
        self._open.pop(export, None)

    def _pieces(self, extract: Extract) -> Iterator[bytes]:
        yield from pieces(extract, self._host.tracer.dump())
