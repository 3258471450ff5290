"""The actor system: spawning, finding, scopes, and the end.

Flows in: a program's wishes. Flows out: groups of actors, channels, a trace. Who wakes whom: leaving a scope ends what
was spawned in it, the youngest first, however it is left; the loss of a host fails the system, and so does a watch that
sees nothing move for too long. A local system (`LocalNetwork`) has many hosts in one process and loop, for tests,
notebooks and virtual time.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import os
import socket
import weakref
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rlinf.runtime.actor.actor import Actor, Cell
from rlinf.runtime.actor.host import Host
from rlinf.runtime.base import calls as ports
from rlinf.runtime.base.calls import CONTROLLER, SERVICE, Gang, Granularity, current_scope, enter, enter_host
from rlinf.runtime.base.errors import ActorDied, StallError, UserError
from rlinf.runtime.base.tasks import all_or_none, few_at_once, finish
from rlinf.runtime.base.tensors import enter_device
from rlinf.runtime.devices.lease import LeaseClient
from rlinf.runtime.devices.memory import DeviceMemory, Tenant
from rlinf.runtime.observe.perfetto import MOST_SPANS, SMALL, ask, write_trace
from rlinf.runtime.observe.stalls import HostReport, Progress, render
from rlinf.runtime.streams.channel import Channel, QueueHandle, QueueRegistry
from rlinf.runtime.streams.item_queue import ItemQueue
from rlinf.runtime.system.ending import Preemption
from rlinf.runtime.system.handles import ActorGroup, ActorRef
from rlinf.runtime.system.host_service import CALLS_DEADLINE, CLOSE_DEADLINE, MOMENT, Service
from rlinf.runtime.system.observer import report_host
from rlinf.runtime.transport.arena import Arena
from rlinf.runtime.transport.collectives import Collectives
from rlinf.runtime.transport.link import Frame, LocalTransport, check_hosts, pack, unpack
from rlinf.runtime.transport.network import job_store
from rlinf.runtime.values.p2p import GroupBulk
from rlinf.runtime.values.pickler import Place
from rlinf.runtime.values.promise import Promise


class Closable(Protocol):
    """Anything with a `close`: a scope, a device mesh."""

    async def close(self) -> None: ...


Owned = ActorGroup | Channel | Closable


class Scope:
    """Owns what is made in it: leaving it ends its actors, channels and streams, whatever happened.

    Example:
        >>> async with system.scope():                                    # doctest: +SKIP
        ...     judge = await system.spawn(Judge, name="judge")
        >>> await system.spawn(Judge, name="judge")                       # doctest: +SKIP
    """

    def __init__(self, system: ActorSystem):
        self._system = system
        self._owned: list[Owned] = []
        self._owner: ports.Scope | None = None
        self._token: Any = None
        self.queues: weakref.WeakSet[ItemQueue] = weakref.WeakSet()
        """Of the streams made in it."""

    def adopt(self, queue: ItemQueue) -> None:
        """Abandon a stream's queue with this scope."""
        self.queues.add(queue)

    def add(self, what: Owned) -> None:
        """End `what` with this scope."""
        self._owned.append(what)

    def forget(self, what: Owned) -> None:
        """It has ended already."""
        if what in self._owned:
            self._owned.remove(what)

    def groups(self) -> list[ActorGroup]:
        """All groups in it and in its scopes, the oldest first."""
        result: list[ActorGroup] = []
        for what in self._owned:
            result += what.groups() if isinstance(what, Scope) else [what] if isinstance(what, ActorGroup) else []
        return result

    async def __aenter__(self) -> Scope:
        self._owner = current_scope.get() or self._system.root
        self._owner.add(self)
        self._token = current_scope.set(self)
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        with contextlib.suppress(ValueError):  # left in another context than entered
            current_scope.reset(self._token)
        closing = self._system._host.own(self.close())
        try:
            await finish(closing)
        finally:
            if self._owner is not None:
                self._owner.forget(self)
        failure = None if closing.cancelled() else closing.exception()
        if failure is not None and error is None:
            raise failure
        if failure is not None:  # what went wrong first is what the user gets to see
            self._system._host.complain("while a scope was left", failure)

    async def close(self) -> None:
        """End everything in it, the youngest first.

        Raises:
            Exception: the first that an actor's `close` raised; all the others have been closed all the same.
        """
        for queue in list(self.queues):
            queue.abandon()
        await self._system.stop_calls(self.groups())  # all at once, so that waiting for the slow ones is not a sum
        first: Exception | None = None
        while self._owned:
            youngest = self._owned.pop()
            try:
                if isinstance(youngest, ActorGroup):
                    await self._system.kill(youngest)
                elif isinstance(youngest, Channel):
                    self._system.withdraw(youngest)
                else:
                    await youngest.close()
            except Exception as error:  # the others must be closed, too
                first = first or error
        if first is not None:
            raise first


