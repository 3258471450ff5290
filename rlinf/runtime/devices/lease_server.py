"""The lease manager's door, on the controller: tickets from all hosts become requests to the manager.

Flows in: tickets of single calls, and of the ranks of group calls. Flows out: grants; word to holders that others want
their devices; calls of `offload` and `onload` on the actors' hosts. Who wakes whom: the manager's grant answers the
host's call; the last rank of a group call to be ready lets the whole group ask.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rlinf.runtime.actor.actor import Actor, endpoint
from rlinf.runtime.base.calls import SERVICE, ActorId, Gang, Key
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.devices.lease_manager import DeviceMemory, Lease, LeaseError, LeaseManager, Tenant

MOVES = 10_000
"""Moves that are remembered: far more than a step has."""
Move = tuple[str, str, float, float]
"""An actor, "onload" or "offload", start and end in seconds of the controller's clock."""


@dataclass(slots=True, eq=False)
class _Rank:
    """One rank of a group call, while it waits for the group's devices or uses them."""

    name: str
    who: str
    granted: asyncio.Future[Lease]
    since: float


class GroupLease:
    """One lease shared by the ranks of a group call.

    They ask for their devices together, once all that have not ended are ready: a rank whose arguments are still being
    computed may need the very device that the others would hold. They give them back when none of them needs them.

    Args:
        ranks: how many take part in the call.
    """

    def __init__(self, manager: LeaseManager, ranks: int):
        self._manager = manager
        self.who = ""
        """Its name in reports."""
        self.ranks = ranks
        self.ended: set[str] = set()
        """Ranks whose part of the call is over."""
        self.asking: dict[Key, _Rank] = {}
        self.holding: dict[Key, _Rank] = {}
        self._lease: Lease | None = None
        self._taking: asyncio.Task[None] | None = None

    async def acquire(self, ticket: Key, name: str, who: str) -> Lease:
        """Wait for the devices of all ranks."""
        loop = asyncio.get_running_loop()
        self.who = self.who or f"all ranks of {who}"
        rank = self.asking[ticket] = _Rank(name, who, loop.create_future(), loop.time())
        self._proceed()
        return await rank.granted

    def leave(self, ticket: Key) -> None:
        """This rank does not need the devices now, or does not want them any more."""
        self.holding.pop(ticket, None)
        rank = self.asking.pop(ticket, None)
        if rank is not None:
            rank.granted.cancel()
        if self._taking is not None and not self.asking:
            self._taking.cancel()
        if self._lease is not None and not self.holding and not self.asking:
            lease, self._lease = self._lease, None
            self._manager.release(lease)
        self._proceed()

    def over(self, name: str) -> bool:
        """A rank's part of the call is over; says whether all are."""
        self.ended.add(name)
        self._proceed()
        return len(self.ended) >= self.ranks

    @property
    def missing(self) -> int:
        """Ranks that neither need the devices now nor are over."""
        here = (rank.name for ranks in (self.asking, self.holding) for rank in ranks.values())
        return self.ranks - len(self.ended.union(here))

    def _proceed(self) -> None:
        if self._lease is not None:
            self._grant(self._lease)
        elif (
            self._taking is None
            and self.asking
            and len(self.asking) + len(self.ended) >= self.ranks  # tells in most cases, and at once
            and not self.missing
        ):
            self._taking = asyncio.create_task(self._take())

    async def _take(self) -> None:
        lease = None
        try:
            lease = await self._manager.acquire([rank.name for rank in self.asking.values()], self.who)
        except Exception as error:  # it belongs to those who wait
            for rank in self.asking.values():
                if not rank.granted.done():
                    rank.granted.set_exception(error)
            self.asking.clear()
        finally:
            self._taking = None
            if self.asking:
                self._lease = lease
            elif lease is not None:
                self._manager.release(lease)  # all gave up in the tick of the grant
            self._proceed()

    def _grant(self, lease: Lease) -> None:
        for ticket, rank in self.asking.items():
            if not rank.granted.done():
                rank.granted.set_result(lease)
                self.holding[ticket] = rank
        self.asking.clear()


