"""A plan as a tree: stages one after the other on the same devices, or side by side on devices of their own.

Flows in: a tree that the planner found, with its workload. Flows out: its phases, its time by replaying every chunk,
the memory of every device, and the `Plan` that people read. Nothing waits here.

Every tree is a sequence of phases with barriers between, each a pipeline of stages on disjoint devices. Side by side,
the last phase of the left part and the first of the right one become one phase, unless a barrier edge runs between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rlinf.placement.plan import EdgePlan, Plan, Prediction, RolePlan
from rlinf.placement.profiling.workload import Edge, Option, Stage, Workload


@dataclass(frozen=True, slots=True)
class Leaf:
    """One stage at one of its sizes."""

    stage: Stage
    """What runs."""
    option: Option
    """How."""
    resident: bool = True
    """Stays loaded for the whole step; otherwise it is loaded for its phase and parked after it."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two parts of a plan."""

    how: Literal["temporal", "spatial"]
    """One after the other on the same devices, or side by side on disjoint ones."""
    left: Tree
    """What comes first, or feeds the other."""
    right: Tree
    """What comes second, or is fed."""


Tree = Leaf | Pair
Phase = tuple[Leaf, ...]


def leaves(tree: Tree) -> Iterator[Leaf]:
    """All stages of a tree, from left to right."""
    if isinstance(tree, Leaf):
        yield tree
    else:
        yield from leaves(tree.left)
        yield from leaves(tree.right)


def phases(tree: Tree, edges: Sequence[Edge]) -> list[Phase]:
    """Return the phases of a tree: what follows each other, and in each of them what runs at once."""
    if isinstance(tree, Leaf):
        return [(tree,)]
    left, right = phases(tree.left, edges), phases(tree.right, edges)
    if tree.how == "temporal" or barred(left[-1], right[0], edges):
        return left + right
    return [*left[:-1], left[-1] + right[0], *right[1:]]


def barred(first: Phase, second: Phase, edges: Sequence[Edge]) -> bool:
    """Return whether a barrier edge runs from one phase to the other."""
    sources, targets = {leaf.stage.name for leaf in first}, {leaf.stage.name for leaf in second}
    return any(edge.barrier and edge.source in sources and edge.target in targets for edge in edges)


def sync_seconds(tree: Tree, workload: Workload) -> float:
    """Seconds of weight synchronisation: `together` where the two stages were split by time, `apart` by space."""
    return sum(
        sync.together if _split(tree, {sync.source, sync.target}) == "temporal" else sync.apart
        for sync in workload.sync
    )


def _split(tree: Tree, names: set[str]) -> str:
    """How the lowest pair that holds both stages composes them."""
    if isinstance(tree, Leaf):
        return "temporal"
    for part in (tree.left, tree.right):
        if names <= {leaf.stage.name for leaf in leaves(part)}:
            return _split(part, names)
    return tree.how


def switching(phase: Phase) -> float:
    """Seconds to load the parked stages of a phase before it and to park them after it, each all at once."""
    parked = [leaf.option for leaf in phase if not leaf.resident]
    return max((one.onload_seconds for one in parked), default=0.0) + max(
        (one.offload_seconds for one in parked), default=0.0
    )


def replay(tree: Tree, workload: Workload, chunks: int) -> float:
    """Seconds of a step, by following every chunk through every stage: C(i, k) = max(C(i, k-1), C(before i, k)) + t(i).

    A stage with a release curve at the head of its phase lets chunk k go at its share of the makespan; deeper in a
    phase it counts as even, since its own input arrives late.
    """
    total = sync_seconds(tree, workload)
    for phase in phases(tree, workload.edges):
        total += switching(phase) + _pipeline(phase, workload.edges, chunks)
    return total


def _pipeline(phase: Phase, edges: Sequence[Edge], chunks: int) -> float:
    if len(phase) == 1:
        return phase[0].stage.alone(phase[0].option, chunks)
    by_name = {leaf.stage.name: leaf for leaf in phase}
    inside = [edge for edge in edges if edge.source in by_name and edge.target in by_name]
    left: dict[str, list[float]] = {}
    for name in _in_order(by_name, inside):
        leaf = by_name[name]
        arrivals = [_moved(left[edge.source], edge.seconds / chunks) for edge in inside if edge.target == name]
        if leaf.stage.release is not None and not arrivals:
            left[name] = [share * leaf.option.seconds for share in leaf.stage.release.chunks(chunks)]
            continue
        now, times = 0.0, []
        for k in range(chunks):
            now = max([now, *(times_in[k] for times_in in arrivals)]) + leaf.stage.chunk(leaf.option, chunks)
            times.append(now)
        left[name] = times
    return max(times[-1] for times in left.values())


def _moved(times: Sequence[float], seconds: float) -> list[float]:
    """When chunks arrive that left at `times`, over a link that moves one at a time."""
    now, arrived = 0.0, []
    for time in times:
        now = max(now, time) + seconds
        arrived.append(now)
    return arrived


def _in_order(names: Mapping[str, Leaf], edges: Sequence[Edge]) -> Iterator[str]:
    waiting = list(names)
    while waiting:
        ready = next(name for name in waiting if not any(e.target == name and e.source in waiting for e in edges))
        waiting.remove(ready)
        yield ready


def width(tree: Tree) -> dict[str, int]:
    """Number of devices that a tree takes, by kind."""
    if isinstance(tree, Leaf):
        return {tree.option.kind: tree.option.devices}
    left, right = width(tree.left), width(tree.right)
    join = max if tree.how == "temporal" else int.__add__
    return {kind: join(left.get(kind, 0), right.get(kind, 0)) for kind in left | right}


def layout(tree: Tree, start: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Return the devices of each stage, counted from `start` of their kind; parts side by side in order."""
    if isinstance(tree, Leaf):
        first = start.get(tree.option.kind, 0)
        return {tree.stage.name: tuple(range(first, first + tree.option.devices))}
    shift = width(tree.left) if tree.how == "spatial" else {}
    after = {kind: start.get(kind, 0) + shift.get(kind, 0) for kind in {*start, *shift}}
    return layout(tree.left, start) | layout(tree.right, after)


def to_plan(
    tree: Tree, workload: Workload, chunks: int, items: int | None, predicted: Prediction | None, reason: str = ""
) -> Plan:
    """Write a tree as the plan that people read.

    Args:
        tree: the plan.
        workload: what it plans.
        chunks: into how many a step is cut where stages overlap.
        items: of a step; None: granularity is left open.
        predicted: its time and the bound.
        reason: why this one.
    """
    first: dict[str, int] = {}
    total = 0
    for kind, count in workload.devices.items():
        first[kind], total = total, total + count
    where = layout(tree, first)
    order = phases(tree, workload.edges)
    at_a_time = None if items is None else max(1, items // chunks)
    roles = {}
    for number, phase in enumerate(order):
        for leaf in phase:
            roles[leaf.stage.name] = RolePlan(
                devices=where[leaf.stage.name],
                phases=(number,),
                resident=leaf.resident,
                items=at_a_time if len(phase) > 1 else items,
                active_bytes=leaf.option.active_bytes,
                parked_bytes=leaf.option.parked_bytes,
            )
    ordered = {stage.name: roles[stage.name] for stage in workload.stages}
    edges = {}
    for edge in workload.edges:
        together = roles[edge.source].phases == roles[edge.target].phases
        edges[edge.source, edge.target] = EdgePlan(at_a_time if together else items, edge.barrier)
    return Plan(ordered, edges, predicted, reason)
