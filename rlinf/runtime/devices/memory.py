"""Whose bytes are on which device: the book of the lease manager, and the moves that make room.

Flows in: tenants; the names of those that are about to work, on devices that the caller has reserved for them. Flows
out: calls of `offload` and `onload`, such that no device ever has more bytes than it holds. Who wakes whom: the end of
the last move wakes the `load` that waits for it.

A tenant has no bytes until it is loaded first, its resident bytes from the start of an onload to the end of an
offload, and its parked bytes otherwise. A tenant whose move failed counts as resident, is loaded afresh before it works
again, and may be offloaded to make room: both callbacks must bear to be called again.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Move = Callable[[str], Awaitable[Any]]
"""Moves the tenant of a name, and returns when that is done."""


class LeaseError(RuntimeError):
    """A lease cannot be granted any more: the manager was closed, a tenant has left, or there is no room."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """One that uses devices: an independent rank, or a rank of an SPMD group."""

    name: str
    """Unique, e.g. "trainer[0]"."""
    devices: frozenset[int]
    """The devices that it computes on. None: it never waits, and is loaded before its first lease all the same."""
    resident_bytes: int = 0
    """Bytes on each of its devices while it is loaded, the peak of its work included."""
    parked_bytes: int = 0
    """Bytes that stay on each of its devices after `offload`."""

    def __post_init__(self) -> None:
        if not 0 <= self.parked_bytes <= self.resident_bytes:
            raise ValueError(
                f"tenant {self.name!r}: needs 0 <= parked_bytes <= resident_bytes, "
                f"got {self.parked_bytes} and {self.resident_bytes}"
            )


class DeviceMemory(NamedTuple):
    """Bytes of one device by the book."""

    capacity: int | None
    """None: no limit."""
    resident: int
    """Of tenants that are loaded, are moving, or failed to move."""
    parked: int
    peak: int
    """The most that both came to together, so far."""


@dataclass(eq=False, slots=True)
class _Device:
    number: int
    capacity: int | None
    used: int = 0
    peak: int = 0
    tenants: dict[str, _Entry] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class _Entry:
    """A tenant and where its bytes are."""

    tenant: Tenant
    devices: list[_Device]
    """Empty once it is removed, so that a move that ends later accounts for nothing."""
    bytes: int = 0
    """The memory that counts for it on each of its devices."""
    loaded: bool = False
    """Ready to work. If not, with `bytes` above the parked ones, a move is under way or has failed."""
    move: asyncio.Task[None] | None = None
    used: int = 0
    """The tick of its last use: the least is the least recently used."""

    @property
    def releasable(self) -> int:
        """Bytes per device that an offload gives back; none before the first onload."""
        return max(0, self.bytes - self.tenant.parked_bytes)

    def account(self, count: int) -> None:
        for device in self.devices:
            device.used += count - self.bytes
            device.peak = max(device.peak, device.used)
        self.bytes = count


class Residency:
    """Keeps what is loaded within the memory of the devices, and loaded as long as nobody needs the room."""

    def __init__(self, memory: Mapping[int, int] | None, offload: Move, onload: Move) -> None:
        """Watch devices of `memory` bytes each; a device that is not in it holds any number."""
        self._call = {"offload": offload, "onload": onload}
        self._entries: dict[str, _Entry] = {}
        self._devices = {number: _Device(number, capacity) for number, capacity in (memory or {}).items()}
        self._ticks = itertools.count(1)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def tenant(self, name: str) -> Tenant:
        """Return the tenant of this name.

        Raises:
            ValueError: there is none.
        """
        if name not in self._entries:
            raise ValueError(f"no tenant {name!r} is registered; there are: {', '.join(self._entries) or 'none'}")
        return self._entries[name].tenant

    def add(self, tenant: Tenant) -> None:
        """Watch a tenant that holds no bytes yet.

        Raises:
            ValueError: the name is taken; or with this tenant some tenant on one of its devices could never be
                loaded, even if all others were parked.
        """
        if tenant.name in self._entries:
            raise ValueError(f"tenant {tenant.name!r} is registered already")
        devices = [self._devices.setdefault(number, _Device(number, None)) for number in sorted(tenant.devices)]
        for device in devices:
            _check_room(device, tenant)
        self._entries[tenant.name] = entry = _Entry(tenant, devices)
        for device in devices:
            device.tenants[tenant.name] = entry

    def remove(self, name: str) -> None:
        """Forget a tenant whose bytes are gone; see `tenant` for what is raised."""
        self.tenant(name)
        entry = self._entries.pop(name)
        for device in entry.devices:
            del device.tenants[name]
        entry.account(0)
        entry.devices = []

    def loaded(self, names: Iterable[str]) -> bool:
        """Say whether all these tenants (those that are still here) are ready to work."""
        return all(self._entries[name].loaded for name in names if name in self._entries)

    def touch(self, names: Iterable[str]) -> None:
        """Note that these tenants have been used just now."""
        for name in names:
            if name in self._entries:
                self._entries[name].used = next(self._ticks)

    def moving(self, devices: Iterable[int]) -> tuple[str, ...]:
        """Name the moves under way on these devices, e.g. "offload of rollout[0]"."""
        entries = [entry for number in devices for entry in self._devices[number].tenants.values()]
        return tuple(sorted({entry.move.get_name() for entry in entries if entry.move is not None}))

    def memory(self) -> dict[int, DeviceMemory]:
        """Count bytes on each device."""
        devices = {}
        for number, device in sorted(self._devices.items()):
            parked = sum(e.bytes for e in device.tenants.values() if not e.loaded and not e.move and not e.releasable)
            devices[number] = DeviceMemory(device.capacity, device.used - parked, parked, device.peak)
        return devices

    def cancel_moves(self) -> None:
        """Cancel all moves under way; what waits for them fails."""
        for entry in self._entries.values():
            if entry.move is not None:
                entry.move.cancel()

    async def load(self, names: Collection[str], wanted: Callable[[], object]) -> None:
        """Make room for these tenants and load them; stop between moves when `wanted()` is false.

        The caller has reserved all devices of theirs: nobody else loads anything there, or works. Moves on different
        tenants run at the same time. All moves that were begun have ended when this returns or raises.

        Raises:
            LeaseError: they do not fit together, one was removed, or a move was cancelled.
            Exception: what `offload` or `onload` raised, with a note that names tenant and devices.
        """
        entries = {name: self._entries[name] for name in names if name in self._entries}
        while wanted():
            for name in names:
                if name not in entries or self._entries.get(name) is not entries[name]:
                    raise LeaseError(f"tenant {name!r} was unregistered before its lease began")
            if leaving := self._leaving(entries):
                moves = [self._move(entry, "offload") for entry in leaving]
            else:
                moves = [self._move(entry, "onload") for entry in entries.values() if not entry.loaded]
            if not moves:
                return
            await _ended(moves)

    def _leaving(self, staying: Mapping[str, _Entry]) -> list[_Entry]:
        """Choose who makes room: least recently used first, and nobody who need not.

        Those that are on their way out already, for another device of theirs, come first.
        """
        missing: dict[_Device, int] = {}
        for entry in staying.values():
            for device in entry.devices:
                if device.capacity is not None:
                    missing.setdefault(device, device.used - device.capacity)
                    missing[device] += entry.tenant.resident_bytes - entry.bytes

        def leave(entry: _Entry, sign: int = 1) -> None:
            for device in entry.devices:
                if device in missing:
                    missing[device] -= sign * entry.releasable

        leaving: dict[_Entry, None] = {}
        for device in missing:
            idle = [entry for name, entry in device.tenants.items() if name not in staying and entry.releasable]
            for entry in sorted(idle, key=lambda entry: (entry.move is None, entry.used)):
                if missing[device] > 0 and entry not in leaving:
                    leaving[entry] = None
                    leave(entry)
            if missing[device] > 0:
                raise LeaseError(
                    f"{', '.join(staying)} do not fit on device {device.number} together: {missing[device]} of its "
                    f"{device.capacity} bytes are missing even with all other tenants parked"
                )
        # Whoever was chosen late may free enough alone, on several devices at once: spare the others, or the wait
        # for those who are leaving anyway.
        for entry in sorted(leaving, key=lambda entry: -entry.used):
            room = [-missing[device] for device in entry.devices if device in missing]
            if entry.releasable <= min(room):
                del leaving[entry]
                leave(entry, -1)
        return list(leaving)

    def _move(self, entry: _Entry, what: str) -> asyncio.Task[None]:
        """Begin to offload or onload a tenant, in a task that the cancellation of a request does not reach."""
        if entry.move is None:
            entry.loaded = False
            if what == "onload":
                entry.account(entry.tenant.resident_bytes)
            entry.move = asyncio.create_task(self._run(entry.tenant, what), name=f"{what} of {entry.tenant.name}")
            entry.move.add_done_callback(lambda task: self._moved(entry, what, task))
        return entry.move

    async def _run(self, tenant: Tenant, what: str) -> None:
        try:
            await self._call[what](tenant.name)
        except Exception as error:
            error.add_note(f"raised by the {what} of tenant {tenant.name!r} on devices {sorted(tenant.devices)}")
            raise

    def _moved(self, entry: _Entry, what: str, task: asyncio.Task[None]) -> None:
        entry.move = None
        if task.cancelled() or task.exception() is not None:
            return  # half moved: counts as resident, and is not loaded
        entry.loaded = what == "onload"
        if not entry.loaded:
            entry.account(entry.tenant.parked_bytes)


async def _ended(moves: list[asyncio.Task[None]]) -> None:
    """Wait until all `moves` have ended; raise the first failure, with the others in its notes."""
    await asyncio.wait(moves)
    errors: list[BaseException] = []
    for move in moves:
        error = LeaseError(f"the {move.get_name()} was cancelled") if move.cancelled() else move.exception()
        if error is not None:
            errors.append(error)
    for other in errors[1:]:
        errors[0].add_note(f"another move failed, too: {other!r}")
    if errors:
        raise errors[0]


def _check_room(device: _Device, newcomer: Tenant) -> None:
    """Raise ValueError if, with a newcomer, some tenant could not be loaded on `device` beside all others parked."""
    if device.capacity is None:
        return
    tenants = [*(entry.tenant for entry in device.tenants.values()), newcomer]
    worst = max(tenants, key=lambda tenant: tenant.resident_bytes - tenant.parked_bytes)
    parked = {tenant.name: tenant.parked_bytes for tenant in tenants if tenant is not worst and tenant.parked_bytes}
    if worst.resident_bytes + sum(parked.values()) > device.capacity:
        others = ", ".join(f"{name}: {count}" for name, count in parked.items()) or "nobody else"
        raise ValueError(
            f"cannot register tenant {newcomer.name!r}: {worst.name!r} could never be loaded on device "
            f"{device.number}: it needs {worst.resident_bytes} of {device.capacity} bytes, and {sum(parked.values())} "
            f"parked bytes never leave ({others})"
        )
