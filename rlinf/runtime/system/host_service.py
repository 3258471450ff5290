"""The actor that every host has, for the runtime's own calls: making and ending actors, fetching values, reports.

Flows in: calls from `ActorSystem` on any host. Flows out: actors, values, spans. Its queue, stage and lease parts live
beside what they serve.

What one host is doing at this moment: its waits for the stall report, its actors and queues for whoever looks.
"""

from __future__ import annotations

import asyncio
import functools
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from rlinf.runtime.actor.actor import COMPUTING, Actor, Cell, Moving, Running, endpoint
from rlinf.runtime.base.calls import SERVICE, ActorId, Call, Granularity, Key, current_call
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.base.tasks import cancel_all
from rlinf.runtime.base.tensors import own_device
from rlinf.runtime.devices.lease_server import LeaseService, Move
from rlinf.runtime.observe.dataflow import Passages
from rlinf.runtime.observe.perfetto import Exports, Extract, Outline
from rlinf.runtime.observe.spans import Busy, Seen, Span, busy, recent
from rlinf.runtime.observe.stalls import OURS, HostReport, Wait, Work, locks, open_work
from rlinf.runtime.streams.channel import Channel, QueueService
from rlinf.runtime.streams.item_queue import ItemQueue
from rlinf.runtime.streams.stages import StageService
from rlinf.runtime.system.handles import ActorGroup
from rlinf.runtime.values.codec import Place
from rlinf.runtime.values.p2p import GroupBulk
from rlinf.runtime.values.promise import Promise
from rlinf.runtime.values.relay import Answer

if TYPE_CHECKING:
    from rlinf.runtime.base.calls import Host


@dataclass(frozen=True, slots=True)
class ActorState:
    """State of an actor at this moment."""

    actor: str
    """Such as "rollout[0]"."""
    host: int
    """Where it lives."""
    doing: str
    """`computing NAME`, `waiting for NAME`, `running ENDPOINT` or `idle`."""
    since: float | None
    """Seconds since its oldest running call began; None when idle."""


@dataclass(frozen=True, slots=True)
class QueueState:
    """A stream or channel at this moment."""

    name: str
    """Such as "rollout.generate@0.41"."""
    ready: int
    """Items that nobody has taken yet."""
    running: int
    """Items that somebody works on."""
    put: int
    """Items that ever came."""
    capacity: int | None = None
    """Items that it takes before whoever puts more waits; None for any number."""
    waiting_to_take: tuple[str, ...] = ()
    """Actors, or "flow", that wait for items."""
    waiting_to_put: tuple[str, ...] = ()
    """Actors, or "flow", that wait for room."""


@dataclass(frozen=True, slots=True)
class MemoryState:
    """How full what a host computes on is: its GPU, or this machine by its process."""

    device: str
    """Such as "cuda:0", or "cpu"."""
    used: int
    """Bytes: all that is taken of the GPU, by whichever process; or what of this process is in memory."""
    total: int | None
    """Bytes of the GPU, or of the machine; None where nobody can tell."""
    owner: str
    """What no other GPU or process has: hosts that share it tell of the same memory."""


@dataclass(frozen=True, slots=True)
class LookBack:
    """State of a host: what it does now, and what it did between two times of its clock."""

    __plain__: ClassVar[bool] = True  # holds no promise: the runtime need not look for one in its many parts

    actors: tuple[ActorState, ...]
    """As of now."""
    queues: tuple[QueueState, ...]
    """As of now."""
    start: float
    """Seconds."""
    end: float
    """Seconds; now."""
    busy: tuple[Busy, ...]
    """See `recent`."""
    memory: MemoryState
    """Now."""


def look_at(host: Host) -> tuple[list[ActorState], list[QueueState]]:
    """Return the states of this host's actors and queues."""
    waits: dict[str, str] = {}
    queues = []
    for queue in host.system.queues.all():
        facts = queue.statistics()
        for who, _ in facts["waiting_to_take"]:
            waits[who.partition("/")[0]] = _plain(queue.name)
        for who, _ in facts["waiting_to_put"]:
            waits[who.partition("/")[0]] = f"space in {_plain(queue.name)}"
        ready, running, put = (int(facts[key]) for key in ("queued", "running", "put"))
        takers, putters = (_actors(facts[key]) for key in ("waiting_to_take", "waiting_to_put"))
        queues.append(QueueState(queue.name, ready, running, put, queue.capacity, takers, putters))
    for sent, queue_name in _remote_waits(host):
        waits[sent.parent.partition("/")[0]] = _plain(queue_name)
    now = host.now()
    return [_state(cell, waits, now) for cell in host.cells.values() if cell.id != SERVICE], queues


