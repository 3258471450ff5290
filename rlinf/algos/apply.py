"""A spec put to work: advantages for a batch of groups, and the loss of a micro-batch. Pure, without I/O.

Flow: judged groups become one `Answers`; `advantages_of` gives each answer (or token) its advantage; the trainer cuts
`MicroBatch`es and adds up what `loss_of` says, then divides once by the summed weight.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlinf.algos import filters, losses, shaping
from rlinf.algos.advantages import Reduce
from rlinf.algos.losses import divergence, importance
from rlinf.algos.spec import AlgorithmSpec
from rlinf.algos.tensor.batches import Advantages, Answers, MicroBatch
from rlinf.algos.tensor.loss_sum import LossSum
from rlinf.algos.validation import same_shape


def advantages_of(spec: AlgorithmSpec, answers: Answers, reduce: Reduce | None = None) -> Advantages:
    """The advantages of a batch.

    If `spec.needs_whole_batch`, `answers` must be all answers of an optimizer step (or `reduce` must see the other
    ranks' shares); otherwise any number of whole groups will do, so that training can begin while others still decode.

    Args:
        spec: the algorithm.
        answers: judged answers.
        reduce: adds a tensor of sums up over ranks; None if this is all.

    Raises:
        ValueError: a tensor that the spec needs is missing, or shapes do not fit.
    """
    per_answer = {"groups": answers.groups, "truncated": answers.truncated, "weights": answers.weights}
    same_shape("advantages_of", "rewards", answers.rewards, **per_answer)
    mask = answers.mask.bool()
    rewards = shaped(spec, answers.rewards, mask.sum(1) if answers.lengths is None else answers.lengths)
    if spec.truncated == "mask":
        mask = filters.whole(mask, answers.need("truncated"))
    penalty = None
    if spec.kl is not None and spec.kl.place == "reward":
        logprobs, reference = answers.need("logprobs").detach(), answers.need("ref_logprobs")
        ours, theirs = (torch.where(answers.mask.bool(), x, 0.0) for x in (logprobs, reference))
        penalty = spec.kl.beta * divergence.estimate(ours, theirs, kind=spec.kl.kind, cut=spec.kl.cut)
    counted = mask if answers.weights is None else mask * answers.weights[:, None]
    found = spec.advantage(replace(answers, rewards=rewards, mask=counted), penalty, reduce)
    values, returns = found if isinstance(found, tuple) else (found, None)
    return Advantages(values.float(), mask, rewards, None if returns is None else returns.float())


def shaped(spec: AlgorithmSpec, rewards: Tensor, lengths: Tensor) -> Tensor:
    """Rewards as an algorithm compares them: with its penalty for long answers, if it has one.

    In float64, since rewards may be large numbers that differ little, such as minus nanoseconds.

    Args:
        spec: the algorithm.
        rewards: of each answer, [answers].
        lengths: its generated tokens, [answers].
    """
    rewards, part = rewards.detach().double(), spec.shaping
    if part is None:
        return rewards
    return rewards + shaping.overlong(lengths, longest=part.longest, cache=part.cache, penalty=part.penalty)


def loss_of(spec: AlgorithmSpec, batch: MicroBatch) -> LossSum:
    """The loss of a micro-batch: the surrogate with its corrections, plus KL, less the entropy bonus.

    Args:
        spec: the algorithm.
        batch: log-probs and what belongs to them.

    Returns:
        Un-normalised sums, differentiable by `batch.logprobs` (and `batch.entropy`); LossSums of micro-batches and
        ranks add, and the summed gradient is divided by the summed weight once.

    Raises:
        ValueError: a tensor that the spec needs is missing, or shapes do not fit.
    """
    weights, watched = _weights(spec, batch)
    surrogate: LossSum = spec.loss(batch, spec.aggregation, weights)
    if not isinstance(surrogate, LossSum):
        name = getattr(spec.loss, "__name__", type(spec.loss).__name__)
        raise TypeError(
            f"loss {name} returned a {type(surrogate).__name__}, not a LossSum: end it with rlinf.algos.losses.policy "
            "or its like, or with LossSum of your own sums (docs/algorithms.md)"
        )
    loss = surrogate.watching(watched)
    how: dict[str, Any] = {
        "how": spec.aggregation.how,
        "norm_length": spec.aggregation.norm_length,
        "sequences": batch.sequences,
    }
    if spec.kl is not None and spec.kl.place == "loss":
        old = batch.need("old_logprobs") if spec.kl.corrected else None
        what: dict[str, Any] = {"kind": spec.kl.kind, "cut": spec.kl.cut, "old_logprobs": old}
        term = losses.kl(batch.logprobs, batch.need("ref_logprobs"), batch.mask, **what, **how)
        loss = loss.plus(term, spec.kl.beta)
    if spec.entropy_bonus:
        loss = loss.plus(losses.entropy_bonus(batch.need("entropy"), batch.mask, **how), spec.entropy_bonus)
    return loss


def value_loss_of(
    spec: AlgorithmSpec,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    sequences: Tensor | None = None,
) -> LossSum:
    """The critic's loss of a micro-batch, aggregated as the policy's.

    Args:
        spec: an algorithm with a critic.
        values, old_values, returns, mask, sequences: see `losses.value`.

    Raises:
        ValueError: the spec has no critic, or shapes do not fit.
    """
    if spec.critic is None:
        raise ValueError(f"algorithm {spec.name!r} has no critic: name one (critic: {{}}), or take 'ppo'")
    return losses.value(
        values,
        old_values,
        returns,
        mask,
        clip=spec.critic.clip,
        error=spec.critic.error,
        delta=spec.critic.delta,
        how=spec.aggregation.how,
        norm_length=spec.aggregation.norm_length,
        sequences=sequences,
    )


def _weights(spec: AlgorithmSpec, batch: MicroBatch) -> tuple[Tensor | None, dict[str, losses.Metric]]:
    """Factors of the tokens' losses by `correction`, `rejection` and `max_drift`, and what to watch about them."""
    weights: Tensor | None = None
    watched: dict[str, losses.Metric] = {}
    if spec.correction is not None:
        weights, watched = importance.weights(
            batch.need("old_logprobs"),
            batch.need("behavior_logprobs"),
            batch.mask,
            cap=spec.correction.cap,
            floor=spec.correction.floor,
            level=spec.correction.level,
            outside=spec.correction.outside,
            sequences=batch.sequences,
        )
    left_out: list[tuple[Tensor, dict[str, losses.Metric]]] = []
    if spec.rejection is not None:
        bounds = {"floor": spec.rejection.floor, "cap": spec.rejection.cap, "least": spec.rejection.least}
        before, drawn = batch.need("proximal_logprobs"), batch.need("behavior_logprobs")
        left_out.append(importance.rejected(before, drawn, batch.mask, **bounds, sequences=batch.sequences))
    if spec.max_drift is not None:
        left_out.append(
            importance.drifted(
                batch.logprobs,
                batch.need("old_logprobs"),
                batch.need("advantages"),
                batch.mask,
                most=spec.max_drift,
                sequences=batch.sequences,
            )
        )
    for staying, more in left_out:
        weights = staying if weights is None else weights * staying
        watched = {**watched, **more}
    return weights, watched
