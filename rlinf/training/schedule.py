"""The commands by which ranks learn from a batch, from its first group to its last optimizer step.

In: scored groups as they come, or batches of worked examples. Out: commands for all ranks. Those of the first epoch
come while groups are still being made, unless something must be known of the whole batch first. Policy and critic
differ in what they make of groups (`policy.py`), not in their schedule.

A forward pass over judged groups, on all ranks together: values, or log-probs under other weights.

In: groups as they come. Out: rounds of `Forward` commands, and groups that carry the columns. Who wakes whom: rank 0,
having computed a round with all others, tells what came out (`Forward.tell`), which puts the groups that are complete
into `finished`, for whoever waits there.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rlinf.data.packing import Row
from rlinf.data.rng import permutation
from rlinf.data.sample import Example, Group, NotScored
from rlinf.runtime.streams.stream import each
from rlinf.training.micro_batches import (
    Command,
    Forward,
    ForwardBackward,
    InOrder,
    OptimizerStep,
    Recompute,
    Round,
    Rounds,
    lots,
)
from rlinf.training.policy import LearnedRows, OwnColumns

Groups = Iterable[Group] | AsyncIterable[Group]
_FAILED = ("timeout", "error")


class LogprobPass:
    """One pass over groups. What nobody learns from gets NaN: tokens outside the loss mask, and samples whose judging
    failed.

    Args:
        shares: among how many the work is dealt out: ranks, or copies of a model.
        budget: tokens (prompts included) that a share computes at once.
        columns: names in `Sample.per_token` of what is computed.
        copies: see `Rounds`.
    """

    def __init__(self, shares: int, budget: int, columns: tuple[str, ...], copies: int = 1):
        self.finished: asyncio.Queue[Group] = asyncio.Queue()
        """Groups that carry the columns, in the order in which they came."""
        self._columns, self._budget = columns, budget
        self._cutter = Rounds(shares, budget, copies=copies)
        self.came = 0
        """Groups that were pushed."""
        self._waiting: deque[tuple[Group, list[Row | None]]] = deque()  # the groups and their rows, oldest first
        self._found: dict[Row, np.ndarray] = {}

    async def commands(self, groups: Groups, in_order: InOrder | None) -> AsyncGenerator[tuple[Command, ...], None]:
        """Read groups and give the commands.

        Args:
            groups: to be passed over.
            in_order: see `lots`.
        """
        async for lot in lots(groups, in_order, self._budget):
            for command in self.push(lot):
                yield command
        for command in self.close():
            yield command

    def push(self, groups: Sequence[Group]) -> Iterator[tuple[Forward, ...]]:
        """More groups; the rounds that are full."""
        self.came += len(groups)
        rows: list[Row] = []
        for group in groups:
            mine = [None if sample.outcome in _FAILED else Row.of(sample, 0.0) for sample in group.samples]
            rows += [row for row in mine if row is not None]
            self._waiting.append((group, mine))
        yield from map(self._forward, self._cutter.push(rows))
        self._release()

    def close(self) -> Iterator[tuple[Forward, ...]]:
        """No more groups come; the last rounds."""
        yield from map(self._forward, self._cutter.close())

    def _forward(self, dealt: Round) -> tuple[Forward, ...]:
        tokens = tuple(sum(row.learned for row in rows) for rows in dealt)

        def told(found: Sequence[np.ndarray]) -> None:
            for rows, numbers in zip(dealt, found, strict=True):
                ends = np.cumsum([row.learned for row in rows])[:-1]
                self._found.update(zip(rows, np.split(numbers, ends, axis=1), strict=True) if rows else ())
            self._release()

        return tuple(Forward(rows, self._columns, tokens, None if rank else told) for rank, rows in enumerate(dealt))

    def _release(self) -> None:
        """Let the oldest groups go on of which all rows are computed."""
        while self._waiting and all(row is None or row in self._found for row in self._waiting[0][1]):
            group, rows = self._waiting.popleft()
            found = [
                np.full((len(self._columns), sample.learned_tokens), np.nan, np.float32)
                if row is None
                else self._found.pop(row)
                for sample, row in zip(group.samples, rows, strict=True)
            ]
            for number, name in enumerate(self._columns):
                group = group.told(name, [numbers[number] for numbers in found])
            self.finished.put_nowait(group)


def gathered(mine: Tensor, tokens: Sequence[int], mesh: DeviceMesh | None, shares: Sequence[int]) -> list[np.ndarray]:
    """What was computed in a round: a collective.

    Args:
        mine: of this rank, float32 [columns, learned tokens].
        tokens: learned tokens of each share of the round.
        mesh: the ranks; None for one.
        shares: of each rank, which share it computed; those of equal shares found the same.

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


