"""The runs that are shown, and the pages that show them.

In: the directories that were named. Out: runs by id; events for every page. Who wakes whom: a page that comes wakes
the tick, which has files looked at each second until the last page has gone. Looking is asking for sizes and times: it
works on network file systems too, which tell nobody of changes, and this process is none of the job's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlinf.metrics.web.discovery import runs_in
from rlinf.metrics.web.followed import Followed
from rlinf.metrics.web.outbox import Outbox

logger = logging.getLogger(__name__)

TICK = 1.0
"""Seconds between two looks at files: no sooner does a person see that something has changed."""
SEARCH = 5
"""Every how many looks new runs are looked for."""


class Shelf:
    """The runs in and below some directories.

    Args:
        named: these directories.
    """

    def __init__(self, named: Sequence[Path]) -> None:
        self._named = list(named)
        self.runs: dict[str, Followed] = {}
        """By id."""
        self._outboxes: set[Outbox] = set()
        self._page_came = asyncio.Event()
        self._told: list[dict[str, Any]] = []

    async def listed(self) -> list[dict[str, Any]]:
        """What a list says of the runs that there are now, those by name first that came first."""
        await self._search()
        return await self._summaries()

    @contextlib.asynccontextmanager
    async def shown(self, runs: Sequence[Followed], outbox: Outbox) -> AsyncIterator[None]:
        """While a page shows runs, it is sent what happens."""
        self._outboxes.add(outbox)
        self._page_came.set()
        try:
            for run in runs:
                await run.show(outbox)
            yield
        finally:
            self._outboxes.discard(outbox)
            for run in runs:
                run.outboxes.discard(outbox)

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
            if not self._outboxes:
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
                    logger.warning("%s: %s: %s", run.found.directory, type(error).__name__, error)
            listed = await self._summaries()
            if listed != self._told:
                self._told = listed
                for outbox in self._outboxes:
                    outbox.put({"run": None, "kind": "runs", "runs": listed})
            await asyncio.sleep(TICK)

    async def _search(self) -> None:
        found = await asyncio.to_thread(runs_in, self._named)
        there = {each.id for each in found}
        for each in found:
            self.runs.setdefault(each.id, Followed(each))
        for gone in [name for name, run in self.runs.items() if name not in there and not run.outboxes]:
            if (run := self.runs.pop(gone, None)) is not None:  # a request may have searched meanwhile, too
                await run.leave()

    async def _summaries(self) -> list[dict[str, Any]]:
        runs = list(self.runs.values())
        return await asyncio.to_thread(lambda: [asdict(run.summary()) for run in runs])
