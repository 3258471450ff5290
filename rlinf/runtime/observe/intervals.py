"""Sets of time as intervals in order: united, taken apart, cut. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

Interval = tuple[float, float]
"""Start and end, seconds."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as intervals in order that neither overlap nor touch."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def without(intervals: Iterable[Interval], others: Sequence[Interval]) -> Iterator[Interval]:
    """What is left of `intervals` outside `others`; both in order and apart, so that one pass over both is enough."""
    position = 0
    for start, end in intervals:
        while position < len(others) and others[position][1] <= start:
            position += 1
        at = position
        while at < len(others) and others[at][0] < end:
            if start < others[at][0]:
                yield start, others[at][0]
            start = max(start, others[at][1])
            at += 1
        position = max(position, at - 1)  # the last hole may reach into the next interval, those before it cannot
        if start < end:
            yield start, end


def clip(intervals: Iterable[Interval], start: float, end: float, ahead: float = 0.0) -> tuple[Interval, ...]:
    """What lies between two times, once `ahead` is added."""
    moved = ((max(begin + ahead, start), min(finish + ahead, end)) for begin, finish in intervals)
    return tuple((begin, finish) for begin, finish in moved if begin < finish)
