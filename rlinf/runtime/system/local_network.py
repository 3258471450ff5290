"""Many hosts in one process and loop, for tests, notebooks and virtual time; and where a process lives.

Flows in: host numbers as they are first used. Flows out: hosts joined by `LocalTransport`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rlinf.runtime.actor.host import Host
from rlinf.runtime.base.calls import CONTROLLER
from rlinf.runtime.observe.stalls import HostReport
from rlinf.runtime.shm.arena import Arena
from rlinf.runtime.system.host_service import report_host
from rlinf.runtime.transport.link import Frame, LocalTransport, check_hosts
from rlinf.runtime.values.codec import Place

if TYPE_CHECKING:
    from rlinf.runtime.system.system import ActorSystem

MOST_LOCAL_HOSTS = 4096


class LocalNetwork:
    """The hosts of a local system.

    Args:
        make: makes the system that a host sees.
        hosts: how many; None makes a host whenever a number is first used.
        serialize: treat the hosts as separate processes.
        trace: record spans.
    """

    def __init__(
        self, make: Callable[[Host, LocalNetwork], ActorSystem], hosts: int | None, *, serialize: bool, trace: bool
    ):
        self._make = make
        self._fixed = hosts
        self._serialize = serialize
        self._trace = trace
        self._places: dict[int, Place] = {}
        self._transports: dict[int, LocalTransport] = {}
        self.systems: dict[int, ActorSystem] = {}

    def system(self, number: int) -> ActorSystem:
        """The system seen from a host, which is made if it does not exist yet."""
        if number not in self.systems:
            self._places[number] = here(number, process=f"virtual {number}" if self._serialize else None)
            transport = LocalTransport(number, self._transports, _copied if self._serialize else None)
            host = Host(transport, self._places, share_memory=self._serialize, trace=self._trace)
            self.systems[number] = self._make(host, self)
        return self.systems[number]

    def want(self, hosts: Sequence[int]) -> str | None:
        """Make hosts as they are asked for, or say what is wrong."""
        complaint = check_hosts(hosts, self._fixed or MOST_LOCAL_HOSTS)
        if complaint is None:
            for number in range(max(hosts) + 1):
                self.system(number)
        return complaint

    def reports(self) -> list[HostReport]:
        """What waits on all hosts, in the instant."""
        return [report_host(system._host, system.service) for system in self.systems.values()]

    async def close(self) -> None:
        """End everything, however far it gets.

        Raises:
            Exception: the first that an actor's `close` raised.
        """
        controller = self.systems[CONTROLLER]
        try:
            await controller.root.close()
        finally:
            await controller.service.manager.close()
            for system in reversed(list(self.systems.values())):
                await system._host.close()


def _copied(frame: Frame) -> Frame:
    from rlinf.runtime.transport.link import pack, unpack

    return unpack(*pack(frame))


def here(number: int, *, process: str | None = None, device: str = "cpu") -> Place:
    """Where this process lives."""
    node = socket.gethostname()
    machine = Arena.domain() if Arena.available() else f"{node} {os.getpid()}"
    return Place(number, process or f"{node} {os.getpid()}", machine, device, node, os.getpid())