def _state(cell: Cell, waits: dict[str, str], now: float) -> ActorState:
    calls = sorted(cell.calls, key=lambda call: call.since)
    if not calls:
        return ActorState(cell.name, cell.host.rank, "idle", None)
    since = now - calls[0].since
    computing = next((call.doing for call in calls if call.doing), None)
    waiting = next((waits[call.label] for call in calls if call.label in waits), None)
    item = next((endpoint for kind, endpoint, *_ in cell.under_way.values() if kind == "item"), None)
    running = f"running {item or calls[0].name.rpartition('.')[2]}"
    doing = computing or (f"waiting for {waiting}" if waiting and item is None else running)
    return ActorState(cell.name, cell.host.rank, doing, since)


def _plain(name: str) -> str:
    return name.partition("@")[0]


def _actors(waiting: list[tuple[str, float]]) -> tuple[str, ...]:
    """Whose calls wait, each once: "judge[0]" of "judge[0].score#0.17"."""
    return tuple(dict.fromkeys(_actor(who) for who, _ in waiting))


def _actor(label: str) -> str:
    return label.partition("/")[0].partition("#")[0].rpartition(".")[0] or label.partition("/")[0]


# Looking back --------------------------------------------------------------------------------------------------------

FEW = 64
"""Spans that are looked at first: of a quiet second there are no more."""
_OF_QUEUES = (".take", ".put_one")
"""How calls end that wait for a queue on another host."""


def spans_since(host: Host, since: float) -> list[tuple[Any, ...]]:
    """Return the spans that ended then or later, and what is under way now, as if it ended now; as plain tuples."""
    return [*host.tracer.plain_since(since, FEW), *_under_way(host)]


def looked_back(host: Host, since: float, until: float, busy: Sequence[Busy]) -> LookBack:
    """Return what this host does now, with what it did.

    Args:
        host: which.
        since, until: seconds of its clock.
        busy: of `recent`, between these.
    """
    actors, queues = look_at(host)
    return LookBack(tuple(actors), tuple(queues), since, until, tuple(busy), memory_of(host))


def _under_way(host: Host) -> Iterator[Span]:
    now = host.now()
    for cell in host.cells.values():
        if cell.id == SERVICE:
            continue
        for kind, method, what, since in cell.under_way.values():
            yield Span(kind, cell.name, method, what, since, now)
        for call in cell.calls:
            yield Span("call", cell.name, call.name.rpartition(".")[2], call.parent, call.since, now)
            if call.doing is not None and not call.doing.startswith(COMPUTING):  # for a lease, or for work
                yield Span("wait", cell.name, call.name.rpartition(".")[2], call.doing, call.since, now)
    for queue in host.system.queues.all():
        facts = queue.statistics()
        for who, since in (*facts["waiting_to_take"], *facts["waiting_to_put"]):
            yield Span("wait", _actor(who), "", queue.name, since, now)
    for sent, name in _remote_waits(host):
        yield Span("wait", _actor(sent.parent), "", name, sent.since, now)


def _remote_waits(host: Host) -> Iterator[tuple[Promise[Any], str]]:
    """Calls from here that wait for queues on other hosts, with the queues' names."""
    for sent in host.sent.values():
        if isinstance(sent, Promise) and sent.name.endswith(_OF_QUEUES):
            yield sent, sent.name.rpartition(".")[0]


def memory_of(host: Host) -> MemoryState:
    """How full this process's GPU is, or, without one, what of this process is in memory."""
    device, place = own_device(), host.places[host.rank]
    if device.type == "cuda" and torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info(device)
        return MemoryState(str(device), total - free, total, place.device)
    return MemoryState("cpu", _resident(), _machine_memory(), place.process)


def _resident() -> int:
    try:
        file = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)  # a file object would take five times as long
        try:
            return int(os.read(file, 256).split()[1]) * os.sysconf("SC_PAGE_SIZE")
        finally:
            os.close(file)
    except (OSError, ValueError, IndexError):  # no such file outside of Linux
        return 0


@functools.cache
def _machine_memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


# Stall reports -------------------------------------------------------------------------------------------------------


def report_host(host: Host, service: Service) -> HostReport:
    """Return a report of what waits on this host, and for what."""
    now = host.now()
    report = HostReport(host.rank)
    for promise in list(host.sent.values()):
        if isinstance(promise, Promise) and not promise.done() and promise.name != OURS:
            report.waits.append(Wait(promise.parent, promise.label, now - promise.since))
    labels: dict[Any, str] = {}
    for cell in host.cells.values():
        for call in cell.calls:
            if call.name == OURS:
                continue
            labels[call.caller, call.number] = call.label
            _report_call(report, call, host, now)
            if call.doing is not None and call.doing.startswith(COMPUTING):
                report.moves[call.label] += cell.processor_seconds()
    for who, value, since in host.values.awaited.values():
        on = value if isinstance(value, str) else labels.get(value, f"the value of call {value[0]}.{value[1]}")
        report.waits.append(Wait(who, on, now - since))
    for queue in host.system.queues.all():
        _report_queue(report, queue, now)
    for lock in list(locks):
        if lock.host is host:
            report.waits.extend(Wait(who, f"lock {lock.name}", now - since) for who, since in lock.waiting.values())
            if lock.holder is not None and lock.waiting:
                report.waits.append(Wait(f"lock {lock.name}", lock.holder, None))
    for work in list(open_work):
        if work.host is host:
            _report_work(report, work, now)
    if hasattr(service, "manager"):  # it is the controller's
        report.waits += [
            Wait(who, on, None if since is None else now - since) for who, on, since in service.lease_waits()
        ]
    # a call cannot end before what it does in other tasks
    parts = {wait.who for wait in report.waits if "/" in wait.who}
    report.waits += [Wait(part.rpartition("/")[0], part, None) for part in sorted(parts)]
    return report


