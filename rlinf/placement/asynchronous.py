"""Plans and step times of asynchronous training, where generation for later steps overlaps learning of this one.

Flows in: a plan as a tree, its workload, and how many steps ahead generation may be. Flows out: seconds of a step, and
what sets them.

Batch k + s + 1 is begun once batch k is learned from and its weights are published (s: the staleness). So a step takes,
on average, the most of

* each device's work per batch: stages that share devices add up, stages on devices of their own do not;
* the way of one batch from its prompts to published weights, T of the synchronous step, over the s + 1 batches that are
  on it at once: the largest mean weight of a cycle in the timed event graph of the flow.

Both are exact for stages on devices of their own that take chunks in order (`tests/placement/asynchronous` holds them
against an event simulation). Generation that decodes all of its answers at once is no such stage. A token of it takes
a + b·n with n answers at work; so a batch alone takes S = L + q: L, its longest answer alone (`Option.longest`), and q,
work that all share. Begun early, later answers fill the places of those that are done, but slow the longest one down.
By Little's law n = (a·tokens / P) / (1 - q/P) on average, so the longest takes L·P / (P - q); with f, what follows on
it, that must fit into the s + 1 steps until its batch is learned from: (s + 1)·P = L·P / (P - q) + f.

The best plan of a flow with work in flight between steps: which stages share devices, and how many each has.

In the long run only loads and the way of one batch count (`Steady`), so a plan is a partition: stages of one part
take turns on its devices, parts are side by side. Sizes come from bisection: of the least seconds for which every part
finds enough devices; then they are moved from part to part while that helps. Where there are few, all are tried.

The staleness that pays: the best plan's seconds at several, and a sentence.

The gain from devices that change hands within a step: learning goes on wherever answers are done.

A device of the source is free once all of its items have left: with m items on each, of which a share F(t) has left, a
share F(t)^m of the devices is (items are taken to be independent). What learns is divided among all devices that it
has, as replicas can be that meet at the optimizer step alone, up to the largest size that was planned with: nobody
knows what more would bring. So a step takes the least T such that what left the
source after any time t can still be learned: the integral from t to T of the devices there are must be at least the
device-seconds of learning that are left.
It is a calculation without loading, parking and links, so an upper limit of the gain, and never below the bound.

The gain from engines that join a run. Work is shared out by whoever has rows free, so d devices that generate and n
engines that joined take as long as d + n devices, and learning gets nothing from them: what must follow an answer is
what more engines run up against. They are taken to be as fast as the devices that generation was measured on, and to
have new weights at once: one on a slow network brings less.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import combinations, pairwise

from rlinf.placement.bound import Bound, bound, quickest
from rlinf.placement.grammar import PlacementError
from rlinf.placement.hardware import Devices
from rlinf.placement.plan import Mode
from rlinf.placement.planner import Candidate, Leaf, Pair, Tree, ideals, layout, leaves, plan, replay, to_plan, width
from rlinf.placement.profile import Profile
from rlinf.placement.workload import Option, Stage, Workload
from rlinf.placement.workload import workload as workload_of


@dataclass(frozen=True, slots=True)
class Steady:
    """A step in the long run."""

    busiest: float
    """Seconds of work per step of the device that has the most, with its share of the tail."""
    loop: float
    """Seconds from prompts to published weights, divided among the batches that are on the way."""

    @property
    def seconds(self) -> float:
        """Seconds of a step, on average."""
        return max(self.busiest, self.loop)


def steady(tree: Tree, workload: Workload, chunks: int, staleness: int) -> Steady:
    """Calculate a step in the long run.

    Args:
        tree: the plan.
        workload: what it plans.
        chunks: into how many a step is cut.
        staleness: versions by which the weights that make an answer may be older than those that learn from it, so the
            batches that are begun early; 0 is the synchronous step.
    """
    latency = replay(tree, workload, chunks)
    if not staleness:
        return Steady(0.0, latency)
    where = layout(tree, dict.fromkeys(workload.devices, 0))
    parts = {leaf.stage.name: leaf for leaf in leaves(tree)}
    alone = {name for name in parts if not any(_meet(name, other, where, parts) for other in parts if other != name)}
    busy = {name: load(leaf, chunks, staleness, alone=name in alone) for name, leaf in parts.items()}
    for name, seconds in _publishing(where, parts, workload):
        busy[name] += seconds
    # Devices are ranges without gaps, so the most stages meet where one of them begins.
    busiest = max(
        busy[name] + sum(busy[other] for other in parts if other != name and _meet(name, other, where, parts, at=0))
        for name in parts
    )
    filled = [parts[name].option for name in alone if parts[name].option.longest]
    return Steady(
        busiest, max((_loop(option, latency, staleness + 1) for option in filled), default=latency / (staleness + 1))
    )


def _loop(option: Option, latency: float, batches: int) -> float:
    """The least P for which a batch with company takes no more than so many steps: batches·P = L·P / (P - q) + f."""
    shared, after = option.seconds - option.longest, latency - option.seconds
    half = (batches * shared + option.longest + after) / 2
    return (half + math.sqrt(max(0.0, half**2 - batches * after * shared))) / batches


def load(leaf: Leaf, chunks: int, staleness: int, *, alone: bool) -> float:
    """Seconds of a step for which a stage needs its devices, switches included.

    Args:
        leaf: the stage.
        chunks: of a step.
        staleness: see `steady`.
        alone: no other stage is on its devices, so that it keeps them while its longest items go on. A stage that
            takes turns gives them up only when its items are done.
    """
    option = leaf.option
    switches = 0.0 if leaf.resident else option.onload_seconds + option.offload_seconds
    filled = option.longest * staleness / (staleness + 1) if alone else 0.0
    return leaf.stage.alone(option, chunks) - filled + switches


def _meet(name: str, other: str, where: Mapping[str, tuple[int, ...]], parts: Mapping[str, Leaf], at: int = -1) -> bool:
    """True if another stage has devices of this one; with `at`: whether it has its first."""
    own, theirs = where[name], where[other]
    if not own or not theirs or parts[name].option.kind != parts[other].option.kind:
        return False
    return theirs[0] <= own[at] and own[0] <= theirs[-1]


def _publishing(
    where: Mapping[str, tuple[int, ...]], parts: Mapping[str, Leaf], workload: Workload
) -> Iterator[tuple[str, float]]:
    """Seconds that publishing takes of its source's devices, and of its target's: once, if both are on the same."""
    for sync in workload.sync:
        if _meet(sync.source, sync.target, where, parts):
            yield sync.target, sync.together
        else:
            yield sync.source, sync.apart
            yield sync.target, sync.apart


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
        """The kind of its devices."""
        return self.leaves[0].option.kind

    @property
    def devices(self) -> int:
        """That it takes."""
        return max(leaf.option.devices for leaf in self.leaves)

    @property
    def tree(self) -> Tree:
        """Its stages in turns."""
        trees: list[Tree] = list(self.leaves)
        return reduce(lambda first, second: Pair("temporal", first, second), trees)


Sizes = Sequence[Sequence[Part]]
"""Per part of a partition, its sizes: more devices and less load from one to the next."""


def plan_ahead(workload: Workload, staleness: int) -> dict[Mode, Candidate]:
    """Return the best plan of each mode that has one.

    Args:
        workload: what to plan.
        staleness: versions by which weights that generate may be behind, at least 1.
    """
    best: dict[Mode, Candidate] = {}
    for parts in _partitions(workload):
        for chunks in workload.chunks:
            sizes = [_sizes(stages, workload, chunks, staleness) for stages in parts]
            if not all(sizes):
                continue
            candidate = _sized(sizes, workload, chunks, staleness)
            if candidate is not None and (
                candidate.mode not in best or candidate.seconds < best[candidate.mode].seconds
            ):
                best[candidate.mode] = candidate
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
    deviceless = sum(1 << i for i, stage in enumerate(stages) if not any(one.devices for one in stage.options))
    everything = (1 << len(stages)) - 1
    done: set[frozenset[int]] = set()

    def cut(rest: int) -> Iterator[tuple[int, ...]]:
        for part in (*sorted(ideals(rest, before), key=lambda part: (part & -part, part)), rest):  # as stages are named
            if part & deviceless and part.bit_count() > 1 and part != everything:
                continue
            if part == rest:
                yield (part,)
            else:
                yield from ((part, *others) for others in cut(rest & ~part))

    for parts in cut(everything):
        if (key := frozenset(parts)) not in done:
            done.add(key)
            members = ([index for index in range(len(stages)) if part >> index & 1] for part in parts)
            yield tuple(tuple(stages[i] for i in sorted(own, key=lambda i: (depth[i], i))) for own in members)


def _sizes(stages: Sequence[Stage], workload: Workload, chunks: int, staleness: int) -> list[Part]:
    """Return the sizes that a part may have: with each number of devices, every stage at its quickest; only what more
    devices improve."""
    sizes: list[Part] = []
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
                sizes.append(part)
    return sizes


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


def _sized(sizes: Sizes, workload: Workload, chunks: int, staleness: int) -> Candidate | None:
    """The best sizes of a partition."""

    def judged(parts: Sequence[Part]) -> tuple[float, Sequence[Part]]:
        return steady(_tree(parts), workload, chunks, staleness).seconds, parts

    if math.prod(map(len, sizes)) <= EVERYTHING:
        fitting = [judged(parts) for parts in itertools.product(*sizes) if _fit(parts, workload.devices)]
        best = min(fitting, key=lambda one: one[0], default=None)
    else:
        balanced = _balance(sizes, workload.devices)
        best = None if balanced is None else judged(balanced)
        for ratio in RATIOS if best is not None else ():
            for _ in range(MOST_STEPS):
                assert best is not None
                near = [judged(parts) for parts in _moved(best[1], sizes, ratio) if _fit(parts, workload.devices)]
                better = min(near, key=lambda one: one[0], default=best)
                if better[0] >= best[0] * (1 - 1e-9):
                    break
                best = better
    return None if best is None else Candidate(_tree(best[1]), chunks, best[0], best[0])


def _tree(parts: Iterable[Part]) -> Tree:
    return reduce(lambda first, second: Pair("spatial", first, second), (part.tree for part in parts))


def _fit(parts: Sequence[Part], devices: Mapping[str, int]) -> bool:
    need = width(_tree(parts))
    return all(count <= devices.get(kind, 0) for kind, count in need.items())


def _balance(sizes: Sizes, devices: Mapping[str, int]) -> Sequence[Part] | None:
    """The parts whose largest load is the least for which there are devices."""
    loads = sorted({part.load for own in sizes for part in own})
    low, high, fitting = 0, len(loads), None
    while low < high:
        middle = (low + high) // 2
        quick = [[part for part in own if part.load <= loads[middle]] for own in sizes]
        smallest = [_smallest(own) for own in quick]
        fitting_parts = next((parts for parts in itertools.product(*smallest) if _fit(parts, devices)), None)
        if fitting_parts is None:
            low = middle + 1
        else:
            high, fitting = middle, fitting_parts
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


TRIED = (0, 1, 2, 4)
"""Values of staleness for which the best plan is looked for."""
PAYS = 0.05
"""By how much more staleness must quicken a step: weights that are older teach less per sample."""


@dataclass(frozen=True, slots=True)
class AtStaleness:
    """The best plan at one staleness."""

    staleness: int
    """Versions by which weights that generate may be behind."""
    candidate: Candidate
    """The plan, with its seconds in the long run."""
    bound: Bound
    """Lower bound that no plan could beat."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The seconds of a step at several values of staleness, and the recommended one."""

    rows: tuple[AtStaleness, ...]
    """In ascending order, the first of them synchronous."""
    staleness: int
    """The one to take: more of it quickens a step by less than `PAYS`."""

    @property
    def text(self) -> str:
        """Such as "staleness 1 gains 31 %, 2 gains 2 % more, 4 gains nothing more: take 1"."""
        gained = gains({row.staleness: row.candidate.seconds for row in self.rows}, "gains")
        return f"staleness {gained}: {f'take {self.staleness}' if self.staleness else 'stay synchronous'}"


