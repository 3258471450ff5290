"""Promises: values to come of calls, passed on or awaited, also inside other values.

Flows in: a call that was just queued. Flows out: its value, to whoever awaits; or, passed on un-awaited, a reference
by which the consumer fetches the value straight from the producer. Who wakes whom: the reply of a call wakes those
who await its promise; the last reply, those who `resolve` a value with promises in it.

A `Promise` is an asyncio future that knows where its value is. Until the end of the tick of the call it can still say
"I am awaited", and the value comes with the reply; otherwise the value stays at the producer until someone asks for it
or the last handle is dropped.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import types
import weakref
from collections.abc import Callable, Generator, Iterable
from contextlib import nullcontext
from contextvars import Context
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from rlinf.runtime.base.calls import Key, current_call, lease_here
from rlinf.runtime.base.errors import ActorDied
from rlinf.runtime.base.tasks import mark_seen, together
from rlinf.runtime.transport.link import FLAGS, KEEP, WANT

if TYPE_CHECKING:
    from rlinf.runtime.base.calls import Gang, Host

T = TypeVar("T")

_await = asyncio.Future.__await__
_add_done_callback: Any = asyncio.Future.add_done_callback

LOCAL, QUEUED, INLINE, KEPT = range(4)
"""Where the value is: computed on this host; call not sent yet; comes with the reply; stays at the producer."""


def lending(future: asyncio.Future[T], waits: Generator[Any, None, T]) -> Generator[Any, None, T]:
    """`waits` for the future. Others may have the running call's devices meanwhile: they may be whom it waits for."""
    lease = lease_here()
    if lease is None or future.done() or not lease.blocked:
        return waits  # as nearly always

    async def lent() -> T:
        async with lease.waiting():
            return await _resumed(waits)

    return lent().__await__()


@types.coroutine
def _resumed(waits: Generator[Any, None, T]) -> Generator[Any, None, T]:
    return (yield from waits)


class Promise(asyncio.Future[T]):
    """The value that an endpoint call will produce.

    Await it, gather it, wrap it in `asyncio.timeout`: it is a future of the running loop. Cancelling it, or a task that
    awaits it, cancels the call; `asyncio.shield` it where that is not wanted. Passed un-awaited as an argument of
    another call, its value travels from producer to consumer directly. Dropped un-awaited, the call still runs and its
    value is freed.
    """

    __promised__ = True

    name: str
    """The call it stands for, e.g. "judge[0].score"."""
    parent: str
    """The call that made this one, or "flow"."""
    since: float
    """Loop time (seconds) at which the call was made."""
    target: int
    """The host it is called on."""
    number: int
    host: Host
    """Whose call it is; `Host.call` makes promises, and gives them all of these."""

    # Most promises never need more than these defaults, and making one must be cheap.
    state = LOCAL
    wanted = False
    lent = False
    """Its value will be fetched by another call, so it stays at the producer."""
    gang: Gang | None = None
    """The group call it is part of."""
    message: list[Any] | None = None
    """Of the call, as long as what is wanted of its value can still be written into it."""
    lends: list[Any] | None = None
    """Promises and streams among its arguments: alive until the call has its reply."""
    borrowers = 0
    """Calls that may fetch its value."""
    ref: Any = None
    """The handle that counts it among its calls under way."""
    task: asyncio.Task[Any] | None = None
    """The task that computes it, if that is on this host."""
    stays: _Kept | None = None
    """Keeps the value at its producer, where that has it."""

    @property
    def label(self) -> str:
        """The call's name, unique in the system, e.g. "judge[0].score#0.17"."""
        return f"{self.name}#{self.host.rank}.{self.number}"

    @property
    def key(self) -> Key:
        """Names the kept value at its owner."""
        return (self.host.rank, self.number)

    def leave_unawaited(self) -> None:
        """The call is about to be sent and nobody awaits its value, so that it stays at its producer."""
        assert self.message is not None
        self.message[FLAGS] |= KEEP
        self.message, self.state, self.stays = None, KEPT, _Kept(self)
        self.host.sent[self.number] = Sent(self)

    def want(self) -> None:
        """Somebody awaits the value: have it brought here."""
        if self.wanted or self.done():
            return
        self.wanted = True
        if self.message is not None:
            self.message[FLAGS] = flags = self.message[FLAGS] | WANT | (KEEP if self.lent else 0)
            self.message, self.state = None, INLINE
            if flags & KEEP:
                self.state, self.stays = KEPT, _Kept(self)
        elif self.state == KEPT:
            self.host.bring(self)

    def fail(self, error: BaseException) -> None:
        """The call has failed; complain if nobody ever looks, unless a call that borrowed the value tells of it."""
        self.set_exception(error)
        if self.lent or isinstance(error, ActorDied):  # and calls that run as long as their actor end with it
            self.exception()
        if not self.borrowers:
            self.release()  # the error came along

    def __await__(self) -> Generator[Any, None, T]:
        if not self.wanted:
            self.want()
        call = current_call.get()
        waits = _await(self)
        return waits if call is None or call.lease is None else lending(self, waits)

    __iter__ = __await__

    def add_done_callback(self, fn: Callable[[Promise[T]], object], *, context: Context | None = None) -> None:
        if not self.wanted:
            self.want()
        _add_done_callback(self, fn, context=context)

    def cancel(self, msg: Any | None = None) -> bool:
        if self.done():
            return False
        self.host.cancel(self)
        return super().cancel(msg)

    def release(self) -> None:
        """Nobody will fetch the value from its producer any more."""
        if self.stays is not None:
            self.state = INLINE
            self.stays.release()

    def __lend__(self, pickler: Any) -> Any:
        return pickler.lend(self)

    def __reduce__(self) -> Any:
        raise TypeError(f"{self.name} is a promise, which can only be sent to actors: await it and pickle its value")

    def __repr__(self) -> str:
        return f"<Promise {self.name} {'done' if self.done() else 'pending'}>"


