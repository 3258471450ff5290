"""How far one step was from the possible: E = T_LB / T, what binds, and where the rest went.

Flows in: a step that was read off its spans, and the profile so far. Flows out: `Efficiency`. Nothing waits here.

What is possible is judged by what stages cost on the sizes that were ever measured, and by no more than they cost in
this very step: a step that was quicker than its profile proves that it can be. So no part is negative and E is at most
1. Where the profile is that of the run itself, it follows that

* interference is what this step's work took above the run's own median: a neighbour on the machine, or longer answers;
* scaling is 0 until some stage has run on another number of devices;
* what a whole run could do better, such as a slow kernel, is not seen: it is in the bound.

Saturation takes a stage that was measured on few devices to scale perfectly to all. The longest item alone and forced
switches are not known from a step: the bound's `tail` is 0 and `memory` is its `area`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from .bound import Bound, longest_row
from .losses import Losses, split_lanes
from .observed import Seen, StageTime
from .profile import Profile, Timing


@dataclass(frozen=True, slots=True)
class Efficiency:
    """One step beside the bound."""

    seconds: float
    """T, of the step."""
    devices: int
    """That some role had."""
    limit: Bound
    """T_LB with its parts."""
    losses: Losses
    """Where T - T_LB went."""

    @property
    def value(self) -> float:
        """E = T_LB / T, above 0 and at most 1."""
        return self.limit.efficiency(self.seconds)

    def metrics(self) -> dict[str, float]:
        """As metrics of the step: `bound/…` and `lost/…`, in seconds but for efficiency and devices."""
        found = {"bound/seconds": self.limit.seconds, "bound/efficiency": self.value}
        found |= {f"bound/{name}": float(getattr(self.limit, name)) for name in ("area", "saturation", "network")}
        found["bound/devices"] = float(self.devices)
        return found | {f"lost/{part.name}": float(getattr(self.losses, part.name)) for part in fields(self.losses)}


def efficiency(seen: Seen, profile: Profile, items: int) -> Efficiency | None:
    """Put a step beside what is possible.

    Args:
        seen: the step.
        profile: what its stages cost, in this step or any other; where it says nothing, this step stands for itself.
        items: of the step.

    Returns:
        None where no device worked.
    """
    count = len(seen.lanes)
    if not count or seen.seconds <= 0 or not any(stage.work > 0 for stage in seen.stages.values()):
        return None
    expected = least = 0.0
    fastest: dict[str, float] = {}
    for name, stage in seen.stages.items():
        known = list(_known(profile, name, items))
        own, best = _work(stage, known)
        expected, least = expected + own, least + best
        fastest[name] = _quickest(stage, known, count)
    published = [one.seconds for one in profile.sync]
    area = least / count
    limit = Bound(area, longest_row(fastest, seen.edges), 0.0, area, min([seen.sync, *published]))
    losses = split_lanes(list(seen.lanes.values()), seen.seconds, limit, least=least, expected=expected, tail=seen.tail)
    return Efficiency(seen.seconds, count, limit, losses)


def _known(profile: Profile, name: str, items: int) -> Iterator[Timing]:
    if name in profile.stages:
        yield from (one for one in profile.stages[name].timings if one.batch == items)


def _work(stage: StageTime, known: list[Timing]) -> tuple[float, float]:
    """Device-seconds of a stage at the size that it had, and at its most efficient one."""
    size = len(stage.devices)
    if not size:
        return 0.0, 0.0
    expected = min([stage.work, *(one.work for one in known if one.devices == size)])
    return expected, min([expected, *(one.work for one in known)])


def _quickest(stage: StageTime, known: list[Timing], count: int) -> float:
    """Seconds of a stage at its quickest on up to `count` devices."""
    if not stage.devices:
        return min([stage.seconds, *(one.seconds for one in known)])
    times = [(len(stage.devices), stage.seconds), *((one.devices, one.seconds) for one in known)]
    widest = max(devices for devices, _ in times)
    scaled = min(seconds for devices, seconds in times if devices == widest) * min(1.0, widest / count)
    return min([scaled, *(seconds for _, seconds in times)])
