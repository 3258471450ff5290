"""What happened when: spans of calls, waits, payloads and leases, and their picture in Perfetto.

Flows in: finished spans, a tuple appended to a ring each. Flows out: `trace.json` in Chrome's trace format, one
process per host and one track per actor, which https://ui.perfetto.dev opens. Nobody waits here.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Span = tuple[str, str, float, float, dict[str, Any] | None]
"""Track, name, start and end in seconds of the host's clock, details."""

RING = 200_000
"""Spans a host remembers; at about 200 bytes each that is 40 MB at worst, and hours of training."""


class Tracer:
    """The spans of one host. Recording one costs well under 2 µs; switched off, an attribute look-up and a call."""

    def __init__(self, host: int, now: Callable[[], float], *, enabled: bool = True, ring: int = RING):
        self.host = host
        self.enabled = enabled
        self.offset = time.time() - now()
        """Seconds to add to this host's clock to get wall time, which is what hosts have in common."""
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

    def dump(self) -> tuple[int, float, list[Span]]:
        """(host, clock offset, spans), ready to travel to the host that writes the file."""
        return (self.host, self.offset, list(self._spans))


def write_perfetto(path: str | Path, dumps: Iterable[tuple[int, float, list[Span]]]) -> None:
    """Write the spans of several hosts as one Chrome trace file.

    Spans of one track may overlap (an actor serves many calls at once), which Chrome's complete events cannot show;
    each track is therefore laid out in as many lanes as it needs.
    """
    events: list[dict[str, Any]] = []
    dumps = list(dumps)
    origin = min((start + offset for _, offset, spans in dumps for _, _, start, _, _ in spans), default=0.0)
    for host, offset, spans in dumps:
        events.append({"ph": "M", "name": "process_name", "pid": host, "args": {"name": f"host {host}"}})
        lanes = _Lanes(host, events)
        for track, name, start, end, details in sorted(spans, key=lambda span: span[2]):
            event = {
                "ph": "X",
                "pid": host,
                "tid": lanes.place(track, start, end),
                "name": name,
                "cat": track,
                "ts": round((start + offset - origin) * 1e6, 3),
                "dur": round(max(end - start, 0.0) * 1e6, 3),
            }
            if details:
                event["args"] = details
            events.append(event)
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


class _Lanes:
    """Numbers the lanes of a host's tracks, a new lane wherever spans of one track overlap."""

    def __init__(self, host: int, events: list[dict[str, Any]]):
        self._host = host
        self._events = events
        self._free_at: dict[str, list[tuple[int, float]]] = {}
        self._count = 0

    def place(self, track: str, start: float, end: float) -> int:
        lanes = self._free_at.setdefault(track, [])
        for index, (lane, free_at) in enumerate(lanes):
            if free_at <= start:
                lanes[index] = (lane, end)
                return lane
        self._count += 1
        lanes.append((self._count, end))
        name = track if len(lanes) == 1 else f"{track} ({len(lanes)})"
        self._events.append(
            {"ph": "M", "name": "thread_name", "pid": self._host, "tid": self._count, "args": {"name": name}}
        )
        return self._count
