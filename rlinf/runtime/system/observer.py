"""What all hosts do, seen from the controller: where the time of a step went, and who is at what right now.

Flows in: the spans, calls and queues that every host keeps anyway. Flows out: the intervals in which each actor was
busy, and a picture of this moment. Nobody is woken: an `Observer` on each host answers when it is asked.

    watch = await Watch.start(system)
    watch.begins()                        # a step of the flow starts
    step = await watch.ends("step 12")    # it is over: `step.busy` says who was busy when, on all hosts
    now = await watch.look()              # what each actor is doing
"""

from __future__ import annotations

import asyncio
import itertools
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlinf.runtime.actor.actor import Actor, Cell, endpoint
from rlinf.runtime.base.calls import CONTROLLER, FLOW, SERVICE
from rlinf.runtime.observe.dataflow import Passages, edges
from rlinf.runtime.observe.spans import Span, Tracer, best_offset

from .handles import ActorGroup
from .system import ActorSystem

NAME = "observer"
COMPUTE, LEASE = " compute", " lease"
"""Ends of the names of the tracks beside an actor's own."""
WAIT = "wait for "
"""Start of the name of a span in which a call waited for a queue, a value or a device."""
UNKNOWN = "compute"
"""Stands for the endpoint whose call is not over, so that its name is not known: it is told when the call ends."""
_ACTOR = re.compile(r"^.+\[\d+\]$")
_LOOK_BACK = 1024
"""Spans that are looked at first for those of the last step; twice as many each time until they reach its start."""

Interval = tuple[float, float]
"""Start and end, seconds."""


@dataclass(frozen=True, slots=True)
class Busy:
    """When an actor was busy with calls of one of its endpoints."""

    actor: str
    """Such as "rollout[0]"."""
    endpoint: str
    """Such as "generate"."""
    intervals: tuple[Interval, ...]
    """In order, apart from each other; seconds of the clock of whoever asked."""


