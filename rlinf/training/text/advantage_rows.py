"""From judged groups to rows to learn from: what policy and critic make of answers before any model looks at them.

In: groups with rewards, and with the columns that other roles filled. Out: for each group the rows that are learned,
with advantages, or with values and returns. Nothing here depends on tokens outside a sample's loss mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.algos.apply import advantages_of
from rlinf.algos.spec import AlgorithmSpec
from rlinf.algos.tensor.batches import Advantages, Answers
from rlinf.data.in_flight.choosing import shaped_rewards, teaches
from rlinf.data.packing import Row
from rlinf.data.sample import REWARDS, Group, Sample
from rlinf.training.text.requirements import (
    REFERENCE,
    TEACHER,
    VALUES,
    VERSIONS,
    asks_rewards_alone,
    check_told,
    columns_of,
    needed_of_critic,
    needed_of_policy,
)

RETURNS = "returns"
"""Column of a critic's rows: the reward still to come before each token, as `advantages.gae` estimates it."""


@dataclass(slots=True)
class LearnedRows:
    """Rows of groups; those of further groups add."""

    rows: list[list[Row]] = field(default_factory=list)
    """Of each group, the samples that give a gradient."""
    advantages: list[float | np.ndarray] = field(default_factory=list)
    """Of each scored sample, or of its learned tokens [learned], those that give no gradient included."""
    rewards: list[float] = field(default_factory=list)
    """Of each scored sample, after shaping."""

    def __iadd__(self, other: LearnedRows) -> LearnedRows:
        self.rows += other.rows
        self.advantages += other.advantages
        self.rewards += other.rewards
        return self


def advantage_rows(
    spec: AlgorithmSpec, groups: Sequence[Group], *, later: frozenset[str] = frozenset(), ages: bool = False
) -> LearnedRows:
    """Rows for a policy, with advantages and with the columns that the loss asks for.

    Under dynamic sampling, groups that give no gradient by `teaches` have no rows, whoever hands them in, and are no
    part of a batch's statistics.

    Args:
        spec: the algorithm.
        groups: judged; all of the batch if `spec.needs_whole_batch`.
        later: columns that the loss gets in another way.
        ages: with the version that made each token, whether or not the loss asks.

    Raises:
        ValueError: a group was not judged, its prompt has no token, or a column is missing.
    """
    for group in groups:
        if len(group.prompt.token_ids) == 0:
            raise ValueError(f"train: prompt {group.prompt.id} has no token; a response needs one to follow")
    check_told("train", spec, _scored(groups)[1], needed_of_policy(spec) - later)
    silent = [spec.sampling is not None and not teaches(spec, group) for group in groups]
    learned = _policy_rows(spec, [group for group, no in zip(groups, silent, strict=True) if not no], later, ages)
    return _beside(learned, spec, groups, silent) if any(silent) else learned


def _beside(learned: LearnedRows, spec: AlgorithmSpec, groups: Sequence[Group], silent: Sequence[bool]) -> LearnedRows:
    """Rows of some groups, with the others at their places: without a row, and with advantages of 0."""
    rows, gains, rewards = iter(learned.rows), iter(learned.advantages), iter(learned.rewards)
    whole = LearnedRows()
    for group, no in zip(groups, silent, strict=True):
        count = len(group.scored)
        whole.rows.append([] if no else next(rows))
        whole.advantages += [0.0] * count if no else islice(gains, count)
        whole.rewards += shaped_rewards(spec, group) if no else islice(rewards, count)
    return whole


def _policy_rows(spec: AlgorithmSpec, groups: Sequence[Group], later: frozenset[str], ages: bool) -> LearnedRows:
    """`advantage_rows` of groups that are all learned from."""
    scored, samples = _scored(groups)
    if not samples:
        return LearnedRows(rows=[[] for _ in groups])
    found = advantages_of(spec, _answers(scored, samples, tokens=not asks_rewards_alone(spec)))
    gains: list[Any] = found.values.tolist() if found.values.ndim == 1 else _of_learned(found.values, samples)
    names = columns_of(spec) - later | ({VERSIONS} if ages else set())
    rows = [
        Row.of(sample, gain, {name: sample.column(name) for name in names})
        for sample, gain in zip(samples, gains, strict=True)
    ]
    return LearnedRows(_per_group(scored, rows, found), gains, found.rewards.tolist())


def value_rows(spec: AlgorithmSpec, groups: Sequence[Group]) -> LearnedRows:
    """Rows for a critic, with the columns `values` and `returns`.

    Args:
        spec: an algorithm with a critic.
        groups: judged, with values.

    Raises:
        ValueError: a group was not judged, or a column is missing.
    """
    scored, samples = _scored(groups)
    check_told("critic.train", spec, samples, needed_of_critic(spec))
    if not samples:
        return LearnedRows(rows=[[] for _ in groups])
    found = advantages_of(spec, _answers(scored, samples, tokens=True))
    if found.returns is None:
        raise ValueError(f"critic.train: algorithm {spec.name!r} has an advantage that gives a critic no returns")
    rows = [
        Row.of(sample, columns={VALUES: sample.column(VALUES), RETURNS: returns})
        for sample, returns in zip(samples, _of_learned(found.returns, samples), strict=True)
    ]
    return LearnedRows(_per_group(scored, rows, found), rewards=found.rewards.tolist())


