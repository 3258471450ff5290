"""What a flow is given for one step."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable
from dataclasses import dataclass

from rlinf.data.sample import Prompt


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One step of a run."""

    index: int
    """Which, from 0."""
    prompts: Iterable[Prompt] | AsyncIterable[Prompt]
    """What to answer: a list, or a stream that several rollouts share."""
    group_size: int
    """Samples per prompt."""
