"""What a flow of an embodied run is given for one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlinf.flows.ahead import Ahead


@dataclass(frozen=True, slots=True)
class EmbodiedStep:
    """One step of a run in which a policy acts in environments."""

    index: int
    """Which, from 0."""
    horizon: int
    """Decisions of every environment."""
    slices: int = 1
    """Parts of each simulation that are acted on independently."""
    fresh: bool = True
    """New episodes begin with the step; otherwise those that are under way go on."""
    until: int | None = None
    """Steps before this one may begin to act while earlier ones are learned from; None: no step may. A checkpoint and
    an evaluation come between two steps with nothing under way."""
    ahead: Ahead = field(default_factory=Ahead)
    """What has begun so; the run's."""
