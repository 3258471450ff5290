"""Seconds and device-seconds of each stage in one step, read off the runtime's spans.

Flows in: a `Lap` (who was busy when, what flowed where, what was loaded and parked) and the devices of every actor.
Flows out: per device what it did, per stage its time (`Seen`), and a `Profile` of this one step. Nothing waits here.

A stage is a role, all its endpoints together; roles that feed each other in a loop, such as environment and policy, are
one stage of the name "env+policy". Time of an actor without devices is beside the devices: it is known, and costs none.
Without leases two roles may be busy on one device at the same time; each second then counts 1/k for each of k roles,
so that the roles of a device never add up to more than the time that it worked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rlinf.placement.hardware import KIND
from rlinf.runtime.observe.lap import Flow, Lap, Moved

from .flow_graph import condense, loops
from .lost_time import Lane
from .profile import BESIDE, Footprint, Profile, Release, StageProfile, Timing
from .spans import NEVER, Spans, fair_shares, joined, length, spans, until
from .workload import Edge

TAKING = ("load", "load_switch", "follow")
"""Endpoints that take new weights: what flows into them is no edge."""
PUBLISHING = frozenset(("weights", "load_ready", "load_abandon", *TAKING))
"""Endpoints whose time is weight synchronisation."""
MOVING = frozenset(("onload", "offload"))
"""Calls of the lease manager, whose time is in a lap's moves."""
ASIDE = frozenset(
    (
        *(
            "save",
            "restore",
            "export_state",
            "import_state",
            "state",
            "samples",
            "shapes",
            "version",
            "scored",
            "learned",
            "optimizer_steps",
            "computes",
            "load_decided",
            "weigh",
            "watch",
            "ask",
        ),
        *("in_flight", "answering", "settled", "drop", "split", "forget", "abort", "pause", "resume"),
        *(
            "work_next",
            "work_gone",
            "work_take",
            "joint_ready",
            "joint_over",
            "joint_word",
            "joint_given",
            "rescale_hand_over",
            "rescale_take",
            "rescale_tell",
        ),
    )
)
"""Endpoints of our roles that do no stage's work: checkpoints, what people read, and ranks that wait for each other.
Where a device does nothing else, it idles."""
THE_FLOW = "flow"
"""Name of the flow function as source or target of a flow."""


@dataclass(frozen=True, slots=True)
class StageTime:
    """What one stage took of one step."""

    members: tuple[str, ...]
    """Its roles: one, or those of a loop."""
    devices: frozenset[int]
    """Its devices; none for a stage that runs beside them."""
    work: float
    """Device-seconds."""
    seconds: float
    """Needed on its devices when nothing else runs."""


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """What was measured of one step, per device and per stage."""

    seconds: float
    """Of the step."""
    lanes: Mapping[int, Lane]
    """What each device did."""
    stages: Mapping[str, StageTime]
    """By name."""
    edges: tuple[Edge, ...] = ()
    """Of the flow's graph, loops condensed."""
    published: tuple[tuple[str, str], ...] = ()
    """Who published weights to whom."""
    sync: float = 0.0
    """Seconds in which weights were published or taken anywhere."""
    source: str | None = None
    """The stage that items stream from and that nothing feeds, such as generation."""
    released: Spans = field(default_factory=lambda: np.zeros(0))
    """When items left it, seconds after the start of the step, ascending, `[items]`."""
    release: Release | None = None
    """The same as shares of its own working time."""
    moves: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """By stage: mean seconds to load it, and to park it."""

    @property
    def tail(self) -> Spans:
        """From when 95 % of the items had left the source until the last one has."""
        if len(self.released) < 2:
            return NEVER
        return np.array([[self.released[int(np.ceil(0.95 * len(self.released))) - 1], self.released[-1]]])


def role_of(actor: str) -> str:
    """Role of an actor such as "rollout[3]", or of an endpoint such as "rollout.generate"."""
    return actor.partition("[")[0].partition(".")[0]


