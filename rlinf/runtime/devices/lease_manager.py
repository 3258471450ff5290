"""Decides which actors may use which devices, and in which order.

Flows in: tenants (roles, or ranks of them) with the devices and bytes that they need; requests for leases; releases.
Flows out: leases, each at its turn and with its tenants loaded; calls of `offload` and `onload` for tenants that have
to move. Who wakes whom: a release (or a request that gives up) wakes the next requests for the same devices; the last
`onload` of a grant wakes those who asked for it; a request that has to wait raises `wanted` on the leases in its way.

The rules, all of them per device, so that requests for disjoint devices never meet:

* *Order.* Each device has one queue, first come first. A request waits in the queues of all its devices and is granted
  when it heads all of them and all are free. So sets are granted atomically, nobody overtakes an earlier request that
  shares a device with it, and nobody starves.
* *Sharing.* Leases for the same tenants may be held together. A request joins a grant for its tenants at once, unless
  a request that conflicts is ahead of it by the rule above; else a busy tenant could keep a device for ever.
  So whoever holds a lease must not wait for a second one on the same devices without giving back the first.
* *Memory.* A tenant is loaded before its first lease and stays so until a newcomer does not fit beside it; then the
  least recently used make room, and none that need not. `memory.py` keeps that book.

Everything runs on one event loop, and nothing here is safe to call from elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rlinf.runtime.base.calls import Key
from rlinf.runtime.devices.memory import DeviceMemory, LeaseError, Move, Residency, Tenant

__all__ = ["Claim", "DeviceMemory", "GroupLease", "Lease", "LeaseError", "LeaseManager", "Tenant"]


class Claim(NamedTuple):
    """A line for the stall report."""

    who: str
    names: tuple[str, ...]
    devices: tuple[int, ...]
    since: float
    """`loop.time()` at which it was asked for, its devices were reserved, or it began, whichever was last."""
    moving: tuple[str, ...] = ()
    """The moves that a holder waits for before its lease begins, e.g. "offload of rollout[0]"."""


class Lease:
    """The right to use `devices` with the tenants `names`, from `await acquire(...)` until `release(lease)`."""

    def __init__(self, who: str, names: tuple[str, ...], queues: dict[int, _Queue]) -> None:
        loop = asyncio.get_running_loop()
        self.who = who
        self.names = names
        self.devices = frozenset(queues)
        self.since = loop.time()
        """`loop.time()` at which it was asked for, its devices were reserved, or it began, whichever was last."""
        self.loading = 0.0
        """Seconds from the reservation of its devices until all was loaded and it began."""
        self.wanted = asyncio.Event()
        """Set while a request that conflicts with this lease waits: give it back when convenient."""
        self._queues = list(queues.values())
        self._future: asyncio.Future[Lease] = loop.create_future()
        self._grant: _Grant | None = None
        self._callbacks: list[Callable[[], object]] = []

    def on_wanted(self, callback: Callable[[], object]) -> None:
        """Call `callback` in a later iteration of the loop, each time `wanted` becomes set; soon, if it is set now."""
        self._callbacks.append(callback)
        if self.wanted.is_set():
            asyncio.get_running_loop().call_soon(callback)

    def _set_wanted(self, wanted: bool) -> None:
        if not wanted:
            self.wanted.clear()
        elif not self.wanted.is_set():
            self.wanted.set()
            for callback in self._callbacks:
                asyncio.get_running_loop().call_soon(callback)

    def __repr__(self) -> str:
        return f"<Lease of {', '.join(self.names)} by {self.who} on devices {sorted(self.devices)}>"


@dataclass(eq=False, slots=True)
class _Queue:
    """A device, as far as order goes: who has it, and who waits for it, first come first."""

    grant: _Grant | None = None
    waiting: list[Lease] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Grant:
    """Devices reserved for one set of tenants, with the leases that share it."""

    names: tuple[str, ...]
    queues: list[_Queue]
    leases: dict[Lease, None] = field(default_factory=dict)
    ready: bool = False
    """Everything is loaded and the leases are delivered."""
    task: asyncio.Task[None] | None = None
    """Makes room and loads; owned by the manager, so that cancelling a request never breaks a move."""


class LeaseManager:
    """Grants sets of devices in order, and keeps what is loaded on them within their memory.

    Example::

        manager = LeaseManager({0: 80 << 30}, offload, onload)
        manager.register(Tenant("trainer[0]", frozenset({0}), resident_bytes=60 << 30))
        manager.register(Tenant("rollout[0]", frozenset({0}), resident_bytes=50 << 30))
        lease = await manager.acquire(["trainer[0]"], who="grpo step 3")
        try:
            ...
        finally:
            manager.release(lease)
    """

    def __init__(self, memory: Mapping[int, int] | None, offload: Move, onload: Move) -> None:
        """Manage devices of `memory` bytes each; a device that is not in it holds any number.

        `offload(name)` and `onload(name)` move a tenant off and onto all its devices and return when that is done.
        They are never called for a tenant that holds a lease, nor twice at a time for the same one. After a failure
        they are called again, so they must bear that.
        """
        self._residency = Residency(memory, offload, onload)
        self._queues: dict[int, _Queue] = {}
        self._grants: dict[frozenset[str], _Grant] = {}
        self._waiting: dict[Lease, None] = {}
        self._closed = False

    def register(self, tenant: Tenant) -> None:
        """Let `tenant` ask for leases. It must hold no bytes yet: its first lease loads it, through `onload`.

        Raises:
            ValueError: the name is taken; or with this tenant some tenant on one of its devices could never be
                loaded, even if all others were parked.
        """
        if any(tenant.name in names for names in self._grants):
            raise ValueError(f"tenant {tenant.name!r} has a lease that has not been released")
        self._residency.add(tenant)
        for device in tenant.devices:
            self._queues.setdefault(device, _Queue())

    def unregister(self, name: str) -> None:
        """Forget a tenant whose bytes are gone from its devices, or go with its process.

        Requests that wait for it fail with `LeaseError`; leases of it stay valid until they are released.

        Raises:
            ValueError: no such tenant.
        """
        self._residency.remove(name)
        self._fail([lease for lease in self._waiting if name in lease.names], f"tenant {name!r} was unregistered")

    async def acquire(self, names: Sequence[str], who: str) -> Lease:
        """Wait for all devices of the tenants `names`, at once, with all of these loaded.

        `who` says in reports for whom this is. If nothing has to be waited for, the lease is there without a turn of
        the loop. Cancelling gives up the place in the queues; a move that was begun is finished before others get
        the devices.

        Raises:
            ValueError: no names, or one that is not registered.
            LeaseError: the manager is or was closed, a tenant was unregistered meanwhile, or these do not fit together.
            Exception: what `offload` or `onload` raised, with a note that names tenant and devices.
        """
        tenants = {name: self._residency.tenant(name) for name in names}
        if not tenants:
            raise ValueError(f"{who} asks for a lease of no tenants")
        if self._closed:
            raise LeaseError(f"{who} asks for a lease of {', '.join(tenants)}, but the lease manager is closed")
        devices = frozenset[int]().union(*(tenant.devices for tenant in tenants.values()))
        queues = {device: self._queues[device] for device in sorted(devices)}
        lease = Lease(who, tuple(tenants), queues)
        self._waiting[lease] = None
        for queue in lease._queues:
            queue.waiting.append(lease)
        self._pump([lease], lease._queues)
        try:
            return await lease._future
        except BaseException:
            self._withdraw(lease)
            raise

    def release(self, lease: Lease) -> None:
        """Give `lease` back; the next requests for its devices go on. Giving it back again does nothing."""
        grant = lease._grant
        if grant is None or lease not in grant.leases:
            return
        del grant.leases[lease]
        if not grant.leases and grant.task is None:
            self._finish(grant)

    def holders(self) -> list[Claim]:
        """List the leases whose devices are reserved, those that still wait for moves included."""
        return [
            _claim(lease, () if grant.ready else self._residency.moving(lease.devices))
            for grant in self._grants.values()
            for lease in grant.leases
        ]

    def waiting(self) -> list[Claim]:
        """List the requests that wait for devices, first come first."""
        return [_claim(lease) for lease in self._waiting]

    def memory(self) -> dict[int, DeviceMemory]:
        """Count bytes on each device."""
        return self._residency.memory()

    async def close(self) -> None:
        """Fail all who wait with `LeaseError`, cancel moves under way and wait for these to end.

        Leases that are held stay valid, and `release` goes on working. May be called twice.
        """
        self._closed = True
        starting = [lease for grant in self._grants.values() if not grant.ready for lease in grant.leases]
        self._fail([*self._waiting, *starting], "the lease manager was closed")
        self._residency.cancel_moves()
        tasks = [grant.task for grant in self._grants.values() if grant.task is not None]
        if tasks:
            await asyncio.wait(tasks)

    def _pump(self, requests: list[Lease], changed: Iterable[_Queue]) -> None:
        """Grant what can be granted of `requests` and of those behind them; then tell holders who is wanted.

        `changed` are the queues that a request has entered or left, or whose device has become free.
        """
        changed = dict.fromkeys(changed)
        while requests:
            lease = requests.pop()
            if lease not in self._waiting or any(queue.waiting[0] is not lease for queue in lease._queues):
                continue
            # A request that was cancelled in this iteration of the loop still stands here: it only makes way.
            if not lease._future.done() and not self._grant(lease):
                continue
            self._leave(lease)
            requests += _heads(lease._queues)
            changed.update(dict.fromkeys(lease._queues))
        for grant in {queue.grant: None for queue in changed}:
            if grant is not None:
                wanted = any(queue.waiting for queue in grant.queues)
                for lease in grant.leases:
                    lease._set_wanted(wanted)

    def _grant(self, lease: Lease) -> bool:
        """Let a request that heads its queues have its devices, if they are free or its own tenants have them."""
        key = frozenset(lease.names)
        grant = self._grants.get(key)
        if grant is None:
            if any(queue.grant is not None for queue in lease._queues):
                return False
            grant = self._grants[key] = _Grant(lease.names, lease._queues)
            for queue in lease._queues:
                queue.grant = grant
        grant.leases[lease] = None
        lease._grant = grant
        lease.since = asyncio.get_running_loop().time()
        if grant.task is None:
            if self._residency.loaded(grant.names):
                self._begin(grant)
            else:
                grant.task = asyncio.create_task(self._prepare(grant), name=f"lease of {', '.join(grant.names)}")
        return True

    async def _prepare(self, grant: _Grant) -> None:
        """Load the tenants of a grant, then deliver all its leases; or fail them all, or end it if none is left."""
        try:
            await self._residency.load(grant.names, wanted=lambda: grant.leases)
        except Exception as error:
            _reject(grant.leases, error)
            grant.leases.clear()
        grant.task = None
        if grant.leases:
            self._begin(grant)
        else:
            self._finish(grant)

    def _begin(self, grant: _Grant) -> None:
        grant.ready = True
        for lease in grant.leases:
            if not lease._future.done():
                now = asyncio.get_running_loop().time()
                lease.loading, lease.since = now - lease.since, now
                lease._future.set_result(lease)

    def _finish(self, grant: _Grant) -> None:
        del self._grants[frozenset(grant.names)]
        self._residency.touch(grant.names)
        for queue in grant.queues:
            queue.grant = None
        self._pump(_heads(grant.queues), grant.queues)

    def _fail(self, leases: list[Lease], why: str) -> None:
        for lease in leases:
            _reject([lease], LeaseError(f"{why} while {lease.who} waited for a lease of {', '.join(lease.names)}"))
        for lease in leases:  # only now, lest one that is to fail be granted
            self._withdraw(lease)

    def _withdraw(self, lease: Lease) -> None:
        """Take back a request, whether it waits, is being prepared or has just been granted."""
        if lease in self._waiting:
            self._leave(lease)
            self._pump(_heads(lease._queues), lease._queues)
        else:
            self.release(lease)

    def _leave(self, lease: Lease) -> None:
        del self._waiting[lease]
        for queue in lease._queues:
            queue.waiting.remove(lease)


def _heads(queues: Iterable[_Queue]) -> list[Lease]:
    return [queue.waiting[0] for queue in queues if queue.waiting]


def _reject(leases: Iterable[Lease], error: Exception) -> None:
    for lease in leases:
        if not lease._future.done():
            lease._future.set_exception(error)


def _claim(lease: Lease, moving: tuple[str, ...] = ()) -> Claim:
    return Claim(lease.who, lease.names, tuple(sorted(lease.devices)), lease.since, moving)


# Group calls ---------------------------------------------------------------------------------------------------------


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
