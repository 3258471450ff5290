"""Losses of tokens, each written as its paper has it; autograd gives the gradient.

A loss reads its tensors by way of `Tokens`, which puts 0 in place of what does not count before anything is computed
of it: then every ratio there is 1, every loss 0, and no NaN or infinity can reach a gradient. What comes out is a
`LossSum`: an un-normalised sum, its weight, and metrics. Everything is float32 (float64 stays).

    policy, decoupled           clipped surrogates: PPO, GRPO, DAPO, GSPO and decoupled PPO
    cispo, aipo, sapo, dro      surrogates with weights, with a gate, or with a square penalty, in place of the clip
    supervised, kl, entropy_bonus, value        likelihood of given answers, terms beside a surrogate, the critic
    weights, drifted, rejected, interpolate     corrections for tokens of an older policy or of the inference engine
    mismatch, by_age            metrics of how far those are from the policy

`reduce` sums losses of tokens, in one of four ways that differ in a coefficient per token and a weight:

    how                        coefficient of token t of sequence s     weight
    token-mean                 1                                        tokens
    seq-mean-token-sum         1                                        sequences
    seq-mean-token-mean        1 / tokens of s                          sequences
    seq-mean-token-sum-norm    1                                        sequences x norm_length

A sequence without a token that counts is none: padding rows, or an empty share, change nothing. Where a mask of floats
gives the tokens of a sequence a weight w, coefficient and weight are both w times as large.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypedDict, Unpack, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from rlinf.algos.loss_sum import (
    LOG_RATIO,
    EffectiveSize,
    Explained,
    LossSum,
    Mask,
    Metric,
    Sequences,
    finite,
    mean_of,
    one_of,
    same_shape,
    sequences_in,
    wide,
    within,
)

How = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
HOWS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
Ratio = Literal["token", "sequence"]
RATIOS = ("token", "sequence")
Kind = Literal["k1", "k2", "k3", "abs"]
KINDS = ("k1", "k2", "k3", "abs")
Level = Literal["token", "sequence", "geometric"]
LEVELS = ("token", "sequence", "geometric")
Outside = Literal["truncate", "mask"]
OUTSIDES = ("truncate", "mask")
Error = Literal["huber", "square"]
ERRORS = ("huber", "square")

CUT = 10.0
"""Bound of k3's result, nats, as in verl: one absurd token must not outweigh a batch of sound ones."""
_WIDEST = 80.0
"""Bound of d, nats, where k3 is not cut: exp of it is still a number in float32."""
_LEAST = -1e4
"""Floor of a log-prob in a loss's value, nats: far below what exists, and a sum of millions stays within float32."""


class Aggregating(TypedDict, total=False):
    """How losses of tokens become one sum: by keyword, to every loss."""

    how: How
    """See the table above."""
    norm_length: float | None
    """Constant that `seq-mean-token-sum-norm` divides by, tokens: the longest response allowed. None elsewhere."""
    sequences: Tensor | None
    """Sequence of each token, whole numbers from 0, in the shape of the log-probs; None: each row is one."""


class Options(Aggregating, total=False):
    """Further keywords of every surrogate."""

    weights: Tensor | None
    """Factors of each token's loss, broadcastable to the log-probs, such as `weights` gives."""
    entropy: Tensor | None
    """Entropy of each token's distribution, nats, in the shape of the log-probs; only watched."""


class Weighing(Options, total=False):
    """Further keywords of a surrogate that weighs tokens by how far the policy was from the one that drew them, w."""

    cap: float
    """Largest w; 2.0 where it is not given."""
    outside: Outside
    """Effect of a larger one: "truncate", or, where it is not given, "mask"."""


