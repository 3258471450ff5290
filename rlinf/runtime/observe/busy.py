"""When each actor was busy with which endpoint, read off the spans of a host. Pure; flows and metrics build on it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rlinf.runtime.observe.intervals import Interval, union, without
from rlinf.runtime.observe.spans import Kind, Span

UNKNOWN = "compute"
"""Stands for the endpoint where an actor computes while none of its calls runs."""


@dataclass(frozen=True, slots=True)
class Busy:
    """When an actor was busy with calls of one of its endpoints."""

    actor: str
    """Such as "rollout[0]"."""
    endpoint: str
    """Such as "generate"."""
    intervals: tuple[Interval, ...]
    """In order, apart from each other; seconds of the clock of whoever asked."""


def busy(spans: Iterable[Span]) -> list[Busy]:
    """When each actor was busy, read off its spans.

    An endpoint that computes is busy while it computes: its calls may otherwise be waiting for their streams. One that
    never computes, because a child process or a server does its work, is busy while a call runs and waits for no queue,
    value or device. Of a mapped endpoint the calls for single items count, not the one that hands them out.
    """
    times, waited = sorted_out(spans)
    return [
        Busy(actor, endpoint, tuple(busy_times(kinds, waited.get(actor, []))))
        for (actor, endpoint), kinds in times.items()
    ]


def sorted_out(
    spans: Iterable[tuple[Any, ...]],
) -> tuple[dict[tuple[str, str], dict[Kind, list[Interval]]], dict[str, list[Interval]]]:
    """What spans tell of work, by actor and endpoint and by kind; and when each actor waited.

    Args:
        spans: as `Span` or plain tuples.
    """
    times: dict[tuple[str, str], dict[Kind, list[Interval]]] = {}
    waits: dict[str, list[Interval]] = defaultdict(list)
    for kind, actor, endpoint, _, start, end, _ in spans:
        if kind == "wait":
            waits[actor].append((start, end))
        elif kind in ("call", "item", "move", "compute"):
            kinds = times.setdefault((actor, endpoint or UNKNOWN), {})
            kinds.setdefault(kind, []).append((start, end))
    waited = {actor: union(intervals) for actor, intervals in waits.items()}
    return times, waited


def busy_times(times: dict[Kind, list[Interval]], waited: list[Interval]) -> Iterable[Interval]:
    """The busy times of one endpoint of an actor; see `busy`.

    Args:
        times: of its spans by kind, of which there is at least one.
        waited: when the actor waited.
    """
    for kind in ("compute", "item"):
        if kind in times:
            return union(times[kind])
    return without(union(times.get("call") or times["move"]), waited)
