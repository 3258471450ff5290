"""Actors: classes whose `@endpoint` methods are called from anywhere.

Flows in: calls, delivered by the host. Flows out: values, streams, errors with the actor's name on them. Who wakes
whom: every call is a task of its own on the host's loop, so endpoints of one actor interleave at their awaits.

Life cycle: made by `ActorSystem.spawn`, which awaits `setup(**kwargs)`; serving; `close()` when its scope ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Callable, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar, overload

import torch

from rlinf.runtime.base.calls import (
    FLOW,
    SERVICE,
    ActorId,
    Call,
    Granularity,
    current_call,
    current_task,
    enter,
    host_here,
    lease_here,
)
from rlinf.runtime.base.errors import ActorDied
from rlinf.runtime.base.tasks import ComputeThread

if TYPE_CHECKING:
    from rlinf.runtime.base.calls import Group, Host, Scope, System
    from rlinf.runtime.observe.spans import Kind

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

ELSEWHERE = "elsewhere"
"""Names work of servers and child processes in traces."""
COMPUTING = "computing"
"""First word of a call's `Call.doing` while a function of it runs in its actor's thread."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Properties that `@endpoint` gives to a method."""

    name: str
    streams: bool
    """It is an async generator: calling it returns a Stream."""
    device: bool
    """It runs only while its actor holds a lease on its devices."""
    gang: bool
    """A call on a whole group takes the devices of all ranks at once; otherwise each rank takes its own."""
    joint: bool
    """A call on a whole group comes to what rank 0 returned; otherwise to a list of what each did."""
    late: bool = field(default=False, compare=False)
    """Its devices are taken when it computes, not when it begins, and given away whenever it does not compute.
    Nothing that a caller could tell, so endpoints that differ in it alone are equal."""
    stays: Callable[[Any], Any] | None = field(default=None, compare=False)
    """An item that it gives to a stream stays in its process until a consumer wants it; of each the stream has what
    this function makes of it, see `streams.handles`. None: small items ride in the stream."""


@overload
def endpoint(fn: F) -> F: ...
@overload
def endpoint(
    *,
    device: bool = False,
    gang: bool | None = None,
    joint: bool = False,
    late: bool = False,
    stays: Callable[[Any], Any] | None = None,
) -> Callable[[F], F]: ...
def endpoint(
    fn: Any = None,
    *,
    device: bool = False,
    gang: bool | None = None,
    joint: bool = False,
    late: bool = False,
    stays: Callable[[Any], Any] | None = None,
) -> Any:
    """Make an `async def` method callable from other actors and hosts.

    Args:
        device: it uses the actor's devices. The runtime takes a lease around each call, onloading the actor first
            when it was parked.
        gang: a call on the whole group gets the devices of all ranks atomically, as SPMD code with collectives
            needs. Default: yes for plain methods, no for async generators, whose ranks work independently.
        joint: the ranks answer as one: a call on the whole group runs on every rank and comes to what rank 0 returned,
            so that a flow reads the same for one rank and for many.
        late: `compute` takes its devices, not the call's beginning; whenever it does not compute, others may have them.
        stays: what its streams tell of an item that stays where it was made, see `Endpoint.stays`.

    Raises:
        TypeError: the method is not async, or is joint and an async generator.
    """

    def mark(method: Any) -> Any:
        streams = inspect.isasyncgenfunction(method)
        if not streams and not inspect.iscoroutinefunction(method):
            raise TypeError(
                f"{method.__qualname__} is marked @endpoint but is not async: write `async def`, and run blocking "
                "work inside it by `await self.compute(fn, ...)`"
            )
        if joint and streams:
            raise TypeError(f"{method.__qualname__} cannot be joint: the ranks' items come in one stream as it is")
        gangs = (not streams) if gang is None else gang
        method.__endpoint__ = Endpoint(method.__name__, streams, device, gangs, joint, late, stays)
        return method

    return mark if fn is None else mark(fn)


