"""Who waits on whom, since when: the stall report.

Flows in: what every host already keeps about its calls, queues and leases; a lock that says who holds it. Flows out: a
graph of waits, its cycles, and its picture in text. Nobody is woken: reports are made when nothing has moved for too
long, or when in virtual time nothing can ever happen again.
"""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .context import current_host, waiter

if TYPE_CHECKING:
    from .actor import Call
    from .host import Host
    from .queue import ItemQueue
    from .service import Service

FLOW = "flow"
OURS = "host.report"
"""The name of the calls that make the report, which leaves them out."""


@dataclass(slots=True)
class Wait:
    """`who` cannot go on before `on` does."""

    who: str
    on: str
    age: float | None
    """Seconds that it has lasted; None where nobody waits, but one leads to the other: a device to its holder."""


@dataclass(slots=True)
class HostReport:
    """The waits of one host."""

    host: int
    waits: list[Wait] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    """What is known about a call or queue, by its name: where it is, and what it is doing. No times: as long as these
    stay the same, nothing has moved."""
    moves: dict[str, int] = field(default_factory=dict)
    """Computations begun by each of those calls."""
    ages: dict[str, float] = field(default_factory=dict)
    """Seconds since a call of `notes` began."""
    silent: list[str] = field(default_factory=list)
    """Queues that somebody waits for although nobody is there to fill, or to empty, them."""
    trouble: str | None = None
    """Why the host itself could not say."""


def report_host(host: Host, service: Service) -> HostReport:
    """What waits on this host, and for what."""
    now = host.now()
    report = HostReport(host.rank)
    for sent in host.sent.values():
        promise = sent.strong
        if promise is not None and not promise.done() and promise.name != OURS:
            report.waits.append(Wait(promise.parent, promise.label, now - promise.since))
    kept: dict[Any, str] = {}
    for cell in host.cells.values():
        for call in cell.calls:
            if call.name == OURS:
                continue
            kept[call.caller, call.number] = call.label
            _report_call(report, call, host, now)
    for who, value, since in host.values.awaited.values():
        on = value if isinstance(value, str) else kept.get(value, f"the value of call {value[0]}.{value[1]}")
        report.waits.append(Wait(who, on, now - since))
    for queue in list(host.queues.values()):
        _report_queue(report, queue, now)
    for lock in list(_locks):
        if lock.host is host:
            report.waits.extend(Wait(who, f"lock {lock.name}", now - since) for who, since in lock.waiting.values())
            if lock.holder is not None and lock.waiting:
                report.waits.append(Wait(f"lock {lock.name}", lock.holder, None))
    if hasattr(service, "manager"):  # it is the controller's
        report.waits += [
            Wait(who, on, None if since is None else now - since) for who, on, since in service.lease_waits()
        ]
    # a call cannot end before what it does in other tasks
    parts = {wait.who for wait in report.waits if "/" in wait.who}
    report.waits += [Wait(part.rpartition("/")[0], part, None) for part in sorted(parts)]
    return report


def _report_call(report: HostReport, call: Call, host: Host, now: float) -> None:
    report.notes[call.label] = f"on host {host.rank}, {call.doing or 'running'}{_where(call.task)}"
    report.moves[call.label] = call.moves
    report.ages[call.label] = now - call.since
    if call.caller == host.rank and (call.promise is None or call.promise.wanted):
        report.waits.append(Wait(call.parent, call.label, now - call.since))


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


def _where(task: asyncio.Task[Any] | None) -> str:
    """The innermost line of a task that is neither the runtime's nor asyncio's, as " at file.py:12"."""
    awaiting: Any = None if task is None else task.get_coro()
    line = ""
    while awaiting is not None:
        frame = getattr(awaiting, "cr_frame", None) or getattr(awaiting, "ag_frame", None)
        module = "" if frame is None else str(frame.f_globals.get("__name__"))
        if frame is not None and module != "contextlib" and module.rpartition(".")[0] not in (__package__, "asyncio"):
            line = f" at {frame.f_code.co_filename}:{frame.f_lineno}"
        awaiting = getattr(awaiting, "cr_await", None) or getattr(awaiting, "ag_await", None)
    return line


# Reading reports -------------------------------------------------------------------------------------------------


def _graph(waits: Iterable[Wait]) -> dict[str, list[str]]:
    ahead: dict[str, list[str]] = {}
    for wait in waits:
        followers = ahead.setdefault(wait.who, [])
        if wait.on not in followers:
            followers.append(wait.on)
    return ahead


