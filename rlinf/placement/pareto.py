"""Pareto labels of partial plans as arrays, and the sizes from which the planner's search starts.

A label holds the costs of a partial plan that anything composed with it depends on. Flows in: labels of two parts.
Flows out: labels of the two composed (`compose`), and the ones worth keeping (`best_of`). A part is a sequence of
phases. Whatever is put around it can change its first and its last phase only, so a label holds these two, the sum of
everything between, and devices and memory by kind: one row of an array `[labels, columns]`.

    0         seconds between head and tail, and of what is always paid
    1 … 7     head: makespan of its released source, chunk seconds of that source, latency of the rest, slowest period
              of the rest, seconds of the whole phase, to onload before it, to offload after it
    8 … 14    tail: the same; unused where there is only one phase
    15 …      per kind: devices; bytes that stay on each of them; the most bytes on any of them

`balance` finds sizes that start a search: those of stages side by side, in the best sequence of such phases. A phase is
a set of stages on all devices of their kind, each just large enough to take no longer than the slowest: that time is
found by bisection. The best sequence is the shortest way from no stage done to all done. It leaves out memory and
switches, links, tails that overlap with what follows; so its sizes start a search and its seconds are not used.

`Remainder` tells by the sizes of all stages which labels of a part may be within a plan that beats the best so far.
A part runs through its phases, and others can join the first and the last of them only, on devices that it leaves
free. A stage X outside of it that joins one makes it longer by at least d(X), the seconds of its quickest size on free
devices less those of the phase; otherwise it has a phase elsewhere, which takes at least u(X), the seconds of its
quickest size. So stages add at least

    a = min over z >= 0 of  z + the largest u(X) of those with d(X) > z

What comes before the part can join its first phase only, what comes after it the last, and their phases elsewhere are
different ones. If first and last are two, what both sides add are different seconds, too:

    T >= s + a(before) + a(after)

And devices have no more seconds than there are. Let a second of a device of kind k cost w_k / N_k, with weights w that
add up to 1, so that all devices cost T in a step of T seconds. With e the seconds of the phases that can be joined, f
the cost of a second of all devices that are free in them, and b_k the fewest device-seconds of X on kind k among sizes
that are quick enough, whatever w is,

    T >= s - f e + sum over X of min over k of b_k w_k / N_k
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlinf.placement.workload import Option, Stage, Workload


def balance(workload: Workload, chunks: int, most: int) -> list[Option] | None:
    """Return a size for each stage, in the order of the workload's; None if no such plan fits the devices.

    Args:
        workload: what to plan.
        chunks: of a step.
        most: stages of a phase: 1 finds the best plan in turns.
    """
    stages = workload.stages
    number = {stage.name: index for index, stage in enumerate(stages)}
    needs = [0] * len(stages)
    apart = [0] * len(stages)  # by a barrier, so they cannot be in one phase
    for edge in workload.edges:
        needs[number[edge.target]] |= 1 << number[edge.source]
        if edge.barrier:
            apart[number[edge.target]] |= 1 << number[edge.source]
    ladders = [_ladder(stage, workload, chunks) for stage in stages]
    everything = (1 << len(stages)) - 1
    best: dict[int, tuple[float, int, list[Option]]] = {0: (0.0, 0, [])}
    phases: dict[int, tuple[float, list[Option]] | None] = {}
    for done in range(everything):  # whatever leads to a set has fewer bits, so a smaller number
        if done not in best:
            continue
        rest = everything & ~done
        for phase in _subsets(rest):
            members = [index for index in range(len(stages)) if phase >> index & 1]
            if len(members) > most or any(needs[i] & rest & ~phase or apart[i] & phase for i in members):
                continue
            if phase not in phases:
                sources = [i for i in members if stages[i].release is not None and not needs[i] & phase]
                phases[phase] = _phase(members, sources[:1], ladders, needs, workload, chunks)
            if (sized := phases[phase]) is not None:
                seconds = best[done][0] + sized[0]
                if done | phase not in best or seconds < best[done | phase][0]:
                    best[done | phase] = seconds, done, sized[1]
    if everything not in best:
        return None
    sizes: dict[int, Option] = {}
    at = everything
    while at:
        _, before, options = best[at]
        members = [index for index in range(len(stages)) if (at & ~before) >> index & 1]
        sizes |= zip(members, options, strict=True)
        at = before
    return [sizes[index] for index in range(len(stages))]


def _subsets(members: int) -> Iterator[int]:
    """All subsets of a set of bits but the empty one, each as bits; those with high ones first."""
    subset = members
    while subset:
        yield subset
        subset = (subset - 1) & members


_TRIED = 24
"""Sizes of a source that are tried in a phase."""
_TRIES = 200
"""Stages that are put somewhere before several kinds of device are taken to have no room: seven stages fit after less
than a tenth of it, or not at all."""
Ladder = dict[str, list[tuple[float, Option]]]
"""By kind of device, seconds and sizes: each takes longer than the one before it, and fewer devices."""
_seconds = itemgetter(0)


def _ladder(stage: Stage, workload: Workload, chunks: int) -> Ladder:
    ladder: Ladder = {}
    usable = workload.usable(stage)
    for seconds, devices, index in sorted((stage.alone(one, chunks), one.devices, i) for i, one in enumerate(usable)):
        steps = ladder.setdefault(usable[index].kind, [])
        if not steps or devices < steps[-1][1].devices:
            steps.append((seconds, usable[index]))
    return ladder


def _phase(
    members: Sequence[int],
    sources: Sequence[int],
    ladders: Sequence[Ladder],
    needs: Sequence[int],
    workload: Workload,
    chunks: int,
) -> tuple[float, list[Option]] | None:
    """Seconds and sizes of stages side by side, in the order of `members`; None if they do not fit.

    Behind a source whose items leave it late, how large the others should be depends on how large it is, so a number of
    sizes is tried: max over k of R(k) + latency + (K - k)·period.
    """
    others = [index for index in members if index not in sources]
    if not sources or not others:
        sized = _even([ladders[index] for index in others or members], workload.devices)
        if sized is None:
            return None
        slowest = max(seconds for seconds, _ in sized)
        path = _longest({index: seconds for index, (seconds, _) in zip(others or members, sized, strict=True)}, needs)
        return (path + (chunks - 1) * slowest) / chunks, [option for _, option in sized]
    release = workload.stages[sources[0]].release
    assert release is not None
    late = release.chunks(chunks)
    steps = [step for own in ladders[sources[0]].values() for step in own]
    best: tuple[float, list[Option]] | None = None
    for _, source in steps[:: -(-len(steps) // _TRIED)]:
        free = dict(workload.devices)
        free[source.kind] = free.get(source.kind, 0) - source.devices
        sized = _even([ladders[index] for index in others], free)
        if sized is None:
            continue
        period = max(own for own, _ in sized) / chunks
        latency = _longest({index: own for index, (own, _) in zip(others, sized, strict=True)}, needs) / chunks
        seconds = max(share * source.seconds + latency + (chunks - k) * period for k, share in enumerate(late, 1))
        if best is None or seconds < best[0]:
            options = dict(zip(others, (option for _, option in sized), strict=True)) | {sources[0]: source}
            best = seconds, [options[index] for index in members]
    return best


def _longest(seconds: Mapping[int, float], needs: Sequence[int]) -> float:
    """The longest way through some stages along what they need."""
    ends: dict[int, float] = {}

    def end(index: int) -> float:
        if index not in ends:
            ends[index] = seconds[index] + max((end(i) for i in seconds if needs[index] >> i & 1), default=0.0)
        return ends[index]

    return max(end(index) for index in seconds)


def _even(ladders: Sequence[Ladder], devices: Mapping[str, int]) -> list[tuple[float, Option]] | None:
    """Seconds and sizes of stages that all take at most the least time for which there are devices."""
    times = sorted({seconds for ladder in ladders for steps in ladder.values() for seconds, _ in steps})
    low, high = 0, len(times)
    fitting: list[tuple[float, Option]] | None = None
    while low < high:
        middle = (low + high) // 2
        sizes = _within(ladders, times[middle], devices)
        if sizes is None:
            low = middle + 1
        else:
            high, fitting = middle, sizes
    return fitting


def _within(ladders: Sequence[Ladder], seconds: float, devices: Mapping[str, int]) -> list[tuple[float, Option]] | None:
    """Sizes of stages that all take no longer, each the smallest on its kind; None if none is found that fits.

    Which stage goes to which kind is searched depth first: the stage that wants most goes first, to the kind on which
    it wants least. With one kind of device there is nothing to choose.
    """
    quick = [
        sorted(
            (steps[at - 1] for steps in ladder.values() if (at := bisect_right(steps, seconds, key=_seconds))),
            key=lambda step: step[1].devices,
        )
        for ladder in ladders
    ]
    if not all(quick) or min(devices.values(), default=0) < 0:
        return None
    order = sorted(range(len(quick)), key=lambda stage: -quick[stage][0][1].devices)
    rest = [*itertools.accumulate((quick[stage][0][1].devices for stage in reversed(order)), initial=0)]
    free, sizes, tries = dict(devices), dict[int, tuple[float, Option]](), iter(range(_TRIES))

    def settle_from(place: int) -> bool:
        if place == len(order):
            return True
        if rest[len(order) - place] > sum(free.values()) or next(tries, None) is None:
            return False
        stage = order[place]
        for step in quick[stage]:
            option = step[1]
            if free.get(option.kind, 0) >= option.devices:
                free[option.kind] = free.get(option.kind, 0) - option.devices
                sizes[stage] = step
                if settle_from(place + 1):
                    return True
                free[option.kind] += option.devices
        return False

    return [sizes[stage] for stage in range(len(quick))] if settle_from(0) else None


Array = NDArray[np.float64]
BETWEEN = 0
HEAD = slice(1, 8)
TAIL = slice(8, 15)
KINDS = 15
"""First column of devices and memory, three per kind."""
SOURCE, SOURCE_CHUNK, LATENCY, PERIOD, WHOLE, ONLOAD, OFFLOAD = range(7)
"""Columns inside of a phase."""
_AT_ONCE = 256
"""Labels that are compared with each other at once: more takes more comparisons, fewer more calls."""
EVEN = -1
"""In place of a release curve's number: no source with one."""