def gains(seconds: Mapping[int, float], verb: str) -> str:
    """How much quicker steps are with more of something, such as "1 gains 31 %, 2 gains 2 % more".

    Args:
        seconds: of a step by how much there is of it, ascending from 0.
        verb: that says so.
    """
    parts = []
    for (before, longer), (more, shorter) in pairwise(seconds.items()):
        gain = longer / shorter - 1
        words = f"{gain:.0%}".replace("%", " %") if gain >= 0.005 else "nothing"
        parts.append(f"{more} {verb} {words}" + (" more" if before else ""))
    return ", ".join(parts)


def that_pays(seconds: Mapping[int, float]) -> int:
    """The amount up to which more of something quickens a step by `PAYS` each time; `seconds` as in `gains`."""
    best, *more = seconds
    for one in more:
        if seconds[best] / seconds[one] - 1 >= PAYS:
            best = one
    return best


def recommend(workload: Workload, tried: Sequence[int] = TRIED) -> Recommendation | None:
    """Plan at several values of staleness.

    Args:
        workload: what to plan; `Option.longest` says which part of generation is its tail.
        tried: ascending, from 0 on.

    Returns:
        None where nothing fits, or where there is nothing to begin early: less than two stages.
    """
    if len(workload.stages) < 2:
        return None
    rows = list(_rows(workload, tried))
    if not rows or rows[0].staleness:
        return None
    return Recommendation(tuple(rows), that_pays({row.staleness: row.candidate.seconds for row in rows}))


