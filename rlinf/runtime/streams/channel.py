"""Queues that any host can use: their registry on each host, handles to reach them, and named channels over them.

Flows in: `put`. Flows out: `get`. Who wakes whom: see `item_queue.py`, where the items and their states live. Small
items travel with their queue entry, as bytes that the hosts between do not open; big ones stay where they were made
until their consumer fetches them.

A host that has put into a queue without bound may feed it from then on: its items are on their way when `put` returns,
without an answer, but for every `UNANSWERED`-th. To close such a queue, its host tells all feeders so, and closes it
when each has said that it knows: by then all that they had put has arrived, for messages between two hosts keep their
order. So nothing is lost, whoever learns by whatever way that somebody has put, and closes the queue.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Any

from rlinf.runtime.actor.actor import show_wait
from rlinf.runtime.actor.dispatch import travelling
from rlinf.runtime.base.calls import SERVICE, Key, current_scope
from rlinf.runtime.base.errors import QueueClosed
from rlinf.runtime.observe.dataflow import Origin
from rlinf.runtime.streams.item_queue import ItemQueue, Pairs, Token
from rlinf.runtime.values.codec import ValueRef, reading_codec
from rlinf.runtime.values.promise import ATOMS, Promise, holds_promise, resolve

if TYPE_CHECKING:
    from rlinf.runtime.base.calls import Host


class Sealed:
    """An item as its queue has it. What travels on to the consumer is a copy that keeps nothing.

    Args:
        host: the queue's; None for a copy.
        blob: the item, if it rode along; otherwise what is to be seen of it, or None.
        ref: where it is kept otherwise.
    """

    __slots__ = ("blob", "host", "ref")

    def __init__(self, host: Host | None, blob: bytes | None, ref: ValueRef | None):
        self.host = host
        self.blob = blob
        self.ref = ref

    def __reduce__(self) -> Any:
        return Sealed, (None, self.blob, self.ref)

    def __del__(self) -> None:
        if self.host is not None and self.ref is not None:
            self.host.drop(self.ref.owner, self.ref.key)


async def opened(value: Any, host: Host) -> Any:
    """The value of an item (or of a list of items), on the host where it is consumed."""
    if type(value) is Sealed:
        if value.ref is not None:
            return await host.values.fetch(value.ref)
        assert value.blob is not None
        return host.codec.unseal(value.blob)
    if type(value) is list and any(type(each) is Sealed for each in value):
        return [await opened(each, host) for each in value]
    return await resolve(value) if holds_promise(value) else value


class Handle:
    """An item, wherever it is.

    Args:
        item: as its queue has it: the value, or what is sealed.
        host: the one that this handle is on.
    """

    __slots__ = ("_host", "item")

    def __init__(self, item: Any, host: Any):
        self.item = item
        self._host = host

    @property
    def here(self) -> bool:
        """The value itself is at hand."""
        return type(self.item) is not Sealed

    @property
    def face(self) -> Any:
        """The value if it is here; otherwise what its endpoint lets be seen of it, None of nothing. Made each time:
        what leads from there to this handle is no circle, so that nothing is kept longer than it is needed."""
        item = self.item
        if type(item) is not Sealed:
            return item
        return None if item.blob is None else self._host.codec.unseal(item.blob)

    async def value(self) -> Any:
        """The item: at hand, or fetched from where it is."""
        return await opened(self.item, self._host)

    def __reduce__(self) -> Any:
        item = self.item
        return _arrived_item, (item.ref if type(item) is Sealed and item.ref is not None else item,)


def _arrived_item(item: Any) -> Handle:
    codec = reading_codec()
    if codec is None:
        raise RuntimeError("a handle of an item can only be sent to actors, not unpickled by hand")
    return Handle(Sealed(None, None, item) if type(item) is ValueRef else item, codec.host)


def is_kept(value: Any) -> bool:
    """True if opening it means fetching it from its producer."""
    if type(value) is list:
        return any(type(each) is Sealed and each.ref is not None for each in value)
    return type(value) is Sealed and value.ref is not None


UNANSWERED = 256
"""Items that a feeder sends without an answer at most: more would gather in memory, and hold up its loop."""


class QueueRegistry:
    """One per host, at `host.system.queues`. Holds no queue alive, but for those that others hold."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.queues: weakref.WeakValueDictionary[Key, ItemQueue] = weakref.WeakValueDictionary()
        self.held: dict[ItemQueue, int] = {}
        """Queues of streams that left as results, and how many handles elsewhere hold each."""
        self.feeders: dict[Key, set[int]] = {}
        """Hosts that feed the queues of this one."""
        self.feeding: dict[Key, int] = {}
        """Queues of other hosts that this one feeds, and how many items without an answer are left to each."""

    def add(self, id: Key, queue: ItemQueue, *, scoped: bool = False) -> None:
        """Register a queue; `scoped`: the scope in which it is made abandons it at its end."""
        self.queues[id] = queue
        if scoped and (scope := current_scope.get()) is not None:
            scope.adopt(queue)

    def tell(self, id: Key, method: str, *args: Any) -> None:
        """Call a method of the queue of this id, if it still exists."""
        queue = self.queues.get(id)
        if queue is not None:
            getattr(queue, method)(*args)

    def find(self, id: Key, name: str = "the channel or stream") -> ItemQueue:
        """The queue of this id.

        Raises:
            QueueClosed: it is gone; `name` is what the text calls it.
        """
        queue = self.queues.get(id)
        if queue is None:
            raise QueueClosed(f"{name} is gone: its owner dropped it")
        return queue

    def hold(self, id: Key, change: int) -> None:
        """One more handle on another host holds the queue, or one fewer."""
        queue = self.queues.get(id)
        if queue is not None:
            self.held[queue] = count = self.held.get(queue, 0) + change
            if not count:
                del self.held[queue]
            queue.hold(change)

    def lost(self, host: int, reason: str) -> None:
        """A host is gone: what its consumers held goes back."""
        for queue in self.all():
            queue.leave(lambda token: isinstance(token, tuple) and token[0] == host)
        for id in list(self.feeders):
            self.drained(id, host)
        for id in [id for id in self.feeding if id[0] == host]:
            del self.feeding[id]

    # Feeding -----------------------------------------------------------------------------------------------------

    def let_feed(self, id: Key, feeder: int) -> None:
        """Another host has put into a queue of this one that has no bound."""
        feeders = self.feeders.get(id)
        if feeders is None:
            feeders = self.feeders[id] = set()
            self.queues[id].on_end.append(lambda: self._tell_closing(id, self.feeders.pop(id, ())))
        if feeder not in feeders:
            feeders.add(feeder)
            self._tell(feeder, "opened", id)

    def opened(self, id: Key) -> None:
        """This host may feed a queue of another."""
        self.feeding[id] = UNANSWERED

    def may_feed(self, id: Key) -> bool:
        """True if an item may be put without waiting for an answer."""
        credit = self.feeding.get(id)
        if credit is None:
            return False
        self.feeding[id] = credit - 1 if credit else UNANSWERED
        return credit > 0

    def close(self, id: Key) -> None:
        """Close a queue of this host, once all that was put has arrived."""
        queue = self.queues.get(id)
        if queue is None or queue.closing:
            return
        if feeders := self.feeders.get(id):
            queue.closing = True
            self._tell_closing(id, feeders)
        else:
            queue.close()

    def _tell_closing(self, id: Key, feeders: Iterable[int]) -> None:
        for feeder in feeders:
            self._tell(feeder, "closing", id)

    def _tell(self, host: int, method: str, *args: Any) -> None:
        self._host.cast(host, SERVICE, "tell_queues", method, args)

    def closing(self, id: Key) -> None:
        """A queue that this host may feed begins to close, or has ended: all that was put is on its way before this."""
        self.feeding.pop(id, None)
        self._tell(id[0], "drained", id, self._host.rank)

    def drained(self, id: Key, feeder: int) -> None:
        """All that another host has put into a queue is here, and it will put no more."""
        feeders = self.feeders.get(id)
        if feeders is None or feeder not in feeders:
            return
        feeders.remove(feeder)
        if not feeders:
            del self.feeders[id]
            queue = self.queues.get(id)
            if queue is not None and queue.closing:
                queue.close()

    def all(self) -> list[ItemQueue]:
        """All queues that exist at this moment."""
        return list(self.queues.values())


