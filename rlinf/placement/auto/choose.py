"""Which plan to follow: the planner's best of each mode, rehearsed with the real flow, and the quickest of them.

Flows in: a profile (or a workload), devices, the flow. Flows out: the plan, a row per mode, one sentence of why. All
seconds are simulated, none is measured. Nothing waits here, but it computes for a while: `choose` says for how long.
From a coroutine: `await asyncio.to_thread(choose, ...)`.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from rlinf.data.step import works_ahead
from rlinf.placement.asynchronous.handing_over import HandedOver, handed_over
from rlinf.placement.asynchronous.recommend import Recommended, recommend
from rlinf.placement.asynchronous.split import plan_ahead
from rlinf.placement.asynchronous.steady import load
from rlinf.placement.auto.finalists import finalists, peaks
from rlinf.placement.auto.risk import risk
from rlinf.placement.grammar import PlacementError
from rlinf.placement.hardware import Fleet, Hardware
from rlinf.placement.plan import Mode, Plan, Prediction
from rlinf.placement.planner.plan_tree import leaves, to_plan
from rlinf.placement.planner.search import Found
from rlinf.placement.profiling.bound import Bound, bound
from rlinf.placement.profiling.forecast import workload as workload_of
from rlinf.placement.profiling.profile import Profile
from rlinf.placement.profiling.workload import Workload
from rlinf.placement.simulator.simulate import Cast, Flow, Rehearsal, rehearse, trial
from rlinf.runtime.actor.actor import Actor
from rlinf.runtime.base.progress import counted, work

FINALISTS = 3
"""Plans of each mode that are rehearsed: its best, and two neighbours."""
REHEARSED_ITEMS = 128
"""Items that stand for a step in a rehearsal, at least, if the step has so many: more were seen to change the seconds
by less than 2 %."""
ALIKE = 0.03
"""By less than this share no mode is called quicker: measured costs vary by more."""
MOST_ERROR = 0.5
"""Largest relative error that plans are weighed by: the bars of sizes that were not measured are wider than that."""


@dataclass(frozen=True, slots=True)
class Row:
    """One plan that was looked at."""

    plan: Plan
    """The plan, its prediction included."""
    mode: Mode
    """How its roles share devices."""
    calculated: float
    """Seconds of a step by formula."""
    rehearsed: float | None
    """Seconds of a step by rehearsal; None: it was not rehearsed."""
    bubble: float
    """Share of the device-seconds of a step, on all devices, in which a device does no stage's work."""
    peak_bytes: int
    """The most that any device holds."""
    chunks: int
    """Into how many a step is cut where stages overlap."""

    risk: float = 1.0
    """By which factor it is expected to take longer because the costs are not known exactly; see `risk.py`."""

    @property
    def seconds(self) -> float:
        """The better founded of the two."""
        return self.calculated if self.rehearsed is None else self.rehearsed

    @property
    def expected(self) -> float:
        """Seconds of a step with what wrong costs do to such a plan: by this, plans are ranked."""
        return self.seconds * self.risk


@dataclass(frozen=True, slots=True)
class Chosen:
    """The outcome."""

    rows: tuple[Row, ...]
    """All plans that were looked at, the one expected to be the quickest first."""
    bound: Bound
    """What no plan could beat."""
    reason: str
    """One sentence: why the first."""
    took: float
    """Seconds of this machine's time that choosing took, most of them of one core."""
    staleness: int = 0
    """Versions by which weights that generate may be behind."""
    recommended: Recommended | None = None
    """What each staleness would bring; None where the profile cannot tell."""
    handed_over: Mapping[Mode, HandedOver] = field(default_factory=dict)
    """By mode: what it would bring if devices changed hands within a synchronous step, where that can be told."""

    @property
    def plan(self) -> Plan:
        """The one to follow."""
        return self.rows[0].plan

    @property
    def best_of_modes(self) -> tuple[Row, ...]:
        """The first plan of each mode."""
        return _firsts(self.rows)

    def numbered(self, fleet: Fleet) -> Chosen:
        """The same with devices by the numbers that a job gives them; see `Fleet.numbered`."""
        return replace(self, rows=tuple(replace(row, plan=fleet.numbered(row.plan)) for row in self.rows))


