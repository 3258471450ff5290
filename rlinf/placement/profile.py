"""Profile of a flow: the measured costs of its stages, and estimates of what was not measured.

Flows in: timings of ordinary steps, read off their spans by `costs.py`. Flows out: `profile.json`, merged over runs;
estimates with error bars; the release curve of generation.

Times are interpolated over batch size and device count. Between two measured batches the usual cost models disagree: a
stage with a fixed part grows as a + b·batch, a stage that saturates as batch^c. Between two measured numbers of devices
likewise: Amdahl's s + p/n, or n^-c. We take the power laws, and the bar spans what every combination of the two
families says, besides the measured spread. So if the truth is of either family, it is inside the bar.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from rlinf.config.reading import parse_json
from rlinf.placement.hardware import Hardware


@dataclass(frozen=True, slots=True)
class Estimate:
    """A time and how far it may be off, in seconds."""

    seconds: float
    """The best guess."""
    error: float
    """Half the width of the bar: one standard deviation of the measurements, and all that the models disagree."""


@dataclass(frozen=True, slots=True)
class Point:
    """A measured place: seconds and their standard deviation."""

    seconds: float
    spread: float


class OutOfRange(ValueError):
    """An estimate was asked for outside of what was measured."""


_Curve = Callable[[float, float, float, float, float], float]


def _power(x: float, x0: float, y0: float, x1: float, y1: float) -> float:
    share = (math.log(x) - math.log(x0)) / (math.log(x1) - math.log(x0))
    return math.exp((1 - share) * math.log(y0) + share * math.log(y1))


def _affine(x: float, x0: float, y0: float, x1: float, y1: float) -> float:
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _amdahl(x: float, x0: float, y0: float, x1: float, y1: float) -> float:
    return _affine(1 / x, 1 / x0, y0, 1 / x1, y1)


def interpolate(
    points: Mapping[tuple[int, int], Point], batch: int, devices: int, *, extrapolate: bool = False
) -> Estimate:
    """Estimate the time of a batch on a number of devices.

    Args:
        points: by (batch, devices); every time above 0.
        batch: items, at least 1.
        devices: at least 1.
        extrapolate: also answer outside of the measured ranges, with bars from no scaling to perfect scaling.

    Raises:
        OutOfRange: nothing was measured, or not around this place and `extrapolate` is off.
    """
    if not points:
        raise OutOfRange("nothing was measured")
    if exact := points.get((batch, devices)):
        return Estimate(exact.seconds, exact.spread)
    columns: dict[int, dict[int, Point]] = {}
    for (items, count), point in points.items():
        columns.setdefault(count, {})[items] = point

    def at(count: int, curve: _Curve) -> Estimate:
        return _along(columns[count], batch, curve, "items", extrapolate, (0.0, 1.0))

    guesses: list[Estimate] = []
    for curve_of_batch, curve_of_devices in product((_power, _affine), (_power, _amdahl)):
        if devices in columns:
            guesses.append(at(devices, curve_of_batch))
            continue
        usable = _usable(columns, batch, extrapolate)
        row = {}
        for count in usable:
            there = at(count, curve_of_batch)
            row[count] = Point(there.seconds, there.error)
        guesses.append(_along(row, devices, curve_of_devices, "devices", extrapolate, (-1.0, 0.0)))
    best = guesses[0]
    disagreement = max(abs(guess.seconds - best.seconds) for guess in guesses)
    return Estimate(best.seconds, max(guess.error for guess in guesses) + disagreement)


def _usable(columns: Mapping[int, Mapping[int, Point]], batch: int, extrapolate: bool) -> list[int]:
    """Numbers of devices at which this batch can be estimated; without `extrapolate`, only from within."""
    inside = [count for count, column in columns.items() if min(column) <= batch <= max(column)]
    if inside or not extrapolate:
        return inside
    return list(columns)


def _along(
    row: Mapping[int, Point], x: int, curve: _Curve, unit: str, extrapolate: bool, slopes: tuple[float, float]
) -> Estimate:
    """Estimate along one axis. `slopes` are the exponents between which any sane stage lies beyond the ends."""
    places = sorted(row)
    if x in row:
        return Estimate(row[x].seconds, row[x].spread)
    if places and places[0] < x < places[-1]:
        above = bisect_left(places, x)
        x0, x1 = places[above - 1], places[above]
        value = curve(x, x0, row[x0].seconds, x1, row[x1].seconds)
        return Estimate(value, max(row[x0].spread, row[x1].spread))
    if not places or not extrapolate:
        measured = f"{places[0]} to {places[-1]} {unit}" if places else "nothing here"
        raise OutOfRange(f"{x} {unit} asked for, {measured} measured")
    return _beyond(row, places, x, slopes)


def _beyond(row: Mapping[int, Point], places: Sequence[int], x: int, slopes: tuple[float, float]) -> Estimate:
    end = places[0] if x < places[0] else places[-1]
    point, ratio = row[end], x / end
    low, high = sorted(point.seconds * ratio**slope for slope in slopes)
    slope = sum(slopes) / 2
    if len(places) > 1:
        other = places[1] if end == places[0] else places[-2]
        slope = math.log(point.seconds / row[other].seconds) / math.log(end / other)
    value = min(high, max(low, point.seconds * ratio**slope))
    return Estimate(value, max(high - value, value - low) + point.spread * value / point.seconds)


T = TypeVar("T")
VERSION = 2
"""Of the file. A file of another version is refused rather than misread."""
BESIDE = "none"
"""Kind of device of a stage that needs none, such as scoring in processes of its own: its timings say 1 device."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Measurements of one stage with one batch on one number of devices."""

    batch: int
    """Items."""
    devices: int
    """Devices of the stage."""
    seconds: float
    """Time that the whole batch needs when nothing else runs: until its last device is done. The mean of measurements,
    or where outliers were seen, such as first steps, their median."""
    spread: float = 0.0
    """Standard deviation of single times, in seconds."""
    count: int = 1
    """Number of measurements."""
    busy: float | None = None
    """Mean seconds that each of the devices worked, less than `seconds` if some are done earlier; None: the same."""
    least: float | None = None
    """Device-seconds that the batch would take at the devices' own limit, see `rlinf.metrics.limits`; None: unknown."""

    @property
    def work(self) -> float:
        """Device-seconds of the batch."""
        return self.devices * (self.seconds if self.busy is None else self.busy)

    def __post_init__(self) -> None:
        if self.batch < 1 or self.devices < 1 or self.count < 1:
            raise ValueError(f"batch, devices and count must be at least 1: {self}")
        if not (0 < self.seconds < math.inf and 0 <= self.spread < math.inf):
            raise ValueError(f"seconds must be above 0 and spread at least 0, both finite: {self}")
        if self.busy is not None and not 0 <= self.busy <= self.seconds * (1 + 1e-9):
            raise ValueError(f"busy must lie between 0 and seconds: {self}")

    def slowed(self, factor: float) -> Timing:
        """Return this timing as if everything took so many times as long."""
        busy, least = (None if each is None else each * factor for each in (self.busy, self.least))
        return replace(self, seconds=self.seconds * factor, spread=self.spread * factor, busy=busy, least=least)

    def merged(self, other: Timing) -> Timing:
        """Pool two sets of measurements of the same batch and devices (Chan et al. 1979, equation 2.1)."""
        count = self.count + other.count
        apart = other.seconds - self.seconds
        squares = self.count * self.spread**2 + other.count * other.spread**2
        squares += apart**2 * self.count * other.count / count
        mean = self.seconds + apart * other.count / count
        busy = None
        if self.busy is not None or other.busy is not None:
            busy = min(mean, (self.work * self.count + other.work * other.count) / count / self.devices)
        least = min((each for each in (self.least, other.least) if each is not None), default=None)
        return Timing(self.batch, self.devices, mean, math.sqrt(squares / count), count, busy, least)


