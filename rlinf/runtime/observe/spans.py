"""Spans of what happened when, and what they tell: which actor was busy with which endpoint, in a step or just now.

Flows in: finished spans of calls, computations, waits, leases, moves and payloads, a tuple appended to a ring each.
Flows out: the spans of a step, or all of them; the intervals in which each actor was busy; a step of a flow as it was
seen on all hosts (`Lap`), plain data that pages and planners read without a runtime. Nobody waits.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

PINGS = 5
"""Questions by which a clock on another machine is compared; the quickest answer counts."""


async def best_offset(now: Callable[[], float], ask: Callable[[], Awaitable[float]]) -> float:
    """Seconds to add to another machine's clock to get this one's: right to half a round trip.

    Args:
        now: this clock.
        ask: gets the time of the other one.
    """
    tries = []
    for _ in range(PINGS):
        sent = now()
        theirs = await ask()
        answered = now()
        tries.append((answered - sent, (sent + answered) / 2 - theirs))
    return min(tries)[1]


Interval = tuple[float, float]
"""Start and end, seconds."""


def union(intervals: Iterable[Interval], gap: float = 0.0) -> list[Interval]:
    """Return the same time as intervals in order that neither overlap nor touch; those less than a gap apart as one."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and (start <= merged[-1][1] or start - merged[-1][1] < gap):
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def without(intervals: Iterable[Interval], others: Sequence[Interval]) -> Iterator[Interval]:
    """Yield what is left of `intervals` outside `others`; both in order and apart, so that one pass over both is
    enough."""
    position = 0
    for start, end in intervals:
        while position < len(others) and others[position][1] <= start:
            position += 1
        at = position
        while at < len(others) and others[at][0] < end:
            if start < others[at][0]:
                yield start, others[at][0]
            start = max(start, others[at][1])
            at += 1
        position = max(position, at - 1)  # the last hole may reach into the next interval, those before it cannot
        if start < end:
            yield start, end


def clip(intervals: Iterable[Interval], start: float, end: float, ahead: float = 0.0) -> tuple[Interval, ...]:
    """Return what lies between two times, once `ahead` is added."""
    moved = ((max(begin + ahead, start), min(finish + ahead, end)) for begin, finish in intervals)
    return tuple((begin, finish) for begin, finish in moved if begin < finish)


RING = 200_000
"""Spans a host remembers; at about 200 bytes each that is 40 MB at worst, and hours of training."""
LOOK_BACK = 1024
"""Spans that are looked at first for the last ones; twice as many each time until they reach the time asked for."""
DEVICES = "lease"
"""Name of the wait of a call that waits for its actor's devices."""


Kind = Literal["call", "item", "move", "compute", "wait", "lease", "payload", "part", "flow"]
"""The subject of a span, and so the meaning of `Span.what`.

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
    bytes: float = 0
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

    def span(
        self, kind: Kind, actor: str, endpoint: str, what: str, start: float, end: float, bytes: float = 0
    ) -> None:
        """Record a span; see `Span`."""
        self.record((kind, actor, endpoint, what, start, end, bytes))

    def dump(self) -> list[Span]:
        """All spans so far, oldest first."""
        return list(map(Span._make, list(self._spans)))  # copied in one go: a thread may append meanwhile

    def ended_since(self, since: float) -> list[Span]:
        """The spans that ended then or later, newest first; costs grow with their number, not with all there are."""
        return [Span._make(span) for span in self.plain_since(since, LOOK_BACK)]

    def plain_since(self, since: float, count: int) -> list[tuple[Any, ...]]:
        """Return spans as plain tuples, which take a third of the time.

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


UNKNOWN = "compute"
"""Stands for the endpoint where an actor computes while none of its calls runs."""


@dataclass(frozen=True, slots=True)
class Busy:
    """When an actor was busy with calls of one of its endpoints."""

    actor: str
    """Such as "rollout[0]"."""
    endpoint: str
    """Such as "generate"."""
    intervals: tuple[Interval, ...]
    """In order, apart from each other; seconds of the clock of whoever asked."""


def busy(spans: Iterable[Span]) -> list[Busy]:
    """When each actor was busy, read off its spans.

    An endpoint that computes is busy while it computes: its calls may otherwise be waiting for their streams. One that
    never computes, because a child process or a server does its work, is busy while a call runs and waits for no queue,
    value or device. Of a mapped endpoint the calls for single items count, not the one that hands them out.
    """
    times, waited = sorted_out(spans)
    return [
        Busy(actor, endpoint, tuple(busy_times(kinds, waited.get(actor, []))))
        for (actor, endpoint), kinds in times.items()
    ]