_PER_CHUNK = np.zeros(KINDS + 1, dtype=bool)
_PER_CHUNK[[start + own for start in (HEAD.start, TAIL.start) for own in (PERIOD, SOURCE_CHUNK)]] = True
"""Per column whether it counts once per chunk; the last stands for all of devices and memory."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Properties that labels must have in common to be compared."""

    single: bool
    """There is one phase only, in the columns of the head."""
    head: int
    """Bit set of the stages in the first phase; 0 once nothing can join it any more."""
    tail: int
    """Of the last phase."""
    head_curve: int = EVEN
    """Number of the stage whose release curve drives the first phase."""
    tail_curve: int = EVEN
    """Of the last phase."""
    ways: int = 0
    """Bit 0: something is composed in time; bit 1: in space. Only where a search has to tell."""


@dataclass(slots=True, eq=False)
class Block:
    """Labels of one set of stages and one shape, and where each came from."""

    shape: Shape
    """Of every label."""
    rows: Array
    """`[labels, columns]`."""
    origin: NDArray[np.int64]
    """`[labels, 3]`: index into `parents`, and the labels of left and right part; for a leaf, its variant."""
    parents: list[Any] = field(default_factory=list)
    """Parents that `origin` points into."""

    _seconds: Array | None = None
    _least: float | None = None

    def seconds(self) -> Array:
        """Seconds of the part alone, `[labels]`."""
        if self._seconds is None:
            total = self.rows[:, BETWEEN] + cost(self.rows[:, HEAD])
            self._seconds = total if self.shape.single else total + cost(self.rows[:, TAIL])
        return self._seconds

    def least(self) -> float:
        """Seconds of the quickest label; infinite if there is none."""
        if self._least is None:
            self._least = float(self.seconds().min(initial=np.inf))
        return self._least

    def where(self, good: NDArray[np.bool_]) -> Block:
        """Return only the labels that are good."""
        return self if good.all() else self.take(np.flatnonzero(good))

    def take(self, labels: NDArray[Any]) -> Block:
        """Return only these labels."""
        seconds = None if self._seconds is None else self._seconds[labels]
        return Block(self.shape, self.rows[labels], self.origin[labels], self.parents, seconds)


