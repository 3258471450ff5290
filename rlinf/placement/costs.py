"""Costs of each stage and accounts of each step, read off the runtime's spans.

Flows in: a `Lap` (who was busy when, what flowed where, what was loaded and parked) and the devices of every actor.
Flows out: per device what it did and per stage its time (`MeasuredStep`), a `Profile` pooled over the steps of a run,
and how far each step was from its lower bound (`Efficiency`).

A stage is a role, all its endpoints together; roles that feed each other in a loop, such as environment and policy, are
one stage of the name "env+policy". Time of an actor without devices is beside the devices: it is known, and costs none.
Without leases two roles may be busy on one device at the same time; each second then counts 1/k for each of k roles,
so that the roles of a device never add up to more than the time that it worked.

The efficiency E = T_LB / T is judged by what stages cost on the sizes that were ever measured, and by no more than they
cost in this very step: a step that was quicker than its profile proves that it can be. So no part is negative and E is
at most 1. Where the profile is that of the run itself, it follows that

* interference is what this step's work took above the run's own median: a neighbour on the machine, or longer answers;
* scaling is 0 until some stage has run on another number of devices;
* what a whole run could do better, such as a slow kernel, is not seen: it is in the bound.

Saturation takes a stage that was measured on few devices to scale perfectly to all. The longest item alone and forced
switches are not known from a step: the bound's `tail` is 0 and `memory` is its `area`.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np

from rlinf.placement import bound
from rlinf.placement.hardware import KIND
from rlinf.placement.profile import BESIDE, Footprint, Profile, Release, StageProfile, Timing, save
from rlinf.placement.workload import Edge, condense, loops
from rlinf.runtime.observe.spans import Flow, Lap, Moved

TAKING = ("load", "load_switch", "follow")
"""Endpoints that take new weights: what flows into them is no edge."""
PUBLISHING = frozenset(("weights", "model_weights", "load_ready", "load_abandon", *TAKING))
"""Endpoints whose time is weight synchronisation."""
MOVING = frozenset(("onload", "offload"))
"""Calls of the lease manager, whose time is in a lap's moves."""
ASIDE = frozenset(
    "save restore export_state import_state state samples shapes version scored learned optimizer_steps computes "  # noqa: SIM905
    "load_decided weigh watch ask live in_flight answering settled drop split forget abort pause resume work_next "
    "work_drained work_take joint_ready joint_over joint_start joint_given forget_gradients open_model close_model "
    "save_model load_model takes_adapters unload keep_past joinable let_copies_part sums overwrite why_alone".split()
)
"""Endpoints of our roles that do no stage's work: checkpoints, what people read, ranks that wait for each other, and
what tells of its parts as other endpoints, or runs in a replica that joined. Where a device does nothing else, it
idles."""
THE_FLOW = "flow"
"""Name of the flow function as source or target of a flow."""


@dataclass(frozen=True, slots=True)
class StageTime:
    """The time of one stage in one step."""

    members: tuple[str, ...]
    """Its roles: one, or those of a loop."""
    devices: frozenset[int]
    """Its devices; none for a stage that runs beside them."""
    work: float
    """Device-seconds."""
    seconds: float
    """Needed on its devices when nothing else runs."""


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredStep:
    """Measurements of one step, per device and per stage."""

    seconds: float
    """Seconds of the step."""
    lanes: Mapping[int, bound.Lane]
    """Activity of each device."""
    stages: Mapping[str, StageTime]
    """By name."""
    edges: tuple[Edge, ...] = ()
    """Edges of the flow's graph, loops condensed."""
    published: tuple[tuple[str, str], ...] = ()
    """Pairs of roles, of which the first published weights to the second."""
    sync: float = 0.0
    """Seconds in which weights were published or taken anywhere."""
    source: str | None = None
    """The stage that items stream from and that nothing feeds, such as generation."""
    released: bound.Spans = field(default_factory=lambda: np.zeros(0))
    """When items left it, seconds after the start of the step, ascending, `[items]`."""
    release: Release | None = None
    """The same as shares of its own working time."""
    moves: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """By stage: mean seconds to load it, and to park it."""

    @property
    def tail(self) -> bound.Spans:
        """From when 95 % of the items had left the source until the last one has."""
        if len(self.released) < 2:
            return bound.NEVER
        return np.array([[self.released[int(np.ceil(0.95 * len(self.released))) - 1], self.released[-1]]])


