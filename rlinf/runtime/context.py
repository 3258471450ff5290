"""Where the running code is: on which host, in which call; and what every file of the runtime needs to say so.

Flows in: the start of a call. Flows out: its host, name and scope to whatever runs inside it.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
import weakref
from asyncio import _get_running_loop
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .actor import ActorId, Call, Cell, current_call, current_scope
from .errors import ActorDied

if TYPE_CHECKING:
    from .host import Host

SERVICE: ActorId = (-1, 0)
"""The actor that every host has, for the runtime's own calls (`service.py`)."""

CONTROLLER = 0
"""The host that runs the flow and keeps names and leases."""

if sys.version_info >= (3, 12):
    _current_task = asyncio.current_task
else:  # there it is written in Python, and every call asks it
    from asyncio.tasks import _current_tasks  # type: ignore[attr-defined]

    def _current_task() -> asyncio.Task[Any] | None:
        return _current_tasks.get(_get_running_loop())  # type: ignore[no-any-return]


SHOWN_WAIT = 1e-3
"""Seconds; shorter waits are not worth a span."""

_current_host: contextvars.ContextVar[Host | None] = contextvars.ContextVar("current_host", default=None)
_last_host: weakref.ref[Host] | None = None


def enter_host(host: Host) -> None:
    """Code that runs in this context from now on is on `host`."""
    global _last_host
    _current_host.set(host)
    _last_host = weakref.ref(host)


def current_host() -> Host:
    """The host that the running code is on.

    Raises:
        RuntimeError: no system is open here.
    """
    host = _current_host.get()
    if host is None and _last_host is not None:
        host = _last_host()  # e.g. a test whose system was opened by a fixture, in another context
    if host is None or host.closed:
        raise RuntimeError("no actor system is open: use `async with ActorSystem.local()` or `rlinf.run(main)`")
    return host


class Running:
    """In it the current task counts as a call of an actor: its name is on errors, and its span is recorded."""

    __slots__ = ("call", "cell", "host")

    def __init__(self, host: Host, cell: Cell, call: Call):
        self.host = host
        self.cell = cell
        self.call = call

    def __enter__(self) -> Call:
        self.call.task = _current_task()
        current_call.set(self.call)
        current_scope.set(self.cell.scope)
        _current_host.set(self.host)
        self.cell.calls.add(self.call)
        return self.call

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        call, cell = self.call, self.cell
        cell.calls.discard(call)
        call.task = None
        if cell.id == SERVICE:
            return
        method = call.name.rpartition(".")[2]
        self.host.tracer.span(cell.name, method, call.since, self.host.now(), {"caller": call.parent})
        if isinstance(error, asyncio.CancelledError):
            if call.killed:
                raise ActorDied(f"{cell.name} on host {self.host.rank} was closed while {method}() ran") from None
        elif error is not None:
            note = f"in {call.name}() on host {self.host.rank}"
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)


def waiter() -> str:
    """Who the running code is, in reports: its call, or "flow"; with the task's name if that is not the call's own."""
    call = current_call.get()
    if call is not None:
        name, own = call.label, call.task
    else:
        host = _current_host.get()
        name, own = "flow", host.flow if host is not None else None
    task = None if own is None else _current_task()
    return name if task is own or task is None else f"{name}/{task.get_name()}"


def show_wait(host: Host, what: str, start: float) -> None:
    """Record that the running code has waited since `start`, if that is worth a span."""
    end = host.now()
    if end - start > SHOWN_WAIT:
        call = current_call.get()
        host = _current_host.get() or host  # the stream may live on another host of this process
        track = call.name.rpartition(".")[0] if call is not None else "flow"
        host.tracer.span(track, f"wait for {what}", start, end)


async def finish(task: asyncio.Task[Any]) -> None:
    """Wait until a task has ended, come what may; a cancellation meanwhile is raised after that."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
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
        if not task.cancelled():
            task.exception()
    return list(pending)
