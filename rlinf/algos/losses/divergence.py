"""Estimates of a Kullback-Leibler divergence from the sampled tokens alone.

One function for every place that needs one. Its arguments are named: k3 is not symmetric, and swapping them changes
what is optimised without any sign of it.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlinf.algos.tensor.masks import LOG_RATIO, attach, indicator, keep, wide
from rlinf.algos.validation import one_of, same_shape

Kind = Literal["k1", "k2", "k3", "abs"]
KINDS = ("k1", "k2", "k3", "abs")

CUT = 10.0
"""Bound of k3's result, nats, as in verl: one absurd token must not outweigh a batch of sound ones."""
_WIDEST = 80.0
"""Bound of d, nats, where k3 is not cut: exp of it is still a number in float32."""


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
    kept = keep(torch.ones_like(logprobs, dtype=torch.bool), wide(logprobs).dtype)
    value, slope = parts(kept.clean(logprobs) - kept.clean(ref_logprobs), kind, cut)
    return attach(logprobs, value, slope)


def parts(d: Tensor, kind: str, cut: float | None = CUT) -> tuple[Tensor, Tensor]:
    """The estimate and its derivative by `logprobs`, without gradient.

    Args:
        d: logprobs - ref_logprobs, finite.
        kind, cut: see `estimate`.
    """
    if kind == "k3":
        bounded = d.clamp(-_WIDEST) if cut is None else d.clamp(-LOG_RATIO, LOG_RATIO)
        shrink = torch.expm1(-bounded)
        value, slope = shrink + bounded, -shrink
        if cut is None:
            return value, slope.mul_(indicator(torch.eq, d, bounded))
        return value.clamp(max=cut), slope.mul_(indicator(torch.le, value, cut))
    bounded = d.clamp(-LOG_RATIO, LOG_RATIO)
    inside = indicator(torch.eq, d, bounded)
    if kind == "k1":
        return bounded, inside
    if kind == "k2":
        return bounded.square() / 2, bounded * inside
    return bounded.abs(), bounded.sign() * inside