class _Kept:
    """A value that is kept at its producer until it is released, at the latest when the promise is dropped.

    Apart from the promise, for few promises have one: a `__del__` of their own would cost all of them.
    """

    __slots__ = ("_drop",)

    def __init__(self, promise: Promise[Any]):
        self._drop: Any = (promise.host, promise.target, promise.key)

    def release(self) -> None:
        if self._drop is not None:
            (host, target, key), self._drop = self._drop, None
            host.drop(target, key)

    __del__ = release


class Gathered(asyncio.Future[Any]):
    """One call on every rank of a group; the first failure cancels the others.

    Args:
        joint: the ranks answer as one, so it comes to what rank 0 returned; else to all values, in rank order.
    """

    __promised__ = True

    def __init__(self, promises: Iterable[Promise[Any]], loop: asyncio.AbstractEventLoop, joint: bool = False):
        super().__init__(loop=loop)
        self.promises = list(promises)
        self._joint = joint
        self._left = len(self.promises)
        self._started = False
        if not self.promises:
            self.set_result([])

    def _start(self) -> None:
        if self._started or self.done():
            return
        self._started = True
        for promise in self.promises:
            promise.add_done_callback(self._one_done)

    def _one_done(self, promise: asyncio.Future[Any]) -> None:
        self._left -= 1
        if self.done():
            mark_seen(promise)  # the first failure has been reported
            return
        if promise.cancelled():
            self.cancel()
        elif (error := promise.exception()) is not None:
            self.set_exception(error)
            self.exception()  # seen: it began because somebody awaited it, who may have been ended since
            self._cancel_rest()
        elif self._left == 0:
            values = [p.result() for p in self.promises]
            self.set_result(values[0] if self._joint else values)

    def _cancel_rest(self) -> None:
        for promise in self.promises:
            promise.cancel()

    def __await__(self) -> Generator[Any, None, Any]:
        self._start()
        return lending(self, super().__await__())

    __iter__ = __await__

    def add_done_callback(self, fn: Any, *, context: Context | None = None) -> None:
        self._start()
        super().add_done_callback(fn, context=context)

    def cancel(self, msg: Any | None = None) -> bool:
        if self.done():
            return False
        self._cancel_rest()
        return super().cancel(msg)

    def __lend__(self, pickler: Any) -> Any:
        return (_first if self._joint else list), (self.promises,)

    def __getitem__(self, rank: int) -> Promise[Any]:
        """The promise of one rank."""
        return self.promises[rank]

    def __len__(self) -> int:
        return len(self.promises)


