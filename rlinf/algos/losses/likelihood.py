"""Losses on likelihoods: of worked answers, towards a reference (KL), and entropy."""

from __future__ import annotations

from torch import Tensor

from rlinf.algos.aggregate import How
from rlinf.algos.kl import KINDS, Kind, parts
from rlinf.algos.losses.ground import Ground, Part
from rlinf.algos.masks import Kept, known_finite, log_ratio
from rlinf.algos.naming import one_of
from rlinf.algos.sums import LossSum


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
    ground = Ground.of("supervised", logprobs, mask, how, norm_length, sequences)

    def formula(kept: Kept, new: Tensor) -> Part:
        slope = -kept.numbers()
        return Part(slope * kept.clean(new), slope)

    return ground.sum(formula, ground.read(logprobs))


def kl(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    *,
    kind: Kind = "k3",
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
        old_logprobs: of the policy that sampled, same shape; None leaves r out.
        how, norm_length, sequences: see `policy`; the same as those of the loss it is added to.

    Returns:
        Sums; metric `kl`, the mean of KL_t (without r), nats.

    Raises:
        ValueError: shapes differ, or a name is unknown.
    """
    one_of("kl", "kind", kind, KINDS)
    others = {"ref_logprobs": ref_logprobs, "old_logprobs": old_logprobs}
    ground = Ground.of("kl", logprobs, mask, how, norm_length, sequences, **others)

    def formula(kept: Kept, new: Tensor, reference: Tensor, *old: Tensor) -> Part:
        value, slope = (kept.only_(x) for x in parts(_apart(new, reference, kept), kind))
        means = {"kl": value}
        if old:
            ratio = log_ratio(new, old[0], kept).exp()
            value, slope = ratio * value, ratio * (slope + value)
        return Part(value, slope, means)

    given = [x for x in (logprobs, ref_logprobs, old_logprobs) if x is not None]
    return ground.sum(formula, *map(ground.read, given))


def _apart(new: Tensor, reference: Tensor, kept: Kept) -> Tensor:
    """new - reference, 0 outside the mask; not clamped, since beyond the clamp of `kl.parts` there is no slope."""
    difference = new - reference
    if not known_finite(difference):
        difference = kept.clean(new) - kept.clean(reference)
    return kept.only_(difference)


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
    ground = Ground.of("entropy_bonus", entropy, mask, how, norm_length, sequences)

    def formula(kept: Kept, undecided: Tensor) -> Part:
        slope = -kept.numbers()
        return Part(slope * kept.clean(undecided), slope)

    return ground.sum(formula, ground.read(entropy), entropy=entropy)
