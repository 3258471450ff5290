"""A run as its watchers see it: where it is in its life, what is asked of it, and once a second what everybody does.

In: the run, and its `Watch`. Out: `live.json` in the run directory, which says where the feed is; the feed's messages.
Who wakes whom: a change of status goes out at once; the first watcher wakes the measuring, which rests without any.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlinf.job.live.between import BetweenSteps
from rlinf.job.live.controls import Controls
from rlinf.job.live.feed import Feed, Message
from rlinf.job.live.moments import Moments
from rlinf.job.live.page import Page
from rlinf.metrics.console.report import Report
from rlinf.metrics.files import replace_text
from rlinf.metrics.web.life import LIVE
from rlinf.runtime.base.tasks import cancel_all
from rlinf.runtime.system.observer import Watch

if TYPE_CHECKING:
    from rlinf.job.loop import TrainingLoop

PERIOD = 1.0
"""Seconds between two moments: as fast as a person follows numbers."""

Status = Literal["starting", "warming up", "running", "evaluating", "saving", "paused", "stopping", "ended"]


class Live:
    """The live side of one run.

    Args:
        run: which.
        directory: of the run.
        mode: of its placement, in a word.
        web: start the server of its page, too.
    """

    def __init__(self, run: TrainingLoop[Any], directory: Path, mode: str, *, web: bool) -> None:
        self._run, self._directory, self._mode, self._web = run, directory, mode, web
        self.between = BetweenSteps(run)
        self.controls = Controls(self.between, self._changed)
        self._feed = Feed(self._hello, self._hear)
        self._status: Status = "starting"
        self._roles: Mapping[str, Sequence[int]] = {}
        self._machines: Mapping[int, str] = {}
        self._moment: Message | None = None
        self._told: Message = {}

    @contextlib.asynccontextmanager
    async def opened(self, watch: Watch, report: Report) -> AsyncIterator[None]:
        """Watchers may come until the end of the block.

        Args:
            watch: measures for them.
            report: is told where the page is, and what is wrong with it: the run goes on without.
        """
        self._machines = watch.machines
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
        page = Page(self._directory, report.line) if self._web and path is not None else None
        well = False
        try:
            if page is not None:
                page.start()
            yield
            well = True
        finally:
            await cancel_all([measuring])
            self.controls.close(well=well)
            self.status("ended")
            if page is not None:
                page.leave()
            await self._feed.close()
            if path is not None:
                await asyncio.to_thread(where.unlink, missing_ok=True)

    # What watchers are told --------------------------------------------------------------------------------------

    def roles(self, roles: Mapping[str, Sequence[int]]) -> None:
        """The roles are on these hosts from now on."""
        self._roles = dict(roles)
        self._feed.tell(self._of_roles())

    def status(self, status: Status) -> None:
        """Where the run is in its life."""
        self._status = status
        self._changed()

    @contextlib.contextmanager
    def doing(self, status: Status) -> Iterator[None]:
        """The same for as long as the block lasts."""
        before = self._status
        self.status(status)
        try:
            yield
        finally:
            self.status(before)

    def _changed(self) -> None:
        if (now := self._of_status()) != self._told:
            self._told = now
            self._feed.tell(now)

    def _of_roles(self) -> Message:
        run = self._run
        roles = [{"role": role, "hosts": [*hosts]} for role, hosts in self._roles.items()]
        about = {"mode": self._mode, "step": run.done, "steps": run.steps, "machines": self._machines}
        return {"kind": "roles", "roles": roles, **about}

    def _of_status(self) -> Message:
        status, asked = self._status, self.controls.asked
        if self.controls.paused and status == "running":
            status = "paused"
        if "stop" in asked and status in ("running", "paused"):
            status = "stopping"
        return {"kind": "status", "status": status, "step": self._run.done, "asked": asked}

    def _hello(self) -> Iterator[Message]:
        yield from (self._of_roles(), self._of_status())
        if self._moment is not None:
            yield self._moment

    def _hear(self, said: Message, answer: Any) -> None:
        id = said.get("id")
        self.controls.ask(
            str(said.get("do")), lambda words, well: answer({"kind": "did", "id": id, "said": words, "ok": well})
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
                for message in (found := await moments.next()):
                    self._feed.tell(message)
                self._moment = found[0]
                await asyncio.sleep(began + PERIOD - loop.time())
        except Exception as error:  # whatever is wrong with a view, training goes on without it
            report.line(f"warning: the live page shows nothing new: {type(error).__name__}: {error}")
        finally:
            await moments.close()


def _write(where: Path, path: Path) -> None:
    """Say where the feed is; to this user alone, as only he can open it."""
    about = {"pid": os.getpid(), "machine": socket.gethostname(), "socket": str(path), "began": time.time()}
    replace_text(where, json.dumps(about), mode=0o600)
