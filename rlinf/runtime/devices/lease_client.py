"""Leases as the hosts see them: asked for around device endpoints, granted by the manager on the controller.

Flows in: endpoint calls marked `device=True`. Flows out: tickets to the manager on host 0 and back. Who wakes whom:
the manager's grant wakes the endpoint; somebody else's wish for the devices tells the holder that it is wanted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from rlinf.runtime.actor.actor import Cell
from rlinf.runtime.actor.invocation import SHOWN_WAIT
from rlinf.runtime.base.calls import CONTROLLER, SERVICE, Call, Key
from rlinf.runtime.base.tasks import cancel_all
from rlinf.runtime.observe.spans import DEVICES

from .call_lease import LINGER, HeldLease

if TYPE_CHECKING:
    from rlinf.runtime.actor.host import Host
    from rlinf.runtime.base.ports import Readable

QUANTUM = 0.5
"""Seconds for which a map with work at hand keeps its lease at least, though others wait."""
WORTH = 10.0
"""The same as a multiple of the time that the switch to it took: switching then costs at most a tenth or two."""


class LeaseClient:
    """Takes leases for the actors of one host."""

    def __init__(self, host: Host):
        self._host = host
        self._wanted: dict[Key, Callable[[], None]] = {}

    @asynccontextmanager
    async def hold(
        self,
        cell: Cell,
        call: Call,
        *,
        gang: bool,
        inputs: Iterable[Any] = (),
        wanted: Callable[[], None] | None = None,
    ) -> AsyncIterator[None]:
        """Hold the devices of an actor; of its whole group if the call is part of a gang.

        Args:
            inputs: the call's arguments. If there are streams among them, the devices are asked for when the first of
                these has as many items as the actor's `Granularity` says, or has ended: before that there is nothing,
                or too little, to do with them.
            wanted: called when others wait for these devices.
        """
        lease = HeldLease(self, cell, call, gang=gang, wanted=wanted)
        try:
            await self._work_at_hand(cell, call, inputs)
            await lease.ensure()
            call.lease = lease
            yield
        finally:
            call.lease = None
            lease.close()
            if gang and call.gang is not None:
                self._host.cast(CONTROLLER, SERVICE, "lease_over", call.gang)

    async def _work_at_hand(self, cell: Cell, call: Call, inputs: Iterable[Any]) -> None:
        streams: list[Readable] = [each.handle for each in inputs if getattr(type(each), "__readable__", False)]
        if not streams:
            return
        call.doing = "waiting for work"
        items, host = cell.granularity.items, self._host
        looks = [asyncio.ensure_future(stream.rebind(host).at_hand(host.number(), items)) for stream in streams]
        try:
            await asyncio.wait(looks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            call.doing = None
            await cancel_all(looks)

    async def acquire(
        self, cell: Cell, call: Call, *, gang: bool = False, wanted: Callable[[], None] | None = None
    ) -> tuple[Key, float]:
        """Wait for the devices; returns a ticket for `release`, and the seconds that loading the actor took."""
        host = self._host
        ticket = host.number()
        if wanted is not None:
            self._wanted[ticket] = wanted
        since = host.now()
        call.doing = "waiting for a lease"
        try:
            args = (ticket, cell.name, call.label, call.gang if gang else None, wanted is not None)
            loading: float = await host.call(CONTROLLER, SERVICE, "lease_acquire", "lease", args, {})
        except BaseException:
            self.release(ticket)
            raise
        finally:
            call.doing = None
            if host.now() - since > SHOWN_WAIT:
                endpoint = call.name.rpartition(".")[2]
                host.tracer.span("wait", cell.name, endpoint, DEVICES, since, host.now())
        return ticket, loading

    def release(self, ticket: Key) -> None:
        """Give the devices back."""
        self._wanted.pop(ticket, None)
        self._host.cast(CONTROLLER, SERVICE, "lease_release", ticket)

    def now(self) -> float:
        """The host's clock."""
        return self._host.now()

    def span(self, cell: Cell, call: Call, since: float) -> None:
        """Record that the call held its actor's devices until now."""
        endpoint = call.name.rpartition(".")[2]
        self._host.tracer.span("lease", cell.name, endpoint, call.name, since, self._host.now())

    def wanted(self, ticket: Key) -> None:
        """Somebody waits for the devices of this lease."""
        if (tell := self._wanted.get(ticket)) is not None:
            tell()


class LeaseKeeper:
    """The lease of a map stage: taken when there is enough work, given back when there is none and others want the
    devices.

    While there is work it is kept for its quantum, of items if the actor's `Granularity` names one, else of seconds.
    """

    def __init__(self, host: Host, cell: Cell, call: Call):
        self._host, self._cell, self._call = host, cell, call
        self._ticket: Key | None = None
        self._since = 0.0
        self._quantum = QUANTUM
        self._users = 0
        self._uses = 0  # so far
        self._items = 0  # done with this lease
        self._hand = 0  # items that users have, or wait with
        self._more: asyncio.Future[None] | None = None
        self._taking = asyncio.Lock()
        self._wanted = False
        self._given: asyncio.Future[None] | None = None
        self.on_wanted: Callable[[], None] | None = None

    async def acquire(self, items: int, look: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        """Have the lease, taking it if need be; `done` ends the use.

        Args:
            items: that are to be worked off.
            look: waits until so many more are at hand, or all that will ever be.
        """
        self._hand += items
        if self._more is not None and not self._more.done():
            self._more.set_result(None)
        try:
            await self._acquire(look)
        except BaseException:
            self._hand -= items
            raise

    async def _acquire(self, look: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        async with self._taking:
            if self._ticket is not None and self._over:
                await self._turn()
            if self._ticket is None:
                await self._enough(look)
                self._wanted, self._items = False, 0
                leases = self._host.system.leases
                self._ticket, loading = await leases.acquire(self._cell, self._call, wanted=self._now_wanted)
                self._quantum = max(QUANTUM, WORTH * loading)
                self._since = self._host.now()
            self._users += 1
            self._uses += 1

    async def _enough(self, look: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        """Wait until the items at hand are worth taking the devices for."""
        while (missing := self._cell.granularity.items - self._hand) > 0:
            self._more = self._host.loop.create_future()
            looking = asyncio.ensure_future(look(missing))
            try:
                await asyncio.wait([looking, self._more], return_when=asyncio.FIRST_COMPLETED)
                if looking.done():
                    return looking.result()
            finally:
                self._more = None
                await cancel_all([looking])

    @property
    def _over(self) -> bool:
        """It has had its quantum, and others wait."""
        most = self._cell.granularity.lease_items
        if most is not None:
            return self._wanted and self._items >= most
        return self._wanted and self._host.now() - self._since >= self._quantum

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
            self._linger()

    def done(self, items: int) -> None:
        """One use, for so many items, is over."""
        self._users -= 1
        self._items += items
        self._hand -= items
        if not self._users and self._wanted:
            if self._over:
                self._release()
            else:
                self._linger()

    def _linger(self) -> None:
        """Give the lease back unless the next use comes soon."""
        uses = self._uses
        self._host.loop.call_later(LINGER, lambda: self._release() if self._uses == uses else None)

    def close(self) -> None:
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
