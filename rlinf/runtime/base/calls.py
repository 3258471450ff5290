"""Calls: what runs on behalf of whom; and what the lower rooms know of the upper ones.

Flows in: the start and end of calls. Flows out: their names, for errors, traces and stall reports, and the host that
the running code is on.

A room imports only rooms below it, for types too. Where a value or a queue must speak of the host that it is on, or of
the system, a group, a scope, a lease, it says so in terms of the protocols at the end of this file; `actor/host.py` and
its peers are what stands behind.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import sys
import weakref
from asyncio import _get_running_loop
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

from rlinf.runtime.base.errors import UserError


@dataclass(frozen=True, slots=True)
class Granularity:
    """When an actor's device calls ask for its devices, and for how long they keep them.

    Raises:
        UserError: a number below 1.
    """

    items: int = 1
    """A call that takes a stream asks for its devices only when so many of its items are at hand, or it has ended."""
    lease_items: int | None = None
    """A call with work at hand offers its devices to those who wait after so many items, not earlier. None: a map when
    its quantum of seconds is over, any other call when it would wait."""

    def __post_init__(self) -> None:
        for name in ("items", "lease_items"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise UserError(f"{name}={value!r}: give a whole number of items, at least 1")
        if self.items is None:
            raise UserError("items=None: give a whole number of items, at least 1")


R = TypeVar("R")
ActorId = tuple[int, int]
"""(host that spawned it, number there): unique in the system."""
Key = tuple[int, int]
"""(host, number there): names a call, a kept value, a queue or a ticket; unique in the system."""
Gang = tuple[int, int, int]
"""A call on several ranks of a group at once: (host that made it, number there, how many ranks)."""

SERVICE: ActorId = (-1, 0)
"""The actor that every host has, for the runtime's own calls (`host_service.py`)."""
CONTROLLER = 0
"""The host that runs the flow and keeps names and leases."""
FLOW = "flow"
"""Stands for the flow function itself, among calls and endpoints."""


@functools.lru_cache(4096)
def role_of(name: str) -> str:
    """A call's endpoint without its rank: "judge.score" of "judge[0].score". What has no rank stays as it is."""
    group, bracket, _ = name.partition("[")
    return f"{group}.{name.rpartition('.')[2]}" if bracket else name


class Call:
    """A call that is running on this host: for stall reports, traces, and the name on errors."""

    def __init__(self, name: str, caller: int, number: int, parent: str, gang: Gang | None, since: float):
        self.name = name
        self.caller = caller
        self.number = number
        self.parent = parent
        self.gang = gang
        self.since = since

    # Most calls never need more than these defaults, and making one must be cheap.
    _label: str | None = None
    _role: str | None = None
    doing: str | None = None
    moves = 0
    """Computations begun: a call that computes is not stuck."""
    lease: DeviceLease | None = None
    promise: Any = None
    """The promise that it settles, if its caller is on this host."""
    killed = False
    """Its actor was ended over it, so nothing it had in hand is done."""
    task: asyncio.Task[Any] | None = None
    """The task that it runs in, while it runs."""
    work: Coroutine[Any, Any, Any] | None = None
    """The coroutine that serves it, where that did not begin in a task of its own."""
    within: Call | None = None
    """Of a stage that fills a stream beside it, the call that made the stage; see `helps`."""

    def helps(self, call: Call | None) -> None:
        """It is no call of an actor, but does a part of this one, or of the flow."""
        self.within = call
        self._role = here(call)

    @property
    def role(self) -> str:
        """Its endpoint without the rank, e.g. "judge.score"."""
        if self._role is None:
            self._role = role_of(self.name)
        return self._role

    @property
    def label(self) -> str:
        """Unique in the system, e.g. "judge[0].score#0.17": caller's host and the call's number there."""
        if self._label is None:
            self._label = f"{self.name}#{self.caller}.{self.number}"
        return self._label


current_call: ContextVar[Call | None] = ContextVar("current_call", default=None)
"""The endpoint call in which the running task is."""
current_scope: ContextVar[Scope | None] = ContextVar("current_scope", default=None)
"""The scope that owns what the running task spawns."""
_current_host: ContextVar[Host | None] = ContextVar("current_host", default=None)
_last_host: weakref.ref[Host] | None = None

if sys.version_info >= (3, 12):
    task_of: Callable[[asyncio.AbstractEventLoop], asyncio.Task[Any] | None] = asyncio.current_task
else:  # there it is written in Python, and every call asks it
    from asyncio.tasks import _current_tasks  # type: ignore[attr-defined]

    task_of = cast("Callable[[asyncio.AbstractEventLoop], asyncio.Task[Any] | None]", _current_tasks.get)
"""The task that a loop is running."""


def current_task() -> asyncio.Task[Any] | None:
    """The running task."""
    return task_of(_get_running_loop())  # type: ignore[arg-type]  # one runs


def lease_here() -> DeviceLease | None:
    """Return the lease by which the running code's call holds its actor's devices, if any."""
    call = current_call.get()
    return None if call is None else call.lease


def start_apart(work: Coroutine[Any, Any, R], name: str) -> asyncio.Task[R]:
    """Run a part of the current call in a task of its own that has no claim on the call's devices.

    Where a call's ranks take their devices together, one of them may wait for its input so: a wait in the call itself
    would end with taking the devices again, alone.

    Args:
        work: the part.
        name: what it does, for stall reports.
    """
    call, context = current_call.get(), contextvars.copy_context()
    if call is not None:
        part = Call(f"{name} of {call.name}", call.caller, call.number, call.parent, None, call.since)
        context.run(current_call.set, part)
    return asyncio.create_task(work, name=name, context=context)


