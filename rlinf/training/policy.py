"""From judged groups to the loss of a policy or a critic: columns, rows with advantages, and the loss of a micro-batch.

`needed_of_policy` and `own_columns` tell which numbers per token (columns) an algorithm needs, and who computes them:
other roles, which fill `Sample.per_token`, or the trainer, and when. `advantage_rows` and `value_rows` make the rows of
groups that are learned, with advantages, or with values and returns. `policy_loss` is the loss of a packed micro-batch
of such rows, in which it chooses the log-probs that stand for each policy. Nothing here depends on tokens outside a
sample's loss mask.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rlinf.algos import losses, recipes
from rlinf.algos.algorithms import (
    LOSSES,
    AlgorithmSpec,
    Decoupled,
    Divergence,
    GroupRelative,
    LeaveOneOut,
    advantages_of,
    loss_of,
    shaped,
)
from rlinf.algos.loss_sum import Advantages, Answers, LossSum, Metric, MicroBatch, counted
from rlinf.algos.losses import reduce
from rlinf.algos.token_losses import TokenLoss
from rlinf.config.importing import resolve
from rlinf.data.in_flight.admission import unequal
from rlinf.data.packing import Packed, Row
from rlinf.data.sample import REWARDS, Group, Sample

if TYPE_CHECKING:  # they import transformers, which trainers of policies that act do without
    from rlinf.models.language.moe import Routed
    from rlinf.training.backend import Optimization, Outputs

Algorithm = str | Mapping[str, Any] | AlgorithmSpec
"""A recipe's name; `{"name": "dapo", "overrides": {"loss.clip_high": 0.3}}`; or a spec."""

REFERENCE, TEACHER, VALUES = "ref_logprobs", "teacher_logprobs", "values"
"""Computed by a reference policy, a teacher, a critic."""
ADAPTERS_OFF = "adapters_off"
"""In place of a directory of adapters: the model without any."""
PROXIMAL = "proximal_logprobs"
"""Log-probs under the weights just before the update."""
TOP, HIDDEN = "teacher_top", "teacher_hidden"
"""Fields of a teacher's whole distributions: its likeliest tokens, or its hidden states, see
`models.distillation`."""
VERSIONS = "versions"
"""Version of the weights that made each token; a field of the sample."""

_SOURCES = {
    REFERENCE: "reference.logprobs",
    TEACHER: "teacher.logprobs",
    VALUES: "critic.values",
    PROXIMAL: "the trainer's own pass over the batch",
    **dict.fromkeys((TOP, HIDDEN), "teacher.logprobs (spawned with settings.distribution)"),
}
"""The call that fills each column."""


@dataclass(frozen=True, slots=True)
class OwnColumns:
    """Columns that a trainer computes itself, and when."""

    whole_batch: tuple[str, ...] = ()
    """In a forward pass over the whole batch, before anything is learned from any of it."""
    first_pass: frozenset[str] = frozenset()
    """In the first pass of each micro-batch, whose weights are those before the update."""


def algorithm_of(algorithm: Algorithm, *, acting: bool = False) -> AlgorithmSpec:
    """The spec that a setting means; where policies act, recipes have other defaults.

    Raises:
        ValueError: no recipe, part or key of that name (the text gives the nearest), or a bad value.
    """
    if isinstance(algorithm, AlgorithmSpec):
        return algorithm
    if isinstance(algorithm, str):
        return recipes.get(algorithm, resolve=resolve, acting=acting)
    unknown = sorted(set(algorithm) - {"name", "overrides"})
    if unknown or "name" not in algorithm:
        raise ValueError(f"algorithm: a mapping has the keys name and overrides, not {sorted(algorithm)}")
    return recipes.get(algorithm["name"], algorithm.get("overrides"), resolve=resolve, acting=acting)


def own_columns(spec: AlgorithmSpec, *, minibatches: int, own: Collection[str] = ()) -> OwnColumns:
    """The columns that a trainer computes itself.

    Args:
        spec: the algorithm.
        minibatches: optimizer steps in each epoch. After the first of several, the weights are no longer those before
            the update, so what must be said by those is computed for the whole batch at once.
        own: those of other policies that it computes by other adapters of its model: `REFERENCE`, `TEACHER`.
    """
    proximal = {PROXIMAL} if spec.needs_recomputed_logprobs else set()
    reference = {REFERENCE} & {*own} if spec.kl is not None else set()
    teacher = {TEACHER} & {*own} if spec.needs_teacher else set()
    if minibatches > 1:
        return OwnColumns(whole_batch=(*proximal, *reference, *teacher))
    if spec.kl is not None and spec.kl.place == "reward":  # an advantage asks for it, not the loss
        return OwnColumns((*reference, *teacher), frozenset(proximal))
    return OwnColumns(tuple(teacher), frozenset(proximal | reference))