def policy(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    ratio: Ratio = "token",
    **options: Unpack[Options],
) -> LossSum:
    """The clipped surrogate.

        r_t = exp(logp_t - old_t)                                              ratio="token"
        r_t = sg[exp(mean over the sequence of logp - old)] p_t / sg[p_t]      ratio="sequence"
        L_t = max(-A r_t, -A clip(r_t, 1 - clip_low, 1 + clip_high))
        L_t = min(L_t, -dual_clip A)                                           where A < 0, if dual_clip is given

    PPO (arXiv:1707.06347, eq. 7) with a bound of its own on each side (DAPO, arXiv:2503.14476, eq. 10) and, optionally,
    the dual clip (arXiv:1912.09729, eq. 5). `ratio="sequence"` is GSPO (arXiv:2507.18071, eq. 5 to 7) in its token form
    (eq. 13; sg stops the gradient): under `how="seq-mean-token-mean"` the gradient is that of eq. 5. How tokens are
    averaged is `how`: "token-mean" is DAPO's (eq. 12), "seq-mean-token-mean" GRPO's (arXiv:2402.03300, eq. 3).

    Args:
        logprobs: log-probs of the sampled tokens under the policy being trained, [rows, tokens] or packed [tokens].
        old_logprobs: the same under the policy that the ratio starts from, same shape; never differentiated.
        advantages: of that shape, or one per row or sequence, [rows] or [sequences]; never differentiated.
        mask: which tokens count, same shape as `logprobs`, bool or 0/1; in floats, how much each counts.
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        dual_clip: bound of the loss where A < 0, in units of |A|; more than 1.
        ratio: per token, or one per sequence.
        options: see `Options`.

    Returns:
        Sums; metrics `clip_frac` (share of tokens whose gradient the clip removes), `dual_clip_frac`, `approx_kl`
        (mean of r - 1 - log r, an estimate of KL(old || new), nats), `ratio/mean`, `ratio/max`, `entropy`.

    Raises:
        ValueError: shapes do not fit, a bound is out of range, or a name is unknown.
    """
    check_clip("policy", clip_low, clip_high, dual_clip)
    one_of("policy", "ratio", ratio, RATIOS)
    tokens = Tokens.of("policy", logprobs, mask, options, old_logprobs=old_logprobs)
    new, old, A = tokens.read(logprobs), tokens.constant(old_logprobs), tokens.advantages(advantages)
    log_r = _log_ratio(new, old)
    if ratio == "sequence":
        log_r = tokens.sequence_mean(log_r.detach()) + (new - new.detach())
    loss, metrics = _clipped(log_r, A, clip_low, clip_high, dual_clip)
    return tokens.sum(loss, metrics)


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
    **options: Unpack[Weighing],
) -> LossSum:
    """Decoupled PPO: the policy that the ratio is clipped around is not the one that drew the tokens.

        u_t = exp(logp_t - proximal_t)        w_t = exp(proximal_t - behavior_t)
        L_t = w_t max(-A u_t, -A clip(u_t, 1 - clip_low, 1 + clip_high))

    Hilton et al. (arXiv:2110.00641, eq. 2); AReaL (arXiv:2505.24298, eq. 5). w beyond `cap` is cut to it, or its token
    counts as 0 (`outside="mask"`, still in the denominator). The proximal log-probs are those of the weights just
    before the update, computed anew or by `interpolate`.

    Args:
        logprobs, proximal_logprobs, behavior_logprobs: under the three policies, [rows, tokens] or packed [tokens];
            only the first is differentiated.
        advantages, mask, clip_low, clip_high, dual_clip: see `policy`.
        options: see `Weighing`.

    Returns:
        Sums; the metrics of `policy`, with the ratio u, and those of `weights`.

    Raises:
        ValueError: as `policy`.
    """
    cap, outside = options.pop("cap", 2.0), options.pop("outside", "mask")
    check_clip("decoupled", clip_low, clip_high, dual_clip)
    check_bounds("decoupled", cap, 0.0, outside)
    others = {"proximal_logprobs": proximal_logprobs, "behavior_logprobs": behavior_logprobs}
    tokens = Tokens.of("decoupled", logprobs, mask, options, **others)
    new, proximal, behavior = (
        tokens.read(logprobs),
        tokens.constant(proximal_logprobs),
        tokens.constant(behavior_logprobs),
    )
    loss, metrics = _clipped(_log_ratio(new, proximal), tokens.advantages(advantages), clip_low, clip_high, dual_clip)
    w, more = _cut_weights(_log_ratio(proximal, behavior).exp(), cap, 0.0, outside)
    return tokens.sum(w * loss, metrics | more)


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
    **options: Unpack[Options],
) -> LossSum:
    """Clipped importance weights on the likelihood: no token loses its gradient.

        r_t = exp(logp_t - old_t)
        L_t = -sg[clip(r_t, 1 - clip_low, 1 + clip_high)] A logp_t

    CISPO (MiniMax-M1, arXiv:2506.13585, eq. 4 and 5); sg stops the gradient. The defaults leave the lower side open and
    cut r at 5, as ScaleRL does (arXiv:2510.13786).

    Args:
        logprobs, old_logprobs, advantages, mask: see `policy`.
        clip_low, clip_high: the weight is clipped to [1 - clip_low, 1 + clip_high].
        options: see `Options`.

    Returns:
        Sums; metrics `clip_frac` (share of tokens whose weight is cut), `approx_kl`, `ratio/mean`, `ratio/max`,
        `entropy`.

    Raises:
        ValueError: shapes do not fit, or a bound is out of range.
    """
    check_clip("cispo", clip_low, clip_high)
    tokens = Tokens.of("cispo", logprobs, mask, options, old_logprobs=old_logprobs)
    new, old, A = tokens.read(logprobs), tokens.constant(old_logprobs), tokens.advantages(advantages)
    log_r = _log_ratio(new.detach(), old)
    r = log_r.exp()
    w = r.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -w * A * new.clamp(min=_LEAST)
    return tokens.sum(loss, {"clip_frac": w != r, **_ratio_metrics(r, log_r)})


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
    **options: Unpack[Options],
) -> LossSum:
    """Off-policy policy gradient with weights cut from above, and optionally held near the policy that sampled.

        r_t = exp(logp_t - behavior_t)
        L_t = -sg[min(r_t, cap)] A logp_t + drift (log r_t)^2

    AIPO (LlamaRL, arXiv:2505.24034, section 5). With the bounds, a token's first term is dropped where the update would
    carry the probability further away than it already is: A > 0 and pi - mu > mask_high, or A < 0 and mu - pi >
    mask_low (probabilities, not log-probs); together with `drift` that is the default of prime-rl.

    Args:
        logprobs, advantages, mask: see `policy`.
        behavior_logprobs: under the policy that drew the tokens, same shape; never differentiated.
        cap: largest weight.
        mask_low, mask_high: largest distance in probability, 0 to 1; None for no bound.
        drift: coefficient of the squared log-ratio.
        options: see `Options`.

    Returns:
        Sums; metrics `clip_frac` (share of tokens whose weight is cut), `drop_frac` (with bounds), `approx_kl`,
        `ratio/mean`, `ratio/max`, `entropy`.

    Raises:
        ValueError: shapes do not fit, or a bound is out of range.
    """
    check_aipo("aipo", cap, mask_low, mask_high, drift)
    tokens = Tokens.of("aipo", logprobs, mask, options, behavior_logprobs=behavior_logprobs)
    new, behavior, A = tokens.read(logprobs), tokens.constant(behavior_logprobs), tokens.advantages(advantages)
    log_r = _log_ratio(new, behavior)
    r = log_r.detach().exp()
    metrics = {"clip_frac": r > cap, **_ratio_metrics(r, log_r)}
    w = r.clamp(max=cap)
    if mask_low is not None or mask_high is not None:
        low, high = (1.0 if bound is None else bound for bound in (mask_low, mask_high))
        rise = new.detach().exp() - behavior.exp()
        metrics["drop_frac"] = dropped = ((A > 0) & (rise > high)) | ((A < 0) & (-rise > low))
        w = torch.where(dropped, 0.0, w)
    loss = -w * A * new.clamp(min=_LEAST)
    return tokens.sum(loss + drift * log_r.square() if drift else loss, metrics)


