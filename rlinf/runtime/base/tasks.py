"""Tasks, threads and temporary directories that somebody owns, and their end with the process.

Flows in: coroutines, tasks, blocking functions. Flows out: their results; the first failure. Who wakes whom: the end
of the last task wakes who waits for all of them; a thread posts its result to the loop that asked for it.

Several tasks run together (`together`, `all_or_none`, `few_at_once`); blocking functions run in a thread of their own
(`in_thread`), in those of a loop (`Threads`, `InThreads`), or in the one thread of an actor (`ComputeThread`), so
that a host's loop only ever does bookkeeping. What an actor calls brief runs on the loop itself, for as long as that
is measured to be true.

A thread that asks for the interpreter while that finalises is ended by it. Inside torch's C++ this aborts the process
("terminate called without an active exception", exit code 134; at times a segmentation fault), whatever exit code was
meant. So threads are interrupted first: one that computes ends as soon as the call of torch that it is in returns. One
whose call does not return, such as a collective that hangs, cannot be interrupted; if the exit code is known, the
process then leaves without finalising. Nothing is lost by it: `run` has closed all that it opened, and what was printed
is flushed.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import ctypes
import fcntl
import functools
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from rlinf.runtime.base.clock import external
from rlinf.runtime.base.errors import ActorDied

if TYPE_CHECKING:
    import torch

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")

LAST_CALL = 0.5
"""Seconds for threads to end: each needs milliseconds, unless its function does not return."""
MOST_THREADS = 32
"""Of a loop for blocking work, as many as Python's own executor has at most; each is made when it is needed."""
ASKING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals that announce an end: of schedulers (Slurm's `--signal=USR1@90`, and most others), and of a terminal that is
closed."""

JUST_MADE = 60.0
"""Seconds in which a directory without a lock may belong to a process that is about to take it."""
_OWN_NAME = re.compile(r"rlinf-[a-z]+-\d+\.\w{8}")

_started: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_codes: list[int | None] = []
"""How each `run` of this process ended; None where its exit code is for the program to choose."""


def start_thread(target: Callable[[], None], name: str | None = None) -> threading.Thread:
    """Start a daemon thread on this process's GPU, if it has one: torch would have it begin on device 0."""
    from rlinf.runtime.base.tensors import device_of_threads, work_on  # torch comes with it, which takes seconds

    device = device_of_threads()

    def run() -> None:
        work_on(device)
        target()

    thread = threading.Thread(target=run, name=name, daemon=True)
    _started.add(thread)
    thread.start()
    return thread


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Threads(Executor):
    """Threads for a loop's blocking work that do not keep the process from ending, as those of Python's executors do:
    it would wait for a function that never returns, or for minutes beyond the time it was given."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._idle = 0  # threads that wait, less the functions that wait for one
        self._closed = False

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        future: Future[R] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return self._is_idle()
            try:
                tell = functools.partial(future.set_result, fn(*args, **kwargs))
            except BaseException as error:  # it belongs to whoever waits, whatever it is
                tell = functools.partial(future.set_exception, error)
            self._is_idle()  # before anybody can ask for more
            tell()

        with self._lock:
            if self._closed:
                raise RuntimeError("no thread is left for blocking work: the loop has ended")
            if self._idle <= 0 and self._threads < MOST_THREADS:
                self._threads += 1
                start_thread(functools.partial(self._serve, work), f"blocking work {self._threads}")
            else:
                self._idle -= 1
                self._queue.put(work)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let each thread end after the function that it runs; nobody waits for them, so the arguments mean nothing."""
        with self._lock:
            self._closed = True
            for _ in range(self._threads):
                self._queue.put(None)

    def _is_idle(self) -> None:
        with self._lock:
            self._idle += 1

    def _serve(self, work: Callable[[], None] | None) -> None:
        while work is not None:
            work()
            del work  # it holds what it was made from
            work = self._queue.get()


class OwnDirectory:
    """A new directory in the temporary one that this user alone may enter, and that goes with this process.

    A process that is killed cannot remove anything. So the next one that makes such a directory removes what dead
    processes of the same user have left: the kernel knows who lives by their locks, in containers that share /tmp, too.

    Args:
        kind: part of its name, for people: `rlinf-<kind>-<pid>.xxxxxxxx`.
        place: where it is made; the default is the temporary directory.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, kind: str, place: str | None = None) -> None:
        place = place or tempfile.gettempdir()
        _sweep(Path(place))
        self.path = Path(tempfile.mkdtemp(prefix=f"rlinf-{kind}-{os.getpid()}.", dir=place))
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a file system without locks: nobody else sweeps there either
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove it, with all that is in it; a second time nothing happens."""
        if self._descriptor >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._descriptor)
            self._descriptor = -1


