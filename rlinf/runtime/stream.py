"""Streams: many values in order of completion, between any actors.

Flows in: what an async-generator endpoint yields or a map stage returns. Flows out: the items, each to exactly one of
the consumers that compete for them. Who wakes whom: see `queue.py`; the stages that fill a stream are in `stages.py`.

The host that made a stream has its queue. When the last handle that holds the stream is dropped (that of its maker, or
of whoever got it as a result), or any is closed, the stages that feed the stream are cancelled, and theirs in turn.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from . import transforms
from .actor import current_call
from .channel import QueueHandle
from .context import current_host, show_wait
from .queue import ItemQueue, Taken, Token

if TYPE_CHECKING:
    from .host import Host

T = TypeVar("T")

CAPACITY = 256
"""Items that may wait in a stream before its producers pause. A producer whose device others wait for does not pause:
it must be able to finish."""
WINDOW = 64
"""The most items that a consumer on another host asks for ahead, so that small items do not cost a round trip each."""
AHEAD_SECONDS = 2e-3
"""A consumer asks ahead for what it works off in this time (about ten round trips): what it has, others cannot take."""
NOT_AHEAD_SECONDS = 0.1
"""Beside items that take longer than this a round trip does not count, but an item in the wrong hands does."""


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
        host = current_host()
        stream: Stream[Any] = Stream.new(host, name)
        queue = stream._owned
        if isinstance(items, (list, tuple)):
            for item in items:
                queue.put_nowait(item, force=True)
            queue.close()
        else:
            source = items if isinstance(items, AsyncIterable) else iter(items)
            transforms.run(host, lambda: transforms.feed(source, queue), [queue], f"source of {queue.name}")
        return stream

    @staticmethod
    def new(host: Host, name: str, capacity: int | None = CAPACITY) -> Stream[Any]:
        """An empty stream owned by `host`; the runtime's stages fill it."""
        key = host.number()
        queue = ItemQueue(f"{name}@{key[0]}.{key[1]}", capacity)
        host.queues[key] = queue
        host.adopt(queue)
        queue.hold(1)
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
            (lists,) = self._stage("batch", 1, lambda source, sinks: transforms.batch(source, sinks[0], n))
            return lists
        assert weight is not None
        assert limit is not None

        def by_weight(source: Consumer[Any], sinks: Sequence[ItemQueue]) -> Coroutine[Any, Any, None]:
            return transforms.batch_by_weight(source, sinks[0], weight, limit)

        (lists,) = self._stage("batch", 1, by_weight, unread=False)
        return lists

    def take(self, n: int) -> Stream[T]:
        """The first `n` items; then whoever feeds the stream is stopped."""
        if n < 0:
            raise ValueError(f"take needs a number of items, got {n}")
        (first,) = self._stage("take", 1, lambda source, sinks: transforms.take(source, sinks[0], n))
        return first

    def tee(self, n: int = 2) -> tuple[Stream[T], ...]:
        """`n` streams that each get every item. Items wait for the slowest; the fastest decides how many are made."""
        if n < 1:
            raise ValueError(f"tee needs at least one stream, got {n}")
        return self._stage("tee", n, transforms.tee)

    def deal(self, n: int, *, weight: Callable[[T], float] | None = None, pad: Any = None) -> tuple[Stream[T], ...]:
        """`n` streams of equal length, balanced by weight, for consumers that must work in step.

        Items are dealt in rounds of `n`, the heaviest of a round to the stream that has received least so far. In the
        last round, streams that would get nothing get `pad`.
        """
        if n < 1:
            raise ValueError(f"deal needs at least one stream, got {n}")
        return self._stage(
            "deal", n, lambda source, sinks: transforms.deal(source, sinks, weight, pad), unread=weight is None
        )

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
        name = f"{name} of {self.name}"
        sinks: list[Stream[Any]] = [Stream.new(host, name) for _ in range(n)]
        queues = [sink._owned for sink in sinks]
        source: Consumer[Any] = Consumer(self, prefetch=True, unread=unread)
        transforms.run(host, lambda: work(source, queues), queues, name, source)
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


