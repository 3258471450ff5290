"""The actor system: spawning, finding, scopes, and the end.

Flows in: a program's wishes. Flows out: groups of actors, channels, a trace. Who wakes whom: leaving a scope ends what
was spawned in it; the loss of a host fails the system.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import socket
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from .actor import Actor, Cell, current_scope
from .arena import Arena
from .bulk import GroupBulk
from .channel import Channel, QueueHandle
from .collectives import Collectives
from .context import CONTROLLER, SERVICE, enter_host
from .errors import ActorDied, StallError, UserError
from .group import ActorGroup, ActorRef
from .host import Host
from .lease import Tenant
from .lease_client import LeaseClient
from .payload import Place
from .queue import ItemQueue
from .service import Service
from .stages import all_or_none
from .trace import write_perfetto
from .transport import Frame, LocalTransport, check_hosts
from .waits import HostReport, find_cycles, render, report_host

A = TypeVar("A", bound=Actor)

MOST_LOCAL_HOSTS = 4096
RESERVED = frozenset({"each", "any", "names", "hosts"})


class ActorSystem:
    """All hosts, seen from one of them.

    Get one from `rlinf.run(main)`, from `self.system` inside an actor, or in any running event loop:

        >>> import asyncio
        >>> async def main():
        ...     async with ActorSystem.local(hosts=2) as system:
        ...         return system.hosts
        >>> asyncio.run(main())
        2
    """

    def __init__(self, host: Host, network: LocalNetwork | None = None):
        self._host = host
        self._network = network
        host.system = self
        self.leases = LeaseClient(host)
        self._collectives: Collectives | None = None
        self.root = Scope(self)
        service = Service()
        Cell(service, SERVICE, "host", host.rank, ActorGroup("host", []), host)
        host.cells[SERVICE] = service._cell
        service.begin()
        self.service = service

    # Opening -----------------------------------------------------------------------------------------------------

    @staticmethod
    @asynccontextmanager
    async def local(
        hosts: int | None = None,
        *,
        serialize: bool = False,
        trace: bool = True,
        device_memory: Mapping[int, int] | None = None,
        stall_after: float | None = None,
    ) -> AsyncIterator[ActorSystem]:
        """A system in this process and event loop.

        Args:
            hosts: how many; None makes a host whenever a number is first used.
            serialize: treat the hosts as separate processes, so that all that goes between them is pickled, and
                tensors go through shared memory: a laptop then shows what a cluster would.
            trace: record spans.
            device_memory: bytes per device, for leases.
            stall_after: seconds a wait may last before the stall report fails the system; None: for ever.
        """
        network = LocalNetwork(hosts, serialize=serialize, trace=trace)
        system = network.system(CONTROLLER)
        system.service.open_leases(dict(device_memory) if device_memory is not None else None)
        for number in range(1, hosts or 1):
            network.system(number)
        loop = asyncio.get_running_loop()
        if hasattr(loop, "deadlock_report"):
            loop.deadlock_report = lambda: render(network.reports())
        enter_host(system._host)
        token = current_scope.set(system.root)
        task = asyncio.current_task()
        watch = None
        if stall_after is not None and task is not None:
            watch = system._host.own(system.watch(stall_after, task.cancel))
        try:
            yield system
        except asyncio.CancelledError:
            if watch is not None and watch.done() and not watch.cancelled():
                await watch  # raises the stall report
            raise
        finally:
            await system.root.close()
            await system.service.manager.close()
            for each in reversed(list(network.systems.values())):
                await each._host.close()
            with contextlib.suppress(ValueError):  # opened by a fixture, closed in another context
                current_scope.reset(token)

    @property
    def collectives(self) -> Collectives:
        """Named process groups and device meshes over hosts; see `collectives.py`."""
        if self._collectives is None:
            store = None
            if self._network is None:
                store, _, _ = next(dist.rendezvous("env://"))
            self._collectives = Collectives(store, self.host, self.hosts)
        return self._collectives

    def places_known(self) -> None:
        """All hosts have said where they live: use process groups if some are on other machines or GPUs."""
        places = self._host.places.values()
        if len({place.machine for place in places}) > 1 or any(place.device != "cpu" for place in places):
            self._host.codec.bulk = GroupBulk(self._host, self.collectives)

    # Spawning and finding ----------------------------------------------------------------------------------------

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return self._host.transport.hosts

    @property
    def host(self) -> int:
        """The host this handle belongs to; 0 for the flow."""
        return self._host.rank

    async def spawn(
        self,
        cls: type[A],
        *,
        hosts: Sequence[int] | None = None,
        name: str | None = None,
        devices: Sequence[int | Iterable[int]] | None = None,
        resident_bytes: int = 0,
        parked_bytes: int = 0,
        priority: int = 0,
        **kwargs: Any,
    ) -> ActorGroup:
        """Make one actor per entry of `hosts` and wait until all are set up. The current scope owns them.

        Args:
            hosts: host of each rank; a host may come several times. Default: every host once.
            name: unique in the system; default: the class's name in lower case.
            devices: per rank, the device or devices it computes on. Its endpoints marked `device=True` then run only
                while it holds a lease on them.
            resident_bytes, parked_bytes: bytes a rank takes on each of its devices while loaded, and while offloaded.
            priority: lower goes first where several wait for a device.
            kwargs: for the actor's `setup`.

        Raises:
            UserError: something about the request cannot work; the text says what to change.
            Exception: what a rank's `setup` raised, after the other ranks have been closed.
        """
        host = self._host
        name = name or cls.__name__.lower()
        hosts = list(hosts) if hosts is not None else list(range(self.hosts))
        self._check_spawn(cls, hosts, name, devices, kwargs)
        await self._control("reserve", name)
        ids = [host.number() for _ in hosts]
        names = [f"{name}[{rank}]" for rank in range(len(hosts))]
        group = ActorGroup(name, [ActorRef(host, cls, n, h, i) for n, h, i in zip(names, hosts, ids, strict=True)])
        try:
            if devices is not None:
                per_rank = [frozenset([d] if isinstance(d, int) else d) for d in devices]
                tenants = [
                    (Tenant(n, d, resident_bytes, parked_bytes, priority), h, i)
                    for n, d, h, i in zip(names, per_rank, hosts, ids, strict=True)
                ]
                await self._control("lease_register", tenants)
            gang = host.number()
            await all_or_none(
                [
                    self._create(
                        h, names[rank], (ids[rank], cls, names[rank], rank, group, devices is not None, gang, kwargs)
                    )
                    for rank, h in enumerate(hosts)
                ]
            )
        except BaseException:
            await self.kill(group)
            raise
        await self._control("publish", name, group)
        (current_scope.get() or self.root).groups.append(group)
        return group

    async def _create(self, host: int, name: str, args: tuple[Any, ...]) -> None:
        await self._host.call(host, SERVICE, "create", f"{name}.setup", args, {})

    def _check_spawn(
        self, cls: Any, hosts: Sequence[int], name: str, devices: Sequence[Any] | None, kwargs: dict[str, Any]
    ) -> None:
        if not (isinstance(cls, type) and issubclass(cls, Actor)):
            raise UserError(f"spawn needs a subclass of rlinf.Actor, got {cls!r}")
        if not hosts:
            raise UserError(f"{name}: hosts is empty; name at least one host")
        complaint = self._network.want(hosts) if self._network else check_hosts(hosts, self.hosts)
        if complaint:
            fix = "" if self._network else f"; start more processes (torchrun --nproc-per-node {max(hosts) + 1})"
            raise UserError(f"{name}: {complaint}{fix}")
        if devices is not None and len(devices) != len(hosts):
            raise UserError(f"{name}: devices has {len(devices)} entries for {len(hosts)} ranks; give one per rank")
        if bad := RESERVED & set(cls.endpoints):
            raise UserError(f"{cls.__name__}: an endpoint cannot be called {sorted(bad)[0]!r}, groups use that name")
        abroad = [h for h in hosts if not self._host.codec.by_reference(h)]
        if abroad and "<locals>" in cls.__qualname__:
            raise UserError(
                f"{cls.__qualname__} is defined inside a function, so host {abroad[0]} cannot import it: "
                "move the class to the top level of a module"
            )
        try:
            inspect.signature(cls.setup).bind(None, **kwargs)
        except TypeError as error:
            raise UserError(
                f"{cls.__name__}.setup{inspect.signature(cls.setup)} does not fit spawn's arguments: {error}"
            ) from None

    def _control(self, method: str, *args: Any) -> Any:
        return self._host.call(CONTROLLER, SERVICE, method, f"system.{method}", args, {})

    async def kill(self, group: ActorGroup) -> None:
        """End a group's actors now; calls to them fail with `ActorDied` from here on."""
        host = self._host
        kills = [
            host.call(ref._host, SERVICE, "kill", f"{ref._name}.close", (ref._actor,), {})
            for ref in group
            if ref._host not in host.lost_hosts
        ]
        results = await asyncio.gather(*kills, return_exceptions=True)
        if CONTROLLER not in host.lost_hosts:
            host.cast(CONTROLLER, SERVICE, "lease_unregister", group.names)
            host.cast(CONTROLLER, SERVICE, "withdraw", group._group_name)
        errors = [r for r in results if isinstance(r, Exception) and not isinstance(r, ActorDied)]
        if errors:
            raise errors[0]

    async def get(self, name: str) -> Any:
        """The group or channel of this name, whoever made it.

        Raises:
            UserError: there is none.
        """
        found = await self._control("look_up", name)
        if found is None:
            raise UserError(f"no group or channel is called {name!r}")
        return found

    async def channel(self, name: str, *, capacity: int | None = None) -> Channel:
        """Make a channel on this host; it ends with the current scope.

        Args:
            capacity: values it holds before `put` waits; None for no bound.
        """
        await self._control("reserve", name)
        host = self._host
        key = host.number()
        queue = ItemQueue(name, capacity)
        host.queues[key] = queue
        channel = Channel(QueueHandle(host, host.rank, key, name), queue)
        scope = current_scope.get() or self.root
        scope.queues.add(queue)
        scope.channels.append(channel)
        await self._control("publish", name, Channel(channel._handle))
        return channel

    def scope(self) -> Scope:
        """A scope to enter by `async with`: what is spawned in it ends with it."""
        return Scope(self)

    # Looking in --------------------------------------------------------------------------------------------------

    async def trace(self, path: str | Path) -> None:
        """Write what happened so far on all hosts as a Perfetto trace (open it at https://ui.perfetto.dev)."""
        dumps = await self._ask_all("spans")
        await asyncio.get_running_loop().run_in_executor(None, write_perfetto, path, dumps)

    async def stall_report(self) -> str:
        """Who waits on whom, since when, on all hosts; deadlocks first."""
        return render(await self._ask_all("report"))

    async def _ask_all(self, what: str) -> list[Any]:
        host = self._host
        here = [n for n in range(self.hosts) if n not in host.lost_hosts]
        return list(await asyncio.gather(*(host.call(n, SERVICE, what, f"host.{what}", (), {}) for n in here)))

    async def watch(self, stall_after: float, fail: Callable[[], object]) -> None:
        """Look every `stall_after` seconds at what waits; a wait that has lasted longer fails the system.

        Raises:
            StallError: with the report.
        """
        while True:
            await asyncio.sleep(stall_after / 2)
            reports: list[HostReport] = await self._ask_all("report")
            waits = [w for report in reports for w in report.waits if w.age >= stall_after and w.who != "host"]
            if waits:
                fail()
                kind = "deadlock" if find_cycles(waits) else "stall"
                raise StallError(f"{kind}: something has waited for more than {stall_after} s\n{render(reports)}")


