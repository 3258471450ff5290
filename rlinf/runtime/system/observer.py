"""Work of hosts at this moment and in a step: each host's own account of it, and all of them on one clock.

Flows in: the spans, calls and queues that every host keeps anyway. Flows out: on each host its waits for the stall
report, its actors and queues for whoever looks; on the controller the intervals in which each actor was busy, and a
picture of this moment. Nobody is woken: the actor that every host has answers when it is asked.

    watch = await Watch.start(system)
    watch.begins()                        # a step of the flow starts
    step = await watch.ends("step 12")    # it is over: `step.busy` says who was busy when, on all hosts
    now = await watch.look()              # what each actor is doing
    back = await watch.look_back(1, since)  # what host 1 did since then, too
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from rlinf.runtime.actor.actor import COMPUTING, Cell
from rlinf.runtime.base.calls import FLOW, SERVICE, Call
from rlinf.runtime.base.tensors import own_device
from rlinf.runtime.observe.dataflow import edges
from rlinf.runtime.observe.perfetto import ask, offsets
from rlinf.runtime.observe.spans import Busy, Flow, Lap, Moved, Span, clip
from rlinf.runtime.observe.stalls import OURS, HostReport, Wait, Work, locks, open_work, outside
from rlinf.runtime.streams.item_queue import ItemQueue
from rlinf.runtime.values.promise import Promise

if TYPE_CHECKING:
    from rlinf.runtime.base.calls import Host, System


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
    """A name that no other GPU or process has: hosts that share it tell of the same memory."""


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


def report_host(host: Host, lease_waits: Iterable[tuple[str, str, float | None]]) -> HostReport:
    """Return a report of what waits on this host, and for what.

    Args:
        lease_waits: who waits for which device, and for whom, since when; of `Service.lease_waits`.
    """
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
    for one in list(outside):
        if one.host is host:
            report.waits.append(Wait(one.who, one.what, now - one.since))
            report.silent.append(f"{one.who.partition('#')[0]} waits for {one.what}")
    report.waits += [Wait(who, on, None if since is None else now - since) for who, on, since in lease_waits]
    # a call cannot end before what it does in other tasks
    parts = {wait.who for wait in report.waits if "/" in wait.who}
    report.waits += [Wait(part.rpartition("/")[0], part, None) for part in sorted(parts)]
    return report


def _report_call(report: HostReport, call: Call, host: Host, now: float) -> None:
    report.notes[call.label] = f"on host {host.rank}, {call.doing or 'running'}{_where(call.work)}"
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


# From the controller --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Moment:
    """All hosts at about the same moment."""

    actors: tuple[ActorState, ...]
    """In order of their spawning, host by host."""
    queues: tuple[QueueState, ...]
    """Those that still exist."""


class Watch:
    """The controller's side: asks all hosts and puts their answers on one clock."""

    def __init__(self, system: System, ahead: Mapping[int, float]):
        self._ahead = ahead
        self._host: Host = system.service._cell.host
        self._start = self._host.now()

    @classmethod
    async def start(cls, system: System) -> Watch:
        """Compare the clocks of all hosts with this one's."""
        return cls(system, await offsets(system.service._cell.host, system.living()))

    def now(self) -> float:
        """The controller's clock, seconds."""
        return self._host.now()

    def begins(self) -> None:
        """A step begins now."""
        self._start = self._host.now()

    async def ends(self, name: str) -> Lap:
        """The step that began last ends now; it gets a span of this name on the flow's track."""
        start, end = self._start, self._host.now()
        self._host.tracer.span("flow", FLOW, "", name, start, end)
        calls = [ask(self._host, number, "between", start - a, end - a) for number, a in self._ahead.items()]
        answers: list[Any] = await asyncio.gather(*calls)
        hosts = list(zip(self._ahead.values(), answers, strict=True))
        parts = [
            Busy(part.actor, part.endpoint, clipped)
            for ahead, (parts, *_) in hosts
            for part in parts
            if (clipped := clip(part.intervals, start, end, ahead))
        ]
        flows = [
            Flow(*ends, edge.items, tuple(time - start for time in edge.released))
            for ends, edge in edges((ahead, passages) for ahead, (_, passages, *_) in hosts).items()
        ]
        moves = [
            Moved(actor, what, max(begin + ahead, start), min(finish + ahead, end))
            for ahead, (_, _, moves, _) in hosts
            for actor, what, begin, finish in moves
        ]
        noted = [
            span._replace(start=span.start + ahead, end=span.end + ahead)
            for ahead, (*_, notes) in hosts
            for span in notes
        ]
        return Lap(start, end, tuple(parts), tuple(flows), tuple(moves), tuple(noted))

    @property
    def machines(self) -> dict[int, str]:
        """On which machine each host is, by its number."""
        return {number: self._host.places[number].node for number in self._ahead}

    async def look_back(self, number: int, since: float) -> LookBack:
        """Return what one host does now, and what it did since a time; in seconds of the controller's clock.

        Raises:
            ActorDied: it is lost.
        """
        ahead = self._ahead[number]
        answer: LookBack = await ask(self._host, number, "look_back", since - ahead)
        if not ahead:
            return answer
        moved = (
            Busy(part.actor, part.endpoint, tuple((start + ahead, end + ahead) for start, end in part.intervals))
            for part in answer.busy
        )
        return replace(answer, start=answer.start + ahead, end=answer.end + ahead, busy=tuple(moved))

    async def look(self) -> Moment:
        """Return the states of all actors and queues now."""
        answers: list[Any] = await asyncio.gather(*(ask(self._host, number, "look") for number in self._ahead))
        actors = tuple(state for states, _ in answers for state in states)
        return Moment(actors, tuple(state for _, states in answers for state in states))