class LeaseService(Actor):
    """The part of a host's own actor that is the lease manager's door; in use on the controller only."""

    manager: LeaseManager
    tenants: dict[str, tuple[int, ActorId]]
    moved: deque[Move]
    """The last moves of actors."""

    def open_leases(self, memory: dict[int, int] | None) -> None:
        """Start managing devices of so many bytes each (None: as many as anyone likes)."""
        self.tenants = {}
        self.moved = deque(maxlen=MOVES)
        self.manager = LeaseManager(memory, self._move("offload"), self._move("onload"))
        self._memory = memory or {}
        self._cell.host.on_lost.append(lambda host, reason: self._forget(host))
        self._tickets: dict[Key, Lease | GroupLease | None] = {}
        self._groups: dict[Gang, GroupLease] = {}

    def _move(self, what: str) -> Any:
        async def move(name: str) -> None:
            host, actor = self.tenants[name]
            start = self._cell.host.now()
            await self._cell.host.call(host, SERVICE, "move", f"{name}.{what}", (actor, what), {})
            self.moved.append((name, what, start, self._cell.host.now()))

        return move

    # Tenants -----------------------------------------------------------------------------------------------------

    @endpoint
    async def lease_register(self, tenants: list[tuple[Tenant, int, ActorId]]) -> None:
        """Make the actors of one group known to the manager before they ask for anything.

        Raises:
            UserError: one of them, or all of them together, could never be loaded.
        """
        tenants = [(replace(tenant, devices=self._gpus(tenant.devices)), h, i) for tenant, h, i in tenants]
        for device, capacity in self._memory.items():  # the ranks of a group are set up, and called, together
            here = [tenant for tenant, _, _ in tenants if device in tenant.devices]
            needed = sum(tenant.resident_bytes for tenant in here)
            if needed > capacity:
                raise UserError(
                    f"{', '.join(tenant.name for tenant in here)} can never be loaded on device {device} together: "
                    f"they need {needed} of {capacity} bytes. Give them other devices, or see that they need less"
                )
        done: list[tuple[str, ActorId]] = []
        for tenant, host, actor in tenants:
            try:
                self.manager.register(tenant)
            except ValueError as error:
                self.lease_unregister(done)
                raise UserError(f"{error}: give it other devices, or see that it needs less") from None
            self.tenants[tenant.name] = (host, actor)
            done.append((tenant.name, actor))

    def _gpus(self, devices: frozenset[int]) -> frozenset[int]:
        """Devices, each GPU that several hosts share by the number of the first of them: a device is that of the host
        of its number, and a GPU is known by its id."""
        places = self._cell.host.places
        first: dict[str, int] = {}
        for number, place in sorted(places.items()):
            if place.device != "cpu":
                first.setdefault(place.device, number)
        return frozenset(first.get(places[each].device, each) if each in places else each for each in devices)

    def lease_unregister(self, tenants: list[tuple[str, ActorId]]) -> None:
        """Forget actors, unless others have taken their names meanwhile."""
        for name, actor in tenants:
            if name in self.tenants and self.tenants[name][1] == actor:
                del self.tenants[name]
                self.manager.unregister(name)

    @endpoint
    async def lease_devices(self) -> dict[int, DeviceMemory]:
        """Return the memory that each device holds."""
        return self.manager.statistics().devices

    # Tickets -----------------------------------------------------------------------------------------------------

    @endpoint
    async def lease_acquire(self, ticket: Key, name: str, who: str, gang: Gang | None, notify: bool) -> float:
        """Wait for the devices of an actor; or, in a gang, of all its ranks. Returns the seconds that loading took."""
        if ticket[0] in self._cell.host.lost_hosts:
            raise LeaseError(f"{who} asks for a lease from host {ticket[0]}, which is lost")
        self._tickets[ticket] = None
        if gang is None:
            lease = await self.manager.acquire([name], who)
            if ticket not in self._tickets:
                self.manager.release(lease)  # given up in the tick of the grant
                return 0.0
            self._tickets[ticket] = lease
        else:
            self._tickets[ticket] = group = self._group(gang)
            lease = await group.acquire(ticket, name, who)
        if notify:
            lease.on_wanted(lambda: self._tell_wanted(ticket))
        return lease.loading

    def _tell_wanted(self, ticket: Key) -> None:
        if ticket in self._tickets:
            self._cell.host.cast(ticket[0], SERVICE, "lease_wanted", ticket)

    def lease_wanted(self, ticket: Key) -> None:
        """Arrives at the host of the holder."""
        self._cell.host.system.leases.wanted(ticket)

    def lease_release(self, ticket: Key) -> None:
        """The holder of a ticket is done with it, or does not wait for it any more."""
        lease = self._tickets.pop(ticket, None)
        if isinstance(lease, Lease):
            self.manager.release(lease)
        elif lease is not None:
            lease.leave(ticket)

    def lease_over(self, gang: Gang, name: str) -> None:
        """A rank's part of a group call is over: the others need not wait for it."""
        if self._group(gang).over(name):
            self._groups.pop(gang, None)

    def _group(self, gang: Gang) -> GroupLease:
        group = self._groups.get(gang)
        if group is None:
            group = GroupLease(self.manager, gang[2])
            if gang[0] not in self._cell.host.lost_hosts:  # else nobody will say when it is over: not all ranks have it
                self._groups[gang] = group
        return group

    def _forget(self, host: int) -> None:
        """A host died: what it held comes back, and group calls that it made end where they were begun."""
        for ticket in [ticket for ticket in self._tickets if ticket[0] == host]:
            self.lease_release(ticket)
        for gang in [gang for gang in self._groups if gang[0] == host]:
            del self._groups[gang]

    # Reports -----------------------------------------------------------------------------------------------------

    def lease_waits(self) -> Iterator[tuple[str, str, float | None]]:
        """(who, on what, since) for the stall report; since is None where nobody waits, but one leads to the other."""
        for claim in self.manager.waiting():
            for device in claim.devices:
                yield claim.who, f"device {device}", claim.since
        for claim in self.manager.holders():
            for device in claim.devices:
                yield f"device {device}", claim.who, None
            for move in claim.moving:
                yield claim.who, move, claim.since
        for group in self._groups.values():
            for rank in group.asking.values():
                yield rank.who, group.who, rank.since
                if group.missing:
                    yield group.who, f"{group.missing} more of its ranks", rank.since
            for rank in group.holding.values():
                yield group.who, rank.who, None
