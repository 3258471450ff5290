"""Clipped surrogate losses: PPO, GRPO, DAPO, GSPO and decoupled PPO."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rlinf.algos.losses.aggregate import How
from rlinf.algos.losses.base import HIGHEST_RATIO, Part, TokenLoss, check_clip, log_ratio, watch_ratio
from rlinf.algos.losses.importance import Outside, check_bounds, cut_weights, exponential
from rlinf.algos.tensor import masks
from rlinf.algos.tensor.loss_sum import LossSum
from rlinf.algos.tensor.masks import Kept
from rlinf.algos.tensor.sequences import sequences_in
from rlinf.algos.validation import one_of

Ratio = Literal["token", "sequence"]
RATIOS = ("token", "sequence")


class Clip(NamedTuple):
    """Bounds of a ratio."""

    low: float
    """Clipped below at 1 - low."""
    high: float
    """Clipped above at 1 + high."""
    dual: float | None
    """Clipped above here where A < 0."""


def policy(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    entropy: Tensor | None = None,
    ratio: Ratio = "token",
    weights: Tensor | None = None,
    how: How = "token-mean",
    norm_length: float | None = None,
    sequences: Tensor | None = None,
) -> LossSum:
    """The clipped surrogate.

        r_t = exp(logp_t - old_t)                                      ratio="token"
        r_t = exp(mean over the sequence's tokens of logp - old)       ratio="sequence"
        L_t = max(-A r_t, -A clip(r_t, 1 - clip_low, 1 + clip_high))
        L_t = min(L_t, -dual_clip A)                                   where A < 0, if dual_clip is given

    PPO (arXiv:1707.06347, eq. 7) with a bound of its own on each side (DAPO, arXiv:2503.14476, eq. 10) and, optionally,
    the dual clip (arXiv:1912.09729, eq. 5). `ratio="sequence"` is GSPO (arXiv:2507.18071, eq. 5 to 7) in its token form
    (eq. 13): d r_t / d logp_t = r_t, so that under `how="seq-mean-token-mean"` the gradient is that of eq. 5. How
    tokens are averaged is `how`: "token-mean" is DAPO's (eq. 12), "seq-mean-token-mean" GRPO's (arXiv:2402.03300, eq.
    3); see `aggregate`.

    Args:
        logprobs: log-probs of the sampled tokens under the policy being trained, [rows, tokens] or packed [tokens].
        old_logprobs: the same under the policy that the ratio starts from, same shape; never differentiated.
        advantages: of that shape, or one per row or sequence, [rows] or [sequences]; never differentiated.
        mask: which tokens count, same shape as `logprobs`, bool or 0/1.
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        dual_clip: bound of the loss where A < 0, in units of |A|; more than 1.
        entropy: entropy of each token's distribution, nats, same shape as `logprobs`; only watched.
        ratio: per token, or one per sequence.
        weights: further factors of each token's loss, broadcastable to `logprobs`, such as `importance.weights` gives.
        how, norm_length: of `aggregate.reduce`.
        sequences: sequence of each token, whole numbers from 0, same shape; None: each row is one.

    Returns:
        Sums; metrics `clip_frac` (share of tokens whose gradient the clip removes), `dual_clip_frac`, `approx_kl`
        (mean of r - 1 - log r, an estimate of KL(old || new), nats), `ratio/mean`, `ratio/max`, `entropy`.

    Raises:
        ValueError: shapes do not fit, a bound is out of range, or a name is unknown.
    """
    check_clip("policy", clip_low, clip_high, dual_clip)
    one_of("policy", "ratio", ratio, RATIOS)
    given = {"old_logprobs": old_logprobs, "entropy": entropy}
    tokens = TokenLoss.of("policy", logprobs, mask, how, norm_length, sequences, weights, **given)
    clip = Clip(clip_low, clip_high, dual_clip)
    more = {"mean": _mean_of_sequence(logprobs, old_logprobs, tokens)} if ratio == "sequence" else {}

    def formula(
        kept: Kept, slope: Tensor, leaf: Tensor, old_logprobs: Tensor, cost: Tensor, mean: Tensor | None = None
    ) -> Part:
        if mean is None:
            difference = log_ratio(kept, leaf, old_logprobs)
        else:
            difference = kept.only_(mean.expand(leaf.shape).clone(memory_format=torch.contiguous_format))
        return _clipped(kept, slope, difference, cost, clip)

    return tokens.sum(formula, cost=tokens.cost(advantages), **more)


def _mean_of_sequence(new: Tensor, old: Tensor, tokens: TokenLoss) -> Tensor:
    """The mean log-ratio of its sequence, for each token."""
    grouped = sequences_in(tokens.name, tokens.leaf, tokens.sequences)
    mean = grouped.sum(masks.log_ratio(new, old, tokens.kept)) / grouped.lengths(tokens.kept).clamp(min=1)
    return grouped.spread(mean)


def _clipped(kept: Kept, slope: Tensor, difference: Tensor, cost: Tensor, clip: Clip) -> Part:
    """The clipped surrogate of a block, with the ratio exp(difference), 1 outside the mask; cost is -A.

    Where a bound decides, the larger or smaller term is another one than cost r, and the token has no slope. Without a
    dual clip, the bound where A < 0 is that of all ratios, so that a clamped one has no slope either.
    """
    ratio = exponential(difference)
    part = Part(difference)  # its memory is the loss's, as soon as it has been used
    watch_ratio(part, kept, ratio, difference)
    ceiling = cost.clamp(min=0.0).mul_(HIGHEST_RATIO if clip.dual is None else clip.dual)
    cost = kept.only(cost)
    plain = torch.mul(ratio, cost, out=slope)
    value = torch.clamp(ratio, 1.0 - clip.low, 1.0 + clip.high, out=part.value).mul_(cost)
    torch.maximum(value, plain, out=value)
    bounds = None if clip.dual is None else torch.gt(value, ceiling, out=ratio).sum()
    torch.minimum(value, ceiling, out=value)
    free = torch.eq(value, plain, out=ratio)
    part.watch_lack("clip_frac", free)
    if bounds is not None:
        part.sums["dual_clip_frac"] = bounds
        part.sums["clip_frac"] -= bounds
    slope.mul_(free)
    return part


def _weigh(part: Part, slope: Tensor, kept: Kept, difference: Tensor, cap: float, outside: str) -> None:
    """Multiply by the ratio exp(difference), cut as `importance.weights` does; `difference` is used up."""
    weight, ratio, inside = cut_weights(exponential(difference, difference), kept, cap, 0.0, outside)
    part.value.mul_(weight)
    slope.mul_(weight)
    part.watch("is/mean", ratio)
    part.watch_top("is/max", ratio)
    part.watch_lack("is/outside", inside)


def decoupled(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    cap: float = 2.0,
    outside: Outside = "mask",
    weights: Tensor | None = None,
    entropy: Tensor | None = None,
    how: How = "token-mean",
    norm_length: float | None = None,
    sequences: Tensor | None = None,
) -> LossSum:
    """Decoupled PPO: the policy that the ratio is clipped around is not the one that drew the tokens.

        u_t = exp(logp_t - proximal_t)        w_t = exp(proximal_t - behavior_t)
        L_t = w_t max(-A u_t, -A clip(u_t, 1 - clip_low, 1 + clip_high))

    Hilton et al. (arXiv:2110.00641, eq. 2); AReaL (arXiv:2505.24298, eq. 5). w beyond `cap` is cut to it, or its token
    counts as 0 (`outside="mask"`, still in the denominator). The proximal log-probs are those of the weights just
    before the update, computed anew or by `importance.interpolate`.

    Args:
        logprobs, proximal_logprobs, behavior_logprobs: under the three policies, [rows, tokens] or packed [tokens];
            only the first is differentiated.
        advantages, mask, clip_low, clip_high, dual_clip, entropy: see `policy`.
        cap: largest w.
        outside: what becomes of a larger one, "truncate" or "mask".
        weights: further factors of each token's loss, broadcastable to `logprobs`.
        how, norm_length, sequences: see `policy`.

    Returns:
        Sums; the metrics of `policy`, with the ratio u, and those of `importance.weights`.

    Raises:
        ValueError: as `policy`.
    """
    check_clip("decoupled", clip_low, clip_high, dual_clip)
    check_bounds("decoupled", cap, 0.0, outside)
    given = {"proximal_logprobs": proximal_logprobs, "behavior_logprobs": behavior_logprobs, "entropy": entropy}
    tokens = TokenLoss.of("decoupled", logprobs, mask, how, norm_length, sequences, weights, **given)
    clip = Clip(clip_low, clip_high, dual_clip)

    def formula(
        kept: Kept, slope: Tensor, leaf: Tensor, proximal_logprobs: Tensor, behavior_logprobs: Tensor, cost: Tensor
    ) -> Part:
        part = _clipped(kept, slope, log_ratio(kept, leaf, proximal_logprobs), cost, clip)
        _weigh(part, slope, kept, log_ratio(kept, proximal_logprobs, behavior_logprobs), cap, outside)
        return part

    return tokens.sum(formula, cost=tokens.cost(advantages))
