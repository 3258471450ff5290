"""Losses: pure functions from log-probs, advantages and a mask to a `LossSum`.

Everything is computed in float32 (float64 stays float64), whatever comes in. Positions outside the mask count for
nothing, whatever stands there: NaN and inf included. Each function takes [rows, tokens], or packed [tokens] with the
sequence of each token, and any of the aggregations of `aggregate`.
"""

from rlinf.algos.losses.clipped import decoupled, policy
from rlinf.algos.losses.diagnostics import by_age, mismatch
from rlinf.algos.losses.likelihood import entropy_bonus, kl, supervised
from rlinf.algos.losses.soft_clipped import aipo, cispo, sapo
from rlinf.algos.losses.value import value
from rlinf.algos.tensor.loss_sum import EffectiveSize, Explained, LossSum, Max, Mean, Metric

__all__ = [
    "EffectiveSize",
    "Explained",
    "LossSum",
    "Max",
    "Mean",
    "Metric",
    "aipo",
    "by_age",
    "cispo",
    "decoupled",
    "entropy_bonus",
    "kl",
    "mismatch",
    "policy",
    "sapo",
    "supervised",
    "value",
]
