"""Finds runs below directories and follows them for pages: their files as they grow, and their jobs' feeds.

In: directories of runs, or of directories of runs. Out: runs by id, and what a list says of each without reading them
whole; of a run its state as JSON, and events for the queues of pages. Who wakes whom: a page that comes wakes the
tick, which has files looked at each second (`look`) until the last page has gone; lines of a feed go to these as they
come. Looking is asking for sizes and times: it works on network file systems too, which tell nobody of changes,
and this process is none of the job's.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import json
import logging
import os
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from rlinf.config.reading import open_regular, parse_json, read_bytes
from rlinf.dashboard.events import (
    CONTROLS,
    LIVE,
    ClientQueue,
    Event,
    Feed,
    Job,
    Message,
    NoFeed,
    elsewhere,
    job_of,
    status,
)
from rlinf.dashboard.state import VIDEOS, Samples, run_lanes, run_state
from rlinf.storage.files import ALARMS, ENVIRONMENT, EXPLAINED, METRICS, SAMPLES
from rlinf.storage.reading import Appended, MetricFile, objects

DEPTH = 3
"""How far below a named directory runs are looked for: outputs/experiment/seed/run."""
_END = 1 << 16
"""Bytes at the end of metrics.jsonl in which its last line is looked for; one of 80 metrics has 3,000."""
_STEPS = re.compile(r"^steps:[ \t]*(\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class RunPlace:
    """A run directory."""

    id: str
    """Id of the run in addresses."""
    name: str
    """For people: its path below the directory that was named."""
    directory: Path


def is_run(directory: Path) -> bool:
    """True if a run writes, or has written, to a directory."""
    return any(os.path.isfile(directory / name) for name in (METRICS, LIVE))  # False where one may not look


def runs_in(named: Sequence[Path]) -> list[RunPlace]:
    """The runs in and below directories, each once, in the order of their names."""
    names = {path.resolve(): name for directory in named for path, name in _below(directory)}
    return [RunPlace(_id(path), name, path) for path, name in names.items()]


@dataclass(frozen=True, slots=True)
class Summary:
    """A run's entry in the list of runs: name, status and progress."""

    id: str
    name: str
    directory: str
    status: str
    """See `events.status`."""
    step: int
    """The last that is over."""
    steps: int | None
    """That there are to be; None if nobody said."""


def summary(run: RunPlace) -> Summary:
    """Summarize a run for the list of runs. It reads the end of a file, and little else."""
    step, steps = _last_step(run.directory / METRICS), _planned(run.directory)
    return Summary(run.id, run.name, str(run.directory), status(job_of(run.directory), step, steps), step, steps)


def _below(named: Path) -> Iterator[tuple[Path, str]]:
    """(directory, name) of runs."""
    top = named.resolve()
    if is_run(top):
        yield top, top.name
        return
    for directory in _walk(top, DEPTH):
        yield directory, directory.relative_to(top).as_posix()


def _walk(directory: Path, depth: int) -> Iterator[Path]:
    try:
        entries = sorted(
            entry.path for entry in os.scandir(directory) if not entry.name.startswith(".") and _is_directory(entry)
        )
    except OSError:
        return
    for path in map(Path, entries):
        if is_run(path):
            yield path
        elif depth > 1:
            yield from _walk(path, depth - 1)


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _id(path: Path) -> str:
    """Return an id of letters and digits alone, the same for a path each time."""
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:12]


def _last_step(metrics: Path) -> int:
    try:
        with open_regular(metrics, links=False) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _END))
            end = file.read()
    except OSError:
        return 0
    whole = end[: end.rfind(b"\n") + 1].splitlines()
    return next((row["step"] for row in objects(reversed(whole)) if type(row.get("step")) is int), 0)


def _planned(directory: Path) -> int | None:
    try:
        environment = parse_json(read_bytes(directory / ENVIRONMENT, links=False))
        if isinstance(environment, dict) and type(environment.get("steps")) is int:
            return int(environment["steps"])
        match = _STEPS.search(read_bytes(directory / "resolved.yaml", links=False).decode("utf-8", errors="replace"))
    except (OSError, ValueError):
        return None
    return None if match is None else int(match[1])