RESERVED = frozenset({"each", "any", "names", "hosts"})
"""Names that groups use, so that no endpoint may have them."""


def check_spawn(
    system: ActorSystem,
    cls: Any,
    hosts: Sequence[int],
    name: str,
    devices: Sequence[Any] | None,
    kwargs: dict[str, Any],
) -> None:
    """See that a group can be made as asked.

    Raises:
        UserError: it cannot; the text says what to change.
    """
    if not (isinstance(cls, type) and issubclass(cls, Actor)):
        raise UserError(f"spawn needs a subclass of rlinf.Actor, got {cls!r}")
    if not hosts:
        raise UserError(f"{name}: hosts is empty; name at least one host")
    complaint = system._network.want(hosts) if system._network else check_hosts(hosts, system.hosts)
    if complaint:
        fix = "" if system._network else f"; start more processes (torchrun --nproc-per-node {max(hosts) + 1})"
        raise UserError(f"{name}: {complaint}{fix}")
    if devices is not None and len(devices) != len(hosts):
        raise UserError(f"{name}: devices has {len(devices)} entries for {len(hosts)} ranks; give one per rank")
    if bad := RESERVED & set(cls.endpoints):
        raise UserError(f"{cls.__name__}: an endpoint cannot be called {sorted(bad)[0]!r}, groups use that name")
    abroad = [h for h in hosts if not system._host.codec.by_reference(h)]
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


def tenants(
    group: ActorGroup, devices: Sequence[int | Iterable[int]], resident_bytes: int, parked_bytes: int
) -> list[tuple[Tenant, int, Any]]:
    """The ranks of a group as the lease manager knows them, with host and id of each; arguments as of `spawn`."""
    return [
        (
            Tenant(ref._name, frozenset([on] if isinstance(on, int) else on), resident_bytes, parked_bytes),
            ref._host,
            ref._actor,
        )
        for ref, on in zip(group, devices, strict=True)
    ]


A = TypeVar("A", bound=Actor)
K = TypeVar("K")