class Consumer(AsyncIterator[T]):
    """One consumer of a stream: takes items, and acknowledges each when it asks for the next.

    Args:
        prefetch: ask for items ahead while there are more than other consumers need.
        most: items to take at a time (`take`); fewer only at the end of the stream.
        weak: do not keep the stream alive.
        unread: where the stream lives on this host, do not open its items.
    """

    def __init__(self, stream: Stream[T], *, prefetch: bool, most: int = 1, weak: bool = False, unread: bool = False):
        self._stream = None if weak else stream
        self._handle = stream.handle
        self._token = stream.handle.host.number()
        self._call = current_call.get()
        self._ready: deque[tuple[Hashable, T]] = deque()
        self._last: list[Hashable] = []
        self._prefetch = prefetch
        self._unread = unread
        self.most = most
        self._ahead: asyncio.Task[Taken] | None = None
        self._given: float | None = None  # when the last items were handed out
        self._busy: float | None = None  # seconds that they took to work off
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
        if self._given is not None:
            self._busy = self._handle.host.now() - self._given
        if len(self._ready) < self.most and not self._ended:
            await self._fetch()
        taken = [self._ready.popleft() for _ in range(min(self.most, len(self._ready)))]
        if acknowledge:
            self._last = [id for id, _ in taken]
        self._given = self._handle.host.now()
        self._look_ahead()
        return taken

    async def _fetch(self) -> None:
        handle = self._handle
        start = handle.host.now()
        call = current_call.get()
        lease = call.lease if call is not None else None
        try:
            async with lease.waiting() if lease is not None else contextlib.nullcontext():
                opened = await self._next()
        except BaseException:  # cancelled, or an item cannot be opened here: perhaps another consumer can
            self._ready.clear()
            handle.requeue(self._token)
            raise
        self._ended = not opened
        self._ready.extend(opened)
        show_wait(handle.host, handle.name, start)

    async def _next(self) -> Taken:
        handle, ahead = self._handle, self._ahead
        if ahead is None:
            return await handle.take(self._token, self.most, unread=self._unread, least=self.most)
        self._ahead = None
        if not ahead.done():
            handle.insist(self._token)
        return await ahead

    def _look_ahead(self) -> None:
        """Ask for more while working on what there is, if the stream lives elsewhere and has items to spare."""
        handle = self._handle
        if not self._prefetch or self._ended or self._ahead is not None or handle.owner == handle.host.rank:
            return
        if self._busy is None or self._busy > NOT_AHEAD_SECONDS:
            return
        times = min(int(AHEAD_SECONDS / max(self._busy, 1e-6)), WINDOW // self.most)
        window = max(times, 1) * self.most
        if len(self._ready) <= window // 2:
            self._ahead = handle.host.own(_take_ahead(handle, self._token, window, self.most))

    def ack(self, ids: Iterable[Hashable]) -> None:
        """These items are done."""
        self._handle.ack(self._token, list(ids))

    def leave(self) -> None:
        """Stop consuming: what is in hand counts as done, what was taken ahead goes back to the stream.

        If the actor was killed over it, what is in hand goes back as well.
        """
        killed = self._call is not None and self._call.killed
        _leave(self._handle, self._token, [] if killed else self._last, self._ahead)
        self._last, self._ahead = [], None
        self._ready.clear()

    def give_back(self) -> None:
        """Stop consuming: everything not acknowledged goes back to the stream."""
        self._last = []
        self.leave()

    def close(self) -> None:
        """Stop consuming and let go of the stream: frames of a traceback may live on, and this object with them."""
        self.leave()
        self._stream = None

    def abandon(self) -> None:
        """Nobody is to consume the stream any more."""
        self._handle.abandon()

    def __del__(self) -> None:
        if self._last or self._ready or self._ahead is not None:
            handle, token, last, ahead = self._handle, self._token, self._last, self._ahead
            if self._call is not None and self._call.killed:
                last = []
            handle.host.on_loop(lambda: _leave(handle, token, last, ahead))


async def _take_ahead(handle: QueueHandle, token: Token, most: int, least: int) -> Taken:
    try:
        return await handle.open(await handle.ask(token, most, least=least, spare=True))
    except asyncio.CancelledError:
        handle.requeue(token)  # said once more after the wish was withdrawn: it may just have been met
        raise


def _leave(handle: QueueHandle, token: Token, done: list[Hashable], ahead: asyncio.Task[Taken] | None) -> None:
    """Word of a consumer that stops: items that are done, a wish to be forgotten, and all else to be given back."""
    if ahead is not None and not ahead.cancel() and not ahead.cancelled():
        ahead.exception()  # seen: nobody will ask any more
    if done:
        handle.ack(token, done)
    handle.requeue(token)