@dataclass(frozen=True, slots=True)
class Release:
    """When the items of a batch leave a stage, as shares of its makespan: the long tail of generation."""

    shares: tuple[float, ...]
    """Entry k of n: share of the makespan after which the share (k + 1) / n of the items has left; ascending to 1."""
    count: int = 1
    """Number of batches it was measured on."""

    def __post_init__(self) -> None:
        steps = (0.0, *self.shares)
        if not self.shares or any(b < a for a, b in zip(steps, self.shares, strict=False)) or self.shares[-1] != 1.0:
            raise ValueError(f"release shares must ascend from at least 0 to exactly 1, got {self.shares}")

    @classmethod
    def from_times(cls, finished: Iterable[float], points: int = 64) -> Release:
        """Return the curve of one batch.

        Args:
            finished: seconds after the start at which each item left, in any order.
            points: entries of the curve.
        """
        times = sorted(finished)
        if not times or times[-1] <= 0:
            raise ValueError("a release curve needs at least one item that left after the start")
        last = times[-1]
        return cls(tuple(times[math.ceil((k + 1) / points * len(times)) - 1] / last for k in range(points)))

    def at(self, share: float) -> float:
        """Share of the makespan after which this share of the items (0 to 1) has left; never too early."""
        index = math.ceil(share * len(self.shares) - 1e-9) - 1
        return self.shares[index] if index >= 0 else 0.0

    def chunks(self, count: int) -> tuple[float, ...]:
        """Shares of the makespan at which chunk 1, …, `count` has left as a whole."""
        return tuple(self.at((k + 1) / count) for k in range(count))

    def merged(self, other: Release) -> Release:
        """Average two curves, each weighted with its batches."""
        longest = max(len(self.shares), len(other.shares))
        count = self.count + other.count
        mine, theirs = self.chunks(longest), other.chunks(longest)
        mixed = [(a * self.count + b * other.count) / count for a, b in zip(mine, theirs, strict=True)]
        return Release((*mixed[:-1], 1.0), count)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory that a stage holds and the cost of moving it, per device, on one number of devices."""

    devices: int
    """Devices that the stage is spread over."""
    active_bytes: int = 0
    """While it is loaded, the peak of its work included."""
    parked_bytes: int = 0
    """While it is parked."""
    onload_seconds: float = 0.0
    """From parked to loaded."""
    offload_seconds: float = 0.0
    """From loaded to parked."""

    def merged(self, other: Footprint) -> Footprint:
        """Keep the worst of both: memory must never be exceeded."""
        worst = {one.name: max(getattr(self, one.name), getattr(other, one.name)) for one in fields(self)}
        return Footprint(**worst)


@dataclass(frozen=True, slots=True)
class StageProfile:
    """All that was measured of one stage."""

    timings: tuple[Timing, ...] = ()
    """One per (batch, devices)."""
    release: Release | None = None
    """None: items leave evenly."""
    footprints: tuple[Footprint, ...] = ()
    """One per number of devices."""
    kind: str = "gpu"
    """Kind of device it was measured on; `BESIDE` for none; "h100+l40s" where it was on both at once."""
    others: tuple[StageProfile, ...] = ()
    """The same on other kinds, one each."""

    @property
    def ways(self) -> tuple[StageProfile, ...]:
        """By kind of device."""
        return (replace(self, others=()), *self.others)

    def on(self, kind: str, hardware: Mapping[str, Hardware] = MappingProxyType({})) -> StageProfile | None:
        """Return the stage on one kind of device, as it was measured there or by what is known of the kinds.

        Generation goes with the memory's bandwidth, since every token reads all weights; all else with the products:
        what caches and kernels make of a card is not in it. None: nothing tells.
        """
        measured = {way.kind: way for way in self.ways if way.timings}
        if self.kind == BESIDE or kind in measured:
            return measured.get(kind, replace(self, others=()))
        for measured_kind, way in measured.items():
            both = (hardware.get(measured_kind), hardware.get(kind))
            speeds = [one and (one.bandwidth if self.release else one.tflops) for one in both]
            if speeds[0] and speeds[1]:
                timings = tuple(one.slowed(speeds[0] / speeds[1]) for one in way.timings)
                return replace(way, timings=timings, kind=kind)
        return None

    def time(self, batch: int, devices: int, *, extrapolate: bool = False) -> Estimate:
        """Estimate the seconds of a batch; see `interpolation.interpolate`.

        Raises:
            OutOfRange: it lies outside of what was measured, and `extrapolate` is off.
        """
        points = {(one.batch, one.devices): Point(one.seconds, one.spread) for one in self.timings}
        return interpolate(points, batch, devices, extrapolate=extrapolate)

    def least(self, batch: int) -> float | None:
        """Device-seconds that a batch would take at the devices' own limit, as an item of any measured batch; None:
        unknown."""
        shares = [one.least / one.batch for one in self.timings if one.least is not None]
        return batch * min(shares) if shares else None

    def longest(self, batch: int) -> float:
        """Estimate the part of a batch's seconds that no number of devices shortens: its longest item alone.

        Generation that answers all at once takes L + q / devices: a token takes a + b·n with n answers at work, so the
        longest answer takes a·tokens, and b counts every token once. Both are fitted by least squares.

        Returns:
            Seconds; 0 where items leave evenly, or on fewer than two numbers of devices were measured.
        """
        points = [(1 / one.devices, one.seconds) for one in self.timings if one.batch == batch]
        if self.release is None or len(points) < 2:
            return 0.0
        mean_x, mean_y = (sum(point[axis] for point in points) / len(points) for axis in (0, 1))
        slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
        return max(0.0, min([mean_y - max(0.0, slope) * mean_x, *(y for _, y in points)]))

    def footprint(self, devices: int) -> Footprint:
        """Return what it holds on so many devices; between measurements, what it held on the next fewer: never less.

        On fewer devices than were measured, bytes per device are scaled up as if all of them were divided among the
        devices.

        Raises:
            OutOfRange: none was measured.
        """
        if not self.footprints:
            raise OutOfRange("no memory was measured")
        fewer = [one for one in self.footprints if one.devices <= devices]
        if fewer:
            return replace(max(fewer, key=lambda one: one.devices), devices=devices)
        least = min(self.footprints, key=lambda one: one.devices)
        scale = least.devices / devices
        return Footprint(
            devices,
            math.ceil(least.active_bytes * scale),
            math.ceil(least.parked_bytes * scale),
            least.onload_seconds * scale,
            least.offload_seconds * scale,
        )

    def merged(self, other: StageProfile) -> StageProfile:
        """Join the measurements of two runs, kind by kind."""
        release = self.release or other.release
        if self.release and other.release:
            release = self.release.merged(other.release)
        first, *rest = _join((*self.ways, *other.ways), lambda way: way.kind, StageProfile._with)
        return replace(first, release=release, others=tuple(rest))

    def _with(self, other: StageProfile) -> StageProfile:
        """Both of one kind."""
        timings = _join((*self.timings, *other.timings), lambda one: (one.batch, one.devices), Timing.merged)
        footprints = _join((*self.footprints, *other.footprints), lambda one: one.devices, Footprint.merged)
        return replace(self, timings=timings, footprints=footprints)


@dataclass(frozen=True, slots=True)
class Profile:
    """Measurements of one model on one kind of machine."""

    model: str
    """The model that was trained: its name and what changes its speed, such as "Qwen3-8B bfloat16"."""
    machine: str
    """The hardware that it ran on, such as "8x NVIDIA H100 80GB"."""
    stages: Mapping[str, StageProfile] = field(default_factory=dict)
    """By role."""
    transfers: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Seconds per item between disjoint devices, by producer and consumer."""
    sync: tuple[Timing, ...] = ()
    """Weight synchronisation: batch is always 1, devices those that receive."""
    flow: str = ""
    """Dotted path of the flow function."""
    items: int = 0
    """Items of one step that was measured; 0: unknown."""
    edges: tuple[tuple[str, str, bool], ...] = ()
    """The flow's graph as it was observed, without loops: producer, consumer, and whether that began, in every step
    that was seen, only when all items were there."""
    published: tuple[tuple[str, str], ...] = ()
    """Pairs of actors: the publisher of weights, and the one that takes them."""
    staleness: int = 0
    """Steps that work was begun early while this was measured. If above 0, times are what stages worked per step in the
    long run; how long a step's items take alone, and their tail, are not known."""

    def time(self, stage: str, batch: int, devices: int, *, extrapolate: bool = False) -> Estimate:
        """Estimate the seconds of a batch of a stage.

        Raises:
            OutOfRange: the stage or the place was not measured; the message says what was.
        """
        try:
            return self._stage(stage).time(batch, devices, extrapolate=extrapolate)
        except OutOfRange as error:
            raise OutOfRange(f"profile of {self.model}, stage {stage!r}: {error}{_advice(error)}") from None

    def mismatch(self, model: str, machine: str, flow: str | None = None) -> tuple[str, ...]:
        """Return why this profile is not one of that model, machine and (where given) flow; nothing if it is."""
        pairs = [("model", self.model, model), ("machine", self.machine, machine)]
        if flow is not None:
            pairs.append(("flow", self.flow, flow))
        return tuple(
            f"the profile is of {what} {ours!r}, this run has {theirs!r}: profile again, or name another profile"
            for what, ours, theirs in pairs
            if ours != theirs
        )

    def merged(self, other: Profile) -> Profile:
        """Join the profiles of two runs; the number of items of a step is the other's.

        Raises:
            ValueError: they are of different models, machines or flows, or have a stage beside the devices and on some.
        """
        problems = list(other.mismatch(self.model, self.machine, self.flow))
        if other.staleness != self.staleness:
            problems.append(f"one is of staleness {self.staleness}, the other of {other.staleness}")
        both = self.stages.keys() & other.stages.keys()
        for name in sorted(both):
            ours, theirs = self.stages[name].kind, other.stages[name].kind
            if (ours == BESIDE) != (theirs == BESIDE):
                problems.append(f"stage {name!r} was measured on {ours} and {theirs}")
        if problems:
            raise ValueError("profiles cannot be merged: " + "; ".join(problems))
        stages = {**self.stages, **other.stages}
        stages |= {name: self.stages[name].merged(other.stages[name]) for name in both}
        transfers = {**self.transfers, **other.transfers}
        for edge in self.transfers.keys() & other.transfers.keys():
            transfers[edge] = (self.transfers[edge] + other.transfers[edge]) / 2
        sync = _join((*self.sync, *other.sync), lambda one: one.devices, Timing.merged)
        edges = _join((*self.edges, *other.edges), lambda edge: edge[:2], lambda one, two: min(one, two))
        published = tuple(dict.fromkeys((*self.published, *other.published)))
        items = other.items or self.items
        return Profile(
            self.model, self.machine, stages, transfers, sync, self.flow, items, edges, published, self.staleness
        )

    def _stage(self, name: str) -> StageProfile:
        if name not in self.stages:
            raise OutOfRange(f"not measured; there are: {', '.join(self.stages) or 'none'}")
        return self.stages[name]


