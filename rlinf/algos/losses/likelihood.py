"""Losses on likelihoods: of worked answers, towards a reference (KL), and entropy."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf.algos.losses.aggregate import How
from rlinf.algos.losses.base import Part, TokenLoss, log_ratio
from rlinf.algos.losses.divergence import CUT, KINDS, Kind, parts
from rlinf.algos.losses.importance import exponential
from rlinf.algos.tensor.loss_sum import LossSum
from rlinf.algos.tensor.masks import Kept, indicator
from rlinf.algos.validation import one_of


def supervised(
    logprobs: Tensor,
    mask: Tensor,
    *,
    how: How = "token-mean",
    norm_length: float | None = None,
    sequences: Tensor | None = None,
) -> LossSum:
    """Negative log-likelihood of given answers: L_t = -logp_t. Maximum likelihood, nats per token.

    Args:
        logprobs: log-probs of the answers' tokens, [rows, tokens] or [tokens].
        mask: which tokens count, same shape, bool or 0/1.
        how, norm_length, sequences: see `policy`.

    Raises:
        ValueError: shapes differ.
    """
    tokens = TokenLoss.of("supervised", logprobs, mask, how, norm_length, sequences)
    return tokens.sum(_negative)


def _negative(kept: Kept, slope: Tensor, leaf: Tensor) -> Part:
    """L_t = -leaf_t"""
    if kept.number is None:
        slope.fill_(-1.0)
    else:
        torch.neg(kept.number, out=slope)
    return Part(leaf * slope)


def kl(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    *,
    kind: Kind = "k3",
    cut: float | None = CUT,
    old_logprobs: Tensor | None = None,
    how: How = "token-mean",
    norm_length: float | None = None,
    sequences: Tensor | None = None,
) -> LossSum:
    """KL penalty towards a reference: L_t = KL_t of `kl.estimate`, to be added with `LossSum.plus`.

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
        how, norm_length, sequences: see `policy`; the same as those of the loss it is added to.

    Returns:
        Sums; metric `kl`, the mean of KL_t (without r), nats, and for k3 `kl/cut`, the share of tokens that are cut.

    Raises:
        ValueError: shapes differ, or a name is unknown.
    """
    one_of("kl", "kind", kind, KINDS)
    given = {"ref_logprobs": ref_logprobs, "old_logprobs": old_logprobs}
    tokens = TokenLoss.of("kl", logprobs, mask, how, norm_length, sequences, **given)

    def formula(
        kept: Kept, slope: Tensor, leaf: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor | None = None
    ) -> Part:
        # not clamped here, since beyond the clamp of `parts` there is no slope
        value, change = (kept.only_(x) for x in parts(kept.only_(leaf - ref_logprobs), kind, cut))
        part = Part(value)
        part.watch("kl", value)
        if kind == "k3" and cut is not None:
            part.watch("kl/cut", indicator(torch.ge, value, cut))
        if old_logprobs is None:
            slope.copy_(change)
        else:
            ratio = exponential(log_ratio(kept, leaf, old_logprobs))
            torch.add(change, value, out=slope).mul_(ratio)
            part.value = ratio.mul_(value)
        return part

    return tokens.sum(formula)


def entropy_bonus(
    entropy: Tensor,
    mask: Tensor,
    *,
    how: How = "token-mean",
    norm_length: float | None = None,
    sequences: Tensor | None = None,
) -> LossSum:
    """Reward for staying undecided: L_t = -H_t, to be added with `LossSum.plus`.

    Args:
        entropy: entropy of each token's distribution, nats, [rows, tokens] or packed [tokens]; differentiable.
        mask: which tokens count, same shape.
        how, norm_length, sequences: see `policy`; the same as those of the loss it is added to.

    Returns:
        Sums; metric `entropy`, nats.

    Raises:
        ValueError: shapes differ.
    """
    tokens = TokenLoss.of("entropy_bonus", entropy, mask, how, norm_length, sequences, entropy=entropy)
    return tokens.sum(_negative)
