"""The planner: which stages share devices, which have their own, in which order and how finely data moves.

Flows in: a `Workload`. Flows out: the best plan, and the best of each mode, as trees with their seconds.

A plan is a tree: stages one after the other on the same devices, or side by side on devices of their own. Every tree is
a sequence of phases with barriers between, each a pipeline of stages on disjoint devices. Side by side, the last phase
of the first part and the first of the second become one phase, unless a barrier edge runs between.

A `Search` goes over all structures with given sizes per stage, as sets of stages, smallest first. A set is cut into a
part that needs nothing of the rest (an order ideal) and the rest, in every possible way; the parts follow each other on
the same devices or stand side by side on disjoint ones. Of each set only labels are kept that no other is better than
in every respect, and that may still be within a plan that beats the best so far (`pareto.py`).

`plan` gives searches their sizes: all of them if they are few; otherwise those that balance stages, then a thinned set,
and round by round those around the best so far, which bounds the next search.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rlinf.placement import pareto
from rlinf.placement.plan import EdgePlan, Mode, Plan, Prediction, RolePlan
from rlinf.placement.workload import Edge, Option, Stage, Workload


@dataclass(frozen=True, slots=True)
class Leaf:
    """One stage at one of its sizes."""

    stage: Stage
    """The stage that runs."""
    option: Option
    """How."""
    resident: bool = True
    """Stays loaded for the whole step; otherwise it is loaded for its phase and parked after it."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two parts of a plan."""

    how: Literal["temporal", "spatial"]
    """One after the other on the same devices, or side by side on disjoint ones."""
    first: Tree
    """The part that comes first, or feeds the other."""
    second: Tree
    """The part that comes second, or is fed."""


Tree = Leaf | Pair
Phase = tuple[Leaf, ...]


def leaves(tree: Tree) -> Iterator[Leaf]:
    """All stages of a tree, from left to right."""
    if isinstance(tree, Leaf):
        yield tree
    else:
        yield from leaves(tree.first)
        yield from leaves(tree.second)


def phases(tree: Tree, edges: Sequence[Edge]) -> list[Phase]:
    """Return the phases of a tree: what follows each other, and in each of them what runs at once."""
    if isinstance(tree, Leaf):
        return [(tree,)]
    first, second = phases(tree.first, edges), phases(tree.second, edges)
    if tree.how == "temporal" or barred(first[-1], second[0], edges):
        return first + second
    return [*first[:-1], first[-1] + second[0], *second[1:]]


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
    for part in (tree.first, tree.second):
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
    offsets: dict[str, list[float]] = {}
    for name in _in_order(by_name, inside):
        leaf = by_name[name]
        arrivals = [_moved(offsets[edge.source], edge.seconds / chunks) for edge in inside if edge.target == name]
        if leaf.stage.release is not None and not arrivals:
            offsets[name] = [share * leaf.option.seconds for share in leaf.stage.release.chunks(chunks)]
            continue
        now, times = 0.0, []
        for k in range(chunks):
            now = max([now, *(times_in[k] for times_in in arrivals)]) + leaf.stage.chunk(leaf.option, chunks)
            times.append(now)
        offsets[name] = times
    return max(times[-1] for times in offsets.values())


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
    first, second = width(tree.first), width(tree.second)
    join = max if tree.how == "temporal" else int.__add__
    return {kind: join(first.get(kind, 0), second.get(kind, 0)) for kind in first | second}


