"""Status of a run for its watchers: what state it is in, what is asked of it, and once a second what every role does.

In: the run, and its `Watch`, which asks all hosts for who does what, queues, memory, and lanes since the last time.
Out: `live.json` in the run directory, which says where the feed is; the feed's messages. Who wakes whom: a change of
status goes out at once; the first watcher wakes the measuring, which rests without any. A host that does not answer in
time is shown as it was last seen, and asked again once it has answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlinf.dashboard.events import LIVE
from rlinf.dashboard.lanes import LOADING, PARKING, WAITING
from rlinf.metrics.report import Report
from rlinf.metrics.timing import activity_of
from rlinf.runs.callbacks import RunState
from rlinf.runs.live.controls import BetweenSteps, Controls
from rlinf.runs.live.feed import Feed, Message, Page
from rlinf.runtime.base.errors import ActorDied
from rlinf.runtime.base.tasks import cancel_all
from rlinf.runtime.observe.spans import CALLED, GAP, Busy, Interval, union, without
from rlinf.runtime.system.observer import LookBack, Watch
from rlinf.storage.files import replace_text

PATIENCE = 0.5
"""Seconds that a host has to answer: its event loop may be held up by what it does."""
FIRST = 1.0
"""Seconds that the first increment reaches back."""
MOST_ASKED = 32
"""Hosts that are asked at a time: of more, those that were asked longest ago. So a look costs the same on any number of
hosts, and of 64 each is seen every two seconds."""
DIGITS = 4
"""Decimals of times in messages: a tenth of a millisecond."""
SHORTEST = 0.001
"""Seconds; shorter stretches are not told of: a minute is some thousand dots wide."""
_MOVES = {"onload": LOADING, "offload": PARKING}


class Moments:
    """Looks at a system, again and again, for as long as anybody watches.

    Args:
        watch: of the run's system.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._asked: dict[int, asyncio.Task[LookBack]] = {}
        self._seen: dict[int, LookBack] = {}
        self._lost: set[int] = set()
        self._since: dict[int, float] = {}

    def begin(self) -> None:
        """Somebody begins to watch: what was before concerns nobody."""
        self._since.clear()

    async def next(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The messages `moment` and `lanes` of now."""
        now = self._watch.now()
        free = [number for number in self._watch.machines if number not in self._asked and number not in self._lost]
        free.sort(key=lambda number: self._since.get(number, -1.0))  # stable: else in the order of their numbers
        for number in free[: max(0, MOST_ASKED - len(self._asked))]:
            since = self._since.setdefault(number, now - FIRST)
            self._asked[number] = asyncio.create_task(self._watch.look_back(number, since), name="live look")
        if self._asked:
            await asyncio.wait([*self._asked.values()], timeout=PATIENCE)
        answered = [self._take(number) for number, task in [*self._asked.items()] if task.done()]
        looks = [each for each in answered if each is not None]
        start = min((back.start for _, back in looks), default=now)
        end = max((back.end for _, back in looks), default=now)
        lanes = [lane for number, back in looks for lane in lanes_of(number, back.busy)]
        time = round(self._watch.now(), DIGITS)
        moment = {"kind": "moment", "time": time, **self._told()}
        return moment, {"kind": "lanes", "start": round(start, DIGITS), "end": round(end, DIGITS), "lanes": lanes}

    async def close(self) -> None:
        """Ask no more."""
        await cancel_all([*self._asked.values()])
        self._asked.clear()

    def _take(self, number: int) -> tuple[int, LookBack] | None:
        try:
            back = self._asked.pop(number).result()
        except ActorDied:  # the run itself fails by that, with its cause
            self._lost.add(number)
            self._seen.pop(number, None)
            return None
        self._since[number] = back.end
        self._seen[number] = back
        return number, back

    def _told(self) -> dict[str, Any]:
        actors, queues = [], []
        memory: dict[str, dict[str, Any]] = {}
        for number, back in sorted(self._seen.items()):
            for state in back.actors:
                since = None if state.since is None else round(state.since, 2)
                actors.append({"actor": state.actor, "host": state.host, "doing": state.doing, "since": since})
            for queue in back.queues:
                queues.append(
                    {
                        "name": queue.name,
                        "host": number,
                        "ready": queue.ready,
                        "taken": queue.running,
                        "put": queue.put,
                        "capacity": queue.capacity,
                        "waiting_to_take": queue.waiting_to_take,
                        "waiting_to_put": queue.waiting_to_put,
                    }
                )
            filled = back.memory
            one = {"host": number, "device": filled.device, "used": filled.used, "total": filled.total}
            memory.setdefault(filled.owner, one)
        return {"actors": actors, "queues": queues, "memory": [*memory.values()]}


def lanes_of(host: int, parts: Sequence[Busy]) -> Iterable[dict[str, Any]]:
    """Activities of each actor of a host, with their times.

    Args:
        host: its number.
        parts: of `recent`.
    """
    by_actor: dict[str, dict[str, list[Interval]]] = {}
    called: dict[str, list[Interval]] = {}
    for part in parts:
        own = by_actor.setdefault(part.actor, {})
        if part.endpoint == CALLED:
            called[part.actor] = [*part.intervals]
        elif (activity := _MOVES.get(part.endpoint) or activity_of(part.actor, part.endpoint)) is not None:
            own.setdefault(activity, []).extend(part.intervals)
    for actor, own in by_actor.items():
        did = {activity: union(times, GAP) for activity, times in own.items()}
        worked = union(interval for times in did.values() for interval in times)
        did[WAITING] = [*without(union(called.get(actor, ())), worked)]
        stretches = sorted(
            (round(start, DIGITS), round(end, DIGITS), activity)
            for activity, times in did.items()
            for start, end in times
            if end - start >= SHORTEST
        )
        yield {"host": host, "actor": actor, "stretches": [[name, start, end] for start, end, name in stretches]}


PERIOD = 1.0
"""Seconds between two moments: as fast as a person follows numbers."""


class Live:
    """The live side of one run.

    Args:
        run: which.
        between: does what watchers wish.
    """

    def __init__(self, run: RunState, between: BetweenSteps) -> None:
        self._run, self._directory = run, run.directory.path
        self.controls = Controls(between, self._changed)
        self._feed = Feed(self._hello, self._hear)
        self._roles: Mapping[str, Sequence[int]] = {}
        self._machines: Mapping[int, str] = {}
        self._moment: Message | None = None
        self._told: Message = {}
        run.on_change.append(self._changed)

    @contextlib.asynccontextmanager
    async def opened(self, watch: Watch) -> AsyncIterator[None]:
        """Watchers may come until the end of the block.

        Args:
            watch: measures for them.
        """
        report, self._machines = self._run.report, watch.machines  # it is told what is wrong: the run goes on without
        where = self._directory / LIVE
        try:
            path = await self._feed.open()
            await asyncio.to_thread(_write, where, path)
        except (OSError, NotImplementedError) as error:  # the latter: an event loop without sockets
            report.line(f"warning: nobody can watch this run: {error}")
            path = None
        except BaseException:
            await self._feed.close()
            raise
        measuring = asyncio.create_task(self._measure(watch, report), name="live page")
        page = Page(self._directory, report.line) if self._run.config.metrics.web and path is not None else None
        well = False
        try:
            if page is not None:
                page.start()
            yield
            well = True
        finally:
            await cancel_all([measuring])
            self.controls.close(well=well)
            self._run.set_status("ended")
            if page is not None:
                page.leave()
            await self._feed.close()
            if path is not None:
                await asyncio.to_thread(where.unlink, missing_ok=True)

    # What watchers are told --------------------------------------------------------------------------------------

    def _changed(self) -> None:
        roles = {role: [*group.hosts] for role, group in self._run.roles.items()}
        if roles != self._roles:
            self._roles = roles
            self._feed.tell(self._of_roles())
        if (now := self._of_status()) != self._told:
            self._told = now
            self._feed.tell(now)

    def _of_roles(self) -> Message:
        run = self._run
        roles = [{"role": role, "hosts": hosts} for role, hosts in self._roles.items()]
        mode = run.config.placement.mode or "by hand"
        about = {"mode": mode, "step": run.done, "steps": run.steps, "machines": self._machines}
        return {"kind": "roles", "roles": roles, **about}

    def _of_status(self) -> Message:
        status, requests = self._run.status, self.controls.asked
        if self.controls.paused and status == "running":
            status = "paused"
        if "stop" in requests and status in ("running", "paused"):
            status = "stopping"
        return {"kind": "status", "status": status, "step": self._run.done, "asked": requests}

    def _hello(self) -> Iterator[Message]:
        yield from (self._of_roles(), self._of_status())
        if self._moment is not None:
            yield self._moment

    def _hear(self, message: Message, answer: Any) -> None:
        id = message.get("id")
        self.controls.ask(
            str(message.get("do")), lambda words, well: answer({"kind": "did", "id": id, "said": words, "ok": well})
        )

    async def _measure(self, watch: Watch, report: Report) -> None:
        """Tell watchers what everybody does, as long as there are any. A view of time needs a clock: there is no event
        to wait for."""
        moments, loop = Moments(watch), asyncio.get_running_loop()
        try:
            while True:
                if not self._feed.watched.is_set():
                    self._moment = None
                    await self._feed.watched.wait()
                    moments.begin()
                began = loop.time()
                for message in (messages := await moments.next()):
                    self._feed.tell(message)
                self._moment = messages[0]
                await asyncio.sleep(began + PERIOD - loop.time())
        except Exception as error:  # whatever is wrong with a view, training goes on without it
            report.line(f"warning: the live page shows nothing new: {type(error).__name__}: {error}")
        finally:
            await moments.close()


def _write(where: Path, path: Path) -> None:
    """Say where the feed is; to this user alone, as only he can open it."""
    about = {"pid": os.getpid(), "machine": socket.gethostname(), "socket": str(path), "began": time.time()}
    replace_text(where, json.dumps(about), mode=0o600)
