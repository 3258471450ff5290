"""The lease of one running call: kept while it computes, given away while it waits for a stream and others want it.

Flows in: the call's computing and waiting. Flows out: acquire and release of the actor's devices. Who wakes whom: word
that the devices are wanted makes a waiting call give them, or one that has worked off its `lease_items`; its next item,
or the last of its next `items`, makes it take them again (see `lease_policy.py`).

So a consumer never starves its own producer: a trainer that iterates the samples of a rollout on the same device holds
the device only while it has samples to work on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from rlinf.runtime.actor.actor import Cell
from rlinf.runtime.base.calls import Call, Key
from rlinf.runtime.base.errors import ActorDied

if TYPE_CHECKING:
    from .lease_client import LeaseClient


LINGER = 0.01
"""Seconds for which devices that others want are kept without using them: what is waited for may be a message away,
and a switch costs more than this."""


class HeldLease:
    """Whether a call of a device endpoint holds its actor's devices right now.

    Args:
        gang: with those of its whole group.
        wanted: told, once, when others wait for them.
    """

    def __init__(
        self, client: LeaseClient, cell: Cell, call: Call, *, gang: bool, wanted: Callable[[], None] | None = None
    ):
        self._client, self._cell, self._call, self._gang = client, cell, call, gang
        self._tell = wanted
        self._ticket: Key | None = None
        self._since = 0.0
        self._wanted = False
        self._over = False
        self._items = 0  # done since the devices were taken
        self._enough = False  # at hand, since they were given away
        self._offering: asyncio.Future[None] | None = None
        self.puts = False
        """Its items are those that it puts out, not those that it takes."""
        self._computing = 0
        self._waiting = 0
        self._moves = 0  # waits that are over
        self._taking = asyncio.Lock()

    async def ensure(self) -> None:
        """Hold the devices, waiting for them if they were given away."""
        if self._ticket is None:
            async with self._taking:
                if self._over:
                    raise ActorDied(f"{self._call.name} is over: what it began can use its devices no more")
                if self._ticket is None:
                    self._wanted = False
                    self._ticket, _ = await self._client.acquire(
                        self._cell, self._call, gang=self._gang, wanted=self._now_wanted
                    )
                    self._since, self._items, self._enough = self._client.now(), 0, False
                if self._over:
                    self.give()

    def close(self) -> None:
        """The call is over: give the devices back for good."""
        self._over = True
        self.give()

    def give(self) -> None:
        """Give the devices back."""
        if self._ticket is not None:
            ticket, self._ticket = self._ticket, None
            self._client.release(ticket)
            self._client.span(self._cell, self._call, self._since)
        if self._offering is not None:
            self._offering.set_result(None)
            self._offering = None

    # Items -------------------------------------------------------------------------------------------------------

    @property
    def away(self) -> bool:
        """The devices were given away, and the call is not over."""
        return self._ticket is None and not self._over

    @property
    def role(self) -> str:
        """The call's endpoint, without the rank."""
        return self._call.role

    def missing(self, items: int) -> int:
        """How many items, beside so many, must be at hand before devices that were given away are taken again."""
        return max(self._cell.granularity.items - items, 0) if self.away and not self._enough else 0

    def enough(self) -> None:
        """As many items are at hand as that: the devices will be taken."""
        self._enough = self.away

    def done(self, items: int) -> None:
        """The call has worked off so many items."""
        self._items += items

    async def offer(self) -> None:
        """If others wait and the call has had its items, give them the devices: at once, or when what it computes
        beside this is done."""
        if self._due and self._computing:
            if self._offering is None:
                self._offering = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._offering)
        elif self._due:
            self.give()

    @property
    def _due(self) -> bool:
        most = self._cell.granularity.lease_items
        if most is None or self._items < most or not self._wanted or self._ticket is None:
            return False
        # Ranks that work in step cannot leave one by one: who stays may need the others to come to its own turn.
        return not self._gang or self._call.gang is None or self._call.gang[2] == 1

    # Computing and waiting ---------------------------------------------------------------------------------------

    @asynccontextmanager
    async def computing(self) -> AsyncIterator[None]:
        """In it the devices are held, whoever wants them."""
        await self.ensure()
        self._computing += 1
        self._moves += 1
        try:
            yield
        finally:
            self._computing -= 1
            if self._offering is not None and not self._computing:
                self.give()
            self._linger()

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """In it the call waits for others: they may have the devices meanwhile, unless it computes beside."""
        self._waiting += 1
        self._linger()
        try:
            yield
        finally:
            self._waiting -= 1
            self._moves += 1
        await self.ensure()

    def _now_wanted(self) -> None:
        self._wanted = True
        if self._tell is not None:
            self._tell()
        self._linger()

    def _linger(self) -> None:
        """Give the devices to those who want them, unless the call goes on soon."""
        moves = self._moves

        def consider() -> None:
            if self._idle and self._moves == moves:
                self.give()

        if self._idle:
            asyncio.get_running_loop().call_later(LINGER, consider)

    @property
    def _idle(self) -> bool:
        return self._wanted and self._waiting > 0 and not self._computing