def see(lap: Lap, devices: Mapping[str, frozenset[int]], count: int = 0) -> Seen:
    """Read a step.

    Args:
        lap: the step.
        devices: of every actor, by a name such as "rollout[0]"; an actor that is missing has none.
        count: devices of the job, 0 to count - 1: one that nobody has idles, and counts all the same.
    """
    step = lap.end - lap.start
    everywhere = sorted(set(range(count)).union(*devices.values()))
    working: dict[str, list[Spans]] = {}
    here: dict[int, dict[str, list[Spans]]] = {number: {} for number in everywhere}
    syncs: dict[int, list[Spans]] = {number: [] for number in everywhere}
    every_sync: list[Spans] = []
    for part in lap.busy:
        if part.endpoint in ASIDE | MOVING:
            continue
        times, role, own = spans(part.intervals, lap.start, lap.end), role_of(part.actor), devices.get(part.actor, ())
        if part.endpoint in PUBLISHING:
            every_sync.append(times)
        else:
            working.setdefault(role, []).append(times)
        for number in own:
            (syncs[number] if part.endpoint in PUBLISHING else here[number].setdefault(role, [])).append(times)
    switches = _switches(lap, devices, everywhere)
    merged = {number: {role: joined(*parts) for role, parts in own.items()} for number, own in here.items()}
    lanes = {n: Lane(joined(*merged[n].values()), joined(*switches[n]), joined(*syncs[n])) for n in everywhere}
    placed: dict[str, set[int]] = {}
    for actor, own in devices.items():
        placed.setdefault(role_of(actor), set()).update(own)
    shares = {n: dict(zip(own, fair_shares(list(own.values())), strict=True)) for n, own in merged.items()}
    whole = {role: times for role, parts in working.items() if len(times := joined(*parts))}
    groups, edges = _graph(list(whole), lap.flows)
    edges = tuple(replace(edge, barrier=edge.barrier and _after(groups, whole, edge)) for edge in edges)
    stages = {name: _stage(members, whole, shares, placed) for name, members in groups.items()}
    source, released = _source(groups, edges, lap.flows)
    return Seen(
        step,
        lanes,
        stages,
        edges,
        tuple(dict.fromkeys(_published(groups, lap.flows))),
        length(joined(*every_sync)),
        source,
        released,
        _release(released, joined(*(whole[role] for role in groups[source]))) if source is not None else None,
        _moves(groups, lap.moves),
    )


def observed(
    seen: Seen,
    items: int,
    *,
    model: str,
    machine: str,
    flow: str,
    kinds: Sequence[str] = (),
    held: Mapping[str, tuple[int, int]] | None = None,
    staleness: int = 0,
) -> Profile:
    """Return the profile of a step that was read.

    Seconds per item between disjoint devices are not in a lap, so `transfers` stays empty.

    Args:
        seen: the step.
        items: of it.
        model, machine, flow: see `Profile`.
        kinds: of each device, by its number; "gpu" beyond.
        held: by role: bytes on each of its devices while it is loaded, and while it is parked.
        staleness: steps that work is begun early.
    """
    stages = {}
    for name, stage in seen.stages.items():
        count = len(stage.devices) or 1
        busy = stage.work / count if stage.devices else None
        known = [held[role] for role in stage.members if held is not None and role in held]
        footprints = []
        if stage.devices and (known or name in seen.moves):
            active, parked = (sum(each) for each in zip(*known, strict=True)) if known else (0, 0)
            footprints.append(Footprint(count, active, parked, *seen.moves.get(name, (0.0, 0.0))))
        stages[name] = StageProfile(
            (Timing(items, count, stage.seconds, busy=busy),),
            seen.release if name == seen.source else None,
            tuple(footprints),
            _kind(stage.devices, kinds),
        )
    receivers = [len(seen.stages[target].devices) for _, target in seen.published if target in seen.stages]
    sync = (Timing(1, max(receivers, default=1) or 1, seen.sync),) if seen.sync > 0 else ()
    edges = tuple((edge.source, edge.target, edge.barrier) for edge in seen.edges)
    return Profile(model, machine, stages, {}, sync, flow, items, edges, seen.published, staleness)


