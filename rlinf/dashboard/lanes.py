"""Reads a trace.json into lanes: what each actor, or each device, did when during a window of time.

`Trace` tells which steps a file holds, and reads the spans of a few of them, per window of time and host; no more of it
is in memory than what is asked for. Out: per actor or per host a lane of stretches, with the same notion of "busy" as
the metrics `timing/...`. A host stands for its device. Pure apart from reading the file; `lanes_svg` draws those of
devices, the page those of actors.
"""

from __future__ import annotations

import io
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf.config.reading import open_regular, parse_json
from rlinf.metrics.timing import activity_of, timing
from rlinf.runtime.observe.perfetto import read_span
from rlinf.runtime.observe.spans import OF_ACTORS, Busy, Interval, Lap, Span, busy, clip, union, without

_STEP = re.compile(r"step (\d+)")
_WHEN = re.compile(r'"ts": ([\d.e+-]+), "dur": ([\d.e+-]+)')
"""Times of a span as the runtime writes them. A quotation mark inside of a name has a backslash before it, so no name
looks like this."""
_FIRST_LINE = 1000
"""Characters: it is short in a file of ours, and may be all there is in another."""
_TRACE_UNIT = 1e6
"""Microseconds, in which Chrome's format counts, per second."""


class Trace:
    """A trace file, of which no more is in memory than what is asked for.

    Args:
        path: of trace.json, or of the run's directory that has one.

    Raises:
        ValueError: there is no such file, or it is no trace.
    """

    def __init__(self, path: Path) -> None:
        self._path = path = path / "trace.json" if path.is_dir() else path
        if not path.is_file():
            raise ValueError(f"there is no file {path}: name the trace.json of a run, or its directory")
        self.title = path.absolute().parent.name if path.stem == "trace" else path.stem
        """The file's name, or the run directory's if the file is named as in all runs."""
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

    def middle(self) -> int:
        """The step in the middle.

        Raises:
            ValueError: the trace has no step.
        """
        if not self.steps:
            raise ValueError(f"{self._path} has no step of a flow: was the run ended before its first step was over?")
        return self.steps[len(self.steps) // 2]

    def spans(self, windows: Sequence[Interval]) -> list[dict[int, list[Span]]]:
        """The spans that reach into each of some windows of time, by host."""
        by_window: list[dict[int, list[Span]]] = [{} for _ in windows]
        if not windows:
            return by_window
        first, last = min(start for start, _ in windows), max(end for _, end in windows)
        for event in _events(self._path, lambda line: _near(line, (first, last))):
            if (span := _span(event)) is None:
                continue
            for (begin, finish), hosts in zip(windows, by_window, strict=True):
                if span.end > begin and span.start < finish:
                    hosts.setdefault(event["pid"], []).append(span)
        return by_window


def _events(path: Path, wanted: Callable[[str], bool]) -> Iterator[dict[str, Any]]:
    """The events of a trace whose lines are wanted.

    The runtime writes one per line, so a long trace is never in memory as a whole; a file that another program has
    rewritten is read as a whole.
    """
    with io.TextIOWrapper(open_regular(path), encoding="utf-8", errors="replace") as file:
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
    """True if a span may reach into some seconds: cheaper than reading it, which a long trace is mostly spared."""
    match = _WHEN.search(line)
    if match is None:
        return False
    start, lasts = float(match[1]) / _TRACE_UNIT, float(match[2]) / _TRACE_UNIT
    return start < within[1] and start + lasts > within[0]


def _event(line: str) -> Any:
    """One event; None for a line that was cut when its writer was killed."""
    try:
        return parse_json(line.rstrip().removesuffix(","))
    except ValueError:
        return None


def _rewritten(path: Path) -> list[Any]:
    try:
        events = parse_json(path.read_text(encoding="utf-8"))["traceEvents"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no trace in Chrome's format: {error!r}") from error
    if not isinstance(events, list):
        raise ValueError(f"{path} is no trace in Chrome's format: its traceEvents are a {type(events).__name__}")
    return events


WAITING = "waiting"
"""A call runs, but waits for its input, for room for its output, or for the device."""
LOADING, PARKING = "loading", "parking"
"""A role moves its bytes onto the device, or off it."""
HELD = "lease"
"""A role may use the device, whether or not it does."""
_MOVES = {"onload": LOADING, "offload": PARKING}
_OVERLAP = 0.02
"""Share of a role's time on a device that may coincide with another's before it gets a row of its own: calls that hand
the device over touch each other."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A time during which an actor or role did one thing."""

    name: str
    """Name of the actor, such as "rollout[0]", in lanes of actors; of the role, "rollout", in lanes of devices."""
    activity: str
    """`generation`, `scoring`, `training`, `sync`, the name of an endpoint that is none of these, or WAITING, LOADING,
    PARKING, HELD."""
    start: float
    """Seconds since the window began."""
    end: float
    """Seconds since the window began."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Stretches of time of one actor or one device, by activity."""

    host: int
    """Number of the host."""
    stretches: tuple[Stretch, ...]
    """In order of their starts."""
    name: str = ""
    """Name of the actor; empty for a device."""

    def of(self, *activities: str) -> list[Stretch]:
        """The stretches of some activities."""
        return [stretch for stretch in self.stretches if stretch.activity in activities]

    @property
    def work(self) -> list[Stretch]:
        """The stretches that are neither waiting, moves, nor leases."""
        return [stretch for stretch in self.stretches if stretch.activity not in (WAITING, LOADING, PARKING, HELD)]

    @property
    def busy(self) -> float:
        """Seconds in which at least one role worked."""
        return _length(_times(self.work))

    def rows(self) -> dict[str, int]:
        """Role to row: each role gets the first row in which it overlaps with no other."""
        times = _by_name(self.work)
        rows: dict[str, int] = {}
        for role, own in times.items():
            for row in itertools.count():
                there = union(itertools.chain.from_iterable(times[other] for other, at in rows.items() if at == row))
                free = _length(without(own, there))
                if _length(own) - free <= _OVERLAP * min(_length(own), _length(there)):
                    rows[role] = row
                    break
        return rows


@dataclass(frozen=True, slots=True)
class Lanes:
    """All actors, or all devices, during one window of a trace."""

    title: str
    """Name of the run."""
    step: int | None
    """Which step of the flow it is; None: all of them."""
    seconds: float
    """How long the window is."""
    lanes: tuple[Lane, ...]
    """By host; a host's actors in the order in which they first did something."""
    timing: Mapping[str, float]
    """`timing/...` of the window, as in the metrics, without moves."""

    @property
    def busy(self) -> float:
        """The share of the devices' time in which they worked."""
        whole = self.seconds * len(self.lanes)
        return sum(lane.busy for lane in self.lanes) / whole if whole else 0.0

    def shares(self) -> list[tuple[int, dict[str, float]]]:
        """Per host the share of the time in which each role worked, under "moves" that in which any role moved, and
        under "idle" that in which nothing of this went on."""
        by_host = []
        for lane in self.lanes:
            moves = lane.of(LOADING, PARKING)
            parts = {role: _length(times) for role, times in _by_name(lane.work).items()}
            parts |= {"moves": _length(_times(moves)), "idle": self.seconds - _length(_times([*lane.work, *moves]))}
            by_host.append((lane.host, {name: spent / self.seconds for name, spent in parts.items()}))
        return by_host

    def overlap(self) -> list[Interval]:
        """When at least two different activities went on, seconds since the window began."""
        activities: dict[str, list[Interval]] = defaultdict(list)
        for stretch in itertools.chain.from_iterable(lane.work for lane in self.lanes):
            activities[stretch.activity].append((stretch.start, stretch.end))
        pairs = itertools.combinations([union(times) for times in activities.values()], 2)
        return union(itertools.chain.from_iterable(without(one, list(without(one, other))) for one, other in pairs))


def actor_lanes(trace: Trace, steps: Sequence[int]) -> list[Lanes]:
    """Return the lanes of every actor during some steps.

    Raises:
        ValueError: the trace has not all of these.
    """
    windows = [trace.window(step) for step in steps]
    pictures = []
    for step, window, hosts in zip(steps, windows, trace.spans(windows), strict=True):
        parts = {host: busy(spans) for host, spans in sorted(hosts.items())}
        lanes: list[Lane] = []
        for host, own in parts.items():
            by_actor: dict[str, list[Stretch]] = {
                span.actor: []
                for span in sorted(hosts[host], key=lambda span: span.start)
                if span.kind in OF_ACTORS and span.kind != "lease"
            }
            for stretch in _stretches(hosts[host], own, window, lambda actor: actor):
                if stretch.name in by_actor:
                    by_actor[stretch.name].append(stretch)
            lanes += [Lane(host, tuple(stretches), actor) for actor, stretches in by_actor.items()]
        pictures.append(_window(trace, step, window, lanes, parts))
    return pictures


def device_lanes(path: Path, step: int | None = None, *, whole: bool = False) -> Lanes:
    """Return the lanes of each device, by role.

    Args:
        path: of a trace.json, or of the run's directory that has one.
        step: which step of the flow; default: the one in the middle.
        whole: instead, from the beginning of the first step to the end of the last.

    Raises:
        ValueError: there is no such file, it is no trace, or has no such step.
    """
    trace = Trace(path)
    middle = trace.middle()
    if whole and step is None:
        window = trace.window(trace.steps[0])[0], trace.window(trace.steps[-1])[1]
    else:
        step = middle if step is None else step
        window = trace.window(step)
    (hosts,) = trace.spans([window])
    parts = {host: busy(hosts.get(host, ())) for host in trace.hosts}
    lanes = [Lane(host, tuple(_stretches(hosts.get(host, ()), own, window, _role))) for host, own in parts.items()]
    return _window(trace, step, window, lanes, parts)


def _role(actor: str) -> str:
    return actor.partition("[")[0]


def _window(
    trace: Trace, step: int | None, window: Interval, lanes: Iterable[Lane], parts: Mapping[int, Sequence[Busy]]
) -> Lanes:
    start, end = window
    every = tuple(
        Busy(part.actor, part.endpoint, clip(part.intervals, start, end))
        for part in itertools.chain.from_iterable(parts.values())
    )
    metrics = {"timing/step": end - start, **timing(Lap(start, end, every))}
    return Lanes(trace.title, step, end - start, tuple(lanes), metrics)


def _stretches(
    spans: Iterable[Span], parts: Iterable[Busy], window: Interval, name_of: Callable[[str], str]
) -> list[Stretch]:
    """Everything that a host's actors did within a window, in order.

    Args:
        spans: of the host.
        parts: when each of its actors was busy.
        window: start and end, seconds of the trace.
        name_of: actor to the name under which its time counts.
    """
    intervals: dict[tuple[str, str], list[Interval]] = defaultdict(list)
    worked: dict[str, list[Interval]] = defaultdict(list)
    called: dict[str, list[Interval]] = defaultdict(list)
    for part in parts:
        if (activity := activity_of(part.actor, part.endpoint)) is not None:
            intervals[name_of(part.actor), activity] += part.intervals
            worked[name_of(part.actor)] += part.intervals
    for span in spans:
        name, interval = name_of(span.actor), (span.start, span.end)
        if span.kind == "lease":
            intervals[name, HELD].append(interval)
        elif span.kind in OF_ACTORS:
            called[name].append(interval)
            if span.kind == "move":
                intervals[name, _MOVES[span.endpoint]].append(interval)
    for name, times in called.items():
        intervals[name, WAITING] = list(without(union(times), union(worked[name])))
    stretches = (
        Stretch(name, activity, start - window[0], end - window[0])
        for (name, activity), times in intervals.items()
        for start, end in clip(union(times), *window)
    )
    return sorted(stretches, key=lambda stretch: stretch.start)


def _times(stretches: Iterable[Stretch]) -> list[Interval]:
    return union((stretch.start, stretch.end) for stretch in stretches)


def _by_name(stretches: Iterable[Stretch]) -> dict[str, list[Interval]]:
    stretches_of: dict[str, list[Stretch]] = defaultdict(list)
    for stretch in stretches:
        stretches_of[stretch.name].append(stretch)
    return {name: _times(own) for name, own in stretches_of.items()}


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