class Actor:
    """Base class of all workers. Subclass it, write `async def` methods marked `@endpoint`, and spawn it.

    An actor lives in one process and owns its state; nobody else touches it. Blocking work goes through `compute`.
    """

    endpoints: ClassVar[dict[str, Endpoint]] = {}
    """Endpoints of the class by name, collected from it and its bases."""

    _cell: Cell

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.endpoints = {
            name: method.__endpoint__
            for base in reversed(cls.__mro__)
            for name, method in vars(base).items()
            if hasattr(method, "__endpoint__")
        }

    async def setup(self) -> None:
        """Prepare for serving; receives the keyword arguments of `spawn`."""

    async def close(self) -> None:
        """Give back what the actor holds. Called once, after its running calls have ended."""

    async def offload(self) -> None:
        """Move what lies on the device to the host's memory; called when another role needs the space."""

    async def onload(self) -> None:
        """Bring back what `offload` moved; called before the next call that uses the device."""

    @property
    def rank(self) -> int:
        """Position in its group, from 0."""
        return self._cell.rank

    @property
    def world_size(self) -> int:
        """Number of actors in its group."""
        return len(self._cell.group)

    @property
    def group(self) -> Group:
        """The group it was spawned in, itself included."""
        return self._cell.group

    @property
    def host(self) -> int:
        """Number of the host it lives on."""
        return self._cell.host.rank

    @property
    def system(self) -> System:
        """The system, for spawning and finding other actors. What it spawns is closed with it."""
        return self._cell.host.system

    def empty_shared(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An uninitialised CPU tensor that goes to other processes of this machine without a copy.

        Do not write to it once it was sent: its receivers look at the same memory. Its memory comes back when nobody
        uses it any more.
        """
        arena = self._cell.host.values.arena
        return torch.empty(tuple(shape), dtype=dtype) if arena is None else arena.empty(shape, dtype)

    def use_version(self, value: Any) -> bool:
        """Have only what changes in a value's next version be sent here, as long as this actor keeps this one.

        Args:
            value: has a `lineage` and a `key`, as `Weights` do, and is as it was sent.

        Returns:
            True if keeping it will help: it came from another machine.
        """
        return bool(self._cell.host.values.relay.use_version(value))

    async def compute(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run blocking work in this actor's own thread; the loop goes on answering meanwhile.

        Calls of one actor run one after the other. Cancelled while `fn` runs, it takes effect when `fn` returns.
        """
        return await self._cell.compute(False, fn, *args, **kwargs)

    async def compute_briefly(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """`compute` for work that is often done sooner than a thread would have begun it, and waits for nothing: while
        its last run took no longer than `compute_thread.BRIEF`, it runs on the loop.
        """
        return await self._cell.compute(True, fn, *args, **kwargs)

    def is_brief(self, fn: Callable[..., Any]) -> bool:
        """True if the last run of `fn` by `compute_briefly` took no longer than a message."""
        thread = self._cell.thread
        return thread is not None and thread.is_brief(fn.__name__)

    def beside(self, handle: Any) -> Actor | None:
        """The actor of a handle, where it lives on this host and takes turns on no device; None elsewhere."""
        cell = self._cell.host.cells.get(handle._actor) if getattr(handle, "_host", None) == self.host else None
        return None if cell is None or cell.leased else cell.actor

    def working(self) -> contextlib.AbstractAsyncContextManager[None]:
        """In it others work for the running call: a server, a child process. `async with self.working():` holds the
        actor's devices as `compute` does, and the time counts as the endpoint's own; times that overlap count once."""
        return self._cell.working()

    def note(self, what: str, seconds: float = 0.0, bytes: float = 0) -> None:
        """Tell the trace of a part of what this actor has just done; a step's metrics have its sum.

        Args:
            what: the metric: `..._seconds`, of which that of the slowest actor counts, `..._bytes` and
                `..._tokens`, which add up, or `..._error` and `..._count`, of which the largest counts.
            seconds: that it took, up to now.
            bytes: that it moved, the tokens, or the error or count.
        """
        now = self._cell.host.now()
        self._cell.host.tracer.span("part", self._cell.name, "", what, now - seconds, now, bytes)


class Cell:
    """An actor and what its host keeps about it."""

    def __init__(self, actor: Actor, actor_id: ActorId, name: str, rank: int, group: Group, host: Host):
        self.actor = actor
        self.id = actor_id
        self.name = name
        self.rank = rank
        self.group = group
        self.host = host
        self.calls: set[Call] = set()
        self.leased = False
        """Its devices are declared, so device endpoints need a lease."""
        self.granularity = Granularity()
        """When its device calls ask for its devices, and for how long they keep them."""
        self.scope: Scope | None = None
        self.under_way: dict[object, tuple[Kind, str, str, float]] = {}
        """Computations and mapped items, by what has no other: kind, endpoint, what, and since when."""
        self._context: Context | None = None
        self.thread: ComputeThread | None = None
        """Where it computes, once it has."""
        actor._cell = self

    def context(self) -> Context:
        """The context that its calls run in copies of: on this actor's host, in its scope."""
        if self._context is None:
            self._context = self.host.context()
            self._context.run(enter, self.host, self.scope)
        return self._context

    async def compute(self, briefly: bool, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> R:
        if self.thread is None:
            self.thread = ComputeThread(self.name, self.host.loop)
        call = current_call.get()
        name = getattr(fn, "__name__", type(fn).__name__)
        lease = lease_here()
        endpoint = self._endpoint_of(call)
        async with lease.computing() if lease is not None else contextlib.nullcontext():
            start = self.host.now()  # not before: to wait for a device is not to compute
            self.under_way[entry := object()] = ("compute", endpoint, name, start)
            if call is not None:
                call.doing = f"{COMPUTING} {name}"
                call.moves += 1
            try:
                if briefly:
                    return await self.thread.run_briefly(name, fn, *args, **kwargs)
                return await self.thread.run(fn, *args, **kwargs)
            finally:
                del self.under_way[entry]
                if call is not None:
                    call.doing = None
                self.host.tracer.span("compute", self.name, endpoint, name, start, self.host.now())

    @contextlib.asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        lease, endpoint = lease_here(), self._endpoint_of(current_call.get())
        async with lease.computing() if lease is not None else contextlib.nullcontext():
            self.under_way[entry := object()] = ("compute", endpoint, ELSEWHERE, self.host.now())
            try:
                yield
            finally:
                *_, start = self.under_way.pop(entry)
                self.host.tracer.span("compute", self.name, endpoint, ELSEWHERE, start, self.host.now())

    def _endpoint_of(self, call: Call | None) -> str:
        """The endpoint that a computation is for: that of the running call which it is a part of. A task that outlives
        its call, as an engine's loop does, computes for the running call that began last; "" if there is none."""
        if call not in self.calls:
            call = max(self.calls, key=lambda running: running.since, default=None)
        return "" if call is None else call.name.rpartition(".")[2]

    def processor_seconds(self) -> float:
        """Return the processor seconds that its computations have used."""
        return 0.0 if self.thread is None else self.thread.processor_seconds()

    def stop_computing(self) -> None:
        if self.thread is not None:
            self.thread.close()


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
        call, cell = self.call, self.cell
        if call.task is None:
            call.task = current_task()
        current_call.set(call)
        enter(self.host, cell.scope)
        cell.calls.add(call)
        return call

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        call, cell = self.call, self.cell
        cell.calls.discard(call)
        call.task = None
        method = call.name.rpartition(".")[2]
        if cell.id is not SERVICE:
            self.host.tracer.record((self.kind, cell.name, method, call.parent, call.since, self.host.now(), 0))
        if error is not None:
            name_on(error, self.host, cell, call)


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
    """A running call by which the lease manager loads or parks the actor."""

    __slots__ = ()
    kind: ClassVar[Kind] = "move"


def show_wait(host: Host, what: str, start: float) -> None:
    """Record that the running code has waited since `start`, if that is worth a span."""
    end = host.now()
    if end - start > SHOWN_WAIT:
        call = current_call.get()
        recorder = host_here() or host  # the stream may live on another host of this process
        actor, _, method = call.name.rpartition(".") if call is not None else (FLOW, "", "")
        recorder.tracer.span("wait", actor, method, what, start, end)
