"""Steps: the arguments of flows, by the kind of the run."""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rlinf.algos.algorithms import DynamicSampling
from rlinf.data.in_flight import InFlight, Ledger
from rlinf.data.in_flight.admission import Teaches, unequal
from rlinf.data.sample import Group, Prompt
from rlinf.runtime.streams.stream import Stream

Draw = Callable[[int], Awaitable[Sequence[Prompt]]]
"""Draws so many more prompts of the run."""
F = TypeVar("F", bound=Callable[..., Any])


def ahead(flow: F) -> F:
    """Marks a flow that takes its batches from `step.in_flight`: `staleness.max` bounds how far it works ahead, and
    `step.prompts` is empty where a run calls it, since prompts are drawn as there is room for them."""
    flow.ahead = True  # type: ignore[attr-defined]  # an attribute of its own
    return flow


def alternates(flow: F) -> F:
    """Marks a flow in which nobody generates between a training and the publishing of its weights: in one process both
    may compute on the same tensors."""
    flow.alternates = True  # type: ignore[attr-defined]  # as above
    return flow


def works_ahead(flow: Any) -> bool:
    """True if a flow is marked by `ahead`."""
    return bool(getattr(flow, "ahead", False))


async def _nothing(count: int) -> Sequence[Prompt]:
    raise ValueError(f"step.draw({count}): this step has no more prompts to draw; give Step a `draw`")


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One step of a run. Whoever calls a flow from a loop of their own needs only the first three."""

    index: int
    """Which, from 0."""
    prompts: Iterable[Prompt] | AsyncIterable[Prompt]
    """Prompts to answer: a list, or a stream that several rollouts share."""
    group_size: int
    """Samples per prompt."""
    prompts_per_step: int = 0
    """How many prompts `prompts` has: the groups of a full batch. Needed where `sampling` is set."""
    sampling: DynamicSampling | None = None
    """Draw more prompts in place of those whose groups give no gradient; None learns from all."""
    draw: Draw = _nothing
    """Draws more prompts for this step."""
    critic_only: bool = False
    """Only the critic learns yet."""
    moving_reference: bool = False
    """The reference policy follows the one that learns."""
    in_flight: InFlight = field(default_factory=InFlight)
    """The run's work in flight."""
    works_ahead: bool = False
    """The batch comes from `in_flight`, as of a flow that is marked by `ahead`."""
    ledger: Ledger = field(default_factory=Ledger)
    """The run's account of samples, told of those that are dropped."""
    teaches: Teaches = unequal
    """Which groups give one, for `sampling`; by default, those of unequal rewards."""
    batch: Stream[Group] | None = None
    """Scored groups that are there already: they are learned from, and no prompt is answered."""
    publishes: bool = True
    """The rollout gets the new weights at the end of the step; otherwise whoever called the flow sees to it."""
    deal: Sequence[Prompt] | None = None
    """`prompts` as a list, to be dealt to the rollouts in turn: who answers which follows from their order alone, so
    that the run repeats bit for bit. None: rollouts share `prompts`, and each takes the next when it has room."""


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
    """Acting may begin early for steps before this one; None: for no limit. Nothing may be in flight when the policy is
    evaluated or saved."""
    in_flight: InFlight = field(default_factory=InFlight)
    """The run's work in flight."""
    inside: Sequence[EmbodiedStep] = ()
    """Steps in a learned world that follow on this one, where there is one."""


@dataclass(frozen=True, slots=True)
class SupervisedStep:
    """One step of a run that learns from given texts."""

    index: int
    """Which, from 0."""
    batch: Sequence[Group]
    """Groups that are learned in it: conversations of one sample each, or pairs of the chosen and the rejected one."""


@dataclass(frozen=True, slots=True)
class ImitationStep:
    """One step of a run in which a policy learns from demonstrations alone."""

    index: int
    """Which, from 0."""
    first: int
    """Number of its first optimizer step in the run, from which follows what is learned in it."""
    count: int
    """Optimizer steps."""


AnyStep = ImitationStep | Step | EmbodiedStep | SupervisedStep
"""The argument of a flow, by the kind of its run."""