def _rows(workload: Workload, tried: Iterable[int]) -> Iterable[AtStaleness]:
    """The best at each staleness: never slower than with less, since nothing needs to be begun early."""
    best: Candidate | None = None
    for staleness in tried:
        candidates = list(plan_ahead(workload, staleness).values()) if staleness else [plan(workload)]
        there = [one for one in (best, *candidates) if one is not None]
        if there:
            best = min(there, key=lambda one: one.seconds)
            yield AtStaleness(staleness, best, bound(workload, staleness=staleness))


@dataclass(frozen=True, slots=True)
class Handover:
    """A synchronous step with devices that change hands, beside one without."""

    mode: Mode
    """Of the plan."""
    seconds: float
    """With."""
    without: float
    """As the plan is."""

    @property
    def gain(self) -> float:
        """By which share more steps are taken in the same time, at least 0."""
        return max(0.0, self.without / self.seconds - 1)


def handover(candidate: Candidate, workload: Workload, items: int, least: float = 0.0) -> Handover | None:
    """Calculate a step whose devices change hands.

    Args:
        candidate: the plan; all of its stages in turns on the same devices, or all on devices of their own.
        workload: what it plans.
        items: of a step.
        least: seconds below which no step can be, see `bound`.

    Returns:
        None where nothing is known of when items leave, or where some stages share devices and others do not.
    """
    parts = [leaf for leaf in leaves(candidate.tree) if leaf.option.devices]
    fed = {edge.target for edge in workload.edges}
    feeds = {edge.source for edge in workload.edges}
    source = next((leaf for leaf in parts if leaf.stage.release is not None and leaf.stage.name not in fed), None)
    placement = to_plan(candidate.tree, workload, candidate.chunks, None, None)
    places = [set(role.devices) for role in placement.roles.values() if role.devices]
    meet = {bool(one & other) for one, other in combinations(places, 2)}
    if source is None or source.stage.release is None or len(meet) != 1:
        return None
    own = 0
    if meet == {True}:
        fillers = [leaf for leaf in parts if leaf is not source]
    else:
        fillers = [leaf for leaf in parts if leaf.stage.name not in feeds]
        own = sum(leaf.option.devices for leaf in fillers)
    work = sum(leaf.option.devices * leaf.stage.alone(leaf.option, candidate.chunks) for leaf in fillers)
    shares = source.stage.release.shares
    each = max(1.0, items / source.option.devices)
    times = [0.0, *(share * source.option.seconds for share in shares)]
    most = max(option.devices for leaf in fillers for option in workload.usable(leaf.stage))
    free = [source.option.devices * (number / len(shares)) ** each for number in range(len(times))]
    count = [min(own + devices, float(most)) for devices in free]
    seconds = _least(
        times, count, [at * source.option.seconds for at in source.stage.release.chunks(candidate.chunks)], work
    )
    return Handover(placement.mode, min(max(seconds, least), candidate.seconds), candidate.seconds)