@dataclass(frozen=True, slots=True)
class Curves:
    """Release curves in the form that phases need."""

    chunks: int
    """Chunks of a step."""
    corners: dict[int, tuple[tuple[int, float], ...]]
    """Per stage number: (k, share of the makespan) where chunk k = 1 … leaves, only corners of the upper hull."""

    @classmethod
    def of(cls, chunks: int, shares: dict[int, Sequence[float]]) -> Curves:
        """Keep the corners: max over k of G·r(k) - k·t is taken at one of them for any G and t."""
        return cls(chunks, {stage: tuple(_hull(list(enumerate(curve, 1)))) for stage, curve in shares.items()})

    def whole(self, curve: int, phase: Array) -> Array:
        """Seconds of a pipelined phase: max over k of R(k) + latency + (K - k)·period (flow shop with arrivals R)."""
        latency, period = phase[:, LATENCY], phase[:, PERIOD]
        if curve == EVEN:
            return latency + (self.chunks - 1) * period
        source = phase[:, SOURCE]
        best = np.full(len(phase), -np.inf)
        for k, share in self.corners[curve]:
            np.maximum(best, source * share + latency + (self.chunks - k) * period, out=best)
        return best


def cost(phase: Array) -> Array:
    """Seconds of a phase with its switches, `[labels]`."""
    return phase[:, WHOLE] + phase[:, ONLOAD] + phase[:, OFFLOAD]


