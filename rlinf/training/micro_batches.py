"""Micro-batches of a batch, and the commands by which every rank computes on its own.

Groups come in any order. `InOrder` lets them go on in the order of their prompts, `token_batches` takes as many at once
as fill a micro-batch, and `MicroBatchPacker` cuts their rows into rounds: a micro-batch for each share of the ranks. A
round becomes one command for each share; `CommandStream` gives every rank its commands as a stream. All streams have
the same length, and end after the same round whether the input ended, failed, or was stopped: a command wakes every
rank, and `done` of rank 0 lets the next one be fetched.

The input is read in a task of the host, not in the call: the call gives its devices away while it waits, and takes them
again together with all ranks, who wake only when there is work for them, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from rlinf.data.packing import Packed, Row, cut, pack
from rlinf.data.sample import Group
from rlinf.runtime.streams.stream import Stream, each

_AHEAD = 2
"""Commands that may be out: one that is computed, and one that peers can open meanwhile. Those are carried out even
when the call is cancelled."""
_END: Any = object()


@dataclass(slots=True, eq=False)
class ForwardBackward:
    """Add the gradient of a micro-batch."""

    __plain__: ClassVar[bool] = True  # holds no promise: the runtime need not look for one in its rows

    rows: tuple[Row, ...]
    """The micro-batch; empty if there is no work for this rank, which takes part all the same."""
    supervised: bool = False
    """The rows are worked examples, to be learned by their likelihood."""
    compare: bool = False
    """No step was taken on the batch yet: measure how far our log-probs are from the engine's."""
    columns: frozenset[str] = frozenset()
    """Columns of the loss that are computed in this pass, unless `cached_columns` has them from an earlier one."""
    keep: bool = False
    """It comes once more, as `Recompute`."""
    again: bool = False
    """It came before, to whoever computed it then, under earlier weights."""
    cached_columns: dict[str, Any] = field(default_factory=dict)
    """Columns that were computed when it came first, float32 [learned] each: tensors on the device, or arrays where
    they come from another rank."""
    load: np.ndarray | None = None
    """Share of the whole batch's choices that each expert has, float32 [layers, experts], where they are balanced."""
    _packed: Packed | None = field(default=None, init=False)

    def packed(self) -> Packed:
        """The rows as tensors, made once."""
        if self._packed is None:
            load = None if self.load is None else torch.from_numpy(self.load)
            self._packed = replace(pack(self.rows), expert_load=load)
        return self._packed

    def __reduce__(self) -> tuple[object, ...]:
        return ForwardBackward, tuple(getattr(self, each.name) for each in fields(self) if each.init)

    def once_more(self, columns: dict[str, np.ndarray]) -> ForwardBackward:
        """This command for a later epoch, with the columns that its first computation gave."""
        return replace(self, again=True, keep=False, cached_columns=columns)

    def without_rows(self) -> ForwardBackward:
        """An empty micro-batch of its kind."""
        return replace(self, rows=(), keep=False, cached_columns={})


@dataclass(frozen=True, slots=True)
class Recompute:
    """Add the gradient of an earlier micro-batch once more, under the weights of now."""

    number: int
    """Which of this call's commands with `keep`, from 0."""


