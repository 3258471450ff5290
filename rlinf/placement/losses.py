"""Where the time above the bound went: the parts of T - T_LB, which add up to it.

Flows in: what each device did during a step, and what its work should have cost. Flows out: the parts, in seconds of
the step. Nothing waits here.

N devices have N·T device-seconds. Each of them is work, a switch, a synchronisation, or idle; work is the least there
is (B1), what the chosen sizes cost above that, or what was measured above the profile. Divided by N this is T - B1
exactly. Where another part of the bound is larger than B1, some of the idle time could not be helped: it is taken off
the tail first, then off imbalance and the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from .bound import Bound

Span = tuple[float, float]
"""Start and end in seconds after the start of the step."""
_UNAVOIDABLE = ("tail", "imbalance", "overhead", "scaling", "switching", "sync", "interference")
"""In this order the parts give up what the bound itself says could not be helped."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A device did something for a while."""

    device: int
    """Its number."""
    start: float
    """Seconds after the start of the step."""
    end: float
    """The same."""
    kind: Literal["work", "switch", "sync"]
    """What; where several overlap on a device, the first of this list counts."""
    slots: float = 1.0
    """Share of the engine's slots that were taken, 0 to 1; matters only in the tail."""


@dataclass(frozen=True, slots=True)
class Losses:
    """Parts of T - T_LB, in seconds of the step."""

    imbalance: float
    """Idle while others worked."""
    tail: float
    """Idle devices and empty slots while the last few items were generated."""
    switching: float
    """Loading and parking."""
    sync: float
    """Publishing weights."""
    scaling: float
    """Work costs more device-seconds at the sizes that were chosen than at the most efficient ones."""
    interference: float
    """Work took longer than its profile says (negative: less long)."""
    overhead: float
    """No device worked: the runtime, data, the flow itself."""

    @property
    def total(self) -> float:
        """T - T_LB."""
        return sum(float(getattr(self, part.name)) for part in fields(self))


def split(
    intervals: Iterable[Interval],
    devices: int,
    seconds: float,
    limit: Bound,
    *,
    least: float,
    expected: float,
    tail: Sequence[Span] = (),
) -> Losses:
    """Split the time of a step above its bound.

    Args:
        intervals: what devices 0 … `devices` - 1 did, within 0 … `seconds`; may overlap.
        devices: N.
        seconds: T.
        limit: the bound of this step.
        least: device-seconds of all stages at their most efficient sizes, N·B1.
        expected: device-seconds of all stages at the sizes that ran, by the profile.
        tail: when the last items were generated, e.g. from 95 % done to the end.

    Raises:
        ValueError: a device or a time lies outside.
    """
    step = [(0.0, seconds)]
    lanes: dict[int, list[Interval]] = {number: [] for number in range(devices)}
    for interval in intervals:
        if interval.device not in lanes or not 0 <= interval.start <= interval.end <= seconds * (1 + 1e-9):
            raise ValueError(f"{interval} lies outside of {devices} devices and {seconds} s")
        lanes[interval.device].append(interval)
    busy = _union((i.start, i.end) for lane in lanes.values() for i in lane if i.kind == "work")
    tails = _union(tail)
    work = empty = 0.0
    idle = dict.fromkeys(("tail", "imbalance", "overhead", "switch", "sync"), 0.0)
    for lane in lanes.values():
        free = step
        for kind in ("work", "switch", "sync"):
            spans = _union((i.start, i.end) for i in lane if i.kind == kind)
            taken = _length(_common(free, spans))
            free = _without(free, spans)
            if kind == "work":
                work += taken
            else:
                idle[kind] += taken
        empty += sum((1 - i.slots) * _length(_common([(i.start, i.end)], tails)) for i in lane if i.kind == "work")
        rest = _without(free, tails)
        idle["tail"] += _length(_common(free, tails))
        idle["imbalance"] += _length(_common(rest, busy))
        idle["overhead"] += _length(_without(rest, busy))
    found = Losses(
        imbalance=idle["imbalance"] / devices,
        tail=(idle["tail"] + empty) / devices,
        switching=idle["switch"] / devices,
        sync=idle["sync"] / devices,
        scaling=(expected - least) / devices,
        interference=(work - empty - expected) / devices,
        overhead=idle["overhead"] / devices,
    )
    return _excused(found, limit.seconds - least / devices)


def _excused(losses: Losses, seconds: float) -> Losses:
    """Take off what the bound says could not be helped."""
    for name in _UNAVOIDABLE:
        part = float(getattr(losses, name))
        taken = min(seconds, max(0.0, part))
        losses = replace(losses, **{name: part - taken})
        seconds -= taken
    return replace(losses, interference=losses.interference - seconds)


def _union(spans: Iterable[Span]) -> list[Span]:
    """Disjoint spans in order."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _common(first: Sequence[Span], second: Sequence[Span]) -> list[Span]:
    """What lies in both; each in order and disjoint."""
    found, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            found.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


def _without(first: Sequence[Span], second: Sequence[Span]) -> list[Span]:
    """What lies in the first alone; each in order and disjoint."""
    found: list[Span] = []
    for start, end in first:
        for cut in _common([(start, end)], second):
            found.append((start, cut[0]))
            start = cut[1]
        found.append((start, end))
    return [(start, end) for start, end in found if start < end]


def _length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)
