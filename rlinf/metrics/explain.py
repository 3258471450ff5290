"""Explains a step's time: the seconds that devices waited, the causes, and the change that would help most.

In: the `Lap` of a step, the devices of every actor, what was read off the lap, the step's metrics, and a few steps
before it. Out: seconds of the step by what they went to, as means over the devices, which together with work are the
step; causes that were measured, the costliest first, each with its seconds and a clause that says it; and an
`Explanation`, for people and for explained.jsonl: the costliest cause, and the change that would help, with what
it would save. Pure but for the memory of earlier steps.

A moment in which a device does no work counts once, as the first of these that it is: the device loads or parks roles;
it publishes or takes weights; the last few items are generated; a role works on other devices; a role beside the
devices works, such as the reward; nobody works.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from rlinf.metrics.limits import Use, used
from rlinf.placement.bound import Spans, in_turn, joined, length, spans
from rlinf.placement.costs import ASIDE, MOVING, PUBLISHING, MeasuredStep, role_of
from rlinf.runtime.observe.spans import Lap


@dataclass(frozen=True, slots=True)
class TimeSplit:
    """Where the devices' time of a step went, seconds of the step."""

    seconds: float
    """Length of the step."""
    work: float
    """Devices worked."""
    switching: float
    """They loaded and parked roles."""
    sync: float
    """They published or took weights."""
    tail: float
    """They idled while the last few items were generated."""
    others: Mapping[tuple[str, str], float]
    """They idled while a role worked elsewhere: by (role whose device idled, role that worked)."""
    off_devices: Mapping[str, float]
    """No device worked, and a role beside them did: by role."""
    nobody: float
    """Nobody worked."""
    by_actor: Mapping[str, float]
    """Seconds that each actor on devices worked."""
    moved: Mapping[str, float]
    """By role: seconds of loading and parking, added up over its actors."""


def split_time(lap: Lap, devices: Mapping[str, frozenset[int]], measurements: MeasuredStep) -> TimeSplit:
    """Split the time of a step.

    Args:
        lap: the step.
        devices: of every actor, by a name such as "rollout[0]"; an actor that is missing has none.
        measurements: what was read off it.
    """
    actors: dict[str, list[Spans]] = defaultdict(list)
    for part in lap.busy:
        if part.endpoint not in ASIDE | MOVING | PUBLISHING:
            actors[part.actor].append(spans(part.intervals, lap.start, lap.end))
    own = {actor: joined(*parts) for actor, parts in actors.items()}
    roles: dict[str, list[Spans]] = defaultdict(list)
    deviceless: dict[str, list[Spans]] = defaultdict(list)
    for actor, times in own.items():
        (roles if devices.get(actor) else deviceless)[role_of(actor)].append(times)
    on, off = ({role: joined(*parts) for role, parts in each.items()} for each in (roles, deviceless))
    sums: dict[str, float] = defaultdict(float)
    others: dict[tuple[str, str], float] = defaultdict(float)
    apart: dict[str, float] = defaultdict(float)
    names = sorted(off, key=lambda role: -length(off[role]))
    for number, lane in measurements.lanes.items():
        mine = sorted({role_of(actor) for actor, where in devices.items() if number in where})
        working = [role for role in on if len(on[role])]
        parts = [
            lane.work,
            lane.switch,
            lane.sync,
            measurements.tail,
            *(on[role] for role in working),
            *(off[n] for n in names),
        ]
        in_order = in_turn(parts)
        for name, seconds in zip(("work", "switching", "sync", "tail"), in_order, strict=False):
            sums[name] += seconds
        for role, seconds in zip(working, in_order[4:], strict=False):
            others["+".join(mine) or "nobody", role] += seconds
        for role, seconds in zip(names, in_order[4 + len(working) :], strict=True):
            apart[role] += seconds
        sums["nobody"] += measurements.seconds - sum(in_order)
    count = max(1, len(measurements.lanes))
    moved: dict[str, float] = defaultdict(float)
    for move in lap.moves:
        moved[role_of(move.actor)] += move.end - move.start
    return TimeSplit(
        measurements.seconds,
        sums["work"] / count,
        sums["switching"] / count,
        sums["sync"] / count,
        sums["tail"] / count,
        {pair: seconds / count for pair, seconds in others.items()},
        {role: seconds / count for role, seconds in apart.items()},
        sums["nobody"] / count,
        {actor: length(times) for actor, times in own.items() if devices.get(actor)},
        dict(moved),
    )


