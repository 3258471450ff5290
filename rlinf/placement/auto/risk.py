"""How much longer a plan is expected to take because stage costs are not known exactly.

Stages that take turns average their errors out; where stages overlap, the slowest one decides.

Flows in: a plan as a tree, and by how much its stages' seconds may be wrong. Flows out: by which factor it is expected
to take longer than calculated. Nothing waits here.

Devices that were divided by wrong costs wait for each other, so of two plans with equal predicted time one may be the
worse choice. A plan is weighed by its mean time over costs drawn around the known ones.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping
from dataclasses import replace

from rlinf.placement.asynchronous.steady import steady
from rlinf.placement.planner.plan_tree import Leaf, Tree
from rlinf.placement.planner.search import Found
from rlinf.placement.profiling.workload import Option, Workload

DRAWS = 32
"""Costs that are drawn: the mean then is within about a percent at an error of 40 %."""


def risk(found: Found, workload: Workload, cost_error: float, staleness: int = 0) -> float:
    """Return the expected seconds of a plan over those calculated.

    Args:
        found: the plan.
        workload: what it plans.
        cost_error: share by which a stage's seconds may be wrong: they are drawn, evenly on a log scale, between the
            known ones divided by, and multiplied by, 1 + cost_error; the same draws for every plan.
        staleness: steps that work is begun early.
    """
    if cost_error <= 0 or found.seconds <= 0:
        return 1.0
    rng = random.Random(0)
    names = [stage.name for stage in workload.stages]
    drawn = [{name: (1 + cost_error) ** rng.uniform(-1, 1) for name in names} for _ in range(DRAWS)]

    def seconds(tree: Tree) -> float:
        return steady(tree, workload, found.chunks, staleness).seconds

    known = seconds(found.tree)
    return statistics.mean(seconds(_scaled(found.tree, factors)) / known for factors in drawn)


def _scaled(tree: Tree, factors: Mapping[str, float]) -> Tree:
    if isinstance(tree, Leaf):
        return replace(tree, option=_slower(tree.option, factors[tree.stage.name]))
    return replace(tree, left=_scaled(tree.left, factors), right=_scaled(tree.right, factors))


def _slower(option: Option, factor: float) -> Option:
    chunks = {count: seconds * factor for count, seconds in option.chunk_seconds.items()}
    return replace(option, seconds=option.seconds * factor, chunk_seconds=chunks, longest=option.longest * factor)
