"""Lower bound on the seconds of a step, over all placements, with its parts.

Flows in: a workload, and what is known of its longest item. Flows out: the bound, and which part of it binds. Nothing
waits here. Where the time above the bound went is `lost_time.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from .profile import BESIDE
from .workload import Edge, Option, Stage, Workload

_ROUNDS = 4
"""Times that all pairs of three and more kinds are weighed against each other."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Seconds of one step below which it cannot get; each part is a bound of its own, and the largest is T_LB."""

    area: float
    """B1: all device-seconds of work, each stage at its most efficient size, spread over all devices without a gap;
    of several kinds of device, each stage on the kind that suits it."""
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
    """Device-seconds over devices. Of several kinds, each stage needs those of one, and which is left to the plan.

    Let a second of a device of kind k cost w_k / N_k, with weights w that add up to 1. All devices cost T in a step of
    T seconds, and a stage costs no less than at the cheapest of its sizes, so

        T >= sum over stages of min over kinds of w_k a_k / N_k

    whatever w is, with a_k the fewest device-seconds of the stage on kind k. The best w is found by dividing weight
    between pairs of kinds: of two kinds exactly, of more nearly.
    """
    counts = {kind: count for kind, count in workload.devices.items() if count}
    if not counts:
        return 0.0
    least = []
    for stage in workload.stages:
        own: dict[str, float] = {}
        for option in workload.usable(stage):
            seconds = quickest(workload, stage, option) - (option.longest if early else 0.0)
            kind = option.kind if option.devices else BESIDE
            own[kind] = min(own.get(kind, math.inf), option.devices * seconds)
        if BESIDE not in own:  # what can run beside the devices takes none of them
            least.append({kind: area / counts[kind] for kind, area in own.items()})

    def value(weights: Mapping[str, float]) -> float:
        return sum(min(weights[kind] * area for kind, area in own.items()) for own in least)

    everywhere = sum(counts.values())
    best = {kind: count / everywhere for kind, count in counts.items()}
    for _ in range(_ROUNDS if len(counts) > 2 else len(counts) - 1):
        for one, other in combinations(counts, 2):
            best = max(best, _between(best, one, other, least, value), key=value)
    return value(best)


def _between(
    weights: Mapping[str, float],
    one: str,
    other: str,
    least: Sequence[Mapping[str, float]],
    value: Callable[[Mapping[str, float]], float],
) -> dict[str, float]:
    """The weights with what two kinds have together divided best between them: all to one, or such that a stage costs
    the same on both, since in between nothing bends."""
    both = weights[one] + weights[other]
    areas = [(own[one], own[other]) for own in least if one in own and other in own]
    shares = [0.0, 1.0, *(theirs / (ours + theirs) for ours, theirs in areas if ours + theirs > 0)]
    return max(({**weights, one: both * share, other: both * (1 - share)} for share in shares), key=value)


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