def merge(
    first: Array,
    second: Array,
    first_curve: int,
    second_curve: int,
    link: float | None,
    feeds: bool,
    curves: Curves,
) -> tuple[Array, int]:
    """Let two phases run as one, on disjoint devices.

    Args:
        first: head or tail columns `[labels, 7]`.
        second: of what it may feed.
        first_curve: stage whose release drives the first, or EVEN.
        second_curve: of the second.
        link: seconds to move one chunk from one to the other; None: no edge runs between.
        feeds: an edge runs from the first to the stage whose curve drives the second.
        curves: of the search.

    Returns:
        The columns of the merged phase, and its curve.
    """
    latency, period = second[:, LATENCY], second[:, PERIOD]
    source, curve = first, first_curve
    if second_curve != EVEN and feeds:
        # Its input arrives late, so its curve says nothing any more: it counts as even.
        latency = latency + second[:, SOURCE_CHUNK]
        period = np.maximum(period, second[:, SOURCE_CHUNK])
    elif second_curve != EVEN and first_curve != EVEN:
        # Two curves side by side: a label has room for one, so the other lets everything go at its end.
        latency = latency + second[:, SOURCE]
    elif second_curve != EVEN:
        source, curve = second, second_curve
    merged = np.empty(first.shape)
    merged[:, SOURCE] = source[:, SOURCE]
    merged[:, SOURCE_CHUNK] = source[:, SOURCE_CHUNK]
    merged[:, PERIOD] = np.maximum(np.maximum(first[:, PERIOD], period), link or 0.0)
    if link is None:
        merged[:, LATENCY] = np.maximum(first[:, LATENCY], latency)
    else:
        merged[:, LATENCY] = first[:, LATENCY] + latency + link
    merged[:, ONLOAD] = np.maximum(first[:, ONLOAD], second[:, ONLOAD])
    merged[:, OFFLOAD] = np.maximum(first[:, OFFLOAD], second[:, OFFLOAD])
    merged[:, WHOLE] = curves.whole(curve, merged)
    return merged, curve


