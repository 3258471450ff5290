"""One process of the system: its actors, its calls in both directions, and its lanes to the other hosts.

Flows in: calls made here, messages from peers. Flows out: messages to peers, tasks that run endpoints. Who wakes whom:
an arriving call starts a task; a reply settles a promise; a lost peer fails every promise that stands on it.

The messages are listed in `transport/link.py`.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import threading
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from rlinf.runtime.actor.actor import Cell
from rlinf.runtime.actor.dispatch import serve, serve_local
from rlinf.runtime.base.calls import SERVICE, ActorId, Call, Gang, Key, waiter
from rlinf.runtime.base.clock import is_virtual
from rlinf.runtime.base.errors import ActorDied, RemoteError
from rlinf.runtime.base.tasks import cancel_all
from rlinf.runtime.observe.dataflow import FlowBook
from rlinf.runtime.observe.spans import Tracer
from rlinf.runtime.transport.link import (
    CALL,
    CANCEL,
    CANCELLED,
    CAST,
    DROP,
    ERROR,
    FREE,
    KEEP,
    OK,
    REPLY,
    Frame,
    Link,
    Message,
    Respond,
    Transport,
)
from rlinf.runtime.values.codec import Payload, Place, is_plain
from rlinf.runtime.values.object_store import Values
from rlinf.runtime.values.promise import LOCAL, QUEUED, Promise, Sent, promise_of

if TYPE_CHECKING:
    from rlinf.runtime.base.calls import System

LATE = 1.0
"""Seconds that tasks get to end when their host closes."""


class Host:
    """This process's part of the system. `ActorSystem` makes it; users never do.

    Args:
        transport: moves frames to the other hosts.
        places: where every host lives; filled by whoever makes the hosts.
        share_memory: send big CPU tensors through shared memory to hosts on this machine.
        trace: record spans.
    """

    def __init__(
        self, transport: Transport, places: dict[int, Place], *, share_memory: bool = True, trace: bool = True
    ):
        self.loop = asyncio.get_running_loop()
        # uvloop's own clock stands still during an iteration and counts in milliseconds
        self.now = self.loop.time if is_virtual(self.loop) else time.monotonic
        self.rank = transport.host
        self.transport = transport
        self.places = places
        self.tracer = Tracer(enabled=trace)
        self.flows = FlowBook(self.now, enabled=trace)
        self.system: System
        self.flow: asyncio.Task[Any] | None = None
        """On the controller, the task that runs the program."""
        self.cells: dict[ActorId, Cell] = {}
        self.sent: dict[int, Promise[Any] | Sent] = {}
        """Calls to other hosts whose reply has not come."""
        self.serving: dict[Key, asyncio.Task[None]] = {}
        """Calls from other hosts."""
        self.running: set[Promise[Any]] = set()
        """Calls from this host to itself."""
        self.lost_hosts: dict[int, str] = {}
        self.arrived: dict[int, int] = {}
        """Number of the last call that has arrived from each host; they come in order."""
        self.on_lost: list[Callable[[int, str], None]] = []
        self.on_close: list[Callable[[], Coroutine[Any, Any, None]]] = []
        """What else this process has to leave, once nothing of the system runs in it any more."""
        self._links: dict[int, Link] = {}
        self._numbers = itertools.count(1)
        self._context = contextvars.copy_context()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.values = Values(self, places, share_memory)
        self.codec = self.values.codec
        self.thread = threading.get_ident()
        self.closed = False
        transport.bind(self)

    # Calls going out ---------------------------------------------------------------------------------------------

    def call(
        self,
        host: int,
        actor: ActorId,
        method: str,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        gang: Gang | None = None,
    ) -> Promise[Any]:
        """Call an endpoint of an actor on any host; `name` is the call's name, e.g. "judge[0].score".

        Args:
            gang: names the group call that this is part of, for endpoints that need all ranks' devices at once.
        """
        promise: Promise[Any] = Promise(self, host, name, next(self._numbers), waiter())
        if gang is not None:
            promise.gang = gang
        if self.closed:
            promise.fail(ActorDied(f"{name} was called after the system was closed: call and await inside it"))
            return promise
        if host == self.rank:
            cell = self.cells.get(actor)
            context = self._context.copy() if cell is None else cell.context()
            work = serve_local(self, promise, actor, method, args, kwargs)
            promise.task = asyncio.Task(work, loop=self.loop, name=name, context=context)
            self.running.add(promise)
            return promise
        if host in self.lost_hosts:
            promise.set_exception(self._died(host, name))
            return promise
        if is_plain(args) and not kwargs:
            payload: Payload = ((args, kwargs), None)
        else:
            with self.values.lending_to(promise):
                payload = self.codec.encode((args, kwargs), host)
        promise.state = QUEUED
        promise.call_args = (actor, method, payload)
        self.link(host).post(promise)
        return promise

    def cast(self, host: int, actor: ActorId, method: str, *args: Any) -> None:
        """Call a plain method of the runtime's own actors, without a reply.

        To this host itself too it is delivered a tick later, behind all calls and casts that were made before.
        """
        if host == self.rank:
            self.loop.call_soon(self._cast_here, actor, method, args)
        elif host not in self.lost_hosts:
            self.link(host).post((CAST, actor, method, args))

    def context(self) -> contextvars.Context:
        """A fresh context for what runs here on nobody's behalf."""
        return self._context.copy()

    def cancel(self, promise: Promise[Any]) -> None:
        """The caller no longer wants it: stop the call wherever it runs."""
        if promise.state == LOCAL:
            if promise.task is not None:
                self._stop(promise.task)
        else:
            self.post_safely(promise.target, (CANCEL, promise.number))

    def _stop(self, task: asyncio.Task[None]) -> None:
        """Cancel what serves a call; a tick later, for a task cancelled before its first step runs no line of it."""
        self.loop.call_soon(task.cancel)

    def drop(self, owner: int, key: Key) -> None:
        """The last handle of a kept value is gone. May be called by the garbage collector on any thread."""
        if owner == self.rank:
            self.values.drop(key)
        else:
            self.post_safely(owner, (DROP, key))

    def number(self) -> Key:
        """A name for something new on this host, unique in the system."""
        return (self.rank, next(self._numbers))

    def bring(self, promise: Promise[Any]) -> None:
        """Fetch the value of a call that was first thought to stay at its producer."""
        if promise.number in self.sent:
            self.sent[promise.number] = promise
        fetching = self.call(promise.target, SERVICE, "fetch", promise.name, (promise.key,), {})

        def brought(done: asyncio.Future[Any]) -> None:
            if promise.done():
                if not done.cancelled():
                    done.exception()
            elif done.cancelled():
                promise.cancel()
            elif (error := done.exception()) is not None:
                promise.set_exception(error)
            else:
                promise.set_result(done.result())

        fetching.add_done_callback(brought)

    def link(self, host: int) -> Link:
        """The lane to another host, opened at first use."""
        link = self._links.get(host)
        if link is None:
            link = self._links[host] = Link(host, self.transport, self.loop, self._deliver)
            self.transport.watch(host)
        return link

    def own(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine in a task that this host owns: cancelled, and waited for, when the host closes."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # Messages coming in ------------------------------------------------------------------------------------------

    def receive(self, source: int, frame: Frame, respond: Respond) -> None:
        self.link(source).receive(frame, respond)

    def _deliver(self, source: int, message: Message) -> None:
        kind = message[0]
        if kind == REPLY:
            self.codec.arrived(message[3])
            self._settle(message[1], message[2], message[3])
        elif kind == CALL:
            self.codec.arrived(message[4])
            key = (source, message[1])
            if message[5] & KEEP:
                self.values.expect(key)
            self.arrived[source] = message[1]
            call = Call(message[6], source, message[1], message[7], message[8], self.now())
            work = serve(self, call, *message[2:6])
            cell = self.cells.get(message[2])
            context = self._context.copy() if cell is None else cell.context()
            self.serving[key] = asyncio.Task(work, loop=self.loop, name=call.name, context=context)
        elif kind == CAST:  # one tick later, as a call's first step: what was sent after a call must not overtake it
            self.loop.call_soon(self._cast_here, *message[1:])
        elif kind == CANCEL:
            if (task := self.serving.get((source, message[1]))) is not None:
                self._stop(task)
        elif kind == DROP:
            self.values.drop(message[1])
        elif kind == FREE:
            self.values.freed(source, message[1])

    def _cast_here(self, actor: ActorId, method: str, args: tuple[Any, ...]) -> None:
        if not self.closed:
            getattr(self.cells[actor].actor, method)(*args)

    def _settle(self, number: int, status: int, payload: Payload) -> None:
        sent = self.sent.pop(number, None)
        promise = promise_of(sent) if sent is not None else None
        if sent is not None:
            if sent.lends:
                self.values.give_back(sent.lends)
            if sent.finish is not None:
                sent.finish()
        if promise is None or promise.done():
            self.codec.discard(payload)
            if status == ERROR and promise is None and sent is not None:
                self._log_unseen(sent.name, self._read_error(payload))
            return
        if status == OK and len(payload) == 2:  # short atoms
            promise.set_result(payload[0])
        elif status == OK and not self.codec.ready(payload):
            self.own(self._settle_later(promise, payload))
        elif status == OK:
            try:
                promise.set_result(self.codec.decode_now(payload))
            except Exception as error:  # e.g. it is of a class that cannot be imported here
                error.add_note(f"while the result of {promise.name} was read on host {self.rank}")
                promise.set_exception(error)
        elif status == ERROR:
            promise.fail(self._read_error(payload))
        elif status == CANCELLED:
            promise.cancel()

    async def _settle_later(self, promise: Promise[Any], payload: Payload) -> None:
        """A reply whose tensors are still on their way."""
        try:
            value = await self.codec.decode(payload)
        except Exception as error:  # whoever awaits the value must hear of it, whatever went wrong
            if not promise.done():
                promise.set_exception(error)
        else:
            if not promise.done():
                promise.set_result(value)

    def lost(self, host: int, reason: str) -> None:
        """A peer is gone: fail all that stands on it, take back all that it held."""
        if host in self.lost_hosts:
            return
        self.lost_hosts[host] = reason
        if (link := self._links.get(host)) is not None:
            link.kill()
        for number in [n for n, sent in self.sent.items() if sent.target == host]:
            sent = self.sent.pop(number)
            self.values.give_back(sent.lends)
            if sent.finish is not None:
                sent.finish()
            promise = promise_of(sent)
            if promise is not None and not promise.done():
                promise.state = LOCAL
                promise.fail(self._died(host, sent.name))
        for key in [key for key in self.serving if key[0] == host]:
            self._stop(self.serving[key])
        self.values.forget(host)
        for notify in list(self.on_lost):
            notify(host, reason)

    def _died(self, host: int, name: str) -> ActorDied:
        place = self.places.get(host)
        where = f"host {host}" + (f" (pid {place.pid} on {place.node})" if place else "")
        return ActorDied(
            f"{where} died while {name} was pending: {self.lost_hosts.get(host, '')[:200]}. "
            "Look for the first error above or in that process's log; a kill without one is often out-of-memory."
        )

    def cell(self, actor: ActorId, call: Call) -> Cell:
        """The actor that a call is for.

        Raises:
            ActorDied: it is not here, or not any more.
        """
        cell = self.cells.get(actor)
        if cell is None:
            name, _, method = call.name.rpartition(".")
            raise ActorDied(f"{name} on host {self.rank} was closed before {method}() could run")
        return cell

    # The loop and its thread -------------------------------------------------------------------------------------

    def post_safely(self, host: int, message: Message) -> None:
        if host in self.lost_hosts:
            return
        if threading.get_ident() == self.thread:
            self.link(host).post(message)
        else:
            self.soon(lambda: self.link(host).post(message))

    def soon(self, fn: Callable[[], object]) -> None:
        if self.loop.is_closed():
            return
        if threading.get_ident() == self.thread:
            self.loop.call_soon(fn)  # without waking the loop, which is awake
        else:
            self.loop.call_soon_threadsafe(fn)

    def on_loop(self, fn: Callable[[], object]) -> None:
        """Run `fn` on the loop's thread: now if that is this thread, else soon. For the garbage collector's calls."""
        if threading.get_ident() == self.thread and not self.loop.is_closed():
            fn()
        else:
            self.soon(fn)

    # Errors and the end ------------------------------------------------------------------------------------------

    def _read_error(self, payload: Payload) -> BaseException:
        try:
            error: BaseException = self.codec.decode_now(payload)
            return error
        except Exception as error:
            return RemoteError(f"an error arrived that cannot be read here: {error!r}")

    def _log_unseen(self, name: str, error: BaseException) -> None:
        """A call that nobody awaits has failed: say so, as asyncio does for its own futures."""
        if isinstance(error, ActorDied):
            return  # calls that run for as long as their actor lives end like this
        context = {"message": f"{name} failed and nobody awaited it", "exception": error}
        self.loop.call_exception_handler(context)

    def complain(self, message: str, error: BaseException | None = None) -> None:
        """Say what cannot be raised anywhere, as asyncio does."""
        self.loop.call_exception_handler({"message": message} | ({"exception": error} if error else {}))

    async def close(self, graceful: bool = True) -> None:
        """Cancel what still runs, leave the transport, free shared memory."""
        self.closed = True
        await asyncio.sleep(0)  # a task cancelled before its first step settles nothing
        local = [promise.task for promise in self.running if promise.task is not None]
        late = await cancel_all([*self.serving.values(), *local, *self._tasks], LATE)
        if late:
            self.complain(f"{len(late)} tasks of host {self.rank} did not end and are left behind: {late}")
        for link in self._links.values():
            link.kill()
        for sent in self.sent.values():
            promise = promise_of(sent)
            if promise is not None and not promise.done():
                promise.state = LOCAL
                promise.set_exception(ActorDied(f"the system was closed while {sent.name} was pending"))
                promise.exception()
        self.sent.clear()
        await self.transport.close(graceful)
        for leave in self.on_close:
            await leave()
        self.values.close()


__all__ = ["Host"]