def sorted_out(
    spans: Iterable[tuple[Any, ...]],
) -> tuple[dict[tuple[str, str], dict[Kind, list[Interval]]], dict[str, list[Interval]]]:
    """Return what spans tell of work, by actor and endpoint and by kind; and when each actor waited.

    Args:
        spans: as `Span` or plain tuples.
    """
    times: dict[tuple[str, str], dict[Kind, list[Interval]]] = {}
    waits: dict[str, list[Interval]] = defaultdict(list)
    for kind, actor, endpoint, _, start, end, _ in spans:
        if kind == "wait":
            waits[actor].append((start, end))
        elif kind in ("call", "item", "move", "compute"):
            kinds = times.setdefault((actor, endpoint or UNKNOWN), {})
            kinds.setdefault(kind, []).append((start, end))
    waited = {actor: union(intervals) for actor, intervals in waits.items()}
    return times, waited


def busy_times(times: dict[Kind, list[Interval]], waited: list[Interval]) -> Iterable[Interval]:
    """The busy times of one endpoint of an actor; see `busy`.

    Args:
        times: of its spans by kind, of which there is at least one.
        waited: when the actor waited.
    """
    for kind in ("compute", "item"):
        if kind in times:
            return union(times[kind])
    return without(union(times.get("call") or times["move"]), waited)


CALLED = ""
"""Stands for the endpoint where a `Busy` tells of all calls of an actor, working or waiting."""
GAP = 0.02
"""Seconds; shorter gaps are closed: an engine computes some hundred times a second, and a minute of lanes is a thousand
dots wide."""
_FINEST: tuple[Kind, ...] = ("call", "item", "compute")
"""How exactly spans tell of an endpoint's work, the last the most."""

Seen = dict[tuple[str, str], Kind]
"""By actor and endpoint, the finest kind of its spans so far."""


def recent(spans: Iterable[tuple[Any, ...]], start: float, end: float, finest_kinds: Seen) -> list[Busy]:
    """Return which endpoints were busy between two times, and when there were calls of each actor at all.

    Args:
        spans: that reach into that time, as `Span` or plain tuples.
        start, end: seconds of the host's clock.
        finest_kinds: kept by the caller from one time to the next. A call of an endpoint that computes waits while it
            does not compute, as `busy` has it; within a second it may not have computed once, so that must be
            remembered.

    Returns:
        Times by actor and endpoint, and for each actor those under `CALLED`.
    """
    times, waited = sorted_out(spans)
    parts: list[Busy] = []
    called: dict[str, list[Interval]] = defaultdict(list)
    for (actor, endpoint), kinds in times.items():
        finest = finest_kinds.get((actor, endpoint), "call")
        for kind in _FINEST:
            if kind in kinds and _FINEST.index(kind) > _FINEST.index(finest):
                finest_kinds[actor, endpoint] = finest = kind
        for intervals in kinds.values():
            called[actor] += intervals
        exact = {kind: own for kind, own in kinds.items() if kind in ("move", finest)}
        if exact:
            busy = busy_times(exact, waited.get(actor, []))
            parts.append(Busy(actor, endpoint, clip(union(busy, GAP), start, end)))
    parts += [Busy(actor, CALLED, clip(union(intervals, GAP), start, end)) for actor, intervals in called.items()]
    return [part for part in parts if part.intervals]


@dataclass(frozen=True, slots=True)
class Flow:
    """Items and promises that went from one endpoint to another in a step, on all hosts and from all ranks together.

    Arguments are seen, and streams wherever they are read. A value that the flow function awaited and passed on is a
    value like any other, and is not.
    """

    source: str
    """Such as "rollout.generate"; "flow" for the flow function itself."""
    target: str
    """Such as "judge.score"; "flow" for the flow function itself."""
    items: int
    """Items of streams that the target took, and promises that it got."""
    released: tuple[float, ...] = ()
    """When items of those streams left the source, seconds since the step's start; ascending. For more than 256 items
    they are thinned to as many, evenly, the last item's among them. Empty for promises."""


@dataclass(frozen=True, slots=True)
class Moved:
    """The lease manager had an actor loaded or parked."""

    actor: str
    """Such as "trainer[0]"."""
    what: str
    """Either "onload" or "offload"."""
    start: float
    """Seconds of the clock of whoever asked."""
    end: float
    """Seconds of the clock of whoever asked."""


@dataclass(frozen=True, slots=True)
class Lap:
    """One step of a flow, on all hosts."""

    start: float
    """Seconds of the controller's clock."""
    end: float
    """Seconds of the controller's clock."""
    busy: tuple[Busy, ...]
    """Work of each actor; within the step, and empty where tracing is switched off."""
    flows: tuple[Flow, ...] = ()
    """Values that went from actor to actor; empty where tracing is switched off."""
    moves: tuple[Moved, ...] = ()
    """Loads and parks of actors, as far as within the step; in order of their ends."""
    parts: tuple[Span, ...] = ()
    """Parts of their work that actors told of (`Actor.note`); seconds of the controller's clock."""