@dataclass(slots=True, eq=False)
class Forward:
    """Compute numbers of every learned token of a micro-batch, without gradient: log-probs, values."""

    __plain__: ClassVar[bool] = True

    rows: tuple[Row, ...]
    """The micro-batch; empty if there is no work for this rank, which takes part all the same."""
    columns: tuple[str, ...]
    """Columns to compute: names in `Sample.per_token`."""
    tokens: tuple[int, ...]
    """Learned tokens of each share of this round."""
    on_scores: Callable[[Sequence[np.ndarray]], None] | None = None
    """On rank 0, takes the columns of each share, float32 [columns, its learned tokens]."""

    def packed(self) -> Packed:
        """The rows as tensors."""
        return pack(self.rows)

    def deliver(self, scores: Sequence[np.ndarray]) -> None:
        """Hand over what all ranks computed."""
        if self.on_scores is not None:
            self.on_scores(scores)

    def __reduce__(self) -> tuple[object, ...]:
        return Forward, (self.rows, self.columns, self.tokens)


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Take an optimizer step with the gradients that were added since the last."""

    new_version: bool = False
    """This step makes a version of the weights by itself; otherwise all steps of a call together make one."""
    left_out: int = 0
    """Optimizer steps that were planned behind this one and are not taken: the schedule of the learning rate passes
    over them."""
    empty: bool = False
    """There is nothing to learn from: no step is taken, and the version that is made has the same weights."""


Command = ForwardBackward | Recompute | Forward | OptimizerStep


class CommandHandler(Protocol):
    """Carries out the commands of one call on one rank. `learn` and `score` block, and may be collectives."""

    def turn(self) -> AbstractContextManager[None]:
        """Entered when it is this call's turn on all ranks, and left before the next call's."""
        ...

    def learn(self, command: ForwardBackward, *, again: bool = False) -> None:
        """Add the gradient of a micro-batch; `again`: of one that came in an earlier epoch."""

    def score(self, command: Forward) -> Tensor:
        """The columns of a micro-batch, float32 [columns, learned]."""
        ...

    async def step(self, command: OptimizerStep) -> None:
        """Take an optimizer step, on all ranks together."""


class CommandStream:
    """The commands of one call.

    Args:
        commands: for every round, what the ranks of each share shall do; rank 0 has the first one's.
        shares: of each rank, which entry of a round is its own.
    """

    def __init__(self, commands: AsyncGenerator[tuple[Any, ...], None], shares: Sequence[int]):
        self.error: BaseException | None = None
        """Why the input ended, if it failed."""
        self._commands = commands
        self._room = asyncio.Semaphore(_AHEAD)
        self._stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues: list[tuple[int, asyncio.Queue[Any]]] = [(share, asyncio.Queue()) for share in shares[1:]]

    def streams(self) -> list[Stream[Any]]:
        """The commands of each rank; rank 0's is what reads the input."""
        peers = (Stream.of(_of(queue), name="commands") for _, queue in self._queues)
        return [Stream.of(self._lead(), name="commands"), *peers]

    def done(self) -> None:
        """Rank 0 has carried out one command."""
        self._room.release()

    def stop(self) -> None:
        """Give no more commands than are out already."""
        if not self._stopped.done():
            self._stopped.set_result(None)

    async def _lead(self) -> AsyncIterator[Any]:
        try:
            async with aclosing(self._commands) as commands:
                while (command := await self._next(commands)) is not _END:
                    for share, queue in self._queues:
                        queue.put_nowait(command[share])
                    yield command[0]
        except Exception as error:  # raised when all ranks have come to the end
            self.error = error
        finally:
            for _, queue in self._queues:
                queue.put_nowait(_END)

    async def _next(self, commands: AsyncIterator[tuple[Any, ...]]) -> Any:
        async def fetch() -> Any:
            await self._room.acquire()
            return await anext(commands, _END)

        fetching = asyncio.ensure_future(fetch())
        try:
            await asyncio.wait({fetching, self._stopped}, return_when=asyncio.FIRST_COMPLETED)
            return fetching.result() if fetching.done() and not self._stopped.done() else _END
        finally:
            if not fetching.done():
                fetching.cancel()
                await asyncio.wait([fetching])
            elif not fetching.cancelled():
                fetching.exception()  # seen


async def _of(queue: asyncio.Queue[Any]) -> AsyncIterator[Any]:
    while (part := await queue.get()) is not _END:
        yield part


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
        """State on which the order of later steps depends."""
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