@dataclass(frozen=True, slots=True)
class Junction:
    """Edges and publications between two parts that are composed."""

    spatial: bool
    """On disjoint devices; otherwise one after the other."""
    link: float | None
    """Seconds of one chunk between the phases that meet; None: no edge between them."""
    feeds: bool
    """An edge runs to the stage whose release curve drives the second of them."""
    barred: bool
    """A barrier runs between the phases that meet, so they follow each other even on disjoint devices."""
    always: float
    """Seconds to add, for what the two publish to each other."""


def compose(
    first: Block, second: Block, pairs: tuple[Any, Any], junction: Junction, curves: Curves, ways: int
) -> Block:
    """Compose labels of two parts pair by pair.

    Args:
        first: comes first, or feeds.
        second: comes second, or is fed.
        pairs: numbers of both parts' labels, equally long.
        junction: of the two.
        curves: of the search.
        ways: how the result is composed, for its shape.
    """
    spatial = junction.spatial
    x, y = first.rows[pairs[0]], second.rows[pairs[1]]
    one, two = first.shape, second.shape
    rows = np.zeros(x.shape)
    rows[:, BETWEEN] = x[:, BETWEEN] + y[:, BETWEEN] + junction.always
    _add_devices(rows, x, y, spatial)
    meets, meets_curve, meets_set = (HEAD, one.head_curve, one.head) if one.single else (TAIL, one.tail_curve, one.tail)
    ends, ends_curve, ends_set = (HEAD, two.head_curve, two.head) if two.single else (TAIL, two.tail_curve, two.tail)
    if not spatial or junction.barred:
        rows[:, HEAD], rows[:, TAIL] = x[:, HEAD], y[:, ends]
        if not one.single:
            rows[:, BETWEEN] += cost(x[:, TAIL])
        if not two.single:
            rows[:, BETWEEN] += cost(y[:, HEAD])
        shape = Shape(False, one.head, ends_set, one.head_curve, ends_curve, ways)
        return Block(shape, rows, _origin(pairs), [(spatial, first, second)])
    middle, curve = merge(x[:, meets], y[:, HEAD], meets_curve, two.head_curve, junction.link, junction.feeds, curves)
    joined = meets_set | two.head
    if one.single and two.single:
        rows[:, HEAD] = middle
        shape = Shape(True, joined, joined, curve, curve, ways)
    elif one.single:
        rows[:, HEAD], rows[:, TAIL] = middle, y[:, TAIL]
        shape = Shape(False, joined, two.tail, curve, two.tail_curve, ways)
    elif two.single:
        rows[:, HEAD], rows[:, TAIL] = x[:, HEAD], middle
        shape = Shape(False, one.head, joined, one.head_curve, curve, ways)
    else:
        rows[:, HEAD], rows[:, TAIL] = x[:, HEAD], y[:, TAIL]
        rows[:, BETWEEN] += cost(middle)
        shape = Shape(False, one.head, two.tail, one.head_curve, two.tail_curve, ways)
    return Block(shape, rows, _origin(pairs), [(spatial, first, second)])


