"""Loops in a flow's graph, such as environment and policy: planned by a model of their own, then one stage like others.

Flows in: the members of a loop with the seconds of one turn, the number of turns, the devices. Flows out: a `Stage`
whose options are the best inner plans; the graph with the loop in one node. Nothing waits here.

The batch may be cut into p slices that travel around the loop at a time. On devices of their own, members of the
seconds e_i for a slice need per turn c(p) = max(p·max e_i, Σ e_i): the busiest member has p slices to serve, and no
slice is faster than a round. Collocated the members take turns on all devices: Σ e_i of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from .interpolation import OutOfRange
from .profile import StageProfile
from .workload import Edge, Option, Stage


@dataclass(frozen=True, slots=True)
class Member:
    """One role in a loop."""

    name: str
    """Of the role."""
    seconds: Callable[[int, int], float]
    """(items, devices) to the seconds of one turn; infinite where it cannot run."""
    bytes_per_device: Callable[[int, int], int] = lambda items, devices: 0
    """(items, devices) to the bytes on each device."""
    parked_bytes: int = 0
    """Per device while the loop is parked."""
    switch_seconds: float = 0.0
    """To load it, and to park it."""


@dataclass(frozen=True, slots=True)
class InnerPlan:
    """How a loop runs inside."""

    devices: tuple[int, ...]
    """Per member; all the same number if it is collocated."""
    slices: int
    """Parts of the batch that travel around at a time."""
    collocated: bool
    """Members take turns on all devices."""
    seconds: float
    """Of all turns."""


@dataclass(frozen=True, slots=True)
class LoopOption(Option):
    """A size of a loop, and how it then runs inside."""

    inner: InnerPlan = InnerPlan((), 1, True, 0.0)
    """What the planner has chosen by choosing this size: devices of each member, and slices."""


def turn_seconds(slice_seconds: Sequence[float], slices: int) -> float:
    """Seconds per turn of `slices` slices around members on devices of their own: max(p·max e_i, Σ e_i)."""
    return max(slices * max(slice_seconds), sum(slice_seconds))


def loop_seconds(slice_seconds: Sequence[float], slices: int, turns: int) -> float:
    """Seconds of all turns, with what it takes to fill and drain the loop.

    The busiest member starts after, and ends before, what the others do for one slice; if no member is always busy,
    the last slice runs behind the first by the busiest member's time for the others.
    """
    busiest = max(slice_seconds)
    fill = min(sum(slice_seconds) - busiest, (slices - 1) * busiest)
    return turns * turn_seconds(slice_seconds, slices) + fill


def inner_plans(
    members: Sequence[Member],
    items: int,
    turns: int,
    devices: int,
    *,
    slices: Iterable[int] = (1, 2, 4),
    quantum: int = 1,
) -> Iterator[InnerPlan]:
    """All ways to run a loop on so many devices.

    Args:
        members: in the order of the loop.
        items: of the whole batch, such as environments.
        turns: around the loop.
        devices: to use, a multiple of `quantum`.
        slices: numbers of slices to try; those that do not divide `items` are left out.
        quantum: devices come in multiples of this.
    """
    together = sum(member.seconds(items, devices) for member in members)
    yield InnerPlan((devices,) * len(members), 1, True, turns * together)
    for share in _shares(devices // quantum, len(members)):
        counts = tuple(part * quantum for part in share)
        for cut in slices:
            if items % cut:
                continue
            each = [member.seconds(items // cut, count) for member, count in zip(members, counts, strict=True)]
            yield InnerPlan(counts, cut, False, loop_seconds(each, cut, turns))


def loop_stage(
    name: str,
    members: Sequence[Member],
    items: int,
    turns: int,
    counts: Sequence[int],
    *,
    kind: str = "gpu",
    slices: Iterable[int] = (1, 2, 4),
    quantum: int = 1,
) -> Stage:
    """Return a loop as one stage. Per device count it has the best collocated and the best split inner plan, because
    they differ in what they hold on a device, and only the planner knows what else must fit.

    Args:
        name: of the stage.
        members: in the order of the loop.
        items: of the whole batch.
        turns: around the loop.
        counts: device counts that it may have.
        kind: of device.
        slices: see `inner_plans`.
        quantum: see `inner_plans`.

    Raises:
        ValueError: it can run on none of the counts.
    """
    options = []
    for count in counts:
        plans = list(inner_plans(members, items, turns, count, slices=tuple(slices), quantum=quantum))
        for collocated in (True, False):
            own = [one for one in plans if one.collocated is collocated and one.seconds < float("inf")]
            if own:
                options.append(_option(min(own, key=lambda one: one.seconds), members, items, count, kind))
    if not options:
        raise ValueError(f"loop {name!r} can run on none of {list(counts)} devices: give it more, or fewer items")
    return Stage(name, tuple(options))


def measured(name: str, profile: StageProfile, turns: int, *, extrapolate: bool = False) -> Member:
    """Return a member of a loop as it was measured.

    Args:
        name: of the role.
        profile: seconds of all turns of a step by (items, devices), and what it holds.
        turns: around the loop that these seconds are of.
        extrapolate: use it outside of what was measured; otherwise such sizes and slices are left out.
    """

    def seconds(items: int, devices: int) -> float:
        try:
            return profile.time(items, devices, extrapolate=extrapolate).seconds / turns
        except OutOfRange:
            return float("inf")

    def held(items: int, devices: int) -> int:
        return profile.footprint(devices).active_bytes if profile.footprints else 0

    parked = max((one.parked_bytes for one in profile.footprints), default=0)
    switch = max((max(one.onload_seconds, one.offload_seconds) for one in profile.footprints), default=0.0)
    return Member(name, seconds, held, parked, switch)


def measured_loop(
    name: str,
    profiles: Mapping[str, StageProfile],
    items: int,
    turns: int,
    counts: Sequence[int],
    *,
    slices: Iterable[int] = (1, 2, 4),
    quantum: int = 1,
    extrapolate: bool = False,
) -> Stage:
    """Return a loop as one stage from what was measured of its members: the planner then chooses devices and slices.

    What it chose is `LoopOption.inner` of the leaf's option: its `slices` are the run's `pipeline_slices`.

    Args:
        name: of the stage.
        profiles: by role, in the order of the loop; seconds of all turns of a step.
        items: of the whole batch.
        turns: around the loop in a step, for which the seconds were measured.
        counts: device counts that it may have.
        slices: see `inner_plans`.
        quantum: see `inner_plans`.
        extrapolate: see `measured`; without it, a number of slices needs a measurement of so much smaller batches.

    Raises:
        ValueError: it can run on none of the counts, or its members were measured on devices of several kinds.
    """
    kinds = {profile.kind for profile in profiles.values()}
    if len(kinds) > 1:
        raise ValueError(
            f"loop {name!r}: its members were measured on {' and '.join(sorted(kinds))}: "
            "plan them as stages of their own"
        )
    members = [measured(role, profile, turns, extrapolate=extrapolate) for role, profile in profiles.items()]
    return loop_stage(name, members, items, turns, counts, kind=kinds.pop(), slices=slices, quantum=quantum)


def _option(inner: InnerPlan, members: Sequence[Member], items: int, count: int, kind: str) -> LoopOption:
    held = [m.bytes_per_device(items, own) for m, own in zip(members, inner.devices, strict=True)]
    parked = [member.parked_bytes for member in members]
    join = sum if inner.collocated else max
    shares = " | ".join(f"{m.name} {own}" for m, own in zip(members, inner.devices, strict=True))
    how = "taking turns" if inner.collocated else f"{inner.slices} slices"
    active = max(join(held), join(parked))
    switch = sum(m.switch_seconds for m in members) if inner.collocated else max(m.switch_seconds for m in members)
    note = f"{shares}, {how}"
    return LoopOption(count, inner.seconds, kind, active, join(parked), switch, switch, note=note, inner=inner)


def _shares(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a sum of so many numbers, each at least 1."""
    if parts == 1:
        if total >= 1:
            yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in _shares(total - first, parts - 1):
            yield (first, *rest)


