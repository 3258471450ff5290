"""Surrogate losses with soft or stop-gradient clipping: CISPO, AIPO, SAPO."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf.algos.losses.aggregate import How
from rlinf.algos.losses.base import Part, TokenLoss, check_clip, log_ratio, watch_ratio
from rlinf.algos.losses.importance import exponential
from rlinf.algos.tensor.loss_sum import LossSum
from rlinf.algos.tensor.masks import Kept, indicator
from rlinf.algos.validation import within

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
    given = {"old_logprobs": old_logprobs, "entropy": entropy}
    tokens = TokenLoss.of("cispo", logprobs, mask, how, norm_length, sequences, weights, **given)

    def formula(kept: Kept, slope: Tensor, leaf: Tensor, old_logprobs: Tensor, cost: Tensor) -> Part:
        difference = log_ratio(kept, leaf, old_logprobs)
        ratio = exponential(difference)
        part = Part(difference)  # its memory is the loss's, as soon as it has been used
        watch_ratio(part, kept, ratio, difference)
        clipped = torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high, out=slope)
        # 1 is never cut, so nothing outside the mask is
        part.watch_lack("clip_frac", torch.eq(clipped, ratio, out=ratio))
        kept.only_(slope.mul_(cost))
        torch.clamp(leaf, min=_LEAST, out=part.value).mul_(slope)
        return part

    return tokens.sum(formula, cost=tokens.cost(advantages))


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
    given = {"behavior_logprobs": behavior_logprobs, "entropy": entropy}
    tokens = TokenLoss.of("aipo", logprobs, mask, how, norm_length, sequences, weights, **given)

    def formula(kept: Kept, slope: Tensor, leaf: Tensor, behavior_logprobs: Tensor, cost: Tensor) -> Part:
        difference = log_ratio(kept, leaf, behavior_logprobs)
        ratio = exponential(difference)
        kept.only_(torch.clamp(ratio, max=cap, out=slope).mul_(cost))
        dropped: Tensor | None = None
        if mask_low is not None or mask_high is not None:
            further = leaf.exp() - behavior_logprobs.exp()
            dropped = ((slope < 0) & (further > limit_high)) | ((slope > 0) & (further < -limit_low))
            slope.masked_fill_(dropped, 0.0)
        part = Part(leaf.clamp(min=_LEAST).mul_(slope))
        part.watch("clip_frac", kept.only_(indicator(torch.gt, ratio, cap)))
        if dropped is not None:
            part.watch("drop_frac", dropped.to(slope.dtype))
        if drift:
            part.value.addcmul_(difference, difference, value=drift)
            slope.add_(difference, alpha=2.0 * drift)
        watch_ratio(part, kept, ratio, difference)
        return part

    return tokens.sum(formula, cost=tokens.cost(advantages))


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
    given = {"old_logprobs": old_logprobs, "entropy": entropy}
    tokens = TokenLoss.of("sapo", logprobs, mask, how, norm_length, sequences, weights, **given)

    def formula(kept: Kept, slope: Tensor, leaf: Tensor, old_logprobs: Tensor, cost: Tensor) -> Part:
        difference = log_ratio(kept, leaf, old_logprobs)
        ratio = exponential(difference)
        # by arithmetic, which is exact with 0 and 1: `where` is slow
        good = indicator(torch.lt, cost, 0.0)
        tau = good * tau_pos + (1.0 - good) * tau_neg
        part = Part(difference)  # its memory is the loss's, as soon as it has been used
        watch_ratio(part, kept, ratio, difference)
        gate = torch.sub(ratio, 1.0, out=part.value).mul_(tau).sigmoid_()
        fall = kept.only_(torch.addcmul(gate, gate, gate, value=-1.0, out=slope).mul_(4.0))  # 4 gate (1 - gate)
        part.watch("gate", fall)
        slope.mul_(ratio).mul_(cost)
        kept.only_(part.value.mul_(cost * (4.0 / tau)))
        return part

    return tokens.sum(formula, cost=tokens.cost(advantages))
