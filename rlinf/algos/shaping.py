"""Shaping: what is done to rewards before advantages are taken. Rewards in, rewards out."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf.algos.tensor.masks import keep, wide
from rlinf.algos.validation import same_shape


def overlong(lengths: Tensor, *, longest: int, cache: int, penalty: float = 1.0) -> Tensor:
    """A penalty that grows as an answer nears the length limit.

        0                                            up to longest - cache
        p (longest - cache - length) / cache         up to longest, where it is -p
        -p                                           beyond

    Soft overlong punishment, DAPO (arXiv:2503.14476, eq. 13; there 20480, 4096 and p = 1, beside rewards of 1 and -1,
    eq. 7). Add it to the rewards.

    Args:
        lengths: of each answer, tokens, any shape.
        longest: the limit, tokens.
        cache: how many tokens before the limit the penalty begins.
        penalty: p, in units of reward.

    Returns:
        Penalties, the same shape, float64, from -p to 0.

    Raises:
        ValueError: `cache` is not between 1 and `longest`.
    """
    if not 0 < cache <= longest:
        raise ValueError(f"overlong: cache={cache} must be between 1 and longest={longest}, both in tokens")
    return penalty * ((longest - cache - lengths.double()) / cache).clamp(-1.0, 0.0)


def at_end(rewards: Tensor, mask: Tensor) -> Tensor:
    """Rewards of answers as rewards of tokens: each on the answer's own last token that counts.

    Args:
        rewards: of each answer, [answers].
        mask: which tokens count, [answers, tokens], bool or 0/1.

    Returns:
        [answers, tokens], 0 elsewhere; an answer without a token has nowhere to carry its reward.

    Raises:
        ValueError: shapes do not fit.
    """
    if mask.ndim != 2 or rewards.shape != mask.shape[:1]:
        raise ValueError(
            f"at_end: rewards must be [answers] and mask [answers, tokens], got {list(rewards.shape)} and "
            f"{list(mask.shape)}"
        )
    counted = mask.bool()
    still = counted.flip(1).cumsum(1).flip(1)  # how many count from here on: 1 at the last one
    return torch.where(counted & (still == 1), wide(rewards.detach())[:, None], 0.0)


def less_kl(rewards: Tensor, kl: Tensor, mask: Tensor, *, beta: float) -> Tensor:
    """Rewards with the divergence from a reference taken off: r_t - beta KL_t.

    The KL in the reward of classic RLHF (arXiv:1909.08593, eq. 2), with k1 = log(pi_old / pi_ref).

    Args:
        rewards: of each token, [answers, tokens], or of each answer, [answers], which then pays for its tokens' sum.
        kl: KL_t, nats, [answers, tokens].
        mask: which tokens count, [answers, tokens], bool or 0/1.
        beta: weight, reward per nat.

    Returns:
        The shape of `rewards`; tokens outside the mask are 0.

    Raises:
        ValueError: shapes do not fit.
    """
    same_shape("less_kl", "mask", mask, kl=kl)
    if mask.ndim != 2 or rewards.shape not in (mask.shape, mask.shape[:1]):
        raise ValueError(f"less_kl: rewards {list(rewards.shape)} fit neither mask {list(mask.shape)} nor its rows")
    kept = keep(mask, wide(rewards.detach()).dtype)
    penalty = beta * kept.only(kept.clean(kl).to(kept.dtype))
    if rewards.ndim == 1:
        return wide(rewards.detach()) - penalty.sum(1)
    return kept.only(kept.clean(rewards)) - penalty
