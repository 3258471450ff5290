"""From a trace to lanes of devices: which role used each of them when, who held it, and when it was idle.

In: trace.json. Out: of one step, or of all, a lane per host, since a host stands for its device. "Busy" is what the
metrics `timing/...` call so. What it looks like is `trace_lanes_svg`'s business.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlinf.metrics.html.actor_lanes import Trace
from rlinf.metrics.timing import activity_of
from rlinf.runtime.observe.busy import busy
from rlinf.runtime.observe.intervals import Interval, union, without
from rlinf.runtime.observe.spans import Span

LOADING, PARKING = "loading", "parking"
"""A role moves its bytes onto the device, or off it."""
HELD = "lease"
"""A role may use the device, whether or not it does."""
_MOVES = {"onload": LOADING, "offload": PARKING}
_ASIDE = 0.02
"""Share of a role's time on a device that may coincide with another's before it gets a row of its own: calls that hand
the device over touch each other."""


@dataclass(frozen=True, slots=True)
class Use:
    """A time during which a role did one thing on a device."""

    role: str
    """Such as "rollout"."""
    what: str
    """An activity such as `generation` or `sync`, or LOADING, PARKING, HELD."""
    start: float
    """Seconds since the window began."""
    end: float
    """Seconds since the window began."""


@dataclass(frozen=True, slots=True)
class DeviceLane:
    """What went on on one device."""

    host: int
    """Number of its host."""
    work: tuple[Use, ...]
    """In order of their starts."""
    moves: tuple[Use, ...]
    """Loading and parking."""
    leases: tuple[Use, ...]
    """Who might use it when; empty where roles work without leases."""
    rows: Mapping[str, int]
    """Role to row: roles that work at the same time lie below each other."""
    seconds: float
    """In which at least one role worked."""


@dataclass(frozen=True, slots=True)
class DeviceLanes:
    """All devices during one window of a trace."""

    title: str
    """What ran."""
    step: int | None
    """Which step of the flow it is; None: all of them."""
    seconds: float
    """How long it was."""
    lanes: tuple[DeviceLane, ...]
    """By host."""

    @property
    def busy(self) -> float:
        """The share of the devices' time in which they worked."""
        whole = self.seconds * len(self.lanes)
        return sum(lane.seconds for lane in self.lanes) / whole if whole else 0.0

    def shares(self) -> list[tuple[int, dict[str, float]]]:
        """Per host the share of the time in which each role worked, under "moves" that in which any role moved, and
        under "idle" that in which nothing of this went on."""
        found = []
        for lane in self.lanes:
            moves = union((use.start, use.end) for use in lane.moves)
            parts = {role: _length(times) for role, times in _by_role(lane.work).items()}
            used = _length(union([*((use.start, use.end) for use in lane.work), *moves]))
            parts |= {"moves": _length(moves), "idle": self.seconds - used}
            found.append((lane.host, {name: spent / self.seconds for name, spent in parts.items()}))
        return found


def device_lanes(path: Path, step: int | None = None, *, whole: bool = False) -> DeviceLanes:
    """Read what each device did.

    Args:
        path: of a trace.json, or of the run's directory that has one.
        step: which step of the flow; default: the one in the middle.
        whole: instead, from the beginning of the first step to the end of the last.

    Raises:
        ValueError: there is no such file, it is no trace, or has no such step.
    """
    path = path / "trace.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"there is no file {path}: name the trace.json of a run, or its directory")
    trace = Trace(path)
    if not trace.steps:
        raise ValueError(f"{path} has no step of a flow: was the run ended before its first step was over?")
    if whole and step is None:
        start, end = trace.window(trace.steps[0])[0], trace.window(trace.steps[-1])[1]
    else:
        step = trace.steps[len(trace.steps) // 2] if step is None else step
        start, end = trace.window(step)
    (hosts,) = trace.spans([(start, end)])
    lanes = tuple(_lane(host, hosts.get(host, []), (start, end)) for host in trace.hosts)
    return DeviceLanes(title_of(path), step, end - start, lanes)


def title_of(path: Path) -> str:
    """What a trace is called: by its file, or by the run's directory if the file is named as in all runs."""
    return path.absolute().parent.name if path.stem == "trace" else path.stem


def _lane(host: int, spans: Sequence[Span], window: Interval) -> DeviceLane:
    work: dict[tuple[str, str], list[Interval]] = defaultdict(list)
    moves: dict[tuple[str, str], list[Interval]] = defaultdict(list)
    leases: dict[tuple[str, str], list[Interval]] = defaultdict(list)
    for part in busy(spans):
        activity = activity_of(part.actor, part.endpoint)
        if activity is not None and part.endpoint not in _MOVES:
            work[_role(part.actor), activity] += part.intervals
    for span in spans:
        if span.kind == "move":
            moves[_role(span.actor), _MOVES[span.endpoint]].append((span.start, span.end))
        elif span.kind == "lease":
            leases[_role(span.actor), HELD].append((span.start, span.end))
    used = _uses(work, window)
    seconds = _length(union((use.start, use.end) for use in used))
    return DeviceLane(host, used, _uses(moves, window), _uses(leases, window), _rows(used), seconds)


def _role(actor: str) -> str:
    return actor.partition("[")[0]


def _uses(found: Mapping[tuple[str, str], Iterable[Interval]], window: Interval) -> tuple[Use, ...]:
    """What lies within the window, in order."""
    begin, finish = window
    clipped = (
        Use(role, what, max(start, begin) - begin, min(end, finish) - begin)
        for (role, what), times in found.items()
        for start, end in union(times)
        if end > begin and start < finish
    )
    return tuple(sorted((use for use in clipped if use.end > use.start), key=lambda use: use.start))


def _rows(work: Sequence[Use]) -> dict[str, int]:
    """Each role gets the first row in which it is in nobody's way."""
    times = _by_role(work)
    rows: dict[str, int] = {}
    for role, own in times.items():
        for row in itertools.count():
            there = union(itertools.chain.from_iterable(times[other] for other, at in rows.items() if at == row))
            free = _length(without(own, there))
            if _length(own) - free <= _ASIDE * min(_length(own), _length(there)):
                rows[role] = row
                break
    return rows


def _by_role(uses: Iterable[Use]) -> dict[str, list[Interval]]:
    found: dict[str, list[Interval]] = defaultdict(list)
    for use in uses:
        found[use.role].append((use.start, use.end))
    return {role: union(times) for role, times in found.items()}


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