KILL_DEADLINE = 3 * CLOSE_DEADLINE
"""Seconds until a host that ends an actor is taken for hung: its calls, own actors and `close` may each take theirs."""
REPORT_DEADLINE = 2.0
"""Seconds that a stall report waits for a host."""


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
        self.queues = QueueRegistry(host)
        host.on_lost.append(self.queues.lost)
        self._collectives: Collectives | None = None
        self._silent: set[int] = set()
        self.root = Scope(self)
        self.preemption: Preemption | None = None  # where a signal leaves time to end in
        self.paused = False  # the program waits for a person, and what waits for the program is not stuck
        service = Service()
        Cell(service, SERVICE, "host", host.rank, ActorGroup("host", []), host)
        host.cells[SERVICE] = service._cell
        service.begin()
        self.service: Service = service

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
        computes: bool = True,
    ) -> AsyncIterator[ActorSystem]:
        """A system in this process and event loop.

        Args:
            hosts: how many; None makes a host whenever a number is first used.
            serialize: treat the hosts as separate processes, so that all that goes between them is pickled, and
                tensors go through shared memory: a laptop then shows what a cluster would.
            trace: record spans.
            device_memory: bytes per device, for leases.
            stall_after: seconds a wait may last before the stall report fails the system; None: for ever.
            computes: on this process's GPU, if it has one; False for actors that only pretend to.
        """
        if computes:
            enter_device()
        network = LocalNetwork(hosts, serialize=serialize, trace=trace)
        system = network.system(CONTROLLER)
        host = system._host
        system.service.open_leases(dict(device_memory) if device_memory is not None else None)
        for number in range(1, hosts or 1):
            network.system(number)
        if hasattr(host.loop, "deadlock_report"):
            host.loop.deadlock_report = lambda: render(network.reports())
        enter_host(host)
        token = current_scope.set(system.root)
        host.flow = task = asyncio.current_task()
        assert task is not None
        watch = None if stall_after is None else host.own(fail_when_stalled(system, stall_after))
        if watch is not None:
            watch.add_done_callback(lambda watch: watch.cancelled() or task.cancel())
        failed = True
        try:
            with _collector_frozen():
                yield system
            failed = False
        except asyncio.CancelledError:
            if watch is not None and watch.done() and not watch.cancelled():
                task.uncancel()
                watch.result()  # raises the stall report
            raise
        finally:
            with contextlib.suppress(ValueError):  # opened by a fixture, closed in another context
                current_scope.reset(token)
            closing = host.loop.create_task(network.close())
            await finish(closing)
            if (error := closing.exception()) is not None:
                if not failed:
                    raise error
                host.complain("while the system was closed", error)

    def enter(self) -> None:
        """Code that runs in this context from now on belongs to this system: for one that is used from tasks which its
        opening did not lead to, such as cells of a notebook, or beside another one."""
        enter(self._host, self.root)

    @property
    def collectives(self) -> Collectives:
        """Named process groups and device meshes over hosts; see `transport/collectives.py`."""
        if self._collectives is None:
            host, store = self._host, job_store() if self._network is None else None
            self._collectives = Collectives(
                store,
                self.host,
                self.hosts,
                gpu=lambda rank: host.places[rank].device if rank in host.places else "cpu",
                tell=lambda rank, name, why: host.cast(rank, SERVICE, "group_failed", name, why),
            )
            host.on_close.append(self._collectives.close)  # torch's record of groups would outlive the system
        return self._collectives

    def places_known(self) -> None:
        """All hosts have said where they live: use process groups if some are on other machines or GPUs."""
        places, here = self._host.places.values(), self._host.places[self.host]
        same = [place.host for place in places if place.machine == here.machine and place.host != self.host]
        self._host.transport.neighbours(same)
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
        items: int = 1,
        lease_items: int | None = None,
        **kwargs: Any,
    ) -> ActorGroup:
        """Make one actor per entry of `hosts` and wait until all are set up. The current scope owns them.

        Args:
            hosts: host of each rank; a host may come several times. Default: every host once.
            name: unique in the system; default: the class's name in lower case.
            devices: per rank, the device or devices it computes on. Its endpoints marked `device=True` then run only
                while it holds a lease on them.
            resident_bytes, parked_bytes: bytes a rank takes on each of its devices while loaded, and while offloaded.
            items: a call that takes a stream asks for its devices only when so many items are at hand, or the stream
                has ended; more of them cost fewer switches, and make the first ones wait.
            lease_items: after so many items a call with work at hand offers its devices to those who wait, not earlier.
                None: a map after a quantum of time, any other call when it would wait.
            kwargs: for the actor's `setup`.

        Raises:
            UserError: something about the request cannot work; the text says what to change.
            Exception: what a rank's `setup` raised, after the other ranks have been closed.
        """
        host = self._host
        name = name or getattr(cls, "__name__", "actor").lower()
        hosts = list(hosts) if hosts is not None else list(range(self.hosts))
        check_spawn(self, cls, hosts, name, devices, kwargs)
        refs = [ActorRef(host, cls, f"{name}[{rank}]", at, host.number()) for rank, at in enumerate(hosts)]
        group, key = ActorGroup(name, refs), refs[0]._actor
        leased = devices is not None
        gang = (*host.number(), len(hosts)) if leased else None
        shared = (group, Granularity(items, lease_items) if leased else None, kwargs)
        try:
            await self._control("reserve", name, key)
            if devices is not None:
                await self._control("lease_register", tenants(group, devices, resident_bytes, parked_bytes))
            await all_or_none(
                [self._create(ref, gang, (ref._actor, cls, ref._name, rank, *shared)) for rank, ref in enumerate(refs)]
            )
            await self._control("publish", name, key, group)
        except BaseException:
            await finish(host.own(self.kill(group)))
            raise
        self._scope.add(group)
        return group

    @property
    def _scope(self) -> ports.Scope:
        return current_scope.get() or self.root

    async def _create(self, ref: ActorRef, gang: Gang | None, args: tuple[Any, ...]) -> None:
        try:
            await self._host.call(ref._host, SERVICE, "create", f"{ref._name}.setup", args, {}, gang)
        finally:
            if gang is not None and ref._host in self._host.lost_hosts:
                self.leases.rank_over(gang, ref._name)  # it cannot say so itself

    def _control(self, method: str, *args: Any) -> Any:
        return self._host.call(CONTROLLER, SERVICE, method, f"system.{method}", args, {})

    async def kill(self, group: ActorGroup) -> None:
        """End a group's actors now; calls to them fail with `ActorDied` from here on.

        Raises:
            Exception: the first that an actor's `close` raised, after all of them have been ended.
        """
        host = self._host
        kills = {
            ref: host.call(ref._host, SERVICE, "kill", f"{ref._name}.close", (ref._actor,), {})
            for ref in group
            if ref._host not in host.lost_hosts
        }
        outcomes = await self.answers(kills, KILL_DEADLINE)
        if CONTROLLER not in host.lost_hosts:
            host.cast(CONTROLLER, SERVICE, "lease_unregister", [(ref._name, ref._actor) for ref in group])
            host.cast(CONTROLLER, SERVICE, "withdraw", group._group_name, group[0]._actor)
        self._scope.forget(group)
        for ref in kills.keys() - outcomes.keys():
            host.complain(f"{ref._name} could not be closed: host {ref._host} does not answer; is its loop blocked?")
        for outcome in outcomes.values():
            if isinstance(outcome, Exception) and not isinstance(outcome, ActorDied):
                raise outcome

    async def stop_calls(self, groups: Iterable[ActorGroup]) -> None:
        """Cancel all calls that run on these groups, and wait until they have ended, or a few seconds."""
        actors: dict[int, list[Any]] = {}
        for ref in (ref for group in groups for ref in group):
            if ref._host not in self._host.lost_hosts:
                actors.setdefault(ref._host, []).append(ref._actor)
        call = self._host.call
        stops = {h: call(h, SERVICE, "stop_calls", "host.stop_calls", (ids,), {}) for h, ids in actors.items()}
        await self.answers(stops, 1.5 * CALLS_DEADLINE)

    async def answers(self, calls: Mapping[K, Promise[Any]], seconds: float) -> dict[K, Any]:
        """Return what each call returned or raised; those that took longer are cancelled and left out."""
        patient = [call for call in calls.values() if call.target not in self._silent]
        if patient:
            await asyncio.wait(patient, timeout=seconds)
        if len(patient) < len(calls):
            await asyncio.wait(calls.values(), timeout=MOMENT)
        answers: dict[K, Any] = {}
        for key, call in calls.items():
            if not call.done():
                self._silent.add(call.target)  # it need not be waited for that long again
                call.cancel()
            elif call.cancelled():
                answers[key] = ActorDied(f"{call.name} was cancelled")
            else:
                answers[key] = call.exception() or call.result()
        return answers

    def withdraw(self, channel: Channel) -> None:
        """End a channel: who uses it gets `QueueClosed`, and its name is free again."""
        channel._handle.abandon()
        self._host.cast(CONTROLLER, SERVICE, "withdraw", channel.name, channel._handle.id)

    async def get(self, name: str) -> Any:
        """The group or channel of this name, whoever made it.

        Raises:
            UserError: there is none.
        """
        what = await self._control("look_up", name)
        if what is None:
            raise UserError(f"no group or channel is called {name!r}")
        return what

    async def channel(self, name: str, *, capacity: int | None = None) -> Channel:
        """Make a channel on this host; it ends with the current scope.

        Args:
            capacity: values it holds before `put` waits; None for no bound.
        """
        host = self._host
        queue = ItemQueue(name, capacity)
        channel = Channel(QueueHandle(host, host.rank, host.number(), name, capacity), queue)
        try:
            await self._control("reserve", name, channel._handle.id)
            self.queues.add(channel._handle.id, queue)
            await self._control("publish", name, channel._handle.id, Channel(channel._handle))
        except BaseException:
            self.withdraw(channel)
            raise
        self._scope.add(channel)
        return channel

    def scope(self) -> Scope:
        """A scope to enter by `async with`: what is spawned in it ends with it."""
        return Scope(self)

    # Looking in --------------------------------------------------------------------------------------------------

    async def trace(self, path: str | Path, *, most: int = MOST_SPANS) -> None:
        """Write what happened so far on all hosts as a Perfetto trace (open it at https://ui.perfetto.dev).

        Args:
            most: spans that the file takes; the newest ones of all hosts.
        """
        await write_trace(self._host, path, self.living(), most)

    async def device_memory(self) -> dict[int, DeviceMemory]:
        """Return the memory that each device holds by the book of the lease manager, and the most that it ever held."""
        return dict(await self._control("lease_devices"))

    async def stall_report(self) -> str:
        """Return a text of who waits on whom, since when, on all hosts; deadlocks first."""
        return render(await reports(self, REPORT_DEADLINE))

    def living(self) -> list[int]:
        """The hosts that are not lost."""
        return [number for number in range(self.hosts) if number not in self._host.lost_hosts]


