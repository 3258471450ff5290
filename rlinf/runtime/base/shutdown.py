"""Threads and temporary directories of the runtime, and the end of their process: no thread is inside torch when the
interpreter finalises, and no directory outlives the next start by more than a minute.

Flows in: blocking functions; how `run` ended. Flows out: their threads; the process's exit code. Who wakes whom: this
is the last thing that a process does, and wakes nobody.

A thread that asks for the interpreter while that finalises is ended by it. Inside torch's C++ this aborts the process
("terminate called without an active exception", exit code 134; at times a segmentation fault), whatever exit code was
meant. So threads are interrupted first: one that computes ends as soon as the call of torch that it is in returns. One
whose call does not return, such as a collective that hangs, cannot be interrupted; if the exit code is known, the
process then leaves without finalising. Nothing is lost by it: `run` has closed all that it opened, and what was printed
is flushed.
"""

from __future__ import annotations

import atexit
import contextlib
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
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from rlinf.runtime.gpu.own_device import device_of_threads, work_on

P = ParamSpec("P")
R = TypeVar("R")

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
    device = device_of_threads()

    def run() -> None:
        work_on(device)
        target()

    thread = threading.Thread(target=run, name=name, daemon=True)
    _started.add(thread)
    thread.start()
    return thread


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
