"""Keeps a loop awake for a moment when an answer is likely to come at once: to fall asleep and be woken costs a quiet
core more than the answer does.

Flows in: frames sent and answered on lanes. Flows out: empty turns of the loop, for less than `MOMENT` after each.
Nobody is woken: that is the point.
"""

from __future__ import annotations

import asyncio
import os
import time

from rlinf.runtime.base.compute_thread import computing

MOMENT = 80e-6
"""Seconds. An awaited call between two hosts that stay awake took 30 us where one between hosts that sleep took 128 (a
virtual machine with two cores, nothing else running)."""
HALF = 0.5
"""Share of frames from which on it is worth it."""
WEIGHT = 0.2
"""Of the newest frame in the share of frames that were worth staying awake for."""


class Alertness:
    """Decides after each frame whether to stay awake, by what came of the frames before.

    A host with an actor that computes never does, nor one on a machine with fewer cores than hosts: who has work gets
    the core.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._worth = 0.0
        self._until = 0.0
        self._awake = False
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._room = cores >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def was_worth(self, worth: bool) -> None:
        """To stay awake after the last frame would have been worth it, or not."""
        self._worth += WEIGHT * (worth - self._worth)

    def stay(self) -> None:
        """A frame has left: more may come at once."""
        if self._worth > HALF and self._room and not computing():
            self._until = time.monotonic() + MOMENT
            if not self._awake:
                self._awake = True
                self._loop.call_soon(self._turn)

    def rest(self) -> None:
        """What was waited for is here."""
        self._until = 0.0

    def _turn(self) -> None:
        if time.monotonic() < self._until and not computing():
            self._loop.call_soon(self._turn)
        else:
            self._awake = False