class QueueHandle:
    """Reaches one `ItemQueue` from one host, which may or may not be the queue's own.

    Sent to another host it becomes a handle there. Values that go to or come from the queue's own host, or another
    host in this process, are handed over as they are; all others are sealed by the producer and opened by the consumer.
    """

    __slots__ = ("capacity", "host", "id", "name", "origin", "owner")

    def __init__(self, host: Host, owner: int, id: Key, name: str, capacity: int | None, origin: Origin | None = None):
        self.host = host
        self.owner = owner
        self.id = id
        self.name = name
        self.capacity = capacity
        self.origin = origin
        """The endpoint that makes the items of a stream."""

    def __reduce__(self) -> Any:
        return _arrived, (self.owner, self.id, self.name, self.capacity, self.origin)

    def local(self) -> ItemQueue | None:
        """The queue itself, where it lives on this host."""
        if self.owner != self.host.rank:
            return None
        registry: QueueRegistry = self.host.system.queues
        return registry.queues.get(self.id) or registry.find(self.id, self.name)

    def rebind(self, host: Host) -> QueueHandle:
        """Return a handle of the same queue, seen from another host of this process."""
        if host is self.host:
            return self
        return QueueHandle(host, self.owner, self.id, self.name, self.capacity, self.origin)

    async def put(self, value: Any, key: Hashable, weight: float) -> None:
        """Put one item, waiting for space; see `QueueRegistry` for when that takes a round trip.

        Raises:
            QueueClosed: nothing may be put any more.
        """
        if holds_promise(value):
            value = await resolve(value)
        queue = self.local()
        if queue is not None:
            await queue.put(value, key=key, weight=weight)
            return
        item = (None, *self.seal(value), weight, key)
        if self.capacity is None and self.host.system.queues.may_feed(self.id):
            self.host.cast(self.owner, SERVICE, "queue_feed", self.id, item, self.plain)
        else:
            await self._call("queue_put_one", self.id, item, self.plain)

    @property
    def plain(self) -> bool:
        """Values go to the queue as they are."""
        return bool(self.host.codec.by_reference(self.owner))

    def seal(self, value: Any, stays: Callable[[Any], Any] | None = None) -> tuple[Any, ValueRef | None]:
        """Return what goes to the queue on another host instead of a value: the value itself if `plain`; or bytes; or
        where it is kept, until its `Sealed` at the queue is dropped.

        Args:
            value: what is put.
            stays: it is kept however small it is, and this makes what goes with it; None of nothing.
        """
        if self.plain:
            return (value, None)
        if stays is not None:
            face = stays(value)
            return (None if face is None else self.host.codec.seal(face), self.host.values.keep(value))
        blob = self.host.codec.seal(value)
        return (blob, None) if blob is not None else (None, self.host.values.keep(value))

    async def take(
        self, token: Token, most: int = 1, *, unread: bool = False, holds: bool = False, **wishes: Any
    ) -> Pairs:
        """Take items as `ItemQueue.take` does, and open them.

        Args:
            unread: leave them sealed if the queue is here, for whoever passes them on.
            holds: leave them sealed wherever the queue is, for whoever acknowledges them when it needs them no more.
        """
        queue = self.local()
        if queue is None:
            pairs = await self.ask(token, most, **wishes)
            return pairs if holds else await self.open(pairs)
        pairs = await queue.take(token, most, **wishes)
        return pairs if unread or holds or (len(pairs) == 1 and type(pairs[0][1]) in ATOMS) else await self.open(pairs)

    def ask(self, token: Token, most: int, **wishes: Any) -> Promise[Pairs]:
        """Ask a queue on another host for items; they come unopened."""
        answer: Promise[Pairs] = self._call("queue_take", self.id, token, most, wishes)
        answer.want()
        return answer

    async def at_hand(self, token: Token, least: int) -> None:
        """Wait until so many items are there for whoever has this token, or all that will ever be; take nothing."""
        await self.take(token, 0, least=least, peek=True)

    async def open(self, pairs: Pairs) -> Pairs:
        """Open what was taken, wherever its values are."""
        if sum(is_kept(value) for _, value in pairs) > 1:
            values = await asyncio.gather(*(opened(value, self.host) for _, value in pairs))
            return [(id, value) for (id, _), value in zip(pairs, values, strict=True)]
        return [(id, await opened(value, self.host)) for id, value in pairs]

    async def statistics(self) -> dict[str, Any]:
        """Counts by state, and who waits since when."""
        queue = self.local()
        if queue is not None:
            return queue.statistics()
        result: dict[str, Any] = await self._call("queue_statistics", self.id)
        return result

    def hold(self, change: int) -> None:
        """One more handle that was sent away keeps the queue, or one fewer; the last to go stops the producers."""
        self._tell("hold", self.id, change)

    def ack(self, token: Token, ids: list[Hashable] | None = None) -> None:
        """These items are done (default: all held under the token)."""
        self._cast("ack", token, ids)

    def requeue(self, token: Token, ids: list[Hashable] | None = None) -> None:
        """Give these items back (default: all held under the token)."""
        self._cast("requeue", token, ids)

    def insist(self, token: Token, more: bool = False) -> None:
        """Tell the queue that what was asked for as spare is needed now."""
        self._cast("insist", token, more)

    def close(self) -> None:
        """No more items will come."""
        self._tell("close", self.id)

    def fail(self, error: BaseException) -> None:
        """End the queue with an error."""
        self._cast("fail", error if self.owner == self.host.rank else travelling(error, self.host.rank))

    def abandon(self) -> None:
        """All consumers are gone: stop the producers."""
        self._cast("abandon")

    def _cast(self, method: str, *args: Any) -> None:
        self._tell("tell", self.id, method, *args)

    def _tell(self, method: str, *args: Any) -> None:
        """Tell the registry of the queue's host."""
        if self.owner == self.host.rank:
            getattr(self.host.system.queues, method)(*args)
        else:
            self.host.cast(self.owner, SERVICE, "tell_queues", method, args)

    def _call(self, method: str, *args: Any) -> Any:
        return self.host.call(self.owner, SERVICE, method, f"{self.name}.{method[6:]}", args, {})


