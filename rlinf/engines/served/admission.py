"""Which answers a server has at once: at most so many, and at most so many tokens of KV cache.

Flows in: rows that want in, rows that are over. Flows out: nothing but the right to begin. Who wakes whom: a row that
leaves wakes those who wait, first come, first served; a row that does not fit holds up those behind it, and one that is
larger than the whole budget goes by itself. Room for one more wakes those who read requests.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from rlinf.engines.base import Request
from rlinf.engines.served.rows import Row


class Admission:
    """Rows that have been let in, and those that wait.

    Args:
        max_rows: let in at once.
        max_tokens: prompts and possible answers of those, together; None for no bound.
    """

    def __init__(self, max_rows: int, max_tokens: int | None) -> None:
        self.readers: set[asyncio.Task[Any]] = set()
        """Tasks that read requests, which `abort` of everything ends."""
        self._max_rows, self._max_tokens = max_rows, max_tokens
        self._inside: set[Row] = set()
        self._tokens = 0
        self._waiting: deque[tuple[Row, asyncio.Future[None]]] = deque()
        self._room = asyncio.Event()  # one more of the usual size would be let in
        self._room.set()

    async def next_of(self, source: AsyncIterator[Request]) -> Request | None:
        """The next request of a source, once there is a row for it: what is taken from a stream earlier, no other rank
        can begin with. None at the end."""
        await self._room.wait()
        return await anext(source, None)

    async def enter(self, row: Row) -> None:
        """Wait until there is room, or nothing more is wanted of the row. Cancelled, it has not entered."""
        place = asyncio.get_running_loop().create_future()
        self._waiting.append((row, place))
        self.settle()
        try:
            await place
        except asyncio.CancelledError:
            self._waiting = deque(one for one in self._waiting if one[0] is not row)
            self.leave(row)
            raise

    def leave(self, row: Row) -> None:
        """A row is over; it may not have been inside."""
        if row in self._inside:
            self._inside.remove(row)
            self._tokens -= row.request.cache_tokens
        self.settle()

    def settle(self) -> None:
        """Let in who fits, and let go who has nothing to wait for."""
        for row, place in list(self._waiting):
            if row.over and not place.done():
                place.set_result(None)
        self._waiting = deque(one for one in self._waiting if not one[1].done())
        while self._waiting and self._fits(self._waiting[0][0]):
            row, place = self._waiting.popleft()
            self._inside.add(row)
            self._tokens += row.request.cache_tokens
            place.set_result(None)
        usual = self._tokens / len(self._inside) if self._inside else 0
        full = self._max_tokens is not None and self._tokens + usual > self._max_tokens
        if self._waiting or len(self._inside) >= self._max_rows or full:
            self._room.clear()
        else:
            self._room.set()

    def _fits(self, row: Row) -> bool:
        if not self._inside:
            return True
        room = self._max_tokens is None or self._tokens + row.request.cache_tokens <= self._max_tokens
        return len(self._inside) < self._max_rows and room
