"""The best plan of a flow with work in flight between steps: which stages share devices, and how many each has.

Flows in: a workload and the staleness. Flows out: plans as trees with their seconds in the long run, the best of each
mode. Nothing waits here.

In the long run only loads and the way of one batch count (`steady.py`), so a plan is a partition: stages of one part
take turns on its devices, parts are side by side. Sizes come from bisection: of the least seconds for which every part
finds enough devices; then they are moved from part to part while that helps. Where there are few, all are tried.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from rlinf.placement.plan import Mode
from rlinf.placement.planner.plan_tree import Leaf, Pair, Tree, width
from rlinf.placement.planner.search import Found, ideals
from rlinf.placement.profiling.workload import Option, Stage, Workload

from .steady import load, steady

EVERYTHING = 400
"""Up to so many combinations of sizes are all tried."""
RATIOS = (1.5, 1.2, 1.08, 1.03, 1.0)
"""By which a part grows or shrinks when sizes are moved; 1: to the next size there is."""
MOST_STEPS = 40
"""Times that sizes are moved at one ratio."""
SIZES = 256
"""Sizes of a part that are tried, spread evenly over all."""


@dataclass(frozen=True, slots=True)
class Part:
    """Stages on the same devices, at one size."""

    leaves: tuple[Leaf, ...]
    """In the order of their work."""
    load: float
    """Seconds of a step in which they need their devices."""

    @property
    def kind(self) -> str:
        """Of its devices."""
        return self.leaves[0].option.kind

    @property
    def devices(self) -> int:
        """That it takes."""
        return max(leaf.option.devices for leaf in self.leaves)

    @property
    def tree(self) -> Tree:
        """Its stages in turns."""
        trees: list[Tree] = list(self.leaves)
        return reduce(lambda left, right: Pair("temporal", left, right), trees)


Sizes = Sequence[Sequence[Part]]
"""Per part of a partition, its sizes: more devices and less load from one to the next."""


def plan_ahead(workload: Workload, staleness: int) -> dict[Mode, Found]:
    """Return the best plan of each mode that has one.

    Args:
        workload: what to plan.
        staleness: versions by which weights that generate may be behind, at least 1.
    """
    best: dict[Mode, Found] = {}
    for parts in _partitions(workload):
        for chunks in workload.chunks:
            sizes = [_sizes(stages, workload, chunks, staleness) for stages in parts]
            if not all(sizes):
                continue
            found = _sized(sizes, workload, chunks, staleness)
            if found is not None and (found.mode not in best or found.seconds < best[found.mode].seconds):
                best[found.mode] = found
    return best


def _partitions(workload: Workload) -> Iterator[tuple[tuple[Stage, ...], ...]]:
    """Every partition whose parts feed each other in one direction only. What needs no device is a part of its own, or
    takes its turn where all stages do."""
    stages = workload.stages
    number = {stage.name: index for index, stage in enumerate(stages)}
    before = [0] * len(stages)
    for _ in stages:
        for edge in workload.edges:
            source, target = number[edge.source], number[edge.target]
            before[target] |= before[source] | 1 << source
    depth = {index: before[index].bit_count() for index in range(len(stages))}
    beside = sum(1 << i for i, stage in enumerate(stages) if not any(one.devices for one in stage.options))
    everything = (1 << len(stages)) - 1
    seen: set[frozenset[int]] = set()

    def cut(rest: int) -> Iterator[tuple[int, ...]]:
        for part in (*sorted(ideals(rest, before), key=lambda part: (part & -part, part)), rest):  # as stages are named
            if part & beside and part.bit_count() > 1 and part != everything:
                continue
            if part == rest:
                yield (part,)
            else:
                yield from ((part, *others) for others in cut(rest & ~part))

    for parts in cut(everything):
        if (key := frozenset(parts)) not in seen:
            seen.add(key)
            members = ([index for index in range(len(stages)) if part >> index & 1] for part in parts)
            yield tuple(tuple(stages[i] for i in sorted(own, key=lambda i: (depth[i], i))) for own in members)


def _sizes(stages: Sequence[Stage], workload: Workload, chunks: int, staleness: int) -> list[Part]:
    """What a part may be: with each number of devices, every stage at its quickest; only what more devices improve."""
    found: list[Part] = []
    for kind in workload.devices:
        own = [[one for one in workload.usable(stage) if one.kind == kind] for stage in stages]
        if not all(own):
            continue
        counts = sorted({one.devices for options in own for one in options})
        if len(counts) > SIZES:
            counts = sorted({counts[round(at * (len(counts) - 1) / (SIZES - 1))] for at in range(SIZES)})
        least = math.inf
        for count in counts:
            part = _part(stages, own, count, workload.memory.get(kind), chunks, staleness)
            if part is not None and part.load < least:
                least = part.load
                found.append(part)
    return found


def _part(
    stages: Sequence[Stage],
    own: Sequence[Sequence[Option]],
    count: int,
    memory: int | None,
    chunks: int,
    staleness: int,
) -> Part | None:
    """A part on up to so many devices; None if it does not fit. Where not all fits at once, all are parked in turn."""
    fitting = [[one for one in options if one.devices <= count] for options in own]
    if not all(fitting):
        return None
    leaves = tuple(
        Leaf(stage, min(options, key=lambda one, stage=stage: (stage.alone(one, chunks), one.active_bytes)))  # type: ignore[misc]
        for stage, options in zip(stages, fitting, strict=True)
    )
    if memory is not None and sum(leaf.option.active_bytes for leaf in leaves) > memory:
        parked = sum(leaf.option.parked_bytes for leaf in leaves)
        if any(leaf.option.active_bytes - leaf.option.parked_bytes + parked > memory for leaf in leaves):
            return None
        leaves = tuple(replace(leaf, resident=leaf.option.parked_bytes == leaf.option.active_bytes) for leaf in leaves)
    return Part(leaves, sum(load(leaf, chunks, staleness, alone=len(leaves) == 1) for leaf in leaves))


def _sized(sizes: Sizes, workload: Workload, chunks: int, staleness: int) -> Found | None:
    """The best sizes of a partition."""

    def judged(parts: Sequence[Part]) -> tuple[float, Sequence[Part]]:
        return steady(_tree(parts), workload, chunks, staleness).seconds, parts

    if math.prod(map(len, sizes)) <= EVERYTHING:
        fitting = [judged(parts) for parts in itertools.product(*sizes) if _fit(parts, workload.devices)]
        best = min(fitting, key=lambda one: one[0], default=None)
    else:
        balanced = _balanced(sizes, workload.devices)
        best = None if balanced is None else judged(balanced)
        for ratio in RATIOS if best is not None else ():
            for _ in range(MOST_STEPS):
                assert best is not None
                near = [judged(parts) for parts in _moved(best[1], sizes, ratio) if _fit(parts, workload.devices)]
                better = min(near, key=lambda one: one[0], default=best)
                if better[0] >= best[0] * (1 - 1e-9):
                    break
                best = better
    return None if best is None else Found(_tree(best[1]), chunks, best[0], best[0])


def _tree(parts: Iterable[Part]) -> Tree:
    return reduce(lambda left, right: Pair("spatial", left, right), (part.tree for part in parts))


def _fit(parts: Sequence[Part], devices: Mapping[str, int]) -> bool:
    taken = width(_tree(parts))
    return all(count <= devices.get(kind, 0) for kind, count in taken.items())


def _balanced(sizes: Sizes, devices: Mapping[str, int]) -> Sequence[Part] | None:
    """The parts whose largest load is the least for which there are devices."""
    loads = sorted({part.load for own in sizes for part in own})
    low, high, fitting = 0, len(loads), None
    while low < high:
        middle = (low + high) // 2
        quick = [[part for part in own if part.load <= loads[middle]] for own in sizes]
        smallest = [_smallest(own) for own in quick]
        chosen = next((parts for parts in itertools.product(*smallest) if _fit(parts, devices)), None)
        if chosen is None:
            low = middle + 1
        else:
            high, fitting = middle, chosen
    return fitting


def _smallest(parts: Sequence[Part]) -> list[Part]:
    """The smallest of each kind of device."""
    kinds = sorted({part.kind for part in parts})
    return [min((part for part in parts if part.kind == kind), key=lambda part: part.devices) for kind in kinds]


def _moved(parts: Sequence[Part], sizes: Sizes, ratio: float) -> Iterator[Sequence[Part]]:
    """One part larger or smaller; or one larger and another smaller."""
    larger = [_near(part, own, ratio) for part, own in zip(parts, sizes, strict=True)]
    smaller = [_near(part, own, 1 / ratio, down=True) for part, own in zip(parts, sizes, strict=True)]
    for at, part in enumerate(larger):
        if part is None:
            continue
        grown = [*parts[:at], part, *parts[at + 1 :]]
        yield grown
        for other, less in enumerate(smaller):
            if other != at and less is not None:
                yield [*grown[:other], less, *grown[other + 1 :]]


def _near(part: Part, own: Sequence[Part], ratio: float, *, down: bool = False) -> Part | None:
    """The size nearest to so many times the devices, but another."""
    there = [one for one in own if one.kind == part.kind and (one.devices < part.devices) == down and one is not part]
    return min(there, key=lambda one: abs(one.devices - part.devices * ratio), default=None)
