"""Running the calls that arrive at a host, and what their callers get back.

Flows in: a call's arguments, encoded or by reference. Flows out: its value, its error with the remote traceback, or
word that the value is kept here. Who wakes whom: the end of a call posts its reply, or settles its promise.
"""

from __future__ import annotations

import asyncio
import pickle
import traceback
import types
from asyncio import _enter_task, _leave_task
from collections.abc import Coroutine, Generator
from contextvars import Context
from typing import TYPE_CHECKING, Any

from rlinf.runtime.actor.actor import name_on
from rlinf.runtime.base.calls import SERVICE, ActorId, Call, Key, current_call, current_scope, enter, host_here
from rlinf.runtime.base.errors import RemoteError
from rlinf.runtime.base.tasks import mark_seen
from rlinf.runtime.transport.link import CANCELLED, ERROR, HELD, KEEP, OK, PLAIN, REPLY, WANT, Link
from rlinf.runtime.values.codec import Payload
from rlinf.runtime.values.pickler import NUMBERS, is_plain
from rlinf.runtime.values.promise import ATOMS, Promise, holds_promise, resolve

if TYPE_CHECKING:
    from rlinf.runtime.base.calls import Host


STANDS_BY = "stands by for calls that wait"
"""Name of the task that each host has for the next call that will wait."""


