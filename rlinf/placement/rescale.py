"""Decide which engines hand their last in-flight requests to others, to become free before the longest answer ends.

Flows in: what each engine still has to answer, how much it may hold, and how fast engines are. Flows out: moves, which
together take all that their source has. Pure logic: nobody waits here; asked again after the moves, there are none.

A decode step of n rows takes `step + row·n` seconds (planning by PTL = a + b·n). An engine that takes others' rows may
have so many that a step takes at most `1 + share` times as long as with a single row. So no answer is made slower than
by that factor, however long it turns out to be, and neither is the last one. What moves is read again, which by the
same measure must cost little beside what it took to make: `token` seconds per token read, of all rows that an engine
then has, are at most `share` times the steps that the longest of them has behind it. Both together: from its beginning
to its end, generation takes at most `1 + share` times as long, by this model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SHARE = 0.1
"""By how much the last answer may become slower. With a = 4.0 ms and b = 0.112 ms, fitted to published rollouts of a 7B
model, an engine takes up to 4 rows."""


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """What a decode step costs: `step + row·n` seconds with n rows."""

    step: float
    """Seconds of a decode step besides those for its rows."""
    row: float
    """Seconds that each row adds."""
    token: float = 0.0
    """Seconds to read one token."""

    def most(self, share: float) -> float:
        """Rows of which a step takes at most `1 + share` times as long as one of a single row."""
        if self.row <= 0:
            return math.inf
        return math.floor(1 + share * (self.step + self.row) / self.row + 1e-9)


@dataclass(frozen=True, slots=True)
class Bundle:
    """In-flight requests of one group, which stay together."""

    id: int
    """Names it, on its engine."""
    rows: int
    """Answers not ended."""
    need: int
    """Tokens of cache that they may come to."""
    length: int
    """Tokens to read if it moves: its prompts and what has been answered, at most."""
    answered: int
    """Tokens that the longest of its answers has."""


@dataclass(frozen=True, slots=True)
class Load:
    """What one engine has left to do; no more will come."""

    engine: int
    """Which."""
    max_rows: int
    """Rows that it decodes together."""
    max_tokens: int | None
    """Tokens of cache that they may come to; None for no bound."""
    bundles: tuple[Bundle, ...]
    """What it has."""


@dataclass(frozen=True, slots=True)
class Move:
    """An engine hands bundles over; together, the moves of a source take all it has."""

    source: int
    """The engine that becomes free."""
    target: int
    """The engine that goes on."""
    bundles: tuple[int, ...]
    """Their ids at the source."""


def fit(sums: Sequence[float]) -> DecodeCost | None:
    """The cost of steps, fitted to measured ones by least squares.

    Args:
        sums: as `engines.base.StepStats`: of steps the count, rows, rows², seconds and rows x seconds;
            tokens read, and the seconds it took.

    Returns:
        None if it does not follow from these steps: there are too few, or all had as many rows.
    """
    count, rows, squares, seconds, products, tokens, reading = sums
    spread = squares - rows * rows / count if count else 0.0
    if count < 8 or spread <= 1e-9 * squares:
        return None
    row = max(0.0, (products - rows * seconds / count) / spread)
    step = (seconds - row * rows) / count
    if step <= 0:  # rows are all there is to it
        step, row = 0.0, seconds / rows
    return DecodeCost(step, row, reading / tokens if tokens else 0.0)


def consolidate(loads: Sequence[Load], cost: DecodeCost, share: float = SHARE) -> tuple[Move, ...]:
    """The moves after which the fewest engines have work; none once they are made.

    Engines are emptied in order of what they have left, the least first, into those that have most and room for it.
    One that cannot be emptied altogether keeps all it has.

    Args:
        loads: of engines with the same weights, each once.
        cost: how fast all of them are.
        share: see `SHARE`.
    """
    limit = cost.most(share)
    least = min((bundle.need for load in loads for bundle in load.bundles), default=0)
    engines = [_Engine(load, limit, least) for load in loads if load.bundles]
    while True:
        engines.sort(key=lambda one: (one.rows, one.load.engine))
        if not _round(engines, cost, share):
            break
        engines = [one for one in engines if one.held]
    moved: dict[tuple[int, int], list[int]] = {}
    for target in engines:
        for source, bundle in target.held:
            if source != target.load.engine:
                moved.setdefault((source, target.load.engine), []).append(bundle.id)
    return tuple(Move(*ends, tuple(sorted(ids))) for ends, ids in sorted(moved.items()))


class _Engine:
    """An engine during the search for moves."""

    def __init__(self, load: Load, limit: float, least: int):
        self.load = load
        self.held = [(load.engine, bundle) for bundle in load.bundles]
        self.max_rows = min(load.max_rows, limit)
        self.max_need = math.inf if load.max_tokens is None else load.max_tokens
        self.least = least
        """What the smallest bundle of all needs."""
        self.taken = False
        """It has got something in this round."""
        self.rows = self.need = self.length = self.answered = 0
        for bundle in load.bundles:
            self.count(bundle)

    @property
    def full(self) -> bool:
        return self.rows >= self.max_rows or self.need + self.least > self.max_need

    def count(self, bundle: Bundle, sign: int = 1) -> None:
        self.rows += sign * bundle.rows
        self.need += sign * bundle.need
        self.length += sign * bundle.length
        self.answered = max(self.answered, bundle.answered)

    def takes(self, bundle: Bundle, cost: DecodeCost, share: float) -> bool:
        if self.rows + bundle.rows > self.max_rows or self.need + bundle.need > self.max_need:
            return False
        behind = cost.step * max(self.answered, bundle.answered)
        return cost.token * (self.length + bundle.length) <= share * behind


def _round(engines: Sequence[_Engine], cost: DecodeCost, share: float) -> bool:
    """Try to empty each engine, the least first, into those that have most; whether one was."""
    any_ = False
    for one in engines:
        one.taken = False
    targets = [one for one in reversed(engines) if not one.full]
    room = sum(one.max_rows - one.rows for one in targets)
    for source in engines:
        elsewhere = room if source.full else room - (source.max_rows - source.rows)
        if source.taken or elsewhere < source.rows or not _empty(source, targets, cost, share):
            continue
        any_ = True
        targets = [one for one in targets if one.held and not one.full]
        room = sum(one.max_rows - one.rows for one in targets)
    return any_


def _empty(source: _Engine, targets: Sequence[_Engine], cost: DecodeCost, share: float) -> bool:
    """Give all that one engine has to others, or nothing."""
    placed: list[tuple[_Engine, tuple[int, Bundle], int]] = []
    first = 0
    for item in sorted(source.held, key=lambda item: _size(item[1]), reverse=True):
        while first < len(targets) and (targets[first] is source or not targets[first].takes(item[1], cost, share)):
            first += 1
        if first == len(targets):
            for one, (_, bundle), answered in reversed(placed):
                one.count(bundle, -1)
                one.answered = answered
            return False
        target = targets[first]
        placed.append((target, item, target.answered))
        target.count(item[1])
    for target, item, _ in placed:
        target.held.append(item)
        target.taken = True
    source.held = []
    return True


def _size(bundle: Bundle) -> tuple[int, ...]:
    return bundle.rows, bundle.need, bundle.length, bundle.answered
