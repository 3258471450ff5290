"""What the steps of a run cost so far: their pooled profile, and each step beside what was possible.

Flows in: the `Lap` of every step. Flows out: metrics of the step, the profile, `profile.json`. Nobody is woken.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from rlinf.runtime.system.observer import Lap

from .efficiency import Efficiency, efficiency
from .observed import observed, see
from .profile import Footprint, Profile, Release, StageProfile, Timing, save

PROFILE = "profile.json"
"""File name in a run directory."""
WINDOW = 64
"""Steps that are remembered: enough for a median, few enough that the profile follows answers that grow longer."""


class Ledger:
    """Keeps account of the steps of one run.

    Args:
        devices: of every actor, by a name such as "rollout[0]"; set it anew when roles move.
        items: of a step.
        count: devices of the job, 0 to count - 1; those that no actor has count too.
        model, machine, flow: see `Profile`.
        kind: of the devices.
        held: by role: bytes on each of its devices while it is loaded, and while it is parked.
        known: what earlier runs measured.

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
        kind: str = "gpu",
        held: Mapping[str, tuple[int, int]] | None = None,
        known: Profile | None = None,
    ) -> None:
        if known is not None and (problems := known.mismatch(model, machine, flow)):
            raise ValueError("; ".join(problems))
        self.devices, self._items, self._count, self._known, self._held = devices, items, count, known, held
        self._about = {"model": model, "machine": machine, "flow": flow, "kind": kind}
        self._steps: deque[Profile] = deque(maxlen=WINDOW)
        self.last: Efficiency | None = None
        """Of the newest step; None before the first, and where no device worked."""

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
        seen = see(lap, self.devices, self._count)
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
    )


def _pooled_stage(found: Sequence[StageProfile]) -> StageProfile:
    kind = found[-1].kind
    alike = [one for one in found if one.kind == kind]  # it may have moved from beside the devices onto some
    held: dict[int, list[Footprint]] = {}
    for footprint in itertools.chain.from_iterable(one.footprints for one in alike):
        held.setdefault(footprint.devices, []).append(footprint)
    return StageProfile(
        _medians([timing for one in alike for timing in one.timings]),
        _mean_release([one.release for one in alike if one.release is not None]),
        tuple(_typical(held[devices]) for devices in sorted(held)),
        kind,
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