def columns_of(spec: AlgorithmSpec) -> set[str]:
    """Columns that the loss asks for. A loss that is not ours may ask for versions."""
    interpolates = isinstance(spec.loss, Decoupled) and spec.loss.proximal == "interpolate"
    columns = {VERSIONS} if interpolates or type(spec.loss) not in LOSSES.values() else set()
    columns |= {REFERENCE} if spec.kl is not None and spec.kl.place == "loss" else set()
    columns |= {distribution} if (distribution := distribution_of(spec)) is not None else set()
    return columns | ({PROXIMAL} if spec.needs_recomputed_logprobs else set())


def distribution_of(spec: AlgorithmSpec) -> str | None:
    """The column with a teacher's distributions that the loss asks for, if it does."""
    if not isinstance(spec.loss, Divergence):
        return None
    return HIDDEN if spec.loss.top_k is None else TOP


def asks_rewards_alone(spec: AlgorithmSpec) -> bool:
    """The advantages depend on no column."""
    return isinstance(spec.advantage, GroupRelative | LeaveOneOut) and (spec.kl is None or spec.kl.place == "loss")


def needed_of_policy(spec: AlgorithmSpec) -> set[str]:
    """Columns that a policy's advantages and loss ask for, whoever computes them."""
    needed = {
        REFERENCE: spec.needs_reference,
        TEACHER: spec.needs_teacher,
        VALUES: spec.critic is not None,
        PROXIMAL: spec.needs_recomputed_logprobs,
        **{column: distribution_of(spec) == column for column in (TOP, HIDDEN)},
    }
    return {name for name, need in needed.items() if need}


def needed_of_critic(spec: AlgorithmSpec) -> set[str]:
    """Columns that a critic's returns ask for."""
    return {VALUES, REFERENCE} if spec.kl is not None and spec.kl.place == "reward" else {VALUES}


def check_told(where: str, spec: AlgorithmSpec, samples: Sequence[Sample], needed: set[str]) -> None:
    """Check that samples carry the columns that are needed.

    Args:
        where: endpoint that learns, for errors: "train" or "critic.train".
        spec: the algorithm.
        samples: to be learned from.
        needed: columns.

    Raises:
        ValueError: a sample lacks one, and the text says which call fills it; or it has one that nothing reads.
    """
    columns = needed.union(_SOURCES, [REWARDS])
    for sample in samples:
        if sample.per_token and not columns.issuperset(name.partition("/")[0] for name in sample.per_token):
            raise ValueError(f"{where}: {_unread(sample, columns)}")  # of several teachers, each has one of its own
    for name in sorted(needed):
        for sample in samples:
            if name in sample.per_token:
                continue
            cure = f"put {_SOURCES[name]} between judge.score and {where}"
            if name == REFERENCE:
                cure += (
                    " or, with LoRA, give the trainer reference='adapters_off'"
                    if where == "train"
                    else " (a trainer's own reference, adapters_off, is not enough: the critic needs its log-probs too)"
                )
            raise ValueError(
                f"{where}: algorithm {spec.name!r} needs {name} of every token, and sample {sample.index} of prompt "
                f"{sample.prompt.id} has none: {cure}"
            )


def _unread(sample: Sample, columns: set[str]) -> str:
    """An error about a sample with a column that no algorithm reads."""
    name = min(name for name in sample.per_token if name.partition("/")[0] not in columns)
    cure = (
        "set Sample.loss_mask, a field of its own"
        if name == "loss_mask"
        else "leave it out, or keep it beside the samples until the batch is learned from"
    )
    return (
        f"sample {sample.index} of prompt {sample.prompt.id} has per_token[{name!r}], which is read by nothing: the "
        f"keys that are read are {', '.join(sorted(columns))}; {cure}"
    )


RETURNS = "returns"
"""Column of a critic's rows: the reward still to come before each token, as `advantages.gae` estimates it."""


@dataclass(slots=True)
class LearnedRows:
    """Rows of groups; those of further groups add."""

    rows: list[list[Row]] = field(default_factory=list)
    """The samples of each group that give a gradient."""
    advantages: list[float | np.ndarray] = field(default_factory=list)
    """One for each scored sample, or for its learned tokens [learned], those that give no gradient included."""
    rewards: list[float] = field(default_factory=list)
    """One for each scored sample, after shaping."""

    def __iadd__(self, other: LearnedRows) -> LearnedRows:
        self.rows += other.rows
        self.advantages += other.advantages
        self.rewards += other.rewards
        return self


