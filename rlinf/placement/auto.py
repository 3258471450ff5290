"""Choice of a plan from a profile, and `placement.mode: auto`, which chooses while a run goes on.

`choose` takes the planner's best of each mode with near neighbours (`finalists`), rehearses them with the real flow,
and ranks them by expected seconds. A formula ranks structures well, and near neighbours badly: a chunk more or less, a
node more here and less there; so the rehearsal tells these apart. Costs are not known exactly (`risk`): stages that
take turns average their errors out, where stages overlap the slowest decides, and devices that were divided by wrong
costs wait for each other. So a plan is weighed by its mean time over costs drawn around the known ones. All seconds are
simulated, none is measured. Nothing waits here, but it computes for a while: from a coroutine,
`await asyncio.to_thread(choose, ...)`.

`AutoPlacement` measures a few steps, plans, and plans anew when steps no longer take what was expected. In: the seconds
of every step, and what the stages of the flow were measured to cost. Out: now and then a plan, with a sentence of why.
How a role's time depends on its devices cannot be known from one size, so two placements are measured before the first
plan: everybody on all devices, then each role on a share of them; what lies between is interpolated. Where devices
differ, each role is measured on each kind of them instead.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice

from rlinf.data.step import works_ahead
from rlinf.placement.asynchronous import Handover, Recommendation, handover, load, plan_ahead, recommend, steady
from rlinf.placement.bound import Bound, bound
from rlinf.placement.grammar import PlacementError
from rlinf.placement.hardware import Devices, Fleet, Hardware
from rlinf.placement.plan import Mode, Plan, Prediction
from rlinf.placement.planner import Candidate, Leaf, Tree, best_of_each_mode, leaves, replay, to_plan, width
from rlinf.placement.profile import Profile
from rlinf.placement.seats import by_role
from rlinf.placement.simulate import Cast, Flow, Rehearsal, rehearse, trial
from rlinf.placement.workload import Option, Workload
from rlinf.placement.workload import workload as workload_of
from rlinf.runtime.actor.actor import Actor
from rlinf.runtime.base.progress import track, work

DRAWS = 32
"""Costs that are drawn: the mean then is within about a percent at an error of 40 %."""


def risk(candidate: Candidate, workload: Workload, cost_error: float, staleness: int = 0) -> float:
    """Return the expected seconds of a plan over those calculated.

    Args:
        candidate: the plan.
        workload: what it plans.
        cost_error: share by which a stage's seconds may be wrong: they are drawn, evenly on a log scale, between the
            known ones divided by, and multiplied by, 1 + cost_error; the same draws for every plan.
        staleness: steps that work is begun early.
    """
    if cost_error <= 0 or candidate.seconds <= 0:
        return 1.0
    rng = random.Random(0)
    names = [stage.name for stage in workload.stages]
    draws = [{name: (1 + cost_error) ** rng.uniform(-1, 1) for name in names} for _ in range(DRAWS)]

    def seconds(tree: Tree) -> float:
        return steady(tree, workload, candidate.chunks, staleness).seconds

    expected = seconds(candidate.tree)
    return statistics.mean(seconds(_scaled(candidate.tree, factors)) / expected for factors in draws)


def _scaled(tree: Tree, factors: Mapping[str, float]) -> Tree:
    if isinstance(tree, Leaf):
        return replace(tree, option=_slower(tree.option, factors[tree.stage.name]))
    return replace(tree, first=_scaled(tree.first, factors), second=_scaled(tree.second, factors))


def _slower(option: Option, factor: float) -> Option:
    chunks = {count: seconds * factor for count, seconds in option.chunk_seconds.items()}
    return replace(option, seconds=option.seconds * factor, chunk_seconds=chunks, longest=option.longest * factor)


WITHIN = 1.1
"""Neighbours that are slower than the best of their mode by more are not rehearsed: formula and rehearsal differ by
less."""


def finalists(workload: Workload, per_mode: int = 3, *, sizes: int | None = None) -> list[Candidate]:
    """Return the best plans of each mode.

    Args:
        workload: what to plan.
        per_mode: how many of each.
        sizes: see `planner.plan`.
    """
    results: list[Candidate] = []
    for best in best_of_each_mode(workload, sizes=sizes).values():
        near = sorted(_neighbours(best, workload), key=lambda candidate: candidate.seconds)
        close = (candidate for candidate in near if candidate.seconds <= WITHIN * best.seconds)
        results += islice(_distinct(chain([best], close), workload), per_mode)
    return sorted(results, key=lambda candidate: candidate.seconds)


def fits(plan: Plan, workload: Workload) -> bool:
    """True if no device is given more than it holds."""
    kinds = [kind for kind, count in workload.devices.items() for _ in range(count)]
    limited = workload.memory if workload.memory else {}
    return all(
        device < len(kinds) and peak <= limited.get(kinds[device], peak) for device, peak in peaks(plan, kinds).items()
    )


def peaks(plan: Plan, kinds: Sequence[str] = ()) -> dict[int, int]:
    """Return the most bytes on devices: of all of one kind with the same roles, for the first of them."""
    roles: dict[int, list[str]] = defaultdict(list)
    for name, role in plan.roles.items():
        for device in role.devices:
            roles[device].append(name)
    alike: dict[tuple[str, ...], int] = {}
    for device, names in roles.items():
        alike.setdefault((*names, kinds[device] if device < len(kinds) else ""), device)
    return {device: plan.peak(device) for device in alike.values()}


def _neighbours(candidate: Candidate, workload: Workload) -> Iterator[Candidate]:
    for chunks in workload.chunks:
        yield Candidate(candidate.tree, chunks, replay(candidate.tree, workload, chunks), candidate.estimate)
    for tree in _resized(candidate.tree, workload):
        yield Candidate(tree, candidate.chunks, replay(tree, workload, candidate.chunks), candidate.estimate)


def _resized(tree: Tree, workload: Workload) -> Iterator[Tree]:
    """Yield plans of the same structure with one stage a size larger or smaller, or one larger and another smaller."""
    names = [leaf.stage.name for leaf in leaves(tree)]
    for name in names:
        for step in (-1, 1):
            changed = _with(tree, name, step, workload)
            if changed is None:
                continue
            others = [_with(changed, other, -step, workload) for other in names if other != name]
            for one in (changed, *others):
                if one is not None and _beside_each_other(one, workload):
                    yield one


def _with(tree: Tree, name: str, step: int, workload: Workload) -> Tree | None:
    """The tree with one stage at its next larger or smaller size on the same kind of device; None if there is none."""
    if not isinstance(tree, Leaf):
        first, second = _with(tree.first, name, step, workload), _with(tree.second, name, step, workload)
        if first is not None:
            return replace(tree, first=first)
        return None if second is None else replace(tree, second=second)
    if tree.stage.name != name:
        return None
    option = _next(tree.option, workload.usable(tree.stage), step)
    return None if option is None else replace(tree, option=option)


def _next(option: Option, options: tuple[Option, ...], step: int) -> Option | None:
    neighbours = [one for one in options if one.kind == option.kind and (one.devices - option.devices) * step > 0]
    return min(neighbours, key=lambda one: (abs(one.devices - option.devices), one.seconds), default=None)


def _beside_each_other(tree: Tree, workload: Workload) -> bool:
    return all(count <= workload.devices.get(kind, 0) for kind, count in width(tree).items())


def _distinct(candidates: Iterable[Candidate], workload: Workload) -> Iterator[Candidate]:
    """Those that fit, without those that a rehearsal could not tell from an earlier one."""
    keys: set[object] = set()
    for one in candidates:
        placement = to_plan(one.tree, workload, one.chunks, None, None)
        cut = one.chunks if len(placement.phases) < len(placement.roles) else 1
        key = (cut, *((name, role.devices, role.phases, role.resident) for name, role in placement.roles.items()))
        if key not in keys and fits(placement, workload):
            keys.add(key)
            yield one


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
    """By which factor it is expected to take longer because the costs are not known exactly."""

    @property
    def seconds(self) -> float:
        """The better founded of the two."""
        return self.calculated if self.rehearsed is None else self.rehearsed

    @property
    def expected(self) -> float:
        """Seconds of a step with what wrong costs do to such a plan: by this, plans are ranked."""
        return self.seconds * self.risk


@dataclass(frozen=True, slots=True)
class Choice:
    """The outcome."""

    rows: tuple[Row, ...]
    """All plans that were looked at, the one expected to be the quickest first."""
    bound: Bound
    """Lower bound that no plan could beat."""
    reason: str
    """One sentence: why the first."""
    took: float
    """Seconds of this machine's time that choosing took, most of them of one core."""
    staleness: int = 0
    """Versions by which weights that generate may be behind."""
    recommended: Recommendation | None = None
    """The gain of each staleness; None where the profile cannot tell."""
    handovers: Mapping[Mode, Handover] = field(default_factory=dict)
    """By mode: what it would bring if devices changed hands within a synchronous step, where that can be told."""

    @property
    def plan(self) -> Plan:
        """The one to follow."""
        return self.rows[0].plan

    @property
    def best_of_modes(self) -> tuple[Row, ...]:
        """The first plan of each mode."""
        return _firsts(self.rows)

    def numbered(self, fleet: Fleet) -> Choice:
        """Return this choice with devices by the numbers that a job gives them; see `Fleet.numbered`."""
        return replace(self, rows=tuple(replace(row, plan=fleet.numbered(row.plan)) for row in self.rows))


