"""What happened when: spans of calls, waits, payloads and leases, and their picture in Perfetto.

Flows in: finished spans, a tuple appended to a ring each. Flows out: `trace.json` in Chrome's trace format, one
process per host and one track per actor, which https://ui.perfetto.dev opens. Nobody waits here.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from rlinf.runtime.base.errors import TraceError

Span = tuple[str, str, float, float, dict[str, Any] | None]
"""Track, name, start and end in seconds of the host's clock, details."""

Dump = tuple[int, float, list[Span]]
"""A host, the seconds to add to its clock to get the clock of whoever writes the file, and its spans."""

RING = 200_000
"""Spans a host remembers; at about 200 bytes each that is 40 MB at worst, and hours of training."""
PINGS = 5
"""Questions by which a clock on another machine is compared; the quickest answer counts."""


class Tracer:
    """The spans of one host. Recording one costs well under 2 µs; switched off, an attribute look-up and a call."""

    def __init__(self, *, enabled: bool = True, ring: int = RING):
        self._spans: deque[Span] = deque(maxlen=ring)
        self._append = self._spans.append
        if not enabled:
            self.span = self._nothing  # type: ignore[method-assign]

    def span(self, track: str, name: str, start: float, end: float, details: dict[str, Any] | None = None) -> None:
        """Record that `name` ran on `track` (an actor, a queue) from `start` to `end`, seconds of the host's clock."""
        self._append((track, name, start, end, details))

    def _nothing(
        self, track: str, name: str, start: float, end: float, details: dict[str, Any] | None = None
    ) -> None: ...

    def dump(self) -> list[Span]:
        """All spans so far, as they may travel to the host that writes the file."""
        return list(self._spans)


async def best_offset(now: Callable[[], float], ask: Callable[[], Awaitable[float]]) -> float:
    """Seconds to add to another machine's clock to get this one's: right to half a round trip.

    Args:
        now: this clock.
        ask: gets the time of the other one.
    """
    tries = []
    for _ in range(PINGS):
        asked = now()
        theirs = await ask()
        answered = now()
        tries.append((answered - asked, (asked + answered) / 2 - theirs))
    return min(tries)[1]


def write_perfetto(path: str | Path, dumps: Iterable[Dump]) -> None:
    """Write the spans of several hosts as one Chrome trace file.

    Spans of one track may overlap (an actor serves many calls at once), which Chrome's complete events cannot show;
    each track is therefore laid out in as many lanes as it needs.

    Raises:
        TraceError: it cannot be written there, for instance because the disk is full; what was written is removed.
    """
    opened = False
    try:
        with open(path, "w") as file:
            opened = True
            _write(file, list(dumps))
    except OSError as error:
        if opened:
            with contextlib.suppress(OSError):
                os.unlink(path)
        raise TraceError(f"the trace {path} could not be written: {error.strerror or error}") from error


def _write(file: TextIO, dumps: list[Dump]) -> None:
    """Event by event: one call for all would keep the loop from running for seconds."""
    origin = min((start + ahead for _, ahead, spans in dumps for _, _, start, _, _ in spans), default=0.0)
    file.write('{"displayTimeUnit": "ms", "traceEvents": [')
    separator = "\n"
    for dump in dumps:
        for event in _events(dump, origin):
            file.write(separator + json.dumps(event))
            separator = ",\n"
    file.write("\n]}\n")


def _events(dump: Dump, origin: float) -> Iterator[dict[str, Any]]:
    host, ahead, spans = dump
    yield {"ph": "M", "name": "process_name", "pid": host, "args": {"name": f"host {host}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": host, "args": {"sort_index": host}}
    lanes = _Lanes()
    for track, name, start, end, details in sorted(spans, key=lambda span: span[2]):
        # in whole nanoseconds, so that rounding makes no two spans of a lane overlap
        begin, finish = round((start + ahead - origin) * 1e9), round((max(start, end) + ahead - origin) * 1e9)
        lane, is_new = lanes.place(track, begin, finish)
        if is_new is not None:
            yield {"ph": "M", "name": "thread_name", "pid": host, "tid": lane, "args": {"name": is_new}}
        event = {"ph": "X", "pid": host, "tid": lane, "name": name, "cat": track}
        event |= {"ts": begin / 1e3, "dur": (finish - begin) / 1e3}
        yield event | {"args": details} if details else event


class _Lanes:
    """Numbers the lanes of a host's tracks, a new lane wherever spans of one track overlap."""

    def __init__(self) -> None:
        self._busy: dict[str, list[tuple[int, int]]] = {}
        self._free: dict[str, list[int]] = {}
        self._count = 0

    def place(self, track: str, start: int, end: int) -> tuple[int, str | None]:
        """The lane of the next span (they come in order of their starts), and its name if it is a new one."""
        busy, free = self._busy.setdefault(track, []), self._free.setdefault(track, [])
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        name = None
        if not free:
            self._count += 1
            name = f"{track} ({len(busy) + 1})" if busy else track
            free.append(self._count)
        lane = heapq.heappop(free)
        heapq.heappush(busy, (end, lane))
        return lane, name
