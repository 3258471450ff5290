"""From judged groups to rows to learn from: what an algorithm makes of answers before any model looks at them.

In: groups with rewards, and with what other roles said of their tokens. Out: for each group the rows that count, with
advantages and with the columns that the loss asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from rlinf.algos.apply import Answers, advantages_of
from rlinf.algos.spec import AlgorithmSpec
from rlinf.data.packing import Row
from rlinf.data.sample import Group, Sample
from rlinf.training.text.requirements import (
    REFERENCE,
    TEACHER,
    VALUES,
    asks_rewards_alone,
    check_told,
    columns_of,
)


@dataclass(slots=True)
class Lesson:
    """What groups come to."""

    rows: list[list[Row]] = field(default_factory=list)
    """Of each group, the samples that give a gradient."""
    advantages: list[float | np.ndarray] = field(default_factory=list)
    """Of each scored sample, or of its learned tokens [learned], those that give no gradient included."""
    rewards: list[float] = field(default_factory=list)
    """Of each scored sample, after shaping."""

    def __iadd__(self, other: Lesson) -> Lesson:
        self.rows += other.rows
        self.advantages += other.advantages
        self.rewards += other.rewards
        return self


def lesson_of(spec: AlgorithmSpec, groups: Sequence[Group], *, later: frozenset[str] = frozenset()) -> Lesson:
    """The rows of groups, with their advantages.

    Args:
        spec: the algorithm.
        groups: judged; all of the batch if `spec.needs_whole_batch`.
        later: columns that the loss gets in another way.

    Raises:
        ValueError: a group was not judged, its prompt has no token, or nobody said what the algorithm needs to know.
    """
    for group in groups:
        if len(group.prompt.token_ids) == 0:
            raise ValueError(f"train: prompt {group.prompt.id} has no token; a response needs one to follow")
    scored = [group.scored for group in groups]
    samples = [sample for some in scored for sample in some]
    if not samples:
        return Lesson(rows=[[] for _ in groups])
    check_told(spec, samples, later)
    found = advantages_of(spec, _answers(scored, samples, tokens=not asks_rewards_alone(spec)))
    gains: list[float | np.ndarray]
    if found.values.ndim == 1:
        gains = found.values.tolist()
    else:
        gains = [
            gain[: sample.learned_tokens] for gain, sample in zip(found.values.float().numpy(), samples, strict=True)
        ]
    names = columns_of(spec) - later
    rows: list[Row | None] = [
        Row.of(sample, gain, {name: sample.column(name) for name in names} if names else None)
        for sample, gain in zip(samples, gains, strict=True)
    ]
    if spec.truncated == "mask":
        rows = [row if counts else None for row, counts in zip(rows, found.mask.any(1).tolist(), strict=True)]
    rest = iter(rows)
    per_group = [[row for row in islice(rest, len(some)) if row is not None] for some in scored]
    return Lesson(per_group, gains, found.rewards.tolist())


def answers_of(groups: Sequence[Group]) -> Answers:
    """The scored samples of groups as tensors, in their order, with what other roles said of their learned tokens; the
    other tokens are not there, so nothing that is computed of answers depends on them.

    Args:
        groups: judged, with at least one scored sample.

    Raises:
        ValueError: a group was not judged.
    """
    scored = [group.scored for group in groups]
    return _answers(scored, [sample for some in scored for sample in some], tokens=True)


def _answers(scored: Sequence[Sequence[Sample]], samples: Sequence[Sample], *, tokens: bool) -> Answers:
    """The same of each group's scored samples, which `samples` has in one list; without `tokens`, rewards alone."""
    lengths = np.array([sample.learned_tokens for sample in samples])
    mask = np.arange(lengths.max()) < lengths[:, None]

    def padded(name: str) -> Tensor | None:
        if name != "logprobs" and not all(name in sample.per_token for sample in samples):
            return None
        table = np.zeros(mask.shape, np.float32)
        table[mask] = np.concatenate([sample.column(name) for sample in samples])
        return torch.from_numpy(table)

    said = {name: padded(name) for name in ("logprobs", REFERENCE, TEACHER, VALUES)} if tokens else {}
    return Answers(
        rewards=torch.tensor([sample.reward for sample in samples]),
        groups=torch.from_numpy(np.repeat(np.arange(len(scored)), [len(some) for some in scored])),
        mask=torch.from_numpy(mask),
        weights=_weights(samples),
        truncated=torch.tensor([sample.truncated for sample in samples]),
        **said,
    )


def _weights(samples: Sequence[Sample]) -> Tensor | None:
    """Of each sample, [samples]; None if all weigh 1."""
    weights = [sample.weight for sample in samples]
    return None if all(weight == 1.0 for weight in weights) else torch.tensor(weights)