def choose(
    profile: Profile,
    devices: Mapping[str, int],
    memory: Mapping[str, int] | None = None,
    flow: Flow | None = None,
    items: int | None = None,
    *,
    extrapolate: bool = False,
    per_mode: int = FINALISTS,
    quantum: int = 1,
    cost_error: float | None = None,
    actors: Mapping[str, type[Actor]] | None = None,
    staleness: int | None = None,
    hardware: Mapping[str, Hardware] = MappingProxyType({}),
) -> Chosen:
    """Choose a plan for a profiled flow.

    Three stages were seen to take 0.3 s of one core on 8 devices and 2 to 5 s on 1,024: most of it is the search for
    plans, a rehearsal is 0.03 s.

    Args:
        profile: of the flow.
        devices: how many there are, by kind.
        memory: bytes of one, by kind.
        flow: the real one, to be rehearsed; None, or one that takes a session: plans are ranked by formula.
        items: of one step; None: as many as were profiled.
        extrapolate: use sizes outside of what was measured.
        per_mode: plans of each mode that are rehearsed; 0: none.
        quantum: sizes in multiples of so many devices, such as a node; a size of all devices is kept.
        cost_error: see `choose_for`; None: what the profile's own error bars say.
        actors: see `simulate.rehearse`.
        staleness: versions by which weights that generate may be behind; None: as was profiled.
        hardware: what is known of each kind, for stages that were not measured on all of them.

    Returns:
        Plans that count devices kind by kind, in the order of `devices`.

    Raises:
        PlacementError: it cannot be planned, or nothing fits.
    """
    staleness = profile.staleness if staleness is None else staleness
    if profile.staleness and staleness != profile.staleness:
        raise PlacementError(
            [
                f"the profile was measured with a staleness of {profile.staleness}, which does not tell what another "
                "brings: profile a synchronous run of the same model"
            ]
        )
    workload = workload_of(profile, devices, memory, items=items, extrapolate=extrapolate, hardware=hardware)
    if flow is not None and "session" in inspect.signature(flow).parameters:
        flow = None  # agents and their programs are not modelled
    cast = trial(flow, [stage.name for stage in workload.stages], actors=actors) if flow and per_mode else None
    workload, items = _coarse(workload, quantum), items or profile.items
    if cost_error is None:
        cost_error = _mean_error(profile, workload, items, hardware, extrapolate=extrapolate)
    chosen = choose_for(workload, items, flow, per_mode=per_mode, cost_error=cost_error, cast=cast, staleness=staleness)
    if profile.staleness:
        return chosen
    started = time.monotonic()
    recommended = recommend(workload)
    return replace(chosen, recommended=recommended, took=chosen.took + time.monotonic() - started)


def choose_for(
    workload: Workload,
    items: int,
    flow: Flow | None = None,
    *,
    per_mode: int = FINALISTS,
    cost_error: float = 0.0,
    cast: Cast | None = None,
    staleness: int = 0,
) -> Chosen:
    """Choose a plan for a workload; see `choose`.

    Args:
        workload: what to plan.
        items: of one step.
        flow: see `choose`.
        per_mode: see `choose`.
        cost_error: share by which a stage's measured seconds may be wrong; plans that suffer more from such errors are
            ranked lower.
        cast: of `simulate.trial`, where many workloads of one flow are planned.
        staleness: see `choose`; above 0 a flow is rehearsed only if it works ahead.

    Raises:
        PlacementError: nothing fits, or the flow does not fit the workload.
    """
    started = time.monotonic()
    limit = bound(workload, staleness=staleness)
    if staleness and not works_ahead(flow):
        flow = None
    if flow is not None and per_mode:
        cast = cast or trial(flow, [stage.name for stage in workload.stages])
    with work("searching for plans"):
        found = list(plan_ahead(workload, staleness).values()) if staleness else finalists(workload, max(1, per_mode))
    if not found:
        raise PlacementError([_nothing_fits(workload)])
    rows = [
        replace(
            _row(one, workload, items, flow if per_mode else None, limit, cast, staleness),
            risk=risk(one, workload, cost_error, staleness),
        )
        for one in counted(found, "rehearsing plans", unit="plans")
    ]
    rows.sort(key=lambda row: row.expected)
    why = _why(_firsts(rows), limit, cost_error)
    rows = [replace(row, plan=replace(row.plan, reason=why if row is rows[0] else "")) for row in rows]
    handed: dict[Mode, HandedOver] = {}
    for one in () if staleness else found:
        if (gained := handed_over(one, workload, items, limit.seconds)) is not None:
            handed.setdefault(gained.mode, gained)
    return Chosen(tuple(rows), limit, why, time.monotonic() - started, staleness, handed_over=handed)


def _row(
    found: Found,
    workload: Workload,
    items: int,
    flow: Flow | None,
    limit: Bound,
    cast: Cast | None,
    staleness: int,
) -> Row:
    plan = to_plan(found.tree, workload, found.chunks, items, None)
    rehearsed: Rehearsal | None = None
    if flow is not None:
        rehearsed = rehearse(
            flow,
            plan,
            workload,
            items=items,
            rehearsed_items=stand_in(items, found.chunks),
            cast=cast,
            staleness=staleness,
        )
    seconds = found.seconds if rehearsed is None else rehearsed.seconds
    plan = replace(plan, predicted=Prediction(seconds, limit.seconds))
    peak = max(peaks(plan).values(), default=0)
    return Row(
        plan,
        plan.mode,
        found.seconds,
        None if rehearsed is None else rehearsed.seconds,
        _bubble(found, workload, seconds, staleness),
        max(peak, rehearsed.peak_bytes if rehearsed else 0),
        found.chunks,
    )