_GROWING = (METRICS, SAMPLES, EXPLAINED, ALARMS)
_SHOWN = (*_GROWING, LIVE, "resolved.yaml", ENVIRONMENT, VIDEOS)
"""Files that a state is made of: as long as none of these changes, it is what it was."""
_TRACE = "trace.json"
_LEAST = 5
"""How hard a state is compressed: most of what there is to gain, in a hundredth of a second."""
PATIENCE = 20.0
"""Seconds that a request waits for the job to answer; what it does then comes with its status."""

T = TypeVar("T")
Signature = tuple[tuple[int, int, int] | None, ...]


class RunTail:
    """A run.

    Args:
        found: where.
    """

    def __init__(self, run: RunPlace) -> None:
        self.run = run
        self.client_queues: set[ClientQueue] = set()
        """Outboxes of the pages that show it."""
        directory = run.directory
        self._metrics, self._samples = MetricFile(directory / METRICS), Samples(directory / SAMPLES)
        self._explained, self._alarms = Appended(directory / EXPLAINED), Appended(directory / ALARMS)
        self._reading, self._drawing = asyncio.Lock(), asyncio.Lock()
        self._reads: set[asyncio.Task[Any]] = set()
        self._asking = 0
        self._seen: Signature | None = None
        self._summary: tuple[Signature, Summary] | None = None
        self._state: tuple[tuple[Signature, str], bytes] | None = None
        self._lanes: tuple[Signature, bytes] | None = None
        self._feed = Feed(self._send)
        self._following: asyncio.Task[None] | None = None

    async def state(self) -> bytes:
        """All that a page shows of the run but its lanes, as JSON, compressed by gzip.

        Raises:
            OSError, ValueError: its files cannot be read.
        """
        return await self._alone(self._up_to_date(self._make_state))

    async def lanes(self) -> bytes:
        """Return the lanes of each actor in a few steps, likewise; a trace is read once for all pages.

        Raises:
            OSError, ValueError: its trace cannot be read.
        """
        return await self._alone(asyncio.to_thread(self._make_lanes), self._drawing)

    async def answers(self, step: int) -> list[dict[str, Any]]:
        """The sampled answers of a step to prompts of training."""
        return await self._alone(self._up_to_date(lambda: self._samples.rows(step)))

    def video(self, name: str) -> Path | None:
        """The file of a video; None if there is no such file below the run's directory of videos."""
        top = (self.run.directory / VIDEOS).resolve()
        try:
            path = (top / name).resolve()
            return path if path.is_relative_to(top) and path.is_file() else None
        except (OSError, ValueError):  # a name with a NUL, or one that is too long
            return None

    def summary(self) -> Summary:
        """Return its entry in the list of runs. It blocks for a moment."""
        now = _signature(self.run.directory, (METRICS, LIVE, ENVIRONMENT, "resolved.yaml"))
        lives = now[1] is not None  # then it may die without a file's changing
        if self._summary is None or lives or self._summary[0] != now:
            self._summary = (now, summary(self.run))
        entry, word = self._summary[1], self._feed.status
        return entry if word is None else replace(entry, status=word)

    async def show(self, client_queue: ClientQueue) -> None:
        """Begin to send a page what happens: at once what it does not know yet."""
        run = self.run.id
        await self._alone(self._catch_up())
        async with self._reading:  # nothing is read meanwhile, so no event is missed or sent twice
            rows_now = self._metrics.rows
            if run not in client_queue.since:
                client_queue.since[run] = rows_now.steps[-1] if len(rows_now) else 0
            elif rows := rows_now.after(client_queue.since[run]):
                client_queue.put({"run": run, "kind": "rows", "rows": rows})
            for message in self._feed.now:
                client_queue.put({**message, "run": run})
            self.client_queues.add(client_queue)
        await self._listen()

    async def look(self) -> None:
        """Tell the pages what was added to files; listen to the job as long as there are pages."""
        await self.rest()
        if not self.client_queues:
            return
        await self._listen()
        await self._alone(self._catch_up())

    async def ask(self, what: str) -> Message:
        """Ask its job for something; returns its answer.

        Raises:
            NoFeed: nobody is there to do it.
        """
        job = await asyncio.to_thread(self._job)
        if job is None:
            raise NoFeed("no job writes to this run any more")
        if not job.near:
            raise NoFeed(f"its job is on {job.machine}: watch it there")
        self._asking += 1
        try:
            await self._listen()
            return await self._feed.ask(what, PATIENCE)
        finally:
            self._asking -= 1
            await self.rest()

    async def rest(self) -> None:
        """Listen to the job no longer, unless a page shows the run or somebody waits for the job's answer."""
        if not self.client_queues and not self._asking:
            await self.leave()

    async def leave(self) -> None:
        """Listen to the job no longer."""
        following, self._following = self._following, None
        if following is not None:
            following.cancel()
            await asyncio.wait([following])

    async def _listen(self) -> None:
        """Listen to the job, if it lives on this machine."""
        if self._listens:
            return
        job = await asyncio.to_thread(self._job)
        wanted = bool(self.client_queues or self._asking)  # whoever wanted it may have gone meanwhile
        if job is not None and job.near and wanted and not self._listens:
            self._feed.begins()
            self._following = asyncio.create_task(self._follow(job), name=f"feed of {self.run.name}")

    @property
    def _listens(self) -> bool:
        return self._following is not None and not self._following.done()

    def _job(self) -> Job | None:
        """Return the job that writes to it; None if none lives."""
        job = job_of(self.run.directory)
        return job if job is not None and job.lives else None

    async def _follow(self, job: Job) -> None:
        if await self._feed.follow(job):  # whether the run has ended, too, the list of runs says
            now = await asyncio.to_thread(self.summary)
            self._send({"kind": "status", "status": "ended", "step": now.step, "asked": []})

    async def _alone(self, work: Coroutine[Any, Any, T], lock: asyncio.Lock | None = None) -> T:
        """Have work done on the files while nobody else reads them, or does what another lock is for.

        It goes on when whoever asked for it is gone: a thread cannot be cancelled, and what it has read is news for the
        other pages, too.
        """

        async def alone() -> T:
            async with lock or self._reading:
                return await work

        reading = asyncio.create_task(alone(), name=f"read {self.run.name}")
        self._reads.add(reading)
        reading.add_done_callback(self._reads.discard)
        return await asyncio.shield(reading)

    async def _up_to_date(self, make: Callable[[], T]) -> T:
        """Call a function, in a thread, on the files as they are now, and return its result."""
        await self._catch_up()
        return await asyncio.to_thread(make)

    async def _catch_up(self) -> None:
        """Read what was added to files, and tell the pages. Whoever calls it is the one who reads."""
        for event in await asyncio.to_thread(self._read):
            self._send(event)

    def _send(self, event: Event) -> None:
        for client_queue in self.client_queues:
            client_queue.put({**event, "run": self.run.id})

    def _read(self) -> list[Event]:
        """Read what was added; returns what pages are to be told."""
        before_signature, self._seen = self._seen, _signature(self.run.directory, _GROWING)
        if before_signature == self._seen:
            return []
        before, anew = self._metrics.rows.steps[-1:], self._metrics.times_anew
        self._metrics.update()
        steps = self._samples.refresh()
        additions = {
            kind: [row for _, block in file.blocks() for row in objects(block.splitlines())]
            for kind, file in (("explained", self._explained), ("alarms", self._alarms))
        }
        if self._metrics.times_anew != anew:
            return [{"kind": "anew"}]
        events: list[Event] = []
        # Once more the last row that is known, to which an evaluation may have added.
        if rows := self._metrics.rows.after(before[0] - 1 if before else -1):
            events.append({"kind": "rows", "rows": rows})
        events += [{"kind": kind, "rows": rows} for kind, rows in additions.items() if rows]
        if steps:
            events.append({"kind": "answers", "steps": steps})
        return events

    def _make_state(self) -> bytes:
        status = self.summary().status
        now = _signature(self.run.directory, _SHOWN), status  # a job that is killed changes no file
        if self._state is None or self._state[0] != now:
            rows, samples = self._metrics.rows, self._samples
            state = run_state(self.run.directory, traced=False, metrics=rows, samples=samples)
            state |= {"id": self.run.id, "status": status}
            state["controls"] = [{"what": what, **asdict(each)} for what, each in CONTROLS.items()]
            state["elsewhere"] = elsewhere(job_of(self.run.directory), self.run.directory)
            state["about"] = [*state["about"], *self._left_out]
            self._state = (now, _packed(state))
        return self._state[1]

    def _make_lanes(self) -> bytes:
        now = _signature(self.run.directory, (_TRACE,))
        if self._lanes is None or self._lanes[0] != now:
            self._lanes = (now, _packed(run_lanes(self.run.directory)))
        return self._lanes[1]

    @property
    def _left_out(self) -> list[str]:
        """Sentences on the lines of its files that were left out."""
        lines = {METRICS: self._metrics.left_out, SAMPLES: self._samples.left_out}
        return [
            f"{name}: {count} line{'s' * (count > 1)} left out, longer than any that a run writes"
            for name, count in lines.items()
            if count
        ]