class BatchSchedule:
    """Commands for a batch of groups: `epochs` x `minibatches` optimizer steps; none, if no group has a row to learn.

    With more than one minibatch per epoch, the batch is split by groups, in an order drawn anew for each epoch, once
    all groups have come.

    Args:
        rows_of: makes rows of groups; blocking.
        where: endpoint that learns, for errors.
        ranks: how many ranks share the work.
        in_order: the order in which groups are computed on; None takes them as they come.
        budget: tokens of a micro-batch.
        epochs, minibatches: passes over the batch, and optimizer steps in each.
        seed: of the order of groups, with the number of the epoch appended.
        compute: runs blocking work, as `Actor.compute` does: the rows of a whole batch take a while.
        own: columns that the trainer computes itself.
        whole_batch: rows depend on all groups.
        copies: see `Rounds`.
        load_of: makes `ForwardBackward.load` of the rows of an optimizer step, which must all be there first.
    """

    def __init__(
        self,
        rows_of: Callable[[Sequence[Group]], LearnedRows],
        *,
        where: str,
        ranks: int,
        in_order: InOrder | None,
        budget: int,
        epochs: int,
        minibatches: int,
        seed: tuple[int, ...],
        compute: Callable[..., Awaitable[LearnedRows]],
        own: OwnColumns | None = None,
        whole_batch: bool = False,
        copies: int = 1,
        load_of: Callable[[Sequence[Row]], np.ndarray] | None = None,
    ):
        self._load_of = load_of
        self._rows_of, self._where, self._compute = rows_of, where, compute
        self._ranks, self._in_order, self._budget, self._copies = ranks, in_order, budget, copies
        self._epochs, self._minibatches, self._seed = epochs, minibatches, seed
        self._own = OwnColumns() if own is None else own
        self._whole = whole_batch or bool(self._own.whole_batch) or minibatches > 1 or load_of is not None
        self.groups: list[Group] = []
        """Every group that came, in the order of computing."""
        self.learned = LearnedRows()
        """Their rows, in the same order."""

    async def commands(self, groups: Groups) -> AsyncGenerator[tuple[Command, ...], None]:
        """Read the groups and give the commands.

        Raises:
            NotScored: not one answer has a reward.
            ValueError: there is nothing to learn from, a group was not judged, or a column is missing.
        """
        cutter = Rounds(self._ranks, self._budget, copies=self._copies)
        ready: Iterable[Sequence[Group]] | AsyncIterable[Sequence[Group]]
        if self._whole:
            whole: list[Group] = []
            async for command in self._awaited(groups, whole):
                yield command
            ready = [whole]
        else:
            ready = lots(groups, self._in_order, self._budget)
        if self._minibatches > 1:
            await self._take(whole)
            self._check()
            left = self._planned
            for epoch in range(self._epochs):
                for number, part in enumerate(parts := [*self._parts(epoch)]):
                    load = self._load(part)
                    for dealt in cutter.close(part):
                        yield tuple(ForwardBackward(rows, compare=epoch == number == 0, load=load) for rows in dealt)
                    left -= 1
                    last = epoch == self._epochs - 1 and number == len(parts) - 1
                    yield (OptimizerStep(left_out=left if last else 0),) * self._ranks
            if not any(self.learned.rows):
                yield self._no_step
            return
        given, keep = 0, self._epochs > 1
        cut = cutter.close if self._whole else cutter.push
        async for lot in each(ready):
            taken = await self._take(lot)
            load = self._load(taken)
            for dealt in cut(taken):
                given += 1
                yield tuple(self._first(rows, keep, load) for rows in dealt)
        self._check()
        for dealt in cutter.close():
            given += 1
            yield tuple(self._first(rows, keep) for rows in dealt)
        if not any(self.learned.rows):
            yield self._no_step
            return
        step = (OptimizerStep(),) * self._ranks
        yield step
        for _ in range(1, self._epochs):
            for number in range(given):
                yield (Recompute(number),) * self._ranks
            yield step

    @property
    def _planned(self) -> int:
        """Optimizer steps of a batch of enough groups."""
        return self._epochs * self._minibatches

    @property
    def _no_step(self) -> tuple[OptimizerStep, ...]:
        """In place of all steps of a batch that gives no gradient."""
        return (OptimizerStep(left_out=self._planned, empty=True),) * self._ranks

    def _first(self, rows: tuple[Row, ...], keep: bool, load: np.ndarray | None = None) -> ForwardBackward:
        return ForwardBackward(rows, compare=True, columns=self._own.first_pass, keep=keep, load=load)

    def _load(self, rows: Sequence[Row]) -> np.ndarray | None:
        return self._load_of(rows) if self._load_of is not None and rows else None

    async def _awaited(self, groups: Groups, whole: list[Group]) -> AsyncGenerator[tuple[Command, ...], None]:
        """Fill `whole` with all groups, in the order of computing, with our own columns; those are computed while other
        groups are still to come."""
        if not self._own.whole_batch:
            async for lot in lots(groups, self._in_order, self._budget):
                whole += lot
            return
        passing = LogprobPass(self._ranks, self._budget, self._own.whole_batch, self._copies)
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
        return [row for rows in learned.rows for row in rows]

    def _parts(self, epoch: int) -> Iterator[list[Row]]:
        """The groups' rows in so many parts of about equal numbers of groups; fewer if there are not so many groups."""
        groups = [rows for rows in self.learned.rows if rows]
        drawn = permutation(len(groups), *self._seed, epoch)
        count = min(self._minibatches, len(groups))
        for number in range(count):
            yield [row for group in drawn[number::count] for row in groups[group]]

    def _check(self) -> None:
        if not self.groups:
            raise ValueError(f"{self._where}: not one group came: were there prompts?")
        samples = [sample for group in self.groups for sample in group.scored]
        if not samples:
            everyone = [sample for group in self.groups for sample in group.samples]
            outcomes = sorted({str(sample.outcome) for sample in everyone})
            remark = next(
                (sample.remark for sample in everyone if sample.remark), "the judge scored nothing, and left no remark"
            )
            raise NotScored(
                f"{self._where}: {remark}; so none of {len(self.groups)} groups has a reward (outcomes: {outcomes})"
            )
        if not any(sample.learned_tokens for sample in samples):
            raise ValueError(f"{self._where}: there is not one token to learn from: every response was empty or masked")