_opened = 0
"""Systems for which the garbage collector is frozen."""
_left_alone = False
"""The program froze by itself. It is asked no more then: to count what is frozen takes 40 ms and longer."""


@contextlib.contextmanager
def _collector_frozen() -> Iterator[None]:
    """Spare what lives before a system from the garbage collector until the last system is closed: to scan all that a
    program has imported, at every full collection, stalls the loop. A program that froze by itself is left alone."""
    global _opened, _left_alone
    _left_alone = _left_alone or (not _opened and gc.get_freeze_count() > 0)
    freezes = not _left_alone
    if freezes and not _opened:
        gc.freeze()
    _opened += freezes
    try:
        yield
    finally:
        _opened -= freezes
        if freezes and not _opened:
            gc.unfreeze()


# Many hosts in one process --------------------------------------------------------------------------------------------

MOST_LOCAL_HOSTS = 4096


class LocalNetwork:
    """The hosts of a local system.

    Args:
        hosts: how many; None makes a host whenever a number is first used.
        serialize: treat the hosts as separate processes.
        trace: record spans.
    """

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
        """Return reports of what waits on all hosts, in the instant."""
        return [report_host(system._host, system.service.lease_waits()) for system in self.systems.values()]

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
    return unpack(*pack(frame))


def here(number: int, *, process: str | None = None, device: str = "cpu") -> Place:
    """Where this process lives."""
    node = socket.gethostname()
    machine = Arena.domain() if Arena.available() else f"{node} {os.getpid()}"
    return Place(number, process or f"{node} {os.getpid()}", machine, device, node, os.getpid())