def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    **options: Unpack[Options],
) -> LossSum:
    """A soft gate instead of a clip.

        r_t = exp(logp_t - old_t)        tau = tau_pos where A > 0, else tau_neg
        L_t = -(4 / tau) sigmoid(tau (r_t - 1)) A

    SAPO (arXiv:2511.20347, eq. 5 and 6); at r = 1 the gradient is that of the plain policy gradient. The paper averages
    by "seq-mean-token-mean".

    Args:
        logprobs, old_logprobs, advantages, mask: see `policy`.
        tau_pos, tau_neg: how fast the gradient falls off with the distance of r from 1; more than 0.
        options: see `Options`.

    Returns:
        Sums; metrics `gate` (mean of the factor that the gate puts on the gradient, 1 at r = 1), `approx_kl`,
        `ratio/mean`, `ratio/max`, `entropy`.

    Raises:
        ValueError: shapes do not fit, or a temperature is not positive.
    """
    check_sapo("sapo", tau_pos, tau_neg)
    tokens = Tokens.of("sapo", logprobs, mask, options, old_logprobs=old_logprobs)
    new, old, A = tokens.read(logprobs), tokens.constant(old_logprobs), tokens.advantages(advantages)
    log_r = _log_ratio(new, old)
    r = log_r.exp()
    tau = torch.where(A > 0, A.new_full((), tau_pos), tau_neg)
    gate = torch.sigmoid(tau * (r - 1.0))
    loss = -(4.0 / tau) * gate * A
    fall = (4.0 * gate * (1.0 - gate)).detach()
    return tokens.sum(loss, {"gate": fall, **_ratio_metrics(r, log_r)})


def dro(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    beta: float = 0.05,
    **options: Unpack[Options],
) -> LossSum:
    """The likelihood weighted by advantages, with a square penalty instead of a clip.

        L_t = -A logp_t + (beta / 2) (logp_t - old_t)^2

    DRO (arXiv:2405.19107, section 3.2) in its token form, as Kimi k1.5 has it (arXiv:2501.12599, eq. 3). It may learn
    from tokens of any policy; there is no ratio.

    Args:
        logprobs, old_logprobs, advantages, mask: see `policy`.
        beta: coefficient of the penalty, at least 0.
        options: see `Options`.

    Returns:
        Sums; metrics `approx_kl`, `ratio/mean`, `ratio/max`, `entropy`.

    Raises:
        ValueError: shapes do not fit, or the coefficient is negative.
    """
    within("dro", "beta", beta, 0.0)
    tokens = Tokens.of("dro", logprobs, mask, options, old_logprobs=old_logprobs)
    new, old, A = tokens.read(logprobs), tokens.constant(old_logprobs), tokens.advantages(advantages)
    log_r = new.clamp(min=_LEAST) - old.clamp(min=_LEAST)
    loss = -A * new.clamp(min=_LEAST) + 0.5 * beta * log_r.square()
    log_r = log_r.detach().clamp(-LOG_RATIO, LOG_RATIO)
    return tokens.sum(loss, _ratio_metrics(log_r.exp(), log_r))


def supervised(logprobs: Tensor, mask: Tensor, **options: Unpack[Aggregating]) -> LossSum:
    """Negative log-likelihood of given answers: L_t = -logp_t. Maximum likelihood, nats per token.

    Args:
        logprobs: log-probs of the answers' tokens, [rows, tokens] or [tokens].
        mask: which tokens count, same shape, bool or 0/1.
        options: see `Aggregating`.

    Raises:
        ValueError: shapes differ.
    """
    tokens = Tokens.of("supervised", logprobs, mask, options)
    return tokens.sum(-tokens.read(logprobs), {})


