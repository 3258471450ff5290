"""Streams: many values in order of completion, between any actors.

Flows in: what an async-generator endpoint yields or a map stage returns. Flows out: the items, each to exactly one of
the consumers that compete for them. Who wakes whom: see `queue.py`; the stages that fill a stream are in `stages.py`.

The host that made a stream holds its queue; the handle there is its owner: when the owner is dropped or closed, the
stages that feed the stream are cancelled, and theirs in turn.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from . import transforms
from .actor import current_call
from .channel import QueueHandle
from .context import current_host
from .payload import reading_codec
from .promise import Promise
from .queue import ItemQueue, Taken

if TYPE_CHECKING:
    from .host import Host

T = TypeVar("T")

CAPACITY = 256
"""Items that may wait in a stream before its producers pause. A producer whose device others wait for does not pause:
it must be able to finish."""
WINDOW = 64
"""Items that a lone consumer on another host asks for at a time, so that small items do not cost a round trip each."""

SHOWN_WAIT = 1e-3
"""Seconds; shorter waits for an item are not worth a span."""


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

    def __init__(self, handle: QueueHandle, queue: ItemQueue | None = None):
        self.handle = handle
        self._queue = queue
        self._first: Consumer[T] | None = None

    # Making ------------------------------------------------------------------------------------------------------

    @staticmethod
    def of(items: Iterable[Any] | AsyncIterable[Any], *, name: str = "stream") -> Stream[Any]:
        """A stream of the items of an iterable or async iterable, read as they are consumed."""
        host = current_host()
        stream: Stream[Any] = Stream.new(host, name)
        assert stream._queue is not None
        if isinstance(items, Sequence):
            for item in items:
                stream._queue.put_nowait(item, force=True)
            stream._queue.close()
        else:
            transforms.run(host, transforms.feed(items, stream._queue), stream._queue, f"{name} source")
        return stream

    @staticmethod
    def new(host: Host, name: str, capacity: int | None = CAPACITY) -> Stream[Any]:
        """An empty stream owned by `host`; the runtime's stages fill it."""
        key = host.number()
        queue = ItemQueue(f"{name}@{key[0]}.{key[1]}", capacity)
        host.queues[key] = queue
        host.adopt(queue)
        return Stream(QueueHandle(host, host.rank, key, queue.name), queue)

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
            return self._stage("batch", lambda source, sink: transforms.batch(source, sink, n))
        assert weight is not None and limit is not None
        return self._stage("batch", lambda source, sink: transforms.batch_by_weight(source, sink, weight, limit))

    def take(self, n: int) -> Stream[T]:
        """The first `n` items; then whoever feeds the stream is stopped."""
        return self._stage("take", lambda source, sink: transforms.take(source, sink, n))

    def tee(self, n: int = 2) -> tuple[Stream[T], ...]:
        """`n` streams that each get every item."""
        host = self.handle.host
        sinks: list[Stream[T]] = [Stream.new(host, f"tee of {self.name}", None) for _ in range(n)]
        queues = [sink._owned for sink in sinks]
        transforms.run(host, transforms.tee(self._source(), queues), queues[0], f"tee of {self.name}", *queues[1:])
        return tuple(sinks)

    def deal(self, n: int, *, weight: Callable[[T], float] | None = None, pad: Any = None) -> tuple[Stream[T], ...]:
        """`n` streams of equal length, balanced by weight, for consumers that must work in step.

        Items are dealt in rounds of `n`, the heaviest of a round to the stream that has received least so far. In the
        last round, streams that would get nothing get `pad`.
        """
        host = self.handle.host
        sinks: list[Stream[T]] = [Stream.new(host, f"deal of {self.name}", None) for _ in range(n)]
        queues = [sink._owned for sink in sinks]
        transforms.run(
            host, transforms.deal(self._source(), queues, weight, pad), queues[0], f"deal of {self.name}", *queues[1:]
        )
        return tuple(sinks)

    def _stage(self, name: str, run: Callable[[Consumer[Any], ItemQueue], Any]) -> Stream[Any]:
        sink: Stream[Any] = Stream.new(self.handle.host, f"{name} of {self.name}")
        transforms.run(self.handle.host, run(self._source(), sink._owned), sink._owned, f"{name} of {self.name}")
        return sink

    def _source(self) -> Consumer[Any]:
        return Consumer(self, prefetch=False)

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

    def live_on(self) -> None:
        """Its owner hands it out as a result: keep the queue until it is used up."""
        queue = self._queue
        if queue is not None:
            host, self._queue = self.handle.host, None
            host.held.add(queue)
            queue.on_end.append(lambda: host.held.discard(queue))

    def __lend__(self, pickler: Any) -> Any:
        if self._queue is not None:
            pickler.hold(self)
        return _arrived, (self.handle,)

    def __reduce__(self) -> Any:
        return _arrived, (self.handle,)

    def __del__(self) -> None:
        queue = getattr(self, "_queue", None)
        if queue is not None:
            self.handle.host.on_loop(queue.abandon)

    def __repr__(self) -> str:
        return f"<Stream {self.name}>"


