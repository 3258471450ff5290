"""From a profile to what can be planned: every size that a stage may have, the flow's edges, its chunks.

Flows in: a profile, and devices that there are or might be. Flows out: a `Workload` for the planner. Nothing waits
here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlinf.placement.grammar import PlacementError

from .interpolation import OutOfRange
from .profile import BESIDE, Profile
from .workload import Edge, Sync, Workload, from_profile

MOST_CHUNKS = 128
"""Beyond that many, a chunk's own cost outweighs what finer overlap brings."""
CHUNK_CHOICES = 6
"""Numbers of chunks that the planner is given to choose from; each costs it one search."""


def workload(
    profile: Profile,
    devices: Mapping[str, int],
    memory: Mapping[str, int] | None = None,
    *,
    items: int | None = None,
    extrapolate: bool = False,
) -> Workload:
    """Return the workload of a profiled flow on some devices.

    Args:
        profile: of the flow.
        devices: how many there are, by kind.
        memory: bytes of one, by kind.
        items: of one step; None: as many as were profiled.
        extrapolate: also use numbers of devices and items outside of what was measured; otherwise stages get those
            sizes only that lie within.

    Raises:
        PlacementError: it cannot be planned; a message per stage that has no size.
    """
    if not profile.stages:
        raise PlacementError([f"the profile of {profile.model} has no stage: run a step of the flow first"])
    items = items or profile.items
    if items < 1:
        raise PlacementError(["the profile does not say how many items a step has: name `items`"])
    problems: list[str] = []
    counts: dict[str, Sequence[int]] = {}
    for name, stage in profile.stages.items():
        if stage.kind != BESIDE and devices.get(stage.kind, 0) < 1:
            there = ", ".join(kind for kind, count in devices.items() if count) or "no device"
            problems.append(f"stage {name!r} was measured on {stage.kind!r}, there is: {there}; profile it there")
            continue
        counts[name] = _sizes(profile, name, items, devices, extrapolate=extrapolate)
        if not counts[name]:
            problems.append(_unknown(profile, name, items, devices))
    if problems:
        raise PlacementError(problems)
    edges = [Edge(source, target, barrier) for source, target, barrier in profile.edges]
    return from_profile(
        profile, edges, items, counts, devices, memory, chunks=chunk_choices(items), sync=_syncs(profile, devices),
        extrapolate=extrapolate,
    )  # fmt: skip


def chunk_choices(items: int) -> tuple[int, ...]:
    """Numbers of equal chunks into which a step may be cut: divisors, at most six, evenly spread over their range."""
    divisors = [count for count in range(1, min(items, MOST_CHUNKS) + 1) if items % count == 0]
    last = len(divisors) - 1
    picked = {round(last * place / (CHUNK_CHOICES - 1)) for place in range(CHUNK_CHOICES)}
    return tuple(divisors[place] for place in sorted(picked))


def _sizes(profile: Profile, name: str, items: int, devices: Mapping[str, int], *, extrapolate: bool) -> Sequence[int]:
    """Device counts whose time is known. With `extrapolate`, all: each item goes to one device at least."""
    stage = profile.stages[name]
    if stage.kind == BESIDE:
        candidates: Sequence[int] = (1,)
    else:
        candidates = range(1, min(devices[stage.kind], max(items, *(one.devices for one in stage.timings), 1)) + 1)
    if extrapolate:
        return candidates if stage.timings else ()
    measured = sorted({one.devices for one in stage.timings})
    if not measured:
        return ()
    return [
        count for count in candidates if measured[0] <= count <= measured[-1] and _known(profile, name, items, count)
    ]


def _known(profile: Profile, name: str, items: int, count: int) -> bool:
    try:
        profile.time(name, items, count)
    except OutOfRange:
        return False
    return True


def _unknown(profile: Profile, name: str, items: int, devices: Mapping[str, int]) -> str:
    """Why a stage has no size: which numbers of items and devices were measured, and which are asked for."""
    stage = profile.stages[name]
    if not stage.timings:
        return f"stage {name!r} was not measured: profile again"
    counts, batches = {one.devices for one in stage.timings}, {one.batch for one in stage.timings}
    there = 1 if stage.kind == BESIDE else devices[stage.kind]
    return (
        f"stage {name!r} was measured with {_range(batches)} items on {_range(counts)} devices, asked for are {items} "
        f"on at most {there}: profile there, or allow extrapolation, whose error bars are wide"
    )


def _range(numbers: set[int]) -> str:
    return f"{min(numbers)}" if len(numbers) == 1 else f"{min(numbers)} to {max(numbers)}"


def _syncs(profile: Profile, devices: Mapping[str, int]) -> list[Sync]:
    """Publishing takes what it took on the number of receivers nearest to all devices, wherever the two stand."""
    if not profile.sync:
        return []
    total = sum(devices.values())
    seconds = min(profile.sync, key=lambda one: abs(one.devices - total)).seconds
    pairs = [pair for pair in profile.published if set(pair) <= profile.stages.keys()]
    return [Sync(source, target, seconds / len(pairs), seconds / len(pairs)) for source, target in pairs]
