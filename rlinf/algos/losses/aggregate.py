"""From losses of tokens to one un-normalised sum and the weight that normalises it.

The four ways differ in two numbers only, a coefficient per token and a weight:

    how                        coefficient of token t of sequence s     weight
    token-mean                 1                                        tokens
    seq-mean-token-sum         1                                        sequences
    seq-mean-token-mean        1 / tokens of s                          sequences
    seq-mean-token-sum-norm    1                                        sequences x norm_length

Both add over micro-batches and ranks; the optimizer step divides the summed gradient once by the summed weight. A
sequence without a token that counts is none: padding rows, or an empty share, change nothing. Where the mask gives the
tokens of a sequence a weight w, the sequence counts as w of its kind: coefficient and weight are both w times as large.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from rlinf.algos.tensor.loss_sum import LossSum
from rlinf.algos.tensor.masks import Kept, attach, keep, wide
from rlinf.algos.tensor.sequences import sequences_in
from rlinf.algos.validation import one_of, same_shape

How = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
HOWS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


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
        how: see the table above.
        norm_length: the constant that `seq-mean-token-sum-norm` divides by, tokens; the longest response allowed.
        sequences: sequence of each token, whole numbers from 0, same shape; None: each row is one.

    Returns:
        The sum, differentiable by `loss`, and its weight; `.mean()` divides.

    Raises:
        ValueError: shapes do not fit, `how` is unknown, or `norm_length` is missing or would be ignored.
    """
    same_shape("reduce", "loss", loss, mask=mask)
    values = wide(loss.detach())
    kept = keep(mask, values.dtype)
    coefficient, weight = coefficients("reduce", kept, how, norm_length, sequences)
    slope = kept.mask.to(values.dtype) if coefficient is None else kept.only(coefficient.expand_as(values))
    values = kept.only(kept.clean(loss))
    total = values.sum() if coefficient is None else (values * coefficient).sum()
    return LossSum(attach(loss, total, slope), weight)


def coefficients(
    where: str, kept: Kept, how: str, norm_length: float | None, sequences: Tensor | None
) -> tuple[Tensor | None, Tensor]:
    """The coefficient of each token and the weight of all.

    Args:
        where: function to name in errors.
        kept: which tokens count.
        how, norm_length, sequences: see `reduce`.

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
    weight = kept.weight
    if how == "token-mean":
        return weight, kept.count if weight is None else weight.double().sum()
    grouped = sequences_in(where, kept.mask, sequences)
    lengths = grouped.lengths(kept)
    share = 1.0 / lengths.clamp(min=1)
    filled = (lengths > 0).sum().double() if weight is None else (grouped.sum(weight) * share).double().sum()
    if how == "seq-mean-token-mean":
        share = grouped.spread(share)
        return share if weight is None else share * weight, filled
    return weight, filled * (norm_length or 1.0)
