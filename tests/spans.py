"""Spans as the runtime records them, and trace files made of them, for tests of what reads these."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rlinf.runtime.observe.perfetto import MOST_SPANS, TraceFile, extracts, outline, pieces
from rlinf.runtime.observe.spans import DEVICES, Span


def call(actor: str, endpoint: str, start: float, end: float, caller: str = "flow") -> Span:
    return Span("call", actor, endpoint, caller, start, end)


def item(actor: str, endpoint: str, start: float, end: float, caller: str) -> Span:
    return Span("item", actor, endpoint, caller, start, end)


def move(actor: str, what: str, start: float, end: float) -> Span:
    return Span("move", actor, what, "lease", start, end)


def compute(actor: str, endpoint: str, function: str, start: float, end: float) -> Span:
    return Span("compute", actor, endpoint, function, start, end)


def wait(actor: str, endpoint: str, what: str, start: float, end: float) -> Span:
    return Span("wait", actor, endpoint, what, start, end)


def wait_for_lease(actor: str, endpoint: str, start: float, end: float) -> Span:
    return wait(actor, endpoint, DEVICES, start, end)


def lease(actor: str, endpoint: str, start: float, end: float) -> Span:
    return Span("lease", actor, endpoint, f"{actor}.{endpoint}", start, end)


def payload(route: str, at: float, size: int = 0) -> Span:
    return Span("payload", "", "", route, at, at, size)


def step(number: int, start: float, end: float) -> Span:
    return Span("flow", "flow", "", f"step {number}", start, end)


def write_trace(
    path: str | Path, hosts: Sequence[Iterable[Span]], ahead: Sequence[float] = (), most: int = MOST_SPANS
) -> None:
    """Write a file as the controller does: with the spans of hosts 0, 1, …, whose clocks are behind by `ahead`."""
    told = {number: sorted(spans, key=lambda span: span.end) for number, spans in enumerate(hosts)}
    behind = dict(enumerate(ahead))
    outlines = {number: (behind.get(number, 0.0), outline(spans)) for number, spans in told.items()}
    with TraceFile(path) as file:
        for extract in extracts(outlines, most):
            for piece in pieces(extract, told[extract.host]):
                file.add(piece)
