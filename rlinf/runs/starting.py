"""Handles signals to a process that is for one run alone, before that run listens itself and after its end.

In: signals. Out: the exit code and the line that docs/checkpoints.md promises. It imports next to nothing, so that it
is there before all that takes seconds.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

ASKING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals that announce an end, as in `rlinf.runtime.base.tasks`, with which torch would come."""
AT_ONCE = (signal.SIGINT, signal.SIGQUIT)
"""Signals of somebody who does not want to wait."""
ENDING = 5.0
"""Seconds that the process gets to end after its run. A signal that comes later has its usual effect: something, such
as a thread of the user's own, keeps the process from ending."""


class ToldToEnd(SystemExit):
    """The process was told to end before its run had begun, and has said so."""

    def __init__(self, number: int) -> None:
        super().__init__(os.EX_TEMPFAIL if number in ASKING else 128 + number)


class Starting:
    """The time before a run begins, entered around it: told to end in it, the process does, as nothing is to be saved.

    Once `begins` was called signals are the run's own, and when it is over they change nothing any more.

    Args:
        process: the process is for this run alone: signals are answered from here on, and after the run until its end.
    """

    def __init__(self, *, process: bool = False) -> None:
        self._before: dict[int, Any] = {}
        self._told: int | None = None
        self._begun = False
        self._over: float | None = None
        self._process = process
        if process:
            self._listen()

    def __enter__(self) -> Self:
        self._listen()
        return self

    def __exit__(self, *error: object) -> None:
        if self._process and (self._begun or self._told is not None):
            self._over = time.monotonic()
            atexit.register(self._ignore)
        else:
            for number, was in self._before.items():
                signal.signal(number, was)
            self._before.clear()
        if self._told is not None and not self._begun:
            raise ToldToEnd(self._told)  # whatever was made of the first one: a check may take it for a mistake

    def begins(self) -> None:
        """From here on the run does what signals want.

        Raises:
            ToldToEnd: one came that did not get through: what a signal raises inside a finalizer is dropped.
        """
        if self._told is not None:
            raise ToldToEnd(self._told)
        self._begun = True

    def _listen(self) -> None:
        with suppress(ValueError):  # not the main thread
            for number in (*ASKING, *AT_ONCE):
                if (was := signal.getsignal(number)) in (signal.SIG_DFL, signal.default_int_handler):
                    signal.signal(number, self._end)
                    self._before[number] = was

    def _ignore(self) -> None:
        """From here on Python calls no handlers: it would set signals to what they do by default."""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def _end(self, number: int, _: object) -> None:
        if self._begun or self._over is not None:
            if self._over is not None and time.monotonic() - self._over > ENDING:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return
        if self._told is None and os.environ.get("RANK", "0") == "0":
            cause = "\ninterrupted" if number == signal.SIGINT else f"told to end by {signal.Signals(number).name}"
            again = "; start it again as before" if number in ASKING else ""
            sys.stderr.write(f"{cause} while starting: no step was begun{again}\n")
        self._told = number
        sys.unraisablehook = _silent(sys.unraisablehook)
        raise ToldToEnd(number)


def _silent(hook: Callable[[Any], object]) -> Callable[[Any], object]:
    """Say nothing of a `ToldToEnd` that a finalizer dropped, with `hook` for all else: `begins` raises it again."""
    return lambda dropped: None if isinstance(dropped.exc_value, ToldToEnd) else hook(dropped)
