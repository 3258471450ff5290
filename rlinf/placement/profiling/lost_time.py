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
from dataclasses import dataclass, field, fields, replace
from typing import Literal

import numpy as np

from .bound import Bound
from .spans import NEVER, Spans, in_turn, joined, until

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


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """What one device did during a step; seconds after its start."""

    work: Spans
    """It did a stage's work, `[spans, 2]`; in order, apart, like the others."""
    switch: Spans = field(default_factory=lambda: NEVER)
    """It loaded or parked."""
    sync: Spans = field(default_factory=lambda: NEVER)
    """It published weights, or took them."""
    empty: float = 0.0
    """Seconds of its work in the tail that empty slots of the engine amount to."""


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
    """Split the time of a step above its bound; see `split_lanes`.

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
    did: list[dict[str, list[Span]]] = [{"work": [], "switch": [], "sync": []} for _ in range(devices)]
    tails, empty = joined(_array(tail)), [0.0] * devices
    for one in intervals:
        if not (0 <= one.device < devices and 0 <= one.start <= one.end <= seconds * (1 + 1e-9)):
            raise ValueError(f"{one} lies outside of {devices} devices and {seconds} s")
        did[one.device][one.kind].append((one.start, one.end))
        if one.kind == "work" and one.slots < 1:
            before, after = until(tails, np.array([one.start, one.end]))
            empty[one.device] += (1 - one.slots) * float(after - before)
    lanes = [
        Lane(**{kind: joined(_array(spans)) for kind, spans in own.items()}, empty=none)
        for own, none in zip(did, empty, strict=True)
    ]
    return split_lanes(lanes, seconds, limit, least=least, expected=expected, tail=tails)


def split_lanes(
    lanes: Sequence[Lane],
    seconds: float,
    limit: Bound,
    *,
    least: float,
    expected: float,
    tail: Spans = NEVER,
) -> Losses:
    """Split the time of a step above its bound, over the lanes of all its devices; otherwise as `split`."""
    anywhere = joined(*(lane.work for lane in lanes))
    sums = dict.fromkeys(("work", "switching", "sync", "tail", "imbalance", "overhead"), 0.0)
    for lane in lanes:
        own = in_turn((lane.work, lane.switch, lane.sync, tail, anywhere))
        for name, part in zip(sums, (*own, seconds - sum(own)), strict=True):
            sums[name] += part
    empty, devices = sum(lane.empty for lane in lanes), len(lanes)
    found = Losses(
        imbalance=sums["imbalance"] / devices,
        tail=(sums["tail"] + empty) / devices,
        switching=sums["switching"] / devices,
        sync=sums["sync"] / devices,
        scaling=(expected - least) / devices,
        interference=(sums["work"] - empty - expected) / devices,
        overhead=sums["overhead"] / devices,
    )
    return _excused(found, limit.seconds - least / devices)


def _array(intervals: Sequence[Span]) -> Spans:
    return np.array(intervals, np.float64).reshape(-1, 2)


def _excused(losses: Losses, seconds: float) -> Losses:
    """Take off what the bound says could not be helped."""
    for name in _UNAVOIDABLE:
        part = float(getattr(losses, name))
        taken = min(seconds, max(0.0, part))
        losses = replace(losses, **{name: part - taken})
        seconds -= taken
    return replace(losses, interference=losses.interference - seconds)
