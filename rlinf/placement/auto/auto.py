"""`placement.mode: auto`: measure a few steps, plan, and plan anew when steps no longer take what was expected.

In: the seconds of every step, and what the stages of the flow were measured to cost. Out: now and then a plan, with a
sentence of why. Who wakes whom: nobody; choosing computes in a thread while the run waits for it.

How a role's time depends on its devices cannot be known from one size, so two placements are measured before the first
plan: everybody on all devices, then each role on a share of them. What lies between the two is interpolated. Where
devices differ, each role is measured on each kind of them instead.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from rlinf.placement.auto.choose import Chosen, choose
from rlinf.placement.grammar import PlacementError
from rlinf.placement.hardware import Fleet
from rlinf.placement.plan import Plan
from rlinf.placement.profiling.profile import Profile
from rlinf.placement.seats import by_role
from rlinf.placement.simulator.simulate import Flow

WINDOW = 5
"""Steps whose median is held against the expectation: one slow step is no reason to move."""
WORTH = 0.03
"""A move must promise to be quicker by this share: the planner itself is not known to be better than that."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What came of planning."""

    plan: Plan | None
    """Where to go; None stays."""
    said: str
    """One line for whoever watches."""


class AutoPlacement:
    """Decides between steps where roles should be.

    Args:
        flow: one step, to be rehearsed.
        fleet: the devices of the job.
        memory: bytes of each that may be filled, by kind; None for no limit.
        explored: placements to measure before the first plan, besides the one that the run begins with.
        first: steps that each of them is measured for.
        replan_above: plan anew when the median of the last few steps leaves what was expected by more than this share.
    """

    def __init__(
        self,
        flow: Flow,
        fleet: Fleet,
        memory: Mapping[str, int] | None,
        *,
        explored: list[Plan],
        first: int,
        replan_above: float,
    ) -> None:
        self._flow, self._fleet, self._memory = flow, fleet, memory
        self._first, self._replan_above = first, replan_above
        self._unexplored = list(explored)
        self._measured: list[tuple[Plan, float]] = []
        """Placements where the run has been, with the seconds of a step: better known than by any simulation."""
        self._seconds: deque[float] = deque(maxlen=max(first, WINDOW) + 1)
        self._expected: float | None = None
        """Seconds of a step by the plan that is followed; None until there is one."""

    def due(self, seconds: float) -> bool:
        """A step took so long: whether it is time to plan."""
        self._seconds.append(seconds)
        if self._expected is None:
            return len(self._seconds) >= self._first
        return len(self._seconds) > WINDOW and abs(self._typical / self._expected - 1) > self._replan_above

    @property
    def _typical(self) -> float:
        """Of the last steps; the first one somewhere warms up, so it counts only if it is all there is."""
        return statistics.median(list(self._seconds)[1 if len(self._seconds) > 1 else 0 :][-WINDOW:])

    async def decide(self, profile: Profile, plan: Plan) -> Decision:
        """Plan from what was measured.

        Args:
            profile: of the steps so far.
            plan: that is followed now.
        """
        typical, expected = self._typical, self._expected
        self._seconds.clear()
        self._note(plan, typical)
        if expected is None and self._unexplored:
            goal = self._unexplored.pop(0)
            return Decision(goal, f"placement: {plan.mode} takes {typical:.2f} s a step; measuring {goal.mode}")
        why = "" if expected is None else f" (steps take {typical:.2f} s where {expected:.2f} s were expected)"
        options = list(self._measured)
        try:
            chosen = await asyncio.to_thread(self._choose, profile)
            simulated = [row for row in chosen.best_of_modes if all(not _same(row.plan, one) for one, _ in options)]
            lag = _lag(chosen, plan, typical)
            options += [(row.plan, row.seconds + lag) for row in simulated]
            said = _rows(chosen)
        except PlacementError as error:
            said = f"no plan can be made: {error}"
        goal, seconds = min(options, key=lambda option: option[1])
        if _same(goal, plan) or seconds > (1 - WORTH) * typical:
            self._expected = typical
            return Decision(None, f"placement{why}: {plan.mode} stays, at {typical:.2f} s a step; {said}")
        self._expected = seconds
        return Decision(goal, f"placement{why}: {goal.mode}, {seconds:.2f} s a step expected; {said}")

    def _choose(self, profile: Profile) -> Chosen:
        def by(flow: Flow | None) -> Chosen:
            fleet = self._fleet
            found = choose(
                profile, fleet.counts, self._memory, flow, extrapolate=True, hardware=fleet.hardware,
            )  # fmt: skip
            return found.numbered(fleet)

        try:
            return by(self._flow)
        except PlacementError:  # a flow of one's own may look into what a rehearsal cannot know: formulas have to do
            return by(None)

    def _note(self, plan: Plan, seconds: float) -> None:
        """A placement was measured. If it was before and now takes longer, the others are taken to do so too."""
        known = next((before for one, before in self._measured if _same(one, plan)), seconds)
        others = [(one, before * seconds / known) for one, before in self._measured if not _same(one, plan)]
        self._measured = [*others, (plan, seconds)]


def _lag(chosen: Chosen, plan: Plan, seconds: float) -> float:
    """Seconds by which steps here outlast their simulation: messages and threads, which no other plan avoids either."""
    return next((max(0.0, seconds - row.seconds) for row in chosen.rows if _same(row.plan, plan)), 0.0)


def _same(one: Plan, other: Plan) -> bool:
    """Both have every role on the same devices."""
    ours, theirs = by_role(one), by_role(other)
    both = [(role.devices, theirs[name].devices) for name, role in ours.items() if name in theirs]
    return all(here == there for here, there in both if here and there)


def _rows(chosen: Chosen) -> str:
    """The best of each mode, as rehearsed."""
    rows = ", ".join(f"{row.mode} {row.seconds:.2f} s" for row in chosen.best_of_modes)
    said = f"simulated from what was measured: {rows}"
    if chosen.recommended is not None and chosen.recommended.staleness:
        said += f"; were answers begun early (a flow such as grpo_async), {chosen.recommended.said}"
    return said
