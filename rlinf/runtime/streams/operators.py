"""What streams become on their owner's host: batches, first items, copies, shares.

Flows in: a consumer of a stream. Flows out: items in one or more queues, which close with the source. Each is a task of
the host: it ends with its source, fails its sinks when it fails, and is cancelled when nobody reads them any more. Who
wakes whom: an item at the source wakes the stage; space in a sink lets it go on.

Plain batches, copies and shares pass items on unread; weights are computed here, so those items are opened here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from rlinf.runtime.base.calls import Call, current_call, waiter
from rlinf.runtime.base.errors import QueueClosed

from .item_queue import ItemQueue

if TYPE_CHECKING:
    from rlinf.runtime.actor.host import Host

    from .consumer import Consumer


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
