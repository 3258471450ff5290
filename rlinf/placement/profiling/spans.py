"""Stretches of time as arrays: what a device did during a step may be 100,000 of them, read in a few milliseconds.

Flows in: starts and ends. Flows out: the same time without overlaps, lengths, and fair shares. Nothing waits here.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Spans = NDArray[np.float64]
"""Starts and ends in seconds, `[spans, 2]`."""
NEVER: Spans = np.zeros((0, 2))
"""No time at all."""


def spans(intervals: Sequence[tuple[float, float]], start: float, end: float) -> Spans:
    """Return intervals as seconds after `start`, without what lies outside of `start` to `end`."""
    numbers = np.fromiter(itertools.chain.from_iterable(intervals), np.float64, 2 * len(intervals))
    return np.clip(numbers.reshape(-1, 2), start, end) - start


def joined(*parts: Spans) -> Spans:
    """Return the time of all parts as spans in order that neither overlap nor touch."""
    every = np.concatenate(parts) if parts else NEVER
    every = every[every[:, 1] > every[:, 0]]
    if (every[1:, 0] > every[:-1, 1]).all():
        return every
    every = every[np.argsort(every[:, 0], kind="stable")]  # parts are mostly in order already: merging runs is quick
    reach = np.maximum.accumulate(every[:, 1])
    first = np.flatnonzero(np.concatenate(([True], every[1:, 0] > reach[:-1])))
    return np.stack((every[first, 0], reach[np.append(first[1:], len(every)) - 1]), axis=1)


def length(apart: Spans) -> float:
    """Return the seconds of spans that do not overlap."""
    return float((apart[:, 1] - apart[:, 0]).sum())


def until(apart: Spans, times: Spans) -> Spans:
    """Return how many seconds of spans (in order, apart) lie before each of the times `[times]`."""
    if not len(apart):
        return np.zeros(len(times))
    done = np.cumsum(apart[:, 1] - apart[:, 0])
    edges = np.stack((done - (apart[:, 1] - apart[:, 0]), done), axis=1)
    return np.interp(times, apart.ravel(), edges.ravel())


def fair_shares(parts: Sequence[Spans]) -> list[float]:
    """Return the seconds of each part when a moment that lies in k of them counts 1/k for each.

    The shares add up to the length of all parts joined.

    Args:
        parts: each in order and apart.
    """
    if len(parts) < 2:
        return [length(part) for part in parts]
    times, change, owner, order = _edges(parts)
    depth = np.cumsum(change[order])[:-1]
    passed = np.where(depth > 0, np.diff(times[order]) / np.maximum(depth, 1), 0.0)
    shared = np.zeros(len(times))  # fair seconds until each edge
    shared[order[1:]] = np.cumsum(passed)
    found = np.bincount(owner, weights=-change * shared, minlength=len(parts))
    return [max(0.0, float(share)) for share in found]  # rounding can leave -1e-17 of nothing


def in_turn(parts: Sequence[Spans]) -> list[float]:
    """Return the seconds of each part in which none of those before it is on; they add up to the length of all joined.

    Args:
        parts: each in order and apart.
    """
    times, change, owner, order = _edges(parts)
    passed, left, found = np.diff(times[order]), np.ones(max(len(times) - 1, 0), np.bool_), []
    for number in range(len(parts)):
        on = np.cumsum(np.where(owner == number, change, 0)[order])[:-1] > 0
        found.append(float(passed[left & on].sum()))
        left &= ~on
    return found


def _edges(parts: Sequence[Spans]) -> tuple[Spans, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Starts and ends of all parts: when, +1 or -1, of which part; and their order in time."""
    times = np.concatenate([part.ravel() for part in parts])
    change = np.tile(np.array([1, -1]), len(times) // 2)
    owner = np.repeat(np.arange(len(parts)), [part.size for part in parts])
    return times, change, owner, np.argsort(times, kind="stable")
