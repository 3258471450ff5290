"""Errors of the runtime: what a reader of a failed run gets to see.

Flows in: facts known where something went wrong (host, actor, endpoint, queue). Flows out: exceptions whose text
says who, which call, and what to do.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sysconfig
import traceback
from pathlib import Path
from typing import Any

PACKAGE = str(Path(__file__).parents[2])
"""Ours: no line of it tells users where their mistake is."""
INSTALLED = (PACKAGE, "<frozen ", *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
"""Where no user's own code lies; importing goes on in frozen modules."""


class RuntimeFault(Exception):
    """Base class of every error that the runtime itself raises."""


class UserError(RuntimeFault):
    """Something the user asked for cannot be done as asked; the text names the fix."""


class WrongSetting(UserError, ValueError):
    """A value that something cannot be made with; the text begins with its key. For a program that passed it it is a
    ValueError, and a run that was configured so shows it as its user's error."""


class ActorDied(RuntimeFault):
    """The process (host) of an actor is gone, or the actor was closed, before a call was answered."""


class HostLost(ActorDied):
    """A host is gone, and with it the job; the text says which, since when, and how to go on. It has been printed."""


class RemoteError(RuntimeFault):
    """Stands in for an exception that could not travel between processes; carries its type name and text."""


class QueueClosed(RuntimeFault):
    """A channel or stream was closed while (or before) somebody used it."""


class TraceError(RuntimeFault):
    """A trace could not be written; the text says where, and why."""


class StallError(RuntimeFault):
    """Something waited longer than the configured deadline; the text is the stall report."""


def line_of(error: BaseException) -> str:
    """`path:line` of the user's own code where an error was raised; of an installed package where no code of the
    user's was on the way, and "" where only ours was."""
    way = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in way if not frame.filename.startswith(INSTALLED)] or [
        frame for frame in way if not frame.filename.startswith(PACKAGE)
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def defined_at(function: Any) -> str:
    """`path:line` where a function, or the class of an object that is called, is defined; "" where nothing says so."""
    try:
        function = inspect.unwrap(function)
        while isinstance(function, functools.partial):
            function = inspect.unwrap(function.func)
    except ValueError:  # it wraps itself
        return ""
    if not callable(function):
        return ""
    called = function.__call__ if inspect.isclass(function) else type(function).__call__
    code = getattr(function, "__code__", None) or getattr(called, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if inspect.iscode(code) else ""


def again(error: BaseException) -> BaseException:
    """An error that is kept, to be raised: as an object of its own, for a raised one holds on to all that saw it.

    Among that may be handles of what keeps the error, which would then never be freed.
    """
    try:
        fresh = copy.copy(error).with_traceback(error.__traceback__)
    except Exception:  # its constructor wants other arguments than it keeps
        return error
    fresh.__cause__ = error.__cause__
    if hasattr(error, "__notes__"):
        fresh.__notes__ = list(error.__notes__)
    return fresh
