"""From a trace to lanes: what each actor did during a step of the flow, as stretches of time.

In: trace.json. Out: per step a lane per actor, with the same notion of "busy" as the metrics `timing/...`. Pure apart
from reading the file; what they look like is `lanes_svg`'s business.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf.metrics.timing import activity_of, timing
from rlinf.runtime.observe.busy import Busy, busy
from rlinf.runtime.observe.intervals import Interval, clip, union, without
from rlinf.runtime.observe.perfetto import read_span
from rlinf.runtime.observe.spans import OF_ACTORS, Span
from rlinf.runtime.system.observer import Lap

WAITING = "waiting"
"""A call runs, but is waiting for its input, for room for its output, or for the device."""
_STEP = re.compile(r"step (\d+)")
_WHEN = re.compile(r'"ts": ([\d.e+-]+), "dur": ([\d.e+-]+)')
"""As the runtime writes it. A quotation mark inside of a name has a backslash before it, so no name looks like this."""
_FIRST_LINE = 1000
"""Characters: it is short in a file of ours, and may be all there is in another."""
_TRACE_UNIT = 1e6
"""Microseconds, in which Chrome's format counts, per second."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A time during which an actor did one thing."""

    activity: str
    """`generation`, `scoring`, `training`, `sync`, `waiting`, or the name of an endpoint that is none of these."""
    start: float
    """Seconds since the step began."""
    end: float
    """Seconds since the step began."""


@dataclass(frozen=True, slots=True)
class Lane:
    """What one actor did during a step."""

    host: int
    """Where it lives."""
    actor: str
    """Such as "rollout[0]"."""
    stretches: tuple[Stretch, ...]
    """In order of their starts."""


@dataclass(frozen=True, slots=True)
class StepLanes:
    """One step."""

    step: int
    """Which, from 1."""
    seconds: float
    """How long it took."""
    lanes: tuple[Lane, ...]
    """By host, and within it in the order in which the actors first did something."""
    timing: Mapping[str, float]
    """`timing/...` of this step, as in the metrics."""