def kl(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    *,
    kind: Kind = "k3",
    cut: float | None = CUT,
    old_logprobs: Tensor | None = None,
    **options: Unpack[Aggregating],
) -> LossSum:
    """KL penalty towards a reference: L_t = KL_t of `estimate`, to be added with `LossSum.plus`.

    With `old_logprobs` it is corrected for tokens that an older policy drew: L_t = r_t KL_t with r_t = exp(logp_t -
    old_t), whose gradient includes that of r (DeepSeek-V3.2, arXiv:2512.02556, section 3.1). r is clamped like every
    ratio.

    Args:
        logprobs: of the policy, [rows, tokens] or packed [tokens]; differentiable.
        ref_logprobs: of the reference, same shape; never differentiated.
        mask: which tokens count, same shape.
        kind: "k1", "k2", "k3" or "abs".
        cut: bound of k3, nats, beyond which a token has no gradient; None for none.
        old_logprobs: of the policy that sampled, same shape; None leaves r out.
        options: see `Aggregating`; the same as those of the loss it is added to.

    Returns:
        Sums; metric `kl`, the mean of KL_t (without r), nats, and for k3 `kl/cut`, the share of tokens that are cut.

    Raises:
        ValueError: shapes differ, or a name is unknown.
    """
    one_of("kl", "kind", kind, KINDS)
    tokens = Tokens.of("kl", logprobs, mask, options, ref_logprobs=ref_logprobs, old_logprobs=old_logprobs)
    new = tokens.read(logprobs)
    each = _divergence(new - tokens.constant(ref_logprobs), kind, cut)
    metrics = {"kl": each}
    if kind == "k3" and cut is not None:
        metrics["kl/cut"] = each >= cut
    r = 1.0 if old_logprobs is None else _log_ratio(new, tokens.constant(old_logprobs)).exp()
    return tokens.sum(r * each, metrics)


def estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: Kind = "k3", *, cut: float | None = CUT) -> Tensor:
    """KL(policy || reference) at each sampled token; the tokens are the policy's.

        d = logprobs - ref_logprobs
        k1 = d        k2 = d^2 / 2        k3 = exp(-d) - 1 + d        abs = |d|

    J. Schulman, "Approximating KL divergence", 2020; k3 is GRPO's (arXiv:2402.03300, eq. 4). k1 and k3 estimate the
    divergence without bias; the gradient of k2 is an unbiased one of the divergence, that of k1 has mean zero (so use
    k1 in rewards, not in losses), and k3's is that of the reverse divergence. d is clamped to +-20, and k3 to `cut`;
    beyond the clamp the gradient is 0. So with the cut of 10 a token is not pulled back any more once the policy gives
    it exp(-2.56) of the reference's probability, and the estimate is too low.

    Args:
        logprobs: of the policy, nats, any shape; differentiable.
        ref_logprobs: of the reference, same shape; never differentiated.
        kind: which estimate.
        cut: bound of k3, nats; None for none.

    Returns:
        Nats, same shape, float32 (float64 if `logprobs` are).

    Raises:
        ValueError: shapes differ, or `kind` is unknown.
    """
    same_shape("kl.estimate", "logprobs", logprobs, ref_logprobs=ref_logprobs)
    one_of("kl.estimate", "kind", kind, KINDS)
    return _divergence(finite(logprobs) - finite(ref_logprobs.detach()), kind, cut)


def _divergence(d: Tensor, kind: str, cut: float | None) -> Tensor:
    """The estimate from d = logprobs - ref_logprobs."""
    if kind == "k3" and cut is None:
        d = d.clamp(min=-_WIDEST)
        return torch.expm1(-d) + d
    d = d.clamp(-LOG_RATIO, LOG_RATIO)
    if kind == "k3":
        return (torch.expm1(-d) + d).clamp(max=cut)
    return {"k1": d, "k2": d.square() / 2, "abs": d.abs()}[kind]


def entropy_bonus(entropy: Tensor, mask: Tensor, **options: Unpack[Aggregating]) -> LossSum:
    """Reward for staying undecided: L_t = -H_t, to be added with `LossSum.plus`.

    Args:
        entropy: entropy of each token's distribution, nats, [rows, tokens] or packed [tokens]; differentiable.
        mask: which tokens count, same shape.
        options: see `Aggregating`; the same as those of the loss it is added to.

    Returns:
        Sums; metric `entropy`, nats.

    Raises:
        ValueError: shapes differ.
    """
    tokens = Tokens.of("entropy_bonus", entropy, mask, options)
    H = tokens.read(entropy)
    return tokens.sum(-H, {"entropy": H})


