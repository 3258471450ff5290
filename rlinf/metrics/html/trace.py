"""A trace.json as it lies on disk: which steps it holds, and the spans of a few of them.

In: the file. Out: spans per window of time and host. Pure apart from reading the file, of which no more is in memory
than what is asked for.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlinf.config.reading import open_regular, parse_json
from rlinf.runtime.observe.intervals import Interval
from rlinf.runtime.observe.perfetto import read_span
from rlinf.runtime.observe.spans import Span

_STEP = re.compile(r"step (\d+)")
_WHEN = re.compile(r'"ts": ([\d.e+-]+), "dur": ([\d.e+-]+)')
"""As the runtime writes it. A quotation mark inside of a name has a backslash before it, so no name looks like this."""
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
        kept: list[dict[int, list[Span]]] = [{} for _ in windows]
        if not windows:
            return kept
        first, last = min(start for start, _ in windows), max(end for _, end in windows)
        for event in _events(self._path, lambda line: _near(line, (first, last))):
            if (span := _span(event)) is None:
                continue
            for (begin, finish), hosts in zip(windows, kept, strict=True):
                if span.end > begin and span.start < finish:
                    hosts.setdefault(event["pid"], []).append(span)
        return kept


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
    """Whether a span may reach into some seconds: cheaper than reading it, which a long trace is mostly spared."""
    found = _WHEN.search(line)
    if found is None:
        return False
    start, lasts = float(found[1]) / _TRACE_UNIT, float(found[2]) / _TRACE_UNIT
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