@dataclass(frozen=True, slots=True)
class Flow:
    """What went from one endpoint to another in a step, on all hosts and from all ranks together.

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
    """Who was busy with what; within the step, and empty where tracing is switched off."""
    flows: tuple[Flow, ...] = ()
    """What went from whom to whom; empty where tracing is switched off."""
    moves: tuple[Moved, ...] = ()
    """Who was loaded and parked, as far as within the step; in order of their ends."""


@dataclass(frozen=True, slots=True)
class ActorState:
    """What an actor is doing at this moment."""

    actor: str
    """Such as "rollout[0]"."""
    host: int
    """Where it lives."""
    doing: str
    """`computing NAME`, `waiting for NAME`, `running ENDPOINT` or `idle`."""
    since: float | None
    """Seconds since its oldest running call began; None when idle."""


@dataclass(frozen=True, slots=True)
class QueueState:
    """A stream or channel at this moment."""

    name: str
    """Such as "rollout.generate@0.41"."""
    ready: int
    """Items that nobody has taken yet."""
    taken: int
    """Items that somebody works on."""
    put: int
    """Items that ever came."""


@dataclass(frozen=True, slots=True)
class Moment:
    """All hosts at about the same moment."""

    actors: tuple[ActorState, ...]
    """In order of their spawning, host by host."""
    queues: tuple[QueueState, ...]
    """Those that still exist."""


# Reading spans -------------------------------------------------------------------------------------------------------


def recent(tracer: Tracer, since: float) -> list[Span]:
    """The spans of a host that ended after `since`, newest first; costs grow with their number, not with all there are.

    Each span is appended at its end, so the ring is in order of their ends.
    """
    count = _LOOK_BACK
    while True:
        spans = list(itertools.islice(reversed(tracer._spans), count))  # in one go: a thread may append meanwhile
        if len(spans) < count or spans[-1][3] < since:
            return [span for span in spans if span[3] >= since]
        count *= 2


def is_actor(track: str) -> bool:
    """Whether a track is the one of an actor, not of its lease, of a queue, of the flow or of an observer."""
    return _ACTOR.match(track) is not None and not track.startswith(f"{NAME}[")


def busy(spans: Iterable[Span]) -> list[Busy]:
    """When each actor was busy, read off its spans.

    An endpoint that computes is busy while it computes: its calls may otherwise be waiting for their streams. One that
    never computes, because a child process or a server does its work, is busy while a call runs and waits for no queue,
    value or device. Of a mapped endpoint the calls for single items count, not the one that hands them out.
    """
    calls: dict[str, list[Span]] = defaultdict(list)
    waits: dict[str, list[Interval]] = defaultdict(list)
    computed: dict[str, list[Interval]] = defaultdict(list)
    for span in spans:
        track, name, start, end, _ = span
        actor = track.removesuffix(COMPUTE).removesuffix(LEASE)
        if not is_actor(actor):
            continue
        if name.startswith(WAIT):
            waits[actor].append((start, end))
        elif track.endswith(COMPUTE):
            computed[actor].append((start, end))
        elif track == actor:
            calls[actor].append(span)
    found = []
    for actor in {**calls, **computed}:
        for name, intervals in _by_endpoint(calls[actor], computed[actor], waits[actor]).items():
            found.append(Busy(actor, name, tuple(union(intervals))))
    return found


def _by_endpoint(
    calls: list[Span], computed: list[Interval], waits: Sequence[Interval]
) -> dict[str, Iterable[Interval]]:
    """The busy times of one actor by endpoint; computations outside of every finished call are `UNKNOWN`'s."""
    calls = sorted(calls, key=lambda span: span[2])
    starts = [span[2] for span in calls]
    found: dict[str, list[Interval]] = defaultdict(list)
    for start, end in computed:
        owner = UNKNOWN
        for at in range(bisect_right(starts, start) - 1, -1, -1):  # the call that began last is the likeliest owner
            if calls[at][3] >= end:
                owner = calls[at][1]
                break
        found[owner].append((start, end))
    rest: dict[str, list[Span]] = defaultdict(list)
    for call in calls:
        if call[1] not in found:
            rest[call[1]].append(call)
    waited = union(waits)
    for name, spans in rest.items():
        items = [span for span in spans if (span[4] or {}).get("caller", "").startswith(f"{span[0]}.{name}#")]
        found[name] = list(without(union((span[2], span[3]) for span in items or spans), [] if items else waited))
    return dict(found)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as intervals in order that neither overlap nor touch."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def without(intervals: Iterable[Interval], others: Sequence[Interval]) -> Iterable[Interval]:
    """What is left of `intervals` outside `others`; both in order and apart."""
    position = 0
    for start, end in intervals:
        while position < len(others) and others[position][1] <= start:
            position += 1
        for hole_start, hole_end in itertools.takewhile(lambda hole: hole[0] < end, others[position:]):  # noqa: B023
            if start < hole_start:
                yield start, hole_start
            start = max(start, hole_end)
        if start < end:
            yield start, end


# Asking hosts --------------------------------------------------------------------------------------------------------


class Observer(Actor):
    """One on every host; answers from what the host keeps about itself."""

    @endpoint
    async def between(self, start: float, end: float) -> tuple[list[Busy], Passages, list[Moved]]:
        """What happened on this host between two times of its clock, seconds: who was busy, also beyond these times;
        what went from whom to whom; and, on the controller, who was moved."""
        host = self._cell.host
        moves = []
        if host.rank == CONTROLLER:
            moves = [Moved(*move) for move in host.system.service.moved if move[3] >= start and move[2] <= end]
        return busy(recent(host.tracer, start)), host.flows.between(start, end), moves

    @endpoint
    async def clock(self) -> float:
        """This host's clock, seconds."""
        return self._cell.host.now()

    @endpoint
    async def look(self) -> tuple[list[ActorState], list[QueueState]]:
        """What this host's actors and queues are doing."""
        host = self._cell.host
        waits: dict[str, str] = {}
        for queue in host.system.queues.all():
            for who, _ in queue.statistics()["waiting_to_take"]:
                waits[who.partition("/")[0]] = _plain(queue.name)
            for who, _ in queue.statistics()["waiting_to_put"]:
                waits[who.partition("/")[0]] = f"space in {_plain(queue.name)}"
        cells = [cell for cell in host.cells.values() if cell.id != SERVICE and cell is not self._cell]
        actors = [_state(cell, waits, host.now()) for cell in cells]
        return actors, [_queue_state(queue.statistics()) for queue in host.system.queues.all()]