def settle(block: Block, *, head: bool, tail: bool) -> Block:
    """Add the head or the tail to what lies between, once nothing can join it: fewer columns tell labels apart."""
    if not (head or tail):
        return block
    rows, shape = block.rows.copy(), block.shape
    head_set, tail_set, head_curve, tail_curve = shape.head, shape.tail, shape.head_curve, shape.tail_curve
    if shape.single and head:
        rows[:, TAIL], rows[:, HEAD] = rows[:, HEAD], 0.0
    if head:
        rows[:, BETWEEN] += cost(rows[:, HEAD])
        rows[:, HEAD], head_set, head_curve = 0.0, 0, EVEN
    if tail:
        rows[:, BETWEEN] += cost(rows[:, TAIL])
        rows[:, TAIL], tail_set, tail_curve = 0.0, 0, EVEN
    return Block(
        Shape(False, head_set, tail_set, head_curve, tail_curve, shape.ways), rows, block.origin, block.parents
    )


def joined(blocks: Sequence[Block]) -> Block:
    """Put blocks of one shape together."""
    if len(blocks) == 1:
        return blocks[0]
    parents: list[Any] = []
    origins = []
    for block in blocks:
        shifted = block.origin.copy()
        shifted[:, 0] += len(parents)
        origins.append(shifted)
        parents += block.parents
    return Block(blocks[0].shape, np.concatenate([b.rows for b in blocks]), np.concatenate(origins), parents)


_STRONGEST = 16
"""Labels of a front that others are compared with first; then with eight times as many, and so on."""


def best_of(block: Block, seconds: float, chunks: int) -> Block:
    """Drop every label that another one is at least as good as in every column.

    Args:
        block: labels of one shape.
        seconds: by so much a plan around a label may be slower with the one that is kept in its place.
        chunks: of a step, for the columns that count once per chunk.
    """
    rows = block.rows
    if len(rows) < 2:
        return block
    differ = np.flatnonzero(rows.max(axis=0) > rows.min(axis=0))
    if not len(differ):
        return block.take(np.array([0]))
    columns, slack = rows[:, differ], _slack(differ, seconds, chunks)
    if len(differ) == 1:
        return block.take(np.array([columns[:, 0].argmin()]))
    # A label that is better everywhere has the smaller sum, so only those before a label in that order can drop it.
    order = np.argsort((columns / columns.max(axis=0).clip(1e-300)).sum(axis=1), kind="stable")
    columns = np.ascontiguousarray(columns[order].T)
    front = np.empty(0, dtype=np.int64)
    for start in range(0, len(order), _AT_ONCE):
        fresh = np.arange(start, min(start + _AT_ONCE, len(order)))
        drops = np.zeros(len(front), dtype=np.int64)
        first, most = 0, _STRONGEST
        while first < len(front) and len(fresh):  # nearly all are dropped by the first few, which dropped the most
            covered = _covered(columns[:, front[first : first + most]], columns[:, fresh], slack)
            drops[first : first + most] = covered.sum(axis=1)
            fresh = fresh[~covered.any(axis=0)]
            first, most = first + most, most * 8
        front = front[np.argsort(-drops, kind="stable")]
        front = np.concatenate([front, fresh[_greedy(_covered(columns[:, fresh], columns[:, fresh], slack))]])
    return block.take(order[np.sort(front)])


def _covered(by: Array, these: Array, slack: Array) -> NDArray[np.bool_]:
    """True where a label is at least as good as another in every column: `[columns, a]`, `[columns, b]` to `[a, b]`."""
    covered: NDArray[np.bool_] = by[0][:, None] <= these[0] + slack[0]
    for one, other, least in zip(by[1:], these[1:], slack[1:], strict=True):
        covered &= one[:, None] <= other + least
    return covered