def _sweep(place: Path) -> None:
    """Remove directories of this user's dead processes."""
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        for entry in entries:
            if _OWN_NAME.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    _remove_if_left(entry)


def _remove_if_left(entry: os.DirEntry[str]) -> None:
    about = entry.stat(follow_symlinks=False)
    if about.st_uid != os.getuid() or time.time() - about.st_mtime < JUST_MADE:
        return
    descriptor = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(entry.path)
    finally:
        os.close(descriptor)


def ends_process(run: Callable[P, R]) -> Callable[P, R]:
    """Wraps `run`: its process ends with the exit code that it ends with, although a thread hangs in torch."""

    @functools.wraps(run)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
        if not _codes:
            atexit.unregister(_end_threads)
            atexit.register(_end_threads)  # anew: it runs before the hooks of what was imported since, which may hang
        try:
            value = run(*args, **kwargs)
        except BaseException as error:
            _codes.append(None if alone and not isinstance(error, SystemExit) else _exit_code(error))
            raise
        _codes.append(None if alone else 0)
        return value

    return wrapped


def _end_threads() -> None:
    """Run by the interpreter before it finalises. An exit code that the program chose after `run` is not known here."""
    for number in (*ASKING, signal.SIGINT) if _codes else ():  # they come too late; SIGQUIT still ends it
        signal.signal(number, signal.SIG_IGN)
    end = time.monotonic() + LAST_CALL
    for thread in _alive():
        if thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
    for thread in _alive():
        thread.join(max(0.0, end - time.monotonic()))
    code = _codes[-1] if _codes else None
    if code is not None and (stuck := [thread.name for thread in _alive()]):
        sys.stderr.write(f"rlinf: left behind, as they do not return: threads {', '.join(stuck)}\n")
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1 if getattr(sys, "last_value", None) is not None else code)  # finalising would abort: see above


atexit.register(_end_threads)


def _alive() -> list[threading.Thread]:
    return [thread for thread in list(_started) if thread.is_alive()]


def _exit_code(error: BaseException) -> int:
    """The code of a process that an exception ends."""
    code: Any = error.code if isinstance(error, SystemExit) else 1
    return 0 if code is None else code & 0xFF if isinstance(code, int) else 1


async def finish(future: asyncio.Future[Any]) -> None:
    """Wait until a task or future has ended, come what may; a cancellation meanwhile is raised after that.

    Its outcome is the caller's to read. One that is left unread was overtaken by a cancellation, whose cause is the
    first; asyncio would report it as lost.
    """
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    mark_seen(future)
    if cancelled is not None:
        raise cancelled


async def cancel_all(tasks: Iterable[asyncio.Task[Any]], seconds: float | None = None) -> list[asyncio.Task[Any]]:
    """Cancel tasks and wait until each has ended; their outcomes are dropped.

    Args:
        seconds: to wait at most.

    Returns:
        Those that have not ended.
    """
    current = asyncio.current_task()
    waiting = [task for task in tasks if task is not current and not task.done()]
    for task in waiting:
        task.cancel()
    if not waiting:
        return []
    done, pending = await asyncio.wait(waiting, timeout=seconds)
    for task in done:
        mark_seen(task)
    return list(pending)


async def together(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    """Return the results of all awaitables; the first failure cancels the others, without waiting for their ends."""
    if len(awaitables) < 2:
        return [await each for each in awaitables]
    futures = [asyncio.ensure_future(each) for each in awaitables]
    try:
        return await asyncio.gather(*futures)
    except BaseException:
        for future in futures:
            if not future.cancel():
                mark_seen(future)  # the first one is raised
        raise
    finally:
        del futures  # they lead to the error, and its traceback here


async def all_or_none(work: Sequence[Awaitable[Any]]) -> None:
    """Run coroutines together; the first failure cancels the others, and is raised as it is once they have ended."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        raise


async def few_at_once(count: int, function: Callable[[S], Awaitable[T]], items: Iterable[S]) -> list[T]:
    """Return the result of `function` for every item, in their order, with at most `count` of them running; the first
    failure cancels the others."""
    results: dict[int, T] = {}
    pending = iter(list(enumerate(items)))

    async def work() -> None:
        for index, item in pending:
            results[index] = await function(item)

    await all_or_none([work() for _ in range(count)])
    return [results[index] for index in sorted(results)]


def in_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """Run a function in a daemon thread of its own: however long it blocks, it keeps nobody else waiting.

    Not the loop's executor: that has few threads.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            result: Any = function()
            error = None
        except BaseException as caught:  # SystemExit, too, would end the thread and leave who waits waiting
            result, error = None, caught
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, future, result, error)

    start_thread(run)
    return future


