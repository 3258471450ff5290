"""Data flow between endpoints: the edges of a flow's graph, as a host saw them.

Flows in: items put into streams and taken from them, promises passed as arguments; each with who made it and who gets
it, such as "rollout.generate" and "judge.score". Flows out: counts, and when items left.

A stream's items are counted where they are taken, and timed where they first came into a queue. So whatever passes them
on unchanged in between (`tee`, `batch`, `take`, `deal`) is no node of the graph.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlinf.runtime.base.calls import role_of

if TYPE_CHECKING:
    from rlinf.runtime.base.calls import Key

MOST_TIMES = 256
"""Times that are told of one source; for more items than these, some stand for several."""
KEPT = 1024
"""Counters that a host remembers though nobody asks, each of at most `MOST_TIMES` times: 30 MB at worst."""
PASSED = 100_000
"""Promises passed on that a host remembers though nobody asks: 20 MB at worst."""

Origin = tuple[str, tuple[int, int], int]
"""The maker of a stream's items, such as "rollout.generate"; the queue that they come into first; and how deep in lists
they lie in this stream, 1 behind a `batch`."""


class Counter:
    """How many items passed a point, and about when.

    Args:
        book: what it is listed in, as long as it counts.
        origin: of the items.
        target: who takes them; None where they are put.
    """

    __slots__ = ("_book", "_every", "_now", "_skip", "count", "last", "listed", "origin", "points", "target")

    def __init__(self, book: FlowBook, origin: Origin, target: str | None):
        self._book, self._now = book, book.now
        self.origin, self.target = origin, target
        self.count = 0
        self.last = 0.0
        self.listed = False
        self.points: list[tuple[float, int]] = []
        """Time, and how many items had passed by then; ascending."""
        self._every = self._skip = 1

    def add(self, items: int = 1) -> None:
        """So many items pass now."""
        self.count += items
        self._skip -= 1
        if not self._skip:
            self._note()
        elif self.target is None:  # when the last item of all leaves its source must be known well
            self.last = self._now()

    def _note(self) -> None:
        self.last = self._now()
        self.points.append((self.last, self.count))
        if len(self.points) == MOST_TIMES:
            del self.points[::2]
            self._every *= 2
        self._skip = self._every
        if not self.listed:
            self._book.list(self)

    def between(self, start: float, end: float) -> list[tuple[float, int]]:
        """(time, items) that passed in these seconds, ascending; times are thinned, the items are all."""
        points = self.points
        if not points or points[-1][1] < self.count:
            points = [*points, (self.last, self.count)]
        first = bisect_left(points, start, key=_time)
        before = points[first - 1][1] if first else 0
        passages = []
        for time, count in points[first : bisect_right(points, end, key=_time)]:
            passages.append((time, count - before))
            before = count
        return passages


def _time(point: tuple[float, int]) -> float:
    return point[0]


def amount(values: Iterable[Any], depth: int) -> int:
    """How many items these values of a stream are, in lists of so many levels."""
    return sum(amount(value, depth - 1) for value in values) if depth else sum(1 for _ in values)


@dataclass(frozen=True, slots=True)
class Passage:
    """Items at one point, on one host."""

    origin: Origin
    """Of the items."""
    target: str | None
    """The endpoint that took them; None where they were put."""
    points: list[tuple[float, int]]
    """Time, seconds of that host's clock, and items; ascending."""


@dataclass(frozen=True, slots=True)
class Passages:
    """Items and promises that a host saw pass in a step."""

    items: tuple[Passage, ...]
    """Of streams."""
    promises: dict[tuple[str, str], int]
    """How many went from whose call to which other one as arguments."""


class FlowBook:
    """Record of the items and promises that one host saw pass.

    Args:
        now: its clock, seconds.
        enabled: whether anything is noted.
    """

    def __init__(self, now: Callable[[], float], *, enabled: bool = True):
        self.now = now
        self.enabled = enabled
        self._counters: dict[tuple[Key, str | None], Counter] = {}
        self._passed: deque[tuple[float, str, str, Key]] = deque(maxlen=PASSED)

    def counter(self, origin: Origin, target: str | None = None) -> Counter | None:
        """Return the counter of items of this origin where this target takes them, or where they are put; None: nothing
        does."""
        if not self.enabled:
            return None
        counter = self._counters.get((origin[1], target))
        if counter is None:
            counter = Counter(self, origin, target)
            self.list(counter)
        return counter

    def list(self, counter: Counter) -> None:
        """It is told of; where there are too many, the oldest is not, until it counts again."""
        counter.listed = True
        self._counters[counter.origin[1], counter.target] = counter
        if len(self._counters) > KEPT:
            self._counters.pop(next(iter(self._counters))).listed = False

    def passed(self, source: str, target: str, key: Key) -> None:
        """The promise `key` of a call is an argument of another; both named as in "judge[0].score" or "judge.score"."""
        if self.enabled:
            self._passed.append((self.now(), source, target, key))

    def between(self, start: float, end: float) -> Passages:
        """Return what passed in these seconds of this host's clock."""
        items = tuple(
            Passage(counter.origin, counter.target, points)
            for counter in self._counters.values()
            if counter.count and counter.last >= start and (points := counter.between(start, end))
        )
        keys: dict[tuple[str, str], set[Key]] = defaultdict(set)
        for time, source, target, promise in reversed(self._passed):
            if time < start:
                break
            if time <= end:  # each rank of a group gets it, and it counts once
                keys[role_of(source), role_of(target)].add(promise)
        return Passages(items, {edge: len(promises) for edge, promises in keys.items()})


# All hosts together --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Edge:
    """Items and promises that went from one endpoint to another."""

    items: int = 0
    """Of streams, and promises."""
    released: tuple[float, ...] = ()
    """When items of streams left the source, seconds; ascending, at most `MOST_TIMES` of them."""


def edges(hosts: Iterable[tuple[float, Passages]]) -> dict[tuple[str, str], Edge]:
    """Return the edge of each pair of endpoints with anything between them; what an endpoint keeps to itself is left
    out.

    Args:
        hosts: for each host, the seconds to add to its clock, and what it knows.
    """
    put: dict[Key, list[tuple[float, int]]] = defaultdict(list)
    queues: dict[tuple[str, str], set[Key]] = defaultdict(set)
    result: dict[tuple[str, str], Edge] = defaultdict(Edge)
    for ahead, passages in hosts:
        for edge, count in passages.promises.items():
            result[edge].items += count
        for passage in passages.items:
            source, queue, _ = passage.origin
            if passage.target is None:
                put[queue] += [(time + ahead, count) for time, count in passage.points]
            else:
                queues[source, passage.target].add(queue)
                result[source, passage.target].items += sum(count for _, count in passage.points)
    for edge, keys in queues.items():
        result[edge].released = quantiles([point for key in keys for point in put[key]])
    return {edge: what for edge, what in sorted(result.items()) if edge[0] != edge[1]}


def quantiles(points: Iterable[tuple[float, int]], most: int = MOST_TIMES) -> tuple[float, ...]:
    """Times at which evenly spaced items passed, the last one among them.

    Args:
        points: (time, items that passed since the point before).
        most: how many times to return; all if there are fewer items.
    """
    ordered = sorted(points)
    passed = list(itertools.accumulate(count for _, count in ordered))
    if not passed:
        return ()
    count = min(most, passed[-1])
    wanted = (-(-(number * passed[-1]) // count) for number in range(1, count + 1))
    return tuple(ordered[bisect_left(passed, item)][0] for item in wanted)
