"""The order of computation: from groups, in whatever order they come, to the commands that every rank carries out.

`InOrder` lets groups go on in the order of their prompts, `token_batches` takes as many at once as fill a micro-batch,
and `MicroBatchPacker` cuts their rows into rounds: a micro-batch for each share of the ranks. A round becomes one
command for each share; `CommandStream` gives every rank its commands as a stream. All streams have the same length, and
end after the same round whether the input ended, failed, or was stopped: a command wakes every rank, and `done` of rank
0 lets the next one be fetched. The input is read in a task of the host, not in the call: the call gives its devices
away while it waits, and takes them again together with all ranks, who wake only when there is work for them, too.

Three makers of commands: `BatchSchedule` for a batch of judged groups, from its first group to its last optimizer step,
the first epoch while groups are still being made, unless something must be known of the whole batch first; policy and
critic differ in what they make of groups (`training/policy.py`), not in their schedule. `LogprobPass` for one forward
pass over groups: rank 0, having computed a round with all others, hands the columns over (`Forward.deliver`), and the
groups that are complete go into `finished`, where somebody waits. `supervised_commands` for batches of given texts, an
optimizer step each.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rlinf.algos.token_losses import LOGPROBS, TokenLoss
from rlinf.data.packing import Packed, Parcel, Row, cut_tree, is_away, pack, rows_here, shared, whole_texts
from rlinf.data.prefix_tree import tree_order
from rlinf.data.rng import permutation
from rlinf.data.sample import Datum, Example, Group, NotScored
from rlinf.runtime.base.tasks import finish
from rlinf.runtime.streams.stream import Stream, each
from rlinf.training.optimizer import Adam
from rlinf.training.policy import LearnedRows, OwnColumns

Groups = Iterable[Group] | AsyncIterable[Group]
_FAILED = ("timeout", "error")
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
        rest = (getattr(self, each.name) for each in fields(self)[1:] if each.init)
        return ForwardBackward, (Parcel(self.rows), *rest)

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
    """Compute numbers of every learned token of a micro-batch: log-probs, values; of a `loss` also its gradient."""

    __plain__: ClassVar[bool] = True

    rows: tuple[Row, ...]
    """The micro-batch; empty if there is no work for this rank, which takes part all the same."""
    columns: tuple[str, ...]
    """Columns to compute: names in `Sample.per_token`."""
    tokens: tuple[int, ...]
    """Learned tokens of each share of this round."""
    on_scores: Callable[[Sequence[np.ndarray]], None] | None = None
    """On rank 0, takes the columns of each share, float32 [columns, its learned tokens]."""
    loss: TokenLoss | None = None
    """Its gradient is added, with the rows' columns as its inputs; None: there is none."""
    _packed: Packed | None = field(default=None, init=False)

    def packed(self) -> Packed:
        """The rows as tensors, made once."""
        if self._packed is None:
            self._packed = pack(self.rows)
        return self._packed

    def deliver(self, scores: Sequence[np.ndarray]) -> None:
        """Hand over what all ranks computed."""
        if self.on_scores is not None:
            self.on_scores(scores)

    def __reduce__(self) -> tuple[object, ...]:
        return Forward, (Parcel(self.rows), self.columns, self.tokens, None, self.loss)


class TokenPass(NamedTuple):
    """A forward pass of one of several models over data of its own."""

    data: Sequence[Datum]
    """Checked, see `Datum.check`."""
    loss: TokenLoss | None
    """Its gradient is added; None: there is none."""
    model: str
    """Name of the model."""


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
    adam: Adam | None = None
    """Hyperparameters of this step, which is taken on plain sums; None: the optimizer's own, on the mean."""


Command = ForwardBackward | Recompute | Forward | OptimizerStep


async def here(command: Any) -> Any:
    """A command with the tokens of its rows, on the rank that carries it out; see `packing.AwayRow`."""
    rows = getattr(command, "rows", ())
    return replace(command, rows=await rows_here(rows)) if any(map(is_away, rows)) else command


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
            fetching.cancel()
            await finish(fetching)  # whoever closes the commands must not find them in use


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
    trees: bool = False
    """Beginnings that neighbours share are read once: they count once, and the neighbours stay together."""
    context: int = 1
    """Ranks of a share that split what is too long for one of them. Rows of at most their part of the budget lie whole
    on one, in micro-batches of their own, which have a part for each of those ranks."""


