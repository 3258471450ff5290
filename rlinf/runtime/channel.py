"""Channels: named, long-lived queues that any actor on any host can use.

Flows in: `put`. Flows out: `get`. Who wakes whom: see `queue.py`, where the items and their states live; here are the
handles by which other hosts reach them. Small items travel with their queue entry, unread by the hosts between; big
ones stay where they were made until their consumer fetches them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .actor import Actor, current_call, endpoint
from .context import SERVICE
from .errors import QueueClosed
from .payload import Key, ValueRef, reading_codec
from .queue import ItemQueue, Taken, Token
from .resolve import holds_promise, resolve

if TYPE_CHECKING:
    from .host import Host


class Sealed:
    """An item that its queue's host does not open: bytes that rode along, or a value kept at its producer."""

    __slots__ = ("blob", "host", "ref")

    def __init__(self, host: Host, blob: bytes | None, ref: ValueRef | None):
        self.host = host
        self.blob = blob
        self.ref = ref

    async def open(self, host: Host) -> Any:
        """The value, on the host where it is consumed."""
        return await open_item((self.blob, self.ref), host)

    def __del__(self) -> None:
        if self.ref is not None:
            self.host.drop(self.ref.owner, self.ref.key)


async def open_item(item: tuple[bytes | None, ValueRef | None], host: Host) -> Any:
    blob, ref = item
    if ref is not None:
        return await host.fetch(ref)
    assert blob is not None
    return host.codec.unseal(blob)


def caller_name() -> str:
    """The running endpoint call, or "flow": who waits, for reports."""
    call = current_call.get()
    return call.label if call is not None else "flow"


class QueueHandle:
    """Reaches one `ItemQueue` from one host, which may or may not be the queue's own.

    Sent to another host it becomes a handle there. Values that go to or come from the queue's own host, or another
    host in this process, are handed over as they are; all others are sealed by the producer and opened by the consumer.
    """

    __slots__ = ("host", "id", "name", "owner")

    def __init__(self, host: Host, owner: int, id: Key, name: str):
        self.host = host
        self.owner = owner
        self.id = id
        self.name = name

    def __reduce__(self) -> Any:
        return _arrived, (self.owner, self.id, self.name)

    def local(self) -> ItemQueue | None:
        """The queue itself, where it lives on this host."""
        if self.owner != self.host.rank:
            return None
        queue = self.host.queues.get(self.id)
        if queue is None:
            raise QueueClosed(f"{self.name} is gone: its owner dropped it")
        return queue

    def rebind(self, host: Host) -> QueueHandle:
        """The same queue, seen from another host of this process."""
        return self if host is self.host else QueueHandle(host, self.owner, self.id, self.name)

    async def put_many(self, items: Sequence[tuple[Hashable, Any, float, Hashable]]) -> None:
        """Put (id, value, weight, key) items; returns once there is space for more.

        Raises:
            QueueClosed: nothing may be put any more.
        """
        queue = self.local()
        if queue is not None:
            for id, value, weight, key in items:
                if holds_promise(value):
                    value = await resolve(value)
                await queue.put(value, id=id, key=key, weight=weight, name=caller_name())
            return
        host = self.host
        if host.codec.by_reference(self.owner):
            sealed = [(id, value, None, weight, key) for id, value, weight, key in items]
        else:
            sealed = [(id, *await self._seal(value), weight, key) for id, value, weight, key in items]
        await self._call("queue_put", self.id, sealed, host.codec.by_reference(self.owner))

    async def _seal(self, value: Any) -> tuple[bytes | None, ValueRef | None]:
        if holds_promise(value):
            value = await resolve(value)
        blob = self.host.codec.seal(value)
        return (blob, None) if blob is not None else (None, self.host.keep(value))

    async def take(self, token: Token, most: int = 1, **wishes: Any) -> Taken:
        """Take items as `ItemQueue.take` does; values are opened."""
        queue = self.local()
        if queue is not None:
            taken = await queue.take(token, most, name=caller_name(), **wishes)
            return await self.open(taken)
        try:
            taken = await self._call("queue_take", self.id, token, most, wishes)
        except asyncio.CancelledError:
            self.requeue(token)
            raise
        return await self.open(taken)

    async def open(self, taken: Taken) -> Taken:
        """Open what was taken: sealed items, and those that travelled as (blob, ref)."""
        return [(id, await self._opened(value)) for id, value in taken]

    async def _opened(self, value: Any) -> Any:
        kind = type(value)
        if kind is Sealed:
            return await value.open(self.host)
        if kind is _Wire:
            if value.many is not None:
                return [await self._opened(each) for each in value.many]
            return await open_item((value.blob, value.ref), self.host)
        if kind is list and any(type(each) is Sealed for each in value):
            return [await self._opened(each) for each in value]
        return await resolve(value) if holds_promise(value) else value

    def ack(self, token: Token, ids: Iterable[Hashable] | None = None) -> None:
        """These items are done (default: all held under the token)."""
        self._cast("ack", token, None if ids is None else list(ids))

    def requeue(self, token: Token, ids: Iterable[Hashable] | None = None) -> None:
        """Give these items back (default: all held under the token)."""
        self._cast("requeue", token, None if ids is None else list(ids))

    def insist(self, token: Token) -> None:
        """What was asked for as spare is needed now."""
        self._cast("insist", token)

    def close(self) -> None:
        """No more items will come."""
        self._cast("close")

    def fail(self, error: BaseException) -> None:
        """End the queue with an error."""
        self._cast("fail", error if self.owner == self.host.rank else self.host.travelling(error))

    def abandon(self) -> None:
        """All consumers are gone: stop the producers."""
        self._cast("abandon")

    def _cast(self, method: str, *args: Any) -> None:
        if self.owner == self.host.rank:
            queue = self.host.queues.get(self.id)
            if queue is not None:
                getattr(queue, method)(*args)
        else:
            self.host.cast(self.owner, SERVICE, "queue_cast", self.id, method, args)

    def _call(self, method: str, *args: Any) -> Any:
        return self.host.call(self.owner, SERVICE, method, f"{self.name}.{method[6:]}", args, {})


