"""The actor that every host has, for the runtime's own calls: making and ending actors, fetching values, reports.

Flows in: calls from `ActorSystem` on any host. Flows out: actors, values, spans. Its queue, stage and lease parts live
beside what they serve.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import partial
from typing import Any

from rlinf.runtime.actor.actor import Actor, Cell, endpoint
from rlinf.runtime.actor.invocation import Moving, Running
from rlinf.runtime.base.calls import ActorId, Key, current_call
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.base.lease_policy import Granularity
from rlinf.runtime.base.tasks import cancel_all
from rlinf.runtime.devices.lease_server import LeaseService, Move
from rlinf.runtime.observe.busy import Busy, busy
from rlinf.runtime.observe.dataflow import Passages
from rlinf.runtime.observe.perfetto import Extract, Outline
from rlinf.runtime.observe.recent import Seen, recent
from rlinf.runtime.observe.spans import Span
from rlinf.runtime.observe.stalls import HostReport
from rlinf.runtime.observe.tracing import Exports
from rlinf.runtime.streams.channel import Channel, QueueService
from rlinf.runtime.streams.stages import StageService
from rlinf.runtime.system.introspection import (
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
from rlinf.runtime.values.relay import Answer

from .handles import ActorGroup

CALLS_DEADLINE = 2.0
"""Seconds that cancelled calls may take before they are left behind: Ctrl-C promises five in all."""
CLOSE_DEADLINE = 2.5
"""Seconds that an actor's `close` may take before it is given up."""
FAN_OUT = 8
"""Hosts to which one host passes on what all are to get."""
MOMENT = 0.2
"""Seconds for what only has to be told."""
READ_ON_LOOP = 5000
"""Spans of a step that are read on the event loop, in some 5 ms; more are read in a thread."""


def children(host: int, hosts: int) -> range:
    """The hosts that get from this one what goes to all: a tree rooted in host 0, a few levels deep for thousands."""
    return range(min(FAN_OUT * host + 1, hosts), min(FAN_OUT * host + FAN_OUT + 1, hosts))


class Service(QueueService, StageService, LeaseService):
    """See the module's docstring."""

    def begin(self) -> None:
        """Called once, before anything can arrive."""
        self._names: dict[str, tuple[Key, ActorGroup | Channel | None]] = {}
        self._unready: set[ActorId] = set()
        self._exports = Exports(self._cell.host)
        self._seen: Seen = {}
        self.all_here = asyncio.Event()
        self.farewell: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.on_interrupt: Callable[[int], None] | None = None

    # Joining and leaving -----------------------------------------------------------------------------------------

    def hello(self, place: Place) -> None:
        """A host tells the controller that it serves, and where it lives."""
        host = self._cell.host
        host.places[place.host] = place
        if len(host.places) == host.transport.hosts:
            self.welcome(pickle.dumps([astuple(place) for place in host.places.values()], 5))

    def welcome(self, places: bytes) -> None:
        """Where all hosts live, made once by the controller and passed on from host to host along a tree."""
        host = self._cell.host
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
        cells = self._cell.host.cells
        await self._stop_calls([cell for id, cell in cells.items() if id != self._cell.id])
        for id in reversed(list(cells)):
            if id != self._cell.id:
                try:
                    await self.kill(id)
                except Exception as error:  # one actor's close must not keep the others from theirs
                    self._cell.host.complain("while ending", error)

    def bye(self, graceful: bool) -> None:
        """The controller leaves, and so should this host."""
        if not self.farewell.done():
            self.farewell.set_result(graceful)

    def group_failed(self, name: str, why: str) -> None:
        """Another member of a process group or mesh has failed."""
        self._cell.host.system.collectives.failed(name, why, tell=False)

    def bulk_begun(self, source: int, tag: int) -> None:
        """The other host of a transfer between two GPUs holds its own (see `values/p2p.py`)."""
        bulk = self._cell.host.codec.bulk
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
        host = self._cell.host
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
        await self._stop_calls([cell for id in actors if (cell := self._cell.host.cells.get(id)) is not None])

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
                self._cell.host.complain(f"{late}, and is left behind")

    @endpoint
    async def kill(self, actor_id: ActorId) -> None:
        """End an actor: its running calls are cancelled, then it is closed, with all that it spawned."""
        cell = self._cell.host.cells.pop(actor_id, None)
        if cell is not None:
            ready = actor_id not in self._unready
            await asyncio.shield(self._cell.host.own(self._kill(cell, ready)))  # once begun, it is done

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
            self._cell.host.complain(f"{late}; child processes that it was ending end with this process: none stays")
        finally:
            cell.stop_computing()

    @endpoint
    async def move(self, actor_id: ActorId, what: str) -> None:
        """Offload or onload an actor for the lease manager; in its setup it loads itself."""
        cell, call = self._cell.host.cells.get(actor_id), current_call.get()
        if cell is not None and call is not None and actor_id not in self._unready:
            with Moving(self._cell.host, cell, call):
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
        return await self._cell.host.values.kept_value(key)

    @endpoint
    async def fetch_shared(self, key: Key, without: int | None) -> Answer:
        """A kept value for a host on another machine, or who gives it; see `values/relay.py`."""
        values, call = self._cell.host.values, current_call.get()
        assert call is not None
        answer: Answer = values.relay.answer(key, await values.kept_value(key), call.caller, without)
        return answer

    @endpoint
    async def copy_of(self, key: Key) -> Any:
        """This host's copy of a value that another one owns."""
        return await self._cell.host.values.relay.copy_of(key)

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
        return self._cell.host.now()

    @endpoint
    async def between(self, start: float, end: float) -> tuple[list[Busy], Passages, list[Move], list[Span]]:
        """What happened between two times of this host's clock, seconds: who was busy, also beyond these times; what
        went from whom to whom; on the controller, who was moved; and of what parts of their work actors told."""
        host = self._cell.host
        moves = [move for move in getattr(self, "moved", ()) if move[3] >= start and move[2] <= end]
        spans = host.tracer.ended_since(start)
        if len(spans) > READ_ON_LOOP:
            parts = await asyncio.get_running_loop().run_in_executor(None, busy, spans)
        else:
            parts = busy(spans)
        told = [span for span in reversed(spans) if span.kind == "part" and span.end <= end]
        return parts, host.flows.between(start, end), moves, told

    @endpoint
    async def look(self) -> tuple[list[ActorState], list[QueueState]]:
        return look_at(self._cell.host)

    @endpoint
    async def look_back(self, since: float) -> LookBack:
        """What this host does, and did since a time of its clock, seconds."""
        host = self._cell.host
        now, spans = host.now(), spans_since(host, since)
        if len(spans) > READ_ON_LOOP:  # actors and queues are the loop's, so spans alone are read in a thread
            read = partial(recent, spans, since, now, self._seen)
            return looked_back(host, since, now, await asyncio.get_running_loop().run_in_executor(None, read))
        return looked_back(host, since, now, recent(spans, since, now, self._seen))

    @endpoint
    async def report(self) -> HostReport:
        return report_host(self._cell.host, self)
