"""One thread in which an actor's blocking work runs, so that its host's loop only ever does bookkeeping.

Flows in: functions from `Actor.compute`. Flows out: their results, posted back to the loop. Who wakes whom: the queue
wakes the thread, the thread wakes the awaiting call. Functions whose actor says that they are brief run on the loop
itself, for as long as that is measured to be true.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import queue
import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from .errors import ActorDied
from .shutdown import start_thread
from .tasks import finish

T = TypeVar("T")

_at_work: set[ComputeThread] = set()
BRIEF = 1e-3
"""Seconds of processor time that a function may take on the loop. To the thread and back takes a tenth of this on idle
cores, and on busy ones until two other threads give way."""
CLOCK_OF_THREAD = "pthread_getcpuclockid"
"""What `time` lacks where threads have no clocks, as on macOS."""


def computing() -> bool:
    """Whether an actor of this process computes at this moment."""
    return bool(_at_work)


class _Work:
    __slots__ = ("args", "context", "fn", "future", "kwargs", "turn")

    def __init__(self, fn: Callable[..., Any], args: Any, kwargs: Any, future: asyncio.Future[Any]):
        self.fn, self.args, self.kwargs, self.future = fn, args, kwargs, future
        self.context = contextvars.copy_context()
        self.turn = [True]

    def claim(self) -> bool:
        """Whether the caller, on whatever thread, is the first to decide what becomes of it: run, or cancelled."""
        try:
            return self.turn.pop()
        except IndexError:
            return False


class ComputeThread:
    """Runs blocking functions one at a time, in order, in a thread of its own.

    It works on the GPU of its process, if that has one. It is a daemon: a function that never returns cannot keep the
    process from ending.
    """

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop):
        self.name = name
        self._loop = loop
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._works: set[_Work] = set()
        self._took: dict[str, float] = {}
        self._closed = False

    async def run_briefly(self, name: str, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Run `fn` on the loop if its last run took no longer than `BRIEF` and the thread is idle; else as `run` does.

        So one that takes longer than it used to holds up the loop once. It must not wait for anything.

        Args:
            name: of what is measured: functions of one name are taken to be alike.
            fn, args, kwargs: see `run`.
        """

        @wraps(fn)
        def measured() -> T:
            began = time.thread_time()
            try:
                return fn(*args, **kwargs)
            finally:
                self._took[name] = time.thread_time() - began

        if self._works or self._closed or self._took.get(name, BRIEF) >= BRIEF:
            return await self.run(measured)
        result = contextvars.copy_context().run(measured)
        await asyncio.sleep(0)  # who computes again and again must not keep the loop for itself
        return result

    async def run(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run `fn` in the thread and return its result.

        Cancelled before it starts, `fn` never runs. Cancelled while it runs, the cancellation takes effect once it
        has returned: a thread cannot be interrupted, and its device must not be given to anyone else before.

        Raises:
            ActorDied: the thread was closed.
        """
        if self._closed:
            raise ActorDied(f"{self.name} was closed before it could compute {getattr(fn, '__name__', fn)}")
        if self._thread is None:
            self._thread = start_thread(self._serve, self.name)
        work = _Work(fn, args, kwargs, self._loop.create_future())
        external = getattr(self._loop, "external", contextlib.nullcontext)  # holds virtual time still meanwhile
        with external():
            self._works.add(work)
            self._queue.put(work)
            try:
                return await asyncio.shield(work.future)
            except asyncio.CancelledError:
                if not work.claim():
                    await finish(work.future)
                raise
            finally:
                self._works.discard(work)

    def close(self) -> None:
        """Let the thread end after the function that it runs; whoever still waits for one is cancelled."""
        self._closed = True
        self._queue.put(None)
        for work in self._works:
            work.claim()
            work.future.cancel()

    def processor_seconds(self) -> float:
        """Processor time that the thread has used: while it grows, a function that has not returned is at work."""
        # not after `close`, when the thread may end, and its clock with it
        if self._thread is None or self._thread.ident is None or self._closed or not hasattr(time, CLOCK_OF_THREAD):
            return 0.0
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            if not work.claim():
                continue
            _at_work.add(self)
            try:
                result, error = work.context.run(work.fn, *work.args, **work.kwargs), None
            except BaseException as caught:  # it belongs to whoever awaits, whatever it is
                result, error = None, caught
            finally:
                _at_work.discard(self)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(_settle, work.future, result, error)
            del work, result, error


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, StopIteration):
        future.set_exception(RuntimeError("a computed function raised StopIteration"))
    else:
        future.set_exception(error)
