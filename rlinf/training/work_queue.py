"""The micro-batches of one call, taken by copies of the model as each becomes free.

`WorkQueue` lives on rank 0. It reads rounds of commands, as a single copy of the model would carry them out one after
the other, and gives each copy that asks the next round, so that none waits for another; and all ranks every optimizer
step, once each round before it is done. A round wakes the copies that wait for work; the last result before an
optimizer step wakes all ranks for the step.

A copy may be several ranks, which compute a round together. Whichever of them asks first decides for all of them: they
see one sequence of rounds, with None where their copy found nothing and left.

Why any order does: losses are un-normalised sums, which the optimizer step adds up over copies and divides once
(`algos/loss_sum.py`). So which copy computed what changes rounding, and nothing else.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from rlinf.training.micro_batches import Command, Forward, ForwardBackward, OptimizerStep, Recompute


@dataclass(frozen=True, slots=True)
class SyncPoint:
    """An optimizer step that all ranks take together, or the end of the call."""

    step: OptimizerStep | None
    """The optimizer step; None: the call is over."""
    empty_batch: ForwardBackward | None = None
    """For ranks that computed nothing since the last one: a micro-batch without rows, which gives them sums of 0."""


@dataclass(slots=True, eq=False)
class _Round:
    """Commands that the ranks of one copy carry out together."""

    commands: tuple[Command, ...]
    """For each rank of the copy."""
    results: dict[int, Any] = field(default_factory=dict)
    """By rank of the copy."""


class WorkQueue:
    """Gives out the rounds of one call.

    Args:
        commands: rounds, with an entry for each rank of a copy, and optimizer steps.
        copies: the ranks of each copy.
    """

    def __init__(self, commands: AsyncGenerator[tuple[Command, ...], None], copies: Sequence[Sequence[int]]):
        self.error: BaseException | None = None
        """Why the input ended, if it failed."""
        self._commands = commands
        self._place = {rank: (number, part) for number, ranks in enumerate(copies) for part, rank in enumerate(ranks)}
        self._taken: list[list[_Round | None]] = [[] for _ in copies]
        self._ready: deque[_Round] = deque()
        self._again: list[_Round] = []  # computed once, to come once more
        self._out = 0  # results that are still to come
        self._sync_points: list[SyncPoint] = []
        self._empty_batch: ForwardBackward | None = None
        self._stopped = False
        self._changed = asyncio.Event()

    async def read(self) -> None:
        """Read the commands; returns when all rounds are done."""
        try:
            async with aclosing(self._commands) as commands:
                async for round in commands:
                    await self._put(round)
            await self._settled()
        except Exception as error:  # raised when all ranks have come to the end
            self.error = error
        finally:
            self.stop()

    def stop(self) -> None:
        """Give out no more rounds, and call all ranks to the end."""
        if not self._stopped:
            self._stopped = True
            self._ready.clear()
            self._call(SyncPoint(None))

    async def _put(self, commands: tuple[Command, ...]) -> None:
        first = commands[0]
        if isinstance(first, OptimizerStep):
            await self._settled()
            self._call(SyncPoint(first, self._empty_batch))
            self._empty_batch = None
            return
        if isinstance(first, Recompute):
            before = self._again[first.number]
            again = [one.once_more(before.results[part]) for part, one in enumerate(before.commands)]  # type: ignore[union-attr]
            commands, first = tuple(again), again[0]
        round = _Round(commands)
        if isinstance(first, ForwardBackward):
            self._empty_batch = first.without_rows()
            if first.keep and not first.again:
                self._again.append(round)
        self._ready.append(round)
        self._wake()

    def _call(self, sync_point: SyncPoint) -> None:
        self._sync_points.append(sync_point)
        self._wake()

    async def _settled(self) -> None:
        """Wait until every round is done."""
        while self._ready or self._out:
            await self._changed.wait()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # For the ranks -----------------------------------------------------------------------------------------------

    async def work(self, rank: int, points: int, number: int) -> tuple[SyncPoint | None, int]:
        """Wait until there is something to do.

        Args:
            rank: that asks.
            points: sync points that it went to.
            number: rounds of its copy, those that were None included, that it knows of.

        Returns:
            What all ranks do together now; or None: a round is available. And `number`, counted on over what its copy
            left without it.
        """
        while True:
            number = self._next(rank, number)
            if points < len(self._sync_points):
                return self._sync_points[points], number
            if self._available(rank, number):
                return None, number
            await self._changed.wait()

    async def drained(self, rank: int, points: int, number: int) -> None:
        """Wait until no round is available any more: others took them all."""
        while points == len(self._sync_points) and self._available(rank, self._next(rank, number)):
            await self._changed.wait()

    def take(self, rank: int, points: int, number: int, result: Any = None) -> Command | None:
        """The next round of this rank's copy; None: there is nothing to do, leave the device to others.

        Args:
            rank, points, number: see `work`.
            result: of the round before, if there was one.
        """
        copy, part = self._place[rank]
        taken = self._taken[copy]
        if result is not None:
            self._done(taken[number - 1], part, result)
        if number == len(taken):
            free = self._ready and points == len(self._sync_points)
            round = self._ready.popleft() if free else None
            taken.append(round)
            self._out += 0 if round is None else len(round.commands)
            self._wake()
        mine = taken[number]
        return None if mine is None else mine.commands[part]

    def _done(self, round: _Round | None, part: int, result: Any) -> None:
        assert round is not None
        self._out -= 1
        round.results[part] = result
        first = round.commands[0]
        if isinstance(first, Forward) and len(round.results) == len(round.commands):
            first.deliver([round.results[part] for part in range(len(round.commands))])
        self._wake()

    def _next(self, rank: int, number: int) -> int:
        taken = self._taken[self._place[rank][0]]
        while number < len(taken) and taken[number] is None:
            number += 1
        return number

    def _available(self, rank: int, number: int) -> bool:
        return bool(self._ready) or number < len(self._taken[self._place[rank][0]])
