"""Whether the other hosts live: each is asked again and again, and counts as lost after too long a silence.

Flows in: which hosts matter now, and their answers. Flows out: questions, at most one unanswered per host; who has not
answered for too long. Who wakes whom: a timer; a silent host is reported once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from functools import partial

HOST_TIMEOUT = 60.0
"""Seconds. TCP tries again at growing intervals after a network's failure: one of 20 s may cost 45 s of silence."""
BEATS = 20
"""Questions per timeout. A host's end is noticed up to one beat later than the timeout says; a question costs both
sides 0.15 ms together, so 1,000 hosts asked every 3 s take 5 % of a core."""
AT_ONCE = 16
"""Questions until the loop gets to do something else: about 2 ms."""


class Heartbeat:
    """Asks hosts whether they live.

    Only time in which this process was awake counts as silence: after it was stopped itself, or its loop was blocked,
    the answers may be here, unread.

    Args:
        timeout: seconds of silence after which a host counts as lost.
        wanted: the hosts to ask now.
        probe: asks a host; its second argument is to be called on the loop with the answer's arrival.
        lost: told of a host, and why.
        now: the clock, seconds.
    """

    def __init__(
        self,
        timeout: float,
        wanted: Callable[[], Iterable[int]],
        probe: Callable[[int, Callable[[], None]], None],
        lost: Callable[[int, str], None],
        now: Callable[[], float],
    ):
        self._timeout = timeout
        self._beat = timeout / BEATS
        self._wanted = wanted
        self._probe = probe
        self._lost = lost
        self._now = now
        self._silence: dict[int, int] = {}
        """Of hosts with an unanswered question, beats since it was asked."""

    async def run(self) -> None:
        """Go on until cancelled."""
        while True:
            await self._ask()
            begun = self._now()
            await asyncio.sleep(self._beat)
            if self._now() - begun < 2 * self._beat:
                self._count()

    async def _ask(self) -> None:
        for number, host in enumerate(sorted(set(self._wanted()) - self._silence.keys()), 1):
            self._silence[host] = 0
            self._probe(host, partial(self._heard, host))
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)

    def _heard(self, host: int) -> None:
        self._silence.pop(host, None)

    def _count(self) -> None:
        for host in list(self._silence):
            self._silence[host] += 1
            if self._silence[host] == BEATS:
                del self._silence[host]
                since = time.strftime("%H:%M:%S", time.localtime(time.time() - self._timeout))
                self._lost(host, f"it has not answered since {since}, for {self._timeout:g} s (host_timeout)")
