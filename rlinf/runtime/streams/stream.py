"""Streams: many values in order of completion, between any actors.

Flows in: what an async-generator endpoint yields or a map stage returns. Flows out: the items, each to exactly one of
the consumers that compete for them. Who wakes whom: see `item_queue.py`; `stages.py` has what fills a stream.

The host that made a stream has its queue. When the last handle that holds the stream is dropped (that of its maker, or
of whoever got it as a result), or any is closed, the stages that feed the stream are cancelled, and theirs in turn.

What streams become on their owner's host: batches, first items, copies, shares.

Flows in: a consumer of a stream. Flows out: items in one or more queues, which close with the source. Each is a task of
the host: it ends with its source, fails its sinks when it fails, and is cancelled when nobody reads them any more. Who
wakes whom: an item at the source wakes the stage; space in a sink lets it go on.

Plain batches, copies and shares pass items on unread; weights are computed here, so those items are opened here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from rlinf.runtime.base.calls import Call, current_call, current_host, here, waiter
from rlinf.runtime.base.errors import QueueClosed
from rlinf.runtime.observe.dataflow import Origin
from rlinf.runtime.streams.channel import QueueHandle, queues_of
from rlinf.runtime.streams.consumer import Consumer
from rlinf.runtime.streams.item_queue import ItemQueue

if TYPE_CHECKING:
    from rlinf.runtime.actor.host import Host


def run(
    host: Host,
    work: Callable[[], Coroutine[Any, Any, None]],
    sinks: Sequence[ItemQueue],
    name: str,
    source: Consumer[Any] | None = None,
) -> None:
    """Run what fills queues, in a task of the host; they close when it ends and fail when it fails.

    Args:
        source: what it consumes; left when it ends.
    """
    call = Call(name, host.rank, host.number()[1], waiter(), None, host.now())
    call.helps(current_call.get())

    async def stage() -> None:
        current_call.set(call)  # whose waits these are, for the stall report
        try:
            await work()
        except asyncio.CancelledError:
            for queue in sinks:
                queue.fail(QueueClosed(f"{queue.name}: its source {name} was cancelled"))
            raise
        except BaseException as error:  # it belongs to whoever consumes the stream
            for queue in sinks:
                queue.fail(error)
        else:
            for queue in sinks:
                queue.close()
        finally:
            for queue in sinks:
                queue.producers.pop(call.label, None)
            if source is not None:
                source.close()

    def stop_unless_used() -> None:
        if all(queue.error is not None for queue in sinks):
            task.cancel()

    task = host.own(stage())
    for queue in sinks:
        queue.producers[call.label] = stop_unless_used


async def feed(items: Any, sink: ItemQueue) -> None:
    if not isinstance(items, AsyncIterable):
        for item in items:
            await sink.put(item, name=waiter())
        return
    async with contextlib.AsyncExitStack() as stack:
        if isinstance(items, AsyncGenerator):
            await stack.enter_async_context(aclosing(items))
        async for item in items:
            await sink.put(item, name=waiter())


async def batch(source: Consumer[Any], sink: ItemQueue, n: int) -> None:
    source.most = n
    while taken := await source.take():
        await sink.put([value for _, value in taken], name=waiter())


async def batch_by_weight(source: Consumer[Any], sink: ItemQueue, weight: Callable[[Any], float], limit: float) -> None:
    gathered: list[Any] = []
    total = 0.0
    while taken := await source.take():
        item = taken[0][1]
        heavy = weight(item)
        if gathered and total + heavy > limit:
            await sink.put(gathered, name=waiter())
            gathered, total = [], 0.0
        gathered.append(item)
        total += heavy
    if gathered:
        await sink.put(gathered, name=waiter())


async def take(source: Consumer[Any], sink: ItemQueue, n: int) -> None:
    for _ in range(n):
        taken = await source.take()
        if not taken:
            return
        await sink.put(taken[0][1], name=waiter())
    source.leave()
    source.abandon()  # whoever else holds the stream


async def tee(source: Consumer[Any], sinks: Sequence[ItemQueue]) -> None:
    while taken := await source.take():
        for sink in sinks:
            _put(sink, taken[0][1])
        await _space_in_any(sinks)


async def deal(
    source: Consumer[Any], sinks: Sequence[ItemQueue], weight: Callable[[Any], float] | None, pad: Any
) -> None:
    source.most = len(sinks)
    dealt = [0.0] * len(sinks)
    while taken := await source.take():
        weighed = sorted(
            ((weight(v) if weight else 1.0, i) for i, (_, v) in enumerate(taken)), key=lambda w: (-w[0], w[1])
        )
        lightest_first = sorted(range(len(sinks)), key=lambda i: (dealt[i], i))
        for position, sink in enumerate(lightest_first):
            if position < len(weighed):
                heavy, index = weighed[position]
                dealt[sink] += heavy
                _put(sinks[sink], taken[index][1])
            else:
                _put(sinks[sink], pad)
        await _space_in_any(sinks)


def _put(sink: ItemQueue, item: Any) -> None:
    """Put into one of several sinks: those that nobody reads any more are passed over."""
    with contextlib.suppress(QueueClosed):
        sink.put_nowait(item, force=True)


async def _space_in_any(sinks: Sequence[ItemQueue]) -> None:
    """Wait until somebody needs more, so that the stage runs ahead of its slowest reader only as far as its fastest."""
    used = [sink for sink in sinks if sink.error is None]
    if not used or any(sink.has_space for sink in used):
        return
    waits = [asyncio.ensure_future(sink.space(waiter())) for sink in used]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


__all__ = ["CAPACITY", "Consumer", "Stream"]

T = TypeVar("T")

CAPACITY = 256
"""Items that may wait in a stream before its producers pause. A producer whose device others wait for does not pause:
it must be able to finish."""


class Stream(Generic[T]):
    """Many values to come, in order of completion. Iterate it, transform it, or pass it to any actor.

    Several consumers compete: each item goes to one of them, and comes back if that one dies before it asks for the
    next. Leaving a loop early leaves the rest to others; dropping or closing the stream stops who fills it.

    Example:
        >>> import asyncio
        >>> from rlinf import ActorSystem
        >>> async def main():
        ...     async with ActorSystem.local():
        ...         return await Stream.of([3, 1, 2]).batch(2).collect()
        >>> asyncio.run(main())
        [[3, 1], [2]]
    """

    __readable__ = True
    """A device call that takes one asks for its devices when items are at hand."""

    def __init__(self, handle: QueueHandle, queue: ItemQueue | None = None, *, holds: bool = False):
        self.handle = handle
        self._queue = queue
        """For its maker, the queue itself."""
        self._holds = holds
        """For whoever got it as a result: the stream lives at least as long as this object."""
        self._first: Consumer[T] | None = None

    # Making ------------------------------------------------------------------------------------------------------

    @staticmethod
    def of(items: Iterable[Any] | AsyncIterable[Any], *, name: str = "stream") -> Stream[Any]:
        """A stream of the items of an iterable or async iterable, read as they are consumed.

        Raises:
            TypeError: it is not iterable.
        """
        if hasattr(type(items), "__promised__"):
            raise TypeError(f"{items!r} is one value to come and no stream: await it and take the stream of its items")
        host = cast("Host", current_host())
        stream: Stream[Any] = Stream.new(host, name)
        queue = stream._owned
        if isinstance(items, (list, tuple)):
            for item in items:
                queue.put_nowait(item, force=True)
            queue.close()
        else:
            source = items if isinstance(items, AsyncIterable) else iter(items)
            run(host, lambda: feed(source, queue), [queue], f"source of {queue.name}")
        return stream

    @staticmethod
    def new(host: Host, name: str, capacity: int | None = CAPACITY, origin: str | Origin | None = None) -> Stream[Any]:
        """An empty stream owned by `host`; the runtime's stages fill it.

        Args:
            origin: the endpoint that makes its items; or, if they only pass through, where they come from. None: the
                running code makes them.
        """
        key = host.number()
        queue = ItemQueue(f"{name}@{key[0]}.{key[1]}", capacity)
        if not isinstance(origin, tuple):
            origin = (origin or here(current_call.get()), key, 0)
            queue.counter = host.flows.counter(origin)
        queues_of(host).add(key, queue, scoped=True)
        queue.hold(1)
        return Stream(QueueHandle(host, host.rank, key, queue.name, capacity, origin), queue)

    # Consuming ---------------------------------------------------------------------------------------------------

    def __aiter__(self) -> Consumer[T]:
        return Consumer(self, prefetch=True)

    async def __anext__(self) -> T:
        if self._first is None:
            self._first = Consumer(self, prefetch=False, weak=True)
        return await self._first.__anext__()

    async def collect(self) -> list[T]:
        """All items, as a list."""
        return [item async for item in self]

    async def close(self) -> None:
        """Stop here: what is left is dropped and the stages that feed the stream are cancelled."""
        self.handle.abandon()

    # Transforming ------------------------------------------------------------------------------------------------

    def batch(
        self, n: int | None = None, *, weight: Callable[[T], float] | None = None, limit: float | None = None
    ) -> Stream[list[T]]:
        """Lists of `n` items; or of as many as weigh at most `limit` together. The last one may be smaller.

        Args:
            n: items per list.
            weight, limit: the weight of an item, and the most that a list may weigh. An item heavier than the limit
                makes a list of its own.
        """
        if (n is None) == (weight is None or limit is None):
            raise ValueError("batch takes either a number of items, or weight= and limit=")
        if n is not None and n < 1:
            raise ValueError(f"batch needs at least one item per list, got {n}")
        if n is not None:
            (lists,) = self._stage("batch", 1, lambda source, sinks: batch(source, sinks[0], n))
            return lists
        assert weight is not None
        assert limit is not None

        def by_weight(source: Consumer[Any], sinks: Sequence[ItemQueue]) -> Coroutine[Any, Any, None]:
            return batch_by_weight(source, sinks[0], weight, limit)

        (lists,) = self._stage("batch", 1, by_weight, unread=False)
        return lists

    def take(self, n: int) -> Stream[T]:
        """The first `n` items; then whoever feeds the stream is stopped."""
        if n < 0:
            raise ValueError(f"take needs a number of items, got {n}")
        (first,) = self._stage("take", 1, lambda source, sinks: take(source, sinks[0], n))
        return first

    def tee(self, n: int = 2) -> tuple[Stream[T], ...]:
        """`n` streams that each get every item. Items wait for the slowest; the fastest decides how many are made."""
        if n < 1:
            raise ValueError(f"tee needs at least one stream, got {n}")
        return self._stage("tee", n, tee)

    def deal(self, n: int, *, weight: Callable[[T], float] | None = None, pad: Any = None) -> tuple[Stream[T], ...]:
        """`n` streams of equal length, balanced by weight, for consumers that must work in step.

        Items are dealt in rounds of `n`, the heaviest of a round to the stream that has received least so far. In the
        last round, streams that would get nothing get `pad`.
        """
        if n < 1:
            raise ValueError(f"deal needs at least one stream, got {n}")
        return self._stage("deal", n, lambda source, sinks: deal(source, sinks, weight, pad), unread=weight is None)

    def _stage(
        self,
        name: str,
        n: int,
        work: Callable[[Consumer[Any], Sequence[ItemQueue]], Coroutine[Any, Any, None]],
        *,
        unread: bool = True,
    ) -> tuple[Stream[Any], ...]:
        """`n` streams that a task fills from this one.

        Args:
            unread: it only passes items on, so they need not be opened on the way.
        """
        host = self.handle.host
        origin = self.handle.origin
        if name == "batch" and origin is not None:
            origin = (*origin[:2], origin[2] + 1)
        name = f"{name} of {self.name}"
        sinks: list[Stream[Any]] = [Stream.new(host, name, origin=origin) for _ in range(n)]
        queues = [sink._owned for sink in sinks]
        source: Consumer[Any] = Consumer(self, prefetch=True, unread=unread, passing=True)
        run(host, lambda: work(source, queues), queues, name, source)
        return tuple(sinks)

    # Handles -----------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """What it carries and where it was made, e.g. "rollout.generate@0.12"."""
        return self.handle.name

    @property
    def _owned(self) -> ItemQueue:
        assert self._queue is not None
        return self._queue

    async def statistics(self) -> dict[str, Any]:
        """Counts of items by state, and who waits since when."""
        queue = self.handle.local()
        if queue is not None:
            return queue.statistics()
        result: dict[str, Any] = await self.handle._call("queue_statistics", self.handle.id)
        return result

    def __lend__(self, pickler: Any) -> Any:
        return _arrived, (self.handle, pickler.hold(self))

    def __reduce__(self) -> Any:
        raise TypeError(f"{self.name}: a stream can only be sent to actors")

    def __del__(self) -> None:
        queue, handle = self._queue, self.handle
        if queue is not None:
            handle.host.on_loop(lambda: queue.hold(-1))
        elif self._holds:
            handle.host.on_loop(lambda: handle.hold(-1))

    def __repr__(self) -> str:
        return f"<Stream {self.name}>"


def _arrived(handle: QueueHandle, holds: bool) -> Stream[Any]:
    return Stream(handle, holds=holds)


def each(items: Iterable[T] | AsyncIterable[T]) -> AsyncIterator[T]:
    """The items of a list, a generator or a stream, as they come, for `async for`.

    A stream is handed out as itself: whoever stops half way lets go of it at once.
    """
    return aiter(items) if isinstance(items, AsyncIterable) else _plain(items)


async def _plain(items: Iterable[T]) -> AsyncIterator[T]:
    for item in items:
        yield item
