"""Running the calls that arrive at a host, and what their callers get back.

Flows in: a call's arguments, encoded or by reference. Flows out: its value, its error with the remote traceback, or
word that the value is kept here. Who wakes whom: the end of a call posts its reply, or settles its promise.
"""

from __future__ import annotations

import asyncio
import pickle
import traceback
from typing import TYPE_CHECKING, Any

from rlinf.runtime.actor.actor import begin, end, name_on
from rlinf.runtime.base.calls import SERVICE, ActorId, Call, Key, current_call
from rlinf.runtime.base.errors import RemoteError
from rlinf.runtime.transport.link import CANCELLED, ERROR, HELD, KEEP, OK, REPLY, WANT
from rlinf.runtime.values.codec import Payload, is_plain
from rlinf.runtime.values.promise import ATOMS, Promise, holds_promise, resolve

if TYPE_CHECKING:
    from rlinf.runtime.base.calls import Host


async def serve(host: Host, call: Call, actor: ActorId, method: str, payload: Payload, flags: int) -> None:
    """Run a call from another host and reply."""
    status, result, key = OK, None, (call.caller, call.number)
    call.task = host.serving[key]
    try:
        if len(payload) == 2:  # short atoms
            args, kwargs = payload[0]
        elif host.codec.ready(payload):
            args, kwargs = host.codec.decode_now(payload)
        else:
            current_call.set(call)
            args, kwargs = await host.codec.decode(payload)
            call.since = host.now()
        result = await execute(host, call, actor, method, args, kwargs)
        args = kwargs = None  # frees what they hold of the caller's shared memory, so that word of it rides along
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
    _reply(host, key, status, result, flags, call.name)
    payload = result = args = kwargs = None  # type: ignore[assignment]  # an error's traceback leads here, and to them


def _reply(host: Host, key: Key, status: int, result: Any, flags: int, name: str) -> None:
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
    elif status == OK and is_plain(result):
        payload = (result, None)
    elif status == OK:
        try:
            payload = host.codec.encode(result, caller)
        except Exception as error:  # the caller must hear of it, whatever went wrong
            error.add_note(f"while the result of {name} was sent from host {host.rank}")
            status, payload = ERROR, _encode_error(host, error, caller)
    host.values.send_frees()
    host.link(caller).post((REPLY, key[1], status, payload))


async def serve_local(
    host: Host, promise: Promise[Any], actor: ActorId, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Run a call from this very host; values go by reference."""
    call = Call(promise.name, host.rank, promise.number, promise.parent, promise.gang, host.now())
    call.promise = promise
    call.task = promise.task
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
        if promise.finish is not None:
            promise.finish()
        call.promise = None
        del promise, args, kwargs  # an error's traceback leads here, and to them


async def execute(host: Host, call: Call, actor: ActorId, method: str, args: Any, kwargs: Any) -> Any:
    """Run one endpoint call in the current task: under its name, its actor's scope and, if need be, a lease."""
    cell = host.cell(actor, call)
    spec = cell.actor.endpoints[method]
    begin(host, cell, call)
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
        end(host, cell, call, method)


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