def value(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip: float | None = 0.2,
    error: Error = "huber",
    delta: float = 10.0,
    **options: Unpack[Aggregating],
) -> LossSum:
    """Clipped value loss: predicted against observed returns, with a bound on how far one batch may move a prediction.

        v_clip = v_old + clip(v - v_old, -clip, clip)
        L      = max(h(v - R), h(v_clip - R))
        h(e)   = e^2                                   error="square"
        h(e)   = e^2 / 2 if |e| <= delta, else delta (|e| - delta / 2)        error="huber"

    PPO's critic (arXiv:1707.06347, eq. 9) with the clip of its reference implementation (arXiv:2005.12729, section 3).

    Args:
        values: predictions of the critic being trained, [rows, tokens] or packed [tokens]; differentiable.
        old_values: predictions when the batch was drawn, same shape.
        returns: what was observed, same shape.
        mask: which positions count, same shape, bool or 0/1.
        clip: how far a prediction may move, in units of return; None for no bound.
        error: "huber" or "square".
        delta: where Huber's error turns from square to straight; more than 0.
        options: see `Aggregating`.

    Returns:
        Sums; metrics `value_clip_frac` (share of predictions that have moved beyond the bound), `explained_variance`,
        `value/mean`, `return/mean`.

    Raises:
        ValueError: shapes differ, a bound is out of range, or a name is unknown.
    """
    check_value("value", error, delta, clip)
    tokens = Tokens.of("value", values, mask, options, old_values=old_values, returns=returns)
    v, v_old, R = tokens.read(values), tokens.constant(old_values), tokens.constant(returns)

    def h(prediction: Tensor) -> Tensor:
        if error == "square":
            return (prediction - R).square()
        return F.huber_loss(prediction, R, reduction="none", delta=delta)

    loss, metrics = h(v), {"value/mean": v, "return/mean": R}
    if clip is not None:
        v_clip = v_old + (v - v_old).clamp(-clip, clip)
        loss = torch.maximum(loss, h(v_clip))
        metrics["value_clip_frac"] = (v - v_old).abs() > clip
    summed = tokens.sum(loss, metrics)
    return summed.watching({"explained_variance": Explained.of(v, R, tokens.mask)})


def weights(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    *,
    cap: float = 2.0,
    floor: float = 0.0,
    level: Level = "token",
    outside: Outside = "truncate",
    sequences: Tensor | None = None,
) -> tuple[Tensor, dict[str, Metric]]:
    """Importance weights, which make tokens drawn by one policy count as if another had drawn them.

        w_t = exp(logp_t - behavior_t)                      level="token": biased, little variance
        w_t = exp(sum of that over t's sequence)            level="sequence": unbiased before it is cut, more variance
        w_t = exp(mean of that over t's sequence)           level="geometric": no wider for longer sequences
        w   = clip(w, floor, cap)                           outside="truncate"
        w   = w if floor <= w <= cap else 0                 outside="mask"

    Truncated importance sampling (Yao et al., "Your efficient RL framework secretly brings you off-policy RL training",
    2025) and its masked form (IcePop, Ling team, 2025; there 0.5 and 2 to 5). The geometric mean of a sequence's ratios
    is the ratio of GSPO (arXiv:2507.18071, eq. 7). A masked token stays in the denominator of the loss, so that the
    rest is not scaled up. The inference engine and the trainer never agree exactly on the same weights; an older policy
    agrees even less.

    Args:
        logprobs: under the policy to correct towards (the trainer's, for the weights that sampled), [rows, tokens] or
            packed [tokens].
        behavior_logprobs: under what drew the tokens, same shape.
        mask: which tokens count, same shape, bool or 0/1.
        cap, floor: bounds of a weight.
        level: a weight per token, or one per sequence: the product of its tokens' ratios, or their geometric mean.
        outside: what becomes of a weight outside the bounds.
        sequences: sequence of each token, whole numbers from 0, same shape; None: each row is one.

    Returns:
        Weights in the shape of `logprobs`, 0 outside the mask; metrics `is/mean` and `is/max` of the weights before
        they are cut, `is/outside` the share of tokens whose weight is beyond a bound.

    Raises:
        ValueError: shapes differ, bounds are out of order, or a name is unknown.
    """
    one_of("importance.weights", "level", level, LEVELS)
    check_bounds("importance.weights", cap, floor, outside)
    others = {"behavior_logprobs": behavior_logprobs}
    tokens = Tokens.of("importance.weights", logprobs, mask, {"sequences": sequences}, **others)
    log_w = _log_ratio(tokens.constant(logprobs), tokens.constant(behavior_logprobs))
    if level == "sequence":
        log_w = tokens.sequence_sum(log_w).clamp(-LOG_RATIO, LOG_RATIO)
    elif level == "geometric":
        log_w = tokens.sequence_mean(log_w)
    w, metrics = _cut_weights(log_w.exp().expand(mask.shape), cap, floor, outside)
    return tokens.mask.fill(w), tokens.mask.watch(metrics)


def drifted(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    most: float,
    sequences: Tensor | None = None,
) -> tuple[Tensor, dict[str, Metric]]:
    """Weights that leave out bad answers which the policy has already left behind.

        w_t = 0 where A < 0 and mean over the sequence of (old - logp) > most, else 1

    Off-policy sequence masking, DeepSeek-V3.2 (arXiv:2512.02556, section 3.1). What is left out stays in the
    denominator.

    Args:
        logprobs: under the policy being trained, [rows, tokens] or packed [tokens].
        old_logprobs: under the policy that drew the tokens, same shape.
        advantages: of that shape, or one per row or sequence.
        mask: which tokens count, same shape.
        most: mean drift allowed, nats per token.
        sequences: see `weights`.

    Returns:
        Weights 0 or 1 that broadcast to `logprobs`; metric `drifted`, the share of tokens left out.

    Raises:
        ValueError: shapes differ.
    """
    where = "importance.drifted"
    tokens = Tokens.of(where, logprobs, mask, {"sequences": sequences}, old_logprobs=old_logprobs)
    drift = tokens.sequence_mean(_log_ratio(tokens.constant(old_logprobs), tokens.constant(logprobs)))
    return tokens.leave_out("drifted", (tokens.advantages(advantages) < 0) & (drift > most))


