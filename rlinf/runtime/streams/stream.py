"""Streams: many values in order of completion, between any actors; their consumers, and what streams become.

Flows in: what an async-generator endpoint yields or a map stage returns. Flows out: the items, each to exactly one of
the consumers that compete for them. Who wakes whom: see `item_queue.py`; `stages.py` has what fills a stream.

The host that made a stream has its queue. When the last handle that holds the stream is dropped (that of its maker, or
of whoever got it as a result), or any is closed, the stages that feed the stream are cancelled, and theirs in turn.

One consumer of a stream: what it has in hand, what it asks for ahead, and what becomes of both when it stops.

Why ahead, and not only several at a time: a round trip between batches, however many a queue grants in one, adds to the
time of items of 1 to 10 ms several times what asking beside the work does, and big items travel beside the work.

Batches, first items, copies and shares of a stream are made on its owner's host, each by a task of the host: it ends
with its source, fails its sinks when it fails, and is cancelled when nobody reads them any more. Plain batches, copies
and shares pass items on unread; weights are computed here, so those items are opened here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Hashable, Iterable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rlinf.runtime.actor.actor import show_wait
from rlinf.runtime.base.calls import SERVICE, Call, DeviceLease, current_call, current_host, here, waiter
from rlinf.runtime.base.errors import QueueClosed
from rlinf.runtime.base.tasks import mark_seen
from rlinf.runtime.observe.dataflow import Counter, Origin, amount
from rlinf.runtime.streams.channel import Handle, QueueHandle
from rlinf.runtime.streams.item_queue import ItemQueue, Pairs, Token
from rlinf.runtime.transport.link import CAST, Message

if TYPE_CHECKING:
    from rlinf.runtime.base.calls import Host


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
        host = current_host()
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
        host.system.queues.add(key, queue, scoped=True)
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
        """Name of what it carries and where it was made, e.g. "rollout.generate@0.12"."""
        return self.handle.name

    @property
    def _owned(self) -> ItemQueue:
        assert self._queue is not None
        return self._queue

    async def statistics(self) -> dict[str, Any]:
        """Counts of items by state, and who waits since when."""
        return await self.handle.statistics()

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


# Consumers -----------------------------------------------------------------------------------------------------------

WINDOW = 64
"""The most items that a consumer on another host asks for ahead, so that small items do not cost a round trip each."""
AHEAD_SECONDS = 2e-3
"""A consumer asks ahead for what it works off in this time (about ten round trips): what it has, others cannot take."""
NOT_AHEAD_SECONDS = 0.1
"""Beside items that take longer than this a round trip does not count, but an item in the wrong hands does."""
LAZY_FROM = 4 * WINDOW
"""Capacity from which on word of done items may wait for company: in a smaller stream producers wait for it."""


class Consumer(AsyncIterator[T]):
    """One consumer of a stream: takes items, and acknowledges each when it asks for the next.

    Args:
        prefetch: ask for items ahead while there are more than other consumers need.
        most: items to take at a time (`take`); fewer only at the end of the stream.
        weak: do not keep the stream alive.
        unread: where the stream lives on this host, do not open its items.
        passing: the items go on to somebody else.
        holds: items are not opened, and none is acknowledged before the consumer leaves, so that each stays where it
            was made; for the only consumer of a stream, which so learns of its end though nothing is done yet.
    """

    def __init__(
        self,
        stream: Stream[T],
        *,
        prefetch: bool,
        most: int = 1,
        weak: bool = False,
        unread: bool = False,
        passing: bool = False,
        holds: bool = False,
    ):
        self._stream = None if weak else stream
        self._handle = stream.handle
        self._token = stream.handle.host.number()
        self._call = current_call.get()
        origin = stream.handle.origin
        self._counter: Counter | None = None
        if origin is not None and not passing:
            self._counter = stream.handle.host.flows.counter(origin, here(self._call))
            self._depth = origin[2]
        self._ready: deque[tuple[Hashable, T]] = deque()
        self._last: list[Hashable] = []
        self._prefetch = prefetch and stream.handle.owner != stream.handle.host.rank
        self._unread, self._holds = unread, holds
        self._done: list[Hashable] = []  # where they are held: items that were worked off
        self.most = most
        self._ahead: asyncio.Task[Pairs] | None = None
        self._acks = Acks(stream.handle, self._token)
        self._in_hand = 0  # items handed out and not acknowledged
        self._made: list[Hashable] = []
        self._forgotten: list[Hashable] = []
        self._given: float | None = None  # when the last items were handed out
        self._busy: float | None = None  # seconds that they took to work off
        self._ended = False

    def __aiter__(self) -> Consumer[T]:
        return self

    async def __anext__(self) -> T:
        pairs = await self.take()
        if not pairs:
            raise StopAsyncIteration
        return pairs[0][1]

    @property
    def at_hand(self) -> bool:
        """True if the next `take` would not wait."""
        return len(self._ready) >= self.most

    async def take(self, *, acknowledge: bool = True) -> list[tuple[Hashable, T]]:
        """The next (id, item) pairs, as many as `most`; [] at the end of the stream.

        Args:
            acknowledge: what was taken before is done. Otherwise the caller acknowledges each by `ack`.
        """
        if self._prefetch:
            now = self._handle.host.now()
            self._busy = None if self._given is None else now - self._given
        done = len(self._last)
        if acknowledge and done:
            if self._holds:
                self._done += self._last
            else:
                self.ack(self._last)
            self._last = []
        call = current_call.get()
        lease = call.lease if call is not None else None
        works = call is not None and (lease is not None or call.within is not None)  # for a call that may have devices
        if works:
            await self._offer(call, done)
        if len(self._ready) < self.most and not self._ended:
            await self._fetch(lease, works)
        elif lease is not None and lease.released and not lease.stage:
            async with lease.waiting():
                await lease.enough(0, self.look)
        if len(self._ready) <= self.most:
            pairs, self._ready = list(self._ready), deque()
        else:
            pairs = [self._ready.popleft() for _ in range(self.most)]
        if acknowledge:
            self._last = [id for id, _ in pairs]
        self._in_hand += len(pairs)
        if self._counter is not None and pairs:
            depth = self._depth
            self._counter.add(amount((value for _, value in pairs), depth) if depth else len(pairs))
        if self._prefetch:
            self._given = self._handle.host.now()
            self._look_ahead()
        return pairs

    async def _offer(self, call: Call | None, done: int) -> None:
        """So many items are done, and the next are not begun: a moment to give devices to others."""
        if done and (lease := self._lease_over(call)) is not None and not lease.puts:
            lease.done(done)
        if call is not None and call.lease is not None and not call.lease.stage:
            await call.lease.offer()

    def _lease_over(self, call: Call | None) -> DeviceLease | None:
        """The lease of the call for which the running code takes items that others made: its own, or that of the call
        whose stage it is."""
        while call is not None and call.lease is None:
            call = call.within
        if call is None or call.lease is None or call.lease.stage:  # a stage counts the items of its own source
            return None
        origin = self._handle.origin
        return None if origin is not None and origin[0] == call.lease.role else call.lease

    async def look(self, missing: int) -> None:
        """Wait until so many items are at hand beside those that were taken, or all that will ever be."""
        missing -= len(self._ready)
        if missing > 0 and (ahead := self._ahead) is not None:
            self._insist(bool(self._ready))
            await asyncio.wait([ahead])  # which leaves it alone if this wait is given up
            missing -= len(ahead.result())
        if missing > 0:
            await self._handle.at_hand(self._token, missing)

    async def _fetch(self, lease: DeviceLease | None, works: bool) -> None:
        handle = self._handle
        start = handle.host.now()
        try:
            if not works:
                opened = await self._next()
            else:
                async with lease.waiting() if lease is not None else contextlib.nullcontext():
                    opened = await self._next()
                    if opened and (over := self._lease_over(current_call.get())) is not None:
                        await over.enough(len(opened), self.look)
        except BaseException:  # cancelled, or an item cannot be opened here: perhaps another consumer can
            self._ready.clear()
            handle.requeue(self._token)
            raise
        self._ended = not opened and not self._ready
        self._ready.extend(opened)
        show_wait(handle.host, handle.name, start)

    async def _next(self) -> Pairs:
        handle, ahead, more = self._handle, self._ahead, bool(self._ready) or self._holds
        if ahead is None:
            outputs, self._made = self._made, []
            how = {"unread": self._unread, "holds": self._holds}
            pairs = await handle.take(self._token, self.most, **how, least=self.most, more=more)
            self._forgotten += outputs
            return pairs
        self._ahead = None
        if not ahead.done():
            self._insist(more)
        return await ahead

    def _insist(self, more: bool) -> None:
        """Tell the queue that what was asked for ahead is needed now. Told behind the question, which its task may not
        have sent yet."""
        self._handle.host.loop.call_soon(self._handle.insist, self._token, more)

    def _look_ahead(self) -> None:
        """Ask for more while working on what there is, if the stream has items to spare."""
        handle = self._handle
        if self._ended or self._ahead is not None:
            return
        if self._holds or self._busy is None or self._busy > NOT_AHEAD_SECONDS:
            return  # what is held is soon asked for: it is small, and nobody competes for it
        times = min(int(AHEAD_SECONDS / max(self._busy, 1e-6)), WINDOW // self.most)
        window = max(times, 1) * self.most
        if len(self._ready) <= window // 2:
            outputs, self._made = self._made, []
            self._ahead = handle.host.own(_take_ahead(handle, self._token, window, self.most, outputs, self._forgotten))

    def ack(self, ids: list[Hashable], outputs: Iterable[Hashable] = ()) -> None:
        """These items are done.

        Args:
            outputs: ids of what was made of them, for `forgotten`.
        """
        self._in_hand -= len(ids)
        self._made += outputs
        handle = self._handle
        if handle.owner == handle.host.rank:
            handle.host.system.queues.tell(handle.id, "ack", self._token, ids)
            return
        capacity = handle.capacity
        busy = self._in_hand > 0 or bool(self._ready)  # so nobody waits for the end of the stream yet
        self._acks.add(ids, lazily=busy and (capacity is None or capacity >= LAZY_FROM))

    def forgotten(self) -> list[Hashable]:
        """Ids, each told once, that nobody will put any more: of what was made of items that are gone for good.

        The stream's owner has answered a question that was sent after their acknowledgement. So it knows that they are
        done, and gives them to nobody else even if this host dies now.
        """
        ids = list(self._forgotten)
        self._forgotten.clear()
        return ids

    def leave(self) -> None:
        """Stop consuming: what is in hand counts as done, what was taken ahead goes back to the stream.

        If the actor was killed over it, what is in hand goes back as well.
        """
        killed = self._call is not None and self._call.killed
        _leave(self._handle, self._token, [] if killed else [*self._done, *self._last], self._ahead)
        self._last, self._done, self._ahead = [], [], None
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
        if self._last or self._done or self._ready or self._ahead is not None:
            handle, token, ahead = self._handle, self._token, self._ahead
            last = [*self._done, *self._last]
            if self._call is not None and self._call.killed:
                last = []
            handle.host.on_loop(lambda: _leave(handle, token, last, ahead))


class Acks:
    """Word to another host of what a consumer is done with: a message takes along all that is done until it leaves."""

    __slots__ = ("_handle", "_ids", "_token")

    def __init__(self, handle: QueueHandle, token: Token):
        self._handle, self._token = handle, token
        self._ids: list[Hashable] = []

    def add(self, ids: list[Hashable], *, lazily: bool) -> None:
        """These are done; `lazily`: it need not be told at once."""
        waiting = bool(self._ids)
        self._ids += ids
        link = self._handle.host.link(self._handle.owner)
        if not lazily:
            link.post(self)
        elif not waiting:
            link.post_lazily(self)

    def message(self) -> Message:
        ids, self._ids = self._ids, []
        return (CAST, SERVICE, "tell_queues", ("tell", (self._handle.id, "ack", self._token, ids)))


async def _take_ahead(
    handle: QueueHandle, token: Token, most: int, least: int, outputs: list[Hashable], forgotten: list[Hashable]
) -> Pairs:
    try:
        pairs = await handle.ask(token, most, least=least, spare=True)
        forgotten += outputs
        return await handle.open(pairs)
    except asyncio.CancelledError:
        handle.requeue(token)  # said once more after the wish was withdrawn: it may just have been met
        raise


def _leave(handle: QueueHandle, token: Token, done: list[Hashable], ahead: asyncio.Task[Pairs] | None) -> None:
    """Word of a consumer that stops: items that are done, a wish to be forgotten, and all else to be given back."""
    if ahead is not None and not ahead.cancel():
        mark_seen(ahead)  # nobody will ask any more
    if done:
        handle.ack(token, done)
    handle.requeue(token)


# What streams become on their owner's host ----------------------------------------------------------------------------


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
    source: Any = each(items)
    async with aclosing(source) if hasattr(source, "aclose") else contextlib.nullcontext():
        async for item in source:
            await sink.put(item.item if isinstance(item, Handle) else item)


async def batch(source: Consumer[Any], sink: ItemQueue, n: int) -> None:
    source.most = n
    while pairs := await source.take():
        await sink.put([value for _, value in pairs])


async def batch_by_weight(source: Consumer[Any], sink: ItemQueue, weight: Callable[[Any], float], limit: float) -> None:
    gathered: list[Any] = []
    total = 0.0
    while pairs := await source.take():
        item = pairs[0][1]
        heavy = weight(item)
        if gathered and total + heavy > limit:
            await sink.put(gathered)
            gathered, total = [], 0.0
        gathered.append(item)
        total += heavy
    if gathered:
        await sink.put(gathered)


async def take(source: Consumer[Any], sink: ItemQueue, n: int) -> None:
    for _ in range(n):
        pairs = await source.take()
        if not pairs:
            return
        await sink.put(pairs[0][1])
    source.leave()
    source.abandon()  # whoever else holds the stream


async def tee(source: Consumer[Any], sinks: Sequence[ItemQueue]) -> None:
    while pairs := await source.take():
        for sink in sinks:
            _put(sink, pairs[0][1])
        await _space_in_any(sinks)


async def deal(
    source: Consumer[Any], sinks: Sequence[ItemQueue], weight: Callable[[Any], float] | None, pad: Any
) -> None:
    source.most = len(sinks)
    totals = [0.0] * len(sinks)
    while pairs := await source.take():
        weighed = sorted(
            ((weight(v) if weight else 1.0, i) for i, (_, v) in enumerate(pairs)), key=lambda w: (-w[0], w[1])
        )
        lightest_first = sorted(range(len(sinks)), key=lambda i: (totals[i], i))
        for position, sink in enumerate(lightest_first):
            if position < len(weighed):
                heavy, index = weighed[position]
                totals[sink] += heavy
                _put(sinks[sink], pairs[index][1])
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
    waits = [asyncio.ensure_future(sink.space()) for sink in used]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


__all__ = ["CAPACITY", "Consumer", "Stream"]
