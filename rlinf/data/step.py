"""What a flow is given for one step."""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from rlinf.algos.parts import DynamicSampling
from rlinf.data.ahead import Ahead
from rlinf.data.sample import Prompt

Draw = Callable[[int], Awaitable[Sequence[Prompt]]]
"""Draws so many more prompts of the run."""


async def _nothing(count: int) -> Sequence[Prompt]:
    raise ValueError(f"step.draw({count}): this step has no more prompts to draw; give Step a `draw`")


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One step of a run. Whoever calls a flow from a loop of their own needs only the first three."""

    index: int
    """Which, from 0."""
    prompts: Iterable[Prompt] | AsyncIterable[Prompt]
    """What to answer: a list, or a stream that several rollouts share."""
    group_size: int
    """Samples per prompt."""
    prompts_per_step: int = 0
    """How many prompts `prompts` has: the groups of a full batch. Needed where `sampling` is set."""
    sampling: DynamicSampling | None = None
    """Draw more prompts in place of those whose answers are all equally good; None learns from all."""
    draw: Draw = _nothing
    """Draws more prompts for this step."""
    critic_only: bool = False
    """Only the critic learns yet."""
    moving_reference: bool = False
    """The reference policy follows the one that learns."""


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