Name = Literal[
    "idle device",
    "tail",
    "slow host",
    "bound on staleness",
    "waiting",
    "reward",
    "environment",
    "beside",
    "switching",
    "weights",
    "small micro-batches",
    "longer answers",
    "busy machine",
    "flow",
]
MICRO_BATCH = "micro_batch"
"""Actors note each micro-batch under this name, with its seconds and its tokens."""
REMEMBERED = 4
"""Steps by which a slow host is told from a long answer: chance hits another one each time."""
SLOWER = 1.25
"""By how much the slowest actor of a role must exceed the middle of the others, in nearly all of these steps."""
GROWN = 1.1
"""By how much answers must be longer than usual to be the reason why work took longer."""
_FIT = 256
"""Micro-batches over which the cost of one is estimated."""
_LEAST = 8
"""Least number of micro-batches for that."""
_JUDGES = ("judge", "reward_model")
_ENVIRONMENTS = ("env", "trials")


@dataclass(frozen=True, slots=True)
class Cause:
    """One reason."""

    name: Name
    seconds: float
    """Seconds of the step that it cost."""
    text: str
    """Description as a clause: "training waited 0.4 s for ..."."""
    who: str = ""
    """The role or actor that it is about."""
    failed: float = 0.0
    """The share of answers without a reward, where it is about scoring."""