class FirstSteps:
    """Runs the first step of a call at once, and what is left of it in a task.

    Most calls never wait, and a task would cost as much as all the rest of them. While a first step runs, a task that
    stands by is the current one, so that `asyncio.timeout` and the like find one; it goes on with the first call that
    does wait, and another one takes its place.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._task: asyncio.Task[Any] | None = None
        self._ready: asyncio.Future[None]
        self._rest: list[Any]

    def run(self, work: Coroutine[Any, Any, None], call: Call, context: Context) -> asyncio.Task[Any] | None:
        """Run the first step of `work`, in a copy of `context`; return the task that goes on with it, if it waits."""
        task = self._task
        if task is None or self._ready.done():  # a step that did not wait has cancelled it
            self._ready, self._rest = self._loop.create_future(), []
            goes_on = _go_on(self._ready, self._rest)
            goes_on.send(None)  # begun, it hears of a cancellation before the task's own first step
            self._task = task = self._loop.create_task(goes_on, name=STANDS_BY)
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # it may stand by for ever
        call.task, call.work = task, work
        _enter_task(self._loop, task)
        try:
            context = context.copy()
            waits = context.run(work.send, None)
        except StopIteration:
            return None
        finally:
            _leave_task(self._loop, task)
        self._task = None
        self._rest += work, waits, context
        if not self._ready.done():
            self._ready.set_result(None)
        task.set_name(call.name)
        return task

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()


async def _go_on(ready: asyncio.Future[None], rest: list[Any]) -> None:
    """Go on with a coroutine whose first step has run.

    Args:
        ready: done once there is one.
        rest: the coroutine, what it waits for, and its context.
    """
    await _steps(ready, rest)


@types.coroutine
def _steps(ready: asyncio.Future[None], rest: list[Any]) -> Generator[Any, None, None]:
    error: BaseException | None = None
    cancelled: BaseException | None = None
    try:
        yield  # for `FirstSteps.run`
        yield from ready
    except asyncio.CancelledError as thrown:
        if not rest:
            raise
        ends = rest[1] is not None and rest[1].cancel()
        if rest[1] is None or rest[1].done():
            error = thrown
        elif not ends:
            cancelled = thrown  # once what it waits for is over, as in any task
    work, waits, context = rest
    rest.clear()
    while True:
        try:
            if error is None:
                yield waits
            elif waits is not None:
                mark_seen(waits)
        except GeneratorExit:
            work.close()
            raise
        except BaseException as thrown:
            error = thrown
        if cancelled is not None:
            error, cancelled = cancelled, None
        try:
            waits = context.run(work.send, None) if error is None else context.run(work.throw, error)
        except StopIteration:
            return
        finally:
            error = None  # its traceback leads here


async def serve(host: Host, link: Link, call: Call, actor: ActorId, method: str, payload: Any, flags: int) -> None:
    """Run a call from another host and reply."""
    status, result, key = OK, None, (call.caller, call.number)
    try:
        if flags & PLAIN:
            args, kwargs = payload, _NO_KEYWORDS
        elif host.codec.ready(payload):
            args, kwargs = host.codec.decode_now(payload)
        else:
            current_call.set(call)
            args, kwargs = await host.codec.decode(payload)
            call.since = host.now()
        result = await execute(host, call, actor, method, args, kwargs)
        payload = args = kwargs = (
            None  # frees what they hold of the caller's shared memory, so that word of it rides along
        )
        if type(result) not in ATOMS and holds_promise(result):
            result = await resolve(result)
    except asyncio.CancelledError:
        status = CANCELLED
    except BaseException as error:  # whatever the endpoint raises belongs to the caller
        status, result = ERROR, error
    finally:
        host.serving.pop(key, None)
        if call.gang is not None:
            _part_over(host, call, actor)
    if status == OK and flags & (WANT | KEEP) == WANT and (type(result) in NUMBERS or is_plain(result)):
        link.reply(call.number, result)
    else:
        _reply(host, link, key, status, result, flags, call.name)
    payload = result = args = kwargs = None  # an error's traceback leads here, and to them


_NO_KEYWORDS: Any = {}


def _reply(host: Host, link: Link, key: Key, status: int, result: Any, flags: int, name: str) -> None:
    future = host.values.kept.get(key) if flags & KEEP else None
    if future is not None and not future.done():
        if status == OK:
            future.set_result(result)
        else:
            future.set_exception(result if status == ERROR else asyncio.CancelledError())
    caller = key[0]
    if caller in host.lost_hosts:
        return
    payload: Payload = (b"", (), ())
    if status == ERROR:
        payload = _encode_error(host, result, caller)
    elif status == OK and not flags & WANT:
        status = HELD
    elif status == OK:
        try:
            payload = host.codec.encode(result, caller)
        except Exception as error:  # the caller must hear of it, whatever went wrong
            error.add_note(f"while the result of {name} was sent from host {host.rank}")
            status, payload = ERROR, _encode_error(host, error, caller)
    host.values.send_frees()
    link.post((REPLY, key[1], status, payload))


async def serve_local(
    host: Host, call: Call, promise: Promise[Any], actor: ActorId, method: str, args: Any, kwargs: Any
) -> None:
    """Run a call from this very host; values go by reference."""
    try:
        if (args and holds_promise(args)) or (kwargs and holds_promise(kwargs)):
            current_call.set(call)
            args, kwargs = await resolve((args, kwargs), shared=True)
            call.since = host.now()
        result = await execute(host, call, actor, method, args, kwargs)
        if type(result) not in ATOMS and holds_promise(result):
            result = await resolve(result)
    except asyncio.CancelledError:
        if not promise.done():
            promise.task = None
            promise.cancel()
    except BaseException as error:  # whatever the endpoint raises belongs to the caller
        if not promise.done():
            promise.fail(error)
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
    else:
        if not promise.done():
            promise.set_result(result)
    finally:
        promise.task = None
        host.running.discard(promise)
        if call.gang is not None:
            _part_over(host, call, actor)
        if promise.ref is not None:
            promise.ref._load -= 1
        call.promise = None
        del promise, args, kwargs  # an error's traceback leads here, and to them


async def execute(host: Host, call: Call, actor: ActorId, method: str, args: Any, kwargs: Any) -> Any:
    """Run one endpoint call in the current task: under its name, its actor's scope and, if need be, a lease."""
    cell = host.cells.get(actor) or host.cell(actor, call)
    spec = cell.actor.endpoints[method]
    current_call.set(call)
    if host_here() is not host or current_scope.get() is not cell.scope:  # else it began in the cell's context
        enter(host, cell.scope)
    cell.calls.add(call)
    try:
        if spec.device and cell.leased:
            inputs = (*args, *kwargs.values())
            async with host.system.leases.hold(cell, call, gang=spec.gang, late=spec.late, inputs=inputs):
                return await getattr(cell.actor, method)(*args, **kwargs)
        return await getattr(cell.actor, method)(*args, **kwargs)
    except BaseException as error:
        name_on(error, host, cell, call)
        raise
    finally:
        cell.calls.discard(call)
        call.task = call.work = None
        if cell.id is not SERVICE:
            host.tracer.record(("call", cell.name, method, call.parent, call.since, host.now(), 0))


def _part_over(host: Host, call: Call, actor: ActorId) -> None:
    """However early a rank of a group call has failed, the others must not wait for it when they take their devices."""
    cell = host.cells.get(actor)
    if cell is None or cell.leased or actor == SERVICE:
        host.system.leases.over(call)


def _encode_error(host: Host, error: BaseException, caller: int) -> Payload:
    if host.codec.by_reference(caller):
        return (error,)
    return (pickle.dumps(travelling(error, host.rank), 5), (), ())


def travelling(error: BaseException, host: int) -> BaseException:
    """`error`, or what stands in for it, in a shape that other processes can read."""
    remote = "".join(traceback.format_exception(error)).rstrip()
    if not any(note.startswith("remote traceback") for note in getattr(error, "__notes__", ())):
        error.add_note(f"remote traceback (host {host}):\n  " + remote.replace("\n", "\n  "))
    try:
        pickle.loads(pickle.dumps(error, 5))
    except Exception:  # an error that does not travel is replaced by one that does
        stand_in = RemoteError(f"{type(error).__module__}.{type(error).__qualname__}: {error}")
        for note in getattr(error, "__notes__", ()):
            stand_in.add_note(note)
        return stand_in
    return error
