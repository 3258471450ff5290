"""One step of a flow as it was seen on all hosts: who was busy, what went from whom to whom, who was loaded and parked.

Plain data, which pages and planners read without a runtime.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlinf.runtime.observe.busy import Busy
from rlinf.runtime.observe.spans import Span


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
    parts: tuple[Span, ...] = ()
    """What actors told of parts of their work (`Actor.note`); seconds of the controller's clock."""
