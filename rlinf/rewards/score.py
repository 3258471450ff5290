"""What a reward function may return instead of a number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Score:
    """A reward with what it is made of."""

    value: float
    """The reward itself."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """Parts by name, for metrics."""
    extracted: str | None = None
    """What was taken as the answer itself: equal ones vote together in maj@k."""
