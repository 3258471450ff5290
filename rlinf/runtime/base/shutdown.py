"""The end of a process that is one of several: no thread is inside torch when the interpreter finalises.

Flows in: the threads that the runtime started, and how `run` ended. Flows out: the process's exit code. Nobody is
woken: this is the last thing that a process does.

A thread that comes back from a collective while the interpreter finalises is ended by it inside C++ code, which aborts
the process ("terminate called without an active exception", exit code 134), and a group whose operation hangs keeps the
process until its deadline. The system has waited for its threads when `run` returns; one that is still there belongs to
a function that does not return. It cannot be interrupted, so the process then leaves without finalising.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from .tasks import own_threads

P = ParamSpec("P")
R = TypeVar("R")

LAST_CALL = 0.5
"""Seconds for threads to end: each needs milliseconds, unless its function does not return."""

_codes: list[int] = []
"""How each `run` of this process ended."""


def ends_process(run: Callable[P, R]) -> Callable[P, R]:
    """Wraps `run`: where the process is one of several, it ends although a thread of the runtime hangs in torch."""

    @functools.wraps(run)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not _codes:
            atexit.register(_leave)
        try:
            value = run(*args, **kwargs)
        except BaseException as error:
            _codes.append(_exit_code(error))
            raise
        _codes.append(0)
        return value

    return wrapped


def _leave() -> None:
    """Run by the interpreter before it finalises. An exit code that the program chose after `run` is not known here."""
    end = time.monotonic() + LAST_CALL
    for thread in own_threads():
        thread.join(max(0.0, end - time.monotonic()))
    if stuck := [thread.name for thread in own_threads()]:
        sys.stderr.write(f"rlinf: left behind, as they do not return: threads {', '.join(stuck)}\n")
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1 if getattr(sys, "last_value", None) is not None else _codes[-1])


def _exit_code(error: BaseException) -> int:
    """The code of a process that an exception ends."""
    code: Any = error.code if isinstance(error, SystemExit) else 1
    return 0 if code is None else code & 0xFF if isinstance(code, int) else 1
