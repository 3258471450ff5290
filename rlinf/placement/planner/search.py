"""One search over all structures of a plan, with given sizes per stage.

Flows in: a workload, the sizes to try, the best plan so far. Flows out: a better plan, if there is one. Nothing waits
here.

The search goes over sets of stages, smallest first. A set is cut into a part that needs nothing of the rest (an order
ideal) and the rest, in every possible way; the parts follow each other on the same devices or stand side by side on
disjoint ones. Of each set only labels are kept that no other is better than in every respect (`pareto.py`). A label is
dropped as soon as its own seconds, or the device-seconds that must still be spent elsewhere, exceed the best so far.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rlinf.placement.plan import Mode
from rlinf.placement.profiling.workload import Option, Workload

from .pareto import (
    EVEN,
    HEAD,
    KINDS,
    LATENCY,
    OFFLOAD,
    ONLOAD,
    PERIOD,
    SOURCE,
    SOURCE_CHUNK,
    WHOLE,
    Array,
    Block,
    Curves,
    Shape,
    best_of,
    compose,
    joined,
    settle,
)
from .plan_tree import Leaf, Pair, Tree, replay

Allowed = Literal["any", "collocated", "disaggregated", "hybrid"]
"""Modes that a search may find: all, only turns, only disjoint devices, only mixtures of the two."""


@dataclass(frozen=True, slots=True)
class Found:
    """A plan that the planner found."""

    tree: Tree
    """What runs where and in which order."""
    chunks: int
    """Into how many a step is cut."""
    seconds: float
    """Of a step, by following every chunk (`plan_tree.replay`)."""
    estimate: float
    """By the formula that the search used; never less."""

    @property
    def mode(self) -> Mode:
        """How its stages share devices."""
        hows = set(_hows(self.tree))
        if hows <= {"temporal"}:
            return "collocated"
        return "disaggregated" if hows == {"spatial"} else "hybrid"


def _hows(tree: Tree) -> Iterator[str]:
    if isinstance(tree, Pair):
        yield tree.how
        yield from _hows(tree.left)
        yield from _hows(tree.right)


class Search:
    """One search: fixed sizes, chunks and mode, and a limit that plans must beat."""

    def __init__(
        self,
        workload: Workload,
        options: list[list[Option]],
        chunks: int,
        mode: Allowed,
        best: Found | None,
        tolerance: float,
    ) -> None:
        self.workload, self.options, self.chunks, self.mode = workload, options, chunks, mode
        self.limit = np.inf if best is None else best.estimate * (1 - tolerance) - 1e-12
        self.slack = tolerance
        self.names = [stage.name for stage in workload.stages]
        self.kinds = sorted(workload.devices)
        self.capacity = np.array([workload.devices[kind] for kind in self.kinds], dtype=float)
        self.memory = np.array([workload.memory.get(kind, np.inf) for kind in self.kinds], dtype=float)
        number = {name: index for index, name in enumerate(self.names)}
        self.edges = [(number[e.source], number[e.target], e) for e in workload.edges]
        self.syncs = [(1 << number[s.source], 1 << number[s.target], s) for s in workload.sync]
        self.everything = (1 << len(self.names)) - 1
        self.before = _ancestors(len(self.names), self.edges)
        curves = {i: s.release.chunks(chunks) for i, s in enumerate(workload.stages) if s.release is not None}
        self.curves = Curves.of(chunks, dict(curves))
        self.representatives: dict[Any, int] = {}
        self.elsewhere: dict[int, float] = {}
        self.crowded = self._crowded()
        self.least_area = self._least_areas()
        self.cuts = _all_cuts(self.everything, self.before)

    def run(self) -> Found | None:
        """Return the best plan below the limit, if there is one."""
        cuts = self.cuts
        lefts = {left for own in cuts.values() for left, _ in own}
        rights = {right for own in cuts.values() for _, right in own}
        slowest = 0.0 if self.limit == np.inf else self.limit * self.slack
        slack = slowest / (4 * len(self.names))  # each part of a plan is pruned twice, and there are fewer than twice V
        table: dict[int, list[Block]] = {}
        units: dict[int, list[Block]] = {}  # without those that are in turns: (A, B), C is found as A, (B, C)

        def settled(blocks: Iterable[Block], part: int) -> Iterator[Block]:
            for block in blocks:
                yield self._typical(settle(block, head=part not in rights, tail=part not in lefts), part)

        for part in sorted(cuts, key=lambda part: (part.bit_count(), part)):
            if part.bit_count() == 1:
                table[part] = units[part] = _pruned(settled([self._leaf(part)], part), slack, self.chunks)
                continue
            units[part] = _pruned(settled(self._side_by_side(part, cuts[part], table), part), slack, self.chunks)
            turns = list(settled(self._in_turns(part, cuts[part], units, table), part))
            table[part] = _pruned([*units[part], *turns], slack, self.chunks) if turns else units[part]
        return self._best(table[self.everything])

    def _best(self, blocks: Sequence[Block]) -> Found | None:
        if self.mode == "hybrid":
            blocks = [block for block in blocks if block.shape.ways == 3]
        best = min(((b.seconds().min(), i) for i, b in enumerate(blocks) if len(b.rows)), default=None)
        if best is None:
            return None
        block = blocks[best[1]]
        tree = self._tree(block, int(block.seconds().argmin()))
        return Found(tree, self.chunks, replay(tree, self.workload, self.chunks), float(best[0]))

    def _tree(self, block: Block, index: int) -> Tree:
        parent, left, right = (int(number) for number in block.origin[index])
        made = block.parents[parent]
        if isinstance(made, Leaf):
            return made
        spatial, one, two = made
        return Pair("spatial" if spatial else "temporal", self._tree(one, left), self._tree(two, right))

    def _leaf(self, part: int) -> Block:
        index = part.bit_length() - 1
        stage = self.workload.stages[index]
        made, rows = [], []
        for option in self.options[index]:
            for resident in (True, False) if self.crowded and option.parked_bytes < option.active_bytes else (True,):
                made.append(Leaf(stage, option, resident))
                rows.append(self._leaf_row(made[-1]))
        origin = np.zeros((len(made), 3), dtype=np.int64)
        origin[:, 0] = range(len(made))
        curve = EVEN if stage.release is None else index
        table = np.array(rows) if rows else np.zeros((0, KINDS + 3 * len(self.kinds)))
        return self._within(Block(Shape(True, part, part, curve, curve), table, origin, list(made)), part)

    def _leaf_row(self, leaf: Leaf) -> Array:
        row = np.zeros(KINDS + 3 * len(self.kinds))
        option = leaf.option
        phase = row[HEAD]
        phase[WHOLE] = leaf.stage.alone(option, self.chunks)
        chunk = leaf.stage.chunk(option, self.chunks)
        if leaf.stage.release is None:
            phase[LATENCY] = phase[PERIOD] = chunk
        else:
            phase[SOURCE], phase[SOURCE_CHUNK] = option.seconds, chunk
        if not leaf.resident:
            phase[ONLOAD], phase[OFFLOAD] = option.onload_seconds, option.offload_seconds
        if option.devices:
            at = KINDS + 3 * self.kinds.index(option.kind)
            row[at : at + 3] = (
                option.devices, option.active_bytes if leaf.resident else option.parked_bytes, option.active_bytes,
            )  # fmt: skip
        return row

    def _side_by_side(
        self, part: int, cuts: Sequence[tuple[int, int]], table: Mapping[int, list[Block]]
    ) -> Iterator[Block]:
        if self.mode != "collocated":
            for first, second in cuts:
                for left, right in itertools.product(table[first], table[second]):
                    yield from self._pair(part, first, second, left, right, spatial=True)

    def _in_turns(
        self,
        part: int,
        cuts: Sequence[tuple[int, int]],
        units: Mapping[int, list[Block]],
        table: Mapping[int, list[Block]],
    ) -> Iterator[Block]:
        if self.mode != "disaggregated":
            for first, second in cuts:
                for left, right in itertools.product(units[first], table[second]):
                    yield from self._pair(part, first, second, left, right, spatial=False)

    def _pair(self, part: int, first: int, second: int, left: Block, right: Block, *, spatial: bool) -> Iterator[Block]:
        one, two = left.least(), right.least()
        if (max(one, two) if spatial else one + two) > self.limit:
            return
        tails = left.shape.head if left.shape.single else left.shape.tail
        meeting = [e for s, t, e in self.edges if tails >> s & 1 and right.shape.head >> t & 1] if spatial else []
        barred = any(edge.barrier for edge in meeting)
        pairs = self._promising(part, left, right, spatial, barred)
        if not len(pairs[0]):
            return
        ways = (left.shape.ways | right.shape.ways | (2 if spatial else 1)) if self.mode == "hybrid" else 0
        link = max((edge.seconds for edge in meeting), default=0.0) / self.chunks if meeting else None
        feeds = any(tails >> s & 1 and t == right.shape.head_curve for s, t, _ in self.edges)
        yield self._within(
            compose(
                left,
                right,
                pairs,
                spatial=spatial,
                link=link,
                feeds=feeds,
                barred=barred,
                always=self._published(first, second, spatial),
                curves=self.curves,
                ways=ways,
            ),
            part,
        )

    def _promising(self, part: int, left: Block, right: Block, spatial: bool, barred: bool) -> tuple[Any, Any]:
        """Numbers of the labels whose pairs may be worth composing: enough devices, and not surely too slow."""
        one, two = left.seconds()[:, None], right.seconds()[None, :]
        seconds = np.maximum(one, two) if spatial and not barred else one + two
        good = seconds <= self.limit
        join = np.add if spatial else np.maximum
        for at in range(len(self.kinds)):
            column = KINDS + 3 * at
            count = join(left.rows[:, column][:, None], right.rows[:, column][None, :])
            good &= count <= self.capacity[at]
            if len(self.kinds) == 1 and self.limit < np.inf:
                good &= count * seconds + self._elsewhere(part) <= self.capacity[at] * self.limit
        lefts, rights = np.nonzero(good)
        return lefts, rights

    def _within(self, block: Block, part: int) -> Block:
        """Keep the labels that fit into memory and may still beat the limit."""
        seconds = block.seconds()
        good = seconds <= self.limit
        for at in range(len(self.kinds)):
            column = KINDS + 3 * at
            good &= (block.rows[:, column] <= self.capacity[at]) & (block.rows[:, column + 2] <= self.memory[at])
        if len(self.kinds) == 1 and self.limit < np.inf:
            # While this part runs nothing else has its devices; the others' work must fit into what is left.
            good &= block.rows[:, KINDS] * seconds + self._elsewhere(part) <= self.capacity[0] * self.limit
        return block.take(np.flatnonzero(good))

    def _typical(self, block: Block, part: int) -> Block:
        """Name ends by what they are connected to outside: labels whose ends differ in nothing else are comparable."""
        shape = block.shape
        head = self._representative(part, shape.head, outgoing=False)
        tail = head if shape.single else self._representative(part, shape.tail, outgoing=True)
        if shape.single:
            # One phase is both ends, so it is replaced only by one that looks alike from both sides.
            head = tail = self._representative(part, shape.head, outgoing=None)
        block.shape = Shape(shape.single, head, tail, shape.head_curve, shape.tail_curve, shape.ways)
        return block

    def _representative(self, part: int, end: int, outgoing: bool | None) -> int:
        """The first set of stages met whose edges out of (or into, or both) the part are those of this one."""
        known = self.representatives.get((part, outgoing, end))
        if known is not None:
            return known
        edges = []
        for source, target, edge in self.edges:
            if outgoing is not False and end >> source & 1 and not part >> target & 1:
                edges.append((target, edge.barrier, edge.seconds))
            if outgoing is not True and end >> target & 1 and not part >> source & 1:
                edges.append((-1 - source, edge.barrier, edge.seconds))
        first = self.representatives.setdefault((part, outgoing, frozenset(edges)), end)
        self.representatives[part, outgoing, end] = first
        return first

    def _elsewhere(self, part: int) -> float:
        if part not in self.elsewhere:
            rest = (area for index, area in enumerate(self.least_area) if not part >> index & 1)
            self.elsewhere[part] = sum(rest)
        return self.elsewhere[part]

    def _published(self, first: int, second: int, spatial: bool) -> float:
        return sum(
            sync.apart if spatial else sync.together
            for source, target, sync in self.syncs
            if (source & first and target & second) or (target & first and source & second)
        )

    def _crowded(self) -> bool:
        """Whether all stages together may be too much for a device; if not, nothing is ever parked."""
        for kind in self.kinds:
            most = sum(max((o.active_bytes for o in own if o.kind == kind), default=0) for own in self.options)
            if most > self.workload.memory.get(kind, np.inf):
                return True
        return False

    def _least_areas(self) -> list[float]:
        """Per stage the fewest device-seconds of any size that is fast enough."""
        least = []
        for stage, own in zip(self.workload.stages, self.options, strict=True):
            times = [(option.devices, stage.alone(option, self.chunks)) for option in own]
            least.append(min((devices * time for devices, time in times if time <= self.limit), default=0.0))
        return least


def _pruned(blocks: Iterable[Block], slack: float, chunks: int) -> list[Block]:
    """The labels worth keeping, those of one shape in one block."""
    made: dict[Shape, list[Block]] = {}
    for block in blocks:
        made.setdefault(block.shape, []).append(block)
    return [best_of(joined(own), slack, chunks) for own in made.values()]


def _ancestors(count: int, edges: Sequence[tuple[int, int, Any]]) -> list[int]:
    """Per stage the bit set of all stages that it needs, directly or not."""
    before = [0] * count
    for _ in range(count):
        for source, target, _ in edges:
            before[target] |= before[source] | 1 << source
    return before


def _all_cuts(everything: int, before: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
    """Return every set that a search meets with all its cuts into an order ideal and the rest."""
    cuts: dict[int, list[tuple[int, int]]] = {}
    waiting = [everything]
    while waiting:
        part = waiting.pop()
        if part in cuts:
            continue
        cuts[part] = []
        for ideal in ideals(part, before):
            cuts[part].append((ideal, part & ~ideal))
            waiting += (ideal, part & ~ideal)
    return cuts


def ideals(part: int, before: Sequence[int]) -> Iterator[int]:
    """All order ideals of a set of stages but the empty and the whole one: subsets that need nothing of the rest.

    Args:
        part: bit set of stages.
        before: per stage the bit set of those that it needs.
    """
    members = [index for index in range(len(before)) if part >> index & 1]
    subset = (part - 1) & part
    while subset:
        if all(not before[index] & part & ~subset for index in members if subset >> index & 1):
            yield subset
        subset = (subset - 1) & part