def _arrived(handle: QueueHandle) -> Stream[Any]:
    codec = reading_codec()
    assert codec is not None
    return Stream(handle)


class Consumer(AsyncIterator[T]):
    """One consumer of a stream: takes items, and acknowledges each when it asks for the next.

    Args:
        prefetch: ask for items ahead while there are more than other consumers need.
        most: items to take at a time (`take`); fewer only at the end of the stream.
    """

    def __init__(self, stream: Stream[T], *, prefetch: bool, most: int = 1, weak: bool = False):
        self._stream = None if weak else stream
        self._handle = stream.handle
        self._token = stream.handle.host.number()
        self._ready: deque[tuple[Hashable, T]] = deque()
        self._last: list[Hashable] = []
        self._prefetch = prefetch
        self.most = most
        self._ahead: Promise[Taken] | None = None
        self._ended = False

    def __aiter__(self) -> Consumer[T]:
        return self

    async def __anext__(self) -> T:
        taken = await self.take()
        if not taken:
            raise StopAsyncIteration
        return taken[0][1]

    @property
    def at_hand(self) -> bool:
        """Whether the next `take` would not wait."""
        return len(self._ready) >= self.most

    async def take(self, *, acknowledge: bool = True) -> list[tuple[Hashable, T]]:
        """The next (id, item) pairs, as many as `most`; [] at the end of the stream.

        Args:
            acknowledge: what was taken before is done. Otherwise the caller acknowledges each by `ack`.
        """
        if acknowledge and self._last:
            self.ack(self._last)
            self._last = []
        if len(self._ready) < self.most and not self._ended:
            await self._fetch()
        taken = [self._ready.popleft() for _ in range(min(self.most, len(self._ready)))]
        if acknowledge:
            self._last = [id for id, _ in taken]
        self._look_ahead()
        return taken

    async def _fetch(self) -> None:
        handle, ahead = self._handle, self._ahead
        start = handle.host.now()
        try:
            if ahead is not None:
                self._ahead = None
                if not ahead.done():
                    handle.insist(self._token)
                opened = await handle.open(await ahead)
            else:
                opened = await handle.take(self._token, self.most, least=self.most)
        except asyncio.CancelledError:
            handle.requeue(self._token)
            raise
        self._ended = not opened
        self._ready.extend(opened)
        waited, call = handle.host.now() - start, current_call.get()
        if call is not None and waited > SHOWN_WAIT:
            handle.host.tracer.span(call.name.rpartition(".")[0], f"wait for {handle.name}", start, start + waited)

    def _look_ahead(self) -> None:
        """Ask for more while working on what there is, if the stream lives elsewhere and has items to spare."""
        handle = self._handle
        if not self._prefetch or self._ended or self._ahead is not None or handle.owner == handle.host.rank:
            return
        if len(self._ready) < max(self.most, WINDOW // 4):
            wishes = {"least": self.most, "spare": True}
            most = max(self.most, WINDOW if self.most == 1 else self.most)
            self._ahead = handle._call("queue_take", handle.id, self._token, most, wishes)
            self._ahead.want()

    def ack(self, ids: Iterable[Hashable]) -> None:
        """These items are done."""
        self._handle.ack(self._token, list(ids))

    def leave(self) -> None:
        """Stop consuming: the item in hand counts as done, those taken ahead go back to the stream."""
        if self._ahead is not None:
            self._ahead.cancel()
            self._ahead = None
        if self._last:
            self._handle.ack(self._token, self._last)
            self._last = []
        self._ready.clear()
        self._handle.requeue(self._token)

    def give_back(self) -> None:
        """Stop consuming: everything not acknowledged goes back to the stream."""
        self._last = []
        self.leave()

    def __del__(self) -> None:
        handle = self._handle
        if self._last or self._ready or self._ahead is not None:
            if threading.get_ident() == handle.host.thread and not handle.host.loop.is_closed():
                self.leave()
            else:
                token, last = self._token, self._last
                handle.host.on_loop(lambda: (handle.ack(token, last), handle.requeue(token)))
