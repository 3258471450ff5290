"""Surrogates whose weight falls instead of being cut: CISPO, AIPO, SAPO."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf.algos.aggregate import How
from rlinf.algos.losses.ground import Ground, Part, by_sign, check_clip, watch_ratio
from rlinf.algos.masks import Kept, indicator, log_ratio
from rlinf.algos.naming import within
from rlinf.algos.sums import LossSum

_LEAST = -1e4
"""Floor of a log-prob in a loss's value, nats: far below what exists, and a sum of millions stays within float32."""


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
    weights: Tensor | None = None,
    entropy: Tensor | None = None,
    how: How = "token-mean",
    norm_length: float | None = None,
    sequences: Tensor | None = None,
) -> LossSum:
    """Clipped importance weights on the likelihood: no token loses its gradient.

        r_t = exp(logp_t - old_t)
        L_t = -sg[clip(r_t, 1 - clip_low, 1 + clip_high)] A logp_t

    CISPO (MiniMax-M1, arXiv:2506.13585, eq. 4 and 5); sg stops the gradient. The defaults leave the lower side open and
    cut r at 5, as ScaleRL does (arXiv:2510.13786).

    Args:
        logprobs, old_logprobs, advantages, mask, entropy: see `policy`.
        clip_low, clip_high: the weight is clipped to [1 - clip_low, 1 + clip_high].
        weights: further factors of each token's loss, broadcastable to `logprobs`.
        how, norm_length, sequences: see `policy`.

    Returns:
        Sums; metrics `clip_frac` (share of tokens whose weight is cut), `approx_kl`, `ratio/mean`, `ratio/max`,
        `entropy`.

    Raises:
        ValueError: shapes do not fit, or a bound is out of range.
    """
    check_clip("cispo", clip_low, clip_high)
    others = {"old_logprobs": old_logprobs, "entropy": entropy}
    ground = Ground.of("cispo", logprobs, mask, how, norm_length, sequences, **others)

    def formula(kept: Kept, new: Tensor, old: Tensor, cost: Tensor) -> Part:
        difference, ratio = _ratio(kept, new, old)
        clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
        cut = indicator(torch.ne, clipped, ratio)  # 1 is never cut, so nothing outside the mask is
        slope = kept.only_(clipped.mul_(cost))
        part = Part(slope * kept.clean(new).clamp(min=_LEAST), slope, {"clip_frac": cut})
        watch_ratio(part, kept, ratio, difference)
        return part

    tensors = (ground.read(logprobs), ground.read(old_logprobs), ground.cost(advantages))
    return ground.sum(formula, *tensors, factors=(weights,), entropy=entropy)


