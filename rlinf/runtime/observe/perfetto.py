"""Spans of all hosts as one `trace.json` in Chrome's trace format, which https://ui.perfetto.dev opens: one process per
host, one track per actor.

Flows in: the spans of a host, on that host. Flows out: compressed pieces of text, which whoever writes the file appends
as they come, with all clocks put on its own. Only a few hosts are asked at once, and each piece is written before the
next one is asked for, so the writer's memory does not grow with the number of hosts.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import heapq
import itertools
import json
import logging
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rlinf.runtime.base.calls import SERVICE, Key
from rlinf.runtime.base.errors import TraceError
from rlinf.runtime.base.tasks import few_at_once
from rlinf.runtime.observe.spans import DEVICES, KINDS, OF_ACTORS, Kind, Span, best_offset

if TYPE_CHECKING:
    from rlinf.runtime.base.calls import Host

PIECE = 4096
"""Spans in a piece: about 800 kB of text, and a tenth of that as it travels."""
MOST_SPANS = 2_000_000
"""Spans in a file, unless asked for otherwise: about 400 MB, as much as a browser opens."""
MARKS = 64
"""Times by which a host tells when its spans ended: a limit is kept to within a 64th of a host's spans."""

_quoted = functools.lru_cache(4096)(json.dumps)
_WHAT = {"call": "caller", "item": "caller", "move": "caller", "wait": "for"}
"""Names of `Span.what` in a file, where it is not the event's name."""


@dataclass(frozen=True, slots=True)
class Outline:
    """How many spans a host has, and from when; seconds of its clock."""

    first: float
    """Start of the first one; infinite where there is none."""
    marks: tuple[tuple[float, int], ...]
    """Times, newest first, and how many spans ended then, or between then and the next older time."""

    @property
    def spans(self) -> int:
        """All of them."""
        return sum(count for _, count in self.marks)


@dataclass(frozen=True, slots=True)
class Extract:
    """The part of a host's spans that goes into a file."""

    host: int
    """Its number."""
    ahead: float
    """Seconds to add to its clock to get that of whoever writes the file."""
    origin: float
    """Time 0 of the file, by the writer's clock."""
    after: float
    """Only spans that ended later, by the writer's clock."""