def role_of(actor: str) -> str:
    """Role of an actor such as "rollout[3]", or of an endpoint such as "rollout.generate"."""
    return actor.partition("[")[0].partition(".")[0]


def read_step(lap: Lap, devices: Mapping[str, frozenset[int]], count: int = 0) -> MeasuredStep:
    """Read a step.

    Args:
        lap: the step.
        devices: of every actor, by a name such as "rollout[0]"; an actor that is missing has none.
        count: devices of the job, 0 to count - 1: one that nobody has idles, and counts all the same.
    """
    step = lap.end - lap.start
    everywhere = sorted(set(range(count)).union(*devices.values()))
    working: dict[str, list[bound.Spans]] = {}
    here: dict[int, dict[str, list[bound.Spans]]] = {number: {} for number in everywhere}
    syncs: dict[int, list[bound.Spans]] = {number: [] for number in everywhere}
    every_sync: list[bound.Spans] = []
    for part in lap.busy:
        if part.endpoint in ASIDE | MOVING:
            continue
        times, role, own = (
            bound.spans(part.intervals, lap.start, lap.end),
            role_of(part.actor),
            devices.get(part.actor, ()),
        )
        if part.endpoint in PUBLISHING:
            every_sync.append(times)
        else:
            working.setdefault(role, []).append(times)
        for number in own:
            (syncs[number] if part.endpoint in PUBLISHING else here[number].setdefault(role, [])).append(times)
    switches = _switches(lap, devices, everywhere)
    merged = {number: {role: bound.joined(*parts) for role, parts in own.items()} for number, own in here.items()}
    lanes = {
        n: bound.Lane(bound.joined(*merged[n].values()), bound.joined(*switches[n]), bound.joined(*syncs[n]))
        for n in everywhere
    }
    placed: dict[str, set[int]] = {}
    for actor, own in devices.items():
        placed.setdefault(role_of(actor), set()).update(own)
    shares = {n: dict(zip(own, bound.fair_shares(list(own.values())), strict=True)) for n, own in merged.items()}
    whole = {role: times for role, parts in working.items() if len(times := bound.joined(*parts))}
    groups, edges = _graph(list(whole), lap.flows)
    edges = tuple(replace(edge, barrier=edge.barrier and _after(groups, whole, edge)) for edge in edges)
    stages = {name: _stage(members, whole, shares, placed) for name, members in groups.items()}
    source, released = _source(groups, edges, lap.flows)
    return MeasuredStep(
        step,
        lanes,
        stages,
        edges,
        tuple(dict.fromkeys(_published(groups, lap.flows))),
        bound.length(bound.joined(*every_sync)),
        source,
        released,
        _release(released, bound.joined(*(whole[role] for role in groups[source]))) if source is not None else None,
        _moves(groups, lap.moves),
    )


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """Facts about a run that its profile states."""

    model: str
    """See `Profile`."""
    machine: str
    flow: str
    kinds: Sequence[str] = ()
    """Of each device, by its number; "gpu" beyond."""
    memory: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """By role: bytes on each of its devices while it is loaded, and while it is parked."""
    staleness: int = 0
    """Steps that work is begun early; above 0, a step's work is of several batches, so that no stage need wait for
    another's of the same step."""