def _signature(directory: Path, names: tuple[str, ...]) -> Signature:
    """By which one sees whether files have changed: of each its number, size and time; None where it is not there."""
    return tuple(_stat(directory / name) for name in names)


def _stat(path: Path) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _packed(value: Any) -> bytes:
    return gzip.compress(json.dumps(value).encode(), _LEAST)


logger = logging.getLogger(__name__)

TICK = 1.0
"""Seconds between two looks at files: no sooner does a person see that something has changed."""
SEARCH = 5
"""Every how many looks new runs are looked for."""


class RunList:
    """The runs in and below some directories.

    Args:
        named: these directories.
    """

    def __init__(self, named: Sequence[Path]) -> None:
        self._named = list(named)
        self.runs: dict[str, RunTail] = {}
        """By id."""
        self._client_queues: set[ClientQueue] = set()
        self._page_came = asyncio.Event()
        self._listed: list[dict[str, Any]] = []

    async def listed(self) -> list[dict[str, Any]]:
        """Return an entry for each run that there is now: those found first come first, and those of one search by
        name."""
        await self._search()
        return await self._summaries()

    @contextlib.asynccontextmanager
    async def showing(self, runs: Sequence[RunTail], client_queue: ClientQueue) -> AsyncIterator[None]:
        """While a page shows runs, it is sent what happens."""
        self._client_queues.add(client_queue)
        self._page_came.set()
        try:
            for run in runs:
                await run.show(client_queue)
            yield
        finally:
            self._client_queues.discard(client_queue)
            for run in runs:
                run.client_queues.discard(client_queue)

    @contextlib.asynccontextmanager
    async def followed(self) -> AsyncIterator[None]:
        """Have the runs followed."""
        await self._search()
        ticking = asyncio.create_task(self._tick(), name="watch runs")
        try:
            yield
        finally:
            ticking.cancel()
            await asyncio.wait([ticking])
            for run in list(self.runs.values()):
                await run.leave()

    async def _tick(self) -> None:
        if len(self.runs) == 1:  # read it now, while somebody opens a browser
            with contextlib.suppress(Exception):  # who asks for it is told what is wrong
                await next(iter(self.runs.values())).state()
        ticks = 0
        while True:
            if not self._client_queues:
                self._page_came.clear()
                for run in list(self.runs.values()):
                    await run.rest()
                await self._page_came.wait()
            ticks += 1
            if ticks % SEARCH == 0:
                await self._search()
            for run in list(self.runs.values()):
                try:
                    await run.look()
                except Exception as error:  # a disk that fails for a while, or one damaged run: the others are shown
                    logger.warning("%s: %s: %s", run.run.directory, type(error).__name__, error)
            listed = await self._summaries()
            if listed != self._listed:
                self._listed = listed
                for client_queue in self._client_queues:
                    client_queue.put({"run": None, "kind": "runs", "runs": listed})
            await asyncio.sleep(TICK)

    async def _search(self) -> None:
        runs = await asyncio.to_thread(runs_in, self._named)
        there = {each.id for each in runs}
        for each in runs:
            self.runs.setdefault(each.id, RunTail(each))
        for missing in [name for name, run in self.runs.items() if name not in there and not run.client_queues]:
            if (run := self.runs.pop(missing, None)) is not None:  # a request may have searched meanwhile, too
                await run.leave()

    async def _summaries(self) -> list[dict[str, Any]]:
        runs = list(self.runs.values())
        return await asyncio.to_thread(lambda: [asdict(run.summary()) for run in runs])