class Scope:
    """Owns what is spawned in it: leaving it ends its actors and streams, whatever happened."""

    def __init__(self, system: ActorSystem):
        self._system = system
        self.groups: list[ActorGroup] = []
        self.channels: list[Channel] = []
        self.queues: weakref.WeakSet[ItemQueue] = weakref.WeakSet()
        self._token: Any = None

    async def __aenter__(self) -> Scope:
        self._token = current_scope.set(self)
        return self

    async def __aexit__(self, *error: object) -> None:
        with contextlib.suppress(ValueError):  # left in another context than entered
            current_scope.reset(self._token)
        await asyncio.shield(self._system._host.own(self.close()))

    async def close(self) -> None:
        """End everything in it, the youngest first."""
        for queue in list(self.queues):
            queue.abandon()
        for channel in self.channels:
            self._system._host.cast(CONTROLLER, SERVICE, "withdraw", channel.name)
        self.channels.clear()
        errors = []
        while self.groups:
            try:
                await self._system.kill(self.groups.pop())
            except Exception as error:  # the others must be closed too; the first is raised below
                errors.append(error)
        if errors:
            raise errors[0]


class LocalNetwork:
    """The hosts of a local system."""

    def __init__(self, hosts: int | None, *, serialize: bool, trace: bool):
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
            self.systems[number] = ActorSystem(host, self)
        return self.systems[number]

    def want(self, hosts: Sequence[int]) -> str | None:
        """Make hosts as they are asked for, or say what is wrong."""
        complaint = check_hosts(hosts, self._fixed or MOST_LOCAL_HOSTS)
        if complaint is None:
            for number in range(max(hosts) + 1):
                self.system(number)
        return complaint

    def reports(self) -> list[HostReport]:
        return [report_host(s._host, getattr(s.service, "manager", None)) for s in self.systems.values()]


def _copied(frame: Frame) -> Frame:
    from .rpc import _pack, _unpack

    return _unpack(*_pack(frame))


def here(number: int, *, process: str | None = None, device: str = "cpu") -> Place:
    """Where this process lives."""
    node = socket.gethostname()
    machine = Arena.domain() if Arena.available() else f"{node} {os.getpid()}"
    return Place(number, process or f"{node} {os.getpid()}", machine, device, node, os.getpid())
