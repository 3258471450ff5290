"""A plan: per role its devices and what stays on them, per edge its granularity. Its mode is derived, never stated.

Flows in: what the planner chose, or a file that a person edited (`plan_file.py`). Flows out: the mode, the bytes of
each device in each phase, and every reason why a cluster could not run it. Nothing waits here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal

from .devices import Cluster

Mode = Literal["collocated", "disaggregated", "hybrid"]
GB = 1e9


@dataclass(frozen=True, slots=True)
class RolePlan:
    """Where one role runs and when it owns its devices."""

    devices: tuple[int, ...]
    """Numbers of its devices, ascending."""
    phases: tuple[int, ...] = (0,)
    """When it works. Roles of one phase work at the same time, on devices of their own; phases follow each other."""
    resident: bool = True
    """Stays on its devices for the whole step; otherwise it is parked (offloaded) outside its phases."""
    items: int | None = None
    """Items it takes at a time; None: whatever is at hand."""
    lease_items: int | None = None
    """Items after which it offers its lease to others; None: it keeps the lease for its whole phase."""
    active_bytes: int = 0
    """On each of its devices while it is loaded, the peak of its work included."""
    parked_bytes: int = 0
    """On each of its devices while it is parked."""


@dataclass(frozen=True, slots=True)
class EdgePlan:
    """How data travel from one role to another."""

    items: int | None = None
    """Items that travel together; None: each as soon as it is ready."""
    barrier: bool = False
    """Nothing is taken before everything is there."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the planner expects of the plan; seconds of one step."""

    step_seconds: float
    """Of the whole step, weight synchronisation included."""
    bound_seconds: float
    """What no plan could beat."""

    @property
    def efficiency(self) -> float:
        """bound / step, at most 1."""
        return self.bound_seconds / self.step_seconds if self.step_seconds else 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Placement, order and granularity of one flow."""

    roles: Mapping[str, RolePlan]
    """By name of the role."""
    edges: Mapping[tuple[str, str], EdgePlan] = field(default_factory=dict)
    """By producer and consumer."""
    predicted: Prediction | None = None
    """None for a plan that a person wrote."""
    reason: str = ""
    """One sentence: why this one."""

    @property
    def mode(self) -> Mode:
        """What users call it: all roles that have devices on the same ones, on disjoint ones, or a mixture."""
        sets = [frozenset(role.devices) for role in self.roles.values() if role.devices]
        if len(set(sets)) <= 1:
            return "collocated"
        if all(first.isdisjoint(second) for first, second in combinations(sets, 2)):
            return "disaggregated"
        return "hybrid"

    @property
    def devices(self) -> tuple[int, ...]:
        """All devices that some role uses, ascending."""
        return tuple(sorted({number for role in self.roles.values() for number in role.devices}))

    @property
    def phases(self) -> tuple[int, ...]:
        """All phases, ascending."""
        return tuple(sorted({phase for role in self.roles.values() for phase in role.phases}))

    def held(self, device: int, phase: int) -> dict[str, int]:
        """Return the bytes that each role holds on a device in a phase."""
        return {
            name: role.active_bytes if role.resident or phase in role.phases else role.parked_bytes
            for name, role in self.roles.items()
            if device in role.devices
        }

    def peak(self, device: int) -> int:
        """Return the most bytes that the device holds in any phase."""
        return max((sum(self.held(device, phase).values()) for phase in self.phases), default=0)


def complaints(plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """Return every reason why the cluster cannot run the plan, with the smallest fix; none if it can."""
    return (*_impossible(plan, cluster), *_crowded(plan), *_overfull(plan, cluster))


def _impossible(plan: Plan, cluster: Cluster) -> Iterator[str]:
    count = len(cluster.devices)
    for name, role in plan.roles.items():
        if missing := [number for number in role.devices if number >= count]:
            yield (
                f"roles.{name}.devices: device {missing[0]} does not exist, there are {count} (0-{count - 1}): "
                "name others, or start more processes"
            )
    for source, target in plan.edges:
        for name in (source, target):
            if name not in plan.roles:
                yield f"edges: {source} -> {target}: there is no role {name!r} in the plan: place it under `roles`"
        if source in plan.roles and target in plan.roles:
            first, second = plan.roles[source], plan.roles[target]
            if min(second.phases) < min(first.phases):
                yield (
                    f"roles.{target}.phases: begins in phase {min(second.phases)}, before {source}, which feeds it, "
                    f"in phase {min(first.phases)}: write {min(first.phases)} or later"
                )


def _crowded(plan: Plan) -> Iterator[str]:
    for (first, one), (second, other) in combinations(plan.roles.items(), 2):
        both = set(one.devices) & set(other.devices)
        at_once = set(one.phases) & set(other.phases)
        takes_turns = one.lease_items is not None and other.lease_items is not None
        if both and at_once and not takes_turns:
            yield (
                f"roles.{second}.phases: works in phase {min(at_once)} on device {min(both)}, as {first} does: "
                f"give it another phase or other devices, or both `lease_items`, so that they take turns"
            )


def _overfull(plan: Plan, cluster: Cluster) -> Iterator[str]:
    seen: set[frozenset[tuple[str, int]]] = set()
    for device in cluster.devices:
        if device.memory is None:
            continue
        for phase in plan.phases:
            held = plan.held(device.number, phase)
            excess = sum(held.values()) - device.memory
            alike = frozenset(held.items())
            if excess <= 0 or alike in seen:  # hundreds of devices overflow for one reason: say it once
                continue
            seen.add(alike)
            parts = ", ".join(f"{name} {count / GB:.1f}" for name, count in held.items())
            yield (
                f"device {device.number} would hold {sum(held.values()) / GB:.1f} GB of {device.memory / GB:.1f} "
                f"in phase {phase} ({parts}): {_relief(plan, held, phase, excess)}"
            )


def _relief(plan: Plan, held: Mapping[str, int], phase: int, excess: int) -> str:
    """The one change that frees enough with the least to move; or how much has to go."""
    savings = {
        name: plan.roles[name].active_bytes - plan.roles[name].parked_bytes
        for name in held
        if plan.roles[name].resident and phase not in plan.roles[name].phases
    }
    if enough := {name: saved for name, saved in savings.items() if saved >= excess}:
        name = min(enough, key=lambda name: enough[name])
        return f"set roles.{name}.resident to false, which frees {enough[name] / GB:.1f} GB"
    if sum(savings.values()) >= excess:
        return f"set `resident` to false for {' and '.join(savings)}"
    fits = [name for name, count in held.items() if count >= excess]
    if len(held) > 1 and fits:
        name = min(fits, key=lambda name: held[name])
        return f"move {name} to other devices, or make it {excess / GB:.1f} GB smaller (more devices, a smaller batch)"
    return f"{excess / GB:.1f} GB have to go: more devices, a smaller batch or a smaller model"