def profile_of(step: MeasuredStep, items: int, run: MeasuredRun) -> Profile:
    """Return the profile of a step of so many items.

    Seconds per item between disjoint devices are not in a lap, so `transfers` stays empty.
    """
    stages = {}
    for name, stage in step.stages.items():
        count = len(stage.devices) or 1
        busy = stage.work / count if stage.devices else None
        sizes = [run.memory[role] for role in stage.members if role in run.memory]
        footprints = []
        if stage.devices and (sizes or name in step.moves):
            active, parked = (sum(each) for each in zip(*sizes, strict=True)) if sizes else (0, 0)
            footprints.append(Footprint(count, active, parked, *step.moves.get(name, (0.0, 0.0))))
        stages[name] = StageProfile(
            (Timing(items, count, stage.seconds, busy=busy),),
            step.release if name == step.source else None,
            tuple(footprints),
            _kind(stage.devices, run.kinds),
        )
    receivers = [len(step.stages[target].devices) for _, target in step.published if target in step.stages]
    sync = (Timing(1, max(receivers, default=1) or 1, step.sync),) if step.sync > 0 else ()
    edges = tuple((edge.source, edge.target, edge.barrier) for edge in step.edges)
    return Profile(run.model, run.machine, stages, {}, sync, run.flow, items, edges, step.published, run.staleness)


def _kind(devices: Iterable[int], kinds: Sequence[str]) -> str:
    """Return the kind of some devices; of several kinds all their names."""
    names = {kinds[number] if number < len(kinds) else KIND for number in devices}
    return "+".join(sorted(names)) or BESIDE


def _switches(
    lap: Lap, devices: Mapping[str, frozenset[int]], everywhere: Iterable[int]
) -> dict[int, list[bound.Spans]]:
    moves: dict[int, list[bound.Spans]] = {number: [] for number in everywhere}
    for move in lap.moves:
        times = bound.spans(((move.start, move.end),), lap.start, lap.end)
        for number in devices.get(move.actor, ()):
            moves[number].append(times)
    return moves


def _stage(
    members: tuple[str, ...],
    whole: Mapping[str, bound.Spans],
    shares: Mapping[int, Mapping[str, float]],
    placed: Mapping[str, set[int]],
) -> StageTime:
    """A role's time, or a loop's: the members of a loop wait for each other, so it lasts while any of them works."""
    devices = frozenset(number for role in members for number in placed.get(role, ()))
    by_device = [sum(shares[number].get(role, 0.0) for role in members) for number in devices]
    alone = 0.0
    if len(members) > 1 or not any(by_device):
        alone = bound.length(bound.joined(*(whole[role] for role in members)))
    return StageTime(members, devices, sum(by_device), max([alone, *by_device]))


def _graph(roles: Sequence[str], flows: Iterable[Flow]) -> tuple[dict[str, tuple[str, ...]], tuple[Edge, ...]]:
    """Stages with their members, and the edges between them."""
    edges: dict[tuple[str, str], Edge] = {}
    sources, targets = [], []
    for flow in flows:
        source, target = role_of(flow.source), role_of(flow.target)
        if _publishes(flow) or source == target:
            continue
        if source in roles and target == THE_FLOW and flow.released:
            sources.append(source)
        elif source == THE_FLOW and target in roles:
            targets.append(target)
        elif source in roles and target in roles:
            barrier = not flow.released and edges.get((source, target), Edge(source, target, True)).barrier
            edges[source, target] = Edge(source, target, barrier)
    for (
        source
    ) in sources:  # what the flow takes from one stream and hands on, is an edge too, unless it would lead back
        for target in targets:
            if source != target and (source, target) not in edges and not _leads(edges, target, source):
                edges[source, target] = Edge(source, target)
    groups = {"+".join(sorted(group)): tuple(sorted(group)) for group in loops(roles, list(edges.values()))}
    inside = {role for group in groups.values() for role in group}
    stages = {**{role: (role,) for role in roles if role not in inside}, **groups}
    return stages, condense(list(edges.values()), groups)


