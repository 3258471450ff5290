"""Which samples are computed together, on which rank: a function of the groups alone, never of when they came.

In: groups as they finish. Out: rounds, each with one micro-batch per rank of at most so many tokens. A round comes out
as soon as it is full, so computing begins while other groups are still being generated.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Iterator, Sequence

from rlinf.data.packing import Row, cut
from rlinf.data.sample import Group
from rlinf.runtime.streams.stream import each

Round = tuple[tuple[Row, ...], ...]
"""For each rank the rows that it computes on; none for a rank without work."""


class InOrder:
    """Lets groups go on in the order of their prompts' ids.

    Prompt ids are positions in a stream, so those of one step follow one another, and the first follows the last of the
    step before. A group goes on when all before it have. Whatever does not fit that (ids that begin anew, gaps) waits
    for the end of the step and goes on sorted: later, but in the same order whenever it came.

    Args:
        state: of another, to go on from.
    """

    def __init__(self, state: Sequence[int | None] = (0, None)):
        self.first = state[0] or 0
        """Id with which the next step begins, if nothing is skipped."""
        self._began = state[1]  # with which id the last step began
        self._next = self.first
        self._waiting: dict[int, list[Group]] = {}

    @property
    def state(self) -> list[int | None]:
        """What the order of later steps depends on."""
        return [self.first, self._began]

    def begin(self) -> None:
        """A step begins; what an interrupted one left is forgotten."""
        self._next = self.first
        self._waiting.clear()

    def push(self, group: Group) -> Iterator[Group]:
        """One more group has come; those that may go on."""
        self._waiting.setdefault(group.prompt.id, []).append(group)
        while (follows := self._waiting.pop(self._next, None)) is not None:
            self._next += 1
            yield from follows

    def close(self) -> Iterator[Group]:
        """The step is over; the rest, sorted. The next step is expected to go on where this one ended, or, if its ids
        began where those of the step before had begun, to begin there once more."""
        rest = sorted(self._waiting)
        ran = self._next > self.first
        if not (rest or ran):
            return
        began = min([*rest, self.first] if ran else rest)
        after = max([self._next, *(number + 1 for number in rest)])
        for number in rest:
            yield from self._waiting.pop(number)
        self.first = self._next = began if began == self._began else after
        self._began = began


async def lots(
    groups: Iterable[Group] | AsyncIterable[Group], in_order: InOrder | None, budget: int
) -> AsyncGenerator[Sequence[Group], None]:
    """Groups in the order of computing, in lots that fill a micro-batch, so that small ones cost little each.

    Args:
        groups: as they come.
        in_order: the order; None takes them as they come.
        budget: tokens of a micro-batch.
    """
    lot: list[Group] = []
    held = 0
    if in_order is not None:
        in_order.begin()
    async for group in each(groups):
        for ready in in_order.push(group) if in_order is not None else (group,):
            lot.append(ready)
            held += sum(len(sample.prompt.token_ids) + len(sample.response_ids) for sample in ready.samples)
        if held >= budget:
            yield lot
            lot, held = [], 0
    lot += in_order.close() if in_order is not None else ()
    yield lot


class Rounds:
    """Cuts rows, in order, into rounds.

    Args:
        ranks: micro-batches in a round.
        budget: tokens of a micro-batch; a longer row stands alone.
        together: so many neighbours are never parted, such as the two rows of a pair; what is pushed is whole sets.
        copies: rounds that are computed at the same time, so the last ones are balanced over as many.
    """

    def __init__(self, ranks: int, budget: int, together: int = 1, copies: int = 1):
        self._ranks, self._copies = ranks, copies
        self._budget = budget
        self._together = together
        self._rows: list[Row] = []
        self._held = 0

    def push(self, rows: Sequence[Row]) -> Iterator[Round]:
        """More rows; the rounds that are full."""
        self._rows += rows
        self._held += sum(row.size for row in rows)
        if self._held > self._ranks * self._budget:  # otherwise no round can be full
            pieces = self._pieces()
            while len(pieces) > self._ranks:  # the last piece may still grow
                yield self._dealt(pieces[: self._ranks], self._ranks)
                pieces = pieces[self._ranks :]
            self._rows = [row for piece in pieces for row in piece]
            self._held = sum(row.size for row in self._rows)

    def close(self, rows: Sequence[Row] = ()) -> Iterator[Round]:
        """No more rows come than these; the last rounds, of which some may be smaller."""
        self._rows += rows
        pieces, at_once = self._pieces(), self._ranks * self._copies
        for start in range(0, len(pieces), at_once):
            dealt = self._dealt(pieces[start : start + at_once], at_once)
            rounds = [dealt[first : first + self._ranks] for first in range(0, at_once, self._ranks)]
            yield from (round for round in rounds if any(round))
        self._rows, self._held = [], 0

    def _pieces(self) -> list[list[Row]]:
        """The rows that are held, in micro-batches."""
        if self._together == 1:
            return list(cut(self._rows, [row.size for row in self._rows], self._budget))
        sets = self._sets(self._rows)
        return [[row for each in piece for row in each] for piece in cut(sets, list(map(_size, sets)), self._budget)]

    def _sets(self, rows: Sequence[Row]) -> list[Sequence[Row]]:
        return [rows[start : start + self._together] for start in range(0, len(rows), self._together)]

    def _dealt(self, pieces: Sequence[Sequence[Row]], ranks: int) -> Round:
        """Rows of so many ranks, balanced over them by tokens: the most first, each to the rank with least so far
        (Graham, "Bounds on multiprocessing timing anomalies", 1969). Unless that would overfill one. Answers to one
        prompt stay together where they came together, since a rank reads their prompt once."""
        if ranks == 1:
            return (tuple(pieces[0]),)
        dealt: list[list[Row]] = [[] for _ in range(ranks)]
        loads = [0] * ranks
        runs = [run for piece in pieces for run in (_runs(piece) if self._together == 1 else self._sets(piece))]
        for run in sorted(runs, key=_size, reverse=True):
            rank = loads.index(min(loads))
            dealt[rank] += run
            loads[rank] += _size(run)
        if max(loads) > max(map(_size, pieces)):
            empty: list[list[Row]] = [[] for _ in range(ranks - len(pieces))]
            dealt = [*map(list, pieces), *empty]
        return tuple(map(tuple, dealt))


def _runs(rows: Sequence[Row]) -> list[list[Row]]:
    """Neighbours with the same prompt, together."""
    runs: list[list[Row]] = []
    for row in rows:
        if runs and runs[-1][0].prompt_ids is row.prompt_ids and runs[-1][0].images == row.images:
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs


def _size(rows: Sequence[Row]) -> int:
    return sum(row.size for row in rows)
