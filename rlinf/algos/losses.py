"""Losses: pure functions from log-probs, advantages and a mask to a `LossSum`.

Everything is computed in float32 (float64 stays float64), whatever comes in. Positions outside the mask count for
nothing, whatever stands there: NaN and inf included.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf.algos.sums import LossSum, Max, Mean, Metric, max_of, mean_of

__all__ = ["LossSum", "Max", "Mean", "Metric", "mismatch", "policy", "supervised"]

_LOG_RATIO = 20.0
"""Bound of |log ratio|: exp(20) = 5e8 is beyond every clip and still squares within float32."""


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
) -> LossSum:
    """The clipped surrogate, token by token.

        r_t = exp(logp_t - old_t)
        L_t = max(-A r_t, -A clip(r_t, 1 - clip_low, 1 + clip_high))
        L_t = min(L_t, -dual_clip A)                                   where A < 0, if dual_clip is given

    PPO (arXiv:1707.06347, eq. 7) with a bound of its own on each side (DAPO, arXiv:2503.14476, eq. 10) and, optionally,
    the dual clip (arXiv:1912.09729, eq. 5). `.mean()` is DAPO's token-level loss (eq. 12), not the mean over answers
    of means over tokens of GRPO (arXiv:2402.03300, eq. 3).

    Args:
        logprobs: log-probs of the sampled tokens under the policy being trained, [rows, tokens] or [tokens].
        old_logprobs: the same under the policy that sampled them, same shape; never differentiated.
        advantages: of that shape, or one per row, [rows]; never differentiated.
        mask: which tokens count, same shape as `logprobs`, bool or 0/1.
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        dual_clip: bound of the loss where A < 0, in units of |A|; more than 1.
        entropy: entropy of each token's distribution, nats, same shape as `logprobs`; only watched.

    Returns:
        Sums; metrics `clip_frac` (share of tokens whose gradient the clip removes), `dual_clip_frac`, `approx_kl`
        (mean of r - 1 - log r, an estimate of KL(old || new), nats), `ratio/mean`, `ratio/max`, `entropy`.

    Raises:
        ValueError: shapes do not fit, or a bound is out of range.
    """
    _check_bounds(clip_low, clip_high, dual_clip)
    _check_shapes("policy", logprobs, old_logprobs=old_logprobs, mask=mask, entropy=entropy)
    keep = mask.bool()
    gain = _per_token(advantages, logprobs, keep)
    log_ratio = _log_ratio(logprobs, old_logprobs.detach(), keep)
    ratio = log_ratio.exp()
    plain = -gain * ratio
    clipped = -gain * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(plain, clipped)
    metrics: dict[str, Metric] = {"clip_frac": mean_of((clipped > plain).to(ratio.dtype), keep)}
    if dual_clip is not None:
        bound = -dual_clip * gain
        bounded = (gain < 0) & (loss > bound)
        loss = torch.where(bounded, bound, loss)
        metrics["dual_clip_frac"] = mean_of(bounded.to(ratio.dtype), keep)
    metrics["approx_kl"] = mean_of(ratio.detach() - 1.0 - log_ratio.detach(), keep)
    metrics["ratio/mean"] = mean_of(ratio, keep)
    metrics["ratio/max"] = max_of(ratio, keep)
    if entropy is not None:
        metrics["entropy"] = mean_of(entropy.to(ratio.dtype), keep)
    return LossSum(loss.sum(), keep.sum(dtype=torch.float64), metrics)  # loss is 0 outside the mask, as gain is


def supervised(logprobs: Tensor, mask: Tensor) -> LossSum:
    """Negative log-likelihood of given answers: L_t = -logp_t. Maximum likelihood, nats per token.

    Args:
        logprobs: log-probs of the answers' tokens, [rows, tokens] or [tokens].
        mask: which tokens count, same shape, bool or 0/1.

    Raises:
        ValueError: shapes differ.
    """
    _check_shapes("supervised", logprobs, mask=mask)
    keep = mask.bool()
    logprobs = torch.where(keep, _wide(logprobs), 0.0)
    return LossSum(-logprobs.sum(), keep.sum(dtype=torch.float64), {})


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
    _check_shapes("mismatch", logprobs, engine_logprobs=engine_logprobs, mask=mask)
    keep = mask.bool()
    ours, theirs = _wide(logprobs.detach()), _wide(engine_logprobs.detach())
    apart = torch.where(ours == theirs, 0.0, (ours - theirs).abs())  # -inf - -inf would be NaN
    return {"mismatch/mean": mean_of(apart, keep), "mismatch/max": max_of(apart, keep)}


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor, keep: Tensor) -> Tensor:
    """log(new / old), clamped; 0 outside the mask. A NaN inside the mask stays one, so that it is noticed."""
    new = torch.where(keep, _wide(logprobs), 0.0)
    old = torch.where(keep, _wide(old_logprobs), 0.0).to(new.dtype)
    lowest = torch.finfo(new.dtype).min / 4  # -inf - -inf would be NaN: two impossible tokens are equally likely
    return (new.clamp(min=lowest) - old.clamp(min=lowest)).clamp(-_LOG_RATIO, _LOG_RATIO)


def _per_token(advantages: Tensor, logprobs: Tensor, keep: Tensor) -> Tensor:
    """Advantages in the shape of `logprobs`; 0 outside the mask."""
    advantages = _wide(advantages.detach())
    if advantages.shape != logprobs.shape:
        if logprobs.ndim != 2 or advantages.shape != logprobs.shape[:1]:
            raise ValueError(
                f"policy: advantages {list(advantages.shape)} fit neither logprobs {list(logprobs.shape)} "
                f"nor one per row {list(logprobs.shape[:1])}"
            )
        advantages = advantages[:, None].expand_as(logprobs)
    return torch.where(keep, advantages, 0.0)


def _check_shapes(name: str, logprobs: Tensor, **others: Tensor | None) -> None:
    for argument, value in others.items():
        if value is not None and value.shape != logprobs.shape:
            raise ValueError(
                f"{name}: {argument} {list(value.shape)} must have the shape of logprobs {list(logprobs.shape)}"
            )


def _check_bounds(clip_low: float, clip_high: float, dual_clip: float | None) -> None:
    if not 0.0 <= clip_low <= 1.0:
        raise ValueError(f"policy: clip_low={clip_low} must be between 0 and 1 (the ratio is clipped at 1 - clip_low)")
    if not clip_high >= 0.0:
        raise ValueError(f"policy: clip_high={clip_high} must be at least 0 (the ratio is clipped at 1 + clip_high)")
    if dual_clip is not None and not dual_clip > 1.0:
        raise ValueError(f"policy: dual_clip={dual_clip} must be more than 1")
