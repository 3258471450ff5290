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

from rlinf.runtime.base.calls import FLOW, current_host, waiter

if TYPE_CHECKING:
    pass

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
    moves: dict[str, float] = field(default_factory=dict)
    """Computations begun by each of those calls, and seconds of processor time that the present one has used."""
    ages: dict[str, float] = field(default_factory=dict)
    """Seconds since a call of `notes` began."""
    silent: list[str] = field(default_factory=list)
    """Queues that somebody waits for although nobody is there to fill, or to empty, them."""
    trouble: str | None = None
    """Why the host itself could not say."""


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
    item comes or goes, a computation uses the processor. What has to move is what the flow waits for, and every cycle:
    actors of their own accord may wait for work for ever.

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


locks: weakref.WeakSet[Lock] = weakref.WeakSet()


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
        locks.add(self)

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
