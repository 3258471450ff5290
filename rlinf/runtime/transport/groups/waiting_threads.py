"""Threads that wait inside torch's backends, whose waits block: one for each operation under way, used again and again.

Flows in: blocking functions. Flows out: their results, as futures of the loop. Who wakes whom: the queue wakes a thread
that is free, which posts the result to the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import Callable
from typing import Any, TypeVar

from rlinf.runtime.base.shutdown import start_thread
from rlinf.runtime.base.tasks import settle

T = TypeVar("T")
_Work = tuple[Callable[[], Any], asyncio.Future[Any], asyncio.AbstractEventLoop]

SPARE = 4
"""Free threads that are kept: enough for what is under way time and again, few enough to be left lying about."""


class WaitingThreads:
    """As many threads as there are functions under way, so that none waits for another one's end.

    Used from one event loop's thread at a time, which does all the counting.

    Args:
        name: what the threads are called.
    """

    def __init__(self, name: str):
        self._name = name
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._busy = 0
        self._closed = False
        self.threads = 0
        """How many there are."""

    def run(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Begin a blocking function at once; nobody need look at the error that it may end with."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._busy += 1
        if self._busy > self.threads:
            self.threads += 1
            start_thread(self._serve, self._name)
        self._queue.put((function, future, loop))
        return future

    def close(self) -> None:
        """Let the threads end, each after what it does."""
        self._closed = True
        self._dismiss(0)

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            function, future, loop = work
            result, error = None, None
            try:
                result = function()
            except Exception as caught:
                error = caught
            del work, function  # a thread that is free must hold on to no backend
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._ended, future, result, error)
            del future, result, error

    def _ended(self, future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        self._busy -= 1
        self._dismiss(0 if self._closed else SPARE)
        settle(future, result, error)

    def _dismiss(self, spare: int) -> None:
        while self.threads - self._busy > spare:
            self.threads -= 1
            self._queue.put(None)