class Trace:
    """A trace file, of which no more is in memory than what is asked for.

    Args:
        path: of trace.json.

    Raises:
        ValueError: it is not one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._steps: dict[int, Interval] = {}
        hosts: set[int] = set()
        for event in _events(path, lambda line: '"cat": "flow", ' in line or '"thread_name"' in line):
            if event.get("name") == "thread_name" and isinstance(host := event.get("pid"), int):
                if "actor" in (event.get("args") or {}):
                    hosts.add(host)
            elif (span := _span(event)) is not None and (named := _STEP.fullmatch(span.what)):
                self._steps[int(named[1])] = (span.start, span.end)
        self.steps = sorted(self._steps)
        """Numbers of the steps that it holds whole; of a long run, the last ones."""
        self.hosts = sorted(hosts)
        """Those on which an actor ever did something."""

    def first_middle_last(self) -> list[int]:
        """Three steps that show how a run went, or fewer if there are not so many.

        The very first is left out if there are others: it warms up.
        """
        steps = self.steps[1:] if len(self.steps) > 1 else self.steps
        return sorted({steps[0], steps[len(steps) // 2], steps[-1]}) if steps else []

    def window(self, step: int) -> Interval:
        """Start and end of a step, seconds of the trace.

        Raises:
            ValueError: the trace does not have it.
        """
        if step not in self._steps:
            there = f"steps {self.steps[0]} to {self.steps[-1]}" if self.steps else "no step at all"
            raise ValueError(f"step {step} is not in {self._path}, which has {there}")
        return self._steps[step]

    def spans(self, windows: Sequence[Interval]) -> list[dict[int, list[Span]]]:
        """The spans that reach into some times, per time by host."""
        kept: list[dict[int, list[Span]]] = [{} for _ in windows]
        first, last = min(start for start, _ in windows), max(end for _, end in windows)
        for event in _events(self._path, lambda line: _near(line, (first, last))):
            if (span := _span(event)) is None:
                continue
            for (begin, finish), hosts in zip(windows, kept, strict=True):
                if span.end > begin and span.start < finish:
                    hosts.setdefault(event["pid"], []).append(span)
        return kept

    def lanes(self, steps: Sequence[int]) -> list[StepLanes]:
        """What every actor did during some steps.

        Raises:
            ValueError: the trace has not all of these.
        """
        windows = [self.window(step) for step in steps]
        return [_step(*each) for each in zip(steps, windows, self.spans(windows), strict=True)] if steps else []


def _events(path: Path, wanted: Callable[[str], bool]) -> Iterator[dict[str, Any]]:
    """The events of a trace whose lines are wanted.

    The runtime writes one per line, so a long trace is never in memory as a whole; one that somebody has written anew
    is read as it is, with all its events.
    """
    with path.open(encoding="utf-8", errors="replace") as file:
        if not file.readline(_FIRST_LINE).rstrip().endswith('"traceEvents": ['):
            yield from (event for event in _rewritten(path) if isinstance(event, dict))
            return
        for line in file:
            if wanted(line) and isinstance(event := _event(line), dict):
                yield event


def _span(event: Mapping[str, Any]) -> Span | None:
    """The span of an event as the runtime writes them; None for anything else that a trace may hold."""
    return read_span(event) if event.get("ph") == "X" and isinstance(event.get("pid"), int) else None


def _near(line: str, within: Interval) -> bool:
    """Whether a span may reach into some seconds: cheaper than reading it, which a long trace is mostly spared."""
    found = _WHEN.search(line)
    if found is None:
        return False
    start, lasts = float(found[1]) / _TRACE_UNIT, float(found[2]) / _TRACE_UNIT
    return start < within[1] and start + lasts > within[0]


def _event(line: str) -> Any:
    """One event; None for a line that was cut when its writer was killed."""
    try:
        return json.loads(line.rstrip().removesuffix(","))
    except ValueError:
        return None


def _rewritten(path: Path) -> list[Any]:
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no trace in Chrome's format: {error!r}") from error
    if not isinstance(events, list):
        raise ValueError(f"{path} is no trace in Chrome's format: its traceEvents are a {type(events).__name__}")
    return events


def _step(step: int, window: Interval, hosts: Mapping[int, Sequence[Span]]) -> StepLanes:
    start, end = window
    lanes: list[Lane] = []
    everybody: list[Busy] = []
    for host, spans in sorted(hosts.items()):
        parts = busy(spans)
        everybody += [Busy(part.actor, part.endpoint, clip(part.intervals, start, end)) for part in parts]
        lanes += _lanes(host, spans, parts, start, end)
    metrics = {"timing/step": end - start, **timing(Lap(start, end, tuple(everybody)))}
    return StepLanes(step, end - start, tuple(lanes), metrics)


def _lanes(host: int, spans: Sequence[Span], parts: Sequence[Busy], start: float, end: float) -> list[Lane]:
    """The lanes of one host."""
    calls: dict[str, list[Interval]] = {}
    for span in sorted(spans, key=lambda span: span.start):
        if span.kind in OF_ACTORS and span.kind != "lease":
            calls.setdefault(span.actor, []).append((span.start, span.end))
    lanes = []
    for actor, times in calls.items():
        own = [
            (activity, part.intervals)
            for part in parts
            if part.actor == actor and (activity := activity_of(actor, part.endpoint)) is not None
        ]
        working = union(itertools.chain.from_iterable(intervals for _, intervals in own))
        stretches = [
            Stretch(activity, begin - start, finish - start)
            for activity, intervals in own
            for begin, finish in clip(intervals, start, end)
        ]
        idle = without(union(times), working)
        stretches += [Stretch(WAITING, begin - start, finish - start) for begin, finish in clip(idle, start, end)]
        lanes.append(Lane(host, actor, tuple(sorted(stretches, key=lambda stretch: stretch.start))))
    return lanes


def side_by_side(step: StepLanes) -> list[Interval]:
    """When at least two lanes were busy with different things, seconds since the step began."""
    activities: dict[str, list[Interval]] = {}
    for stretch in itertools.chain.from_iterable(lane.stretches for lane in step.lanes):
        if stretch.activity != WAITING:
            activities.setdefault(stretch.activity, []).append((stretch.start, stretch.end))
    merged = [union(times) for times in activities.values()]
    pairs = itertools.combinations(merged, 2)
    return union(itertools.chain.from_iterable(_common(one, other) for one, other in pairs))


def _common(one: Sequence[Interval], other: Sequence[Interval]) -> Iterable[Interval]:
    return without(one, list(without(one, other)))
