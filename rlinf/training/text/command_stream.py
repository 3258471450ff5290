"""How the ranks of a trainer get their work: rank 0 reads the input and hands each rank its part, in one order.

In: on rank 0, an async generator of orders, one tuple per round with an entry for each rank. Out: one stream per rank,
of equal length, that ends on all of them after the same round, whether the input ended, failed, or was stopped. Who
wakes whom: an order wakes every rank; rank 0's `done` lets the next order be fetched.

The generator runs in a task of the host, not in the call: the call gives its devices away while it waits, and takes
them again together with all ranks, who wake only when there is work for them, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from rlinf.runtime.streams.stream import Stream

_AHEAD = 2
"""Orders that may be out: one that is computed, and one that peers can open meanwhile. Those are carried out even when
the call is cancelled."""
_END: Any = object()


class Feed:
    """One call's orders.

    Args:
        orders: for every round, what the ranks of each share shall do; rank 0 has the first one's.
        shares: of each rank, which entry of a round is its own.
    """

    def __init__(self, orders: AsyncGenerator[tuple[Any, ...], None], shares: Sequence[int]):
        self.error: BaseException | None = None
        """Why the input ended, if it failed."""
        self._orders = orders
        self._room = asyncio.Semaphore(_AHEAD)
        self._stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._told: list[tuple[int, asyncio.Queue[Any]]] = [(share, asyncio.Queue()) for share in shares[1:]]

    def streams(self) -> list[Stream[Any]]:
        """The orders of each rank; rank 0's is what reads the input."""
        return [
            Stream.of(self._lead(), name="orders"),
            *(Stream.of(_of(told), name="orders") for _, told in self._told),
        ]

    def done(self) -> None:
        """Rank 0 has carried out one order."""
        self._room.release()

    def stop(self) -> None:
        """Give no more orders than are out already."""
        if not self._stopped.done():
            self._stopped.set_result(None)

    async def _lead(self) -> AsyncIterator[Any]:
        try:
            async with aclosing(self._orders) as orders:
                while (order := await self._next(orders)) is not _END:
                    for share, told in self._told:
                        told.put_nowait(order[share])
                    yield order[0]
        except Exception as error:  # told when all ranks have come to the end
            self.error = error
        finally:
            for _, told in self._told:
                told.put_nowait(_END)

    async def _next(self, orders: AsyncIterator[tuple[Any, ...]]) -> Any:
        async def fetch() -> Any:
            await self._room.acquire()
            return await anext(orders, _END)

        fetching = asyncio.ensure_future(fetch())
        try:
            await asyncio.wait({fetching, self._stopped}, return_when=asyncio.FIRST_COMPLETED)
            return fetching.result() if fetching.done() and not self._stopped.done() else _END
        finally:
            if not fetching.done():
                fetching.cancel()
                await asyncio.wait([fetching])
            elif not fetching.cancelled():
                fetching.exception()  # seen


async def _of(told: asyncio.Queue[Any]) -> AsyncIterator[Any]:
    while (part := await told.get()) is not _END:
        yield part
