"""Leases as the hosts see them: asked for around device endpoints, granted by the manager on the controller.

Flows in: endpoint calls marked `device=True`. Flows out: tickets to the manager on host 0 and back. Who wakes whom:
the manager's grant wakes the endpoint; somebody else's wish for the devices tells the holder that it is wanted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from .actor import Call, Cell
from .context import CONTROLLER, SERVICE
from .held_lease import HeldLease
from .payload import Key

if TYPE_CHECKING:
    from .host import Host

QUANTUM = 0.5
"""Seconds for which a map with work at hand keeps its lease though others wait: a switch must be worth its cost."""


class LeaseClient:
    """Takes leases for the actors of one host."""

    def __init__(self, host: Host):
        self._host = host
        self.waiting: dict[Key, tuple[Call, float]] = {}
        self._wanted: dict[Key, Callable[[], None]] = {}

    @asynccontextmanager
    async def hold(
        self, cell: Cell, call: Call, *, gang: bool, wanted: Callable[[], None] | None = None
    ) -> AsyncIterator[None]:
        """Hold the devices of an actor; of its whole group if the call is part of a gang.

        Args:
            wanted: called when others wait for these devices.
        """
        lease = HeldLease(self, cell, call, gang=gang, wanted=wanted)
        try:
            await lease.ensure()
            call.lease = lease
            yield
        finally:
            call.lease = None
            lease.give()
            if gang and call.gang is not None:
                self._host.cast(CONTROLLER, SERVICE, "lease_over", call.gang)

    async def acquire(
        self, cell: Cell, call: Call, *, gang: bool = False, wanted: Callable[[], None] | None = None
    ) -> Key:
        """Wait for the devices; the ticket returned is for `release`."""
        host = self._host
        ticket = host.number()
        if wanted is not None:
            self._wanted[ticket] = wanted
        self.waiting[ticket] = (call, host.now())
        call.doing = "waiting for a lease"
        try:
            args = (ticket, cell.name, call.label, call.gang if gang else None, wanted is not None)
            await host.call(CONTROLLER, SERVICE, "lease_acquire", "lease", args, {})
        except BaseException:
            self.release(ticket)
            raise
        finally:
            call.doing = None
            _, since = self.waiting.pop(ticket)
            if host.now() - since > 1e-3:
                host.tracer.span(f"{cell.name} lease", "wait for lease", since, host.now())
        return ticket

    def release(self, ticket: Key) -> None:
        """Give the devices back."""
        self._wanted.pop(ticket, None)
        self._host.cast(CONTROLLER, SERVICE, "lease_release", ticket)

    def now(self) -> float:
        """The host's clock."""
        return self._host.now()

    def span(self, cell: Cell, call: Call, since: float) -> None:
        """Record that the call held its actor's devices until now."""
        self._host.tracer.span(f"{cell.name} lease", call.name, since, self._host.now())

    def wanted(self, ticket: Key) -> None:
        """Somebody waits for the devices of this lease."""
        if (tell := self._wanted.get(ticket)) is not None:
            tell()


class LeaseKeeper:
    """The lease of a map stage: taken when there is work, given back when there is none and others want the devices.

    While there is work it is kept for its quantum.
    """

    def __init__(self, host: Host, cell: Cell, call: Call):
        self._host, self._cell, self._call = host, cell, call
        self._ticket: Key | None = None
        self._since = 0.0
        self._users = 0
        self._taking = asyncio.Lock()
        self._wanted = False
        self._given: asyncio.Future[None] | None = None
        self.on_wanted: Callable[[], None] | None = None

    async def acquire(self) -> None:
        """Have the lease, taking it if need be; `done` ends the use."""
        async with self._taking:
            if self._ticket is not None and self._over:
                await self._turn()
            if self._ticket is None:
                self._wanted = False
                leases = self._host.system.leases
                self._ticket = await leases.acquire(self._cell, self._call, wanted=self._now_wanted)
                self._since = self._host.now()
            self._users += 1

    @property
    def _over(self) -> bool:
        """It has had its quantum, and others wait."""
        return self._wanted and self._host.now() - self._since >= QUANTUM

    async def _turn(self) -> None:
        """Let those who use the lease finish, and give it back."""
        if self._users:
            self._given = self._host.loop.create_future()
            await self._given
        else:
            self._release()

    def _now_wanted(self) -> None:
        self._wanted = True
        if self.on_wanted is not None:
            self.on_wanted()
        if not self._users:
            self._release()

    async def done(self, *, more: bool) -> None:
        """One use is over; `more` says that the next can begin at once."""
        self._users -= 1
        if not self._users and self._wanted and (not more or self._over):
            self._release()

    async def close(self) -> None:
        """The stage ends."""
        self._release()

    def _release(self) -> None:
        if self._ticket is not None:
            ticket, self._ticket = self._ticket, None
            leases = self._host.system.leases
            leases.release(ticket)
            leases.span(self._cell, self._call, self._since)
        if self._given is not None and not self._given.done():
            self._given.set_result(None)