def _greedy(covered: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Numbers of labels that none is kept for; each that is kept drops those after it that it covers."""
    picks = []
    open_labels = np.ones(len(covered), dtype=bool)
    at = 0
    while at < len(open_labels):
        picks.append(at)
        open_labels[at:] &= ~covered[at, at:]
        at += 1 + int(open_labels[at + 1 :].argmax()) if open_labels[at + 1 :].any() else len(open_labels)
    return np.array(picks, dtype=np.int64)


def _slack(differ: NDArray[np.int64], seconds: float, chunks: int) -> Array:
    """Per column that differs, how much worse a label may be so that no plan around it gets slower by `seconds`."""
    timed = differ < KINDS
    slack = np.where(timed, seconds / max(1, int(timed.sum())), 0.0)
    return np.where(_PER_CHUNK[np.minimum(differ, KINDS)], slack / chunks, slack)


def _origin(pairs: tuple[Any, Any]) -> NDArray[np.int64]:
    origin = np.zeros((len(pairs[0]), 3), dtype=np.int64)
    origin[:, 1], origin[:, 2] = pairs
    return origin


def _add_devices(rows: Array, x: Array, y: Array, spatial: bool) -> None:
    for at in range(KINDS, rows.shape[1], 3):
        count, stay, most = at, at + 1, at + 2
        if spatial:
            rows[:, count] = x[:, count] + y[:, count]
            rows[:, stay] = np.maximum(x[:, stay], y[:, stay])
            rows[:, most] = np.maximum(x[:, most], y[:, most])
        else:
            rows[:, count] = np.maximum(x[:, count], y[:, count])
            rows[:, stay] = x[:, stay] + y[:, stay]
            rows[:, most] = np.maximum(x[:, most] + y[:, stay], y[:, most] + x[:, stay])


def _hull(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Upper hull of points in order of their first coordinate."""
    hull: list[tuple[int, float]] = []
    for point in points:
        while len(hull) > 1 and _turn(hull[-2], hull[-1], point) >= 0:
            hull.pop()
        hull.append(point)
    return hull


def _turn(a: tuple[int, float], b: tuple[int, float], c: tuple[int, float]) -> float:
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])


_ROUNDING = 1e-9
"""Relative seconds by which sums may be off."""
_NEVER = 1e300
"""Seconds of what does not fit."""