def _kind(devices: Iterable[int], kinds: Sequence[str]) -> str:
    """Of some devices; of several kinds all their names."""
    found = {kinds[number] if number < len(kinds) else KIND for number in devices}
    return "+".join(sorted(found)) or BESIDE


def _switches(lap: Lap, devices: Mapping[str, frozenset[int]], everywhere: Iterable[int]) -> dict[int, list[Spans]]:
    found: dict[int, list[Spans]] = {number: [] for number in everywhere}
    for move in lap.moves:
        times = spans(((move.start, move.end),), lap.start, lap.end)
        for number in devices.get(move.actor, ()):
            found[number].append(times)
    return found


def _stage(
    members: tuple[str, ...],
    whole: Mapping[str, Spans],
    shares: Mapping[int, Mapping[str, float]],
    placed: Mapping[str, set[int]],
) -> StageTime:
    """A role's time, or a loop's: the members of a loop wait for each other, so it lasts while any of them works."""
    devices = frozenset(number for role in members for number in placed.get(role, ()))
    by_device = [sum(shares[number].get(role, 0.0) for role in members) for number in devices]
    alone = 0.0
    if len(members) > 1 or not any(by_device):
        alone = length(joined(*(whole[role] for role in members)))
    return StageTime(members, devices, sum(by_device), max([alone, *by_device]))


def _graph(roles: Sequence[str], flows: Iterable[Flow]) -> tuple[dict[str, tuple[str, ...]], tuple[Edge, ...]]:
    """Stages with their members, and the edges between them."""
    edges: dict[tuple[str, str], Edge] = {}
    taken, given = [], []
    for flow in flows:
        source, target = role_of(flow.source), role_of(flow.target)
        if _publishes(flow) or source == target:
            continue
        if source in roles and target == THE_FLOW and flow.released:
            taken.append(source)
        elif source == THE_FLOW and target in roles:
            given.append(target)
        elif source in roles and target in roles:
            barrier = not flow.released and edges.get((source, target), Edge(source, target, True)).barrier
            edges[source, target] = Edge(source, target, barrier)
    for source in taken:  # what the flow takes from one stream and hands on, is an edge too, unless it would lead back
        for target in given:
            if source != target and (source, target) not in edges and not _leads(edges, target, source):
                edges[source, target] = Edge(source, target)
    found = {"+".join(sorted(group)): tuple(sorted(group)) for group in loops(roles, list(edges.values()))}
    inside = {role for group in found.values() for role in group}
    stages = {**{role: (role,) for role in roles if role not in inside}, **found}
    return stages, condense(list(edges.values()), found)


def _after(groups: Mapping[str, tuple[str, ...]], whole: Mapping[str, Spans], edge: Edge) -> bool:
    """Whether a stage began only when the one that feeds it was done: promises may also be passed one by one."""
    ends = [whole[role][-1, 1] for role in groups[edge.source]]
    return bool(min(whole[role][0, 0] for role in groups[edge.target]) >= max(ends))


def _leads(edges: Mapping[tuple[str, str], Edge], source: str, target: str) -> bool:
    """Whether a way leads from one role to another."""
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
) -> tuple[str | None, Spans]:
    """The stage that nothing feeds and whose items' times are known best, and these."""
    fed = {edge.target for edge in edges}
    stage_of = {role: name for name, members in groups.items() for role in members}
    best: tuple[str | None, Sequence[float]] = None, ()
    for flow in flows:
        name = stage_of.get(role_of(flow.source))
        if name is not None and name not in fed and not _publishes(flow) and len(flow.released) > len(best[1]):
            best = name, flow.released
    return best[0], np.sort(np.array(best[1], np.float64))


def _release(released: Spans, working: Spans) -> Release | None:
    """When items left, in the source's own working time: whoever else had its devices meanwhile does not matter."""
    times = until(working, released)
    return Release.measured(times.tolist()) if len(times) > 1 and times[-1] > 0 else None


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