def rejected(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    *,
    floor: float,
    cap: float,
    least: float = 0.0,
    sequences: Tensor | None = None,
) -> tuple[Tensor, dict[str, Metric]]:
    """Weights that leave out whole sequences which the policy would hardly have drawn.

        w_t = 1 where floor <= exp(mean over t's sequence of (logp - behavior)) <= cap
                and every ratio exp(logp - behavior) of the sequence is at least `least`, else 0

    Rejection by the geometric mean of the ratios (Liu, Li et al., "When speed kills stability: demystifying RL collapse
    from the training-inference mismatch", 2025; there 0.999 to 1.001 for long answers of the same weights), with their
    veto of single tokens. What is left out stays in the denominator.

    Args:
        logprobs: under the policy to correct towards, [rows, tokens] or packed [tokens].
        behavior_logprobs: under what drew the tokens, same shape.
        mask: which tokens count, same shape.
        floor, cap: bounds of a sequence's geometric mean ratio.
        least: smallest ratio that any token of it may have; 0 for no bound.
        sequences: see `weights`.

    Returns:
        Weights 0 or 1 that broadcast to `logprobs`; metric `rejected`, the share of tokens left out.

    Raises:
        ValueError: shapes differ, or bounds are out of order.
    """
    check_rejection("importance.rejected", floor, cap, least)
    others = {"behavior_logprobs": behavior_logprobs}
    tokens = Tokens.of("importance.rejected", logprobs, mask, {"sequences": sequences}, **others)
    log_r = _log_ratio(tokens.constant(logprobs), tokens.constant(behavior_logprobs))
    mean = tokens.sequence_mean(log_r).exp()
    out = (mean < floor) | (mean > cap)
    if least:
        out = out | (tokens.sequence_sum((log_r < math.log(least)).to(log_r.dtype)) > 0)
    return tokens.leave_out("rejected", out)


def interpolate(
    logprobs: Tensor, behavior_logprobs: Tensor, versions: Tensor, *, current: int, proximal: int | None = None
) -> Tensor:
    """Proximal log-probs without a forward pass, on the line between the policies before and after.

        a = (v_prox - v_behavior) / (v_current - v_behavior), within 0 and 1
        log pi_prox = log pi_behavior + a (log pi - log pi_behavior)

    AReaL's log-linear approximation of decoupled PPO. Tokens of the proximal version or newer have a = 0: there the
    proximal policy is the one that drew them.

    Args:
        logprobs: under the policy being trained, any shape; not differentiated.
        behavior_logprobs: under the policy that drew the tokens, same shape.
        versions: version of the weights that drew each token, whole numbers, same shape.
        current: version that the weights being trained will have.
        proximal: version of the proximal weights; None for current - 1, those just before the update.

    Returns:
        Log-probs in the shape of `logprobs`, without gradient.

    Raises:
        ValueError: shapes differ, or the proximal version is not before the current one.
    """
    same_shape("interpolate", "logprobs", logprobs, behavior_logprobs=behavior_logprobs, versions=versions)
    proximal = current - 1 if proximal is None else proximal
    if proximal >= current:
        raise ValueError(f"interpolate: proximal={proximal} must be before current={current}")
    behind = wide(versions.detach())
    a = ((proximal - behind) / (current - behind).clamp(min=1)).clamp(0.0, 1.0)
    new, old = wide(logprobs.detach()), wide(behavior_logprobs.detach())
    return old + torch.where(a == 0, 0.0, a * (new - old))  # 0 x inf would be NaN


def mismatch(logprobs: Tensor, engine_logprobs: Tensor, mask: Tensor) -> dict[str, Metric]:
    """Distance of the trainer's log-probs from the inference engine's for the same tokens and weights.

    Args:
        logprobs, engine_logprobs: [rows, tokens] or [tokens].
        mask: which tokens count, same shape, bool or 0/1.

    Returns:
        Metrics `mismatch/mean` and `mismatch/max` of |logp_trainer - logp_engine|, nats.

    Raises:
        ValueError: shapes differ.
    """
    same_shape("mismatch", "logprobs", logprobs, engine_logprobs=engine_logprobs, mask=mask)
    ours, theirs = wide(logprobs.detach()), wide(engine_logprobs.detach())
    distance = torch.where(ours == theirs, 0.0, (ours - theirs).abs())  # -inf - -inf would be NaN
    return Mask.of(mask, ours).watch({"mismatch/mean": distance, "mismatch/max": distance})