def _report_call(report: HostReport, call: Call, host: Host, now: float) -> None:
    report.notes[call.label] = (
        f"on host {host.rank}, {call.doing or 'running'}{_where(None if call.task is None else call.task.get_coro())}"
    )
    report.moves[call.label] = call.moves
    report.ages[call.label] = now - call.since
    if call.caller == host.rank and (call.promise is None or call.promise.wanted):
        report.waits.append(Wait(call.parent, call.label, now - call.since))


def _report_work(report: HostReport, work: Work, now: float) -> None:
    report.waits.append(Wait(work.parent, work.name, None))
    own = f"{work.name}'s own code"
    report.waits.append(Wait(work.name, own, now - work.since))
    report.notes[own] = f"on host {report.host}, {work.steps()} steps done{_where(work.coroutine)}"


def _report_queue(report: HostReport, queue: ItemQueue, now: float) -> None:
    facts = queue.statistics()
    takers, putters = facts["waiting_to_take"], facts["waiting_to_put"]
    if not takers and not putters:
        return
    report.notes[queue.name] = f"on host {report.host}: {facts['put']} put, {facts['done']} done"
    space = f"space in {queue.name}"
    report.waits += [Wait(name, queue.name, now - since) for name, since in takers]
    report.waits += [Wait(name, space, now - since) for name, since in putters]
    if takers:
        report.waits += [Wait(queue.name, producer, None) for producer in queue.producers]
        if not queue.producers and not queue.closed:
            report.silent.append(f"nobody fills {queue.name}, yet {takers[0][0]} waits for it")
    if putters:
        holders = facts["held_by"]
        report.waits += [Wait(space, holder, None) for holder in holders]
        if not holders and not takers:
            report.silent.append(f"nobody empties {queue.name}, yet {putters[0][0]} waits for space in it")


def _where(awaiting: Any) -> str:
    """The innermost line of a coroutine that is neither the runtime's nor asyncio's, as " at file.py:12"."""
    line = ""
    while awaiting is not None:
        frame = getattr(awaiting, "cr_frame", None) or getattr(awaiting, "ag_frame", None)
        module = "" if frame is None else str(frame.f_globals.get("__name__"))
        ours = module.startswith("rlinf.runtime.") or module.partition(".")[0] in ("asyncio", "contextlib")
        if frame is not None and not ours:
            line = f" at {frame.f_code.co_filename}:{frame.f_lineno}"
        awaiting = getattr(awaiting, "cr_await", None) or getattr(awaiting, "ag_await", None)
    return line


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
        """Return what happened between two times of this host's clock, seconds: who was busy, also beyond these times;
        what went from whom to whom; on the controller, who was moved; and of what parts of their work actors told."""
        host = self._cell.host
        moves = [move for move in getattr(self, "moved", ()) if move[3] >= start and move[2] <= end]
        spans = host.tracer.ended_since(start)
        if len(spans) > READ_ON_LOOP:
            parts = await asyncio.get_running_loop().run_in_executor(None, busy, spans)
        else:
            parts = busy(spans)
        parts_of_work = [span for span in reversed(spans) if span.kind == "part" and span.end <= end]
        return parts, host.flows.between(start, end), moves, parts_of_work

    @endpoint
    async def look(self) -> tuple[list[ActorState], list[QueueState]]:
        return look_at(self._cell.host)

    @endpoint
    async def look_back(self, since: float) -> LookBack:
        """Return what this host does, and did since a time of its clock, seconds."""
        host = self._cell.host
        now, spans = host.now(), spans_since(host, since)
        if len(spans) > READ_ON_LOOP:  # actors and queues are the loop's, so spans alone are read in a thread
            reading = partial(recent, spans, since, now, self._seen)
            return looked_back(host, since, now, await asyncio.get_running_loop().run_in_executor(None, reading))
        return looked_back(host, since, now, recent(spans, since, now, self._seen))

    @endpoint
    async def report(self) -> HostReport:
        return report_host(self._cell.host, self)