def loops(names: Sequence[str], edges: Sequence[Edge]) -> list[tuple[str, ...]]:
    """Return the strongly connected parts of a graph that have more than one node, members in the given order."""
    after = _reach(names, edges)
    groups = {tuple(other for other in names if other in after[name] and name in after[other]) for name in names}
    return sorted(group for group in groups if len(group) > 1)


def condense(edges: Sequence[Edge], groups: Mapping[str, Sequence[str]]) -> tuple[Edge, ...]:
    """Return the edges with every loop in one node: those inside vanish, and parallel ones become one.

    Args:
        edges: of the flow's graph.
        groups: name of the new node to its members.
    """
    into = {member: name for name, members in groups.items() for member in members}
    joined: dict[tuple[str, str], Edge] = {}
    for edge in edges:
        ends = into.get(edge.source, edge.source), into.get(edge.target, edge.target)
        if ends[0] == ends[1]:
            continue
        old = joined.get(ends, Edge(*ends))
        joined[ends] = replace(old, barrier=old.barrier or edge.barrier, seconds=old.seconds + edge.seconds)
    return tuple(joined.values())


def _reach(names: Sequence[str], edges: Sequence[Edge]) -> dict[str, set[str]]:
    """Per node all that can be reached from it along edges, without itself unless it lies on a loop."""
    after: dict[str, set[str]] = {name: set() for name in names}
    for _ in names:
        for edge in edges:
            after[edge.source] |= after[edge.target] | {edge.target}
    return after
