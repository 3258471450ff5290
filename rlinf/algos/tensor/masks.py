"""Masked tensors, and autograd functions with hand-written derivatives, that every loss builds on.

Numbers under the mask may be anything, NaN and inf included, and count for nothing. Everything is float32 inside
(float64 stays). A loss gives its values and its derivatives side by side, as formulas, and `attach` hands the second
to autograd. On a CPU that is ten times faster than to let autograd differentiate clamps and maxima, whose backward
passes select with `where`, at the price of an exponential each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlinf.algos.tensor.loss_sum import Max, Mean

LOG_RATIO = 20.0
"""Bound of |log ratio|: exp(20) = 5e8 is beyond every clip and still squares within float32."""


def wide(x: Tensor) -> Tensor:
    """In float32, or in float64 if it is."""
    return x if x.dtype == torch.float64 else x.float()


@dataclass(frozen=True, slots=True)
class Kept:
    """Which positions count."""

    mask: Tensor
    """bool"""
    number: Tensor | None
    """The mask as 0 and 1, in the shape of `mask`; None if every position counts."""
    count: Tensor
    """How many count, [], float64."""
    dtype: torch.dtype
    """Of the numbers: float32 or float64."""
    weight: Tensor | None = None
    """How many tokens each position counts as in a mean, in the shape of `mask`, 0 outside it; None: as one."""

    def only(self, x: Tensor) -> Tensor:
        """`x` (finite, broadcastable to the mask) where it counts, 0 elsewhere."""
        return x if self.number is None else x * self.number

    def only_(self, x: Tensor) -> Tensor:
        """`only` in place, for a tensor in the mask's shape."""
        return x if self.number is None else x.mul_(self.number)

    def clean(self, x: Tensor) -> Tensor:
        """`x` detached and wide, with something finite under the mask and for -inf; a NaN that counts stays one."""
        x = wide(x.detach())
        if not known_finite(x):
            # A quarter of the range, so that -inf - -inf is 0 and not NaN: two impossible tokens are equally likely.
            x = torch.where(self.mask, x, 0.0).clamp(min=torch.finfo(x.dtype).min / 4)
        return x

    def mean(self, x: Tensor) -> Mean:
        """The metric that averages `x`, which is 0 outside the mask."""
        return Mean(x.sum().double(), self.count)


def keep(mask: Tensor, dtype: torch.dtype) -> Kept:
    """Read a mask; numbers in `dtype`.

    Args:
        mask: bool or 0/1. One of floats is also how much each position counts: a loss with 2.0 at all tokens of a
            sequence is that of a batch which has the sequence twice. Metrics count every position once.
        dtype: float32 or float64.
    """
    weight = mask.to(dtype) if mask.is_floating_point() else None
    mask = mask if mask.dtype == torch.bool else mask.bool()
    bytes_ = mask.view(torch.uint8)  # bytes convert, and tell their minimum, in a quarter of the time of bool
    if mask.device.type == "cpu" and (mask.numel() == 0 or bytes_.amin().item() == 1):
        return Kept(mask, None, torch.tensor(float(mask.numel()), dtype=torch.float64), dtype, weight)
    number = bytes_.to(dtype)
    return Kept(mask, number, number.sum(-1).double().sum(), dtype, weight)  # exact up to 2^24 tokens in a row


def known_finite(x: Tensor) -> bool:
    """Whether all numbers are known to be finite; never on an accelerator, whose queue a question would stop."""
    # A sum is finite only if all numbers are, and costs a tenth of `where`.
    return x.device.type == "cpu" and math.isfinite(x.sum().item())


def indicator(compare: Callable[..., Any], a: Tensor, b: Tensor | float) -> Tensor:
    """Where `compare` (such as torch.gt) holds, as 0 and 1 in the dtype of `a`: a third of the price of bool.

    Args:
        compare: of torch, with an `out`.
        a, b: what to compare; `b` broadcasts to the shape of `a`.
    """
    out: Tensor = compare(a, b, out=torch.empty_like(a, memory_format=torch.contiguous_format))
    return out


def largest(x: Tensor) -> Max:
    """The metric that is the maximum of `x`."""
    if x.numel() == 0:
        return Max(torch.full((), float("-inf"), dtype=torch.float64, device=x.device))
    return Max(x.amax().double())


def log_ratio(logprobs: Tensor, old_logprobs: Tensor, kept: Kept) -> Tensor:
    """log(new / old) of what counts, clamped to +-20; 0 elsewhere. A new tensor without gradient."""
    difference = wide(logprobs.detach()) - wide(old_logprobs.detach())
    if not known_finite(difference):
        difference = kept.clean(logprobs) - kept.clean(old_logprobs)
    return kept.only_(difference.clamp_(-LOG_RATIO, LOG_RATIO))


def attach(leaf: Tensor, value: Tensor, slope: Tensor) -> Tensor:
    """`value` with the gradient `slope` towards `leaf`.

    Args:
        leaf: what is differentiated.
        value: one number, [], or one per element of `leaf`; detached.
        slope: d value / d leaf, element by element, in the shape of `leaf`.
    """
    attached: Tensor = _Attached.apply(leaf, value, slope)
    return attached


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor, value: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        ctx.dtype = leaf.dtype
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return (slope * grad).to(ctx.dtype), None, None
