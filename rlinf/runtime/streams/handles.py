"""Items of a stream as handles: passed on, or looked at, without being here.

An endpoint that is marked `stays=face_of` leaves what it makes in its own process, and the stream has of each item only
what `face_of(item)` says. A flow that decides by that iterates `handles(stream)` and puts the handles that it wants
into a stream of its own (`Stream.of` an async generator); the items go from the process that made them straight to who
consumes that one, since each handle is where the item's queue is. Who works on a whole batch elsewhere takes a
`Holding`: the items stay where they were made until it lets go, and its handles can be sent to other actors, which
fetch them.

Flows in: a stream. Flows out: handles. Who wakes whom: see `item_queue.py`; a handle's value is fetched from its maker.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable
from typing import Any

from rlinf.runtime.base.calls import current_host
from rlinf.runtime.streams.channel import Handle
from rlinf.runtime.streams.stream import Consumer, Stream, each


async def handles(items: Iterable[Any] | AsyncIterable[Any]) -> AsyncGenerator[Handle, None]:
    """Handles of the items of a stream, unopened where the stream is made on this host; of a list or generator, of what
    it gives.

    Closing it lets go of the stream.
    """
    host = current_host()
    if not isinstance(items, Stream):
        async for value in each(items):
            yield Handle(value, host)
        return
    consumer: Consumer[Any] = Consumer(items, prefetch=True, unread=True, passing=True)
    try:
        while pairs := await consumer.take():
            yield Handle(pairs[0][1], host)
    finally:
        consumer.close()


class Holding:
    """The items of a stream, held until `release`: no other consumer may read it.

    Args:
        stream: that lives on any host. Its bound is lifted: what is held would fill it.
    """

    def __init__(self, stream: Stream[Any]):
        self._consumer: Consumer[Any] = Consumer(stream, prefetch=True, holds=True)
        stream.handle._cast("release_bound")

    async def __aiter__(self) -> AsyncIterator[Handle]:
        host = current_host()
        while pairs := await self._consumer.take():
            yield Handle(pairs[0][1], host)

    def release(self) -> None:
        """Let go of all items: they are done, and their makers may forget them."""
        self._consumer.close()