def _scored(groups: Sequence[Group]) -> tuple[list[tuple[Sample, ...]], list[Sample]]:
    """The scored samples of each group, and of all.

    Raises:
        ValueError: a reward is not finite.
    """
    scored = [group.scored for group in groups]
    samples = [sample for some in scored for sample in some]
    for sample in samples:
        _check_finite(sample)
    return scored, samples


def _check_finite(sample: Sample) -> None:
    """See that the reward of a sample, and what of it fell at tokens, are numbers to compute with."""
    told: tuple[tuple[str, Any], ...] = (("reward", sample.reward),)
    if REWARDS in sample.per_token:
        told += ((f"per_token[{REWARDS!r}]", sample.column(REWARDS)),)
    for name, value in told:
        if not np.isfinite(value).all():
            found = value if name == "reward" else value[~np.isfinite(value)][0]
            raise ValueError(
                f"train: sample {sample.index} of prompt {sample.prompt.id} has the {name} {found}, which is no finite "
                "number: mend what gave it, or let it be None with an outcome, so that the sample counts as not drawn"
            )


def _of_learned(table: Tensor, samples: Sequence[Sample]) -> list[np.ndarray]:
    """Rows of a rectangle, [samples, tokens], without their padding: float32 [learned] each."""
    return [row[: sample.learned_tokens] for row, sample in zip(table.float().numpy(), samples, strict=True)]


def _per_group(scored: Sequence[Sequence[Sample]], rows: Sequence[Row], found: Advantages) -> list[list[Row]]:
    """The rows of each group in which a token counts."""
    counted = zip(rows, found.mask.any(1).tolist(), strict=True)
    return [[row for row, counts in islice(counted, len(some)) if counts] for some in scored]


def _answers(scored: Sequence[Sequence[Sample]], samples: Sequence[Sample], *, tokens: bool) -> Answers:
    """Samples as tensors, with what other roles said of their learned tokens; other tokens are not there.

    Args:
        scored: the scored samples of each group, at least one.
        samples: the same in one list.
        tokens: with columns; otherwise rewards alone.
    """
    lengths = np.array([sample.learned_tokens for sample in samples])
    mask = np.arange(lengths.max()) < lengths[:, None]

    def padded(name: str) -> Tensor | None:
        if name != "logprobs" and not all(name in sample.per_token for sample in samples):
            return None
        table = np.zeros(mask.shape, np.float32)
        table[mask] = np.concatenate([sample.column(name) for sample in samples])
        return torch.from_numpy(table)

    said = {name: padded(name) for name in ("logprobs", REFERENCE, TEACHER, VALUES)} if tokens else {}
    weights = [sample.weight for sample in samples]
    return Answers(
        rewards=torch.tensor([sample.reward for sample in samples], dtype=torch.float64),
        groups=torch.from_numpy(np.repeat(np.arange(len(scored)), [len(some) for some in scored])),
        mask=torch.from_numpy(mask),
        token_rewards=_token_rewards(samples, mask) if tokens else None,
        weights=None if all(weight == 1.0 for weight in weights) else torch.tensor(weights),
        truncated=torch.tensor([sample.truncated for sample in samples]),
        **_of_too_old(samples, tokens=tokens),
        **said,
    )


def _of_too_old(samples: Sequence[Sample], *, tokens: bool) -> dict[str, Tensor]:
    """How long answers are with the tokens that are too old to be learned, and what rewards fell at those; nothing
    where there are none.

    Args:
        samples: scored.
        tokens: with rewards.
    """
    if not any(sample.too_old for sample in samples):
        return {}
    found = {"lengths": torch.tensor([sample.generated_tokens for sample in samples])}
    if tokens:
        # other tokens that are not learned have NaN or 0 there
        found["spent"] = torch.tensor(
            [
                float(np.nansum(sample.per_token[REWARDS][~sample.loss_mask]))
                if REWARDS in sample.per_token and sample.loss_mask is not None
                else 0.0
                for sample in samples
            ],
            dtype=torch.float64,
        )
    return found


def _token_rewards(samples: Sequence[Sample], mask: np.ndarray) -> Tensor | None:
    """The parts of rewards that fell at tokens, [samples, tokens]; None if no sample tells of any."""
    if not any(REWARDS in sample.per_token for sample in samples):
        return None
    table = np.zeros(mask.shape, np.float64)
    for row, sample in zip(table, samples, strict=True):
        if REWARDS in sample.per_token:
            row[: sample.learned_tokens] = sample.column(REWARDS)
    return torch.from_numpy(table)
