"""What the trainer's rank 0 tells all ranks to do, from the groups of a step to its last optimizer step.

In: scored groups, as they come, or batches of worked examples. Out: orders, one tuple per round with an entry for each
rank, for `Feed`. With one optimizer step per epoch the first epoch's orders come while groups are still being made.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import ClassVar, Literal

from rlinf.actors.micro_batches import InOrder, Round, Rounds, scored_rows
from rlinf.data.batch import Packed, Row, pack
from rlinf.data.iterate import each
from rlinf.data.sample import Example, Group
from rlinf.data.seeds import permutation


@dataclass(slots=True, eq=False)
class Learn:
    """Add these rows to the gradient."""

    __plain__: ClassVar[bool] = True  # holds no promise: the runtime need not look for one in its rows

    rows: tuple[Row, ...]
    """A micro-batch; empty if there is no work for this rank, which takes part all the same."""
    compare: bool = False
    """The weights are still those that sampled."""
    _packed: Packed | None = field(default=None, init=False)

    def packed(self) -> Packed:
        """The rows as tensors, made once."""
        if self._packed is None:
            self._packed = pack(self.rows)
        return self._packed

    def again(self) -> Learn:
        """The same rows, once more, under other weights."""
        other = Learn(self.rows)
        other._packed = self._packed
        return other

    def __reduce__(self) -> tuple[object, ...]:
        return Learn, (self.rows, self.compare)


@dataclass(frozen=True, slots=True)
class Step:
    """Take an optimizer step with what has gathered."""


Order = Learn | Step


class PolicyOrders:
    """Orders for a batch of groups: `epochs` x `minibatches` optimizer steps.

    With more than one minibatch per epoch, the batch is split by groups, in an order drawn anew for each epoch, once
    all groups have come.

    Args:
        ranks: how many ranks share the work.
        in_order: the order in which groups are computed on; None takes them as they come.
        budget: tokens of a micro-batch.
        epochs, minibatches: passes over the batch, and optimizer steps in each.
        scale: see `advantages.group_relative`.
        seed: of the order of groups, with the number of the epoch appended.
    """

    def __init__(
        self,
        *,
        ranks: int,
        in_order: InOrder | None,
        budget: int,
        epochs: int,
        minibatches: int,
        scale: Literal["std", "none"],
        seed: tuple[int, ...],
    ):
        self._ranks, self._in_order, self._budget = ranks, in_order, budget
        self._epochs, self._minibatches, self._scale, self._seed = epochs, minibatches, scale, seed
        self.groups: list[Group] = []
        """Every group that came, in the order of computing."""
        self.rows: list[Row] = []
        """Every row, with its advantage, in the same order."""

    async def orders(self, groups: Iterable[Group] | AsyncIterable[Group]) -> AsyncGenerator[tuple[Order, ...], None]:
        """Read the groups and give the orders.

        Raises:
            ValueError: there is nothing to learn from, or a group was not judged.
        """
        step: tuple[Order, ...] = (Step(),) * self._ranks
        given: list[tuple[Learn, ...]] = []
        rows_of: list[list[Row]] = []
        cutter = Rounds(self._ranks, self._budget)
        async for ready in self._as_they_come(groups):
            rows = scored_rows(ready, self._scale)
            self.groups += ready
            self.rows += rows
            if self._minibatches > 1:
                rest = iter(rows)
                rows_of += [list(islice(rest, count)) for group in ready if (count := len(group.scored))]
                continue
            for order in _learn(cutter.push(rows), True):
                given.append(order)
                yield order
        self._check()
        if self._minibatches == 1:
            for order in _learn(cutter.close(), True):
                given.append(order)
                yield order
            yield step
            for _ in range(1, self._epochs):
                for order in given:
                    yield tuple(part.again() for part in order)
                yield step
            return
        for epoch in range(self._epochs):
            for number, part in enumerate(self._parts(rows_of, epoch)):
                for order in _learn([*cutter.push(part), *cutter.close()], epoch == number == 0):
                    yield order
                yield step

    async def _as_they_come(
        self, groups: Iterable[Group] | AsyncIterable[Group]
    ) -> AsyncGenerator[Sequence[Group], None]:
        """Groups in the order of computing, in lots that fill a micro-batch, so that small ones cost little each."""
        lot: list[Group] = []
        held = 0
        if self._in_order is not None:
            self._in_order.begin()
        async for group in each(groups):
            for ready in self._in_order.push(group) if self._in_order is not None else (group,):
                lot.append(ready)
                held += sum(len(sample.prompt.token_ids) + len(sample.response_ids) for sample in ready.samples)
            if held >= self._budget:
                yield lot
                lot, held = [], 0
        lot += self._in_order.close() if self._in_order is not None else ()
        yield lot

    def _parts(self, rows_of: Sequence[list[Row]], epoch: int) -> Iterable[list[Row]]:
        """The groups' rows in so many parts of about equal numbers of groups; fewer if there are not so many groups."""
        count = min(self._minibatches, len(rows_of))
        drawn = permutation(len(rows_of), *self._seed, epoch)
        for number in range(count):
            yield [row for group in drawn[number::count] for row in rows_of[group]]

    def _check(self) -> None:
        if not self.groups:
            raise ValueError("train: not one group came: were there prompts?")
        samples = [sample for group in self.groups for sample in group.scored]
        if not samples:
            outcomes = sorted({str(sample.outcome) for group in self.groups for sample in group.samples})
            raise ValueError(
                f"train: none of {len(self.groups)} groups has a reward, their outcomes are {outcomes}: look at the "
                "samples' remarks for why judging failed"
            )
        if not any(len(sample.response_ids) for sample in samples):
            raise ValueError("train: there is not one token to learn from: every response was empty")


async def answer_orders(
    batches: Iterable[Sequence[Example]] | AsyncIterable[Sequence[Example]], ranks: int, budget: int
) -> AsyncGenerator[tuple[Order, ...], None]:
    """Orders for batches of worked examples: one optimizer step for each.

    Raises:
        ValueError: a batch has nothing to learn.
    """
    async for batch in each(batches):
        rows = [Row(example.prompt_ids, example.response_ids) for example in batch]
        if not any(len(row.response_ids) for row in rows) or not all(len(row.prompt_ids) for row in rows):
            raise ValueError("sft: a batch has not one token to learn from, or an example without a prompt")
        cutter = Rounds(ranks, budget)
        for dealt in [*cutter.push(rows), *cutter.close()]:
            yield tuple(Learn(part) for part in dealt)
        yield (Step(),) * ranks


def _learn(rounds: Iterable[Round], compare: bool) -> Iterator[tuple[Learn, ...]]:
    for dealt in rounds:
        yield tuple(Learn(rows, compare) for rows in dealt)