class _Wire:
    """A sealed item on its way to a consumer."""

    __slots__ = ("blob", "many", "ref")

    def __init__(self, blob: bytes | None, ref: ValueRef | None, many: list[Any] | None):
        self.blob, self.ref, self.many = blob, ref, many

    def __reduce__(self) -> Any:
        return _Wire, (self.blob, self.ref, self.many)


def _on_wire(value: Any) -> Any:
    if type(value) is Sealed:
        return _Wire(value.blob, value.ref, None)
    if type(value) is list and any(type(each) is Sealed for each in value):
        return _Wire(None, None, [_on_wire(each) for each in value])
    return value


def _arrived(owner: int, id: Key, name: str) -> QueueHandle:
    codec = reading_codec()
    if codec is None:
        raise RuntimeError(f"{name}: a channel or stream can only be sent to actors, not unpickled by hand")
    return QueueHandle(codec.host, owner, id, name)


class QueueService(Actor):
    """The part of a host's own actor that serves its queues to other hosts."""

    @endpoint
    async def queue_put(self, id: Key, items: list[tuple[Hashable, Any, Any, float, Hashable]], plain: bool) -> None:
        host = self._cell.host
        queue = _find(host, id)
        for item_id, blob_or_value, ref, weight, key in items:
            value = blob_or_value if plain else Sealed(host, blob_or_value, ref)
            queue.put_nowait(value, id=item_id, key=key, weight=weight, force=True)
        await queue.space(caller_name())

    @endpoint
    async def queue_put_one(self, id: Key, item: Any, plain: bool) -> None:
        host = self._cell.host
        item_id, blob_or_value, ref, weight, key = item
        value = blob_or_value if plain else Sealed(host, blob_or_value, ref)
        await _find(host, id).put(value, id=item_id, key=key, weight=weight, name=caller_name())

    @endpoint
    async def queue_take(self, id: Key, token: Token, most: int, wishes: dict[str, Any]) -> Taken:
        queue = _find(self._cell.host, id)
        call = current_call.get()
        name = call.parent if call is not None else "?"
        taken = await queue.take(token, most, name=name, **wishes)
        return [(item_id, _on_wire(value)) for item_id, value in taken]

    @endpoint
    async def queue_statistics(self, id: Key) -> dict[str, Any]:
        return _find(self._cell.host, id).statistics()

    def queue_cast(self, id: Key, method: str, args: tuple[Any, ...]) -> None:
        queue = self._cell.host.queues.get(id)
        if queue is not None:
            getattr(queue, method)(*args)


def _find(host: Host, id: Key) -> ItemQueue:
    queue = host.queues.get(id)
    if queue is None:
        raise QueueClosed("the channel or stream is gone: its owner dropped it")
    return queue


class Channel:
    """A named async queue with keys and weights; made by `await system.channel(name)`.

    Example:
        >>> channel = await system.channel("work", capacity=8)    # doctest: +SKIP
        >>> await channel.put({"x": 1}, key="a")                  # doctest: +SKIP
        >>> await channel.get(key="a")                            # doctest: +SKIP
        {'x': 1}

    It can be sent to any actor. `put` waits while the channel is full, `get` while it is empty; both may be
    cancelled and lose nothing. After `close`, what is left can still be taken; then `get` raises `QueueClosed` and
    `async for` ends. Each key is a queue of its own, and is forgotten when it is empty.
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
        handle = self._handle
        if handle.local() is not None:
            await handle.put_many([(None, value, weight, key)])
            return
        plain = handle.host.codec.by_reference(handle.owner)
        item = (value, None) if plain else await handle._seal(value)
        try:
            await handle._call("queue_put_one", handle.id, (None, *item, weight, key), plain)
        except BaseException:
            if not plain and item[1] is not None:
                handle.host.drop(handle.host.rank, item[1].key)
            raise

    async def get(self, *, key: Hashable = None) -> Any:
        """Take the oldest value of a key, waiting for one.

        Raises:
            QueueClosed: the channel is closed and this key is empty.
        """
        taken = await self._take(1, key=key)
        if not taken:
            raise QueueClosed(f"{self.name} is closed and empty")
        return taken[0]

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
        taken = queue.take_nowait(token, key=key)
        if taken is None:
            raise asyncio.QueueEmpty
        if not taken:
            raise QueueClosed(f"{self.name} is closed and empty")
        value = taken[0][1]
        if type(value) is Sealed:
            if value.blob is None:
                queue.requeue(token)
                raise RuntimeError(f"{self.name}: this value is big and stayed on another host; use `await get()`")
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
        token = self._handle.host.number()
        try:
            taken = await self._handle.take(token, most, **wishes)
        except asyncio.CancelledError:
            self._handle.requeue(token)
            raise
        self._handle.ack(token)
        return [value for _, value in taken]

    def close(self) -> None:
        """No more values may be put; those who wait to put get `QueueClosed`."""
        self._handle.close()

    async def statistics(self) -> dict[str, Any]:
        """Counts by state, and who waits since when."""
        queue = self._handle.local()
        if queue is not None:
            return queue.statistics()
        result: dict[str, Any] = await self._handle._call("queue_statistics", self._handle.id)
        return result

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
