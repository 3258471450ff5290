"""Orders for a batch that a policy learns from, from the groups of a step to its last optimizer step.

In: scored groups, as they come, or batches of worked examples. Out: orders for all ranks. The first epoch's orders come
while groups are still being made, unless something must be known of the whole batch first.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable, Iterator, Sequence

from rlinf.algos.spec import AlgorithmSpec
from rlinf.data.packing import Row
from rlinf.data.rng import permutation
from rlinf.data.sample import Example, Group
from rlinf.runtime.streams.stream import each
from rlinf.training.text.advantage_rows import Lesson, lesson_of
from rlinf.training.text.commands import Again, Learn, Order, Step
from rlinf.training.text.logprob_pass import Groups, Scoring
from rlinf.training.text.micro_batches import InOrder, Round, Rounds, lots
from rlinf.training.text.requirements import asked_beside, asked_first


class PolicyOrders:
    """Orders for a batch of groups: `epochs` x `minibatches` optimizer steps.

    With more than one minibatch per epoch, the batch is split by groups, in an order drawn anew for each epoch, once
    all groups have come.

    Args:
        spec: the algorithm.
        ranks: how many ranks share the work.
        in_order: the order in which groups are computed on; None takes them as they come.
        budget: tokens of a micro-batch.
        epochs, minibatches: passes over the batch, and optimizer steps in each.
        adapters_off: log-probs of the reference come from the trainer itself.
        seed: of the order of groups, with the number of the epoch appended.
        compute: runs blocking work, as `Actor.compute` does: what a whole batch comes to takes a while.
    """

    def __init__(
        self,
        spec: AlgorithmSpec,
        *,
        ranks: int,
        in_order: InOrder | None,
        budget: int,
        epochs: int,
        minibatches: int,
        seed: tuple[int, ...],
        adapters_off: bool = False,
        compute: Callable[..., Awaitable[Lesson]],
    ):
        self._spec, self._ranks, self._in_order, self._budget = spec, ranks, in_order, budget
        self._epochs, self._minibatches, self._seed = epochs, minibatches, seed
        self._compute = compute
        self._first = asked_first(spec, minibatches=minibatches, adapters_off=adapters_off)
        self._beside = asked_beside(spec, minibatches=minibatches, adapters_off=adapters_off)
        self._whole = bool(self._first) or minibatches > 1 or spec.needs_whole_batch
        self.groups: list[Group] = []
        """Every group that came, in the order of computing."""
        self.lesson = Lesson()
        """What they came to, in the same order."""

    async def orders(self, groups: Groups) -> AsyncGenerator[tuple[Order, ...], None]:
        """Read the groups and give the orders.

        Raises:
            ValueError: there is nothing to learn from, a group was not judged, or nobody said what the algorithm needs
                to know of it.
        """
        step: tuple[Order, ...] = (Step(),) * self._ranks
        cutter = Rounds(self._ranks, self._budget)
        ready: Iterable[Sequence[Group]] | AsyncIterable[Sequence[Group]]
        if self._whole:
            whole: list[Group] = []
            async for order in self._awaited(groups, whole):
                yield order
            ready = [whole]
        else:
            ready = lots(groups, self._in_order, self._budget)
        if self._minibatches > 1:
            await self._take(whole)
            self._check()
            for epoch in range(self._epochs):
                for number, part in enumerate(self._parts(epoch)):
                    for learn in _learn([*cutter.push(part), *cutter.close()], compare=epoch == number == 0):
                        yield learn
                    yield step
            return
        given = 0
        async for lot in each(ready):
            for learn in _learn(cutter.push(await self._take(lot)), keep=self._epochs > 1):
                given += 1
                yield learn
        self._check()
        for learn in _learn(cutter.close(), keep=self._epochs > 1):
            given += 1
            yield learn
        yield step
        for _ in range(1, self._epochs):
            for number in range(given):
                yield (Again(number),) * self._ranks
            yield step

    async def _awaited(self, groups: Groups, whole: list[Group]) -> AsyncGenerator[tuple[Order, ...], None]:
        """Fill `whole` with all groups, in the order of computing, scored first where something is to be known of them;
        scoring begins while others are still to come."""
        if not self._first:
            async for lot in lots(groups, self._in_order, self._budget):
                whole += lot
            return
        scoring = Scoring(self._ranks, self._budget, self._first)
        async for order in scoring.orders(groups, self._in_order):
            yield order
        while len(whole) < scoring.came:
            whole.append(await scoring.finished.get())

    async def _take(self, groups: Sequence[Group]) -> list[Row]:
        """Note what groups come to; their rows."""
        if self._whole:
            lesson = await self._compute(lesson_of, self._spec, groups, later=self._beside)
        else:  # a micro-batch: less work than a way to a thread and back
            lesson = lesson_of(self._spec, groups, later=self._beside)
        self.groups += groups
        self.lesson += lesson
        return [row for rows in lesson.rows for row in rows]

    def _parts(self, epoch: int) -> Iterator[list[Row]]:
        """The groups' rows in so many parts of about equal numbers of groups; fewer if there are not so many groups."""
        groups = [rows for rows in self.lesson.rows if rows]
        drawn = permutation(len(groups), *self._seed, epoch)
        count = min(self._minibatches, len(groups))
        for number in range(count):
            yield [row for group in drawn[number::count] for row in groups[group]]

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
        if not any(sample.learned_tokens for sample in samples):
            raise ValueError("train: there is not one token to learn from: every response was empty or masked")
        if not any(self.lesson.rows):
            raise ValueError(
                f"train: the length limit cut all {len(samples)} answers, and `truncated: mask` learns from none of "
                "those: raise the limit, or keep them"
            )


async def answer_orders(
    batches: Iterable[Sequence[Example]] | AsyncIterable[Sequence[Example]], ranks: int, budget: int
) -> AsyncGenerator[tuple[Order, ...], None]:
    """Orders for batches of worked examples: one optimizer step for each.

    Raises:
        ValueError: a batch has nothing to learn.
    """
    async for batch in each(batches):
        rows = [Row(one.prompt_ids, one.response_ids, loss_mask=one.loss_mask) for one in batch]
        if not any(row.learned for row in rows) or not all(len(row.prompt_ids) for row in rows):
            raise ValueError("sft: a batch has not one token to learn from, or an example without a prompt")
        cutter = Rounds(ranks, budget)
        for learn in _learn([*cutter.push(rows), *cutter.close()], compare=False):
            yield learn
        yield (Step(),) * ranks


def _learn(rounds: Iterable[Round], *, compare: bool = True, keep: bool = False) -> Iterator[tuple[Learn, ...]]:
    for dealt in rounds:
        yield tuple(Learn(rows, compare, keep) for rows in dealt)
