"""Who waits on whom, since when: the stall report.

Flows in: what every host already keeps about its calls, queues and leases; a lock that says who holds it. Flows out: a
graph of waits, its cycles, and its picture in text. Nobody is woken: reports are made when something has waited too
long, or when in virtual time nothing can ever happen again.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .actor import current_call
from .context import current_host

if TYPE_CHECKING:
    from .host import Host
    from .lease import LeaseManager


@dataclass(slots=True)
class Wait:
    """`who` cannot go on before `on` does."""

    who: str
    on: str
    age: float
    """Seconds that it has lasted."""


@dataclass(slots=True)
class HostReport:
    """The waits of one host."""

    host: int
    waits: list[Wait] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    """What is known about a call or queue, by its name: what it is doing, and where."""
    silent: list[str] = field(default_factory=list)
    """Queues somebody waits for although nobody is there to fill them."""


def report_host(host: Host, manager: LeaseManager | None) -> HostReport:
    """What waits on this host, and for what."""
    now = host.now()
    report = HostReport(host.rank)
    for number, sent in host.sent.items():
        promise = sent.strong
        if promise is not None and not promise.done():
            report.waits.append(Wait(promise.parent, f"{promise.name}#{host.rank}.{number}", now - promise.since))
    for cell in host.cells.values():
        for call in cell.calls:
            where = _where(call.task)
            doing = call.doing or "running"
            report.notes[call.label] = f"on host {host.rank}, {doing} for {now - call.since:.1f} s{where}"
            if call.caller == host.rank:
                report.waits.append(Wait(call.parent, call.label, now - call.since))
    for queue in list(host.queues.values()):
        facts = queue.statistics()
        for name, since in facts["waiting_to_take"]:
            report.waits.append(Wait(name, queue.name, now - since))
        for name, since in facts["waiting_to_put"]:
            report.waits.append(Wait(name, f"space in {queue.name}", now - since))
        if facts["waiting_to_take"] or facts["waiting_to_put"]:
            report.notes[queue.name] = f"on host {host.rank}: {facts['queued']} queued, {facts['running']} in hand"
            for producer in queue.producers:
                report.waits.append(Wait(queue.name, producer, 0.0))
            if not queue.producers and not queue.closed and facts["waiting_to_take"]:
                report.silent.append(queue.name)
    for lock in list(_locks):
        if lock.host is host:
            report.waits.extend(Wait(who, f"lock {lock.name}", now - since) for who, since in lock.waiting.items())
            if lock.holder is not None and lock.waiting:
                report.waits.append(Wait(f"lock {lock.name}", lock.holder, 0.0))
    if manager is not None:
        _report_leases(report, manager, now)
    return report


def _report_leases(report: HostReport, manager: LeaseManager, now: float) -> None:
    for wish in manager.waiting():
        for device in wish.devices:
            report.waits.append(Wait(wish.who, f"device {device}", now - wish.since))
    for held in manager.holders():
        for device in held.devices:
            report.waits.append(Wait(f"device {device}", held.who, 0.0))
        for move in held.moving:
            report.waits.append(Wait(held.who, move, now - held.since))


def _where(task: asyncio.Task[Any] | None) -> str:
    """The innermost line of a task, as " at file.py:12"."""
    if task is None:
        return ""
    awaiting: Any = task.get_coro()
    line = ""
    while awaiting is not None:
        frame = getattr(awaiting, "cr_frame", None) or getattr(awaiting, "ag_frame", None)
        if frame is not None and "rlinf/runtime" not in frame.f_code.co_filename:
            line = f" at {frame.f_code.co_filename}:{frame.f_lineno}"
        awaiting = getattr(awaiting, "cr_await", None) or getattr(awaiting, "ag_await", None)
    return line


def find_cycles(waits: Iterable[Wait]) -> list[list[str]]:
    """The cycles of the waits-for graph, each once, as the names in order."""
    ahead: dict[str, list[str]] = {}
    for wait in waits:
        ahead.setdefault(wait.who, []).append(wait.on)
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


def render(reports: Iterable[HostReport]) -> str:
    """The stall report: deadlocks first, then queues nobody fills, then every wait, longest first."""
    reports = list(reports)
    waits = [wait for report in reports for wait in report.waits]
    notes = {name: note for report in reports for name, note in report.notes.items()}
    lines = []
    for cycle in find_cycles(waits):
        lines.append("deadlock: " + " -> ".join([*cycle, cycle[0]]))
        lines.extend(f"    {name}: {notes[name]}" for name in cycle if name in notes)
    for report in reports:
        lines.extend(f"nobody fills {name}, yet it is waited for" for name in report.silent)
    lines.append("waits, longest first:" if waits else "nothing waits")
    for wait in sorted(waits, key=lambda wait: -wait.age):
        since = f" for {wait.age:.1f} s" if wait.age else ""
        note = f"  ({notes[wait.on]})" if wait.on in notes else ""
        lines.append(f"  {wait.who} waits on {wait.on}{since}{note}")
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
        self.waiting: dict[str, float] = {}
        self._lock = asyncio.Lock()
        _locks.add(self)

    async def __aenter__(self) -> None:
        call = current_call.get()
        who = call.label if call is not None else "flow"
        self.waiting[who] = self.host.now()
        try:
            await self._lock.acquire()
        finally:
            del self.waiting[who]
        self.holder = who

    async def __aexit__(self, *error: object) -> None:
        self.holder = None
        self._lock.release()
