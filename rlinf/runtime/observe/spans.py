"""What happened when: typed spans of calls, computations, waits, leases, moves and payloads.

Flows in: finished spans, a tuple appended to a ring each. Flows out: the spans of a step, or all of them. Nobody waits.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

RING = 200_000
"""Spans a host remembers; at about 200 bytes each that is 40 MB at worst, and hours of training."""
LOOK_BACK = 1024
"""Spans that are looked at first for the last ones; twice as many each time until they reach the time asked for."""
DEVICES = "lease"
"""What a call waits for that waits for its actor's devices."""


Kind = Literal["call", "item", "move", "compute", "wait", "lease", "payload", "part", "flow"]
"""What a span is about, and so what `Span.what` says.

call: a call of an endpoint; `what` is the caller.
item: an item, or batch of items, of a mapped endpoint; `what` is the call that takes them.
move: the lease manager loads or parks an actor; `endpoint` is "onload" or "offload", `what` the caller.
compute: a function on an actor's compute thread; `what` is its name.
wait: nothing goes on before a queue, a value or (`DEVICES`) a device is there; `what` is its name.
lease: a call holds its actor's devices; `what` is the call.
payload: a value is sent to another host, at an instant; `what` is its route.
part: a part of an actor's work that it tells of (`Actor.note`); `what` is its metric.
flow: a part of the flow function, such as a step; `what` is its name.
"""
KINDS: frozenset[str] = frozenset(get_args(Kind))
OF_ACTORS: frozenset[Kind] = frozenset({"call", "item", "move", "compute", "lease", "part"})
"""Kinds of spans that only actors have."""


class Span(NamedTuple):
    """Something that took time on a host."""

    kind: Kind
    actor: str
    """Such as "rollout[0]"; "flow" for the flow function; of a wait also a part of a stream; empty for payloads."""
    endpoint: str
    """Such as "generate"; empty where no call of an endpoint is behind it."""
    what: str
    """Of that kind; see `Kind`."""
    start: float
    """Seconds of the host's clock."""
    end: float
    """Seconds of the host's clock."""
    bytes: int = 0
    """That were sent, of a payload; that were moved, of a part."""


def _drop(span: tuple[Any, ...]) -> None:
    """Tracing is switched off."""


class Tracer:
    """The spans of one host. Recording one costs well under 2 µs; switched off, an attribute look-up and a call."""

    def __init__(self, *, enabled: bool = True, ring: int = RING):
        # Plain tuples, which the garbage collector stops looking at: it would look at as many `Span` every time.
        self._spans: deque[tuple[Any, ...]] = deque(maxlen=ring)
        self.record: Callable[[tuple[Any, ...]], object] = self._spans.append if enabled else _drop
        """Record the fields of a span as a tuple: `span` for who records one at every call."""

    def span(self, kind: Kind, actor: str, endpoint: str, what: str, start: float, end: float, bytes: int = 0) -> None:
        """Record a span; see `Span`."""
        self.record((kind, actor, endpoint, what, start, end, bytes))

    def dump(self) -> list[Span]:
        """All spans so far, oldest first."""
        return list(map(Span._make, list(self._spans)))  # copied in one go: a thread may append meanwhile

    def ended_since(self, since: float) -> list[Span]:
        """The spans that ended then or later, newest first; costs grow with their number, not with all there are."""
        return [Span._make(span) for span in self.plain_since(since, LOOK_BACK)]

    def plain_since(self, since: float, count: int) -> list[tuple[Any, ...]]:
        """The same as plain tuples, which take a third of the time.

        Each span is appended at its end, so the ring is in order of their ends.

        Args:
            since: seconds of the host's clock.
            count: how many to look at first.
        """
        while True:
            spans = list(itertools.islice(reversed(self._spans), count))
            if len(spans) < count or spans[-1][5] < since:
                return [span for span in spans if span[5] >= since]
            count *= 2