def by_age(
    logprobs: Tensor, behavior_logprobs: Tensor, versions: Tensor, mask: Tensor, *, current: int, oldest: int
) -> dict[str, Metric]:
    """Distance of the policy from tokens of older weights, age by age.

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
    tokens = Tokens.of("by_age", logprobs, mask, {}, behavior_logprobs=behavior_logprobs, versions=versions)
    counted, age = tokens.mask.inside, (current - versions.long()).clamp(0, oldest)
    log_r = _log_ratio(tokens.constant(logprobs), tokens.constant(behavior_logprobs)).double()
    metrics = mismatch(logprobs, behavior_logprobs, counted & (age == 0))
    for number in range(1, oldest + 1):
        metrics[f"staleness/drift/{number}"] = mean_of(log_r.abs(), counted & (age == number))
    return {**metrics, "staleness/ess": EffectiveSize.of(log_r.exp(), tokens.mask)}


def reduce(
    loss: Tensor,
    mask: Tensor,
    how: How = "token-mean",
    norm_length: float | None = None,
    *,
    sequences: Tensor | None = None,
) -> LossSum:
    """Sum the losses of tokens, with the weight that makes the sum the mean asked for.

    `token-mean` is DAPO's (arXiv:2503.14476, eq. 12); `seq-mean-token-mean` GRPO's (arXiv:2402.03300, eq. 3);
    `seq-mean-token-sum-norm` Dr. GRPO's (arXiv:2503.20783, listing 1).

    Args:
        loss: of each token, [rows, tokens] or packed [tokens]; differentiable. It may be NaN where it does not count,
            but what it was computed from may not: autograd would carry 0 x NaN back.
        mask: which tokens count, same shape, bool or 0/1.
        how, norm_length, sequences: see `Aggregating`.

    Returns:
        The sum, differentiable by `loss`, and its weight; `.mean()` divides.

    Raises:
        ValueError: shapes do not fit, `how` is unknown, or `norm_length` is missing or would be ignored.
    """
    same_shape("reduce", "loss", loss, mask=mask)
    aggregation: Options = {"how": how, "norm_length": norm_length, "sequences": sequences}
    tokens = Tokens("reduce", Mask.of(mask, loss), aggregation)
    return tokens.sum(tokens.read(loss), {})


def coefficients(
    where: str, mask: Mask, how: str, norm_length: float | None, sequences: Tensor | None
) -> tuple[Tensor | None, Tensor]:
    """The coefficient of each token and the weight of all.

    Args:
        where: function to name in errors.
        mask: which tokens count.
        how, norm_length, sequences: see `Aggregating`.

    Returns:
        The coefficient, broadcastable to the tokens' shape, or None for 1 everywhere; the weight, [], float64.
    """
    one_of(where, "how", how, HOWS)
    if (norm_length is not None) != (how == "seq-mean-token-sum-norm"):
        raise ValueError(
            f"{where}: norm_length={norm_length} with how={how!r}: 'seq-mean-token-sum-norm' needs it, no other has it"
        )
    if norm_length is not None and not norm_length > 0:
        raise ValueError(f"{where}: norm_length={norm_length} must be more than 0")
    each = mask.weight
    if how == "token-mean":
        return each, mask.number if each is None else each.double().sum()
    grouped = sequences_in(where, mask.inside, sequences)
    lengths = grouped.lengths(mask)
    share = 1.0 / lengths.clamp(min=1)
    filled = (lengths > 0).sum().double() if each is None else (grouped.sum(each) * share).double().sum()
    if how == "seq-mean-token-mean":
        share = grouped.spread(share)
        return share if each is None else share * each, filled
    return each, filled * (norm_length or 1.0)


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a micro-batch: reads tensors without what does not count, then sums, weighs and watches a loss."""

    name: str
    """The loss, for errors."""
    mask: Mask
    options: Options

    @classmethod
    def of(cls, name: str, leaf: Tensor, mask: Tensor, options: Aggregating, **others: Tensor | None) -> Tokens:
        """Check names of options, and that `mask`, `others` and the entropy have the shape of `leaf`."""
        further = cast(Options, options)
        if unknown := sorted(options.keys() - Options.__optional_keys__):
            raise TypeError(f"{name}() got an unexpected keyword argument {unknown[0]!r}")
        like = "values" if name == "value" else "logprobs"
        same_shape(name, like, leaf, mask=mask, **others, entropy=further.get("entropy"))
        return cls(name, Mask.of(mask, leaf), further)

    def read(self, x: Tensor) -> Tensor:
        """`x`, differentiable, with 0 where it does not count and something finite for -inf."""
        return self.mask.fill(x)

    def constant(self, x: Tensor) -> Tensor:
        """`read` without gradient."""
        return self.mask.fill(x.detach())

    def advantages(self, advantages: Tensor) -> Tensor:
        """The advantage of each token, without gradient, from one per token, row or sequence."""
        inside, ids = self.mask.inside, self.options.get("sequences")
        if advantages.shape == inside.shape:
            return self.constant(advantages)
        fits = advantages.ndim == 1 and (ids is not None or inside.ndim == 2)
        grouped = self.sequences() if fits else None
        if grouped is None or len(advantages) < grouped.number or (ids is None and len(advantages) > grouped.number):
            raise ValueError(
                f"{self.name}: advantages {list(advantages.shape)} fit neither logprobs {list(inside.shape)} nor one "
                + (f"per row {list(inside.shape[:1])}" if ids is None else "per sequence [sequences]")
            )
        return self.constant(grouped.spread(advantages).expand(inside.shape))

    def sequences(self) -> Sequences:
        """The sequences that tokens belong to."""
        return sequences_in(self.name, self.mask.inside, self.options.get("sequences"))

    def sequence_sum(self, x: Tensor) -> Tensor:
        """The sum of `x` over its sequence, for each token; `x` is 0 outside the mask."""
        grouped = self.sequences()
        return grouped.spread(grouped.sum(x))

    def sequence_mean(self, x: Tensor) -> Tensor:
        """The mean of `x` over what counts of its sequence, for each token; `x` is 0 outside the mask."""
        grouped = self.sequences()
        return grouped.spread(grouped.sum(x) / grouped.lengths(self.mask).clamp(min=1))

    def leave_out(self, name: str, out: Tensor) -> tuple[Tensor, dict[str, Metric]]:
        """Weights 0 where `out` holds and 1 elsewhere; the share of what is left out, as the metric `name`."""
        out = out & self.mask.inside
        return (~out).to(self.mask.dtype), self.mask.watch({name: out})

    def sum(self, loss: Tensor, metrics: Mapping[str, Tensor]) -> LossSum:
        """The loss of the micro-batch.

        Args:
            loss: of each token, 0 outside the mask.
            metrics: see `Mask.watch`.
        """
        options, watched = self.options, dict(metrics)
        aggregation = options.get("how", "token-mean"), options.get("norm_length"), options.get("sequences")
        coefficient, weight = coefficients(self.name, self.mask, *aggregation)
        weights, entropy = options.get("weights"), options.get("entropy")
        if weights is not None:
            loss = loss * self.constant(weights.expand_as(loss))
        if coefficient is not None:
            loss = loss * coefficient
        if entropy is not None:
            watched["entropy"] = entropy
        return LossSum(loss.sum(), weight, self.mask.watch(watched))


