"""Leases as the hosts see them: asked for around device endpoints, granted by the manager on the controller.

Flows in: endpoint calls marked `device=True`. Flows out: tickets to the manager on host 0 and back. Who wakes whom:
the manager's grant wakes the endpoint; somebody else's wish for the devices tells the holder that it is wanted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from .actor import Actor, ActorId, Call, Cell, Gang, endpoint
from .context import CONTROLLER, SERVICE
from .lease import Lease, LeaseManager, Tenant
from .payload import Key

if TYPE_CHECKING:
    from .host import Host

QUANTUM = 0.5
"""Seconds for which a map keeps its lease while it has work at hand and others wait: a switch must be worth its cost."""


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
        ticket = await self.acquire(cell, call, gang=gang, wanted=wanted)
        start = self._host.now()
        try:
            yield
        finally:
            self.release(ticket)
            self._host.tracer.span(f"{cell.name} lease", call.name, start, self._host.now())

    async def acquire(
        self, cell: Cell, call: Call, *, gang: bool = False, wanted: Callable[[], None] | None = None
    ) -> Key:
        """Wait for the devices; the ticket returned is for `release`."""
        host = self._host
        ticket = host.number()
        group = call.gang if gang else None
        names = [cell.name] if group is None else cell.group.names
        if wanted is not None:
            self._wanted[ticket] = wanted
        self.waiting[ticket] = (call, host.now())
        call.doing = "waiting for a lease"
        try:
            await host.call(
                CONTROLLER,
                SERVICE,
                "lease_acquire",
                "lease",
                (ticket, names, call.label, group, wanted is not None),
                {},
            )
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

    def wanted(self, ticket: Key) -> None:
        """Somebody waits for the devices of this lease."""
        if (tell := self._wanted.get(ticket)) is not None:
            tell()


class LeaseKeeper:
    """The lease of a map stage: taken when there is work, kept while there is more, given back when it would wait."""

    def __init__(self, host: Host, cell: Cell, call: Call):
        self._host, self._cell, self._call = host, cell, call
        self._ticket: Key | None = None
        self._since = 0.0
        self._users = 0
        self._taking = asyncio.Lock()
        self._is_wanted = False
        self.on_wanted: Callable[[], None] | None = None

    async def acquire(self) -> None:
        """Have the lease, taking it if need be; `done` ends the use."""
        self._users += 1
        try:
            async with self._taking:
                if self._ticket is None:
                    self._is_wanted = False
                    leases = self._host.system.leases
                    self._ticket = await leases.acquire(self._cell, self._call, wanted=self._now_wanted)
                    self._since = self._host.now()
        except BaseException:
            self._users -= 1
            raise

    def _now_wanted(self) -> None:
        self._is_wanted = True
        if self.on_wanted is not None:
            self.on_wanted()

    async def done(self, *, more: bool) -> None:
        """One use is over; `more` says that the next can begin at once."""
        self._users -= 1
        over = self._is_wanted and self._host.now() - self._since >= QUANTUM
        if self._users == 0 and (not more or over):
            self._release()

    async def close(self) -> None:
        """The stage ends."""
        self._release()

    def _release(self) -> None:
        if self._ticket is not None:
            ticket, self._ticket = self._ticket, None
            self._host.system.leases.release(ticket)
            self._host.tracer.span(f"{self._cell.name} lease", self._call.name, self._since, self._host.now())


class _Gang:
    """One lease shared by the ranks of a group call."""

    def __init__(self, task: asyncio.Task[Lease]):
        self.task = task
        self.members: set[Key] = set()


class LeaseService(Actor):
    """The part of a host's own actor that is the lease manager's door; in use on the controller only."""

    manager: LeaseManager
    tenants: dict[str, tuple[int, ActorId]]

    def open_leases(self, memory: dict[int, int] | None) -> None:
        """Start managing devices of so many bytes each (None: as many as anyone likes)."""
        self.tenants = {}
        self.manager = LeaseManager(memory, self._move("offload"), self._move("onload"))
        self._leases: dict[Key, Lease] = {}
        self._gangs: dict[Gang, _Gang] = {}
        self._gang_of: dict[Key, Gang] = {}
        self._tickets: set[Key] = set()

    def _move(self, what: str) -> Any:
        async def move(name: str) -> None:
            host, actor = self.tenants[name]
            await self._cell.host.call(host, SERVICE, "move", f"{name}.{what}", (actor, what), {})

        return move

    @endpoint
    async def lease_register(self, tenants: list[tuple[Tenant, int, ActorId]]) -> None:
        """Make actors known to the manager before they ask for anything."""
        done = []
        try:
            for tenant, host, actor in tenants:
                self.manager.register(tenant)
                self.tenants[tenant.name] = (host, actor)
                done.append(tenant.name)
        except ValueError:
            self.lease_unregister(done)
            raise

    def lease_unregister(self, names: list[str]) -> None:
        for name in names:
            if self.tenants.pop(name, None) is not None:
                self.manager.unregister(name)

    @endpoint
    async def lease_acquire(self, ticket: Key, names: list[str], who: str, gang: Gang | None, notify: bool) -> None:
        """Wait for the devices of these tenants."""
        self._tickets.add(ticket)
        if gang is None:
            lease = await self.manager.acquire(names, who)
            self._leases[ticket] = lease
        else:
            lease = await self._join(ticket, names, who, gang)
        if ticket not in self._tickets:
            self._leave(ticket)
        elif notify:
            lease.on_wanted(lambda: self._tell_wanted(ticket))

    async def _join(self, ticket: Key, names: list[str], who: str, gang: Gang) -> Lease:
        shared = self._gangs.get(gang)
        if shared is None:
            shared = self._gangs[gang] = _Gang(self._cell.host.own(self.manager.acquire(names, who)))
        shared.members.add(ticket)
        self._gang_of[ticket] = gang
        return await asyncio.shield(shared.task)

    def _tell_wanted(self, ticket: Key) -> None:
        if ticket in self._tickets:
            self._cell.host.cast(ticket[0], SERVICE, "lease_wanted", ticket)

    def lease_wanted(self, ticket: Key) -> None:
        self._cell.host.system.leases.wanted(ticket)

    def lease_release(self, ticket: Key) -> None:
        self._tickets.discard(ticket)
        self._leave(ticket)

    def _leave(self, ticket: Key) -> None:
        if (lease := self._leases.pop(ticket, None)) is not None:
            self.manager.release(lease)
        gang = self._gang_of.pop(ticket, None)
        if gang is not None:
            shared = self._gangs[gang]
            shared.members.discard(ticket)
            if not shared.members:
                del self._gangs[gang]
                shared.task.add_done_callback(self._release_gang)
                shared.task.cancel()

    def _release_gang(self, task: asyncio.Task[Lease]) -> None:
        if not task.cancelled() and task.exception() is None:
            self.manager.release(task.result())

    def lease_forget(self, host: int) -> None:
        """A host died: what it held comes back."""
        for ticket in [ticket for ticket in self._tickets if ticket[0] == host]:
            self.lease_release(ticket)
