"""Split the time of a step above its lower bound into causes; the parts add up to T - T_LB.

Flows in: what each device did during a step, and what its work should have cost. Flows out: the parts, in seconds of
the step. Nothing waits here.

N devices have N·T device-seconds. Each of them is work, a switch, a synchronisation, or idle; work is the least there
is (B1), what the chosen sizes cost above that, or what was measured above the profile. Divided by N this is T - B1
exactly. Where another part of the bound is larger than B1, some of the idle time could not be helped: it is taken off
the tail first, then off imbalance and the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from .bound import Bound
from .spans import NEVER, Spans, in_turn, joined

_UNAVOIDABLE = ("tail", "imbalance", "overhead", "scaling", "switching", "sync", "interference")
"""In this order the parts give up what the bound itself says could not be helped."""


@dataclass(frozen=True, slots=True)
class Losses:
    """Parts of T - T_LB, in seconds of the step."""

    imbalance: float
    """Idle while others worked."""
    tail: float
    """Idle while the last few items were generated."""
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


def split(
    lanes: Sequence[Lane],
    seconds: float,
    limit: Bound,
    *,
    least: float,
    expected: float,
    tail: Spans = NEVER,
) -> Losses:
    """Split the time of a step above its bound.

    Args:
        lanes: what each device did; where several kinds overlap on one, work counts before a switch, that before sync.
        seconds: T.
        limit: the bound of this step.
        least: device-seconds of all stages at their most efficient sizes, N·B1.
        expected: device-seconds of all stages at the sizes that ran, by the profile.
        tail: when the last items were generated, e.g. from 95 % done to the end.
    """
    anywhere = joined(*(lane.work for lane in lanes))
    sums = dict.fromkeys(("work", "switching", "sync", "tail", "imbalance", "overhead"), 0.0)
    for lane in lanes:
        own = in_turn((lane.work, lane.switch, lane.sync, tail, anywhere))
        for name, part in zip(sums, (*own, seconds - sum(own)), strict=True):
            sums[name] += part
    devices = len(lanes)
    found = Losses(
        imbalance=sums["imbalance"] / devices,
        tail=sums["tail"] / devices,
        switching=sums["switching"] / devices,
        sync=sums["sync"] / devices,
        scaling=(expected - least) / devices,
        interference=(sums["work"] - expected) / devices,
        overhead=sums["overhead"] / devices,
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