def _log_ratio(new: Tensor, old: Tensor) -> Tensor:
    """log(new / old), clamped to +-20: beyond, a ratio is constant."""
    return (new - old).clamp(-LOG_RATIO, LOG_RATIO)


def _clipped(
    log_r: Tensor, A: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate of each token, see `policy`, and what to watch about it."""
    r = log_r.exp()
    plain, clipped = -A * r, -A * r.detach().clamp(1.0 - clip_low, 1.0 + clip_high)
    cut = clipped > plain.detach()  # there r is outside, where the clip has no slope: nothing goes back through it
    loss = torch.where(cut, clipped, plain)
    metrics = {"clip_frac": cut, **_ratio_metrics(r, log_r)}
    if dual_clip is not None:
        bound = torch.where(A < 0, -dual_clip * A, math.inf)
        beyond = loss.detach() > bound
        metrics["dual_clip_frac"] = beyond
        loss = torch.where(beyond, bound, loss)
    return loss, metrics


def _cut_weights(w: Tensor, cap: float, floor: float, outside: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Weights within bounds, see `weights`, and what to watch about those before the cut."""
    cut = w.clamp(floor, cap)
    beyond = cut != w
    if outside == "mask":
        cut = torch.where(beyond, 0.0, cut)
    return cut, {"is/mean": w, "is/max": w, "is/outside": beyond}


def _ratio_metrics(r: Tensor, log_r: Tensor) -> dict[str, Tensor]:
    """Metrics of a ratio; `approx_kl` is k3 of the policy before against the one being trained."""
    r, log_r = r.detach(), log_r.detach()
    return {"approx_kl": r - 1.0 - log_r, "ratio/mean": r, "ratio/max": r}


def check_clip(where: str, clip_low: float, clip_high: float, dual_clip: float | None = None) -> None:
    """Check the bounds of a ratio.

    Raises:
        ValueError: one is out of range.
    """
    within(where, "clip_low", clip_low, 0.0, 1.0)
    within(where, "clip_high", clip_high, 0.0)
    if dual_clip is not None and not dual_clip > 1.0:
        raise ValueError(f"{where}: dual_clip={dual_clip} must be more than 1")


def check_sapo(where: str, tau_pos: float, tau_neg: float) -> None:
    """Check the temperatures of the soft gate.

    Raises:
        ValueError: one is not positive.
    """
    for name, tau in (("tau_pos", tau_pos), ("tau_neg", tau_neg)):
        if not tau > 0:
            raise ValueError(f"{where}: {name}={tau} must be more than 0")


def check_aipo(where: str, cap: float, mask_low: float | None, mask_high: float | None, drift: float) -> None:
    """Check the bounds of weights and of distances in probability.

    Raises:
        ValueError: one is out of range.
    """
    if not cap > 0:
        raise ValueError(f"{where}: cap={cap} must be more than 0")
    within(where, "drift", drift, 0.0)
    for name, bound in (("mask_low", mask_low), ("mask_high", mask_high)):
        if bound is not None:
            within(where, name, bound, 0.0, 1.0)


def check_value(where: str, error: str, delta: float, clip: float | None) -> None:
    """Check the settings of a critic's loss.

    Raises:
        ValueError: a bound is not positive, or `error` is unknown.
    """
    one_of(where, "error", error, ERRORS)
    if not delta > 0 or (clip is not None and not clip > 0):
        raise ValueError(f"{where}: clip={clip} and delta={delta} must be more than 0")


def check_bounds(where: str, cap: float, floor: float, outside: str) -> None:
    """Check the bounds of weights.

    Raises:
        ValueError: they are out of order, or `outside` is unknown.
    """
    one_of(where, "outside", outside, OUTSIDES)
    if not 0.0 <= floor < cap:
        raise ValueError(f"{where}: floor={floor} must be at least 0 and less than cap={cap}")


def check_rejection(where: str, floor: float, cap: float, least: float) -> None:
    """Check the bounds of sequences.

    Raises:
        ValueError: they are out of order: they must hold 1, the ratio of a policy to itself.
    """
    if not 0.0 <= floor < 1.0 < cap:
        raise ValueError(f"{where}: floor={floor} must be at least 0 and less than 1, and cap={cap} more than 1")
    if not 0.0 <= least < 1.0:
        raise ValueError(f"{where}: least={least} must be at least 0 and less than 1")
