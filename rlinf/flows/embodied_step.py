"""What a flow of an embodied run is given for one step."""

from __future__ import annotations

from dataclasses import dataclass


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