def aipo(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    cap: float,
    mask_low: float | None = None,
    mask_high: float | None = None,
    drift: float = 0.0,
    weights: Tensor | None = None,
    entropy: Tensor | None = None,
    how: How = "token-mean",
    norm_length: float | None = None,
    sequences: Tensor | None = None,
) -> LossSum:
    """Off-policy policy gradient with weights cut from above, and optionally held near the policy that sampled.

        r_t = exp(logp_t - behavior_t)
        L_t = -sg[min(r_t, cap)] A logp_t + drift (log r_t)^2

    AIPO (LlamaRL, arXiv:2505.24034, section 5). With the bounds, a token's first term is dropped where the update would
    carry the probability further away than it already is: A > 0 and pi - mu > mask_high, or A < 0 and mu - pi >
    mask_low (probabilities, not log-probs); together with `drift` that is the default of prime-rl.

    Args:
        logprobs, advantages, mask, entropy: see `policy`.
        behavior_logprobs: under the policy that drew the tokens, same shape; never differentiated.
        cap: largest weight.
        mask_low, mask_high: largest distance in probability, 0 to 1; None for no bound.
        drift: coefficient of the squared log-ratio.
        weights, how, norm_length, sequences: see `cispo`.

    Returns:
        Sums; metrics `clip_frac` (share of tokens whose weight is cut), `drop_frac` (with bounds), `approx_kl`,
        `ratio/mean`, `ratio/max`, `entropy`.

    Raises:
        ValueError: shapes do not fit, or a bound is out of range.
    """
    if not cap > 0:
        raise ValueError(f"aipo: cap={cap} must be more than 0")
    within("aipo", "drift", drift, 0.0)
    limit_low, limit_high = (1.0 if limit is None else limit for limit in (mask_low, mask_high))
    within("aipo", "mask_low", limit_low, 0.0, 1.0)
    within("aipo", "mask_high", limit_high, 0.0, 1.0)
    others = {"behavior_logprobs": behavior_logprobs, "entropy": entropy}
    ground = Ground.of("aipo", logprobs, mask, how, norm_length, sequences, **others)

    def formula(kept: Kept, new: Tensor, behavior: Tensor, cost: Tensor) -> Part:
        difference, ratio = _ratio(kept, new, behavior)
        new, behavior = kept.clean(new), kept.clean(behavior)
        slope = kept.only_(ratio.clamp(max=cap).mul_(cost))
        part = Part(slope, slope, {"clip_frac": kept.only(indicator(torch.gt, ratio, cap))})
        if mask_low is not None or mask_high is not None:
            further = new.exp() - behavior.exp()
            dropped = ((slope < 0) & (further > limit_high)) | ((slope > 0) & (further < -limit_low))
            slope.masked_fill_(dropped, 0.0)
            part.means["drop_frac"] = dropped.to(slope.dtype)
        part.value = slope * new.clamp(min=_LEAST)
        if drift:
            part.value.addcmul_(difference, difference, value=drift)
            part.slope = slope + 2.0 * drift * difference
        watch_ratio(part, kept, ratio, difference)
        return part

    tensors = (ground.read(logprobs), ground.read(behavior_logprobs), ground.cost(advantages))
    return ground.sum(formula, *tensors, factors=(weights,), entropy=entropy)


def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    weights: Tensor | None = None,
    entropy: Tensor | None = None,
    how: How = "token-mean",
    norm_length: float | None = None,
    sequences: Tensor | None = None,
) -> LossSum:
    """A soft gate instead of a clip.

        r_t = exp(logp_t - old_t)        tau = tau_pos where A > 0, else tau_neg
        L_t = -(4 / tau) sigmoid(tau (r_t - 1)) A

    SAPO (arXiv:2511.20347, eq. 5 and 6); at r = 1 the gradient is that of the plain policy gradient. The paper averages
    by "seq-mean-token-mean".

    Args:
        logprobs, old_logprobs, advantages, mask, entropy: see `policy`.
        tau_pos, tau_neg: how fast the gradient falls off with the distance of r from 1; more than 0.
        weights, how, norm_length, sequences: see `cispo`.

    Returns:
        Sums; metrics `gate` (mean of the factor that the gate puts on the gradient, 1 at r = 1), `approx_kl`,
        `ratio/mean`, `ratio/max`, `entropy`.

    Raises:
        ValueError: shapes do not fit, or a temperature is not positive.
    """
    if not (tau_pos > 0 and tau_neg > 0):
        raise ValueError(f"sapo: tau_pos={tau_pos} and tau_neg={tau_neg} must be more than 0")
    others = {"old_logprobs": old_logprobs, "entropy": entropy}
    ground = Ground.of("sapo", logprobs, mask, how, norm_length, sequences, **others)

    def formula(kept: Kept, new: Tensor, old: Tensor, cost: Tensor, tau: Tensor) -> Part:
        difference, ratio = _ratio(kept, new, old)
        gate = (ratio - 1.0).mul_(tau).sigmoid_()
        value = kept.only_((gate * cost).mul_(4.0 / tau))
        fall = torch.addcmul(gate, gate, gate, value=-1.0).mul_(4.0)  # 4 gate (1 - gate)
        part = Part(value, kept.only_((fall * ratio).mul_(cost)), {"gate": kept.only(fall)})
        watch_ratio(part, kept, ratio, difference)
        return part

    cost = ground.cost(advantages)
    (tau,) = by_sign(cost, (tau_pos, tau_neg, tau_neg))
    tensors = (ground.read(logprobs), ground.read(old_logprobs), cost, tau)
    return ground.sum(formula, *tensors, factors=(weights,), entropy=entropy)


def _ratio(kept: Kept, new: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
    """log(new / old), clamped and 0 outside the mask, and new / old."""
    difference = log_ratio(new, old, kept)
    return difference, difference.exp()