class _Branch(NamedTuple):
    """Rows that are never parted."""

    rows: Sequence[Row]
    size: int
    """Tokens that are read of them alone."""
    again: int
    """How many of those the rows before them have, too."""
    goes_on: bool
    """It shares a whole prompt with the rows before, so that a rank had better have both."""


class MicroBatchPacker:
    """Cuts rows, in order, into rounds.

    Args:
        packing: how.
    """

    def __init__(self, packing: Packing):
        self._packing, self._context = packing, packing.context
        self._parts, self._room = packing.ranks * packing.context, max(1, packing.budget // packing.context)
        self._branches: list[_Branch] = []
        self._tokens = 0
        self._long = MicroBatchPacker(replace(packing, context=1)) if packing.context > 1 else None
        self._linked: list[Row] = []  # the last ones, which are long if one is that they share most with
        self.whole = self.fresh = self.learned = 0
        """Tokens of all rows that came out, those of them that are read, and those that are learned."""

    def numbers(self) -> dict[str, float]:
        """Metrics of the rows that came out: tokens that are read for each learned one, and the share of all that need
        not be read again."""
        every = [self] if self._long is None else [self, self._long]
        whole, fresh, learned = (sum(getattr(one, of) for one in every) for of in ("whole", "fresh", "learned"))
        return {"tokens_read/per_learned": fresh / learned, "tokens_read/saved": 1 - fresh / whole} if learned else {}

    def push(self, rows: Sequence[Row]) -> Iterator[Round]:
        """More rows; the rounds that are full."""
        if self._long is not None:
            long, rows = self._by_length(rows)
            yield from self._long.push(long)
        self._add(rows)
        if self._tokens > self._parts * self._room:  # otherwise no round can be full
            pieces = self._pieces()
            while len(pieces) > self._parts:  # the last piece may still grow
                yield self._dealt(self._assign(pieces[: self._parts], self._parts))
                pieces = pieces[self._parts :]
            self._branches = [branch for piece in pieces for branch in piece]
            self._tokens = sum(map(_size, pieces))

    def close(self, rows: Sequence[Row] = ()) -> Iterator[Round]:
        """No more rows come than these; the last rounds, of which some may be smaller."""
        if self._long is not None:
            long, rows = self._by_length(rows, last=True)
            yield from self._long.close(long)
        self._add(rows)
        pieces, at_once = self._pieces(), self._parts * self._packing.rounds_at_once
        for start in range(0, len(pieces), at_once):
            assigned = self._assign(pieces[start : start + at_once], at_once)
            rounds = [self._dealt(assigned[first : first + self._parts]) for first in range(0, at_once, self._parts)]
            yield from (round for round in rounds if any(round))
        self._branches, self._tokens = [], 0

    def _dealt(self, parts: Round) -> Round:
        """The rows of each share, whose ranks have a part each."""
        ends = range(0, len(parts), self._context)
        return tuple(tuple(row for part in parts[end : end + self._context] for row in part) for end in ends)

    def _by_length(self, rows: Sequence[Row], *, last: bool = False) -> tuple[list[Row], list[Row]]:
        """Rows that a rank has no room for, and the others. With the long ones go neighbours that share a prompt and
        most of their tokens with them: to be read once. Of the last ones that is not known until the next comes."""
        every, together = [*self._linked, *rows], self._packing.together
        self._linked = []
        again = [0] * len(every)
        if self._packing.trees and every:
            again = shared(every)
        runs: list[list[Row]] = []
        for start in range(0, len(every), together):
            unit, before = every[start : start + together], every[start - 1] if start else None
            if before is not None and _go_on(before, unit[0], again[start]) and _mostly(before, unit[0], again[start]):
                runs[-1] += unit
            else:
                runs.append(unit)
        if runs and self._packing.trees and not last:
            self._linked = runs.pop()
        long = [any(row.size > self._room for row in run) for run in runs]
        parted = (
            [row for run, apart in zip(runs, long, strict=True) if apart is which for row in run]
            for which in (True, False)
        )
        return next(parted), next(parted)

    def _add(self, rows: Sequence[Row]) -> None:
        if not rows:
            return
        before = [*self._branches[-1].rows[-1:]] if self._branches else []
        every, together = [*before, *rows], self._packing.together
        again = [0] * len(every)
        if self._packing.trees:
            again = shared(every)
        goes_on = [False, *(_go_on(*pair, count) for pair, count in zip(pairwise(every), again[1:], strict=True))]
        for start in range(len(before), len(every), together):
            end = start + together
            size = sum(row.size for row in every[start:end]) - sum(again[start + 1 : end])
            self._tokens += size - again[start]
            self._branches.append(_Branch(every[start:end], size, again[start], goes_on[start] and together == 1))

    def _pieces(self) -> list[list[_Branch]]:
        """The rows that are held, in micro-batches."""
        sizes, again = ([branch[of] for branch in self._branches] for of in (1, 2))
        return list(cut_tree(self._branches, sizes, again, self._room))  # type: ignore[arg-type]

    def _assign(self, pieces: Sequence[Sequence[_Branch]], ranks: int) -> Round:
        """Rows of so many ranks, balanced over them by tokens: the most first, each to the rank with least so far
        (Graham, "Bounds on multiprocessing timing anomalies", 1969). Unless that would overfill one. What shares a
        prompt stays together where it came together, since a rank reads it once."""
        runs: list[list[_Branch]] = []
        for piece in pieces:
            for number, branch in enumerate(piece):
                if number and branch.goes_on:
                    runs[-1].append(branch)
                else:
                    runs.append([branch])
        assigned: list[list[_Branch]] = [[] for _ in range(ranks)]
        loads = [0] * ranks
        for run in sorted(runs, key=_size, reverse=True):
            rank = loads.index(min(loads))
            assigned[rank] += run
            loads[rank] += _size(run)
        if ranks == 1 or max(loads) > max(map(_size, pieces)):
            empty: list[list[_Branch]] = [[] for _ in range(ranks - len(pieces))]
            assigned = [*map(list, pieces), *empty]
            loads = list(map(_size, pieces))
        shares = tuple(tuple(row for branch in part for row in branch.rows) for part in assigned)
        self.fresh += sum(loads)
        self.whole += sum(row.size for rows in shares for row in rows)
        self.learned += sum(row.learned for rows in shares for row in rows)
        return shares


def tree_rows(rows: Sequence[Row], packing: Packing) -> Sequence[Row]:
    """Rows of a group in an order in which each shares most with the one before it, where that matters."""
    if not packing.trees or len(rows) < 2:
        return rows
    if is_away(rows[0]):  # and so all of the group
        return sorted(filter(is_away, rows), key=lambda row: row.lead.order.index(row.at))
    return [rows[number] for number in tree_order(whole_texts(rows))]


def _go_on(before: Row, row: Row, count: int) -> bool:
    """Two neighbours that share so many tokens share a whole prompt."""
    return count >= min(len(before.prompt_ids), len(row.prompt_ids))


def _mostly(before: Row, row: Row, count: int) -> bool:
    """So many tokens are most of the shorter of two rows."""
    return 2 * count > min(before.size, row.size)


def _size(branches: Sequence[_Branch]) -> int:
    """Tokens that are read of neighbours."""
    return sum(branch.size - branch.again for branch in branches) + branches[0].again


class LogprobPass:
    """One pass over groups. What nobody learns from gets NaN: tokens outside the loss mask, and samples whose judging
    failed.

    Args:
        packing: how it is cut into micro-batches.
        columns: names in `Sample.per_token` of what is computed.
    """

    def __init__(self, packing: Packing, columns: tuple[str, ...]):
        self.finished: asyncio.Queue[Group] = asyncio.Queue()
        """Groups that carry the columns, in the order in which they came."""
        self._columns, self._packing = columns, packing
        self._packer = MicroBatchPacker(packing)
        self.came = 0
        """Groups that were pushed."""
        self._waiting: deque[tuple[Group, list[Row | None]]] = deque()  # the groups and their rows, oldest first
        self._scores: dict[Row, np.ndarray] = {}

    async def commands(self, groups: Groups, in_order: InOrder | None) -> AsyncGenerator[tuple[Command, ...], None]:
        """Read groups and give the commands.

        Args:
            groups: to be passed over.
            in_order: see `token_batches`.
        """
        async for batch in token_batches(groups, in_order, self._packing.budget):
            for command in self.push(batch):
                yield command
        for command in self.close():
            yield command

    def push(self, groups: Sequence[Group]) -> Iterator[tuple[Forward, ...]]:
        """More groups; the rounds that are full."""
        self.came += len(groups)
        rows: list[Row] = []
        for group in groups:
            mine = [None if sample.outcome in _FAILED else Row.of(sample, 0.0) for sample in group.samples]
            rows += tree_rows([row for row in mine if row is not None], self._packing)
            self._waiting.append((group, mine))
        yield from map(self._forward, self._packer.push(rows))
        self._release()

    def close(self) -> Iterator[tuple[Forward, ...]]:
        """No more groups come; the last rounds."""
        yield from map(self._forward, self._packer.close())

    def _forward(self, shares: Round) -> tuple[Forward, ...]:
        return forward_round(shares, self._columns, self._scores, on_scores=self._release)

    def _release(self) -> None:
        """Let the oldest groups go on of which all rows are computed."""
        while self._waiting and all(row is None or row in self._scores for row in self._waiting[0][1]):
            group, rows = self._waiting.popleft()
            scores = [
                np.full((len(self._columns), sample.learned_tokens), np.nan, np.float32)
                if row is None
                else self._scores.pop(row)
                for sample, row in zip(group.samples, rows, strict=True)
            ]
            for number, name in enumerate(self._columns):
                group = group.with_column(name, [numbers[number] for numbers in scores])
            self.finished.put_nowait(group)


def forward_round(
    shares: Round,
    columns: tuple[str, ...],
    into: dict[Row, np.ndarray],
    *,
    loss: TokenLoss | None = None,
    on_scores: Callable[[], None] = lambda: None,
) -> tuple[Forward, ...]:
    """Commands for a forward pass over a round.

    Args:
        shares: the rows of each share.
        columns: that are computed.
        into: gets those of each row, float32 [columns, its learned tokens].
        loss: whose gradient is added.
        on_scores: is called once they are there.
    """
    tokens = tuple(sum(row.learned for row in rows) for rows in shares)

    def deliver(scores: Sequence[np.ndarray]) -> None:
        for rows, numbers in zip(shares, scores, strict=True):
            ends = np.cumsum([row.learned for row in rows])[:-1]
            into.update(zip(rows, np.split(numbers, ends, axis=1), strict=True) if rows else ())
        on_scores()

    return tuple(Forward(rows, columns, tokens, None if rank else deliver, loss) for rank, rows in enumerate(shares))


async def token_rounds(
    rows: Sequence[Row], packing: Packing, loss: TokenLoss | None, into: dict[Row, np.ndarray]
) -> AsyncGenerator[tuple[Command, ...], None]:
    """Commands for one pass over rows, which give their log-probs and, with a loss, add its gradient; see
    `forward_round`."""
    for shares in MicroBatchPacker(packing).close(rows):
        yield forward_round(shares, (LOGPROBS,), into, loss=loss)


def gathered(mine: Tensor, tokens: Sequence[int], mesh: DeviceMesh | None, shares: Sequence[int]) -> list[np.ndarray]:
    """The columns that all ranks computed in a round: a collective.

    Args:
        mine: of this rank, float32 [columns, learned tokens].
        tokens: learned tokens of each share of the round.
        mesh: the ranks; None for one.
        shares: of each rank, which share it computed; those of equal shares have the same.

    Returns:
        Of each share, float32 [columns, its learned tokens].
    """
    if mesh is None or mesh.size() == 1:
        return [mine.float().cpu().numpy()]
    padded = torch.zeros(len(mine), max(1, *tokens), dtype=torch.float32, device=mine.device)
    padded[:, : mine.shape[1]] = mine
    parts = [torch.empty_like(padded) for _ in shares]
    dist.all_gather(parts, padded, group=mesh.get_group())
    firsts = [parts[shares.index(share)] for share in range(len(tokens))]
    return [part[:, :count].cpu().numpy() for part, count in zip(firsts, tokens, strict=True)]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The optimizer steps that are made of a batch."""

    where: str
    """Endpoint that learns, for errors."""
    seed: tuple[int, ...]
    """Seed of the order of groups in minibatches, with the number of the epoch appended."""
    epochs: int = 1
    """Passes over the batch."""
    minibatches: int = 1
    """Optimizer steps in each pass."""
    whole_batch: bool = False
    """Rows depend on all groups."""

    @property
    def steps(self) -> int:
        """Optimizer steps of a batch of enough groups."""
        return self.epochs * self.minibatches


class BatchSchedule:
    """Commands for a batch of groups: `epochs` x `minibatches` optimizer steps; none, if no group has a row to learn.

    With more than one minibatch per epoch, the batch is split by groups, in an order drawn anew for each epoch, once
    all groups have come.

    Args:
        rows_of: makes rows of groups; blocking.
        plan: of optimizer steps.
        packing: how rows are cut into micro-batches.
        compute: runs blocking work, as `Actor.compute` does: the rows of a whole batch take a while.
        in_order: the order in which groups are computed on; None takes them as they come.
        own: columns that the trainer computes itself.
        load_of: makes `ForwardBackward.load` of the rows of an optimizer step, which must all be there first.
    """

    def __init__(
        self,
        rows_of: Callable[[Sequence[Group]], LearnedRows],
        plan: BatchPlan,
        packing: Packing,
        compute: Callable[..., Awaitable[LearnedRows]],
        *,
        in_order: InOrder | None = None,
        own: OwnColumns | None = None,
        load_of: Callable[[Sequence[Row]], np.ndarray] | None = None,
    ):
        self._rows_of, self._plan, self._packing, self._compute = rows_of, plan, packing, compute
        self._in_order, self._load_of = in_order, load_of
        self._own = OwnColumns() if own is None else own
        self._whole = plan.whole_batch or bool(self._own.whole_batch) or plan.minibatches > 1 or load_of is not None
        self.groups: list[Group] = []
        """Every group that came, in the order of computing."""
        self.learned = LearnedRows()
        """Their rows, in the same order."""
        self.packer = MicroBatchPacker(packing)
        """Cuts its rows, and counts their tokens."""
        self.complete = asyncio.Event()
        """Set once all groups have come, and those who compute are at work on the last of them."""

    async def commands(self, groups: Groups) -> AsyncGenerator[tuple[Command, ...], None]:
        """Read the groups and give the commands.

        Raises:
            NotScored: not one answer has a reward.
            ValueError: there is nothing to learn from, a group was not judged, or a column is missing.
        """
        whole: list[Group] = []
        if self._whole:
            async for command in self._awaited(groups, whole):
                yield command
        if self._plan.minibatches > 1:
            steps = self._split(whole)
        else:
            ready = [whole] if self._whole else token_batches(groups, self._in_order, self._packing.budget)
            steps = self._passes(ready)
        async for command in steps:
            yield command
            if type(command[0]) is OptimizerStep:
                self.complete.set()
        if not any(self.learned.rows):  # in place of all steps of a batch that gives no gradient
            yield self._for_all(OptimizerStep(left_out=self._plan.steps, empty=True))
        self.complete.set()

    async def _split(self, groups: Sequence[Group]) -> AsyncGenerator[tuple[Command, ...], None]:
        """Commands for a whole batch, each part of which makes an optimizer step."""
        await self._take(groups)
        self._check()
        packer, steps_left = self.packer, self._plan.steps
        for epoch in range(self._plan.epochs):
            for number, part in enumerate(parts := [*self._parts(epoch)]):
                load = self._load(part)
                for shares in packer.close(part):
                    yield tuple(ForwardBackward(rows, compare=epoch == number == 0, load=load) for rows in shares)
                steps_left -= 1
                last = epoch == self._plan.epochs - 1 and number == len(parts) - 1
                yield self._for_all(OptimizerStep(left_out=steps_left if last else 0))

    async def _passes(
        self, ready: Iterable[Sequence[Group]] | AsyncIterable[Sequence[Group]]
    ) -> AsyncGenerator[tuple[Command, ...], None]:
        """Commands for passes over a batch, computed as its groups are ready; each makes an optimizer step."""
        packer, rounds = self.packer, 0
        rounds_of = packer.close if self._whole else packer.push
        async for groups in each(ready):
            new = await self._take(groups)
            load = self._load(new)
            for shares in rounds_of(new):
                rounds += 1
                yield tuple(self._first(rows, load) for rows in shares)
        self._check()
        for shares in packer.close():
            rounds += 1
            yield tuple(self._first(rows) for rows in shares)
        if not any(self.learned.rows):
            return
        yield self._for_all(OptimizerStep())
        for _ in range(1, self._plan.epochs):
            for number in range(rounds):
                yield self._for_all(Recompute(number))
            yield self._for_all(OptimizerStep())

    def _for_all(self, command: Command) -> tuple[Command, ...]:
        return (command,) * self._packing.ranks

    def _first(self, rows: tuple[Row, ...], load: np.ndarray | None = None) -> ForwardBackward:
        keep = self._plan.epochs > 1
        return ForwardBackward(rows, compare=True, columns=self._own.first_pass, keep=keep, load=load)

    def _load(self, rows: Sequence[Row]) -> np.ndarray | None:
        return self._load_of(rows) if self._load_of is not None and rows else None

    async def _awaited(self, groups: Groups, whole: list[Group]) -> AsyncGenerator[tuple[Command, ...], None]:
        """Fill `whole` with all groups, in the order of computing, with our own columns; those are computed while other
        groups are still to come."""
        if not self._own.whole_batch:
            async for batch in token_batches(groups, self._in_order, self._packing.budget):
                whole += batch
            return
        passing = LogprobPass(self._packing, self._own.whole_batch)
        async for command in passing.commands(groups, self._in_order):
            yield command
        while len(whole) < passing.came:
            whole.append(await passing.finished.get())

    async def _take(self, groups: Sequence[Group]) -> list[Row]:
        """Keep groups and their rows; the rows."""
        if self._whole:
            learned = await self._compute(self._rows_of, groups)
        else:  # a micro-batch: less work than a way to a thread and back
            learned = self._rows_of(groups)
        self.groups += groups
        self.learned += learned
        return [row for rows in learned.rows for row in tree_rows(rows, self._packing)]

    def _parts(self, epoch: int) -> Iterator[list[Row]]:
        """The groups' rows in so many parts of about equal numbers of groups; fewer if there are not so many groups."""
        groups = [rows for rows in self.learned.rows if rows]
        order = permutation(len(groups), *self._plan.seed, epoch)
        count = min(self._plan.minibatches, len(groups))
        for number in range(count):
            yield [row for group in order[number::count] for row in tree_rows(groups[group], self._packing)]

    def _check(self) -> None:
        where = self._plan.where
        if not self.groups:
            raise ValueError(f"{where}: not one group came: were there prompts?")
        samples = [sample for group in self.groups for sample in group.scored]
        if not samples:
            everyone = [sample for group in self.groups for sample in group.samples]
            outcomes = sorted({str(sample.outcome) for sample in everyone})
            remark = next(
                (sample.remark for sample in everyone if sample.remark), "the judge scored nothing, and left no remark"
            )
            raise NotScored(
                f"{where}: {remark}; so none of {len(self.groups)} groups has a reward (outcomes: {outcomes})"
            )
        if not any(sample.learned_tokens for sample in samples):
            raise ValueError(f"{where}: there is not one token to learn from: every response was empty or masked")


async def supervised_commands(
    batches: Iterable[Sequence[Row]] | AsyncIterable[Sequence[Row]],
    packing: Packing,
    *,
    where: str = "sft",
    columns: frozenset[str] = frozenset(),
) -> AsyncGenerator[tuple[Command, ...], None]:
    """Commands for batches of given texts: for each batch one optimizer step, which makes a version.

    Args:
        batches: rows of each.
        packing: how they are cut into micro-batches.
        where: endpoint that learns, for errors.
        columns: see `ForwardBackward`.

    Raises:
        ValueError: a batch has nothing to learn.
    """
    async for rows in each(batches):
        if not any(row.learned for row in rows) or not all(len(row.prompt_ids) for row in rows):
            raise ValueError(f"{where}: a batch has not one token to learn from, or an example without a prompt")
        for shares in MicroBatchPacker(packing).close(rows):
            yield tuple(ForwardBackward(part, supervised=True, columns=columns) for part in shares)
        yield (OptimizerStep(new_version=True),) * packing.ranks


async def example_rows(
    batches: Iterable[Sequence[Example]] | AsyncIterable[Sequence[Example]],
) -> AsyncGenerator[list[Row], None]:
    """Batches of worked examples as rows."""
    async for batch in each(batches):
        yield [Row(one.prompt_ids, one.response_ids, images=one.images, loss_mask=one.loss_mask) for one in batch]