def outline(spans: Sequence[Span]) -> Outline:
    """Return what whoever writes a file has to know of all of them first; spans are in order of their ends."""
    step = max(1, -(-len(spans) // MARKS))
    marks = tuple((spans[at].end, min(step, at + 1)) for at in range(len(spans) - 1, -1, -step))
    return Outline(min((span.start for span in spans), default=float("inf")), marks)


def extracts(outlines: dict[int, tuple[float, Outline]], most: int) -> list[Extract]:
    """Return the part of each host's spans that goes into one file: the newest of all, at most `most`.

    Args:
        outlines: by host, the seconds to add to its clock, and what it told.
    """
    marks = [(end + ahead, count) for ahead, each in outlines.values() for end, count in each.marks]
    after = float("-inf")
    for end, count in sorted(marks, reverse=True):
        most -= count
        if most < 0:
            after = end  # the spans of this mark, and all that ended before, are left out
            break
    origin = min((each.first + ahead for ahead, each in outlines.values()), default=0.0)
    return [Extract(host, ahead, origin, after) for host, (ahead, _) in outlines.items()]


def pieces(extract: Extract, spans: Sequence[Span]) -> Iterator[bytes]:
    """The lines of one host in a file, compressed, `PIECE` spans at a time; work for a thread.

    Spans of one track may overlap (an actor serves many calls at once), which Chrome's complete events cannot show;
    each track is therefore laid out in as many lanes as it needs.
    """
    after = extract.after - extract.ahead
    newest = sorted((span for span in spans if span.end > after), key=lambda span: span.start)
    lines = _lines(extract, newest, len(spans) - len(newest))
    while several := list(itertools.islice(lines, PIECE)):
        yield zlib.compress(",\n".join(several).encode(), 1)


def _lines(extract: Extract, spans: Sequence[Span], left_out: int) -> Iterator[str]:
    host, late = extract.host, extract.ahead - extract.origin
    name = f"host {host}" + (f", without its {left_out} oldest spans" if left_out else "")
    yield json.dumps({"ph": "M", "name": "process_name", "pid": host, "args": {"name": name}})
    yield json.dumps({"ph": "M", "name": "process_sort_index", "pid": host, "args": {"sort_index": host}})
    lanes = _Lanes()
    actors = {span.actor for span in spans if span.kind in OF_ACTORS}  # a wait may be a stream's or the flow's
    for span in spans:
        # in whole nanoseconds, so that rounding makes no two spans of a lane overlap
        begin, finish = round((span.start + late) * 1e9), round((max(span.start, span.end) + late) * 1e9)
        lane, is_new = lanes.place(track_of(span), begin, finish)
        if is_new is not None:
            named = {"name": is_new} | ({"actor": span.actor} if span.actor in actors else {})
            yield json.dumps({"ph": "M", "name": "thread_name", "pid": host, "tid": lane, "args": named})
        yield (
            f'{{"ph": "X", "pid": {host}, "tid": {lane}, "name": {_quoted(name_of(span))}, "cat": "{span.kind}", '
            f'"ts": {begin / 1e3}, "dur": {(finish - begin) / 1e3}, "args": {{{_arguments(span)}}}}}'
        )


def _arguments(span: Span) -> str:
    """Return the arguments that a click on a span shows, and what reads it back needs beside its name."""
    if span.kind == "payload":
        return f'"bytes": {span.bytes}'
    names = f'"actor": {_quoted(span.actor)}, "endpoint": {_quoted(span.endpoint)}'
    if span.kind == "part":
        return f'{names}, "bytes": {span.bytes}'
    key = _WHAT.get(span.kind)
    return names if key is None else f'{names}, "{key}": {_quoted(span.what)}'


def read_span(event: Mapping[str, Any]) -> Span | None:
    """The span that an event of a file is; None for an event of another kind, or that something else has written."""
    if event.get("cat") not in KINDS:
        return None
    try:
        kind: Kind = event["cat"]
        fields = {"actor": "", "endpoint": "", "bytes": 0, **event["args"]}
        texts = fields["actor"], fields["endpoint"], fields[_WHAT[kind]] if kind in _WHAT else event["name"]
        actor, endpoint, what = map(sys.intern, texts)
        start, lasts = event["ts"] / 1e6, event["dur"] / 1e6
    except (KeyError, TypeError):
        return None
    return Span(kind, actor, endpoint, what, start, start + lasts, fields["bytes"])


def name_of(span: Span) -> str:
    """Return the text on a span in a picture."""
    if span.kind in ("call", "item", "move"):
        return span.endpoint
    return f"wait for {span.what}" if span.kind == "wait" else span.what


def track_of(span: Span) -> str:
    """The track that it lies on in a picture: an actor's own, or one beside it."""
    if span.kind == "payload":
        return "payload"
    if span.kind in ("compute", "part"):
        return f"{span.actor} {span.kind}"
    if span.kind == "lease" or (span.kind == "wait" and span.what == DEVICES):
        return f"{span.actor} lease"
    return span.actor


_HEAD = b'{"displayTimeUnit": "ms", "traceEvents": [\n'


class TraceFile:
    """A file that pieces of several hosts are appended to, in any order; a line holds one event.

    What is there when its writer is killed can be read.

    Raises:
        TraceError: it cannot be written there, for instance because the disk is full; what was written is removed.
    """

    def __init__(self, path: str | Path):
        self._path = Path(path)
        try:
            self._file = open(path, "wb")  # noqa: SIM115
        except OSError as error:
            raise self._failed(error) from error
        self._separator = _HEAD
        self.spans = 0
        """That are in it."""

    def add(self, piece: bytes) -> None:
        """Append a piece."""
        text = zlib.decompress(piece)
        self.spans += text.count(b'{"ph": "X", ')
        self._write(self._separator + text)
        self._separator = b",\n"

    def _write(self, data: bytes) -> None:
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            self._discard()
            raise self._failed(error) from error

    def _discard(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _failed(self, error: OSError) -> TraceError:
        return TraceError(f"the trace {self._path} could not be written: {error.strerror or error}")

    def __enter__(self) -> TraceFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, TraceError):
            return
        self._write((self._separator if self._separator is _HEAD else b"") + b"\n]}\n")
        self._file.close()


class _Lanes:
    """Numbers the lanes of a host's tracks, a new lane wherever spans of one track overlap."""

    def __init__(self) -> None:
        self._busy: dict[str, list[tuple[int, int]]] = {}
        self._free: dict[str, list[int]] = {}
        self._count = 0

    def place(self, track: str, start: int, end: int) -> tuple[int, str | None]:
        """The lane of the next span (they come in order of their starts), and its name if it is a new one."""
        busy, free = self._busy.setdefault(track, []), self._free.setdefault(track, [])
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        name = None
        if not free:
            self._count += 1
            name = f"{track} ({len(busy) + 1})" if busy else track
            free.append(self._count)
        lane = heapq.heappop(free)
        heapq.heappush(busy, (end, lane))
        return lane, name


SMALL = 64
"""Hosts that are asked at once for something small: round trips overlap, and the controller does not choke."""
WRITERS = 4
"""Hosts that are asked at once for a piece of a trace: one writes while others make theirs."""

logger = logging.getLogger(__name__)


def ask(host: Host, number: int, method: str, *args: Any) -> Any:
    """Call the actor that every host has."""
    return host.call(number, SERVICE, method, f"host.{method}", args, {})


async def offsets(host: Host, hosts: Iterable[int]) -> dict[int, float]:
    """By host, the seconds to add to its clock to get this one's: one host of each other machine is asked."""
    machines: dict[str, list[int]] = {}
    for number in hosts:
        machines.setdefault(host.places[number].machine, []).append(number)

    async def compare(machine: str) -> float:
        if machine == host.places[host.rank].machine:
            return 0.0
        return await best_offset(host.now, lambda: ask(host, machines[machine][0], "clock"))

    answers = zip(machines.values(), await few_at_once(SMALL, compare, machines), strict=True)
    return {number: ahead for numbers, ahead in answers for number in numbers}


async def write_trace(host: Host, path: str | Path, hosts: list[int], most: int) -> None:
    """Write the newest spans of these hosts, at most so many in all."""
    ahead = await offsets(host, hosts)
    answers: list[Outline] = await few_at_once(SMALL, lambda number: ask(host, number, "trace_outline"), hosts)
    outlines = {number: (ahead[number], each) for number, each in zip(hosts, answers, strict=True)}
    loop, writing = asyncio.get_running_loop(), asyncio.Lock()
    with TraceFile(path) as file:

        async def copy(extract: Extract) -> None:
            export = host.number()
            try:
                while piece := await ask(host, extract.host, "trace_piece", export, extract):
                    async with writing:
                        await loop.run_in_executor(None, file.add, piece)
            finally:
                host.cast(extract.host, SERVICE, "trace_end", export)

        parts = extracts(outlines, most)
        await few_at_once(WRITERS, copy, parts)
    if parts and parts[0].after > float("-inf"):
        there = sum(each.spans for each in answers)
        logger.warning("%s has the newest %d of %d spans: a file takes %d at most", path, file.spans, there, most)


class Exports:
    """A host's side: what it makes of its spans for the files that are being written."""

    def __init__(self, host: Host):
        self._host = host
        self._open: dict[Key, Iterator[bytes]] = {}

    async def outline(self) -> Outline:
        """Return an outline of this host's spans."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, lambda: outline(self._host.tracer.dump()))

    async def piece(self, export: Key, extract: Extract) -> bytes:
        """The next piece for a file; empty: that was all."""
        if export not in self._open:
            self._open[export] = self._pieces(extract)
        iterator = self._open[export]
        return await asyncio.get_running_loop().run_in_executor(None, next, iterator, b"")

    def end(self, export: Key) -> None:
        """The file is written, or given up."""
        self._open.pop(export, None)

    def _pieces(self, extract: Extract) -> Iterator[bytes]:
        yield from pieces(extract, self._host.tracer.dump())