def _state(cell: Cell, waits: dict[str, str], now: float) -> ActorState:
    calls = sorted(cell.calls, key=lambda call: call.since)
    if not calls:
        return ActorState(cell.name, cell.host.rank, "idle", None)
    since = now - calls[0].since
    computing = next((call.doing for call in calls if call.doing), None)
    waiting = next((waits[call.label] for call in calls if call.label in waits), None)
    doing = computing or (f"waiting for {waiting}" if waiting else f"running {calls[0].name.rpartition('.')[2]}")
    return ActorState(cell.name, cell.host.rank, doing, since)


def _queue_state(facts: dict[str, object]) -> QueueState:
    return QueueState(str(facts["name"]), *(int(str(facts[key])) for key in ("queued", "running", "put")))


def _plain(name: str) -> str:
    return name.partition("@")[0]


class Watch:
    """The controller's side: asks the observers of all hosts and puts their answers on one clock."""

    def __init__(self, system: ActorSystem, observers: ActorGroup, offsets: Sequence[float]):
        self._system, self._observers, self._offsets = system, observers, offsets
        self._host = system.service._cell.host
        self._start = self._host.now()

    @classmethod
    async def start(cls, system: ActorSystem) -> Watch:
        """Put an observer on every host; the current scope owns them."""
        observers = await system.spawn(Observer, name=NAME)
        places = system.service._cell.host.places
        own = places[system.host].machine
        offsets = [
            0.0 if places[number].machine == own else await best_offset(system.service._cell.host.now, ref.clock)
            for number, ref in enumerate(observers)
        ]
        return cls(system, observers, offsets)

    def now(self) -> float:
        """The controller's clock, seconds."""
        return self._host.now()

    def begins(self) -> None:
        """A step begins now."""
        self._start = self._host.now()

    async def ends(self, name: str) -> Lap:
        """The step that began last ends now; it gets a span of this name on the flow's track."""
        start, end = self._start, self._host.now()
        self._host.tracer.span(FLOW, name, start, end)
        asked = [
            ref.between(start - ahead, end - ahead) for ref, ahead in zip(self._observers, self._offsets, strict=True)
        ]
        found = list(zip(self._offsets, await asyncio.gather(*asked), strict=True))
        parts = [
            Busy(part.actor, part.endpoint, clipped)
            for ahead, (parts, _, _) in found
            for part in parts
            if (clipped := _clip(part.intervals, ahead, start, end))
        ]
        flows = [
            Flow(*ends, edge.items, tuple(time - start for time in edge.released))
            for ends, edge in edges((ahead, passages) for ahead, (_, passages, _) in found).items()
        ]
        moves = [
            Moved(move.actor, move.what, begin, finish)
            for ahead, (_, _, moves) in found
            for move in moves
            for begin, finish in [(max(move.start + ahead, start), min(move.end + ahead, end))]
        ]
        return Lap(start, end, tuple(parts), tuple(flows), tuple(moves))

    async def look(self) -> Moment:
        """What everybody does now."""
        answers = await asyncio.gather(*(ref.look() for ref in self._observers))
        actors = tuple(state for states, _ in answers for state in states)
        return Moment(actors, tuple(state for _, states in answers for state in states))


def _clip(intervals: Iterable[Interval], ahead: float, start: float, end: float) -> tuple[Interval, ...]:
    moved = ((max(begin + ahead, start), min(finish + ahead, end)) for begin, finish in intervals)
    return tuple((begin, finish) for begin, finish in moved if begin < finish)