def layout(tree: Tree, start: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Return the devices of each stage, counted from `start` of their kind; parts side by side in order."""
    if isinstance(tree, Leaf):
        first = start.get(tree.option.kind, 0)
        return {tree.stage.name: tuple(range(first, first + tree.option.devices))}
    shift = width(tree.first) if tree.how == "spatial" else {}
    after = {kind: start.get(kind, 0) + shift.get(kind, 0) for kind in {*start, *shift}}
    return layout(tree.first, start) | layout(tree.second, after)


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


Allowed = Literal["any", "collocated", "disaggregated", "hybrid"]
"""Modes that a search may find: all, only turns, only disjoint devices, only mixtures of the two."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan that the planner found."""

    tree: Tree
    """Stages, where they run and in which order."""
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
        yield from _hows(tree.first)
        yield from _hows(tree.second)


class Search:
    """One search: fixed sizes, chunks and mode, and a limit that plans must beat."""

    def __init__(
        self,
        workload: Workload,
        options: list[list[Option]],
        chunks: int,
        mode: Allowed,
        best: Candidate | None,
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
        self.curves = pareto.Curves.of(chunks, dict(curves))
        self.representatives: dict[Any, int] = {}
        self.crowded = self._crowded()
        sizes = [
            [(stage.alone(one, chunks), self.kinds.index(one.kind), one.devices) for one in own]
            for stage, own in zip(workload.stages, options, strict=True)
        ]
        self.remainder = pareto.Remainder(sizes, self.before, self.capacity, self.limit)
        self.cuts = _all_cuts(self.everything, self.before)

    def run(self) -> Candidate | None:
        """Return the best plan below the limit, if there is one."""
        cuts = self.cuts
        lefts = {first_part for own in cuts.values() for first_part, _ in own}
        rights = {right for own in cuts.values() for _, right in own}
        slowest = 0.0 if self.limit == np.inf else self.limit * self.slack
        slack = slowest / (4 * len(self.names))  # each part of a plan is pruned twice, and there are fewer than twice V
        table: dict[int, list[pareto.Block]] = {}
        units: dict[int, list[pareto.Block]] = {}  # without those that are in turns: (A, B), C is found as A, (B, C)

        def settled(blocks: Iterable[pareto.Block], part: int) -> Iterator[pareto.Block]:
            for block in blocks:
                yield self._typical(pareto.settle(block, head=part not in rights, tail=part not in lefts), part)

        for part in sorted(cuts, key=lambda part: (part.bit_count(), part)):
            if part.bit_count() == 1:
                table[part] = units[part] = self._pruned(settled([self._leaf(part)], part), part, slack)
                continue
            units[part] = self._pruned(settled(self._side_by_side(part, cuts[part], table), part), part, slack)
            turns = self._in_turns(part, cuts[part], units, table)
            table[part] = self._pruned(itertools.chain(units[part], settled(turns, part)), part, slack)
        return self._best(table[self.everything])

    def _best(self, blocks: Sequence[pareto.Block]) -> Candidate | None:
        if self.mode == "hybrid":
            blocks = [block for block in blocks if block.shape.ways == 3]
        best = min(((b.seconds().min(), i) for i, b in enumerate(blocks) if len(b.rows)), default=None)
        if best is None:
            return None
        block = blocks[best[1]]
        tree = self._tree(block, int(block.seconds().argmin()))
        return Candidate(tree, self.chunks, replay(tree, self.workload, self.chunks), float(best[0]))

    def _tree(self, block: pareto.Block, index: int) -> Tree:
        parent, first, second = (int(number) for number in block.origin[index])
        parent_block = block.parents[parent]
        if isinstance(parent_block, Leaf):
            return parent_block
        spatial, one, two = parent_block
        return Pair("spatial" if spatial else "temporal", self._tree(one, first), self._tree(two, second))

    def _leaf(self, part: int) -> pareto.Block:
        index = part.bit_length() - 1
        stage = self.workload.stages[index]
        labels, rows = [], []
        for option in self.options[index]:
            for resident in (True, False) if self.crowded and option.parked_bytes < option.active_bytes else (True,):
                labels.append(Leaf(stage, option, resident))
                rows.append(self._leaf_row(labels[-1]))
        origin = np.zeros((len(labels), 3), dtype=np.int64)
        origin[:, 0] = range(len(labels))
        curve = pareto.EVEN if stage.release is None else index
        table = np.array(rows) if rows else np.zeros((0, pareto.KINDS + 3 * len(self.kinds)))
        return self._within(pareto.Block(pareto.Shape(True, part, part, curve, curve), table, origin, list(labels)))

    def _leaf_row(self, leaf: Leaf) -> pareto.Array:
        row = np.zeros(pareto.KINDS + 3 * len(self.kinds))
        option = leaf.option
        phase = row[pareto.HEAD]
        phase[pareto.WHOLE] = leaf.stage.alone(option, self.chunks)
        chunk = leaf.stage.chunk(option, self.chunks)
        if leaf.stage.release is None:
            phase[pareto.LATENCY] = phase[pareto.PERIOD] = chunk
        else:
            phase[pareto.SOURCE], phase[pareto.SOURCE_CHUNK] = option.seconds, chunk
        if not leaf.resident:
            phase[pareto.ONLOAD], phase[pareto.OFFLOAD] = option.onload_seconds, option.offload_seconds
        if option.devices:
            at = pareto.KINDS + 3 * self.kinds.index(option.kind)
            stays = option.active_bytes if leaf.resident else option.parked_bytes
            row[at : at + 3] = option.devices, stays, option.active_bytes
        return row

    def _side_by_side(
        self, part: int, cuts: Sequence[tuple[int, int]], table: Mapping[int, list[pareto.Block]]
    ) -> Iterator[pareto.Block]:
        if self.mode != "collocated":
            for first, second in cuts:
                for one, other in itertools.product(table[first], table[second]):
                    yield from self._pair(part, first, second, one, other, spatial=True)

    def _in_turns(
        self,
        part: int,
        cuts: Sequence[tuple[int, int]],
        units: Mapping[int, list[pareto.Block]],
        table: Mapping[int, list[pareto.Block]],
    ) -> Iterator[pareto.Block]:
        if self.mode != "disaggregated":
            for first, second in cuts:
                for one, other in itertools.product(units[first], table[second]):
                    yield from self._pair(part, first, second, one, other, spatial=False)

    def _pair(
        self,
        part: int,
        first: int,
        second: int,
        first_block: pareto.Block,
        second_block: pareto.Block,
        *,
        spatial: bool,
    ) -> Iterator[pareto.Block]:
        one, two = first_block.least(), second_block.least()
        if (max(one, two) if spatial else one + two) > self.limit:
            return
        tails = first_block.shape.head if first_block.shape.single else first_block.shape.tail
        meeting = (
            [e for s, t, e in self.edges if tails >> s & 1 and second_block.shape.head >> t & 1] if spatial else []
        )
        barred = any(edge.barrier for edge in meeting)
        pairs = self._promising(first_block, second_block, spatial, barred)
        if not len(pairs[0]):
            return
        ways = (
            (first_block.shape.ways | second_block.shape.ways | (2 if spatial else 1)) if self.mode == "hybrid" else 0
        )
        link = max((edge.seconds for edge in meeting), default=0.0) / self.chunks if meeting else None
        feeds = any(tails >> s & 1 and t == second_block.shape.head_curve for s, t, _ in self.edges)
        junction = pareto.Junction(spatial, link, feeds, barred, self._published(first, second, spatial))
        yield self._within(pareto.compose(first_block, second_block, pairs, junction, self.curves, ways))

    def _promising(self, first: pareto.Block, second: pareto.Block, spatial: bool, barred: bool) -> tuple[Any, Any]:
        """Numbers of the labels whose pairs may be worth composing: enough devices, and not surely too slow."""
        one, two = first.seconds()[:, None], second.seconds()[None, :]
        seconds = np.maximum(one, two) if spatial and not barred else one + two
        good = seconds <= self.limit
        join = np.add if spatial else np.maximum
        for at in range(len(self.kinds)):
            column = pareto.KINDS + 3 * at
            count = join(first.rows[:, column][:, None], second.rows[:, column][None, :])
            good &= count <= self.capacity[at]
        lefts, rights = np.nonzero(good)
        return lefts, rights

    def _within(self, block: pareto.Block) -> pareto.Block:
        """Keep the labels that fit into memory and may still beat the limit."""
        good = block.seconds() <= self.limit
        for at in range(len(self.kinds)):
            column = pareto.KINDS + 3 * at
            good &= (block.rows[:, column] <= self.capacity[at]) & (block.rows[:, column + 2] <= self.memory[at])
        return block.where(good)

    def _pruned(self, blocks: Iterable[pareto.Block], part: int, slack: float) -> list[pareto.Block]:
        """The labels worth keeping, those of one shape in one block."""
        by_shape: dict[pareto.Shape, list[pareto.Block]] = {}
        for block in blocks:
            by_shape.setdefault(block.shape, []).append(block)
        kept = []
        for own in by_shape.values():
            block = pareto.joined(own)
            if self.limit < np.inf:
                block = block.where(self.remainder.open(block, part))
            if len(block.rows):
                kept.append(pareto.best_of(block, slack, self.chunks))
        return kept

    def _typical(self, block: pareto.Block, part: int) -> pareto.Block:
        """Name ends by what they are connected to outside: labels whose ends differ in nothing else are comparable."""
        shape = block.shape
        head = self._representative(part, shape.head, outgoing=False)
        tail = head if shape.single else self._representative(part, shape.tail, outgoing=True)
        if shape.single:
            # One phase is both ends, so it is replaced only by one that looks alike from both sides.
            head = tail = self._representative(part, shape.head, outgoing=None)
        block.shape = pareto.Shape(shape.single, head, tail, shape.head_curve, shape.tail_curve, shape.ways)
        return block

    def _representative(self, part: int, end: int, outgoing: bool | None) -> int:
        """The first set of stages met whose edges out of (or into, or both) the part are those of this one."""
        cached = self.representatives.get((part, outgoing, end))
        if cached is not None:
            return cached
        edges = []
        for source, target, edge in self.edges:
            if outgoing is not False and end >> source & 1 and not part >> target & 1:
                edges.append((target, edge.barrier, edge.seconds))
            if outgoing is not True and end >> target & 1 and not part >> source & 1:
                edges.append((-1 - source, edge.barrier, edge.seconds))
        first = self.representatives.setdefault((part, outgoing, frozenset(edges)), end)
        self.representatives[part, outgoing, end] = first
        return first

    def _published(self, first: int, second: int, spatial: bool) -> float:
        return sum(
            sync.apart if spatial else sync.together
            for source, target, sync in self.syncs
            if (source & first and target & second) or (target & first and source & second)
        )

    def _crowded(self) -> bool:
        """True if all stages together may be too much for a device; if not, nothing is ever parked."""
        for kind in self.kinds:
            most = sum(max((o.active_bytes for o in own if o.kind == kind), default=0) for own in self.options)
            if most > self.workload.memory.get(kind, np.inf):
                return True
        return False


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


_COARSE = 8
"""Sizes per stage in a first search of plans in turns only, whose best bounds the next."""
_FINE = {1: 128, 2: 128, 3: 128, 4: 64, 5: 32, 6: 16}
"""Sizes per stage in the widest search, by number of stages: about what a quarter of a second of one core allows."""
_FINE_BEYOND, _LEAST_FINE = 8, 4
"""The same for more stages."""
_BESIDE = (-2, -1, 0, 1, 2)
"""Sizes around the best so far that are tried next: its count times the ratio of the round to these powers."""
_ROUNDS = ((1.5, 0.01), (1.2, 0.005), (1.08, 0.002), (1.03, 0.002))
"""Ratio of neighbouring sizes, and by how much a round must improve the plan."""
_NEAR = 2
"""Rounds that are left out where sizes are balanced already."""
_REPEATS = 4
"""Times that a round is repeated while it improves the plan."""
TOLERANCE = 2e-3
"""A plan is not looked for that would be better by less: costs are not known so well. 0 finds the very best."""


def plan(
    workload: Workload, mode: Allowed = "any", *, tolerance: float = TOLERANCE, sizes: int | None = None
) -> Candidate | None:
    """Find the best plan.

    With at most `sizes` sizes per stage everything is tried, and the plan is the best within `tolerance`. Otherwise it
    begins with sizes that balance stages, tries so many per stage, spread evenly, and every structure again with sizes
    around the best ones, in ever smaller steps. That promises nothing; on 20 workloads of seven unlike stages and 1,024
    devices it ended at most 0.3 % above what a search with 32 sizes per stage finds.

    Args:
        workload: what to plan.
        mode: restrict it to stages that only take turns, that never share a device, or to mixtures of the two.
        tolerance: relative seconds by which it may be worse than the best of the sizes that were tried.
        sizes: None: 128 for up to three stages, fewer for more.

    Returns:
        The plan; None if there is none of this mode that fits.
    """
    sizes = sizes or max(_LEAST_FINE, _FINE.get(len(workload.stages), _FINE_BEYOND) // len(workload.devices))
    everything = [list(workload.usable(stage)) for stage in workload.stages]
    options = [_thinned(own, workload, sizes) for own in everything]
    whole = all(len(some) == len(own) for some, own in zip(options, everything, strict=True))
    best = _first_plan(workload, everything, mode, tolerance)
    if best is None and mode == "any":  # a first limit for next to nothing: everything in turns
        coarse = [_thinned(own, workload, _COARSE) for own in everything]
        best = Search(workload, coarse, workload.chunks[0], "collocated", None, 0.0).run()
    allowed = tolerance if whole else max(tolerance, 0.01)  # refinement goes below a percent, the wide search need not
    wide = None
    for chunks in workload.chunks:
        wide = Search(workload, options, chunks, mode, wide or best, allowed).run() or wide
    if whole or wide is None:
        return wide or best
    return _refined(wide, workload, everything, mode, tolerance)


def _first_plan(
    workload: Workload, everything: Sequence[Sequence[Option]], mode: Allowed, tolerance: float
) -> Candidate | None:
    """A good plan for little: sizes that balance phases, then refined. It is the limit of the search that tries all."""
    best: Candidate | None = None
    for chunks in workload.chunks:
        sizes = pareto.balance(workload, chunks, 1 if mode == "collocated" else len(workload.stages))
        if sizes is not None:
            best = Search(workload, [[size] for size in sizes], chunks, mode, best, 0.0).run() or best
    return None if best is None else _refined(best, workload, everything, mode, tolerance, _ROUNDS[_NEAR:])


def _refined(
    best: Candidate,
    workload: Workload,
    everything: Sequence[Sequence[Option]],
    mode: Allowed,
    tolerance: float,
    rounds: Sequence[tuple[float, float]] = _ROUNDS,
) -> Candidate:
    """Search every structure again, with sizes around the best ones, in ever smaller steps."""
    for ratio, improvement in rounds:
        for _ in range(_REPEATS):
            now = _by_stage(best.tree, workload)
            near = [_near(leaf, own, ratio, workload) for leaf, own in zip(now, everything, strict=True)]
            better = Search(workload, near, best.chunks, mode, best, min(improvement, tolerance)).run()
            if better is None:
                break
            best = better
    return best


def best_of_each_mode(workload: Workload, **how: Any) -> dict[Mode, Candidate]:
    """Return the best plan of each mode that has one, as `plan` finds it."""
    plans = {mode: plan(workload, mode, **how) for mode in ("collocated", "disaggregated", "hybrid")}
    # A single stage is "collocated" however it was looked for.
    return {mode: one for mode, one in plans.items() if one is not None and one.mode == mode}


def _thinned(options: Sequence[Option], workload: Workload, size: int) -> list[Option]:
    """For each kind of device keep about `size` counts, densest where they are small; the most that fits among them."""
    options_left: list[Option] = []
    for kind in sorted({option.kind for option in options}):
        own = [option for option in options if option.kind == kind]
        limit = workload.devices.get(kind, 0)
        targets = [limit * step / size for step in range(1, size + 1)]
        targets += [limit / size / 2, limit / size / 4, limit / size / 8]  # a judge needs a small share of a cluster
        options_left += _closest(own, targets) if len({option.devices for option in own}) > size else own
    return options_left


def _closest(options: Sequence[Option], targets: Sequence[float]) -> list[Option]:
    """For each target all options with the largest count that is not above it, or the smallest there is."""
    counts = sorted({option.devices for option in options})
    sizes = {max((count for count in counts if count <= target), default=counts[0]) for target in targets}
    return [option for option in options if option.devices in sizes]


def _by_stage(tree: Tree, workload: Workload) -> list[Leaf]:
    by_name = {leaf.stage.name: leaf for leaf in leaves(tree)}
    return [by_name[stage.name] for stage in workload.stages]


def _near(leaf: Leaf, options: Sequence[Option], ratio: float, workload: Workload) -> list[Option]:
    """Sizes around the one of a plan, and all devices, for those who would rather take turns; on other kinds, sizes
    around the one that takes about as long."""
    now, sizes = leaf.option, list[Option]()
    for kind in sorted({option.kind for option in options}):
        own = [option for option in options if option.kind == kind]
        here = kind == now.kind
        middle = now.devices if here else min(own, key=lambda option: abs(option.seconds - now.seconds)).devices
        powers = _BESIDE if here else _BESIDE[1:-1]
        sizes += _closest(own, [middle * ratio**power for power in powers] + [workload.devices.get(kind, 0)])
    return sizes
