"""What a plan may say about devices while actors live: how finely they are taken, what they hold, how full they are.

Flows in: names and numbers, from anywhere. Flows out: calls to the actors' hosts and to the lease manager on the
controller. Who wakes whom: an actor that grew makes the manager move others off its devices.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from rlinf.runtime.base.calls import SERVICE
from rlinf.runtime.base.lease_policy import Granularity

from .memory import DeviceMemory

if TYPE_CHECKING:
    from rlinf.runtime.actor.host import Host


class DeviceControl:
    """The part of `ActorSystem` that plans speak to."""

    _host: Host

    def _control(self, method: str, *args: Any) -> Any:
        raise NotImplementedError

    async def get(self, name: str) -> Any:
        """See `ActorSystem.get`."""
        raise NotImplementedError

    async def _group(self, group: Any) -> Any:
        return await self.get(group) if isinstance(group, str) else group

    async def regulate(self, group: Any, *, items: int = 1, lease_items: int | None = None) -> None:
        """Change how finely a group takes its devices; see `spawn`. What waits for devices already waits as it did.

        Raises:
            UserError: there is no such group, or a number is below 1.
        """
        granularity = Granularity(items, lease_items)
        found = await self._group(group)
        call, what = self._host.call, f"{found._group_name}.regulate"
        calls = [call(ref._host, SERVICE, "regulate", what, (ref._actor, granularity), {}) for ref in found]
        await asyncio.gather(*calls)

    async def resize(self, group: Any, *, resident_bytes: int | None = None, parked_bytes: int | None = None) -> None:
        """Declare anew what each rank of a group takes on each of its devices, once that was measured.

        It waits until nobody else has these devices, loads the group, and moves others off where they do not fit beside
        it any more: do it between steps.

        Args:
            group: it, or its name.
            resident_bytes, parked_bytes: as in `spawn`; None leaves the number as it is.

        Raises:
            UserError: there is no such group, it has no devices, or it could never be loaded; nothing has changed.
        """
        found = await self._group(group)
        await self._control("lease_resize", found.names, resident_bytes, parked_bytes)

    async def device_memory(self) -> dict[int, DeviceMemory]:
        """What each device holds by the book of the lease manager, and the most that it ever held."""
        devices: dict[int, DeviceMemory] = await self._control("lease_devices")
        return devices
