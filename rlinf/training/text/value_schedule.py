"""Orders for a batch that a critic learns from: what it is to predict before every token, and in which steps.

In: groups that were judged and carry the critic's values. Out: orders for all ranks, and how good the values were. All
groups are there before the first order: until the last of them has its values, the critic must stay as it is.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from itertools import islice

import numpy as np
import torch

from rlinf.algos.apply import advantages_of
from rlinf.algos.spec import AlgorithmSpec
from rlinf.algos.tensor.loss_sum import Explained
from rlinf.data.packing import Row
from rlinf.data.rng import permutation
from rlinf.data.sample import Group
from rlinf.training.text.advantage_rows import answers_of
from rlinf.training.text.commands import Learn, Order, Step
from rlinf.training.text.micro_batches import Rounds
from rlinf.training.text.requirements import REFERENCE, VALUES

RETURNS = "returns"
"""Name of the column that has what came: the rest of the answer's reward, as `advantages.gae` estimates it."""

_ROUNDING = 1e-6
"""Relative to values and returns; some ten times the precision of float32, for sums over long answers."""
_CURES = {
    VALUES: "put critic.values between judge.score and critic.train",
    REFERENCE: "put reference.logprobs between judge.score and critic.values (with the penalty in the reward a "
    "trainer's own reference, adapters_off, is not enough: the critic needs its log-probs too)",
}


class ValueOrders:
    """Orders for a batch: `epochs` x `minibatches` optimizer steps.

    Args:
        groups: the batch, in the order of computing.
        spec: an algorithm with a critic.

    Raises:
        ValueError: there is nothing to learn from, or a group was not judged or lacks what others say of its tokens.
    """

    def __init__(self, groups: Sequence[Group], spec: AlgorithmSpec):
        self._groups = groups
        self.rows = value_rows(groups, spec)
        """Of each group, the answers to learn from, with columns `values` and `returns`."""
        if not any(row.learned for rows in self.rows for row in rows):
            raise ValueError(
                f"critic.train: among {len(groups)} groups there is not one answer with a reward and a token to learn "
                "from: look at the samples' outcomes and remarks"
            )
        self.metrics = self._metrics()
        """How good the values were that the advantages are made of (`values/mean`, `returns/mean`,
        `critic/explained_variance`), and `reward/mean`, which no trainer tells of while the critic learns alone."""

    async def orders(
        self, *, ranks: int, budget: int, epochs: int, minibatches: int, seed: tuple[int, ...]
    ) -> AsyncGenerator[tuple[Order, ...], None]:
        """The orders.

        Args:
            ranks: how many share the work.
            budget: tokens of a micro-batch.
            epochs, minibatches: passes over the batch, and optimizer steps in each, by groups.
            seed: of the order of groups where there are several minibatches, with the epoch's number appended.
        """
        for epoch in range(epochs):
            for rows in self._parts(minibatches, (*seed, epoch)):
                cutter = Rounds(ranks, budget)
                for dealt in [*cutter.push(rows), *cutter.close()]:
                    yield tuple(Learn(part) for part in dealt)
                yield (Step(),) * ranks

    def _parts(self, minibatches: int, seed: tuple[int, ...]) -> Iterator[list[Row]]:
        groups = [rows for rows in self.rows if any(row.learned for row in rows)]
        count = min(minibatches, len(groups))
        drawn = range(len(groups)) if count == 1 else permutation(len(groups), *seed)
        for number in range(count):
            yield [row for group in drawn[number::count] for row in groups[group]]

    def _metrics(self) -> dict[str, float]:
        rows = [row for rows in self.rows for row in rows]
        values, returns = (
            np.concatenate([row.columns[name] for row in rows]).astype(np.float64) for name in (VALUES, RETURNS)
        )
        error = returns - values
        moments = [len(returns), returns.sum(), (returns**2).sum(), error.sum(), (error**2).sum()]
        # equal returns differ by the rounding of A + V, which is no variance to be explained
        varied = returns.std() > _ROUNDING * max(np.abs(values).max(), np.abs(returns).max())
        return {
            "critic/explained_variance": Explained(torch.tensor(moments, dtype=torch.float64)).value if varied else 0.0,
            "values/mean": float(values.mean()),
            "returns/mean": float(returns.mean()),
            "reward/mean": float(np.mean([reward for group in self._groups for reward in group.rewards])),
        }


def value_rows(groups: Sequence[Group], spec: AlgorithmSpec) -> list[list[Row]]:
    """Of each group, the answers to learn from, with columns `values` and `returns`.

    Args:
        groups: judged, with values.
        spec: an algorithm with a critic.

    Raises:
        ValueError: a group was not judged, or lacks what others say of its tokens.
    """
    scored = [group.scored for group in groups]
    samples = [sample for some in scored for sample in some]
    in_reward = spec.kl is not None and spec.kl.place == "reward"
    for name in (VALUES, REFERENCE) if in_reward else (VALUES,):
        for sample in samples:
            if name not in sample.per_token:
                raise ValueError(
                    f"critic.train: sample {sample.index} of prompt {sample.prompt.id} has no {name}: {_CURES[name]}"
                )
    if not samples:
        return [[] for _ in groups]
    found = advantages_of(spec, answers_of(groups))
    if found.returns is None:
        raise ValueError(f"critic.train: algorithm {spec.name!r} has an advantage that gives a critic no returns")
    rows = [
        Row.of(sample, columns={VALUES: sample.column(VALUES), RETURNS: returns[: sample.learned_tokens]})
        if counts
        else None
        for sample, returns, counts in zip(
            samples, found.returns.float().numpy(), found.mask.any(1).tolist(), strict=True
        )
    ]
    rest = iter(rows)
    return [[row for row in islice(rest, len(some)) if row is not None] for some in scored]
