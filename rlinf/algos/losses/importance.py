"""Importance weights: corrections for tokens sampled by an older policy or by the inference engine.

In flow log-probs under two policies; out come weights for the tokens' losses, without gradient, and what to watch about
them. The inference engine and the trainer never agree exactly on the same weights; an older policy agrees even less.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from rlinf.algos.tensor.loss_sum import Mean, Metric
from rlinf.algos.tensor.masks import LOG_RATIO, Kept, indicator, keep, largest, log_ratio, wide
from rlinf.algos.tensor.sequences import Sequences, sequences_in
from rlinf.algos.validation import one_of, same_shape

Level = Literal["token", "sequence", "geometric"]
LEVELS = ("token", "sequence", "geometric")
Outside = Literal["truncate", "mask"]
OUTSIDES = ("truncate", "mask")

_LOG2_E = math.log2(math.e)


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
    """Weights that make tokens drawn by one policy count as if another had drawn them.

        w_t = exp(logp_t - behavior_t)                      level="token": biased, little variance
        w_t = exp(sum of that over t's sequence)            level="sequence": unbiased before it is cut, more variance
        w_t = exp(mean of that over t's sequence)           level="geometric": no wider for longer sequences
        w   = clip(w, floor, cap)                           outside="truncate"
        w   = w if floor <= w <= cap else 0                 outside="mask"

    Truncated importance sampling (Yao et al., "Your efficient RL framework secretly brings you off-policy RL training",
    2025) and its masked form (IcePop, Ling team, 2025; there 0.5 and 2 to 5). The geometric mean of a sequence's ratios
    is the ratio of GSPO (arXiv:2507.18071, eq. 7). A masked token stays in the denominator of the loss, so that the
    rest is not scaled up.

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
    same_shape("importance.weights", "logprobs", logprobs, behavior_logprobs=behavior_logprobs, mask=mask)
    one_of("importance.weights", "level", level, LEVELS)
    kept = keep(mask, wide(logprobs.detach()).dtype)
    check_bounds("importance.weights", cap, floor, outside)
    difference = log_ratio(logprobs, behavior_logprobs, kept)
    if level != "token":
        grouped = sequences_in("importance.weights", logprobs, sequences)
        if level == "geometric":
            whole = _mean_within(grouped, difference, kept)
        else:
            whole = grouped.sum(difference).clamp_(-LOG_RATIO, LOG_RATIO)
        difference = grouped.spread(whole).expand_as(difference)
    cut, ratio, inside = cut_weights(exponential(difference), kept, cap, floor, outside)
    beyond = Mean(kept.count - kept.only_(inside).sum(), kept.count)
    return cut, {"is/mean": kept.mean(ratio), "is/max": largest(ratio), "is/outside": beyond}


def cut_weights(ratio: Tensor, kept: Kept, cap: float, floor: float, outside: str) -> tuple[Tensor, Tensor, Tensor]:
    """Weights within bounds and weights as they are, both 0 outside the mask, and which were within bounds.

    Args:
        ratio: weights before the cut, finite, in the mask's shape; used up.
        kept: which tokens count.
        cap, floor, outside: see `weights`.
    """
    ratio = kept.only_(ratio)
    cut = ratio.clamp(floor, cap)
    inside = indicator(torch.eq, cut, ratio)
    if outside == "mask":
        torch.mul(ratio, inside, out=cut)
    return kept.only_(cut), ratio, inside


def exponential(x: Tensor, out: Tensor | None = None) -> Tensor:
    """exp(x) as 2^(x log2 e), which takes a third of the time on a CPU; into `out`, which may be `x`, or a new tensor.

    Rounding the exponent shifts the result by up to 1e-6 of it at |x| = 20 and less nearer to 0: as much as rounding
    two float32 log-probs shifts their difference.
    """
    return torch.mul(x, _LOG2_E, out=out).exp2_()


def check_bounds(where: str, cap: float, floor: float, outside: str) -> None:
    """Check the bounds of weights.

    Raises:
        ValueError: they are out of order, or `outside` is unknown.
    """
    one_of(where, "outside", outside, OUTSIDES)
    if not 0.0 <= floor < cap:
        raise ValueError(f"{where}: floor={floor} must be at least 0 and less than cap={cap}")


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
    same_shape("importance.drifted", "logprobs", logprobs, old_logprobs=old_logprobs, mask=mask)
    kept = keep(mask, wide(logprobs.detach()).dtype)
    grouped = sequences_in("importance.drifted", logprobs, sequences)
    if advantages.shape != logprobs.shape and advantages.shape != (grouped.number,):
        raise ValueError(
            f"importance.drifted: advantages {list(advantages.shape)} fit neither logprobs {list(logprobs.shape)} nor "
            f"one per sequence [{grouped.number}]"
        )
    mean = _mean_within(grouped, log_ratio(old_logprobs, logprobs, kept), kept)
    bad = (advantages if advantages.shape == logprobs.shape else grouped.spread(advantages)).detach() < 0
    gone = kept.only((bad & grouped.spread(mean > most)).to(kept.dtype).expand_as(logprobs))
    return 1.0 - gone, {"drifted": kept.mean(gone)}


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
    same_shape("importance.rejected", "logprobs", logprobs, behavior_logprobs=behavior_logprobs, mask=mask)
    check_rejection("importance.rejected", floor, cap, least)
    kept = keep(mask, wide(logprobs.detach()).dtype)
    grouped = sequences_in("importance.rejected", logprobs, sequences)
    difference = log_ratio(logprobs, behavior_logprobs, kept)
    ratio = _mean_within(grouped, difference, kept).exp()
    out = (ratio < floor) | (ratio > cap)
    if least:
        out |= grouped.sum(kept.only((difference < math.log(least)).to(kept.dtype))) > 0
    gone = kept.only(grouped.spread(out).to(kept.dtype).expand_as(logprobs))
    return 1.0 - gone, {"rejected": kept.mean(gone)}


def check_rejection(where: str, floor: float, cap: float, least: float) -> None:
    """Check the bounds of sequences.

    Raises:
        ValueError: they are out of order: they must hold 1, the ratio of a policy to itself.
    """
    if not 0.0 <= floor < 1.0 < cap:
        raise ValueError(f"{where}: floor={floor} must be at least 0 and less than 1, and cap={cap} more than 1")
    if not 0.0 <= least < 1.0:
        raise ValueError(f"{where}: least={least} must be at least 0 and less than 1")


def _mean_within(grouped: Sequences, x: Tensor, kept: Kept) -> Tensor:
    """The mean of `x`, 0 outside the mask, over the tokens of each sequence that count, [sequences]; 0 over none."""
    return grouped.sum(x) / grouped.lengths(kept).clamp(min=1)


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
    drawn = wide(versions.detach())
    share = ((proximal - drawn) / (current - drawn).clamp(min=1)).clamp(0.0, 1.0)
    new, old = wide(logprobs.detach()), wide(behavior_logprobs.detach())
    between: Tensor = old + torch.where(share == 0, 0.0, share * (new - old))  # 0 x inf would be NaN
    return between
