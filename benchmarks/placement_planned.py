"""Figures of the planner alone: it equals enumeration, how long it takes, and published rankings that it reproduces.

In: workloads that are written down or drawn. Out: rows of `benchmarks.placement`. Seconds of steps are calculated; plan
times are measured, the median of several runs; a shared machine makes them longer.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.placement_published import RANKINGS
from rlinf.placement.planner import plan
from rlinf.placement.profile import Release
from rlinf.placement.workload import Edge, Option, Stage, Workload

TAIL = Release((0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0))
"""A long tail for the generating stage."""
GRPO = (
    (("rollout", 470.0, 118.0), ("logprob", 100.0, 1.0), ("trainer", 365.0, 4.0)),
    (("rollout", "logprob"), ("logprob", "trainer")),
)
"""Three stages: name, seconds that scale with the devices (at 1 per device), seconds that do not; and the edges."""
PPO = (
    (
        ("rollout", 470.0, 15.0),
        ("reward", 8.0, 0.2),
        ("reference", 80.0, 2.0),
        ("values", 77.0, 2.0),
        ("advantage", 2.0, 0.1),
        ("actor", 240.0, 8.0),
        ("critic", 190.0, 6.0),
    ),
    (
        ("rollout", "reward"),
        ("rollout", "reference"),
        ("rollout", "values"),
        ("reward", "advantage"),
        ("reference", "advantage"),
        ("values", "advantage"),
        ("advantage", "actor"),
        ("advantage", "critic"),
    ),
)
"""Seven stages."""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table."""

    what: str
    """That is measured."""
    bar: str
    """Bar that it must reach."""
    found: str
    """Measured value, in words."""
    met: bool | None
    """None: it was not measured."""


def workload(flow: tuple[tuple[tuple[str, float, float], ...], tuple[tuple[str, str], ...]], count: int) -> Workload:
    """A flow whose work grows with the cluster, sizes in steps of one node of 8."""
    stages, edges = flow
    made = tuple(
        Stage(
            name,
            tuple(Option(n, fixed + work * count / n) for n in range(8, count + 1, 8)),
            None if number else TAIL,
        )
        for number, (name, work, fixed) in enumerate(stages)
    )
    return Workload(made, tuple(Edge(*ends) for ends in edges), {"gpu": count})


def uneven(seed: int, count: int, kinds: int = 1) -> Workload:
    """The seven stages with drawn work, each scaling by a power law of its own: no near ties, harder to plan.

    Args:
        seed: of what is drawn.
        count: devices in all.
        kinds: of devices, as many of each; each 0.7 times as quick again as the first.
    """
    rng = random.Random(seed)
    stages, edges = PPO
    each = count // kinds
    speeds = {f"gpu{number}" if number else "gpu": 1 + 0.7 * number for number in range(kinds)}
    made = []
    for number, (name, work, _) in enumerate(stages):
        seconds, power = work * rng.uniform(0.5, 2.0), rng.uniform(0.6, 0.95)
        options = tuple(
            Option(n, seconds * (64 / n) ** power / speed, kind)
            for kind, speed in speeds.items()
            for n in range(8, each + 1, 8)
        )
        made.append(Stage(name, options, None if number else TAIL))
    return Workload(tuple(made), tuple(Edge(*ends) for ends in edges), dict.fromkeys(speeds, each))


def plan_times(rounds: int) -> Iterator[Row]:
    """How long planning takes.

    Args:
        rounds: times that each plan is made.
    """
    for count, bar in ((256, 0.3), (1024, 0.5), (4096, 10.0)):
        flows = {
            "3 stages": lambda count=count: workload(GRPO, count),
            "7 stages": lambda count=count: workload(PPO, count),
            "7 stages, uneven": lambda count=count: uneven(0, count),
        }
        if count == 256:
            flows = {f"7 stages, uneven, {kinds} kinds": lambda kinds=kinds: uneven(0, 256, kinds) for kinds in (2, 3)}
        for what, make in flows.items():
            wall, cpu = [], []
            for _ in range(rounds):
                given = make()
                started, used = time.perf_counter(), time.process_time()
                found = plan(given)
                wall.append(time.perf_counter() - started)
                cpu.append(time.process_time() - used)
                assert found is not None
            middle = statistics.median(wall)
            text = f"{middle:.3f} s ({statistics.median(cpu):.3f} s of CPU; {found.mode})"
            yield Row(f"plan time, {count:,} devices, {what}", f"<= {bar:g} s", text, middle <= bar)


def against_enumeration(instances: int) -> Row:
    """Tell whether the planner's optimum is that of all plans.

    Args:
        instances: random workloads of up to five stages.
    """
    from tests.placement.exhaustive import all_plans, judge, random_workload

    equal = plans = 0
    for seed in range(instances):
        given = random_workload(seed)
        trees = all_plans(given)
        plans += len(trees)
        best = min(judge(tree, given, given.chunks[0]) for tree in trees)
        found = plan(given, tolerance=0.0)
        equal += math.isclose(best, math.inf if found is None else found.estimate, rel_tol=1e-9)
    text = f"{equal} of {instances} ({plans:,} plans enumerated)"
    return Row("planner equals enumeration, V <= 5", "all of >= 500", text, equal == instances and instances >= 500)


def rankings() -> Iterator[Row]:
    """Which mode is quickest, from published stage costs."""
    for make in RANKINGS.values():
        found = make()
        seconds = ", ".join(f"{mode} {value:,.1f} s" for mode, value in found.seconds.items())
        yield Row(f"published ranking: {found.name}", found.published, f"{found.ours} ({seconds})", found.met)
