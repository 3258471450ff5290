"""Interpolate measured times over batch size and device count, with error bars.

Flows in: seconds at some (batch, devices). Flows out: an `Estimate` anywhere between, and outside if asked for. Nothing
waits here.

Between two measured batches the usual cost models disagree: a stage with a fixed part grows as a + b·batch, a stage
that saturates as batch^c. Between two measured numbers of devices likewise: Amdahl's s + p/n, or n^-c. We take the
power laws, and the bar spans what every combination of the two families says, besides the measured spread. So if the
truth is of either family, it is inside the bar.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product


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