class Remainder:
    """Tables of the least that stages take.

    Args:
        sizes: of each stage: seconds alone, number of the kind, devices.
        before: per stage the bit set of all that it needs.
        capacity: devices of each kind.
        limit: seconds that a plan must beat.
    """

    def __init__(
        self,
        sizes: Sequence[Sequence[tuple[float, int, int]]],
        before: Sequence[int],
        capacity: Array,
        limit: float,
    ) -> None:
        self.before, self.capacity, self.limit = before, capacity, limit * (1 + _ROUNDING)
        self._outside: dict[int, tuple[list[int], list[int], list[int]]] = {}  # by part
        kinds = len(capacity)
        every = [(*size, stage) for stage, own in enumerate(sizes) for size in own]
        self.times = np.unique([seconds for seconds, *_ in every])
        self.counts = np.unique([0, *(devices for _, _, devices, _ in every)])
        # by kind, stage, and number of the shortest times: the least share of all devices' seconds
        self.areas = np.full((kinds, len(sizes), len(self.times) + 1), _NEVER)
        # by kind, stage, and number of the smallest counts: the least seconds
        self.quickest = np.full((kinds, len(sizes), len(self.counts)), _NEVER)
        for seconds, kind, devices, stage in every:
            at = kind, stage, int(np.searchsorted(self.times, seconds)) + 1
            self.areas[at] = min(self.areas[at], seconds * devices / max(capacity[kind], 1))
            at = kind, stage, int(np.searchsorted(self.counts, devices))
            self.quickest[at] = min(self.quickest[at], seconds)
        np.minimum.accumulate(self.areas, axis=2, out=self.areas)
        np.minimum.accumulate(self.quickest, axis=2, out=self.quickest)
        self.alone = self.quickest[:, :, -1].min(axis=0)
        self.weights = [np.full(kinds, 1 / kinds), *(np.eye(kinds) if kinds > 1 else ())]

    def open(self, block: Block, members: int) -> NDArray[np.bool_]:
        """Tell which labels of a part may be within a plan that beats the limit.

        Args:
            block: labels of it.
            members: bit set of its stages.
        """
        seconds, single = block.seconds(), block.shape.single
        left = self.limit - seconds
        good: NDArray[np.bool_] = left >= 0
        before, after, either = self._outside.get(members) or self._sides(members)
        others = np.array([*before, *after, *either], dtype=np.int64)
        if not len(others) or self._is_fed(block.shape.head_curve, members):
            return good
        head = cost(block.rows[:, HEAD])
        tail = head if single else cost(block.rows[:, TAIL])
        both = np.maximum(head, tail)
        ends = np.stack([head] * len(before) + [tail] * len(after) + [both] * len(either))
        free = self.capacity[:, None] - block.rows[:, KINDS::3].T
        at = np.searchsorted(self.counts, free, side="right") - 1
        by_kind = (own[others][:, column] for own, column in zip(self.quickest, at, strict=True))
        quickest = functools.reduce(np.minimum, by_kind)
        longer, alone = np.maximum(quickest - ends, 0.0), self.alone[others]
        first, last = slice(len(before)), slice(len(before), len(before) + len(after))
        groups = [(longer[part], alone[part]) for part in (first, last)]
        added = _added(groups) if single else _added(groups[:1]) + _added(groups[1:])
        good &= added <= left
        rest = slice(last.stop, None)
        good &= _added([(longer[rest], alone[rest])]) <= left
        labels = np.flatnonzero(good)
        joinable = head if single else head + tail
        good[labels] = self._have_room(others, left[labels], ends[:, labels], free[:, labels] * joinable[labels])
        return good

    def _have_room(self, others: NDArray[np.int64], left: Array, ends: Array, unused: Array) -> NDArray[np.bool_]:
        """Tell where the device-seconds of other stages fit into what is left and the device-seconds that are unused.

        Args:
            others: stages.
            left: `[labels]` seconds.
            ends: `[stages, labels]` seconds of the phases that they can join.
            unused: `[kinds, labels]` device-seconds there.
        """
        quick = np.searchsorted(self.times, left + ends, side="right")
        areas = [np.stack([own[other][at] for other, at in zip(others, quick, strict=True)]) for own in self.areas]
        good = np.ones(len(left), dtype=bool)
        for weights in self.weights:
            least = functools.reduce(np.minimum, (own * weight for own, weight in zip(areas, weights, strict=True)))
            good &= least.sum(axis=0) - (weights / np.maximum(self.capacity, 1)) @ unused <= left
        return good

    def _sides(self, members: int) -> tuple[list[int], list[int], list[int]]:
        """Stages outside of a part: those that it needs, those that need it, and the others."""
        needed = 0
        for stage, needs in enumerate(self.before):
            needed |= needs if members >> stage & 1 else 0
        others = [stage for stage in range(len(self.before)) if not members >> stage & 1]
        after = [stage for stage in others if self.before[stage] & members]
        before = [stage for stage in others if needed >> stage & 1]
        either = [stage for stage in others if stage not in before and stage not in after]
        self._outside[members] = before, after, either
        return self._outside[members]

    def _is_fed(self, curve: int, members: int) -> bool:
        """True if a first phase is driven by a stage that may yet be fed: it would count as even then, and quicker."""
        return curve != EVEN and bool(self.before[curve] & ~members)


def _added(groups: Sequence[tuple[Array, Array]]) -> Array:
    """Seconds that stages add at least, each group in phases of its own or all in one that grows.

    Args:
        groups: `[stages, labels]` by how much each makes that phase longer, and `[stages]` what it takes elsewhere.
    """
    growths = np.concatenate([np.zeros((1, groups[0][0].shape[1])), *(longer for longer, _ in groups)])
    total = growths.copy()
    for longer, alone in groups:
        if len(alone):
            total += ((longer[None] > growths[:, None]) * alone[:, None]).max(axis=1)
    least: Array = total.min(axis=0)
    return least
