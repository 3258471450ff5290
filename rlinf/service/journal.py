"""Journal of a service: what a client was promised is on the disk before it is answered, and restarts go on from there.

In: records of lines, one line for each model, for the service and for answers; each has segments of its own, and a
segment that begins with a saved state takes the place of all before it. Out: after a death, every record that was
waited for, in order. One thread writes, many records at a time; who waits for the disk waits for the last record that
was put before.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import struct
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlinf.config.load import InputError
from rlinf.config.reading import parse_json
from rlinf.data.safetensors_io import sync_directory
from rlinf.storage.files import sync

Result = dict[str, Any] | bytes
"""JSON values, or a protobuf message."""
SERVICE, ANSWERS = "service", "answers"
"""Lines of what is no model's: sessions, models and samplers; and requests for answers."""
_FRAME = struct.Struct("<III")  # bytes of facts and of all, and their sum


@dataclass(frozen=True, slots=True)
class Record:
    """An entry: what a client asked for, or its result."""

    facts: dict[str, Any]
    body: bytes = b""

    def framed(self) -> bytes:
        """Bytes of it, by which a torn one is told from a whole one."""
        facts = json.dumps(self.facts).encode()
        return _FRAME.pack(len(facts), len(facts) + len(self.body), zlib.crc32(self.body, zlib.crc32(facts))) + (
            facts + self.body
        )

    @staticmethod
    def of_result(id: str, result: Result, used: Mapping[str, Any] | None = None) -> Record:
        """Record what a request came to, and what it took, which is counted once."""
        facts = {"of": id} if used is None else {"of": id, "used": used}
        return Record(facts, result) if isinstance(result, bytes) else Record({**facts, "result": result})


@dataclass(slots=True)
class Line:
    """Records of a line, from the disk."""

    number: int
    """Of its newest segment: for a model that of the request after which its state was saved."""
    records: list[Record]
    """Of the newest segment, without results."""
    results: dict[str, Result] = field(default_factory=dict)
    """By request; of the segment before, too."""
    used: list[Mapping[str, Any]] = field(default_factory=list)
    """Use of the model by requests of the newest segment, and what its first record says of those before."""

    def requests(self, *, done: bool) -> list[Record]:
        """Requests of the newest segment.

        Args:
            done: with requests that had a result.
        """
        requests = (each for each in self.records if "id" in each.facts)
        return [each for each in requests if done or each.facts["id"] not in self.results]


@dataclass(frozen=True, slots=True)
class _Entry:
    line: str
    data: bytes = b""
    begins: int | None = None
    """Number of the segment that begins with it."""
    ends: bool = False
    """The line is over."""


