"""Events of live runs: the job behind a run directory, its feed, and the queue of each page.

`Job` is read from live.json of a run directory; `status` says in a word for pages whether its process is there. `Feed`
listens at the socket that live.json names: lines, each a JSON object, of which those that pages know are passed on as
they come, and answers to what the job was asked. The job's lines wake `follow`; an answer wakes who asked. The job
measures only while somebody listens, so this connects when a page is there and leaves when the last is gone.

A `ClientQueue` has what one page is still to be sent: events of the runs that it shows, as server-sent events, each
with an id by which a page that lost its connection is sent what it missed. `put` wakes `next`.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf.config.reading import parse_json, read_bytes

LIVE = "live.json"
"""A job's word that it lives, in its run directory; removed at its end unless it is killed."""
FORWARDED = 8266
"""Port for a watcher on another machine, seen from here: not that of `rlinf watch`, which may be taken by this one."""
_LATE = 5.0
"""Seconds by which a file system's clock may differ from the kernel's: a process that began later than this after
live.json was written is not the one that wrote it."""


@dataclass(frozen=True, slots=True)
class Job:
    """The job that writes to a run directory, as live.json describes it."""

    pid: int
    """Its process."""
    machine: str
    """Name of its machine."""
    socket: str
    """Path of its feed's Unix socket."""
    written: float
    """When live.json was, seconds since 1970."""

    @property
    def near(self) -> bool:
        """It runs on this machine."""
        return self.machine == socket.gethostname()

    @property
    def lives(self) -> bool:
        """Its process is there; of one on another machine this is believed."""
        if not self.near:
            return True
        began = _began(self.pid)
        return _exists(self.pid) if began is None else 0 < began < self.written + _LATE


def job_of(directory: Path) -> Job | None:
    """The job that says that it writes to a run directory; None if none does, or it cannot be understood."""
    path = directory / LIVE
    try:
        status, written = parse_json(read_bytes(path, links=False)), path.stat().st_mtime
        return Job(int(status["pid"]), str(status["machine"]), str(status["socket"]), written)
    except (OSError, ValueError, TypeError, LookupError):
        return None


def elsewhere(job: Job | None, directory: Path) -> dict[str, str] | None:
    """How to see a job live that is on another machine: `machine`, and the `command` for a reader's own; else None."""
    if job is None or job.near:
        return None
    there = shlex.quote(shlex.join(["rlinf", "watch", str(directory), "--port", str(FORWARDED)]))
    machine = shlex.quote(job.machine)
    return {
        "machine": job.machine,
        "command": f"ssh -t -L {FORWARDED}:127.0.0.1:{FORWARDED} -- {machine} {there}",
    }


def status(job: Job | None, step: int, steps: int | None) -> str:
    """How a run stands, in a word or four.

    Args:
        job: that writes to it; None if none does.
        step: the last that is over.
        steps: that there are to be; None if nobody said.
    """
    if job is None:
        return "finished" if step >= (1 if steps is None else steps) else "ended"
    if not job.near:
        return f"running on {job.machine}"
    return "running" if job.lives else "ended without saying so"


