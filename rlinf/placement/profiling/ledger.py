"""Accounts of a run's steps: the profile pooled over them, and the efficiency of each step against its lower bound.

Flows in: the `Lap` of every step. Flows out: metrics of the step, the profile, `profile.json`. Nobody is woken.

What is possible, E = T_LB / T, is judged by what stages cost on the sizes that were ever measured, and by no more than
they cost in this very step: a step that was quicker than its profile proves that it can be. So no part is negative and
E is at most 1. Where the profile is that of the run itself, it follows that

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
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlinf.runtime.observe.lap import Lap

from .bound import Bound, longest_row
from .lost_time import Losses, split
from .profile import BESIDE, Footprint, Profile, Release, StageProfile, Timing, save
from .step_costs import Seen, StageTime, observed, see

PROFILE = "profile.json"
"""File name in a run directory."""
WINDOW = 64
"""Steps that are remembered: enough for a median, few enough that the profile follows answers that grow longer."""


class Ledger:
    """Pools measured stage costs over the steps of one run and rates each step.

    Args:
        devices: of every actor, by a name such as "rollout[0]"; set it anew when roles move.
        items: of a step.
        count: devices of the job, 0 to count - 1; those that no actor has count too.
        model, machine, flow: see `Profile`.
        kinds: of each device, by its number; "gpu" beyond.
        held: by role: bytes on each of its devices while it is loaded, and while it is parked.
        known: what earlier runs measured.
        staleness: steps that work is begun early; above 0, a step's work is of several batches, so that no stage need
            wait for another's of the same step.

    Raises:
        ValueError: `known` is of another model, machine or flow.
    """

    def __init__(
        self,
        devices: Mapping[str, frozenset[int]],
        items: int,
        *,
        count: int = 0,
        model: str,
        machine: str,
        flow: str,
        kinds: Sequence[str] = (),
        held: Mapping[str, tuple[int, int]] | None = None,
        known: Profile | None = None,
        staleness: int = 0,
    ) -> None:
        if known is not None and (problems := known.mismatch(model, machine, flow)):
            raise ValueError("; ".join(problems))
        self.devices, self._items, self._count, self._known, self._held = devices, items, count, known, held
        self._about: dict[str, Any] = {
            "model": model, "machine": machine, "flow": flow, "kinds": kinds, "staleness": staleness,
        }  # fmt: skip
        self._steps: deque[Profile] = deque(maxlen=WINDOW)
        self.last: Efficiency | None = None
        """Of the newest step; None before the first, and where no device worked."""
        self.seen: Seen | None = None
        """What was read off it."""

    @property
    def profile(self) -> Profile | None:
        """What this run measured, with what was known before; None before the first step."""
        own = pooled(self._steps) if self._steps else None
        return own if own is None or self._known is None else self._known.merged(own)

    def step(self, lap: Lap) -> dict[str, float]:
        """Take a step.

        Returns:
            Its metrics `bound/…` and `lost/…`; none where no device worked.
        """
        self.seen = seen = see(lap, self.devices, self._count)
        if seen.stages:
            self._steps.append(observed(seen, self._items, held=self._held, **self._about))
        so_far = self.profile
        self.last = efficiency(seen, so_far, self._items) if so_far is not None else None
        return self.last.metrics() if self.last is not None else {}

    def save(self, directory: Path) -> None:
        """Write what was measured into a run's directory; nothing if no step is over."""
        if (profile := self.profile) is not None:
            save(profile, directory / PROFILE)


def pooled(steps: Iterable[Profile]) -> Profile:
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
        {name: _pooled_stage(found) for name, found in by_name.items()},
        {},
        _medians([timing for one in steps for timing in one.sync]),
        last.flow,
        last.items,
        tuple((source, target, barrier) for (source, target), barrier in sorted(edges.items())),
        tuple(dict.fromkeys(pair for one in steps for pair in one.published)),
        last.staleness,
    )


def _pooled_stage(found: Sequence[StageProfile]) -> StageProfile:
    """The kind that it was on last comes first; one beside the devices has no others, and may have moved onto some."""
    kinds = dict.fromkeys(one.kind for one in reversed(found))
    first, *rest = (_pooled_kind([one for one in found if one.kind == kind]) for kind in kinds)
    release = _mean_release([one.release for one in found if one.release is not None])
    others = tuple(one for one in rest if one.kind != BESIDE) if first.kind != BESIDE else ()
    return replace(first, release=release, others=others)


def _pooled_kind(alike: Sequence[StageProfile]) -> StageProfile:
    held: dict[int, list[Footprint]] = {}
    for footprint in itertools.chain.from_iterable(one.footprints for one in alike):
        held.setdefault(footprint.devices, []).append(footprint)
    return StageProfile(
        _medians([timing for one in alike for timing in one.timings]),
        _mean_release([one.release for one in alike if one.release is not None]),
        tuple(_typical(held[devices]) for devices in sorted(held)),
        alike[-1].kind,
    )


def _typical(found: Sequence[Footprint]) -> Footprint:
    """The most bytes, which must never be exceeded; and the middle of the seconds, of which one may be an accident."""
    worst = functools.reduce(Footprint.merged, found)
    return replace(
        worst,
        onload_seconds=statistics.median(one.onload_seconds for one in found),
        offload_seconds=statistics.median(one.offload_seconds for one in found),
    )


def _medians(timings: Sequence[Timing]) -> tuple[Timing, ...]:
    places: dict[tuple[int, int], list[Timing]] = {}
    for one in timings:
        places.setdefault((one.batch, one.devices), []).append(one)
    return tuple(_median(batch, devices, places[batch, devices]) for batch, devices in sorted(places))


def _median(batch: int, devices: int, found: Sequence[Timing]) -> Timing:
    found = found[1:] or found
    seconds = [one.seconds for one in found]
    busy = [one.busy for one in found if one.busy is not None]
    middle = statistics.median(seconds)
    return Timing(
        batch,
        devices,
        middle,
        statistics.pstdev(seconds),
        len(found),
        min(middle, statistics.median(busy)) if busy else None,
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
    """Compare a step with its lower bound.

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
    saturation = max(fastest.values()) if profile.staleness else longest_row(fastest, seen.edges)
    limit = Bound(area, saturation, 0.0, area, min([seen.sync, *published]))
    losses = split(list(seen.lanes.values()), seen.seconds, limit, least=least, expected=expected, tail=seen.tail)
    return Efficiency(seen.seconds, count, limit, losses)


def _known(profile: Profile, name: str, items: int) -> Iterator[Timing]:
    if name in profile.stages:
        yield from (one for way in profile.stages[name].ways for one in way.timings if one.batch == items)


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