def teaches(spec: AlgorithmSpec, group: Group) -> bool:
    """A group gives a gradient: an answer of it is learned, and its rewards differ as the algorithm compares them.

    That is after shaping, so a penalty for length can make a difference where there was none, and can take one away.
    Under dynamic sampling rewards must differ before shaping, too: DAPO keeps groups of which some answers are right
    and some wrong (equation 11), whatever their lengths, for if penalties alone were learned from, a policy that finds
    nothing right would learn to write nothing. (verl's `filter_groups.metric: acc` is the same.)

    Args:
        spec: the algorithm.
        group: judged.
    """
    if spec.sampling is not None and not unequal(group):
        return False
    scored = group.scored
    if not any(sample.learned_tokens and not (spec.truncated == "mask" and sample.truncated) for sample in scored):
        return False
    return len(set(shaped_rewards(spec, group))) > 1


def shaped_rewards(spec: AlgorithmSpec, group: Group) -> list[float]:
    """Reward of each scored answer of a group, after shaping."""
    if spec.shaping is None:
        return group.rewards
    lengths = torch.tensor([sample.generated_tokens for sample in group.scored])
    rewards: list[float] = shaped(spec, torch.tensor(group.rewards, dtype=torch.float64), lengths).tolist()
    return rewards


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
    advantages = advantages_of(spec, _answers(scored, samples, tokens=not asks_rewards_alone(spec)))
    gains: list[Any] = (
        advantages.values.tolist() if advantages.values.ndim == 1 else _of_learned(advantages.values, samples)
    )
    names = columns_of(spec) - later | ({VERSIONS} if ages else set())
    rows = [
        Row.of(sample, gain, {name: sample.column(name) for name in names})
        for sample, gain in zip(samples, gains, strict=True)
    ]
    return LearnedRows(_per_group(scored, rows, advantages), gains, advantages.rewards.tolist())


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
    estimates = advantages_of(spec, _answers(scored, samples, tokens=True))
    if estimates.returns is None:
        raise ValueError(f"critic.train: algorithm {spec.name!r} has an advantage that gives a critic no returns")
    rows = [
        Row.of(sample, columns={VALUES: sample.column(VALUES), RETURNS: returns})
        for sample, returns in zip(samples, _of_learned(estimates.returns, samples), strict=True)
    ]
    return LearnedRows(_per_group(scored, rows, estimates), rewards=estimates.rewards.tolist())


def _scored(groups: Sequence[Group]) -> tuple[list[tuple[Sample, ...]], list[Sample]]:
    """The scored samples of each group, and of all.

    Raises:
        ValueError: a reward is not finite.
    """
    scored = [group.scored for group in groups]
    samples = [sample for some in scored for sample in some]
    for sample in samples:
        if sample.reward is None or REWARDS in sample.per_token or not math.isfinite(sample.reward):
            _check_finite(sample)
    return scored, samples


def _check_finite(sample: Sample) -> None:
    """See that the reward of a sample, and what of it fell at tokens, are numbers to compute with."""
    rewards: tuple[tuple[str, Any], ...] = (("reward", sample.reward),)
    if REWARDS in sample.per_token:
        rewards += ((f"per_token[{REWARDS!r}]", sample.column(REWARDS)),)
    for name, value in rewards:
        if not np.isfinite(value).all():
            wrong = value if name == "reward" else value[~np.isfinite(value)][0]
            raise ValueError(
                f"train: sample {sample.index} of prompt {sample.prompt.id} has the {name} {wrong}, which is no finite "
                "number: mend what gave it, or let it be None with an outcome, so that the sample counts as not drawn"
            )


def _of_learned(table: Tensor, samples: Sequence[Sample]) -> list[np.ndarray]:
    """Rows of a rectangle, [samples, tokens], without their padding: float32 [learned] each."""
    return [row[: sample.learned_tokens] for row, sample in zip(table.float().numpy(), samples, strict=True)]