def find_cycles(waits: Iterable[Wait]) -> list[list[str]]:
    """Cycles of the waits-for graph, as the names in order: at least one of each knot."""
    ahead = _graph(waits)
    cycles: list[list[str]] = []
    done: set[str] = set()
    for start in ahead:
        path: list[str] = []
        on_path: set[str] = set()
        stack: list[tuple[str, int]] = [(start, 0)]
        while stack:
            name, index = stack.pop()
            if index == 0:
                if name in on_path:
                    cycles.append(path[path.index(name) :])
                    continue
                if name in done:
                    continue
                path.append(name)
                on_path.add(name)
            followers = ahead.get(name, [])
            if index < len(followers):
                stack.append((name, index + 1))
                stack.append((followers[index], 0))
            else:
                done.add(name)
                on_path.discard(name)
                path.pop()
    return cycles


class Progress:
    """Says when nothing moves any more, from reports made now and then.

    A wait may last as long as it likes while something that it stands on moves: a call ends or does something else, an
    item comes or goes. What has to move is what the flow waits for, and every cycle: actors of their own accord may
    wait for work for ever.

    Args:
        patience: seconds without a move that are too long.
    """

    def __init__(self, patience: float):
        self._patience = patience
        self._seen: dict[Any, tuple[Any, float]] = {}

    def stopped(self, reports: Iterable[HostReport], now: float) -> str | None:
        """What has stopped for too long, for the first line of the report; or None.

        Args:
            reports: of all hosts, from one time.
            now: that time, seconds.
        """
        reports = list(reports)
        waits = [wait for report in reports for wait in report.waits]
        notes = {name: (note, report.moves.get(name)) for report in reports for name, note in report.notes.items()}
        ahead = _graph(waits)
        pictures: dict[Any, Any] = {tuple(sorted(cycle)): None for cycle in find_cycles(waits)}
        for wait in waits:
            if wait.who.partition("/")[0] == FLOW and wait.age is not None:
                pictures[wait.who, wait.on] = _picture(wait.on, ahead, notes)
        before, self._seen = self._seen, {}
        worst: tuple[bool, float, str] | None = None
        for key, picture in pictures.items():
            same = key in before and before[key][0] == picture
            since = before[key][1] if same else now
            self._seen[key] = (picture, since)
            if now - since >= self._patience:
                cycle = picture is None
                what = "deadlock" if cycle else f"stall: {key[0]} waits on {key[1]}"
                worst = max(worst or (cycle, now - since, what), (cycle, now - since, what))
        return None if worst is None else f"{worst[2]}: nothing has moved for {worst[1]:.1f} s"


def _picture(start: str, ahead: dict[str, list[str]], notes: dict[str, Any]) -> Any:
    """All that `start` stands on, as it is now."""
    reached = {start: None}
    queue = [start]
    while queue:
        for name in ahead.get(queue.pop(), ()):
            if name not in reached:
                reached[name] = None
                queue.append(name)
    return {name: (tuple(ahead.get(name, ())), notes.get(name)) for name in reached}


def render(reports: Iterable[HostReport]) -> str:
    """The stall report: deadlocks first, then queues nobody fills, then every wait, longest first."""
    reports = list(reports)
    waits = [wait for report in reports for wait in report.waits]
    notes = {name: note for report in reports for name, note in report.notes.items()}
    ages = {name: age for report in reports for name, age in report.ages.items()}

    def about(name: str) -> str:
        since = f", since {ages[name]:.1f} s" if name in ages else ""
        return f"{notes[name]}{since}"

    lines = [f"host {report.host} {report.trouble}" for report in reports if report.trouble]
    for cycle in find_cycles(waits):
        lines.append("deadlock: " + " -> ".join([*cycle, cycle[0]]))
        lines.extend(f"    {name}: {about(name)}" for name in cycle if name in notes)
    lines += [silent for report in reports for silent in report.silent]
    shown = sorted((wait for wait in waits if wait.age is not None), key=lambda wait: -(wait.age or 0.0))
    lines.append("waits, longest first:" if shown else "nothing waits")
    for wait in shown:
        note = f"  ({about(wait.on)})" if wait.on in notes else ""
        lines.append(f"  {wait.who} waits on {wait.on} for {wait.age:.1f} s{note}")
    return "\n".join(lines)


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


class Lock:
    """An asyncio lock that the stall report knows: who holds it, who waits for it.

    Args:
        name: shown in reports.
    """

    def __init__(self, name: str):
        self.name = name
        self.host = current_host()
        self.holder: str | None = None
        self.waiting: dict[int, tuple[str, float]] = {}
        self._numbers = itertools.count()
        self._lock = asyncio.Lock()
        _locks.add(self)

    async def __aenter__(self) -> None:
        who, number = waiter(), next(self._numbers)
        self.waiting[number] = (who, self.host.now())
        try:
            await self._lock.acquire()
        finally:
            del self.waiting[number]
        self.holder = who

    async def __aexit__(self, *error: object) -> None:
        self.holder = None
        self._lock.release()
