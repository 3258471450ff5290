"""The actor that every host has, for the runtime's own calls: all that hosts ask of each other.

Flows in: calls from `ActorSystem`, queue handles, lease clients on any host. Flows out: actors, items, leases, values,
spans. Who wakes whom: see what stands behind each part: `item_queue.py`, `stages.py`, `lease_manager.py`.
"""

from __future__ import annotations

import asyncio
import pickle
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import astuple, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rlinf.runtime.actor.actor import Actor, Cell, Moving, Running, endpoint
from rlinf.runtime.base.calls import FLOW, SERVICE, ActorId, Gang, Granularity, Key, current_call
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.base.tasks import all_or_none, cancel_all
from rlinf.runtime.devices.lease import DeviceLease
from rlinf.runtime.devices.lease_manager import DeviceMemory, GroupLease, Lease, LeaseError, LeaseManager, Tenant
from rlinf.runtime.observe.dataflow import Passages
from rlinf.runtime.observe.perfetto import Exports, Extract, Outline
from rlinf.runtime.observe.spans import Busy, Seen, Span, busy, recent
from rlinf.runtime.observe.stalls import HostReport
from rlinf.runtime.streams.channel import Channel, QueueHandle, QueueRegistry, Sealed
from rlinf.runtime.streams.item_queue import Pairs, Token
from rlinf.runtime.streams.stages import DEFAULT_CONCURRENCY, Emitter, MapWorker, generate
from rlinf.runtime.streams.stream import Stream
from rlinf.runtime.system.handles import ActorGroup
from rlinf.runtime.system.observer import (
    ActorState,
    LookBack,
    QueueState,
    look_at,
    looked_back,
    report_host,
    spans_since,
)
from rlinf.runtime.values.codec import Place
from rlinf.runtime.values.p2p import GroupBulk
from rlinf.runtime.values.relay import Answer, Versions

if TYPE_CHECKING:
    from rlinf.runtime.base.calls import Host

CALLS_DEADLINE = 2.0
"""Seconds that cancelled calls may take before they are left behind: Ctrl-C promises five in all."""
CLOSE_DEADLINE = 2.5
"""Seconds that an actor's `close` may take before it is given up."""
FAN_OUT = 8
"""Hosts to which one host passes on what all are to get."""
MOMENT = 0.2
"""Seconds for what only has to be told."""
MOVES = 10_000
"""Moves of actors that are remembered: far more than a step has."""
ActorMove = tuple[str, str, float, float]
"""An actor, "onload" or "offload", start and end in seconds of the controller's clock."""
READ_ON_LOOP = 5000
"""Spans of a step that are read on the event loop, in some 5 ms; more are read in a thread."""


def children(host: int, hosts: int) -> range:
    """The hosts that get from this one what goes to all: a tree rooted in host 0, a few levels deep for thousands."""
    return range(min(FAN_OUT * host + 1, hosts), min(FAN_OUT * host + FAN_OUT + 1, hosts))