def stand_in(items: int, chunks: int) -> int:
    """How many items stand for all of a step in a rehearsal: a multiple of its chunks, if the items are one."""
    each = max(1, items // chunks)
    return min(items, chunks * min(each, -(-REHEARSED_ITEMS // chunks)))


def _bubble(found: Found, workload: Workload, seconds: float, staleness: int) -> float:
    """Share of all device-seconds that is no work."""
    everywhere = sum(workload.devices.values()) * seconds
    work = sum(
        leaf.option.devices * load(replace(leaf, resident=True), found.chunks, staleness, alone=True)
        for leaf in leaves(found.tree)
    )
    return max(0.0, 1 - work / everywhere) if everywhere else 0.0


def _why(rows: Sequence[Row], limit: Bound, cost_error: float) -> str:
    """One sentence for the first of the modes' best; or two, if it is not the quickest on paper."""
    best, quickest = rows[0], min(rows, key=lambda row: row.seconds)
    if best is quickest:
        return reason(rows, limit)
    return (
        f"{best.mode} is expected to take {best.expected:,.2f} s and {quickest.mode} {quickest.expected:,.2f} s, as "
        f"costs may be {cost_error:.0%} wrong; were they exact, {quickest.mode} would be "
        f"{best.seconds / quickest.seconds - 1:.0%} quicker"
    )


def _firsts(rows: Sequence[Row]) -> tuple[Row, ...]:
    first: dict[Mode, Row] = {}
    for row in rows:
        first.setdefault(row.mode, row)
    return tuple(first.values())


def _mean_error(
    profile: Profile, workload: Workload, items: int, hardware: Mapping[str, Hardware], *, extrapolate: bool
) -> float:
    """The mean relative error bar of the stages, each at the middle of its sizes."""
    bars = []
    for stage in workload.stages:
        middle = stage.options[len(stage.options) // 2]
        there = profile.stages[stage.name].on(middle.kind, hardware)
        assert there is not None  # of every kind that it has an option on
        seen = there.time(items, max(1, middle.devices), extrapolate=extrapolate)
        bars.append(min(MOST_ERROR, seen.error / seen.seconds))
    return sum(bars) / len(bars)


def _coarse(workload: Workload, quantum: int) -> Workload:
    """Keep sizes that are multiples of a number, those below it that divide it, and all devices."""
    if quantum <= 1:
        return workload

    def keeps(count: int, kind: str) -> bool:
        return count % quantum == 0 or (count and quantum % count == 0) or count == workload.devices.get(kind, 0)

    stages = []
    for stage in workload.stages:
        kept = tuple(option for option in stage.options if keeps(option.devices, option.kind))
        stages.append(replace(stage, options=kept or stage.options))
    return replace(workload, stages=tuple(stages))


def _nothing_fits(workload: Workload) -> str:
    """Which memory would be enough: that of all roles parked but the largest."""
    least = {
        stage.name: min(workload.usable(stage), key=lambda option: option.active_bytes) for stage in workload.stages
    }
    largest = max(least, key=lambda name: least[name].active_bytes - least[name].parked_bytes)
    needed = least[largest].active_bytes + sum(one.parked_bytes for name, one in least.items() if name != largest)
    have = min(workload.memory.values(), default=0)
    return (
        f"no plan fits: with {largest} loaded and all others parked a device may have to hold {needed / 1e9:.1f} GB of "
        f"{have / 1e9:.1f}: give each device {max(0.0, (needed - have) / 1e9):.1f} GB more, use more devices, or a "
        "smaller batch or model"
    )


def reason(rows: Sequence[Row], limit: Bound) -> str:
    """Say in one sentence why the first row is the best, and what keeps it from the bound.

    Args:
        rows: the best plan of each mode, at least one.
        limit: what no plan could beat.
    """
    best, *others = rows
    gap = f"it reaches {limit.efficiency(best.seconds):.0%} of the bound, which {limit.binding} sets"
    if not others:
        return f"{best.mode} is the only mode that fits; {gap}"
    second = others[0]
    quicker = second.seconds / best.seconds - 1
    if quicker < ALIKE:
        return f"{best.mode} and {second.mode} are equally quick, but for {quicker:.0%}; {gap}"
    if second.bubble > best.bubble + 0.01:
        why = f"devices idle {best.bubble:.0%} of the time instead of {second.bubble:.0%}"
    else:
        why = "its sizes and switches cost fewer device-seconds"
    return f"{best.mode} is {quicker:.0%} quicker than {second.mode}, because {why}; {gap}"