def save(profile: Profile, path: Path) -> None:
    """Write `profile.json`."""
    body = {
        "version": VERSION,
        "model": profile.model,
        "machine": profile.machine,
        "flow": profile.flow,
        "items": profile.items,
        "edges": [list(edge) for edge in profile.edges],
        "stages": {name: asdict(stage) for name, stage in profile.stages.items()},
        "transfers": [[source, target, seconds] for (source, target), seconds in profile.transfers.items()],
        "sync": [asdict(one) for one in profile.sync],
        "published": [list(pair) for pair in profile.published],
        "staleness": profile.staleness,
    }
    path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> Profile:
    """Read `profile.json`.

    Raises:
        ValueError: it is not a profile of this version; the message names file and part.
        OSError: it cannot be read.
    """
    try:
        body = parse_json(path.read_text(encoding="utf-8"))
        if not isinstance(body, dict) or body.get("version") != VERSION:
            version = body.get("version") if isinstance(body, dict) else body
            raise ValueError(f"version is {version!r}, this program reads {VERSION}: profile again")
        return Profile(
            body["model"],
            body["machine"],
            {name: _stage_in(name, entry) for name, entry in body["stages"].items()},
            {(source, target): float(seconds) for source, target, seconds in body["transfers"]},
            tuple(Timing(**entry) for entry in body["sync"]),
            str(body["flow"]),
            int(body["items"]),
            tuple((source, target, bool(barrier)) for source, target, barrier in body["edges"]),
            tuple((source, target) for source, target in body["published"]),
            int(body.get("staleness", 0)),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else error
        raise ValueError(f"{path}: not a profile: {what}") from None


def _stage_in(name: str, entry: Mapping[str, Any]) -> StageProfile:
    try:
        release = entry["release"]
        return StageProfile(
            tuple(Timing(**one) for one in entry["timings"]),
            None if release is None else Release(tuple(release["shares"]), release["count"]),
            tuple(Footprint(**one) for one in entry["footprints"]),
            entry["kind"],
            tuple(_stage_in(name, other) for other in entry.get("others", ())),
        )
    except (ValueError, TypeError) as error:
        raise ValueError(f"stage {name!r}: {error}") from None


def _join(entries: Iterable[T], key: Callable[[T], Any], merge: Callable[[T, T], T]) -> tuple[T, ...]:
    joined: dict[Any, T] = {}
    for entry in entries:
        place = key(entry)
        joined[place] = merge(joined[place], entry) if place in joined else entry
    return tuple(joined[place] for place in sorted(joined))


def _advice(error: OutOfRange) -> str:
    return "; measure there, or allow extrapolation, whose error bars are wide" if "asked for" in str(error) else ""
