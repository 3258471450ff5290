"""Ends a command quietly when nobody reads its output any longer, as in `rlinf train --help | head`.

In: a command's main function. Out: the same, with an exit code of its own for that case.
"""

from __future__ import annotations

import functools
import os
import select
import sys
from collections.abc import Callable, Sequence
from typing import Any

UNREAD = 141
"""128 + SIGPIPE: what a shell says of other programs that end so."""


def quiet_when_unread(main: Callable[..., int]) -> Callable[..., int]:
    """A main function that returns `UNREAD` once the pipe behind stdout is closed; any other is an error."""

    @functools.wraps(main)
    def wrapped(arguments: Sequence[str] | None = None, **more: Any) -> int:
        try:
            code = main(arguments, **more)
            sys.stdout.flush()  # here and not at the interpreter's end, where nobody could catch what it raises
            return code
        except BrokenPipeError:
            if not _is_unread():
                raise
            return UNREAD

    return wrapped


def _is_unread() -> bool:
    """Whether the reader of stdout has left; if so, what is still to be written goes nowhere."""
    try:
        stdout = sys.stdout.fileno()
    except OSError:  # a stand-in for stdout, which is no file
        return False
    told = select.poll()
    told.register(stdout, 0)  # errors are reported unasked, and the end of a pipe's reader is one
    if not told.poll(0):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stdout)
    os.close(nowhere)
    return True