def _began(pid: int) -> float | None:
    """When a process began, seconds since 1970; 0 if it is dead; None where this cannot be told."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        booted = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
    except FileNotFoundError:
        return 0.0 if Path("/proc/self/stat").exists() else None
    except (OSError, StopIteration):
        return None
    return 0.0 if after_name[0] in "ZX" else int(booted.split()[1]) + int(after_name[19]) / os.sysconf("SC_CLK_TCK")


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


Event = dict[str, Any]
MOST_EVENTS = 1_000
"""Events that wait for a page. One that is slower than that is sent away; its browser comes again by itself."""


class TooSlow(Exception):
    """The page does not take what it is sent."""


class ClientQueue:
    """Events that wait for a page.

    Args:
        since: of each run that the page shows, the last step that it knows.
    """

    def __init__(self, since: Mapping[str, int]) -> None:
        self.since = dict(since)
        """Last step that was sent, of each run."""
        self._events: deque[Event] = deque()
        self._come = asyncio.Event()
        self._over = False

    def put(self, event: Event) -> None:
        """Send an event; of moments that wait only the last of a run is worth it."""
        if event.get("kind") == "moment":
            waiting = (each for each in self._events if each["kind"] == "moment" and each["run"] == event["run"])
            if (earlier := next(waiting, None)) is not None:
                self._events.remove(earlier)
        self._events.append(event)
        self._over |= len(self._events) > MOST_EVENTS
        self._come.set()

    async def next(self) -> str:
        """The next event, as it is sent.

        Raises:
            TooSlow: too many wait.
        """
        while not self._events:
            self._come.clear()
            await self._come.wait()
        if self._over:
            raise TooSlow
        event = self._events.popleft()
        if event["kind"] == "rows" and event["rows"]:
            self.since[event["run"]] = max(self.since.get(event["run"], 0), event["rows"][-1]["step"])
        elif event["kind"] == "anew":
            self.since[event["run"]] = 0
        last_id = ",".join(f"{run}:{step}" for run, step in self.since.items())
        return f"id: {last_id}\ndata: {json.dumps(event)}\n\n"


def known_steps(written: str) -> dict[str, int]:
    """`since` of a queue from the id of an event; what cannot be read is left out."""
    pairs = (each.rpartition(":") for each in written.split(",")[:MOST_EVENTS])
    return {run: int(step) for run, _, step in pairs if run and step.isascii() and step.isdigit() and len(step) < 16}


Message = dict[str, Any]
KINDS = ("roles", "status", "moment", "lanes", "did")
"""Kinds of messages that a job sends and pages understand."""


@dataclass(frozen=True, slots=True)
class Control:
    """A command that a job understands, with its button on the page."""

    label: str
    title: str
    """Explanation for people."""
    paused: bool | None = None
    """True if the run must be paused for it, False if it must not be; None where that is all the same."""
    final: bool = False
    """It ends the run: the page asks again."""
    late: bool = False
    """It makes sense for a run that is about to end, too."""


CONTROLS = {
    "checkpoint": Control("Checkpoint", "save a checkpoint after this step", late=True),
    "evaluate": Control("Evaluate", "evaluate after this step"),
    "pause": Control("Pause", "take no further step until told to go on", paused=False),
    "go_on": Control("Go on", "take the next step", paused=True),
    "stop": Control("Stop …", "end the run after this step, with a checkpoint", final=True),
}
"""By the word that the job understands."""
_LONGEST = 8 << 20
"""Bytes of one line; a thousand actors take a few hundred kilobytes."""
_LANES = 60.0
"""Seconds of lanes that somebody who comes later is told."""
_MOST_LANES = 120
"""Messages of lanes that are kept, whatever their clock says; there is one a second."""


class NoFeed(Exception):
    """The job cannot be asked; the text says why."""


class Feed:
    """A connection to a job.

    Args:
        tell: called with every message.
    """

    def __init__(self, tell: Callable[[Message], None]) -> None:
        self._tell = tell
        self._last: dict[str, Message] = {}
        self._lanes: deque[Message] = deque(maxlen=_MOST_LANES)
        self._writer: asyncio.StreamWriter | None = None
        self._tried = asyncio.Event()
        """Somebody has answered, or nobody has."""
        self._requests: dict[int, asyncio.Future[Message]] = {}
        self._number = 0

    @property
    def status(self) -> str | None:
        """The job's own word for what it does; None as long as it has not said."""
        word = self._last.get("status", {}).get("status")
        return word if isinstance(word, str) else None

    @property
    def now(self) -> Iterator[Message]:
        """Messages that a newcomer has to know: the last message of each kind, and the lanes of a minute."""
        yield from (self._last[kind] for kind in ("roles", "status", "moment") if kind in self._last)
        yield from self._lanes

    def begins(self) -> None:
        """`follow` is about to be called: who asks from now on waits for what comes of it."""
        self._tried.clear()

    async def follow(self, job: Job) -> bool:
        """Listen until the job ends; returns at once where nobody answers, and then False."""
        try:
            reader, self._writer = await asyncio.open_unix_connection(job.socket, limit=_LONGEST)
        except OSError:
            return False
        finally:
            self._tried.set()
        try:
            while line := await reader.readline():
                self._receive(line)
        except (OSError, ValueError):  # it is gone; or a line is too long, which no feed of ours sends
            pass
        finally:
            self._over()
        return True

    async def ask(self, what: str, patience: float) -> Message:
        """Ask the job for something, while `follow` runs; returns its answer, `said` and `ok`.

        Args:
            what: one of `CONTROLS`.
            patience: seconds to wait for its answer, which comes when the step under way is over; later ones reach the
                pages as every `did` does.

        Raises:
            NoFeed: it ended meanwhile, or nobody is there.
        """
        self._number += 1
        number, answer = self._number, asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(patience):
                await self._tried.wait()
                if self._writer is None:
                    raise NoFeed("nobody answers at the job's socket")
                self._requests[number] = answer
                self._writer.write(json.dumps({"do": what, "id": number}).encode() + b"\n")
                await self._writer.drain()
                return dict(await answer)
        except TimeoutError:
            return {"said": "asked: it is done between two steps, and told then", "ok": True}
        except OSError:
            raise NoFeed("the job has ended") from None
        finally:
            self._requests.pop(number, None)

    def _receive(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not isinstance(message, dict) or (kind := message.get("kind")) not in KINDS:
            return
        if kind == "did":
            number = message.get("id")
            answer = self._requests.get(number) if isinstance(number, int) else None
            if answer is not None and not answer.done():
                answer.set_result(message)
        elif kind == "lanes":
            self._remember(message)
        else:
            self._last[kind] = message
        self._tell(message)

    def _remember(self, lanes: Message) -> None:
        end = _seconds(lanes, "end")
        self._lanes.append(lanes)
        while _seconds(self._lanes[0], "end") < end - _LANES:
            self._lanes.popleft()

    def _over(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None
        self._last.clear()
        self._lanes.clear()
        for answer in self._requests.values():
            if not answer.done():
                answer.set_exception(NoFeed("the job has ended"))


def _seconds(message: Mapping[str, Any], name: str) -> float:
    value = message.get(name)
    return float(value) if isinstance(value, int | float) else 0.0
