"""Diagnostic metrics: log-prob mismatch of trainer and engine, staleness of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf.algos.tensor.loss_sum import Metric, max_of, mean_of
from rlinf.algos.tensor.masks import keep, wide
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


def staleness(versions: Tensor, mask: Tensor, current: int) -> dict[str, Metric]:
    """How many versions ago the weights were current that made each token.

    Args:
        versions: version of the weights that made each token, whole numbers, [rows, tokens] or [tokens].
        mask: which tokens count, same shape, bool or 0/1.
        current: version of the weights being trained.

    Returns:
        Metrics `staleness/mean` and `staleness/max`, versions.

    Raises:
        ValueError: shapes differ.
    """
    same_shape("staleness", "versions", versions, mask=mask)
    age = float(current) - versions.double()
    return {"staleness/mean": mean_of(age, mask.bool()), "staleness/max": max_of(age, mask.bool())}