async def token_batches(
    groups: Iterable[Group] | AsyncIterable[Group], in_order: InOrder | None, budget: int
) -> AsyncGenerator[Sequence[Group], None]:
    """Groups in the order of computing, as many at once as fill a micro-batch, so that small ones cost little each.

    Args:
        groups: as they come.
        in_order: the order; None takes them as they come.
        budget: tokens of a micro-batch.
    """
    batch: list[Group] = []
    tokens = 0
    if in_order is not None:
        in_order.begin()
    async for group in each(groups):
        for ready in in_order.push(group) if in_order is not None else (group,):
            batch.append(ready)
            tokens += sum(len(sample.prompt.token_ids) + len(sample.response_ids) for sample in ready.samples)
        if tokens >= budget:
            yield batch
            batch, tokens = [], 0
    batch += in_order.close() if in_order is not None else ()
    yield batch


@dataclass(frozen=True, slots=True)
class Packing:
    """Settings by which rows are cut into micro-batches."""

    ranks: int
    """Micro-batches in a round: one for each share of the ranks."""
    budget: int
    """Tokens of a micro-batch, prompts included; a longer row stands alone."""
    together: int = 1
    """So many neighbours are never parted, such as the two rows of a pair; what is pushed is whole sets."""
    rounds_at_once: int = 1
    """Rounds that are computed at the same time, so the last ones are balanced over as many."""


class MicroBatchPacker:
    """Cuts rows, in order, into rounds.

    Args:
        packing: how.
    """

    def __init__(self, packing: Packing):
        self._packing = packing
        self._rows: list[Row] = []
        self._tokens = 0

    def push(self, rows: Sequence[Row]) -> Iterator[Round]:
        """More rows; the rounds that are full."""
        self._rows += rows
        self._tokens += sum(row.size for row in rows)
        if self._tokens > self._packing.ranks * self._packing.budget:  # otherwise no round can be full
            pieces = self._pieces()
            while len(pieces) > self._packing.ranks:  # the last piece may still grow
                yield self._assign(pieces[: self._packing.ranks], self._packing.ranks)
                pieces = pieces[self._packing.ranks :]
            self._rows = [row for piece in pieces for row in piece]
            self._tokens = sum(row.size for row in self._rows)

    def close(self, rows: Sequence[Row] = ()) -> Iterator[Round]:
        """No more rows come than these; the last rounds, of which some may be smaller."""
        self._rows += rows
        pieces, at_once = self._pieces(), self._packing.ranks * self._packing.rounds_at_once
        for start in range(0, len(pieces), at_once):
            assigned = self._assign(pieces[start : start + at_once], at_once)
            rounds = [assigned[first : first + self._packing.ranks] for first in range(0, at_once, self._packing.ranks)]
            yield from (round for round in rounds if any(round))
        self._rows, self._tokens = [], 0

    def _pieces(self) -> list[list[Row]]:
        """The rows that are held, in micro-batches."""
        if self._packing.together == 1:
            return list(cut(self._rows, [row.size for row in self._rows], self._packing.budget))
        sets = self._sets(self._rows)
        pieces = cut(sets, list(map(_size, sets)), self._packing.budget)
        return [[row for each in piece for row in each] for piece in pieces]

    def _sets(self, rows: Sequence[Row]) -> list[Sequence[Row]]:
        return [rows[start : start + self._packing.together] for start in range(0, len(rows), self._packing.together)]

    def _assign(self, pieces: Sequence[Sequence[Row]], ranks: int) -> Round:
        """Rows of so many ranks, balanced over them by tokens: the most first, each to the rank with least so far
        (Graham, "Bounds on multiprocessing timing anomalies", 1969). Unless that would overfill one. Answers to one
        prompt stay together where they came together, since a rank reads their prompt once."""
        if ranks == 1:
            return (tuple(pieces[0]),)
        assigned: list[list[Row]] = [[] for _ in range(ranks)]
        loads = [0] * ranks
        runs = [run for piece in pieces for run in (_runs(piece) if self._packing.together == 1 else self._sets(piece))]
        for run in sorted(runs, key=_size, reverse=True):
            rank = loads.index(min(loads))
            assigned[rank] += run
            loads[rank] += _size(run)
        if max(loads) > max(map(_size, pieces)):
            empty: list[list[Row]] = [[] for _ in range(ranks - len(pieces))]
            assigned = [*map(list, pieces), *empty]
        return tuple(map(tuple, assigned))


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
