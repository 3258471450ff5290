"""Cases of `benchmarks.placement_measured`: flows whose stages' costs are known, each on a placement of its own.

In: what stages cost, a mode. Out: the workload that is the truth, the planner's plan for it, and where its roles sit.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlinf.placement.plan import EdgePlan, Mode, Plan, RolePlan
from rlinf.placement.planner import best_of_each_mode, to_plan
from rlinf.placement.profile import Release
from rlinf.placement.seats import Placed, Seat
from rlinf.placement.workload import Edge, Option, Stage, Sync, Workload

ROLES = ("rollout", "judge", "reference", "trainer")
"""In the order in which they feed each other; a case may lack the reference."""


KIND = "gpu"
"""Kind of the devices, as profiles name it: to a planner a process is one like any other."""


@dataclass(frozen=True, slots=True)
class Where:
    """A role's place in a plan made by hand."""

    devices: tuple[int, ...]
    """Its devices; none for the judge."""
    phase: int = 0
    """When it works."""
    items: int = 4
    """Items it takes at a time."""
    lease_items: int | None = None
    """Items after which it offers its devices to others."""


@dataclass(frozen=True, slots=True)
class Role:
    """The true costs of one role."""

    work: float
    """Device-seconds of a step, divided evenly over its devices; of the judge, which has none, seconds."""
    active_bytes: int = 0
    """On each of its devices while it is loaded."""
    parked_bytes: int = 0
    """Bytes on each device while it is parked."""
    moving: float = 0.0
    """Seconds to load it, and to park it."""


@dataclass(frozen=True, slots=True)
class Case:
    """One flow on one placement."""

    name: str
    """For people."""
    mode: Mode
    """Mode of the plan."""
    roles: Mapping[str, Role]
    """By name; all of them have devices but the judge."""
    items: int = 64
    """Items of a step."""
    chunks: int = 16
    """Into how many a step is cut where stages overlap."""
    devices: int = 4
    """Processes, a device each."""
    sync: float = 0.0
    """Seconds to switch to new weights."""
    release: Release | None = None
    """When items leave the rollout; None: evenly."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes of a device, by kind; empty: no limit."""
    where: Mapping[str, Where] = field(default_factory=dict)
    """The plan; empty: what the planner finds."""

    @property
    def curve(self) -> Release:
        """When items leave the rollout."""
        return self.release or Release(tuple((k + 1) / self.items for k in range(self.items)))

    def workload(self) -> Workload:
        """The truth, as the planner takes it."""
        names = [name for name in ROLES if name in self.roles]
        stages = []
        for name in names:
            role = self.roles[name]
            counts = (0,) if name == "judge" else range(1, self.devices + 1)
            held = (KIND, role.active_bytes, role.parked_bytes, role.moving, role.moving)
            options = tuple(Option(count, role.work / max(1, count), *held) for count in counts)
            stages.append(Stage(name, options, self.curve if name == "rollout" else None))
        edges = tuple(Edge(*pair) for pair in itertools.pairwise(names))
        sync = (Sync("trainer", "rollout", self.sync, self.sync),)
        return Workload(tuple(stages), edges, {KIND: self.devices}, self.memory, (self.chunks,), sync)

    def plan(self) -> Plan:
        """The planner's best of this mode, or the one made by hand."""
        workload = self.workload()
        if not self.where:
            found = best_of_each_mode(workload)[self.mode]
            return to_plan(found.tree, workload, found.chunks, self.items, None)
        roles = {}
        for name, at in self.where.items():
            role = self.roles[name]
            roles[name] = RolePlan(
                at.devices, (at.phase,), not self.memory, at.items, at.lease_items, role.active_bytes, role.parked_bytes
            )
        return Plan(roles, {(edge.source, edge.target): EdgePlan() for edge in workload.edges})


@dataclass(frozen=True, slots=True)
class Job:
    """Job of one run under torchrun."""

    cases: tuple[Case, ...]
    """Side by side: a round of each in turn."""
    profiled: int
    """First rounds, from which the profile is taken."""
    rounds: int
    """Rounds after those, whose steps are measured."""
    steps: int
    """Steps of a round, after one that warms up."""


def seated(plan: Plan) -> Placed:
    """Where the processes of a plan's roles are, as the launcher puts them: one per device, the judge on host 0."""
    seats = {
        name: Seat(role.devices or (0,), tuple(frozenset([d]) for d in role.devices) or (frozenset(),),
                   role.items, role.lease_items)
        for name, role in plan.roles.items()
    }  # fmt: skip
    return Placed(seats, len(plan.devices), True, None, plan)


GB = 10**9
MEMORY = {KIND: 80 * GB}
"""Declared, not there: nothing here computes or holds anything."""
TAIL = Release((0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0))
"""A slow start and a tail: an eighth of the items at each of these shares of the makespan."""


def _roles(moving: float, each: int) -> dict[str, Role]:
    """Four roles, three of which hold so many bytes on each of their devices."""
    return {
        "rollout": Role(2.4, each, each // 10, moving),
        "judge": Role(0.32),
        "reference": Role(2.0, each // 4, each // 10, moving / 2),
        "trainer": Role(4.0, each, each // 10, moving),
    }


HALVES = {
    "rollout": Where((0, 1)),
    "judge": Where(()),
    "reference": Where((2, 3)),
    "trainer": Where((0, 1, 2, 3), phase=1, items=64),
}
"""The rollout on one half, the reference on the other, then the trainer on all."""
TURNS = {
    "rollout": Where((0, 1)),
    "judge": Where(()),
    "reference": Where((2, 3), items=4, lease_items=8),
    "trainer": Where((2, 3), items=8, lease_items=8),
}
"""The rollout on one half; on the other, reference and trainer in turns of eight items."""

PREDICTED = (
    Case("in turns, all fit", "collocated", _roles(0.1, 20 * GB), sync=0.05, release=TAIL, memory=MEMORY),
    Case("in turns, loading and parking", "collocated", _roles(0.1, 60 * GB), sync=0.05, release=TAIL, memory=MEMORY),
    Case("side by side", "disaggregated", _roles(0.1, 60 * GB), sync=0.05, release=TAIL, memory=MEMORY),
    Case(
        "halves, then all, loading and parking", "hybrid", _roles(0.1, 60 * GB), sync=0.05, release=TAIL,
        memory=MEMORY, where=HALVES,
    ),
    Case("half in turns", "hybrid", _roles(0.1, 20 * GB), sync=0.05, release=TAIL, memory=MEMORY, where=TURNS),
)  # fmt: skip
"""Cases whose step time is predicted."""


def balanced(items: int) -> tuple[Case, ...]:
    """Cases whose efficiency is measured: side by side, every stage as slow as the others."""
    pair, three = ("rollout", "trainer"), ("rollout", "reference", "trainer")
    return (_balanced(pair, 0.01, items), _balanced(three, 0.01, items), _balanced(three, 0.02, items))


def _balanced(names: tuple[str, ...], seconds: float, items: int) -> Case:
    """Stages on a device each, which all take so long for an item, and a judge that takes no time."""
    roles = {"judge": Role(0.0)} | {name: Role(items * seconds) for name in names}
    where = {"judge": Where(())} | {name: Where((number,), items=1) for number, name in enumerate(names)}
    words = f"{len(names)} processes, {1e3 * seconds:g} ms an item"
    return Case(words, "disaggregated", roles, items, items, len(names), where=where)
