"""The planner's input: stages with their possible sizes and costs, the edges between them, and the devices.

Flows in: a profile, or costs from elsewhere. Flows out: a `Workload`, checked, for the planner and the bound. One step
is M items; all seconds here are of one step unless they say otherwise. `workload` makes one of a profile: every size
that a stage may have, the flow's edges, its chunks. Loops in a flow's graph, such as environment and policy, are one
stage (`loops`, `condense`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rlinf.placement.grammar import PlacementError
from rlinf.placement.hardware import KIND, Devices
from rlinf.placement.plan import GB
from rlinf.placement.profile import BESIDE, Footprint, OutOfRange, Profile, Release, StageProfile


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a stage."""

    devices: int
    """Devices that it takes; 0 for what runs beside the devices, such as scoring on spare cores."""
    seconds: float
    """All items of a step in one go; for generation the makespan, not a mean."""
    kind: str = "gpu"
    """Kind of device."""
    active_bytes: int = 0
    """Per device while it is loaded."""
    parked_bytes: int = 0
    """Per device while it is parked."""
    onload_seconds: float = 0.0
    """From parked to loaded."""
    offload_seconds: float = 0.0
    """From loaded to parked."""
    chunk_seconds: Mapping[int, float] = field(default_factory=dict)
    """By number of chunks in a step: the time of one chunk. Where it is missing: `seconds` / chunks."""
    note: str = ""
    """How it runs inside, such as the inner plan of a loop."""
    longest: float = 0.0
    """Seconds that its longest item takes alone, a part of `seconds` that items of other steps can fill; 0: not known,
    or items leave evenly."""
    least: float | None = None
    """Device-seconds of all items at the devices' own limit; None: unknown."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One role's work in a step."""

    name: str
    """Of the role."""
    options: tuple[Option, ...]
    """Every size and kind of device that it may run on."""
    release: Release | None = None
    """When items leave it; None: evenly. For generation, whose tail decides."""

    def chunk(self, option: Option, chunks: int) -> float:
        """Seconds of one of so many chunks; with a release curve, a makespan cannot shrink by being cut."""
        even = option.seconds / chunks
        seconds = option.chunk_seconds.get(chunks, even)
        return seconds if self.release is None else max(seconds, even)

    def alone(self, option: Option, chunks: int) -> float:
        """Seconds of all items when nothing else runs: in one go, or chunk by chunk where that is quicker."""
        return min(option.seconds, chunks * self.chunk(option, chunks))


@dataclass(frozen=True, slots=True)
class Edge:
    """Items that flow from one stage to another."""

    source: str
    """Name of the producer."""
    target: str
    """Name of the consumer."""
    barrier: bool = False
    """The consumer needs all items before its first; otherwise it takes them as they come."""
    seconds: float = 0.0
    """To move all items of a step between disjoint devices."""


@dataclass(frozen=True, slots=True)
class Sync:
    """Publishing weights at the end of a step."""

    source: str
    """The role that has the new weights: the trainer."""
    target: str
    """The role that needs them: the rollout."""
    together: float = 0.0
    """Seconds if both take turns on the same devices."""
    apart: float = 0.0
    """Seconds if they have devices of their own."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One step of a flow and the devices for it."""

    stages: tuple[Stage, ...]
    """The nodes of the flow's graph, loops already condensed (`profile.py`)."""
    edges: tuple[Edge, ...]
    """The edges; no cycle."""
    devices: Mapping[str, int]
    """How many there are, by kind."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes of one device, by kind; a kind that is missing is never full."""
    chunks: tuple[int, ...] = (16,)
    """Into how many chunks a step may be cut, to choose from."""
    sync: tuple[Sync, ...] = ()
    """Publications of weights."""

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise PlacementError(problems)

    def stage(self, name: str) -> Stage:
        """Return the stage of that name."""
        return next(stage for stage in self.stages if stage.name == name)

    def usable(self, stage: Stage) -> tuple[Option, ...]:
        """Return the options of a stage for which there are devices and memory."""
        return tuple(
            option
            for option in stage.options
            if option.devices <= self.devices.get(option.kind, 0) or option.devices == 0
            if option.devices == 0 or option.active_bytes <= self.memory.get(option.kind, option.active_bytes)
        )

    def _problems(self) -> Iterable[str]:
        names = [stage.name for stage in self.stages]
        if not names:
            yield "there is no stage to plan: run a step of the flow first, so that it can be observed"
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"stage {name!r} is there twice: give one another name"
        ends = [(edge.source, edge.target) for edge in self.edges] + [(one.source, one.target) for one in self.sync]
        for source, target in ends:
            if missing := [name for name in (source, target) if name not in names]:
                yield f"{source} -> {target}: there is no stage {missing[0]!r}, there are: {', '.join(names)}"
        if any(count < 1 for count in self.chunks) or not self.chunks:
            yield f"chunks: {self.chunks}: name at least one number, each at least 1"
        for stage in self.stages:
            yield from self._unfit(stage)
        if loop := _cycle(names, self.edges):
            yield f"{' -> '.join(loop)} is a loop: condense it first, so that it is planned by a model of its own"

    def _unfit(self, stage: Stage) -> Iterable[str]:
        wrong = [
            option
            for option in stage.options
            if option.devices < 0
            or option.seconds < 0
            or not 0 <= option.parked_bytes <= option.active_bytes
            or not 0 <= option.longest <= option.seconds
        ]
        if wrong:
            yield (
                f"stage {stage.name!r}: a size needs devices and seconds of at least 0, parked <= active bytes and its "
                f"longest item within its seconds: "
                f"{wrong[0]}"
            )
        elif not stage.options:
            yield f"stage {stage.name!r} has no size it may run on: profile it, or name its device counts"
        elif not self.usable(stage):
            yield f"stage {stage.name!r} can never run here: {self._nearest(stage)}"

    def _nearest(self, stage: Stage) -> str:
        """The option that is closest to running, and what it lacks."""
        there = [option for option in stage.options if option.devices <= self.devices.get(option.kind, 0)]
        if there:
            option = min(there, key=lambda option: option.active_bytes)
            have = self.memory[option.kind]
            return (
                f"on {option.devices} {option.kind} it holds {option.active_bytes / GB:.1f} GB per device, of "
                f"{have / GB:.1f}: {(option.active_bytes - have) / GB:.1f} GB have to go, by more devices, a smaller "
                "batch or a smaller model"
            )
        option = min(stage.options, key=lambda option: option.devices - self.devices.get(option.kind, 0))
        have = self.devices.get(option.kind, 0)
        return f"its smallest size takes {option.devices} {option.kind}, there are {have}: add {option.devices - have}"


def _cycle(names: Sequence[str], edges: Sequence[Edge]) -> list[str]:
    """Return the names along one cycle, its first again at the end; nothing if there is none."""
    after: dict[str, list[str]] = {name: [] for name in names}
    for edge in edges:
        after.get(edge.source, []).append(edge.target)
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for target in after.get(name, ()):
            if loop := walk(target, [*path, name]):
                return loop
        done.add(name)
        return []

    return next((loop for name in names if (loop := walk(name, []))), [])


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


MOST_CHUNKS = 128
"""Beyond that many, a chunk's own cost outweighs what finer overlap brings."""
CHUNK_CHOICES = 6
"""Numbers of chunks that the planner is given to choose from; each costs it one search."""