def _after(groups: Mapping[str, tuple[str, ...]], whole: Mapping[str, bound.Spans], edge: Edge) -> bool:
    """True if a stage began only when the one that feeds it was done: promises may also be passed one by one."""
    ends = [whole[role][-1, 1] for role in groups[edge.source]]
    return bool(min(whole[role][0, 0] for role in groups[edge.target]) >= max(ends))


def _leads(edges: Mapping[tuple[str, str], Edge], source: str, target: str) -> bool:
    """True if a way leads from one role to another."""
    reached, ahead = {source}, [source]
    while ahead:
        here = ahead.pop()
        for start, end in edges:
            if start == here and end not in reached:
                reached.add(end)
                ahead.append(end)
    return target in reached


def _publishes(flow: Flow) -> bool:
    return flow.target.rpartition(".")[2] in TAKING


def _published(groups: Mapping[str, tuple[str, ...]], flows: Iterable[Flow]) -> Iterable[tuple[str, str]]:
    stage_of = {role: name for name, members in groups.items() for role in members}
    for flow in flows:
        pair = stage_of.get(role_of(flow.source)), stage_of.get(role_of(flow.target))
        if _publishes(flow) and pair[0] is not None and pair[1] is not None and pair[0] != pair[1]:
            yield pair[0], pair[1]


def _source(
    groups: Mapping[str, tuple[str, ...]], edges: Iterable[Edge], flows: Iterable[Flow]
) -> tuple[str | None, bound.Spans]:
    """The stage that nothing feeds and whose items' times are known best, and these."""
    fed = {edge.target for edge in edges}
    stage_of = {role: name for name, members in groups.items() for role in members}
    best: tuple[str | None, Sequence[float]] = None, ()
    for flow in flows:
        name = stage_of.get(role_of(flow.source))
        if name is not None and name not in fed and not _publishes(flow) and len(flow.released) > len(best[1]):
            best = name, flow.released
    return best[0], np.sort(np.array(best[1], np.float64))


def _release(released: bound.Spans, working: bound.Spans) -> Release | None:
    """When items left, in the source's own working time: whoever else had its devices meanwhile does not matter."""
    times = bound.until(working, released)
    return Release.from_times(times.tolist()) if len(times) > 1 and times[-1] > 0 else None


