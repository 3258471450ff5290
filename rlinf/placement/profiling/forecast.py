"""From a profile to what can be planned: every size that a stage may have, the flow's edges, its chunks.

Flows in: a profile, and devices that there are or might be. Flows out: a `Workload` for the planner. Nothing waits
here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from rlinf.placement.grammar import PlacementError
from rlinf.placement.hardware import Hardware

from .interpolation import OutOfRange
from .profile import BESIDE, Profile, StageProfile
from .workload import Edge, Sync, Way, Workload, from_profile

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
    hardware: Mapping[str, Hardware] = MappingProxyType({}),
) -> Workload:
    """Return the workload of a profiled flow on some devices.

    Args:
        profile: of the flow.
        devices: how many there are, by kind.
        memory: bytes of one, by kind.
        items: of one step; None: as many as were profiled.
        extrapolate: also use numbers of devices and items outside of what was measured; otherwise stages get those
            sizes only that lie within.
        hardware: of each kind; by its speeds a stage is taken to be on kinds that it was not measured on.

    Raises:
        PlacementError: it cannot be planned; a message per stage that has no size.
    """
    if not profile.stages:
        raise PlacementError([f"the profile of {profile.model} has no stage: run a step of the flow first"])
    items = items or profile.items
    if items < 1:
        raise PlacementError(["the profile does not say how many items a step has: name `items`"])
    problems: list[str] = []
    ways: dict[str, list[Way]] = {}
    for name, stage in profile.stages.items():
        kinds = [stage.kind] if stage.kind == BESIDE else [kind for kind, count in devices.items() if count]
        known = [own for kind in kinds if (own := stage.on(kind, hardware)) is not None]
        if not known and stage.timings:
            problems.append(_elsewhere(name, stage, kinds))
            continue
        ways[name] = [(own, _sizes(own, items, devices, extrapolate=extrapolate)) for own in known]
        if not any(sizes for _, sizes in ways[name]):
            problems.append(_unknown(name, known or [stage], items, devices))
    if problems:
        raise PlacementError(problems)
    edges = [Edge(source, target, barrier) for source, target, barrier in profile.edges]
    return from_profile(
        profile, edges, items, ways, devices, memory, chunks=chunk_choices(items), sync=_syncs(profile, devices),
        extrapolate=extrapolate,
    )  # fmt: skip


def chunk_choices(items: int) -> tuple[int, ...]:
    """Numbers of equal chunks into which a step may be cut: divisors, at most six, evenly spread over their range."""
    divisors = [count for count in range(1, min(items, MOST_CHUNKS) + 1) if items % count == 0]
    last = len(divisors) - 1
    picked = {round(last * place / (CHUNK_CHOICES - 1)) for place in range(CHUNK_CHOICES)}
    return tuple(divisors[place] for place in sorted(picked))


def _sizes(stage: StageProfile, items: int, devices: Mapping[str, int], *, extrapolate: bool) -> Sequence[int]:
    """Device counts whose time is known. With `extrapolate`, all: each item goes to one device at least."""
    if stage.kind == BESIDE:
        candidates: Sequence[int] = (1,)
    else:
        candidates = range(1, min(devices[stage.kind], max(items, *(one.devices for one in stage.timings), 1)) + 1)
    if extrapolate:
        return candidates if stage.timings else ()
    measured = sorted({one.devices for one in stage.timings})
    if not measured:
        return ()
    return [count for count in candidates if measured[0] <= count <= measured[-1] and _known(stage, items, count)]


def _known(stage: StageProfile, items: int, count: int) -> bool:
    try:
        stage.time(items, count)
    except OutOfRange:
        return False
    return True


def _elsewhere(name: str, stage: StageProfile, kinds: Sequence[str]) -> str:
    """Why nothing is known of a stage on the kinds there are."""
    there = ", ".join(kinds) or "no device"
    measured = [way.kind for way in stage.ways]
    text = f"stage {name!r} was measured on {', '.join(map(repr, measured))}, there is: {there}; profile it there"
    if any("+" in kind for kind in measured):
        return f"{text}, on devices of one kind at a time"
    return f"{text}, or say how fast both are (placement.devices)"


def _unknown(name: str, ways: Sequence[StageProfile], items: int, devices: Mapping[str, int]) -> str:
    """Why a stage has no size: which numbers of items and devices were measured, and which are asked for."""
    timings = [one for way in ways for one in way.timings]
    if not timings:
        return f"stage {name!r} was not measured: profile again"
    counts, batches = {one.devices for one in timings}, {one.batch for one in timings}
    there = max(1 if way.kind == BESIDE else devices[way.kind] for way in ways)
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
