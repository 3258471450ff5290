"""Lower bound on the seconds of a step, over all placements, and the causes of the time above it.

Flows in: a workload, and what is known of its longest item. Flows out: the bound, and which part of it binds. Where the
time above the bound went is `Losses`.

Stretches of time as arrays: what a device did during a step may be 100,000 of them, read in a few milliseconds.

Split the time of a step above its lower bound into causes; the parts add up to T - T_LB.

N devices have N·T device-seconds. Each of them is work, a switch, a synchronisation, or idle; work is the least there
is (B1), what the chosen sizes cost above that, or what was measured above the profile. Divided by N this is T - B1
exactly. Where another part of the bound is larger than B1, some of the idle time could not be helped: it is taken off
the tail first, then off imbalance and the rest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from rlinf.placement.profile import BESIDE
from rlinf.placement.workload import Edge, Option, Stage, Workload

Spans = NDArray[np.float64]
"""Starts and ends in seconds, `[spans, 2]`."""
NEVER: Spans = np.zeros((0, 2))
"""No time at all."""


def spans(intervals: Sequence[tuple[float, float]], start: float, end: float) -> Spans:
    """Return intervals as seconds after `start`, without what lies outside of `start` to `end`."""
    numbers = np.fromiter(itertools.chain.from_iterable(intervals), np.float64, 2 * len(intervals))
    return np.clip(numbers.reshape(-1, 2), start, end) - start


def joined(*parts: Spans) -> Spans:
    """Return the time of all parts as spans in order that neither overlap nor touch."""
    every = np.concatenate(parts) if parts else NEVER
    every = every[every[:, 1] > every[:, 0]]
    if (every[1:, 0] > every[:-1, 1]).all():
        return every
    every = every[np.argsort(every[:, 0], kind="stable")]  # parts are mostly in order already: merging runs is quick
    reach = np.maximum.accumulate(every[:, 1])
    first = np.flatnonzero(np.concatenate(([True], every[1:, 0] > reach[:-1])))
    return np.stack((every[first, 0], reach[np.append(first[1:], len(every)) - 1]), axis=1)


def length(apart: Spans) -> float:
    """Return the seconds of spans that do not overlap."""
    return float((apart[:, 1] - apart[:, 0]).sum())


def until(apart: Spans, times: Spans) -> Spans:
    """Return how many seconds of spans (in order, apart) lie before each of the times `[times]`."""
    if not len(apart):
        return np.zeros(len(times))
    done = np.cumsum(apart[:, 1] - apart[:, 0])
    edges = np.stack((done - (apart[:, 1] - apart[:, 0]), done), axis=1)
    return np.interp(times, apart.ravel(), edges.ravel())


def fair_shares(parts: Sequence[Spans]) -> list[float]:
    """Return the seconds of each part when a moment that lies in k of them counts 1/k for each.

    The shares add up to the length of all parts joined.

    Args:
        parts: each in order and apart.
    """
    if len(parts) < 2:
        return [length(part) for part in parts]
    times, change, owner, order = _edges(parts)
    depth = np.cumsum(change[order])[:-1]
    passed = np.where(depth > 0, np.diff(times[order]) / np.maximum(depth, 1), 0.0)
    shared = np.zeros(len(times))  # fair seconds until each edge
    shared[order[1:]] = np.cumsum(passed)
    shares = np.bincount(owner, weights=-change * shared, minlength=len(parts))
    return [max(0.0, float(share)) for share in shares]  # rounding can leave -1e-17 of nothing


def in_turn(parts: Sequence[Spans]) -> list[float]:
    """Return the seconds of each part in which none of those before it is on; they add up to the length of all joined.

    Args:
        parts: each in order and apart.
    """
    times, change, owner, order = _edges(parts)
    passed, free, seconds = np.diff(times[order]), np.ones(max(len(times) - 1, 0), np.bool_), []
    for number in range(len(parts)):
        on = np.cumsum(np.where(owner == number, change, 0)[order])[:-1] > 0
        seconds.append(float(passed[free & on].sum()))
        free &= ~on
    return seconds


def _edges(parts: Sequence[Spans]) -> tuple[Spans, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Starts and ends of all parts: when, +1 or -1, of which part; and their order in time."""
    times = np.concatenate([part.ravel() for part in parts])
    change = np.tile(np.array([1, -1]), len(times) // 2)
    owner = np.repeat(np.arange(len(parts)), [part.size for part in parts])
    return times, change, owner, np.argsort(times, kind="stable")


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
    device: float | None = None
    """Seconds of all products and bytes at the devices' own limit, however they are computed; None: unknown. The others
    go by what stages were seen to cost."""

    @property
    def seconds(self) -> float:
        """T_LB."""
        return max(self.area, self.saturation, self.tail, self.memory, self.network)

    @property
    def binding(self) -> str:
        """Name of the largest part."""
        names = ("area", "saturation", "tail", "memory", "network")
        return max(names, key=lambda name: float(getattr(self, name)))

    @property
    def floor(self) -> float:
        """The smaller of T_LB and the devices' own limit: what no program on these devices could beat."""
        return self.seconds if self.device is None else min(self.seconds, self.device)

    def in_words(self) -> str:
        """T_LB and what sets it, and the devices' own limit where it is known."""
        own = "" if self.device is None else f"; at the devices' own limit {self.floor:,.3g} s"
        return f"{self.seconds:,.3f} s, set by {self.binding}{own}"

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

    def cost(stage: Stage, option: Option) -> float:
        return option.devices * (quickest(workload, stage, option) - (option.longest if staleness else 0.0))

    area = _area(workload, cost)
    has_limit = any(option.least is not None for stage in workload.stages for option in stage.options)
    device = _area(workload, lambda _, option: option.least or 0.0) if has_limit else None
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
    return Bound(area, saturation, tail, area + _forced_switches(workload), network, device)


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


def _area(workload: Workload, cost: Callable[[Stage, Option], float]) -> float:
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
            kind = option.kind if option.devices else BESIDE
            own[kind] = min(own.get(kind, math.inf), cost(stage, option))
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
        freeable = min(excess, freed)
        seconds += price * freeable
        excess -= freeable
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


_UNAVOIDABLE = ("tail", "imbalance", "overhead", "scaling", "switching", "sync", "interference")
"""In this order the parts give up what the bound itself says could not be helped."""


@dataclass(frozen=True, slots=True)
class Losses:
    """Parts of T - T_LB, in seconds of the step."""

    imbalance: float
    """Idle while others worked."""
    tail: float
    """Idle while the last few items were generated."""
    switching: float
    """Loading and parking."""
    sync: float
    """Publishing weights."""
    scaling: float
    """Work costs more device-seconds at the sizes that were chosen than at the most efficient ones."""
    interference: float
    """Work took longer than its profile says (negative: less long)."""
    overhead: float
    """No device worked: the runtime, data, the flow itself."""

    @property
    def total(self) -> float:
        """T - T_LB."""
        return sum(float(getattr(self, part.name)) for part in fields(self))


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """Activity of one device during a step; seconds after its start."""

    work: Spans
    """It did a stage's work, `[spans, 2]`; in order, apart, like the others."""
    switch: Spans = field(default_factory=lambda: NEVER)
    """It loaded or parked."""
    sync: Spans = field(default_factory=lambda: NEVER)
    """It published weights, or took them."""


def split(
    lanes: Sequence[Lane],
    seconds: float,
    limit: Bound,
    *,
    least: float,
    expected: float,
    tail: Spans = NEVER,
) -> Losses:
    """Split the time of a step above its bound.

    Args:
        lanes: what each device did; where several kinds overlap on one, work counts before a switch, that before sync.
        seconds: T.
        limit: the bound of this step.
        least: device-seconds of all stages at their most efficient sizes, N·B1.
        expected: device-seconds of all stages at the sizes that ran, by the profile.
        tail: when the last items were generated, e.g. from 95 % done to the end.
    """
    anywhere = joined(*(lane.work for lane in lanes))
    sums = dict.fromkeys(("work", "switching", "sync", "tail", "imbalance", "overhead"), 0.0)
    for lane in lanes:
        own = in_turn((lane.work, lane.switch, lane.sync, tail, anywhere))
        for name, part in zip(sums, (*own, seconds - sum(own)), strict=True):
            sums[name] += part
    devices = len(lanes)
    losses = Losses(
        imbalance=sums["imbalance"] / devices,
        tail=sums["tail"] / devices,
        switching=sums["switching"] / devices,
        sync=sums["sync"] / devices,
        scaling=(expected - least) / devices,
        interference=(sums["work"] - expected) / devices,
        overhead=sums["overhead"] / devices,
    )
    return _excused(losses, limit.seconds - least / devices)


def _excused(losses: Losses, seconds: float) -> Losses:
    """Take off what the bound says could not be helped."""
    for name in _UNAVOIDABLE:
        part = float(getattr(losses, name))
        share = min(seconds, max(0.0, part))
        losses = replace(losses, **{name: part - share})
        seconds -= share
    return replace(losses, interference=losses.interference - seconds)
