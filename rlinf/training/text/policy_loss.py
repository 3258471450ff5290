"""The loss of a packed micro-batch under an algorithm: which log-probs stand for which policy.

In: log-probs and entropies of the learned tokens, and their columns. Out: a `LossSum`.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from rlinf.algos import losses
from rlinf.algos.apply import loss_of
from rlinf.algos.losses.aggregate import reduce
from rlinf.algos.spec import AlgorithmSpec
from rlinf.algos.tensor import experts
from rlinf.algos.tensor.batches import MicroBatch
from rlinf.algos.tensor.loss_sum import LossSum, Metric
from rlinf.algos.tensor.sequences import counted
from rlinf.data.packing import Packed
from rlinf.data.routing.routers import Routed
from rlinf.training.backend import Optimization, Outputs
from rlinf.training.text.requirements import PROXIMAL, REFERENCE, VERSIONS

AGES = 8
"""Ages that are told apart, in versions; older tokens count as of this one. More would be more numbers than people
read, and a bound beyond is seldom useful."""


def policy_loss(
    spec: AlgorithmSpec,
    batch: Packed,
    logprobs: Tensor,
    entropy: Tensor,
    kept: Mapping[str, Tensor],
    version: int | None,
) -> LossSum:
    """The loss of a micro-batch, differentiable by `logprobs` (and `entropy`, if there is a bonus for it).

    The engine's log-probs stand for the policy that the ratio starts from; with `correction` those of the weights
    before the update do, and the engine's for the policy that sampled.

    Args:
        spec: the algorithm.
        batch: the samples.
        logprobs, entropy: of the policy being trained, nats, [learned].
        kept: columns beside those of `batch`, float32 [learned] each.
        version: of the weights being trained, before the update.

    Raises:
        ValueError: the algorithm needs a column that is not there.
    """
    columns = {**batch.columns, **kept}
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
            versions=columns.get(VERSIONS),
            version=version,
        ),
    )


def learn_policy(
    learner: Optimization,
    batch: Packed,
    spec: AlgorithmSpec,
    *,
    version: int | None = None,
    compare: bool = False,
    kept: dict[str, Tensor] | None = None,
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
        kept: columns beside those of `batch`, float32 [learned] each; our log-probs join them if the algorithm
            needs those before the update and nobody said them yet.
        oldest: by how many versions tokens may be older than the weights; above 0, `compare` tells their ages apart.
        balance: coefficient of the auxiliary loss of a mixture of experts, for batches that have `expert_load`.
    """
    known = {} if kept is None else kept

    def loss(batch: Packed, outputs: Outputs) -> LossSum:
        logprobs, entropy = outputs[:2]
        routed = outputs[2] if len(outputs) > 2 else None
        if spec.needs_recomputed_logprobs and PROXIMAL not in batch.columns:
            known.setdefault(PROXIMAL, logprobs.detach())
        found = policy_loss(spec, batch, logprobs, entropy, known, version)
        if routed is not None and routed.balance is not None and balance:
            found = found.plus(_evenly(spec, batch, routed.balance), balance)
        if compare and routed is not None:
            found = found.watching(_routing(batch, routed, version if oldest else None))
        if compare and oldest:
            assert version is not None  # of every trainer
            versions = batch.columns[VERSIONS] if len(batch.targets) else batch.targets  # a rank without work
            ages = {"current": version, "oldest": min(oldest, AGES)}
            found = found.watching(losses.by_age(logprobs, batch.old_logprobs, versions, batch.mask, **ages))
        elif compare:
            found = found.watching(losses.mismatch(logprobs, batch.old_logprobs, batch.mask))
        return found

    learner.accumulate([batch], loss, entropy_slope=bool(spec.entropy_bonus))


def _evenly(spec: AlgorithmSpec, batch: Packed, balance: Tensor) -> LossSum:
    """The auxiliary loss, put together from tokens as the algorithm's own loss is."""
    how, norm, sequences = spec.aggregation.how, spec.aggregation.norm_length, batch.sequences
    return reduce(balance, batch.mask, how, norm, sequences=counted(sequences, len(batch.lengths)))


def _routing(batch: Packed, routed: Routed, version: int | None) -> dict[str, Metric]:
    """Metrics of experts; drift is of tokens that the weights of `version` made, None: of all."""
    fresh = routed.known
    if version is not None and VERSIONS in batch.columns:  # which a rank without work lacks
        fresh = fresh & (batch.columns[VERSIONS] == version)
    return {**experts.load(routed.counts, routed.chances), **experts.drift(routed.apart, fresh)}


def learn_answers(learner: Optimization, batch: Packed) -> None:
    """Add a micro-batch of worked answers to the gradient, by `losses.supervised`."""

    def loss(batch: Packed, outputs: Outputs) -> LossSum:
        return losses.supervised(outputs[0], batch.mask)

    learner.accumulate([batch], loss)