class Journal:
    """Writes and reads all lines.

    Args:
        root: directory, made when something is put.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._queue: list[_Entry] = []
        self._put = self._needed = self._written = 0  # records: put, the last that is waited for, and on the disk
        self._task: asyncio.Task[None] | None = None
        self._broken: Exception | None = None
        self._open: dict[str, dict[str, bytes]] = {}  # requests without a result, by line
        self._segments: dict[str, Path] = {}  # the writing thread's, and `recover`'s before it
        self.sizes: dict[str, int] = {}
        """Bytes of each line's newest segment."""
        self.numbers: Counter[str] = Counter()
        """Its number."""

    # Writing ------------------------------------------------------------------------------------------------------

    def put(self, line: str, facts: dict[str, Any], *, wait: bool = True) -> None:
        """Add a record.

        Args:
            line: to which.
            facts: JSON.
            wait: answers wait until the disk has it.
        """
        self._add(_Entry(line, Record(facts).framed()), wait=wait)

    def request(self, line: str, id: str, facts: Mapping[str, Any], body: bytes = b"") -> None:
        """Add what a client asks for, unless it is there already.

        Args:
            line, facts: as of `put`.
            id: of the promise.
            body: of the request, if that is no JSON.
        """
        waiting = self._open.setdefault(line, {})
        if id not in waiting:
            waiting[id] = Record({**facts, "id": id}, body).framed()
            self._add(_Entry(line, waiting[id]), wait=True)

    def result(self, line: str, id: str, result: Result, *, wait: bool, used: Mapping[str, Any] | None = None) -> None:
        """Add what a request came to, and what it took."""
        self._open.get(line, {}).pop(id, None)
        self._add(_Entry(line, Record.of_result(id, result, used).framed()), wait=wait)

    def begin(self, line: str, number: int, records: Iterable[Record], results: Mapping[str, Result]) -> None:
        """Begin a segment: with requests that are not over, and with results that may be asked for.

        Args:
            line: of which.
            number: of the segment, more than the last one's.
            records: its first ones.
            results: by request.
        """
        parts = [each.framed() for each in (*records, *(Record.of_result(*each) for each in results.items()))]
        parts += self._open.get(line, {}).values()
        self.sizes[line], self.numbers[line] = 0, number
        self._add(_Entry(line, b"".join(parts), begins=number), wait=True)

    def end(self, line: str) -> None:
        """Remove a line."""
        self._open.pop(line, None)
        self.sizes.pop(line, None)
        self._add(_Entry(line, ends=True), wait=False)

    def state(self, line: str, number: int) -> Path:
        """Directory of the state that a segment begins with."""
        return self._root / line / f"{number:09d}.state"

    def _add(self, entry: _Entry, *, wait: bool) -> None:
        self._queue.append(entry)
        self._put += 1
        if wait:
            self._needed = self._put
        if not entry.ends:
            self.sizes[entry.line] = self.sizes.get(entry.line, 0) + len(entry.data)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._write_all(), name="journal")

    async def synced(self) -> None:
        """Wait until the disk has what answers wait for.

        Raises:
            OSError: it does not take it. Nothing may be answered any more.
        """
        needed = self._needed
        while self._written < needed and self._broken is None and self._task is not None:
            await asyncio.wait([self._task])
        if self._broken is not None:
            raise self._broken

    async def close(self) -> None:
        """Write what was put."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _write_all(self) -> None:
        while self._queue and self._broken is None:
            entries, self._queue = self._queue, []
            needed = self._needed
            try:
                await asyncio.to_thread(self._write, entries, sync=needed > self._written)
            except Exception as error:  # a bug, too: half a record may be at an end, and nothing may come behind it
                self._broken = error
                return
            self._written += len(entries)

    def _write(self, entries: Iterable[_Entry], *, sync: bool) -> None:
        gathered: dict[str, bytearray] = {}
        for entry in entries:
            if entry.ends or entry.begins is not None:
                self._append(gathered, sync=True)  # a line's end or state follows from records of others
                gathered = {}
            if entry.ends:
                shutil.rmtree(self._root / entry.line, ignore_errors=True)
                self._segments.pop(entry.line, None)
            elif entry.begins is not None:
                self._begin(entry.line, entry.begins, entry.data)
            else:
                gathered.setdefault(entry.line, bytearray()).extend(entry.data)
        self._append(gathered, sync=sync)

    def _append(self, gathered: Mapping[str, bytearray], *, sync: bool) -> None:
        for line, data in gathered.items():
            path = self._segments.get(line)
            if path is None:
                self._begin(line, 0, data)
                continue
            with path.open("ab") as file:
                file.write(data)
                file.flush()
                if sync:
                    os.fsync(file.fileno())

    def _begin(self, line: str, number: int, data: bytes | bytearray) -> None:
        """Have a segment stand whole, and remove those that nobody asks for after it."""
        directory = self._root / line
        directory.mkdir(parents=True, exist_ok=True)
        partial, path = directory / f".{number:09d}.part", directory / f"{number:09d}.log"
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
        for parent in (directory, self._root, self._root.parent):
            sync(parent)
        self._segments[line] = path
        for old in _segments(directory)[:-2]:
            old.unlink()
        for state in directory.glob("*.state"):
            if not state.name.startswith(".") and state.stem < path.stem:  # a later one may be just being written
                shutil.rmtree(state, ignore_errors=True)

    # Reading ------------------------------------------------------------------------------------------------------

    def recover(self) -> dict[str, Line]:
        """All lines as they are on the disk, before anything is put.

        Raises:
            InputError: a segment is damaged before its end.
        """
        lines: dict[str, Line] = {}
        for directory in sorted(self._root.iterdir()) if self._root.is_dir() else ():
            for stray in directory.glob(".*"):
                shutil.rmtree(stray) if stray.is_dir() else stray.unlink()
            if not (segments := _segments(directory)):
                continue
            *earlier, newest = segments[-2:]
            line = Line(int(newest.stem), [])
            for path in (*earlier, newest):
                records = _whole(path)
                for each in records:
                    if (id := each.facts.get("of")) is not None:
                        line.results[id] = each.facts.get("result", each.body)
                    elif path == newest:
                        line.records.append(each)
                    if path == newest and "used" in each.facts:
                        line.used.append(each.facts["used"])
            self._segments[directory.name], self.sizes[directory.name] = newest, newest.stat().st_size
            self.numbers[directory.name] = line.number
            again = line.requests(done=directory.name not in (SERVICE, ANSWERS))  # what models did they do again
            self._open[directory.name] = {each.facts["id"]: each.framed() for each in again}
            lines[directory.name] = line
        return lines


def _segments(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("*.log") if not path.name.startswith("."))


def _whole(path: Path) -> list[Record]:
    """Records of a segment; a torn one at its end, which nobody was answered by, is cut off.

    Raises:
        InputError: it is damaged before its end.
    """
    data, records, place = path.read_bytes(), [], 0
    for record, end in _frames(data):
        records.append(record)
        place = end
    if place == len(data):
        return records
    if data[place:].strip(b"\0"):
        size = _FRAME.unpack_from(data, place)[1] + _FRAME.size if len(data) >= place + _FRAME.size else len(data)
        if place + size < len(data):
            raise InputError(
                f"{path}: damaged at byte {place} of {len(data)}, and records come behind it that clients rely on; "
                f"restore the file, or give them up: truncate -s {place} {path}"
            )
    with path.open("r+b") as file:
        file.truncate(place)
        os.fsync(file.fileno())
    return records


def _frames(data: bytes) -> Iterator[tuple[Record, int]]:
    """Records from the beginning, each with where it ends, up to the first that is not whole."""
    place = 0
    while place + _FRAME.size <= len(data):
        named, size, check = _FRAME.unpack_from(data, place)
        payload = data[place + _FRAME.size : (place := place + _FRAME.size + size)]
        if not 0 < named <= size == len(payload) or zlib.crc32(payload) != check:
            return
        yield Record(parse_json(payload[:named]), payload[named:]), place


def put_directory(partial: Path, target: Path) -> None:
    """Have a directory stand at its place, whole and on the disk."""
    sync_directory(partial)
    shutil.rmtree(target, ignore_errors=True)  # nobody names it yet
    partial.rename(target)
    sync(target.parent)
