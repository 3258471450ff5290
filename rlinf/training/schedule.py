"""The order of computation: the commands by which ranks learn from a batch, or compute columns of it.

`BatchSchedule` gives the commands for a batch of judged groups, from its first group to its last optimizer step. Those
of the first epoch come while groups are still being made, unless something must be known of the whole batch first.
Policy and critic differ in what they make of groups (`training/policy.py`), not in their schedule.

`LogprobPass` is one forward pass over groups, for values or log-probs: rank 0, having computed a round with all others,
hands the columns over (`Forward.deliver`), and the groups that are complete go into `finished`, where somebody waits.

`supervised_commands` gives an optimizer step for every batch of given texts.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

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
    MicroBatchPacker,
    OptimizerStep,
    Packing,
    Recompute,
    Round,
    token_batches,
)
from rlinf.training.policy import LearnedRows, OwnColumns

Groups = Iterable[Group] | AsyncIterable[Group]
_FAILED = ("timeout", "error")


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
        self._columns, self._budget = columns, packing.budget
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
        async for batch in token_batches(groups, in_order, self._budget):
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
            rows += [row for row in mine if row is not None]
            self._waiting.append((group, mine))
        yield from map(self._forward, self._packer.push(rows))
        self._release()

    def close(self) -> Iterator[tuple[Forward, ...]]:
        """No more groups come; the last rounds."""
        yield from map(self._forward, self._packer.close())

    def _forward(self, shares: Round) -> tuple[Forward, ...]:
        tokens = tuple(sum(row.learned for row in rows) for rows in shares)

        def on_scores(scores: Sequence[np.ndarray]) -> None:
            for rows, numbers in zip(shares, scores, strict=True):
                ends = np.cumsum([row.learned for row in rows])[:-1]
                self._scores.update(zip(rows, np.split(numbers, ends, axis=1), strict=True) if rows else ())
            self._release()

        return tuple(
            Forward(rows, self._columns, tokens, None if rank else on_scores) for rank, rows in enumerate(shares)
        )

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
                group = group.told(name, [numbers[number] for numbers in scores])
            self.finished.put_nowait(group)


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
            async for command in self._split(whole):
                yield command
        else:
            ready = [whole] if self._whole else token_batches(groups, self._in_order, self._packing.budget)
            async for command in self._passes(ready):
                yield command
        if not any(self.learned.rows):  # in place of all steps of a batch that gives no gradient
            yield self._for_all(OptimizerStep(left_out=self._plan.steps, empty=True))

    async def _split(self, groups: Sequence[Group]) -> AsyncGenerator[tuple[Command, ...], None]:
        """Commands for a whole batch, each part of which makes an optimizer step."""
        await self._take(groups)
        self._check()
        packer, steps_left = MicroBatchPacker(self._packing), self._plan.steps
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
        packer, rounds = MicroBatchPacker(self._packing), 0
        cut = packer.close if self._whole else packer.push
        async for groups in each(ready):
            new = await self._take(groups)
            load = self._load(new)
            for shares in cut(new):
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
        return [row for rows in learned.rows for row in rows]

    def _parts(self, epoch: int) -> Iterator[list[Row]]:
        """The groups' rows in so many parts of about equal numbers of groups; fewer if there are not so many groups."""
        groups = [rows for rows in self.learned.rows if rows]
        order = permutation(len(groups), *self._plan.seed, epoch)
        count = min(self._plan.minibatches, len(groups))
        for number in range(count):
            yield [row for group in order[number::count] for row in groups[group]]

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