def _moves(groups: Mapping[str, tuple[str, ...]], moves: Iterable[Moved]) -> dict[str, tuple[float, float]]:
    stage_of = {role: name for name, members in groups.items() for role in members}
    took: dict[str, dict[str, list[float]]] = {}
    for move in moves:
        if (name := stage_of.get(role_of(move.actor))) is not None and move.end > move.start:
            both = took.setdefault(name, {"onload": [], "offload": []})
            both[move.what].append(move.end - move.start)
    return {name: (_mean(both["onload"]), _mean(both["offload"])) for name, both in took.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


PROFILE = "profile.json"
"""File name in a run directory."""
WINDOW = 64
"""Steps that are remembered: enough for a median, few enough that the profile follows answers that grow longer."""


class Ledger:
    """Pools measured stage costs over the steps of one run and rates each step.

    Args:
        devices: of every actor, by a name such as "rollout[0]"; set it anew when roles move.
        items: of a step.
        run: facts about the run.
        count: devices of the job, 0 to count - 1; those that no actor has count too.
    """

    def __init__(self, devices: Mapping[str, frozenset[int]], items: int, run: MeasuredRun, *, count: int = 0) -> None:
        self.devices, self._items, self._run, self._count = devices, items, run, count
        self._steps: deque[Profile] = deque(maxlen=WINDOW)
        self.last: Efficiency | None = None
        """Of the newest step; None before the first, and where no device worked."""
        self.measured_step: MeasuredStep | None = None
        """Reading of the newest step."""

    @property
    def kinds(self) -> Sequence[str]:
        """Kind of each device."""
        return self._run.kinds

    @property
    def profile(self) -> Profile | None:
        """The profile measured by this run; None before the first step."""
        return pool(self._steps) if self._steps else None

    def step(self, lap: Lap) -> dict[str, float]:
        """Take a step.

        Returns:
            Its metrics `bound/…` and `lost/…`; none where no device worked.
        """
        self.measured_step = step = read_step(lap, self.devices, self._count)
        if step.stages:
            self._steps.append(profile_of(step, self._items, self._run))
        so_far = self.profile
        self.last = efficiency(step, so_far, self._items) if so_far is not None else None
        return self.last.metrics() if self.last is not None else {}

    def add_limits(self, least: Mapping[str, float]) -> None:
        """Add to the newest step what its stages would take at the devices' own limit, device-seconds by role."""
        last = self._steps[-1]
        stages = {
            name: replace(stage, timings=tuple(replace(one, least=least.get(name)) for one in stage.timings))
            for name, stage in last.stages.items()
        }
        self._steps[-1] = replace(last, stages=stages)

    def save(self, directory: Path) -> None:
        """Write what was measured into a run's directory; nothing if no step is over."""
        if (profile := self.profile) is not None:
            save(profile, directory / PROFILE)


def pool(steps: Iterable[Profile]) -> Profile:
    """Return the profile of several steps of one run, in their order.

    Times are medians. The first time of a stage on a number of devices is left out if there are others: it warms up.

    Args:
        steps: at least one.
    """
    steps = list(steps)
    last = steps[-1]
    edges: dict[tuple[str, str], bool] = {}
    by_name: dict[str, list[StageProfile]] = {}
    for one in steps:
        for name, stage in one.stages.items():
            by_name.setdefault(name, []).append(stage)
        for source, target, barrier in one.edges:
            edges[source, target] = barrier and edges.get((source, target), True)
    return Profile(
        last.model,
        last.machine,
        {name: _pooled_stage(samples) for name, samples in by_name.items()},
        {},
        _medians([timing for one in steps for timing in one.sync]),
        last.flow,
        last.items,
        tuple((source, target, barrier) for (source, target), barrier in sorted(edges.items())),
        tuple(dict.fromkeys(pair for one in steps for pair in one.published)),
        last.staleness,
    )


def _pooled_stage(samples: Sequence[StageProfile]) -> StageProfile:
    """The kind that it was on last comes first; one beside the devices has no others, and may have moved onto some."""
    kinds = dict.fromkeys(one.kind for one in reversed(samples))
    first, *rest = (_pooled_kind([one for one in samples if one.kind == kind]) for kind in kinds)
    release = _mean_release([one.release for one in samples if one.release is not None])
    others = tuple(one for one in rest if one.kind != BESIDE) if first.kind != BESIDE else ()
    return replace(first, release=release, others=others)


def _pooled_kind(alike: Sequence[StageProfile]) -> StageProfile:
    footprints: dict[int, list[Footprint]] = {}
    for footprint in itertools.chain.from_iterable(one.footprints for one in alike):
        footprints.setdefault(footprint.devices, []).append(footprint)
    return StageProfile(
        _medians([timing for one in alike for timing in one.timings]),
        _mean_release([one.release for one in alike if one.release is not None]),
        tuple(_typical(footprints[devices]) for devices in sorted(footprints)),
        alike[-1].kind,
    )


def _typical(footprints: Sequence[Footprint]) -> Footprint:
    """The most bytes, which must never be exceeded; and the middle of the seconds, of which one may be an accident."""
    worst = functools.reduce(Footprint.merged, footprints)
    return replace(
        worst,
        onload_seconds=statistics.median(one.onload_seconds for one in footprints),
        offload_seconds=statistics.median(one.offload_seconds for one in footprints),
    )


def _medians(timings: Sequence[Timing]) -> tuple[Timing, ...]:
    places: dict[tuple[int, int], list[Timing]] = {}
    for one in timings:
        places.setdefault((one.batch, one.devices), []).append(one)
    return tuple(_median(batch, devices, places[batch, devices]) for batch, devices in sorted(places))


def _median(batch: int, devices: int, samples: Sequence[Timing]) -> Timing:
    samples = samples[1:] or samples
    seconds = [one.seconds for one in samples]
    busy = [one.busy for one in samples if one.busy is not None]
    middle = statistics.median(seconds)
    return Timing(
        batch,
        devices,
        middle,
        float(np.std(seconds)),
        len(samples),
        min(middle, statistics.median(busy)) if busy else None,
        statistics.median(least) if (least := [one.least for one in samples if one.least is not None]) else None,
    )


def _mean_release(curves: Sequence[Release]) -> Release | None:
    if not curves:
        return None
    shares = np.mean([curve.shares for curve in curves], axis=0)
    return Release((*map(float, shares[:-1]), 1.0), len(curves))


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Efficiency of one step: its time, its lower bound, and where the difference went."""

    seconds: float
    """T, of the step."""
    devices: int
    """That some role had."""
    limit: bound.Bound
    """T_LB with its parts."""
    losses: bound.Losses
    """Where T - T_LB went."""

    @property
    def value(self) -> float:
        """E = T_LB / T, above 0 and at most 1."""
        return self.limit.efficiency(self.seconds)

    def metrics(self) -> dict[str, float]:
        """Return metrics of the step: `bound/…` and `lost/…`, in seconds but for efficiency and devices."""
        values = {"bound/seconds": self.limit.seconds, "bound/efficiency": self.value}
        values |= {f"bound/{name}": float(getattr(self.limit, name)) for name in ("area", "saturation", "network")}
        values["bound/devices"] = float(self.devices)
        return values | {f"lost/{part.name}": float(getattr(self.losses, part.name)) for part in fields(self.losses)}


def efficiency(step: MeasuredStep, profile: Profile, items: int) -> Efficiency | None:
    """Compare a step with its lower bound.

    Args:
        step: the step.
        profile: what its stages cost, in this step or any other; where it says nothing, this step stands for itself.
        items: of the step.

    Returns:
        None where no device worked.
    """
    count = len(step.lanes)
    if not count or step.seconds <= 0 or not any(stage.work > 0 for stage in step.stages.values()):
        return None
    expected = least = 0.0
    fastest: dict[str, float] = {}
    for name, stage in step.stages.items():
        timings = list(_timings_of(profile, name, items))
        own, best = _work(stage, timings)
        expected, least = expected + own, least + best
        fastest[name] = _quickest(stage, timings, count)
    published = [one.seconds for one in profile.sync]
    area = least / count
    saturation = max(fastest.values()) if profile.staleness else bound.longest_row(fastest, step.edges)
    limit = bound.Bound(area, saturation, 0.0, area, min([step.sync, *published]))
    losses = bound.split(
        list(step.lanes.values()),
        step.seconds,
        limit,
        least=least,
        expected=expected,
        tail=step.tail,
    )
    return Efficiency(step.seconds, count, limit, losses)


def _timings_of(profile: Profile, name: str, items: int) -> Iterator[Timing]:
    if name in profile.stages:
        yield from (one for way in profile.stages[name].ways for one in way.timings if one.batch == items)


def _work(stage: StageTime, timings: list[Timing]) -> tuple[float, float]:
    """Device-seconds of a stage at the size that it had, and at its most efficient one."""
    size = len(stage.devices)
    if not size:
        return 0.0, 0.0
    expected = min([stage.work, *(one.work for one in timings if one.devices == size)])
    return expected, min([expected, *(one.work for one in timings)])


def _quickest(stage: StageTime, timings: list[Timing], count: int) -> float:
    """Seconds of a stage at its quickest on up to `count` devices."""
    if not stage.devices:
        return min([stage.seconds, *(one.seconds for one in timings)])
    times = [(len(stage.devices), stage.seconds), *((one.devices, one.seconds) for one in timings)]
    widest = max(devices for devices, _ in times)
    scaled = min(seconds for devices, seconds in times if devices == widest) * min(1.0, widest / count)
    return min([scaled, *(seconds for _, seconds in times)])