def choose(
    profile: Profile,
    devices: Devices,
    flow: Flow | None = None,
    items: int | None = None,
    *,
    extrapolate: bool = False,
    per_mode: int = FINALISTS,
    actors: Mapping[str, type[Actor]] | None = None,
    staleness: int | None = None,
) -> Choice:
    """Choose a plan for a profiled flow.

    Three stages were seen to take 0.3 s of one core on 8 devices and 2 to 5 s on 1,024: most of it is the search for
    plans, a rehearsal is 0.03 s.

    Args:
        profile: of the flow. Its error bars say by how much plans are distrusted.
        devices: that a plan may use.
        flow: the real one, to be rehearsed; None, or one that takes a session: plans are ranked by formula.
        items: of one step; None: as many as were profiled.
        extrapolate: use sizes outside of what was measured.
        per_mode: plans of each mode that are rehearsed; 0: none.
        actors: see `simulate.trial`.
        staleness: versions by which weights that generate may be behind; None: as was profiled.

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
    workload, items = workload_of(profile, devices, items=items, extrapolate=extrapolate), items or profile.items
    if flow is not None and "session" in inspect.signature(flow).parameters:
        flow = None  # agents and their programs are not modelled
    cast = trial(flow, [stage.name for stage in workload.stages], actors=actors) if flow and per_mode else None
    error = _mean_error(profile, workload, items, devices.hardware, extrapolate=extrapolate)
    choice = choose_for(workload, items, flow, per_mode=per_mode, cost_error=error, cast=cast, staleness=staleness)
    if profile.staleness:
        return choice
    started = time.monotonic()
    recommended = recommend(workload)
    return replace(choice, recommended=recommended, took=choice.took + time.monotonic() - started)


def choose_for(
    workload: Workload,
    items: int,
    flow: Flow | None = None,
    *,
    per_mode: int = FINALISTS,
    cost_error: float = 0.0,
    cast: Cast | None = None,
    staleness: int = 0,
) -> Choice:
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
        candidates = (
            list(plan_ahead(workload, staleness).values()) if staleness else finalists(workload, max(1, per_mode))
        )
    if not candidates:
        raise PlacementError([_nothing_fits(workload)])
    rows = [
        replace(
            _row(one, workload, items, flow if per_mode else None, limit, cast, staleness),
            risk=risk(one, workload, cost_error, staleness),
        )
        for one in track(candidates, "rehearsing plans", unit="plans")
    ]
    rows.sort(key=lambda row: row.expected)
    why = _why(_firsts(rows), limit, cost_error)
    rows = [replace(row, plan=replace(row.plan, reason=why if row is rows[0] else "")) for row in rows]
    handed: dict[Mode, Handover] = {}
    for one in () if staleness else candidates:
        if (gained := handover(one, workload, items, limit.seconds)) is not None:
            handed.setdefault(gained.mode, gained)
    return Choice(tuple(rows), limit, why, time.monotonic() - started, staleness, handovers=handed)


def _row(
    candidate: Candidate,
    workload: Workload,
    items: int,
    flow: Flow | None,
    limit: Bound,
    cast: Cast | None,
    staleness: int,
) -> Row:
    plan = to_plan(candidate.tree, workload, candidate.chunks, items, None)
    rehearsed: Rehearsal | None = None
    if flow is not None:
        rehearsed = rehearse(
            flow,
            plan,
            workload,
            items=items,
            rehearsed_items=stand_in(items, candidate.chunks),
            cast=cast,
            staleness=staleness,
        )
    seconds = candidate.seconds if rehearsed is None else rehearsed.seconds
    plan = replace(plan, predicted=Prediction(seconds, limit.seconds))
    peak = max(peaks(plan).values(), default=0)
    return Row(
        plan,
        plan.mode,
        candidate.seconds,
        None if rehearsed is None else rehearsed.seconds,
        _bubble(candidate, workload, seconds, staleness),
        max(peak, rehearsed.peak_bytes if rehearsed else 0),
        candidate.chunks,
    )


def stand_in(items: int, chunks: int) -> int:
    """How many items stand for all of a step in a rehearsal: a multiple of its chunks, if the items are one."""
    each = max(1, items // chunks)
    return min(items, chunks * min(each, -(-REHEARSED_ITEMS // chunks)))


def _bubble(candidate: Candidate, workload: Workload, seconds: float, staleness: int) -> float:
    """Share of all device-seconds that is no work."""
    everywhere = sum(workload.devices.values()) * seconds
    work = sum(
        leaf.option.devices * load(replace(leaf, resident=True), candidate.chunks, staleness, alone=True)
        for leaf in leaves(candidate.tree)
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
        estimate = there.time(items, max(1, middle.devices), extrapolate=extrapolate)
        bars.append(min(MOST_ERROR, estimate.error / estimate.seconds))
    return sum(bars) / len(bars)


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


WINDOW = 5
"""Steps whose median is held against the expectation: one slow step is no reason to move."""
WORTH = 0.03
"""A move must promise to be quicker by this share: the planner itself is not known to be better than that."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome of planning: a plan to follow, if any, and a line that says why."""

    plan: Plan | None
    """Where to go; None stays."""
    sentence: str
    """One line for whoever watches."""


