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
from rlinf.runtime.actor.dispatch import FirstSteps, serve, serve_local
from rlinf.runtime.base.calls import FLOW, SERVICE, ActorId, Call, Gang, Key, current_call, task_of
from rlinf.runtime.base.clock import is_virtual
from rlinf.runtime.base.errors import ActorDied, RemoteError
from rlinf.runtime.base.tasks import cancel_all, mark_seen
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
    PLAIN,
    REPLIES,
    REPLY,
    Frame,
    Link,
    Message,
    Respond,
    Transport,
)
from rlinf.runtime.values.codec import Payload, Place
from rlinf.runtime.values.object_store import Values
from rlinf.runtime.values.pickler import NUMBERS, is_plain
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
        """Farewells to all else that this process belongs to, once nothing of the system runs in it any more."""
        self._links: dict[int, Link] = {}
        self._numbers = itertools.count(1)
        self._context = contextvars.copy_context()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._first_steps = FirstSteps(self.loop)
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
        running = current_call.get()
        parent, own = (FLOW, self.flow) if running is None else (running._label or running.label, running.task)
        if own is not None and (task := task_of(self.loop)) is not own and task is not None:
            parent = f"{parent}/{task.get_name()}"
        number = next(self._numbers)
        promise: Promise[Any] = Promise(loop=self.loop)
        promise.host, promise.name, promise.number = self, name, number
        promise.parent, promise.since, promise.target = parent, self.now(), host
        if gang is not None:
            promise.gang = gang
        if self.closed:
            promise.fail(ActorDied(f"{name} was called after the system was closed: call and await inside it"))
        elif host == self.rank:
            self.running.add(promise)
            self.loop.call_soon(self._begin_here, promise, actor, method, args, kwargs)
        elif host in self.lost_hosts:
            promise.set_exception(self._died(host, name))
        else:
            link = self._links.get(host) or self.link(host)
            payload: Any = args
            flags = PLAIN
            if kwargs or not (NUMBERS.issuperset(map(type, args)) or is_plain(args)):
                flags = 0
                with self.values.lending_to(promise):
                    payload = self.codec.encode((args, kwargs), host)
            endpoint = (actor, method, name)
            index: Any = link.numbers.get(endpoint)
            if index is None:
                index = link.introduce(endpoint)
            promise.state = QUEUED
            promise.message = message = [CALL, number, index, payload, flags, parent, gang]
            self.sent[number] = promise
            link.post(message)
        return promise

    def _begin_here(self, promise: Promise[Any], actor: ActorId, method: str, args: Any, kwargs: Any) -> None:
        call = Call(promise.name, self.rank, promise.number, promise.parent, promise.gang, self.now())
        call.promise = promise
        work = serve_local(self, call, promise, actor, method, args, kwargs)
        cell = self.cells.get(actor)
        task = self._first_steps.run(work, call, self._context if cell is None else cell.context())
        if task is not None:
            promise.task = task
            if promise.done():  # nobody wants it any more
                task.cancel()

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
        if promise.state != LOCAL:
            self.post_safely(promise.target, (CANCEL, promise.number))
        elif promise.task is not None:
            promise.task.cancel()

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
                mark_seen(done)
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
            link = self._links[host] = Link(host, self.transport, self)
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
        (self._links.get(source) or self.link(source)).receive(frame, respond)

    def leaves_unawaited(self, message: list[Any]) -> None:
        """The message of a call is about to leave, and nobody awaits the call's value."""
        promise = self.sent[message[1]]
        assert isinstance(promise, Promise)
        promise.leave_unawaited()

    def deliver(self, link: Link, message: Message) -> None:
        """Take a message from a peer: begin a call, settle a promise."""
        kind, source = message[0], link.peer
        if kind == REPLIES:
            for number, value in zip(message[1], message[2], strict=True):
                promise = self._over(number)
                if promise is not None and not promise.done():
                    promise.set_result(value)
        elif kind == CALL:
            _, number, endpoint, payload, flags, parent, gang = message
            if type(endpoint) is tuple:
                link.endpoints[endpoint[0]] = endpoint = endpoint[1:]
            else:
                endpoint = link.endpoints[endpoint]
            actor, method, name = endpoint
            if flags & KEEP:
                self.values.expect((source, number))
            self.arrived[source] = number
            if not flags & PLAIN:
                self.codec.arrived(payload)
            call = Call(name, source, number, parent, gang, self.now())
            work = serve(self, link, call, actor, method, payload, flags)
            cell = self.cells.get(actor)
            task = self._first_steps.run(work, call, self._context if cell is None else cell.context())
            if task is not None:
                self.serving[source, number] = task
        elif kind == REPLY:
            self.codec.arrived(message[3])
            self._settle(*message[1:])
        elif kind == CAST:
            self._cast_here(*message[1:])
        elif kind == CANCEL:
            if (task := self.serving.get((source, message[1]))) is not None:
                task.cancel()
        elif kind == DROP:
            self.values.drop(message[1])
        elif kind == FREE:
            self.values.freed(source, message[1])

    def _cast_here(self, actor: ActorId, method: str, args: tuple[Any, ...]) -> None:
        if not self.closed:
            getattr(self.cells[actor].actor, method)(*args)

    def _over(self, number: int) -> Promise[Any] | None:
        """A call to another host has its reply; return its promise, if anybody still has it."""
        sent = self.sent.pop(number, None)
        if sent is None:
            return None
        if sent.lends:
            self.values.give_back(sent.lends)
        if sent.ref is not None:
            sent.ref._load -= 1
        return promise_of(sent)

    def _settle(self, number: int, status: int, payload: Payload) -> None:
        sent = self.sent.get(number)
        promise = self._over(number)
        if promise is None or promise.done():
            self.codec.discard(payload)
            if status == ERROR and promise is None and sent is not None:
                self._log_unseen(sent.name, self._read_error(payload))
            return
        if status == OK and not self.codec.ready(payload):
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
            sent = self.sent[number]
            promise = self._over(number)
            if sent.ref is not None and sent.gang is not None:  # it cannot say so itself
                self.system.leases.rank_over(sent.gang, sent.ref._name)
            if promise is not None and not promise.done():
                promise.state = LOCAL
                promise.fail(self._died(host, sent.name))
        for key in [key for key in self.serving if key[0] == host]:
            self.serving[key].cancel()
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
        if host not in self.lost_hosts:
            self.on_loop(lambda: self.link(host).post(message))

    def soon(self, fn: Callable[[], object]) -> None:
        if not self.loop.is_closed():
            awake = threading.get_ident() == self.thread  # the loop need not be woken
            (self.loop.call_soon if awake else self.loop.call_soon_threadsafe)(fn)

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
        if not isinstance(error, ActorDied):  # calls that run for as long as their actor lives end like this
            self.complain(f"{name} failed and nobody awaited it", error)

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
        self._first_steps.close()
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
