"""What may be in flight, what a step gets of it, and whom it asks: the plain data of `in_flight.py`."""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlinf.algos.parts import DynamicSampling
from rlinf.data.in_flight.admission import Entry
from rlinf.data.in_flight.choosing import Teaches, unequal
from rlinf.data.in_flight.freshness import Mode
from rlinf.runtime.streams.stream import Stream

Answers = Callable[[Any], AsyncIterable[Any]]
"""From a stream of what was drawn to what came of it, in any order: `Group`s, or `Made`."""
Draw = Callable[[int], Awaitable[Sequence[Any]]]
"""Draws so many more prompts; fewer where there are no more."""


@dataclass(frozen=True, slots=True, eq=False)
class Rules:
    """What may be in flight, and what becomes of what is too old."""

    staleness: int = 0
    """By how many versions tokens may be older than the weights that learn from them. 0: nothing begins early."""
    batch: int = 0
    """Prompts of a step; 0: as many as the step brings."""
    mode: Mode = "mask"
    """What becomes of answers with tokens that are too old all the same."""
    carry: int | None = None
    """By how many versions an answer may be carried over before a step waits for it; None: `staleness`."""
    extra: int | None = None
    """Prompts in flight beside those of the step in hand; None: `staleness` batches."""
    partial: bool = False
    """Groups of which some answers are complete are learned from in parts, where a step would have to wait."""
    between: bool = False
    """One thing is made after the other, and weights are switched only between two."""
    sampling: DynamicSampling | None = None
    """Drop groups that give no gradient, and learn from others in their place."""
    teaches: Teaches = unequal
    """Which groups give one, for `sampling`."""


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """What came of one thing that was drawn, where that is no single group."""

    id: int
    """Of what was drawn."""
    results: tuple[Any, ...]
    """To learn from; none, where nothing came of it."""
    dropped: str = ""
    """Why, if nothing came of it."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What a step learns from."""

    groups: Stream[Any]
    """As they are chosen, the oldest first."""
    metrics: dict[str, float] = field(default_factory=dict)
    """How they were found, complete once `groups` has ended: `in_flight/prompts` that are under way for later steps,
    and `in_flight/ready` of those, which are complete; `staleness/dropped` and `staleness/masked`, tokens that were too
    old; with dynamic sampling, what `flows.parts.dynamic_sampling` tells."""


class Books(Protocol):
    """What is told of everything that is drawn and not learned from."""

    def drawn(self, ids: Iterable[int], answers: int) -> None:
        """Prompts were drawn, for so many answers each."""

    def dropped(self, prompt_id: int, reason: str, indices: Iterable[int] | None = None, tokens: int = 0) -> None:
        """Answers will not be learned from, None: all that there are."""

    def masked(self, tokens: int) -> None:
        """So many tokens are read, and not learned."""


class Keeper(Protocol):
    """What makes the answers, as far as it knows what it has begun."""

    async def version(self) -> int:
        """Of the weights in use."""

    async def partials(self) -> Mapping[int, tuple[Any, ...]]:
        """What was begun and is not settled, by id: given in place of what was drawn, one after the other, it goes on
        from there."""

    async def settled(self, ids: Sequence[int]) -> None:
        """These have been received, and need not be kept."""

    async def drop(self, ids: Sequence[int]) -> int:
        """Give these up; returns how many tokens there were of them."""

    async def split(self) -> None:
        """Let the complete answers of groups under way come by themselves."""

    def rest(self, partial: tuple[Any, ...], samples: Collection[int]) -> tuple[Any, ...]:
        """What was begun of one thing, without these of its samples, which have been received as a part of it."""

    async def pause(self) -> None:
        """Make nothing more, and keep what there is."""

    async def unpause(self) -> None:
        """Go on after `pause`."""


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """What a checkpoint keeps."""

    version: int
    """How many times weights had been published."""
    entries: tuple[Entry, ...] = ()
    """What was in flight, in the order in which it was drawn."""
