"""What the actors of a host did since a moment ago, what they are still at included. Pure.

Flows in: spans that ended since then, and spans of what is under way, which end now. Flows out: times by actor and
endpoint. Nobody is woken.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from rlinf.runtime.observe.busy import Busy, busy
from rlinf.runtime.observe.intervals import Interval, clip, union
from rlinf.runtime.observe.spans import Kind, Span

CALLED = ""
"""Stands for the endpoint where a `Busy` tells of all calls of an actor, working or waiting."""
GAP = 0.01
"""Seconds; shorter gaps are closed: an engine computes some hundred times a second, and nobody sees these apart."""
_OF_CALLS: tuple[Kind, ...] = ("call", "item", "move", "compute")

Seen = dict[tuple[str, str], Kind]
"""By actor and endpoint, how it was seen to work: `compute`, or `item`."""


def recent(spans: Sequence[Span], start: float, end: float, seen: Seen) -> list[Busy]:
    """Who was busy between two times, and when there were calls of each actor at all.

    Args:
        spans: that reach into that time.
        start, end: seconds of the host's clock.
        seen: kept by the caller from one time to the next. A call of an endpoint that computes waits while it does not
            compute, as `busy` has it; within a second it may not have computed once, so that must be remembered.

    Returns:
        Times by actor and endpoint, and for each actor those under `CALLED`.
    """
    for span in spans:
        if span.kind == "compute" or (span.kind == "item" and (span.actor, span.endpoint) not in seen):
            seen[span.actor, span.endpoint] = span.kind
    worked = busy(span for span in spans if _counts(span, seen))
    called: dict[str, list[Interval]] = defaultdict(list)
    for span in spans:
        if span.kind in _OF_CALLS:
            called[span.actor].append((span.start, span.end))
    everything = [*worked, *(Busy(actor, CALLED, tuple(times)) for actor, times in called.items())]
    cut = (Busy(part.actor, part.endpoint, clip(closed(part.intervals), start, end)) for part in everything)
    return [part for part in cut if part.intervals]


def closed(intervals: Iterable[Interval], gap: float = GAP) -> list[Interval]:
    """The same time as intervals in order, those that are less than a gap apart as one."""
    joined: list[Interval] = []
    for start, end in union(intervals):
        if joined and start - joined[-1][1] < gap:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


def _counts(span: Span, seen: Seen) -> bool:
    """A call counts as work only where nothing more exact is known."""
    return span.kind not in ("call", "item") or seen.get((span.actor, span.endpoint), span.kind) == span.kind