class Service(Actor):
    """See the module's docstring."""

    def begin(self) -> None:
        """Called once, before anything can arrive."""
        self._names: dict[str, tuple[Key, ActorGroup | Channel | None]] = {}
        self._unready: set[ActorId] = set()
        self._exports = Exports(self._host)
        self._seen: Seen = {}
        self.all_here = asyncio.Event()
        self.farewell: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.on_interrupt: Callable[[int], None] | None = None
        self.manager = LeaseManager(None, self._move("offload"), self._move("onload"))
        """In use on the controller only; see `open_leases`."""
        self.tenants: dict[str, tuple[int, ActorId]] = {}
        self.moved: deque[ActorMove] = deque(maxlen=MOVES)
        """The last moves of actors."""
        self._tickets: dict[Key, Lease | GroupLease | None] = {}
        self._groups: dict[Gang, GroupLease] = {}

    @property
    def _host(self) -> Host:
        return self._cell.host

    @property
    def _queues(self) -> QueueRegistry:
        registry: QueueRegistry = self._host.system.queues
        return registry

    # Joining and leaving -----------------------------------------------------------------------------------------

    def hello(self, place: Place) -> None:
        """A host tells the controller that it serves, and where it lives."""
        host = self._host
        host.places[place.host] = place
        if len(host.places) == host.transport.hosts:
            self.welcome(pickle.dumps([astuple(place) for place in host.places.values()], 5))

    def welcome(self, places: bytes) -> None:
        """Where all hosts live, made once by the controller and passed on from host to host along a tree."""
        host = self._host
        for child in children(host.rank, host.transport.hosts):
            host.cast(child, self._cell.id, "welcome", places)
        host.places.update((place.host, place) for place in (Place(*each) for each in pickle.loads(places)))
        host.system.places_known()
        self.all_here.set()

    def interrupted(self, number: int) -> None:
        """A host tells the controller that a signal told it to stop."""
        if self.on_interrupt is not None:
            self.on_interrupt(number)

    @endpoint
    async def retire(self) -> None:
        """End the actors that are still here; the system ends, or the controller is gone."""
        cells = self._host.cells
        await self._stop_calls([cell for id, cell in cells.items() if id != self._cell.id])
        for id in reversed(list(cells)):
            if id != self._cell.id:
                try:
                    await self.kill(id)
                except Exception as error:  # one actor's close must not keep the others from theirs
                    self._host.complain("while ending", error)

    def bye(self, graceful: bool) -> None:
        """The controller leaves, and so should this host."""
        if not self.farewell.done():
            self.farewell.set_result(graceful)

    def group_failed(self, name: str, why: str) -> None:
        """Another member of a process group or mesh has failed."""
        self._host.system.collectives.failed(name, why, tell=False)

    def bulk_begun(self, source: int, tag: int) -> None:
        """The other host of a transfer between two GPUs holds its own (see `values/p2p.py`)."""
        bulk = self._host.codec.bulk
        if isinstance(bulk, GroupBulk):
            bulk.begun(source, tag)

    # Actors ------------------------------------------------------------------------------------------------------

    @endpoint
    async def create(
        self,
        actor_id: ActorId,
        cls: type[Actor],
        name: str,
        rank: int,
        group: ActorGroup,
        granularity: Granularity | None,
        kwargs: dict[str, Any],
    ) -> None:
        """Make an actor and run its setup; with devices (and a granularity), while it holds them."""
        host = self._host
        call = current_call.get()
        assert call is not None
        cell = Cell(cls(), actor_id, name, rank, group, host)
        cell.scope = host.system.scope()
        cell.leased = granularity is not None
        cell.granularity = granularity or cell.granularity
        host.cells[actor_id] = cell
        self._unready.add(actor_id)
        try:
            with Running(host, cell, call):
                if cell.leased:
                    async with host.system.leases.hold(cell, call, gang=True):
                        await cell.actor.setup(**kwargs)
                else:
                    await cell.actor.setup(**kwargs)
        except BaseException:
            host.cells.pop(actor_id, None)
            cell.stop_computing()
            await cell.scope.close()
            raise
        finally:
            self._unready.discard(actor_id)

    @endpoint
    async def stop_calls(self, actors: list[ActorId]) -> None:
        """Cancel all calls of these actors, and wait until they have ended or have had their time."""
        await self._stop_calls([cell for id in actors if (cell := self._host.cells.get(id)) is not None])

    async def _stop_calls(self, cells: Sequence[Cell]) -> None:
        calls = {call.task: call for cell in cells for call in cell.calls if call.task is not None}
        for call in calls.values():
            call.killed = True
        if await cancel_all(calls, CALLS_DEADLINE):
            doing = {task: call.doing or "running" for task, call in calls.items()}
            for cell in cells:
                cell.stop_computing()  # whoever waits for a function that does not return need not wait any longer
            for task in await cancel_all(calls, MOMENT):
                late = f"{calls[task].name} was still {doing[task]} {CALLS_DEADLINE} s after it was cancelled"
                self._host.complain(f"{late}, and is left behind")

    @endpoint
    async def kill(self, actor_id: ActorId) -> None:
        """End an actor: its running calls are cancelled, then it is closed, with all that it spawned."""
        cell = self._host.cells.pop(actor_id, None)
        if cell is not None:
            ready = actor_id not in self._unready
            await asyncio.shield(self._host.own(self._kill(cell, ready)))  # once begun, it is done

    async def _kill(self, cell: Cell, ready: bool) -> None:
        await self._stop_calls([cell])
        if not ready:
            return
        try:
            if cell.scope is not None:
                await cell.scope.close()
            async with asyncio.timeout(CLOSE_DEADLINE):
                await cell.actor.close()
        except TimeoutError:
            late = f"{cell.name}: close() took longer than {CLOSE_DEADLINE} s and was given up"
            self._host.complain(f"{late}; child processes that it was ending end with this process: none stays")
        finally:
            cell.stop_computing()

    @endpoint
    async def move(self, actor_id: ActorId, what: str) -> None:
        """Offload or onload an actor for the lease manager; in its setup it loads itself."""
        cell, call = self._host.cells.get(actor_id), current_call.get()
        if cell is not None and call is not None and actor_id not in self._unready:
            with Moving(self._host, cell, call):
                await (cell.actor.offload() if what == "offload" else cell.actor.onload())

    # Names (controller) ------------------------------------------------------------------------------------------

    @endpoint
    async def reserve(self, name: str, owner: Key) -> None:
        """Take a name for a group or channel that is about to be made.

        Args:
            owner: what only the one that is made has, so that its end frees nobody else's name.
        """
        if name in self._names:
            raise UserError(f"the name {name!r} is taken: give every group and channel a name of its own")
        self._names[name] = (owner, None)

    @endpoint
    async def publish(self, name: str, owner: Key, what: ActorGroup | Channel) -> None:
        self._names[name] = (owner, what)

    def withdraw(self, name: str, owner: Key) -> None:
        if name in self._names and self._names[name][0] == owner:
            del self._names[name]

    @endpoint
    async def look_up(self, name: str) -> ActorGroup | Channel | None:
        return self._names.get(name, (None, None))[1]

    def groups(self) -> list[ActorGroup]:
        """All groups there are; on the controller."""
        return [what for _, what in self._names.values() if isinstance(what, ActorGroup)]

    # Values, traces, reports -------------------------------------------------------------------------------------

    @endpoint
    async def fetch(self, key: Key) -> Any:
        return await self._host.values.kept_value(key)

    @endpoint
    async def fetch_shared(self, key: Key, without: int | None, versions: Versions) -> Answer:
        """A kept value for a host on another machine, or who gives it; see `values/relay.py`."""
        values, call = self._host.values, current_call.get()
        assert call is not None
        answer: Answer = values.relay.answer(key, await values.kept_value(key), call.caller, without, versions)
        return answer

    @endpoint
    async def copy_of(self, key: Key, versions: Versions) -> Any:
        """This host's copy of a value that another one owns."""
        call = current_call.get()
        assert call is not None
        return await self._host.values.relay.copy_of(key, call.caller, versions)

    @endpoint
    async def trace_outline(self) -> Outline:
        return await self._exports.outline()

    @endpoint
    async def trace_piece(self, export: Key, extract: Extract) -> bytes:
        return await self._exports.piece(export, extract)

    def trace_end(self, export: Key) -> None:
        self._exports.end(export)

    @endpoint
    async def clock(self) -> float:
        return self._host.now()

    @endpoint
    async def between(self, start: float, end: float) -> tuple[list[Busy], Passages, list[ActorMove], list[Span]]:
        """Return what happened between two times of this host's clock, seconds: who was busy, also beyond these times;
        what went from whom to whom; on the controller, who was moved; and of what parts of their work actors told."""
        host = self._host
        moves = [move for move in self.moved if move[3] >= start and move[2] <= end]
        spans = host.tracer.ended_since(start)
        if len(spans) > READ_ON_LOOP:
            parts = await asyncio.get_running_loop().run_in_executor(None, busy, spans)
        else:
            parts = busy(spans)
        parts_of_work = [span for span in reversed(spans) if span.kind == "part" and span.end <= end]
        return parts, host.flows.between(start, end), moves, parts_of_work

    @endpoint
    async def look(self) -> tuple[list[ActorState], list[QueueState]]:
        return look_at(self._host)

    @endpoint
    async def look_back(self, since: float) -> LookBack:
        """Return what this host does, and did since a time of its clock, seconds."""
        host = self._host
        now, spans = host.now(), spans_since(host, since)
        if len(spans) > READ_ON_LOOP:  # actors and queues are the loop's, so spans alone are read in a thread
            reading = partial(recent, spans, since, now, self._seen)
            return looked_back(host, since, now, await asyncio.get_running_loop().run_in_executor(None, reading))
        return looked_back(host, since, now, recent(spans, since, now, self._seen))

    @endpoint
    async def report(self) -> HostReport:
        return report_host(self._host, self.lease_waits())

    # Queues ----------------------------------------------------------------------------------------------------------

    @endpoint
    async def queue_put(self, id: Key, items: list[Any], plain: bool, forgotten: list[Hashable]) -> None:
        """Put items as `QueueHandle.seal` made them: (id, value, reference, weight, key)."""
        arrived = [self._arrived(item, plain) for item in items]  # before anything can go wrong
        queue = self._queues.find(id)
        queue.forget(forgotten)
        for item_id, value, weight, key in arrived:
            queue.put_nowait(value, id=item_id, key=key, weight=weight, force=True)
        await queue.space(_asker())

    def _arrived(self, item: Any, plain: bool) -> tuple[Hashable, Any, float, Hashable]:
        """An item as its queue has it; the end of a sealed one frees what its producer keeps."""
        item_id, value, ref, weight, key = item
        return item_id, value if plain else Sealed(self._host, value, ref), weight, key

    @endpoint
    async def queue_put_one(self, id: Key, item: Any, plain: bool) -> None:
        item_id, value, weight, key = self._arrived(item, plain)
        queue = self._queues.find(id)
        await queue.put(value, id=item_id, key=key, weight=weight, name=_asker())
        call = current_call.get()
        if queue.capacity is None and call is not None:
            self._queues.let_feed(id, call.caller)

    def queue_feed(self, id: Key, item: Any, plain: bool) -> None:
        _, value, weight, key = self._arrived(item, plain)
        self._queues.tell(id, "put_late", value, key, weight)

    def tell_queues(self, method: str, args: tuple[Any, ...]) -> None:
        """Another host tells this one's `QueueRegistry`."""
        getattr(self._queues, method)(*args)

    @endpoint
    async def queue_take(self, id: Key, token: Token, most: int, wishes: dict[str, Any]) -> Pairs:
        return await self._queues.find(id).take(token, most, name=_asker(), **wishes)

    @endpoint
    async def queue_statistics(self, id: Key) -> dict[str, Any]:
        return self._queues.find(id).statistics()

    # Stages, next to their actors, so that items never detour --------------------------------------------------------

    @endpoint
    async def generate(
        self, actor: ActorId, method: str, sink: QueueHandle, capacity: int | None, args: Any, kwargs: Any
    ) -> None:
        """Run an async-generator endpoint and put what it yields into the sink."""
        host = self._host
        call = current_call.get()
        assert call is not None
        cell = host.cell(actor, call)
        spec = cell.actor.endpoints[method]
        emitter = Emitter(sink.rebind(host), capacity, spec.stays)
        with Running(host, cell, call):
            if spec.device and cell.leased:
                inputs, wanted = (*args, *kwargs.values()), emitter.release_bound
                async with host.system.leases.hold(
                    cell, call, gang=spec.gang, late=spec.late, inputs=inputs, wanted=wanted
                ):
                    await generate(cell, method, emitter, args, kwargs, call.lease)
            else:
                await generate(cell, method, emitter, args, kwargs)
            await emitter.flush()

    @endpoint
    async def map(
        self,
        actor: ActorId,
        method: str,
        source: Stream[Any],
        sink: QueueHandle,
        capacity: int | None,
        batch: int | None,
        concurrency: int | None,
        kwargs: dict[str, Any],
    ) -> None:
        """Call an endpoint for the items of a source, as one of those who compete for them."""
        host = self._host
        call = current_call.get()
        assert call is not None
        cell = host.cell(actor, call)
        spec = cell.actor.endpoints[method]
        emitter = Emitter(sink.rebind(host), capacity, spec.stays)
        source = source if source.handle.host is host else Stream(source.handle.rebind(host))
        if spec.device and cell.leased:
            call.lease = DeviceLease(host.system.leases, cell, call, stage=True, wanted=emitter.release_bound)
        count = concurrency or (1 if spec.device else DEFAULT_CONCURRENCY)
        work = MapWorker(cell, method, source, emitter, batch, kwargs, spec.streams)
        with Running(host, cell, call):
            try:
                await all_or_none([work.run(call) for _ in range(count)])
                await emitter.flush()
            finally:
                if call.lease is not None:
                    call.lease.close()

    # Leases (controller) ---------------------------------------------------------------------------------------------

    def open_leases(self, memory: dict[int, int] | None) -> None:
        """Start managing devices of so many bytes each (None: as many as anyone likes)."""
        self.manager = LeaseManager(memory, self._move("offload"), self._move("onload"))
        self._memory = memory or {}
        self._host.on_lost.append(lambda host, reason: self._forget(host))

    def _move(self, what: str) -> Any:
        async def move(name: str) -> None:
            host, actor = self.tenants[name]
            start = self._host.now()
            await self._host.call(host, SERVICE, "move", f"{name}.{what}", (actor, what), {})
            self.moved.append((name, what, start, self._host.now()))

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
        places = self._host.places
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
        return self.manager.memory()

    # Tickets -----------------------------------------------------------------------------------------------------

    @endpoint
    async def lease_acquire(self, ticket: Key, name: str, who: str, gang: Gang | None, notify: bool) -> float:
        """Wait for the devices of an actor; or, in a gang, of all its ranks. Returns the seconds that loading took."""
        if ticket[0] in self._host.lost_hosts:
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
            self._host.cast(ticket[0], SERVICE, "lease_wanted", ticket)

    def lease_wanted(self, ticket: Key) -> None:
        """Arrives at the host of the holder."""
        self._host.system.leases.wanted(ticket)

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
            if gang[0] not in self._host.lost_hosts:  # else nobody will say when it is over: not all ranks have it
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


def _asker() -> str:
    """The call that made the running one."""
    call = current_call.get()
    return call.parent if call is not None else FLOW