def _first(values: list[Any]) -> Any:
    """Return the value of a joint call on its receiver's host, where the ranks' values have arrived."""
    return values[0]


class Sent:
    """Record that the caller's host has of a call that nobody awaits, until its reply; of others it has the promise."""

    __slots__ = ("gang", "lends", "name", "promise", "ref", "target")

    def __init__(self, promise: Promise[Any]):
        self.name = promise.name
        self.target = promise.target
        self.gang = promise.gang
        self.ref = promise.ref
        self.lends = promise.lends
        self.promise = weakref.ref(promise)


def promise_of(sent: Promise[Any] | Sent) -> Promise[Any] | None:
    """The promise of a call that was sent, if anybody still has it."""
    return sent.promise() if isinstance(sent, Sent) else sent


ATOMS = frozenset({int, float, str, bytes, bool, type(None), torch.Tensor, np.ndarray, complex, range})


def holds_promise(value: Any) -> bool:
    """True if a promise sits anywhere in `value`. A class that says `__plain__ = True` has none in its objects, and is
    not searched."""
    kind = type(value)
    if kind in ATOMS:
        return False
    if kind is tuple or kind is list:  # what most calls have
        return not ATOMS.issuperset(map(type, value)) and any(map(holds_promise, value))
    if getattr(kind, "__plain__", False):
        return False
    if hasattr(kind, "__promised__"):
        return True
    if isinstance(value, dict):
        value = value.values()
    elif dataclasses.is_dataclass(kind):
        return any(holds_promise(getattr(value, name, None)) for name in kind.__dataclass_fields__)
    elif not isinstance(value, (list, tuple, set, frozenset)):
        return False
    return not ATOMS.issuperset(map(type, value)) and any(map(holds_promise, value))


async def resolve(value: Any, *, shared: bool = False) -> Any:
    """`value` with every promise in it replaced by what it promised; containers are rebuilt only where needed.

    Args:
        shared: the promises are others' as well, so giving up waiting must not cancel their calls.
    """
    promises: list[asyncio.Future[Any]] = []
    _collect(value, promises)
    if not promises:
        return value
    calls: list[Any] = [call for promise in promises for call in getattr(promise, "promises", [promise])]
    waits = [call.host.values.note_wait(call.label) for call in calls]
    user = current_call.get()
    if user is not None:
        for call in calls:
            call.host.flows.passed(call.name, user.role, call.key)
    try:
        async with lease.waiting() if (lease := lease_here()) is not None and lease.blocked else nullcontext():
            await together([*map(asyncio.shield, promises)] if shared else promises)
    except BaseException:
        del value, promises, calls  # they lead to the error, and its traceback here
        raise
    finally:
        for over in waits:
            over()
    return _rebuilt(value)


def _collect(value: Any, promises: list[asyncio.Future[Any]]) -> None:
    if not holds_promise(value):
        return
    if isinstance(value, asyncio.Future):
        promises.append(value)
        return
    for child in _children(value):
        _collect(child, promises)


def _children(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    if dataclasses.is_dataclass(value):
        return [getattr(value, name, None) for name in value.__dataclass_fields__]
    return value


def _rebuilt(value: Any) -> Any:
    if not holds_promise(value):
        return value
    if isinstance(value, asyncio.Future):
        return value.result()
    if dataclasses.is_dataclass(value):
        changed: Any = copy.copy(value)
        for name in value.__dataclass_fields__:
            object.__setattr__(changed, name, _rebuilt(getattr(value, name)))  # also where it is frozen
        return changed
    if isinstance(value, dict):
        changed = copy.copy(value)  # whatever kind of dict it is
        changed.update((key, _rebuilt(child)) for key, child in value.items())
        return changed
    children = [_rebuilt(child) for child in value]
    return type(value)(*children) if hasattr(value, "_fields") else type(value)(children)