async def supervised_commands(
    batches: Iterable[Sequence[Row]] | AsyncIterable[Sequence[Row]],
    ranks: int,
    budget: int,
    *,
    where: str = "sft",
    together: int = 1,
    columns: frozenset[str] = frozenset(),
    copies: int = 1,
) -> AsyncGenerator[tuple[Command, ...], None]:
    """Commands for batches of given texts: for each batch one optimizer step, which makes a version.

    Args:
        batches: rows of each.
        ranks: how many share the work.
        budget: tokens of a micro-batch.
        where: endpoint that learns, for errors.
        together: see `Rounds`.
        columns: see `ForwardBackward`.
        copies: see `Rounds`.

    Raises:
        ValueError: a batch has nothing to learn.
    """
    async for rows in each(batches):
        if not any(row.learned for row in rows) or not all(len(row.prompt_ids) for row in rows):
            raise ValueError(f"{where}: a batch has not one token to learn from, or an example without a prompt")
        for dealt in Rounds(ranks, budget, together, copies).close(rows):
            yield tuple(ForwardBackward(part, supervised=True, columns=columns) for part in dealt)
        yield (OptimizerStep(new_version=True),) * ranks


async def example_rows(
    batches: Iterable[Sequence[Example]] | AsyncIterable[Sequence[Example]],
) -> AsyncGenerator[list[Row], None]:
    """Batches of worked examples as rows."""
    async for batch in each(batches):
        yield [Row(one.prompt_ids, one.response_ids, images=one.images, loss_mask=one.loss_mask) for one in batch]
