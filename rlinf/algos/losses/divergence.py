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

_LARGEST = 10.0
"""Bound of k3's result, nats: one absurd token must not outweigh a batch of sound ones."""


def estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: Kind = "k3") -> Tensor:
    """KL(policy || reference) at each sampled token; the tokens are the policy's.

        d = logprobs - ref_logprobs
        k1 = d        k2 = d^2 / 2        k3 = exp(-d) - 1 + d        abs = |d|

    J. Schulman, "Approximating KL divergence", 2020; k3 is GRPO's (arXiv:2402.03300, eq. 4). k1 and k3 estimate the
    divergence without bias; the gradient of k2 is an unbiased one of the divergence, that of k1 has mean zero (so use
    k1 in rewards, not in losses), and k3's is that of the reverse divergence. d is clamped to +-20, k3 to +-10; beyond
    the clamp the gradient is 0.

    Args:
        logprobs: of the policy, nats, any shape; differentiable.
        ref_logprobs: of the reference, same shape; never differentiated.
        kind: which estimate.

    Returns:
        Nats, same shape, float32 (float64 if `logprobs` are).

    Raises:
        ValueError: shapes differ, or `kind` is unknown.
    """
    same_shape("kl.estimate", "logprobs", logprobs, ref_logprobs=ref_logprobs)
    one_of("kl.estimate", "kind", kind, KINDS)
    kept = keep(torch.ones_like(logprobs, dtype=torch.bool), wide(logprobs).dtype)
    value, slope = parts(kept.clean(logprobs) - kept.clean(ref_logprobs), kind)
    return attach(logprobs, value, slope)


def parts(d: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """The estimate and its derivative by `logprobs`, without gradient.

    Args:
        d: logprobs - ref_logprobs, finite.
        kind: see `estimate`.
    """
    if kind == "k3":
        bounded = d.clamp(-LOG_RATIO, LOG_RATIO)
        shrink = torch.expm1(-bounded)
        value, slope = shrink + bounded, -shrink
        return value.clamp(max=_LARGEST), slope.mul_(indicator(torch.le, value, _LARGEST))
    bounded = d.clamp(-LOG_RATIO, LOG_RATIO)
    inside = indicator(torch.eq, d, bounded)
    if kind == "k1":
        return bounded, inside
    if kind == "k2":
        return bounded.square() / 2, bounded * inside
    return bounded.abs(), bounded.sign() * inside