def _least(times: list[float], count: list[float], leaving: list[float], work: float) -> float:
    """The least T: for every chunk, that and all that leave later fit between its leaving and T.

    Args:
        times: ascending from 0, at which there are more devices than before.
        count: devices from then on.
        leaving: when each chunk leaves, ascending.
        work: device-seconds of all chunks.
    """
    done = [0.0]
    for (start, end), devices in zip(pairwise(times), count, strict=False):
        done.append(done[-1] + (end - start) * devices)

    def until(time: float) -> float:
        at = bisect_right(times, time) - 1
        return done[at] + (time - times[at]) * count[at]

    def when(amount: float) -> float:
        at = bisect_right(done, amount) - 1
        while not count[at]:  # nobody works yet: it is done when somebody begins
            at += 1
        return times[at] + max(0.0, amount - done[at]) / count[at]

    return max(when(until(time) + work * (len(leaving) - k) / len(leaving)) for k, time in enumerate(leaving))


ROLE = "rollout"
"""The stage that engines join."""
_JOINED = "joined"
"""Kind of device that those who joined are to the bound: what else a plan has cannot run on them."""


@dataclass(frozen=True, slots=True)
class WithJoiners:
    """The best plan with so many engines that joined."""

    count: int
    """How many."""
    candidate: Candidate
    """The plan, with its seconds in the long run."""
    bound: Bound
    """Lower bound that no plan with so many could beat."""
    alone: float
    """Seconds of a step by the same plan while none of them is there."""


