"""The stall report: who waits on whom, and since when.

Flows in: what every host already keeps about its calls, queues and leases; a lock that says who holds it. Flows out: a
graph of waits, its cycles, and its picture in text. Nobody is woken: reports are made when nothing has moved for too
long, or when in virtual time nothing can ever happen again.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlinf.runtime.base.calls import FLOW, current_host, waiter

OURS = "host.report"
"""The name of the calls that make the report, which leaves them out."""
MOST_SHOWN = 50
"""Waits, cycles and queues that a report tells of: of 100,000 waits the oldest say enough."""


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
    """State of each call or queue, by its name: where it is, and what it is doing. No times: as long as these
    stay the same, nothing has moved."""
    moves: dict[str, float] = field(default_factory=dict)
    """Computations begun by each of those calls, and seconds of processor time that the present one has used."""
    ages: dict[str, float] = field(default_factory=dict)
    """Seconds since a call of `notes` began."""
    silent: list[str] = field(default_factory=list)
    """Queues that somebody waits for although nobody is there to fill, or to empty, them; and what is to come from
    outside."""
    trouble: str | None = None
    """Why the host itself could not say."""


# Reading reports -------------------------------------------------------------------------------------------------


Graph = dict[str, list[str]]
"""On whom each name waits."""


def _graph(edges: Iterable[tuple[str, str]]) -> Graph:
    ahead: dict[str, dict[str, None]] = {}
    for who, on in edges:
        ahead.setdefault(who, {})[on] = None
    return {who: list(followers) for who, followers in ahead.items()}


def _knots(ahead: Graph) -> Iterator[list[str]]:
    """The strongly connected parts of a graph, each after all parts that it leads to (Tarjan 1972): one pass over it.

    Names that wait for themselves or each other are in one part; whoever does neither is one by itself.
    """
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    open_: set[str] = set()
    for start in ahead:
        stack = [] if start in number else [(start, iter(ahead[start]))]
        while stack:
            name, followers = stack[-1]
            if name not in number:
                number[name] = lowest[name] = len(number)
                path.append(name)
                open_.add(name)
            for follower in followers:
                if follower not in number:
                    stack.append((follower, iter(ahead.get(follower, ()))))
                    break
                if follower in open_:
                    lowest[name] = min(lowest[name], number[follower])
            else:
                stack.pop()
                if stack:
                    lowest[stack[-1][0]] = min(lowest[stack[-1][0]], lowest[name])
                if lowest[name] == number[name]:
                    at = _since(path, name)
                    knot, path[at:] = path[at:], []
                    open_.difference_update(knot)
                    yield knot


def _since(path: list[str], name: str) -> int:
    """Where `name` is in `path`, seen from its end."""
    at = len(path) - 1
    while path[at] != name:
        at -= 1
    return at


def _cycle(knot: list[str], ahead: Graph) -> list[str]:
    """A cycle within a strongly connected part, as the names in order; empty if it has none."""
    inside = set(knot)
    step: dict[str, str] = {}
    name = knot[0]
    while name not in step:
        follower = next((each for each in ahead.get(name, ()) if each in inside), None)
        if follower is None:
            return []
        step[name] = follower
        name = follower
    cycle, start = [name], name
    while (name := step[name]) != start:
        cycle.append(name)
    return cycle


def find_cycles(waits: Iterable[Wait]) -> list[list[str]]:
    """Cycles of the waits-for graph, as the names in order: one of each knot, in time proportional to the waits."""
    ahead = _graph((wait.who, wait.on) for wait in waits)
    return [cycle for knot in _knots(ahead) if (cycle := _cycle(knot, ahead))]


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
        self._seen: dict[tuple[str, str], tuple[int, float]] = {}
        """Waits of the flow: the picture of each, and since when that is the same."""
        self._edges: dict[tuple[str, str], float] = {}
        """Every wait, and since when it is there."""

    def stopped(self, reports: Iterable[HostReport], now: float) -> str | None:
        """Return what has stopped for too long, for the first line of the report; or None.

        Args:
            reports: of all hosts, from one time.
            now: that time, seconds.
        """
        reports = list(reports)
        waits = [wait for report in reports for wait in report.waits]
        notes = {name: (note, report.moves.get(name)) for report in reports for name, note in report.notes.items()}
        pictures = _pictures(_graph((wait.who, wait.on) for wait in waits), notes)
        before, self._seen = self._seen, {}
        for wait in waits:
            if wait.who.partition("/")[0] == FLOW and wait.age is not None:
                key, picture = (wait.who, wait.on), pictures.get(wait.on, hash(notes.get(wait.on)))
                same = key in before and before[key][0] == picture
                self._seen[key] = (picture, before[key][1] if same else now)
        stops = [(True, now - since, "deadlock") for since in self._stuck(waits, now)]
        stops += [
            (False, now - since, f"stall: {who} waits on {on}")
            for (who, on), (_, since) in self._seen.items()
            if now - since >= self._patience
        ]
        _, lasted, what = max(stops, default=(False, 0.0, None))
        return None if what is None else f"{what}: nothing has moved for {lasted:.1f} s"

    def _stuck(self, waits: Iterable[Wait], now: float) -> list[float]:
        """Since when there have been cycles all of whose waits are too old."""
        edges = self._edges
        self._edges = {edge: edges.get(edge, now) for edge in ((wait.who, wait.on) for wait in waits)}
        ahead = _graph(edge for edge, since in self._edges.items() if now - since >= self._patience)
        cycles = (cycle for knot in _knots(ahead) if (cycle := _cycle(knot, ahead)))
        return [max(self._edges[edge] for edge in itertools.pairwise([*cycle, cycle[0]])) for cycle in cycles]


def _pictures(ahead: Graph, notes: dict[str, Any]) -> dict[str, int]:
    """Return for each name a hash of all that it stands on, as it is now.

    A knot has the hash of its members and of what they lead to, which is known by then: one pass for all names.
    """
    pictures: dict[str, int] = {}
    for knot in _knots(ahead):
        members = set(knot)
        picture = hash(
            tuple(
                (
                    name,
                    notes.get(name),
                    tuple((on, None if on in members else pictures[on]) for on in ahead.get(name, ())),
                )
                for name in sorted(knot)
            )
        )
        pictures.update(dict.fromkeys(knot, picture))
    return pictures


def render(reports: Iterable[HostReport], most: int = MOST_SHOWN) -> str:
    """The stall report: deadlocks first, then queues nobody fills and what is to come from outside, then waits, longest
    first.

    Args:
        most: lines of each kind to show; how many more there are is said.
    """
    reports = list(reports)
    waits = [wait for report in reports for wait in report.waits]
    notes = {name: note for report in reports for name, note in report.notes.items()}
    ages = {name: age for report in reports for name, age in report.ages.items()}

    def about(name: str) -> str:
        since = f", since {ages[name]:.1f} s" if name in ages else ""
        return f"{notes[name]}{since}"

    lines = _first(most, "hosts", [f"host {report.host} {report.trouble}" for report in reports if report.trouble])
    cycles = find_cycles(waits)
    for cycle in cycles[:most]:
        names = cycle[:most] + ([f"({len(cycle) - most} more)"] if len(cycle) > most else [])
        lines.append("deadlock: " + " -> ".join([*names, cycle[0]]))
        lines.extend(f"    {name}: {about(name)}" for name in names if name in notes)
    lines += _first(most, "deadlocks", cycles)[most:]
    lines += _first(most, "queues", [silent for report in reports for silent in report.silent])
    timed = [wait for wait in waits if wait.age is not None]
    lines.append("waits, longest first:" if timed else "nothing waits")
    for wait in heapq.nsmallest(most, timed, key=lambda wait: -(wait.age or 0.0)):
        note = f"  ({about(wait.on)})" if wait.on in notes else ""
        lines.append(f"  {wait.who} waits on {wait.on} for {wait.age:.1f} s{note}")
    lines += _first(most, "waits", timed)[most:]
    return "\n".join(lines)


def _first(most: int, what: str, lines: Sequence[Any]) -> list[Any]:
    """The first of these lines, and one that says how many more there are."""
    return [*lines[:most], f"  and {len(lines) - most:,} more {what}"] if len(lines) > most else list(lines)


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


open_work: set[Work] = set()
"""Work that is under way; see `Work`."""


class Work:
    """A piece of work of the running code whose waits only its own code knows of: while it is open, the stall report
    names it, and says how far it is. `with Work("episode 3", coroutine, steps): …`.

    Args:
        name: unique in the system.
        coroutine: that does it; the report shows the line where it waits.
        steps: counts what it has done: as long as that changes, nothing has stalled.
    """

    def __init__(self, name: str, coroutine: Awaitable[Any], steps: Callable[[], int]):
        self.name, self.coroutine, self.steps = name, coroutine, steps
        self.host = current_host()
        self.parent = waiter()
        self.since = self.host.now()

    def __enter__(self) -> Work:
        open_work.add(self)
        return self

    def __exit__(self, *error: object) -> None:
        open_work.discard(self)


outside: set[Outside] = set()
"""Waits at this moment; see `Outside`."""


class Outside:
    """Something outside of the system that the running code waits for: while it is open, the stall report begins with
    it. `with Outside("a licence"): …`.

    Args:
        what: is waited for, and what to do so that it comes.
    """

    def __init__(self, what: str):
        self.what = what
        self.host = current_host()
        self.who = waiter()
        self.since = self.host.now()

    def __enter__(self) -> Outside:
        outside.add(self)
        return self

    def __exit__(self, *error: object) -> None:
        outside.discard(self)
