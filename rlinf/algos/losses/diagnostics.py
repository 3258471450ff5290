"""Diagnostic metrics: log-probs of trainer and engine that differ, and how far the policy is from older tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf.algos.tensor.loss_sum import EffectiveSize, Metric, max_of, mean_of
from rlinf.algos.tensor.masks import keep, log_ratio, wide
from rlinf.algos.validation import same_shape


def mismatch(logprobs: Tensor, engine_logprobs: Tensor, mask: Tensor) -> dict[str, Metric]:
    """How far the trainer's log-probs are from the inference engine's for the same tokens and weights.

    Args:
        logprobs, engine_logprobs: [rows, tokens] or [tokens].
        mask: which tokens count, same shape, bool or 0/1.

    Returns:
        Metrics `mismatch/mean` and `mismatch/max` of |logp_trainer - logp_engine|, nats.

    Raises:
        ValueError: shapes differ.
    """
    same_shape("mismatch", "logprobs", logprobs, engine_logprobs=engine_logprobs, mask=mask)
    kept = keep(mask, torch.float64)
    ours, theirs = wide(logprobs.detach()), wide(engine_logprobs.detach())
    apart = torch.where(ours == theirs, 0.0, (ours - theirs).abs())  # -inf - -inf would be NaN
    return {"mismatch/mean": mean_of(apart, kept.mask), "mismatch/max": max_of(apart, kept.mask)}


def by_age(
    logprobs: Tensor, behavior_logprobs: Tensor, versions: Tensor, mask: Tensor, *, current: int, oldest: int
) -> dict[str, Metric]:
    """How far the policy has moved away from tokens of older weights, age by age.

    Args:
        logprobs: under the weights of version `current`, [rows, tokens] or [tokens].
        behavior_logprobs: under what drew the tokens, same shape.
        versions: version of the weights that made each token, whole numbers, same shape.
        mask: which tokens count, same shape, bool or 0/1.
        current: version of the weights being trained, before the update.
        oldest: age, in versions, from which on tokens count as of one age.

    Returns:
        `mismatch/mean` and `mismatch/max` as of `mismatch`, of tokens that these weights made themselves: there, engine
        and trainer should agree. `staleness/drift/AGE` for each age from 1 to `oldest`: the mean of
        |logp - behavior|, nats. (`LossSum.values` leaves out those of an age that no token has.) `staleness/ess`: the
        share of tokens that is left if they count with the weights exp(logp - behavior), which make them the policy's
        own (Kish's effective sample size).

    Raises:
        ValueError: shapes differ.
    """
    same_shape("by_age", "logprobs", logprobs, behavior_logprobs=behavior_logprobs, versions=versions, mask=mask)
    age = (current - versions.long()).clamp(0, oldest)
    kept = keep(mask, torch.float64)
    apart = log_ratio(logprobs, behavior_logprobs, kept).double()
    found = mismatch(logprobs, behavior_logprobs, kept.mask & (age == 0))
    for number in range(1, oldest + 1):
        found[f"staleness/drift/{number}"] = mean_of(apart.abs(), kept.mask & (age == number))
    weights = kept.only(apart.exp())
    moments = torch.stack([kept.count.to(weights.device), weights.sum(), weights.square().sum()])
    return {**found, "staleness/ess": EffectiveSize(moments)}
