"""What one page is still to be sent.

In: events of the runs that it shows. Out: the same as server-sent events, each with an id by which a page that lost its
connection is sent what it missed. Who wakes whom: `put` wakes `next`.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Mapping
from typing import Any

Event = dict[str, Any]
MOST_EVENTS = 1_000
"""Events that wait for a page. One that is slower than that is sent away; its browser comes again by itself."""


class TooSlow(Exception):
    """The page does not take what it is sent."""


class Outbox:
    """Events that wait for a page.

    Args:
        since: of each run that the page shows, the last step that it knows.
    """

    def __init__(self, since: Mapping[str, int]) -> None:
        self.since = dict(since)
        """Of each run, the last step that was sent."""
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
        known = ",".join(f"{run}:{step}" for run, step in self.since.items())
        return f"id: {known}\ndata: {json.dumps(event)}\n\n"


def known_steps(written: str) -> dict[str, int]:
    """`since` of an outbox from the id of an event; what cannot be read is left out."""
    pairs = (each.rpartition(":") for each in written.split(",")[:MOST_EVENTS])
    return {run: int(step) for run, _, step in pairs if run and step.isascii() and step.isdigit() and len(step) < 16}
