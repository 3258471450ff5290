"""Which staleness pays: the best plan's seconds at several, and a sentence.

Flows in: a workload whose costs were measured in synchronous steps. Flows out: a row per staleness, and which of them
to take. Nothing waits here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlinf.placement.planner.planner import plan
from rlinf.placement.planner.search import Found
from rlinf.placement.profiling.bound import Bound, bound
from rlinf.placement.profiling.workload import Workload

from .split import plan_ahead

TRIED = (0, 1, 2, 4)
"""Of which staleness the best plan is looked for."""
PAYS = 0.05
"""By how much more staleness must quicken a step: weights that are older teach less per sample."""


@dataclass(frozen=True, slots=True)
class Stale:
    """The best plan at one staleness."""

    staleness: int
    """Versions by which weights that generate may be behind."""
    found: Found
    """The plan, with its seconds in the long run."""
    bound: Bound
    """What no plan could beat."""


@dataclass(frozen=True, slots=True)
class Recommended:
    """What each staleness brings."""

    rows: tuple[Stale, ...]
    """In ascending order, the first of them synchronous."""
    staleness: int
    """The one to take: more of it quickens a step by less than `PAYS`."""

    @property
    def said(self) -> str:
        """Such as "staleness 1 gains 31 %, 2 gains 2 % more, 4 gains nothing more: take 1"."""
        parts = []
        for before, row in zip(self.rows, self.rows[1:], strict=False):
            gain = before.found.seconds / row.found.seconds - 1
            words = f"{gain:.0%}".replace("%", " %") if gain >= 0.005 else "nothing"
            parts.append(f"{row.staleness} gains {words}" + (" more" if before.staleness else ""))
        return f"staleness {', '.join(parts)}: {f'take {self.staleness}' if self.staleness else 'stay synchronous'}"


def recommend(workload: Workload, tried: Sequence[int] = TRIED) -> Recommended | None:
    """Plan at several values of staleness.

    Args:
        workload: what to plan; `Option.longest` says which part of generation is its tail.
        tried: ascending, from 0 on.

    Returns:
        None where nothing fits, or where there is nothing to begin early: less than two stages.
    """
    if len(workload.stages) < 2:
        return None
    rows = list(_rows(workload, tried))
    if not rows or rows[0].staleness:
        return None
    taken = rows[0]
    for row in rows[1:]:
        if taken.found.seconds / row.found.seconds - 1 >= PAYS:
            taken = row
    return Recommended(tuple(rows), taken.staleness)


def _rows(workload: Workload, tried: Iterable[int]) -> Iterable[Stale]:
    """The best at each staleness: never slower than with less, since nothing needs to be begun early."""
    best: Found | None = None
    for staleness in tried:
        found = list(plan_ahead(workload, staleness).values()) if staleness else [plan(workload)]
        there = [one for one in (best, *found) if one is not None]
        if there:
            best = min(there, key=lambda one: one.seconds)
            yield Stale(staleness, best, bound(workload, staleness=staleness))