class InThreads:
    """`await InThreads()(fn, *args)` runs blocking work in a thread of the event loop's, one function at a time, on
    this process's GPU if it has one.

    Cancelled while a function runs, it waits for the thread.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def __call__(self, fn: Callable[..., T], *args: Any) -> T:
        from rlinf.runtime.base.tensors import device_of_threads  # torch comes with it, which takes seconds

        async with self._turn:
            work = asyncio.ensure_future(asyncio.to_thread(_on, device_of_threads(), fn, *args))
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                with contextlib.suppress(asyncio.CancelledError):
                    await finish(work)
                raise


def _on(device: torch.device | None, fn: Callable[..., T], *args: Any) -> T:
    from rlinf.runtime.base.tensors import work_on

    work_on(device)
    return fn(*args)


def settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    """Give a future its outcome, unless it has one; nobody need look at an error."""
    if future.done():
        return
    if error is None:
        future.set_result(result)
        return
    if isinstance(error, StopIteration):  # which a future refuses
        error = RuntimeError(f"a function that ran in a thread raised {error!r}")
    future.set_exception(error)
    mark_seen(future)  # the one who waited may have been cancelled


def mark_seen(future: asyncio.Future[Any]) -> None:
    """Read a future's error, so that asyncio does not complain of one that nobody else reads."""
    if not future.cancelled():
        future.exception()


_at_work: set[ComputeThread] = set()
BRIEF = 1e-3
"""Seconds of processor time that a function may take on the loop. To the thread and back takes a tenth of this on idle
cores, and on busy ones until two other threads give way."""
CLOCK_OF_THREAD = "pthread_getcpuclockid"
"""The function that `time` lacks where threads have no clocks, as on macOS."""


def computing() -> bool:
    """True if an actor of this process computes at this moment."""
    return bool(_at_work)


class _Work(asyncio.Future[Any]):
    """Outcome of a function that a thread runs. Cancelled before that begins, it never does; afterwards it cannot be,
    so that a task which awaits it is cancelled once the function has returned."""

    def __init__(self, run: Callable[[], Any], loop: asyncio.AbstractEventLoop):
        super().__init__(loop=loop)
        self.run = run
        self._turn = [True]

    def claim(self) -> bool:
        """True if the caller, on whatever thread, is the first to decide what becomes of it: run, or cancelled."""
        try:
            return self._turn.pop()
        except IndexError:
            return False

    def cancel(self, msg: Any | None = None) -> bool:
        return self.claim() and super().cancel(msg)


class ComputeThread:
    """Runs blocking functions one at a time, in order, in a thread of its own.

    It works on the GPU of its process, if that has one. It is a daemon: a function that never returns cannot keep the
    process from ending.
    """

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop):
        self.name = name
        self._loop = loop
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
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

        @functools.wraps(fn)
        def measured() -> T:
            began = time.thread_time()
            try:
                return fn(*args, **kwargs)
            finally:
                self._took[name] = time.thread_time() - began

        if self._works or self._closed or not self.is_brief(name):
            return await self.run(measured)
        result = contextvars.copy_context().run(measured)
        await asyncio.sleep(0)  # who computes again and again must not keep the loop for itself
        return result

    def is_brief(self, name: str) -> bool:
        """True if the last run of a function that `run_briefly` ran took no longer than `BRIEF`."""
        return self._took.get(name, BRIEF) < BRIEF

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
        work = _Work(functools.partial(contextvars.copy_context().run, fn, *args, **kwargs), self._loop)
        with external():  # holds virtual time still meanwhile
            self._works.add(work)
            self._queue.put(work)
            try:
                value: T = await work
                return value
            finally:
                self._works.discard(work)

    def close(self) -> None:
        """Let the thread end after the function that it runs; whoever still waits for one is cancelled."""
        self._closed = True
        self._queue.put(None)
        for work in self._works:
            work.claim()
            asyncio.Future.cancel(work)  # also where it has begun

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
                result, error = work.run(), None
            except BaseException as caught:  # it belongs to whoever awaits, whatever it is
                result, error = None, caught
            finally:
                _at_work.discard(self)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(settle, work, result, error)
            del work, result, error
