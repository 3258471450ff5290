"""Activity of all hosts, seen from the controller: where the time of a step went, who is at what right now, who waits.

Flows in: the spans, calls and queues that every host keeps anyway. Flows out: the intervals in which each actor was
busy, a picture of this moment, and the reports of those that wait. Nobody is woken: the actor that every host has
answers when it is asked.

    watch = await Watch.start(system)
    watch.begins()                        # a step of the flow starts
    step = await watch.ends("step 12")    # it is over: `step.busy` says who was busy when, on all hosts
    now = await watch.look()              # what each actor is doing
    back = await watch.look_back(1, since)  # what host 1 did since then, too
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlinf.runtime.base.calls import FLOW
from rlinf.runtime.observe.dataflow import edges
from rlinf.runtime.observe.perfetto import ask, offsets
from rlinf.runtime.observe.spans import Busy, Flow, Lap, Moved, clip
from rlinf.runtime.system.host_service import ActorState, LookBack, QueueState

if TYPE_CHECKING:
    from rlinf.runtime.system.system import ActorSystem


@dataclass(frozen=True, slots=True)
class Moment:
    """All hosts at about the same moment."""

    actors: tuple[ActorState, ...]
    """In order of their spawning, host by host."""
    queues: tuple[QueueState, ...]
    """Those that still exist."""


class Watch:
    """The controller's side: asks all hosts and puts their answers on one clock."""

    def __init__(self, system: ActorSystem, ahead: Mapping[int, float]):
        self._ahead = ahead
        self._host = system.service._cell.host
        self._start = self._host.now()

    @classmethod
    async def start(cls, system: ActorSystem) -> Watch:
        """Compare the clocks of all hosts with this one's."""
        return cls(system, await offsets(system.service._cell.host, system.living()))

    def now(self) -> float:
        """The controller's clock, seconds."""
        return self._host.now()

    def begins(self) -> None:
        """A step begins now."""
        self._start = self._host.now()

    async def ends(self, name: str) -> Lap:
        """The step that began last ends now; it gets a span of this name on the flow's track."""
        start, end = self._start, self._host.now()
        self._host.tracer.span("flow", FLOW, "", name, start, end)
        calls = [ask(self._host, number, "between", start - a, end - a) for number, a in self._ahead.items()]
        answers: list[Any] = await asyncio.gather(*calls)
        hosts = list(zip(self._ahead.values(), answers, strict=True))
        parts = [
            Busy(part.actor, part.endpoint, clipped)
            for ahead, (parts, *_) in hosts
            for part in parts
            if (clipped := clip(part.intervals, start, end, ahead))
        ]
        flows = [
            Flow(*ends, edge.items, tuple(time - start for time in edge.released))
            for ends, edge in edges((ahead, passages) for ahead, (_, passages, *_) in hosts).items()
        ]
        moves = [
            Moved(actor, what, max(begin + ahead, start), min(finish + ahead, end))
            for ahead, (_, _, moves, _) in hosts
            for actor, what, begin, finish in moves
        ]
        noted = [
            span._replace(start=span.start + ahead, end=span.end + ahead)
            for ahead, (*_, notes) in hosts
            for span in notes
        ]
        return Lap(start, end, tuple(parts), tuple(flows), tuple(moves), tuple(noted))

    @property
    def machines(self) -> dict[int, str]:
        """On which machine each host is, by its number."""
        return {number: self._host.places[number].node for number in self._ahead}

    async def look_back(self, number: int, since: float) -> LookBack:
        """Return what one host does now, and what it did since a time; in seconds of the controller's clock.

        Raises:
            ActorDied: it is lost.
        """
        ahead = self._ahead[number]
        answer: LookBack = await ask(self._host, number, "look_back", since - ahead)
        if not ahead:
            return answer
        moved = (
            Busy(part.actor, part.endpoint, tuple((start + ahead, end + ahead) for start, end in part.intervals))
            for part in answer.busy
        )
        return replace(answer, start=answer.start + ahead, end=answer.end + ahead, busy=tuple(moved))

    async def look(self) -> Moment:
        """Return the states of all actors and queues now."""
        answers: list[Any] = await asyncio.gather(*(ask(self._host, number, "look") for number in self._ahead))
        actors = tuple(state for states, _ in answers for state in states)
        return Moment(actors, tuple(state for _, states in answers for state in states))