class AutoPlacement:
    """Decides between steps where roles should be.

    Args:
        flow: one step, to be rehearsed.
        fleet: the devices of the job.
        memory: bytes of each that may be filled, by kind; None for no limit.
        explored: placements to measure before the first plan, besides the one that the run begins with.
        first: steps that each of them is measured for.
        replan_above: plan anew when the median of the last few steps leaves what was expected by more than this share.
    """

    def __init__(
        self,
        flow: Flow,
        fleet: Fleet,
        memory: Mapping[str, int] | None,
        *,
        explored: list[Plan],
        first: int,
        replan_above: float,
    ) -> None:
        self._flow, self._fleet, self._memory = flow, fleet, memory
        self._first, self._replan_above = first, replan_above
        self._unexplored = list(explored)
        self._measured: list[tuple[Plan, float]] = []
        """Placements where the run has been, with the seconds of a step: better known than by any simulation."""
        self._seconds: deque[float] = deque(maxlen=max(first, WINDOW) + 1)
        self._expected: float | None = None
        """Seconds of a step by the plan that is followed; None until there is one."""

    def due(self, seconds: float) -> bool:
        """A step took so long: whether it is time to plan."""
        self._seconds.append(seconds)
        if self._expected is None:
            return len(self._seconds) >= self._first
        return len(self._seconds) > WINDOW and abs(self._typical / self._expected - 1) > self._replan_above

    @property
    def _typical(self) -> float:
        """Return the median seconds of the last steps; the first one somewhere warms up, so it counts only if it is all
        there is."""
        return statistics.median(list(self._seconds)[1 if len(self._seconds) > 1 else 0 :][-WINDOW:])

    async def decide(self, profile: Profile, plan: Plan) -> Decision:
        """Plan from what was measured.

        Args:
            profile: of the steps so far.
            plan: that is followed now.
        """
        typical, expected = self._typical, self._expected
        self._seconds.clear()
        self._note(plan, typical)
        if expected is None and self._unexplored:
            goal = self._unexplored.pop(0)
            return Decision(goal, f"placement: {plan.mode} takes {typical:.2f} s a step; measuring {goal.mode}")
        why = "" if expected is None else f" (steps take {typical:.2f} s where {expected:.2f} s were expected)"
        options = list(self._measured)
        try:
            choice = await asyncio.to_thread(self._choose, profile)
            simulated = [row for row in choice.best_of_modes if all(not _same(row.plan, one) for one, _ in options)]
            lag = _lag(choice, plan, typical)
            options += [(row.plan, row.seconds + lag) for row in simulated]
            sentence = _rows(choice)
        except PlacementError as error:
            sentence = f"no plan can be made: {error}"
        goal, seconds = min(options, key=lambda option: option[1])
        if _same(goal, plan) or seconds > (1 - WORTH) * typical:
            self._expected = typical
            return Decision(None, f"placement{why}: {plan.mode} stays, at {typical:.2f} s a step; {sentence}")
        self._expected = seconds
        return Decision(goal, f"placement{why}: {goal.mode}, {seconds:.2f} s a step expected; {sentence}")

    def _choose(self, profile: Profile) -> Choice:
        def by(flow: Flow | None) -> Choice:
            choice = choose(profile, self._fleet.by_kind(self._memory), flow, extrapolate=True)
            return choice.numbered(self._fleet)

        try:
            return by(self._flow)
        except PlacementError:  # a flow of one's own may look into what a rehearsal cannot know: formulas have to do
            return by(None)

    def _note(self, plan: Plan, seconds: float) -> None:
        """A placement was measured. If it was before and now takes longer, the others are taken to do so too."""
        earlier = next((before for one, before in self._measured if _same(one, plan)), seconds)
        others = [(one, before * seconds / earlier) for one, before in self._measured if not _same(one, plan)]
        self._measured = [*others, (plan, seconds)]


def _lag(choice: Choice, plan: Plan, seconds: float) -> float:
    """Seconds by which steps here outlast their simulation: messages and threads, which no other plan avoids either."""
    return next((max(0.0, seconds - row.seconds) for row in choice.rows if _same(row.plan, plan)), 0.0)


def _same(one: Plan, other: Plan) -> bool:
    """Both have every role on the same devices."""
    ours, theirs = by_role(one), by_role(other)
    both = [(role.devices, theirs[name].devices) for name, role in ours.items() if name in theirs]
    return all(here == there for here, there in both if here and there)


def _rows(choice: Choice) -> str:
    """The best of each mode, as rehearsed."""
    rows = ", ".join(f"{row.mode} {row.seconds:.2f} s" for row in choice.best_of_modes)
    text = f"simulated from what was measured: {rows}"
    if choice.recommended is not None and choice.recommended.staleness:
        text += f"; were answers begun early (a flow such as grpo_async), {choice.recommended.text}"
    return text