# Stalls ----------------------------------------------------------------------------------------------------------


async def reports(system: ActorSystem, seconds: float) -> list[HostReport]:
    """Report what waits on each living host; of one that does not answer in so many seconds, that it does not."""
    host = system.service._cell.host
    calls: dict[int, Promise[Any]] = {}

    async def asked(number: int) -> None:  # whoever does not answer at once must not keep others from being asked
        calls[number] = call = ask(host, number, "report")
        await asyncio.wait([call], timeout=MOMENT)

    await few_at_once(SMALL, asked, system.living())
    answers = await system.answers(calls, seconds)
    silent = "does not answer: something blocks its event loop"
    return [
        answer if isinstance(answer := answers.get(number), HostReport) else HostReport(number, trouble=silent)
        for number in calls
    ]


async def fail_when_stalled(system: ActorSystem, stall_after: float) -> None:
    """Look now and then at what waits, and fail once nothing has moved for `stall_after` seconds.

    Raises:
        StallError: with the report.
    """
    progress, host = Progress(stall_after), system.service._cell.host
    watched, looked = 0.0, host.now()
    while True:
        await asyncio.sleep(stall_after / 4)
        hosts = await reports(system, stall_after / 4)
        progress = Progress(stall_after) if system.paused else progress
        # Where a look is later than it can be, this process did not run (a stopped container, a machine too full): what
        # waits had no chance to move, so that only two looks with nothing between them tell of a stall.
        watched, looked = watched + min(host.now() - looked, stall_after / 2), host.now()
        if (what := progress.stopped(hosts, watched)) is not None:
            raise StallError(f"{what}\n{render(hosts)}")