def plan_joined(
    profile: Profile,
    devices: Devices,
    counts: Iterable[int],
    items: int | None = None,
    *,
    extrapolate: bool = False,
    staleness: int = 0,
) -> tuple[WithJoiners, ...]:
    """Plan with several numbers of engines that joined, and without any.

    Args:
        profile: of the flow.
        devices: of the run, of one kind.
        counts: how many engines, in any order.
        items: of one step; None: as many as were profiled.
        extrapolate: use sizes outside of what was measured.
        staleness: steps that work is begun early.

    Raises:
        PlacementError: it cannot be planned; generation was not measured on so many devices, or nobody can join it.
    """
    if ROLE not in profile.stages:
        raise PlacementError(
            [f"no engine can join: the profile has no stage {ROLE!r}, but {', '.join(profile.stages)}"]
        )
    if len(devices.counts) > 1:
        raise PlacementError(["engines that join are planned for devices of one kind: name one number of devices"])
    base = workload_of(profile, devices, items=items, extrapolate=extrapolate)
    rows = []
    for count in sorted({0, *counts}):
        more = {kind: own + count for kind, own in devices.counts.items()}
        wide = workload_of(profile, replace(devices, counts=more, multiple=1), items=items, extrapolate=extrapolate)
        eased = _with_help(base, wide.stage(ROLE), count, items or profile.items)
        best = _best(eased, staleness)
        alone = steady(_with(best.tree, base.stage(ROLE)), base, best.chunks, staleness).seconds
        rows.append(WithJoiners(count, best, _bound(eased, wide.stage(ROLE), count, staleness), alone))
    return tuple(rows)


def advice(rows: Sequence[WithJoiners]) -> str:
    """Such as "engines that join: 2 gain 31 %, 4 gain nothing more: take 2"."""
    seconds = {row.count: row.candidate.seconds for row in rows}
    pays = that_pays(seconds)
    return f"engines that join: {gains(seconds, 'gain')}: {f'take {pays}' if pays else 'none pays'}"


def _with_help(base: Workload, wide: Stage, count: int, items: int) -> Workload:
    """The workload whose generation takes as long on its own devices as on so many more: up to one for each item."""
    together = {option.devices: option for option in wide.options}
    most = max(together, default=0)

    def eased(option: Option) -> Option | None:
        size = option.devices + count
        if (both := together.get(min(size, most) if most >= items else size)) is None:
            return None
        return replace(option, seconds=both.seconds, chunk_seconds=both.chunk_seconds, longest=both.longest)

    own = base.stage(ROLE)
    options = tuple(one for option in own.options if option.devices and (one := eased(option)) is not None)
    if not options:
        raise PlacementError(
            [
                f"stage {ROLE!r} is known on up to {most} devices, {count} engines that join and one device are asked "
                "for: profile it there, or allow extrapolation, whose error bars are wide"
            ]
        )
    stages = (replace(own, options=options) if stage.name == ROLE else stage for stage in base.stages)
    return replace(base, stages=tuple(stages))


def _best(eased: Workload, staleness: int) -> Candidate:
    candidates = plan_ahead(eased, staleness).values() if staleness else [plan(eased)]
    there = [one for one in candidates if one is not None]
    if not there:
        raise PlacementError(["no plan fits: use more devices, or a smaller batch or model"])
    return min(there, key=lambda one: one.seconds)


def _with(tree: Tree, own: Stage) -> Tree:
    """A plan with generation on its own devices alone."""
    if not isinstance(tree, Leaf):
        return replace(tree, first=_with(tree.first, own), second=_with(tree.second, own))
    if tree.stage.name != ROLE:
        return tree
    return replace(tree, stage=own, option=next(one for one in own.options if one.devices == tree.option.devices))


def _bound(eased: Workload, wide: Stage, count: int, staleness: int) -> Bound:
    """The bound of a workload that is helped, whose device-seconds those who joined do a part of.

    To them, as to the run's own devices, generation costs what it costs at its most efficient size: the sum over kinds
    of devices in `bound` lets a stage be divided between kinds in the way that is best.
    """
    limit = bound(eased, staleness=staleness)
    (own,) = eased.devices
    everything = [
        Option(1, size * quickest(eased, wide, one), kind, longest=size * one.longest, least=one.least)
        for one in wide.options
        if (size := one.devices)
        for kind in (own, _JOINED)
    ]
    stages = (replace(stage, options=tuple(everything)) if stage.name == ROLE else stage for stage in eased.stages)
    work = bound(
        replace(eased, stages=tuple(stages), devices={**eased.devices, _JOINED: count}, sync=()), staleness=staleness
    )
    switches = limit.memory - limit.area
    return replace(limit, area=work.area, memory=work.area + switches, device=work.device)
