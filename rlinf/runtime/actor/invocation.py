"""Where the running code is: on which host, in which call; and what every file of the runtime needs to say so.

Flows in: the start of a call. Flows out: its host, name and scope to whatever runs inside it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar

from rlinf.runtime.base.calls import FLOW, SERVICE, Call, current_call, current_scope, current_task, enter, host_here
from rlinf.runtime.base.errors import ActorDied

from .actor import Cell

if TYPE_CHECKING:
    from rlinf.runtime.observe.spans import Kind

    from .host import Host

SHOWN_WAIT = 1e-3
"""Seconds; shorter waits are not worth a span."""


class Running:
    """In it the current task counts as a call of an actor: its name is on errors, and its span is recorded."""

    __slots__ = ("call", "cell", "host")
    kind: ClassVar[Kind] = "call"

    def __init__(self, host: Host, cell: Cell, call: Call):
        self.host = host
        self.cell = cell
        self.call = call

    def __enter__(self) -> Call:
        begin(self.host, self.cell, self.call)
        return self.call

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        end(self.host, self.cell, self.call, self.call.name.rpartition(".")[2], self.kind)
        if error is not None:
            name_on(error, self.host, self.cell, self.call)


def begin(host: Host, cell: Cell, call: Call) -> None:
    """The current task is this call of an actor from now on."""
    if call.task is None:
        call.task = current_task()
    current_call.set(call)
    if host_here() is not host or current_scope.get() is not cell.scope:  # else the task began in the cell's context
        enter(host, cell.scope)
    cell.calls.add(call)


def end(host: Host, cell: Cell, call: Call, method: str, kind: Kind = "call") -> None:
    """It is not any more; its span is recorded."""
    cell.calls.discard(call)
    call.task = None
    if cell.id is not SERVICE:
        host.tracer.record((kind, cell.name, method, call.parent, call.since, host.now(), 0))


def name_on(error: BaseException, host: Host, cell: Cell, call: Call) -> None:
    """Say on an error in which call it was raised.

    Raises:
        ActorDied: it is the cancellation of a call whose actor was ended.
    """
    if cell.id is SERVICE:
        return
    if isinstance(error, asyncio.CancelledError):
        if call.killed:
            method = call.name.rpartition(".")[2]
            raise ActorDied(f"{cell.name} on host {host.rank} was closed while {method}() ran") from None
        return
    note = f"in {call.name}() on host {host.rank}"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


class Moving(Running):
    """The same for a call by which the lease manager loads or parks the actor."""

    __slots__ = ()
    kind: ClassVar[Kind] = "move"


def show_wait(host: Host, what: str, start: float) -> None:
    """Record that the running code has waited since `start`, if that is worth a span."""
    end = host.now()
    if end - start > SHOWN_WAIT:
        call = current_call.get()
        told = host_here() or host  # the stream may live on another host of this process
        actor, _, method = call.name.rpartition(".") if call is not None else (FLOW, "", "")
        told.tracer.span("wait", actor, method, what, start, end)
