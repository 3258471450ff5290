"""What the actors of a host did since a moment ago, what they are still at included. Pure.

Flows in: spans that ended since then, and spans of what is under way, which end now. Flows out: times by actor and
endpoint. Nobody is woken.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from rlinf.runtime.observe.busy import Busy, busy_times, sorted_out
from rlinf.runtime.observe.intervals import Interval, clip
from rlinf.runtime.observe.spans import Kind

CALLED = ""
"""Stands for the endpoint where a `Busy` tells of all calls of an actor, working or waiting."""
GAP = 0.02
"""Seconds; shorter gaps are closed: an engine computes some hundred times a second, and a minute of lanes is a thousand
dots wide."""
_FINEST: tuple[Kind, ...] = ("call", "item", "compute")
"""How exactly spans tell of an endpoint's work, the last the most."""

Seen = dict[tuple[str, str], Kind]
"""By actor and endpoint, the finest kind of its spans so far."""


def recent(spans: Iterable[tuple[Any, ...]], start: float, end: float, seen: Seen) -> list[Busy]:
    """Who was busy between two times, and when there were calls of each actor at all.

    Args:
        spans: that reach into that time, as `Span` or plain tuples.
        start, end: seconds of the host's clock.
        seen: kept by the caller from one time to the next. A call of an endpoint that computes waits while it does not
            compute, as `busy` has it; within a second it may not have computed once, so that must be remembered.

    Returns:
        Times by actor and endpoint, and for each actor those under `CALLED`.
    """
    times, waited = sorted_out(spans)
    found: list[Busy] = []
    called: dict[str, list[Interval]] = defaultdict(list)
    for (actor, endpoint), kinds in times.items():
        finest = seen.get((actor, endpoint), "call")
        for kind in _FINEST:
            if kind in kinds and _FINEST.index(kind) > _FINEST.index(finest):
                seen[actor, endpoint] = finest = kind
        for intervals in kinds.values():
            called[actor] += intervals
        known = {kind: own for kind, own in kinds.items() if kind in ("move", finest)}
        if known:
            busy = busy_times(known, waited.get(actor, []))
            found.append(Busy(actor, endpoint, clip(closed(busy), start, end)))
    found += [Busy(actor, CALLED, clip(closed(intervals), start, end)) for actor, intervals in called.items()]
    return [part for part in found if part.intervals]


def closed(intervals: Iterable[Interval], gap: float = GAP) -> list[Interval]:
    """The same time as intervals in order, those that are less than a gap apart as one."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and (start <= joined[-1][1] or start - joined[-1][1] < gap):
            if end > joined[-1][1]:
                joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined
