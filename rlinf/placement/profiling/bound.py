"""Lower bound on the seconds of a step, over all placements, with its parts.

Flows in: a workload, and what is known of its longest item. Flows out: the bound, and which part of it binds. Nothing
waits here. Where the time above the bound went is `lost_time.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from .workload import Edge, Option, Stage, Workload


@dataclass(frozen=True, slots=True)
class Bound:
    """Seconds of one step below which it cannot get; each part is a bound of its own, and the largest is T_LB."""

    area: float
    """B1: all device-seconds of work, each stage at its most efficient size, spread over all devices without a gap."""
    saturation: float
    """B2: the slowest stage at its fastest size; or stages in a row, where each needs all that the one before makes."""
    tail: float
    """B3: the longest item alone at full speed, and what must follow it."""
    memory: float
    """B4: `area`, and the switches that are forced because not everything fits at once."""
    network: float
    """B5: publishing the weights."""

    @property
    def seconds(self) -> float:
        """T_LB."""
        return max(self.area, self.saturation, self.tail, self.memory, self.network)

    @property
    def binding(self) -> str:
        """Name of the largest part."""
        names = ("area", "saturation", "tail", "memory", "network")
        return max(names, key=lambda name: float(getattr(self, name)))

    def efficiency(self, seconds: float) -> float:
        """E = T_LB / T of a step that took so long."""
        return self.seconds / seconds if seconds > 0 else 1.0


def bound(workload: Workload, *, source: str | None = None, longest_item: float = 0.0, staleness: int = 0) -> Bound:
    """Compute the bound.

    Stages keep their size during a step; a runtime that resizes them within a step may spend fewer device-seconds than
    `area` assumes.

    Where work is begun early, it is a bound on the steps' mean: what binds is no sum of stages but each for itself; a
    stage's longest items are filled up with those of later steps, so they count neither in `area` nor in `saturation`;
    and a batch has so many steps more from its prompts to published weights.

    Args:
        workload: stages, edges and devices.
        source: the stage that generates; None: the one whose longest item is known, or else no tail is considered.
        longest_item: seconds of its longest item with an engine for itself, L_max (a + b).
        staleness: versions by which the weights that make an item may be older than those that learn from it.
    """
    batches = staleness + 1
    area = _area(workload, early=staleness > 0)
    fastest = {
        stage.name: min(quickest(workload, stage, one) for one in workload.usable(stage)) for stage in workload.stages
    }
    saturation = longest_row(fastest, workload.edges) / batches
    if staleness:
        filled = [
            min(quickest(workload, stage, one) - one.longest for one in workload.usable(stage))
            for stage in workload.stages
        ]
        saturation = max(saturation, *filled)
    network = sum(min(sync.together, sync.apart) for sync in workload.sync)
    tail = 0.0
    if source is None and (alone := {stage.name: _longest(stage, workload) for stage in workload.stages}):
        source = max(alone, key=lambda name: alone[name])
        source, longest_item = (source, alone[source]) if alone[source] > 0 else (None, 0.0)
    if source is not None:
        tail = (longest_item + _after(workload, source) + network) / batches
    return Bound(area, saturation, tail, area + _forced_switches(workload), network)


def quickest(workload: Workload, stage: Stage, option: Option) -> float:
    """Seconds of all items at a size, in as many chunks as is best for it."""
    return min(stage.alone(option, count) for count in workload.chunks)


def _longest(stage: Stage, workload: Workload) -> float:
    return min(option.longest for option in workload.usable(stage))


def longest_row(seconds: Mapping[str, float], edges: Iterable[Edge]) -> float:
    """Return the most seconds that stages take one after the other, along edges that are barriers.

    Args:
        seconds: by stage.
        edges: of the flow's graph, which has no cycle.
    """
    before: dict[str, list[str]] = {name: [] for name in seconds}
    for edge in edges:
        if edge.barrier and edge.source in seconds and edge.target in seconds:
            before[edge.target].append(edge.source)
    memo: dict[str, float] = {}

    def done(name: str) -> float:
        if name not in memo:
            memo[name] = seconds[name] + max((done(source) for source in before[name]), default=0.0)
        return memo[name]

    return max((done(name) for name in seconds), default=0.0)


def _area(workload: Workload, *, early: bool) -> float:
    """Largest bound by device-seconds: of every kind for the stages that know no other, and of all devices together."""
    total, everywhere = 0.0, sum(workload.devices.values())
    by_kind = dict.fromkeys(workload.devices, 0.0)
    for stage in workload.stages:
        options = workload.usable(stage)
        least = min(
            option.devices * (quickest(workload, stage, option) - (option.longest if early else 0.0))
            for option in options
        )
        total += least
        kinds = {option.kind for option in options if option.devices}
        if len(kinds) == 1 and least > 0:
            by_kind[kinds.pop()] += least
    parts = [seconds / workload.devices[kind] for kind, seconds in by_kind.items() if workload.devices[kind]]
    return max([total / everywhere, *parts]) if everywhere else 0.0


def _after(workload: Workload, source: str) -> float:
    """Seconds that must follow the last item of a stage: its chunk through everything that it feeds, at best."""
    memo: dict[str, float] = {}

    def follow(name: str) -> float:
        if name not in memo:
            ways = [
                follow(edge.target) + _last_chunk(workload, workload.stage(edge.target))
                for edge in workload.edges
                if edge.source == name
            ]
            memo[name] = max(ways, default=0.0)
        return memo[name]

    return follow(source)


def _last_chunk(workload: Workload, stage: Stage) -> float:
    """Seconds of the smallest chunk at the fastest size."""
    return min(min(stage.chunk(one, count), one.seconds) for one in workload.usable(stage) for count in workload.chunks)


def _forced_switches(workload: Workload) -> float:
    """Seconds of all devices that go into parking what cannot stay, at the best ratio of seconds to bytes freed."""
    everywhere = sum(workload.devices.values())
    if set(workload.devices) - set(workload.memory) or not everywhere:
        return 0.0
    room = sum(count * workload.memory[kind] for kind, count in workload.devices.items())
    excess: float = sum(min(_bytes(option) for option in workload.usable(stage)) for stage in workload.stages) - room
    seconds = 0.0
    for price, freed in sorted(_parkings(workload)):
        if excess <= 0:
            break
        taken = min(excess, freed)
        seconds += price * taken
        excess -= taken
    return seconds / everywhere


def _bytes(option: Option) -> int:
    return option.devices * option.active_bytes


def _parkings(workload: Workload) -> Iterator[tuple[float, float]]:
    """Per stage: device-seconds per byte freed, and the most bytes that parking it frees."""
    for stage in workload.stages:
        prices, most = _parking(stage, workload)
        if most > 0:
            yield prices, most


def _parking(stage: Stage, workload: Workload) -> tuple[float, float]:
    price, most = float("inf"), 0.0
    for option in workload.usable(stage):
        freed = option.devices * (option.active_bytes - option.parked_bytes)
        if freed > 0:
            moved = option.devices * (option.onload_seconds + option.offload_seconds)
            price, most = min(price, moved / freed), max(most, freed)
    return price, most
