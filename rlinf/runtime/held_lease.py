"""The lease of one running call: kept while it computes, given away while it waits for a stream and others want it.

Flows in: the call's computing and waiting. Flows out: acquire and release of the actor's devices. Who wakes whom: word
that the devices are wanted makes a waiting call give them; its next item makes it take them again.

So a consumer never starves its own producer: a trainer that iterates the samples of a rollout on the same device holds
the device only while it has samples to work on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from .actor import Call, Cell
from .errors import ActorDied
from .payload import Key

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
                    self._since = self._client.now()
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