class Causes:
    """Finds the causes of each step; keeps what it must know of the steps before.

    Args:
        staleness: steps that work is begun early; 0 is synchronous.
    """

    def __init__(self, staleness: int = 0) -> None:
        self._staleness = staleness
        self._slowest: dict[str, deque[str | None]] = {}
        self._tokens: deque[float] = deque(maxlen=16)
        self._pieces: deque[tuple[float, float]] = deque(maxlen=_FIT)

    def find(
        self,
        lap: Lap,
        measurements: MeasuredStep,
        where: TimeSplit,
        losses: Mapping[str, float],
        metrics: Mapping[str, float],
        uses: Sequence[Use] = (),
    ) -> list[Cause]:
        """Return the causes of one step, the costliest first.

        Args:
            lap, seen, where: the step.
            losses: seconds above the bound by `lost/...` without that prefix.
            metrics: of the step.
            uses: of the devices' limits.
        """
        causes = [
            *(_idle(use, len(measurements.lanes)) for use in uses if use.lost),
            *self._waits(measurements, where),
            *self._off_devices(where, metrics),
            *self._moves(where),
            *self._work(lap, losses, metrics),
        ]
        return sorted(causes, key=lambda cause: -cause.seconds)

    # Idle devices ------------------------------------------------------------------------------------------------

    def _waits(self, measurements: MeasuredStep, where: TimeSplit) -> Iterator[Cause]:
        slow = dict(self._slow_hosts(where))
        tail, others = where.tail, dict(where.others)
        for role, (actor, excess) in slow.items():
            waited = sum(seconds for (_, working), seconds in others.items() if working == role)
            ends = measurements.source is not None and role in measurements.source.split("+")
            waited += tail if ends else 0.0
            if (cost := min(excess, waited)) > 0:
                yield Cause("slow host", cost, f"{actor} took {excess:.2g} s longer than its peers, as before", actor)
                tail = 0.0 if ends else tail
                others = {pair: each for pair, each in others.items() if pair[1] != role}
        if tail:
            count = len(measurements.released)
            last = max(1, count - int(0.95 * count))
            yield Cause(
                "tail",
                tail,
                f"devices idled {_s(tail)} for the last {last} of {count} items",
                measurements.source or "",
            )
        for (idle, working), seconds in others.items():
            ahead = self._staleness and working == "trainer" and idle != "nobody"
            name: Name = "bound on staleness" if ahead else "waiting"
            text = f"devices of {idle} idled {_s(seconds)} while {working} worked elsewhere"
            yield Cause(name, seconds, text + (": nothing may be begun earlier" if ahead else ""), working)

    def _slow_hosts(self, where: TimeSplit) -> Iterator[tuple[str, tuple[str, float]]]:
        """By role: an actor that was the slowest in nearly all of the last steps, and by how much in this one."""
        roles: dict[str, dict[str, float]] = {}
        for actor, seconds in where.by_actor.items():
            roles.setdefault(role_of(actor), {})[actor] = seconds
        for role, actors in roles.items():
            if len(actors) < 2:
                continue
            slowest = max(actors, key=lambda actor: actors[actor])
            usual = statistics.median(seconds for actor, seconds in actors.items() if actor != slowest)
            stands_out = actors[slowest] >= SLOWER * usual
            past = self._slowest.setdefault(role, deque(maxlen=REMEMBERED))
            past.append(slowest if stands_out else None)
            if stands_out and past.count(slowest) >= REMEMBERED - 1:
                yield role, (slowest, actors[slowest] - usual)

    def _off_devices(self, where: TimeSplit, metrics: Mapping[str, float]) -> Iterator[Cause]:
        for role, seconds in where.off_devices.items():
            if role in _JUDGES:
                failed = metrics.get("reward/failed", 0.0)
                late = f" ({failed:.0%} of them failed)" if failed else ""
                text = f"no device worked for {_s(seconds)} while answers were scored{late}"
                yield Cause("reward", seconds, text, role, failed)
            elif role in _ENVIRONMENTS:
                text = f"no device worked for {_s(seconds)} while environments stepped"
                yield Cause("environment", seconds, text, role)
            else:
                yield Cause("beside", seconds, f"no device worked for {_s(seconds)} while {role} did", role)
        text = f"nobody worked for {_s(where.nobody)}: the flow itself, data, or what it calls besides its roles"
        yield Cause("flow", where.nobody, text)

    def _moves(self, where: TimeSplit) -> Iterator[Cause]:
        if where.switching:
            parts = ", ".join(
                f"{role} {_s(each)}" for role, each in sorted(where.moved.items(), key=lambda one: -one[1])
            )
            yield Cause("switching", where.switching, f"loading and parking roles took {_s(where.switching)} ({parts})")
        if where.sync:
            yield Cause("weights", where.sync, f"publishing weights took {_s(where.sync)}")

    # Work that took longer ---------------------------------------------------------------------------------------

    def _work(self, lap: Lap, losses: Mapping[str, float], metrics: Mapping[str, float]) -> Iterator[Cause]:
        longer, tokens = losses.get("interference", 0.0), metrics.get("response_tokens")
        usual = statistics.median(self._tokens) if self._tokens else None
        if tokens is not None:
            self._tokens.append(tokens)
        if longer > 0:
            if tokens is not None and usual and tokens >= GROWN * usual:
                text = f"work took {_s(longer)} longer than usual, for answers {tokens / usual:.1f} times as long"
                yield Cause("longer answers", longer, text)
            else:
                yield Cause("busy machine", longer, f"the same work took {_s(longer)} longer than usual")
        pieces: dict[str, list[tuple[float, float]]] = {}
        for span in lap.parts:
            if span.what == MICRO_BATCH:
                pieces.setdefault(span.actor, []).append((float(span.bytes), span.end - span.start))
        for each in pieces.values():
            self._pieces.extend(each)
        count = max(map(len, pieces.values()), default=0)
        if count > 1 and (cost := self._cost_of_one()) > 0:
            mean = statistics.mean(tokens for each in pieces.values() for tokens, _ in each)
            text = (
                f"{count} micro-batches of {mean:.0f} tokens cost {_ms(cost)} each beside their tokens, "
                f"{_s(cost * count)} in all"
            )
            yield Cause("small micro-batches", cost * (count - 1), text, "trainer")

    def _cost_of_one(self) -> float:
        """Seconds of a micro-batch without tokens: of the median of lines through pairs of micro-batches of unlike
        sizes (Theil, 1950; Sen, 1968), which accidents do not move; 0 where sizes are too alike to tell."""
        if len(self._pieces) < _LEAST:
            return 0.0
        sizes, seconds = zip(*sorted(self._pieces), strict=True)
        half = len(sizes) // 2
        pairs = [
            ((seconds[at + half] - seconds[at]) / (sizes[at + half] - sizes[at]))
            for at in range(half)
            if sizes[at + half] >= 1.2 * sizes[at] > 0
        ]
        if len(pairs) < _LEAST // 2:
            return 0.0
        slope = max(0.0, statistics.median(pairs))
        return max(0.0, statistics.median(took - slope * size for size, took in zip(sizes, seconds, strict=True)))