def _arrived(owner: int, id: Key, name: str, capacity: int | None, origin: Origin | None) -> QueueHandle:
    codec = reading_codec()
    if codec is None:
        raise RuntimeError(f"{name}: a channel or stream can only be sent to actors, not unpickled by hand")
    return QueueHandle(codec.host, owner, id, name, capacity, origin)


class Channel:
    """A named async queue with keys and weights; made by `await system.channel(name)`.

    Example:
        >>> channel = await system.channel("work", capacity=8)    # doctest: +SKIP
        >>> await channel.put({"x": 1}, key="a")                  # doctest: +SKIP
        >>> await channel.get(key="a")                            # doctest: +SKIP
        {'x': 1}

    It can be sent to any actor. `put` waits while the channel is full, `get` while it is empty. A cancelled `get` has
    taken nothing; a cancelled `put` has put nothing, or, from another host, may have been too late to be stopped. After
    `close`, what is left can still be taken; then `get` raises `QueueClosed` and `async for` ends. Each key is a queue
    of its own, and is forgotten when it is empty.

    A `put` from another host into a channel without a capacity returns when the value is on its way. It arrives before
    whatever this host tells the channel's host next, and is taken also if somebody closes the channel meanwhile; only
    the death of this host can lose it, or the end of the channel with its scope, which drops what is in it anyway.
    """

    def __init__(self, handle: QueueHandle, queue: ItemQueue | None = None):
        self._handle = handle
        self._queue = queue  # keeps it alive on its own host

    @property
    def name(self) -> str:
        """The name it was made with."""
        return self._handle.name

    async def put(self, value: Any, *, key: Hashable = None, weight: float = 1.0) -> None:
        """Queue a value, waiting for space.

        Args:
            key: the queue within the channel.
            weight: what `get_batch` counts, e.g. the number of tokens.
        """
        start = self._handle.host.now()
        await self._handle.put(value, key, weight)
        show_wait(self._handle.host, f"space in {self.name}", start)

    async def get(self, *, key: Hashable = None) -> Any:
        """Take the oldest value of a key, waiting for one.

        Raises:
            QueueClosed: the channel is closed and this key is empty.
        """
        values = await self._take(1, key=key)
        if not values:
            raise QueueClosed(f"{self.name} is closed and empty")
        return values[0]

    async def get_batch(self, weight: float, *, key: Hashable = None) -> list[Any]:
        """Take as many values as reach this total weight; at the end of the channel, all that are left (or [])."""
        return await self._take(1, key=key, weight=weight)

    def put_nowait(self, value: Any, *, key: Hashable = None, weight: float = 1.0) -> None:
        """Queue a value without waiting; only on the host where the channel was made.

        Raises:
            asyncio.QueueFull: there is no space.
            RuntimeError: the channel lives on another host.
        """
        if not self._own("put").put_nowait(value, key=key, weight=weight):
            raise asyncio.QueueFull

    def get_nowait(self, *, key: Hashable = None) -> Any:
        """Take the oldest value of a key without waiting; only on the host where the channel was made.

        Raises:
            asyncio.QueueEmpty: there is none.
            QueueClosed: the channel is closed and empty.
            RuntimeError: the channel lives on another host, or the value stayed at a producer on another host.
        """
        queue = self._own("get")
        token = self._handle.host.number()
        pairs = queue.take_nowait(token, key=key)
        if pairs is None:
            raise asyncio.QueueEmpty
        if not pairs:
            raise QueueClosed(f"{self.name} is closed and empty")
        value = pairs[0][1]
        if type(value) is Sealed:
            if value.ref is not None:
                queue.requeue(token)
                raise RuntimeError(f"{self.name}: this value is big and stayed on another host; use `await get()`")
            assert value.blob is not None
            value = self._handle.host.codec.unseal(value.blob)
        queue.ack(token)
        return value

    def _own(self, verb: str) -> ItemQueue:
        queue = self._handle.local()
        if queue is None:
            raise RuntimeError(
                f"{self.name} lives on host {self._handle.owner}: from here use `await {verb}()`, not {verb}_nowait()"
            )
        return queue

    async def _take(self, most: int, **wishes: Any) -> list[Any]:
        host = self._handle.host
        token, start = host.number(), host.now()
        try:
            pairs = await self._handle.take(token, most, **wishes)
        except BaseException:  # cancelled, or it cannot be opened here: it stays in the channel
            self._handle.requeue(token)
            raise
        show_wait(host, self.name, start)
        self._handle.ack(token)
        return [value for _, value in pairs]

    def close(self) -> None:
        """No more values may be put; those who wait to put get `QueueClosed`."""
        self._handle.close()

    async def statistics(self) -> dict[str, Any]:
        """Counts by state, and who waits since when."""
        return await self._handle.statistics()

    def __aiter__(self) -> Channel:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self.get()
        except QueueClosed:
            raise StopAsyncIteration from None

    def __reduce__(self) -> Any:
        return Channel, (self._handle,)

    def __repr__(self) -> str:
        return f"<Channel {self.name} on host {self._handle.owner}>"
