"""What a reward function may return instead of a number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Score:
    """A reward with what it is made of."""

    value: float
    """The reward itself."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """Parts by name, for metrics."""
    extracted: str | None = None
    """What was taken as the answer itself: equal ones vote together in maj@k."""


class _NotApplicable:
    """The type of `NOT_APPLICABLE`."""

    def __repr__(self) -> str:
        return "None (does not apply)"


NOT_APPLICABLE: Final = _NotApplicable()
"""In place of a score: the function is for other problems, and the sum is of the other functions. TRL's functions say
it by None; one of ours that returns None has forgotten its `return`."""


def as_list(value: Any) -> list[Any] | None:
    """Scores of several answers as a list: of a list, tensor, array or column of a table; None of anything else."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        return None
    if getattr(value, "ndim", 1) != 1:
        return None
    return list(value.tolist() if hasattr(value, "tolist") else value)


def as_number(value: Any) -> float | None:
    """A number of Python's, numpy's or torch's as a float; None of anything else, a text that reads like one too."""
    if isinstance(value, str | bytes | bytearray):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # the last is torch's, of a tensor with several numbers
        return None
