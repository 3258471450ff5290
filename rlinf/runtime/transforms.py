"""What streams become on their owner's host: batches, first items, copies, shares.

Flows in: a consumer of a stream. Flows out: items in one or more queues, which close with the source. Each is a task of
the host: it ends with its source, fails its sinks when it fails, and is cancelled when nobody reads them any more.
Weights are computed here, so the items pass through this host; plain batches and copies are passed on unread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .errors import QueueClosed
from .queue import ItemQueue

if TYPE_CHECKING:
    from .host import Host
    from .stream import Consumer


def run(host: Host, work: Any, sink: ItemQueue, name: str, *more: ItemQueue) -> None:
    """Run a coroutine that fills queues, in a task of the host; they close when it ends and fail when it fails."""
    sinks = (sink, *more)

    async def stage() -> None:
        try:
            await work
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

    task = host.own(stage())
    for queue in sinks:
        queue.producers[name] = lambda: _stop_unless_used(task, sinks)


def _stop_unless_used(task: asyncio.Task[None], sinks: Sequence[ItemQueue]) -> None:
    if all(queue.error is not None for queue in sinks):
        task.cancel()


async def feed(items: Iterable[Any] | AsyncIterable[Any], sink: ItemQueue) -> None:
    if isinstance(items, AsyncIterable):
        async for item in items:
            await sink.put(item)
    else:
        for item in items:
            await sink.put(item)


async def batch(source: Consumer[Any], sink: ItemQueue, n: int) -> None:
    source.most = n
    while taken := await source.take():
        await sink.put([value for _, value in taken])


async def batch_by_weight(source: Consumer[Any], sink: ItemQueue, weight: Callable[[Any], float], limit: float) -> None:
    gathered: list[Any] = []
    total = 0.0
    while taken := await source.take():
        item = taken[0][1]
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
        taken = await source.take()
        if not taken:
            return
        await sink.put(taken[0][1])
    source.leave()
    source._handle.abandon()


async def tee(source: Consumer[Any], sinks: Sequence[ItemQueue]) -> None:
    while taken := await source.take():
        for sink in sinks:
            with contextlib.suppress(QueueClosed):  # this branch was dropped; the others go on
                sink.put_nowait(taken[0][1], force=True)


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
                sinks[sink].put_nowait(taken[index][1], force=True)
            else:
                sinks[sink].put_nowait(pad, force=True)