def here(call: Call | None) -> str:
    """The endpoint that a call is of, without its rank; None is the flow."""
    return FLOW if call is None else call.role


def enter_host(host: Host) -> None:
    """Code that runs in this context from now on is on `host`."""
    global _last_host
    _current_host.set(host)
    _last_host = weakref.ref(host)


host_here = _current_host.get
"""The host that this context was entered for, if any."""


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


def enter(host: Host, scope: Scope | None) -> None:
    """Code that runs in this context from now on is on `host`, and what it spawns belongs to `scope`."""
    current_scope.set(scope)
    _current_host.set(host)


def waiter() -> str:
    """Return the name of the running code in reports: its call, or "flow"; with the task's name if that is not the
    call's own."""
    call = current_call.get()
    if call is not None:
        name, own = call._label or call.label, call.task
    else:
        host = _current_host.get()
        name, own = FLOW, None if host is None else host.flow
    task = None if own is None else current_task()  # in the flow of a test there may be none of its own
    return name if task is own or task is None else f"{name}/{task.get_name()}"


class Lane(Protocol):
    """The way to one other host; see `transport/link.py`."""

    def post(self, entry: Any) -> None: ...
    def post_lazily(self, entry: Any) -> None: ...
    def hold_back(self, ready: asyncio.Future[None]) -> None: ...


class Host(Protocol):
    """One process of the system, as actors and the rooms below them see it; see `actor/host.py`."""

    rank: int
    loop: asyncio.AbstractEventLoop
    now: Callable[[], float]
    """Its clock, seconds."""
    closed: bool
    flow: asyncio.Task[Any] | None
    lost_hosts: dict[int, str]
    arrived: dict[int, int]
    tracer: Any
    flows: Any
    values: Any
    codec: Any
    places: Any
    transport: Any
    cells: Any
    serving: dict[Key, asyncio.Task[None]]
    running: set[Any]
    on_lost: list[Callable[[int, str], None]]

    @property
    def system(self) -> System: ...
    def cell(self, actor: ActorId, call: Call) -> Any: ...
    def context(self) -> contextvars.Context: ...
    def number(self) -> Key: ...
    def call(
        self, host: int, actor: ActorId, method: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...
    def cast(self, host: int, actor: ActorId, method: str, *args: Any) -> None: ...
    def link(self, host: int) -> Lane: ...
    def own(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]: ...
    def soon(self, fn: Callable[[], object]) -> None: ...
    def on_loop(self, fn: Callable[[], object]) -> None: ...
    def complain(self, message: str, error: BaseException | None = None) -> None: ...

    # for promises, which are calls seen from their caller
    sent: dict[int, Any]

    def bring(self, promise: Any) -> None: ...
    def cancel(self, promise: Any) -> None: ...
    def drop(self, owner: int, key: Key) -> None: ...


class System(Protocol):
    """All hosts, seen from one of them; see `system/system.py`, where each method has its words."""

    leases: Any
    queues: Any
    service: Any

    @property
    def host(self) -> int: ...
    @property
    def hosts(self) -> int: ...
    @property
    def collectives(self) -> Any: ...
    async def spawn(self, cls: type[Any], *, hosts: Sequence[int] | None = None, **options: Any) -> Any: ...
    async def get(self, name: str) -> Any: ...
    async def channel(self, name: str, *, capacity: int | None = None) -> Any: ...
    def places_known(self) -> None: ...
    async def kill(self, group: Any) -> None: ...
    async def stall_report(self) -> str: ...
    def scope(self) -> Any: ...
    def living(self) -> list[int]: ...


class Group(Protocol):
    """Actors of one class, one per rank; see `system/handles.py`."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...
    def __getitem__(self, rank: Any) -> Any: ...
    def __getattr__(self, endpoint: str) -> Any: ...


class Scope(Protocol):
    """Owns what is made in it; see `system/system.py`."""

    def add(self, what: Any) -> None: ...
    def forget(self, what: Any) -> None: ...
    def adopt(self, queue: Any) -> None: ...
    async def close(self) -> None: ...


class DeviceLease(Protocol):
    """The devices of one running call or map stage; see `devices/lease.py`."""

    puts: bool
    stage: bool
    role: str

    @property
    def released(self) -> bool: ...
    @property
    def blocked(self) -> bool: ...
    def done(self, items: int) -> None: ...
    def give(self) -> None: ...
    def close(self) -> None: ...
    async def enough(self, items: int, look: Callable[[int], Coroutine[Any, Any, None]]) -> None: ...
    def use(
        self, items: int, look: Callable[[int], Coroutine[Any, Any, None]]
    ) -> AbstractAsyncContextManager[None]: ...
    async def offer(self) -> None: ...
    async def ensure(self) -> None: ...
    async def resume(self) -> None: ...
    def take_among(self, gang: Gang | None) -> None: ...
    def computing(self) -> AbstractAsyncContextManager[None]: ...
    def waiting(self) -> AbstractAsyncContextManager[None]: ...


class Readable(Protocol):
    """A stream's queue, as far as devices care: whether items are at hand; see `streams/channel.py`."""

    def rebind(self, host: Any) -> Readable: ...
    async def at_hand(self, token: Key, least: int) -> None: ...
