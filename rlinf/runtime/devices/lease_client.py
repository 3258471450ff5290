"""Leases as the hosts see them: asked for around device endpoints, granted by the manager on the controller.

Flows in: endpoint calls marked `device=True`. Flows out: tickets to the manager on host 0 and back. Who wakes whom:
the manager's grant wakes the endpoint; somebody else's wish for the devices tells the holder that it is wanted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from rlinf.runtime.actor.actor import Cell
from rlinf.runtime.actor.invocation import SHOWN_WAIT
from rlinf.runtime.base.calls import CONTROLLER, SERVICE, Call, Gang, Key
from rlinf.runtime.base.tasks import cancel_all
from rlinf.runtime.observe.spans import DEVICES

from .device_lease import DeviceLease

if TYPE_CHECKING:
    from rlinf.runtime.actor.host import Host
    from rlinf.runtime.base.ports import Readable


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
        late: bool = False,
        inputs: Iterable[Any] = (),
        wanted: Callable[[], None] | None = None,
    ) -> AsyncIterator[None]:
        """Hold the devices of an actor; of its whole group if the call is part of a gang.

        Args:
            gang: with those of its whole group.
            late: see `DeviceLease`.
            inputs: the call's arguments. If there are streams among them, the devices are asked for when the first of
                these has as many items as the actor's `Granularity` says, or has ended: before that there is nothing,
                or too little, to do with them.
            wanted: called when others wait for these devices.
        """
        lease = DeviceLease(self, cell, call, gang=call.gang if gang else None, late=late, wanted=wanted)
        try:
            await self._work_at_hand(cell, call, inputs)
            await lease.resume()
            call.lease = lease
            yield
        finally:
            lease.close()
            if gang:
                self.over(call)

    def over(self, call: Call) -> None:
        """A rank's part of a group call has ended, however far it came: the others need not wait for it."""
        if call.gang is not None:
            gang, call.gang = call.gang, None
            self.gone(gang, call.name.rpartition(".")[0])

    def gone(self, gang: Gang, rank: str) -> None:
        """A rank of a group call needs its devices no more."""
        self._host.cast(CONTROLLER, SERVICE, "lease_over", gang, rank)

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
        self, cell: Cell, call: Call, *, gang: Gang | None = None, wanted: Callable[[], None] | None = None
    ) -> tuple[Key, float]:
        """Wait for the devices; returns a ticket for `release`, and the seconds that loading the actor took."""
        host = self._host
        ticket = host.number()
        if wanted is not None:
            self._wanted[ticket] = wanted
        since = host.now()
        call.doing = "waiting for a lease"
        try:
            args = (ticket, cell.name, call.label, gang, wanted is not None)
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
