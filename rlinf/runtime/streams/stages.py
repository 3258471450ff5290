"""The two stages that fill a stream from actors: what an async-generator endpoint yields, what a map returns.

Flows in: a call, or the items of a source stream. Flows out: items put into the sink stream's queue. Who wakes whom:
the caller's host starts one stage per rank by an ordinary call; that call's end closes the sink, its failure fails the
sink, and a sink that nobody reads any more cancels it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rlinf.runtime.actor.actor import Cell, show_wait
from rlinf.runtime.base.calls import Call, DeviceLease
from rlinf.runtime.base.errors import ActorDied, QueueClosed, UserError
from rlinf.runtime.streams.channel import QueueHandle
from rlinf.runtime.streams.stream import Consumer, Stream
from rlinf.runtime.values.promise import Promise, holds_promise, resolve

if TYPE_CHECKING:
    from rlinf.runtime.base.calls import Host

DEFAULT_CONCURRENCY = 16
"""Calls at a time and rank in a map over an endpoint without a device; with one, calls go one at a time."""


def drive(host: Host, sink: Stream[Any], calls: Sequence[Promise[Any]], source: Stream[Any] | None = None) -> None:
    """Let these calls fill the stream: closed when all have ended, failed with the first failure.

    Args:
        source: what they consume. What a rank had in hand when it died goes to the others, so its death is a failure
            only when no rank is left. (One that ended well saw the end of the source, and with it the end of all
            work.) A failure reaches those who fill the source as well. It is held from here until the last call ends,
            and by nothing that a traceback might keep.
    """
    queue = sink._owned
    running, finished = len(calls), False

    def fail(error: BaseException) -> None:
        queue.fail(error)
        if source is not None:
            source.handle.fail(error)

    def ended(call: Promise[Any]) -> None:
        nonlocal running, finished, source
        running -= 1
        queue.producers.pop(f"{call.name}#{host.rank}.{call.number}", None)
        if call.cancelled():
            queue.fail(QueueClosed(f"{queue.name} ends unfinished: {call.name} was cancelled"))
        elif (error := call.exception()) is None:
            finished = True
        elif source is None or not isinstance(error, ActorDied) or (running == 0 and not finished):
            fail(error)
        if running == 0:
            queue.close()
            source = None

    for call in calls:
        queue.producers[f"{call.name}#{host.rank}.{call.number}"] = call.cancel
        call.add_done_callback(ended)
    if not calls:
        queue.close()


class Emitter:
    """Puts items into a sink on any host, in order, as many to a message as have gathered.

    At most one message is under way; `put` waits while as many items as the sink holds have gathered behind it.

    Args:
        sink, capacity: the queue, and how many items it holds.
        stays: see `Endpoint.stays`.
    """

    def __init__(self, sink: QueueHandle, capacity: int | None, stays: Callable[[Any], Any] | None = None):
        self._sink, self._stays = sink, stays
        self._window = min(capacity or 1024, 1024)
        self._gathered: deque[tuple[tuple[Any, ...], Callable[[], None] | None]] = deque()
        self._sending = False
        self._moved = asyncio.Event()
        self._error: BaseException | None = None
        self._forgotten: list[Hashable] = []
        self.unbounded = False

    async def put(self, value: Any, id: Hashable = None, done: Callable[[], None] | None = None) -> None:
        """Put an item; `done` is called once the sink has it.

        Raises:
            Exception: the sink's error, when it has failed or was closed.
        """
        if holds_promise(value):
            value = await resolve(value)
        sink = self._sink
        queue = sink.local()
        if queue is not None and queue.has_space:  # as nearly always
            queue.put_nowait(value, id=id, force=True)
            return None if done is None else done()
        start = sink.host.now()
        if queue is not None:
            await queue.put(value, id=id)
            show_wait(sink.host, f"space in {sink.name}", start)
            return None if done is None else done()
        while len(self._gathered) >= self._window and not self.unbounded and self._error is None:
            await self._wait()
        show_wait(sink.host, f"space in {sink.name}", start)
        if self._error is not None:
            raise self._error
        self._gathered.append(((id, *sink.seal(value, self._stays), 1.0, None), done))
        if not self._sending:
            self._sending = True
            sink.host.loop.call_soon(self._send)  # once whoever makes the items has begun with the next

    def forget(self, ids: list[Hashable]) -> None:
        """These ids will not be put again. The sink hears of it with the next items."""
        queue = self._sink.local()
        if queue is not None:
            queue.forget(ids)
        else:
            self._forgotten += ids

    def _send(self) -> None:
        if self._error is not None:
            return
        forgotten, self._forgotten = self._forgotten, []
        gathered, self._gathered = list(self._gathered), deque()
        sink = self._sink
        sending = sink._call("queue_put", sink.id, [item for item, _ in gathered], sink.plain, forgotten)
        sending.add_done_callback(lambda sent: self._sent(sent, [done for _, done in gathered]))

    def _sent(self, sent: Promise[Any], dones: list[Callable[[], None] | None]) -> None:
        self._sending = False
        if sent.cancelled():
            self._fail(QueueClosed(f"{self._sink.name} was not reached: {sent.name} was cancelled"))
        elif (error := sent.exception()) is not None:
            self._fail(error)
        else:
            for done in dones:
                if done is not None:
                    done()
            if self._gathered:
                self._sending = True
                self._send()
        self._moved.set()

    def stop(self) -> None:
        """Send nothing more: what has gathered is dropped. What is on its way arrives."""
        if self._error is None:
            self._fail(QueueClosed(f"{self._sink.name} gets no more items of a stage that has failed"))

    def _fail(self, error: BaseException) -> None:
        self._error = error
        for (_, _, ref, _, _), _ in self._gathered:
            if ref is not None:  # nobody will ever ask for it
                self._sink.host.drop(ref.owner, ref.key)
        self._gathered.clear()

    async def _wait(self) -> None:
        self._moved.clear()
        await self._moved.wait()

    async def flush(self) -> None:
        """Wait until the sink has everything."""
        while self._sending and self._error is None:
            await self._wait()
        if self._error is not None:
            raise self._error

    def release_bound(self) -> None:
        """Others wait for the device this stage holds: do not wait for the sink any more."""
        self.unbounded = True
        self._sink._cast("release_bound")
        self._moved.set()


async def generate(
    cell: Cell, method: str, emitter: Emitter, args: Any, kwargs: Any, lease: DeviceLease | None = None
) -> None:
    """Run an async-generator endpoint and put what it yields into the sink."""
    if lease is not None:
        lease.puts = True
    items: AsyncIterator[Any] = getattr(cell.actor, method)(*args, **kwargs)
    async with aclosing(items):  # type: ignore[type-var]
        async for item in items:
            await emitter.put(item)
            if lease is not None:
                lease.done(1)
                await lease.offer()
                await lease.resume()


@dataclass(frozen=True, slots=True)
class MapWorker:
    """One worker's loop: take, call, emit, acknowledge. Consumes the source; unblocked by its items or its end."""

    cell: Cell
    method: str
    source: Stream[Any]
    emitter: Emitter
    batch: int | None
    kwargs: dict[str, Any]
    streams: bool

    async def run(self, call: Call) -> None:
        consumer: Consumer[Any] = Consumer(self.source, prefetch=True, most=self.batch or 1)
        try:
            while batch := await consumer.take(acknowledge=False):
                if ids := consumer.forgotten():
                    self.emitter.forget(ids)
                if call.lease is None:
                    await self._one(call, consumer, batch)
                    continue
                async with call.lease.use(len(batch), consumer.look):
                    await self._one(call, consumer, batch)
        except BaseException:
            self.emitter.stop()  # before others get what is given back here
            raise
        finally:
            consumer.give_back()

    async def _one(self, call: Call, consumer: Consumer[Any], items: list[tuple[Hashable, Any]]) -> None:
        host = self.cell.host
        values = [value for _, value in items]
        argument = values if self.batch else values[0]
        start = host.now()
        method = getattr(self.cell.actor, self.method)
        self.cell.under_way[entry := object()] = ("item", self.method, call.label, start)
        try:
            if self.streams:
                await self._emit_all(consumer, items, method(argument, **self.kwargs))
            else:
                result = await method(argument, **self.kwargs)
        finally:
            del self.cell.under_way[entry]
        host.tracer.span("item", self.cell.name, self.method, call.label, start, host.now())
        if self.streams:
            return
        results = result if self.batch else [result]
        if self.batch and (not isinstance(result, (list, tuple)) or len(result) != len(items)):
            what = f"{len(result)}" if isinstance(result, (list, tuple)) else f"a {type(result).__name__}"
            raise UserError(
                f"{call.name} was mapped with batch={self.batch}: it gets a list of {len(items)} items and must "
                f"return a list of as many results, but returned {what}"
            )
        for (id, _), value in zip(items, results, strict=True):
            await self.emitter.put(value, id, partial(consumer.ack, [id], [id]))

    async def _emit_all(
        self, consumer: Consumer[Any], inputs: list[tuple[Hashable, Any]], items: AsyncIterator[Any]
    ) -> None:
        """A generator endpoint may make any number of items of one; their ids say of which one, and which of it.

        So what it makes again, after a death, counts once. Of a batch that is so if it is made up as before, which
        it is as long as all of it comes back together.
        """
        source = tuple(id for id, _ in inputs)
        outputs: list[Hashable] = []
        async with aclosing(items):  # type: ignore[type-var]
            async for item in items:
                outputs.append((source, len(outputs)))
                await self.emitter.put(item, outputs[-1])
        await self.emitter.flush()
        consumer.ack(list(source), outputs)