def _idle(use: Use, devices: int) -> Cause:
    """A device that was at work, and did little of what it can do."""
    text = used(use.role, use.resource, use.share)
    rest = f"{1 - use.share:.0%} of its {_s(use.took / devices)} is launches, waiting and other work"
    return Cause("idle device", use.lost / devices, f"{text}: {rest}", use.role)


def _s(seconds: float) -> str:
    """`0.42 s`, with two digits that count."""
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def _ms(seconds: float) -> str:
    """`4.2 ms`, `120 ms`."""
    return f"{seconds * 1e3:.{0 if seconds >= 0.01 else 2}{'f' if seconds >= 0.01 else 'g'}} ms"


WORTH = 0.03
"""Share of a step; below it nothing needs to be explained."""

TWICE = 2
"""Steps of one cause that are a habit and no accident: a run of a few steps has one that was slowest, always."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the run's keys that would help, and its predicted gain."""

    text: str
    """A clause that says what to do, such as "set `staleness.max=1`"."""
    seconds: float
    """Seconds of a step that it is predicted to save; 0 where nobody can say."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a step took as long as it did."""

    text: str
    """One sentence."""
    cause: str
    """One of `Name`; "none" where no cause is worth a word."""
    seconds: float = 0.0
    """Seconds of the step that it cost."""
    change: str | None = None
    """Change that would help."""
    saves: float = 0.0
    """Seconds of the step that the change is predicted to save."""


class Advice(Protocol):
    """Knows the run's keys and plans: `rlinf.runs.placement_manager.Changes`, which stands above this package."""

    def change(self, cause: Cause, step: float) -> Change | None:
        """Return the change that would help against a cause, in a step of so many seconds; None where nothing is
        known."""


class Explainer:
    """Explains the steps of one run.

    Args:
        advice: what would help; None says causes alone.
        staleness: steps that work is begun early.
    """

    def __init__(self, advice: Advice | None = None, staleness: int = 0) -> None:
        self._advice = advice
        self._causes = Causes(staleness)

    def step(
        self,
        lap: Lap,
        devices: Mapping[str, frozenset[int]],
        measurements: MeasuredStep,
        metrics: Mapping[str, float],
        uses: Sequence[Use] = (),
    ) -> Explanation | None:
        """Explain a step.

        Args:
            lap: the step.
            devices: of every actor.
            measurements: what was read off it.
            metrics: of the step, `lost/...` among them.
            uses: of the devices' limits, where they are known and it is worth a word.

        Returns:
            None where no device worked.
        """
        if not measurements.lanes or measurements.seconds <= 0:
            return None
        losses = {name.removeprefix("lost/"): value for name, value in metrics.items() if name.startswith("lost/")}
        where = split_time(lap, devices, measurements)
        causes = self._causes.find(lap, measurements, where, losses, metrics, uses)
        worth = [cause for cause in causes if cause.seconds >= WORTH * measurements.seconds]
        if not worth:
            return Explanation("devices were at work nearly all the time", "none")
        first, step = worth[0], measurements.seconds
        other = next((cause for cause in worth if cause.name != "idle device"), first)  # what a key may change
        text = first.text if other is first else f"{first.text}; besides, {other.text}"
        change = None if self._advice is None else self._advice.change(other, step)
        if change is None:
            return Explanation(text, first.name, first.seconds)
        saves = min(change.seconds, other.seconds) if change.seconds else 0.0
        gain = f", which would save {saves / step:.0%}".replace("%", " %") if saves else ""
        return Explanation(f"{text}; {change.text}{gain}", first.name, first.seconds, change.text, saves)


def in_short(steps: Sequence[Explanation]) -> list[str]:
    """A line on what most steps waited for, and the newest sentence that says so; none where there is nothing to say.

    Args:
        steps: of a run, in order; the first, which warms up, does not count if there are others.
    """
    explanations = [each for each in (steps[1:] or steps) if each.cause != "none"]
    if not explanations:
        return []
    names = Counter(each.cause for each in explanations)
    often = max(names, key=lambda name: sum(each.seconds for each in explanations if each.cause == name))
    if names[often] < TWICE:
        return []
    last = next(each for each in reversed(explanations) if each.cause == often)
    return [f"{names[often]} of {len(steps)} steps lost most to: {often}; the last of them: {last.text}"]