def workload(profile: Profile, devices: Devices, *, items: int | None = None, extrapolate: bool = False) -> Workload:
    """Return the workload of a profiled flow on some devices.

    Args:
        profile: of the flow.
        devices: that a plan may use; by what is known of them, a stage is taken to be on kinds that it was not
            measured on.
        items: of one step; None: as many as were profiled.
        extrapolate: also use numbers of devices and items outside of what was measured; otherwise stages get those
            sizes only that lie within. Chunks are never extrapolated: where no smaller batch was measured, a chunk
            takes its share of the whole.

    Raises:
        PlacementError: it cannot be planned; a message per stage that has no size.
    """
    if not profile.stages:
        raise PlacementError([f"the profile of {profile.model} has no stage: run a step of the flow first"])
    items = items or profile.items
    if items < 1:
        raise PlacementError(["the profile does not say how many items a step has: name `items`"])
    problems: list[str] = []
    stages: list[Stage] = []
    chunks = chunk_choices(items)
    for name, stage in profile.stages.items():
        kinds = [stage.kind] if stage.kind == BESIDE else [kind for kind, count in devices.counts.items() if count]
        ways = [own for kind in kinds if (own := stage.on(kind, devices.hardware)) is not None]
        if not ways and stage.timings:
            problems.append(_elsewhere(name, stage, kinds))
            continue
        if profile.staleness:  # its items left by what other steps left them of the devices
            ways = [replace(own, release=None) for own in ways]
        options = tuple(one for own in ways for one in _options(own, items, chunks, devices, extrapolate=extrapolate))
        release = next((own.release for own in ways if own.release is not None), None)
        stages.append(Stage(name, _multiples(options, devices), release))
        if not options:
            problems.append(_unknown(name, ways or [stage], items, devices.counts))
    if problems:
        raise PlacementError(problems)
    edges = (
        Edge(source, target, barrier, profile.transfers.get((source, target), 0.0) * items)
        for source, target, barrier in profile.edges
    )
    sync = tuple(_syncs(profile, devices.counts))
    return Workload(tuple(stages), tuple(edges), devices.counts, devices.memory or {}, chunks, sync)


def _options(
    stage: StageProfile, items: int, chunks: Sequence[int], devices: Devices, *, extrapolate: bool
) -> Iterator[Option]:
    """Every size on one kind. What runs beside the devices is of some kind that there is, and takes none of it."""
    longest = stage.longest(items)
    for size in _sizes(stage, items, devices.counts, extrapolate=extrapolate):
        seconds = stage.time(items, size, extrapolate=extrapolate).seconds
        footprint = stage.footprint(size) if stage.footprints else Footprint(size)
        yield Option(
            0 if stage.kind == BESIDE else size,
            seconds,
            next(iter(devices.counts), KIND) if stage.kind == BESIDE else stage.kind,
            footprint.active_bytes,
            footprint.parked_bytes,
            footprint.onload_seconds,
            footprint.offload_seconds,
            _chunk_seconds(stage, items, size, chunks),
            longest=min(longest, seconds),
            least=stage.least(items),
        )


def _multiples(options: tuple[Option, ...], devices: Devices) -> tuple[Option, ...]:
    """Keep sizes that are multiples of a number, those below it that divide it, and all devices."""
    each = devices.multiple

    def keeps(count: int, kind: str) -> bool:
        return count % each == 0 or (count and each % count == 0) or count == devices.counts.get(kind, 0)

    return tuple(option for option in options if keeps(option.devices, option.kind)) or options


def _chunk_seconds(stage: StageProfile, items: int, devices: int, chunks: Sequence[int]) -> dict[int, float]:
    """Times of one chunk, where smaller batches were measured; elsewhere the planner divides the whole batch."""
    times_by_count: dict[int, float] = {}
    if len({one.batch for one in stage.timings}) < 2:
        return times_by_count
    for count in chunks:
        with contextlib.suppress(OutOfRange):
            times_by_count[count] = stage.time(items // count, devices).seconds
    return times_by_count


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
    return [count for count in candidates if measured[0] <= count <= measured[-1] and _is_known(stage, items, count)]


def _is_known(stage: StageProfile, items: int, count: int) -> bool:
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