def _per_group(scored: Sequence[Sequence[Sample]], rows: Sequence[Row], advantages: Advantages) -> list[list[Row]]:
    """The rows of each group in which a token counts."""
    counted = zip(rows, advantages.mask.any(1).tolist(), strict=True)
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

    columns = {name: padded(name) for name in ("logprobs", REFERENCE, TEACHER, VALUES)} if tokens else {}
    weights = [sample.weight for sample in samples]
    return Answers(
        rewards=torch.tensor([sample.reward for sample in samples], dtype=torch.float64),
        groups=torch.from_numpy(np.repeat(np.arange(len(scored)), [len(some) for some in scored])),
        mask=torch.from_numpy(mask),
        token_rewards=_token_rewards(samples, mask) if tokens else None,
        turns=_turns(samples, mask) if tokens else None,
        weights=None if all(weight == 1.0 for weight in weights) else torch.tensor(weights),
        truncated=torch.tensor([sample.truncated for sample in samples]),
        **_of_too_old(samples, tokens=tokens),
        **columns,
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
    answers = {"lengths": torch.tensor([sample.generated_tokens for sample in samples])}
    if tokens:
        # other tokens that are not learned have NaN or 0 there
        answers["spent"] = torch.tensor(
            [
                float(np.nansum(sample.per_token[REWARDS][~sample.loss_mask]))
                if REWARDS in sample.per_token and sample.loss_mask is not None
                else 0.0
                for sample in samples
            ],
            dtype=torch.float64,
        )
    return answers


def _token_rewards(samples: Sequence[Sample], mask: np.ndarray) -> Tensor | None:
    """The parts of rewards that fell at tokens, [samples, tokens]; None if no sample tells of any."""
    if not any(REWARDS in sample.per_token for sample in samples):
        return None
    table = np.zeros(mask.shape, np.float64)
    for row, sample in zip(table, samples, strict=True):
        if REWARDS in sample.per_token:
            row[: sample.learned_tokens] = sample.column(REWARDS)
    return torch.from_numpy(table)


def _turns(samples: Sequence[Sample], mask: np.ndarray) -> Tensor | None:
    """Numbers of the turns of learned tokens, [samples, tokens]; None if no sample has a second. Gaps between
    turns have no versions, which tells them from tokens that are too old to be learned."""
    if all(sample.loss_mask is None for sample in samples):
        return None
    table = np.zeros(mask.shape, np.int64)
    for row, sample in zip(table, samples, strict=True):
        if sample.loss_mask is not None:
            generated = sample.loss_mask | (sample.versions >= 0) if sample.too_old else sample.loss_mask
            begins = generated & ~np.concatenate([[False], generated[:-1]])
            row[: sample.learned_tokens] = (np.cumsum(begins) - 1)[sample.loss_mask]
    return torch.from_numpy(table) if table.any() else None


AGES = 8
"""Ages that are told apart, in versions; older tokens count as of this one. More would be more numbers than people
read, and a bound beyond is seldom useful."""


def policy_loss(
    spec: AlgorithmSpec,
    batch: Packed,
    logprobs: Tensor,
    entropy: Tensor,
    cached_columns: Mapping[str, Tensor],
    version: int | None,
    divergence: Tensor | None = None,
) -> LossSum:
    """The loss of a micro-batch, differentiable by `logprobs` (and `entropy`, if there is a bonus for it).

    The engine's log-probs stand for the policy that the ratio starts from; with `correction` those of the weights
    before the update do, and the engine's for the policy that sampled.

    Args:
        spec: the algorithm.
        batch: the samples.
        logprobs, entropy: of the policy being trained, nats, [learned].
        cached_columns: columns beside those of `batch`, float32 [learned] each.
        version: of the weights being trained, before the update.
        divergence: from a teacher's distributions, nats, [learned]; differentiable.

    Raises:
        ValueError: the algorithm needs a column that is not there.
    """
    columns = {**batch.columns, **cached_columns}
    if not len(batch.targets):  # a rank without work has no columns, and still takes part
        columns = dict.fromkeys((REFERENCE, PROXIMAL, VERSIONS), logprobs.detach())
    return loss_of(
        spec,
        MicroBatch(
            logprobs,
            batch.mask,
            old_logprobs=batch.old_logprobs if spec.correction is None else columns.get(PROXIMAL),
            advantages=batch.advantages,
            sequences=counted(batch.sequences, len(batch.lengths)),
            entropy=entropy,
            ref_logprobs=columns.get(REFERENCE),
            behavior_logprobs=batch.old_logprobs,
            proximal_logprobs=columns.get(PROXIMAL),
            divergence=divergence,
            versions=columns.get(VERSIONS),
            version=version,
        ),
    )


def _known(batch: Packed, logprobs: Tensor) -> Packed:
    """The batch with our own log-probs where the engine's are not known, of tokens that a server drew within a schema:
    these count as drawn by the weights as they are, with a ratio of 1."""
    return replace(batch, old_logprobs=torch.where(batch.old_logprobs == torch.inf, logprobs, batch.old_logprobs))


def learn_policy(
    learner: Optimization,
    batch: Packed,
    spec: AlgorithmSpec,
    *,
    version: int | None = None,
    compare: bool = False,
    cached_columns: dict[str, Tensor] | None = None,
    oldest: int = 0,
    balance: float = 0.0,
) -> None:
    """Add a micro-batch of samples to the gradient.

    Args:
        learner: what to add it to.
        batch: the samples.
        spec: the algorithm.
        version: of the weights being trained, before the update.
        compare: no step was taken on the batch yet: measure how far our log-probs are from the engine's.
        cached_columns: columns beside those of `batch`, float32 [learned] each; our log-probs join them if the
            algorithm needs those before the update and they are not there yet.
        oldest: by how many versions tokens may be older than the weights; above 0, `compare` tells their ages apart.
        balance: coefficient of the auxiliary loss of a mixture of experts, for batches that have `expert_load`.
    """
    columns = {} if cached_columns is None else cached_columns

    def loss(batch: Packed, outputs: Outputs) -> LossSum:
        logprobs, entropy, divergence = *outputs[:2], None
        if distribution_of(spec) is not None:  # of a rank without work nothing was said
            *outputs, divergence = outputs if len(batch.targets) else (*outputs, logprobs)  # type: ignore[assignment]
        batch = _known(batch, logprobs.detach())
        routed = outputs[2] if len(outputs) > 2 else None
        if spec.needs_recomputed_logprobs and PROXIMAL not in batch.columns:
            columns.setdefault(PROXIMAL, logprobs.detach())
        total = policy_loss(spec, batch, logprobs, entropy, columns, version, divergence)
        if routed is not None and routed.balance is not None and balance:
            total = total.plus(_evenly(spec, batch, routed.balance), balance)
        if compare and routed is not None:
            total = total.watching(_routing(batch, routed, version if oldest else None))
        if compare and oldest:
            assert version is not None  # of every trainer
            versions = batch.columns[VERSIONS] if len(batch.targets) else batch.targets  # a rank without work
            ages = {"current": version, "oldest": min(oldest, AGES)}
            total = total.watching(losses.by_age(logprobs, batch.old_logprobs, versions, batch.mask, **ages))
        elif compare:
            total = total.watching(losses.mismatch(logprobs, batch.old_logprobs, batch.mask))
        return total

    learner.accumulate([batch], loss, entropy_slope=bool(spec.entropy_bonus))


def _evenly(spec: AlgorithmSpec, batch: Packed, balance: Tensor) -> LossSum:
    """The auxiliary loss, put together from tokens as the algorithm's own loss is."""
    how, norm, sequences = spec.aggregation.how, spec.aggregation.norm_length, batch.sequences
    return reduce(balance, batch.mask, how, norm, sequences=counted(sequences, len(batch.lengths)))


def _routing(batch: Packed, routed: Routed, version: int | None) -> dict[str, Metric]:
    """Metrics of experts; drift is of tokens that the weights of `version` made, None: of all."""
    from rlinf.models.language import moe

    fresh = routed.has_route
    if version is not None and VERSIONS in batch.columns:  # which a rank without work lacks
        fresh = fresh & (batch.columns[VERSIONS] == version)
    return {**moe.load(routed.counts, routed.chances), **moe.drift(routed.route_drift, fresh)}


def learn_answers(learner: Optimization, batch: Packed) -> None:
    """Add a micro-batch of worked answers to the gradient, by `losses.supervised`."""

    def loss(batch: Packed, outputs: Outputs) -> LossSum:
        return losses.supervised(outputs[0], batch.mask)

    learner.accumulate([batch], loss)


def learn_tokens(learner: Optimization, batch: Packed, loss: TokenLoss) -> Tensor:
    """Add the gradient of a sum over tokens, with the batch's columns as its inputs; the log-probs, [learned]."""
    computed: list[Tensor] = []

    def total(batch: Packed, outputs: Outputs) -> LossSum:
        logprobs = outputs[0]
        computed.append(logprobs.detach())
        if not len(batch.targets):  # a rank without work has no columns
            return loss(logprobs, dict.fromkeys(loss.inputs, logprobs.detach()))
        return loss(logprobs, batch.columns, counted(batch.sequences, len(batch.lengths)))

    learner.accumulate([batch], total)
    return computed[0]
