"""The critic's loss: predicted against observed returns, with a bound on how far one batch may move a prediction."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlinf.algos.losses.aggregate import How
from rlinf.algos.losses.base import Part, TokenLoss
from rlinf.algos.tensor.loss_sum import Explained, LossSum, Mean
from rlinf.algos.tensor.masks import Kept
from rlinf.algos.validation import one_of

Error = Literal["huber", "square"]
ERRORS = ("huber", "square")


def value(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip: float | None = 0.2,
    error: Error = "huber",
    delta: float = 10.0,
    how: How = "token-mean",
    norm_length: float | None = None,
    sequences: Tensor | None = None,
) -> LossSum:
    """Clipped value loss.

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
        how, norm_length, sequences: see `policy`.

    Returns:
        Sums; metrics `value_clip_frac` (share of predictions that have moved beyond the bound), `explained_variance`,
        `value/mean`, `return/mean`.

    Raises:
        ValueError: shapes differ, a bound is out of range, or a name is unknown.
    """
    one_of("value", "error", error, ERRORS)
    if not delta > 0 or (clip is not None and not clip > 0):
        raise ValueError(f"value: clip={clip} and delta={delta} must be more than 0")
    tokens = TokenLoss.of("value", values, mask, how, norm_length, sequences, old_values=old_values, returns=returns)

    def formula(kept: Kept, slope: Tensor, leaf: Tensor, old_values: Tensor, returns: Tensor) -> Part:
        new, target = kept.only(leaf), kept.only(returns)
        apart = new - target
        part = Part(torch.empty_like(apart))
        for name, x in {"value/mean": new, "return/mean": target, "apart": apart}.items():
            part.watch(name, x)
        for name, x in {"apart^2": apart, "return^2": target}.items():
            part.sums[name] = torch.linalg.vector_norm(x).square()
        _penalty(apart, error, delta, part.value, slope)
        if clip is None:
            return part
        moved = new - kept.only(old_values)
        held = torch.clamp(moved, -clip, clip)
        excess = moved.sub_(held)
        change = torch.sub(apart, excess, out=apart)
        part.watch("value_clip_frac", torch.ne(excess, 0.0, out=excess))
        _penalty(change, error, delta, held, excess)
        slope.mul_(torch.le(held, part.value, out=excess))
        torch.maximum(part.value, held, out=part.value)
        return part

    loss = tokens.sum(formula)
    sums = {name: metric.total for name, metric in loss.metrics.items() if isinstance(metric, Mean)}
    moments = [sums[name] for name in ("return/mean", "return^2", "apart", "apart^2")]
    metrics = {name: metric for name, metric in loss.metrics.items() if not name.startswith(("apart", "return^2"))}
    explained = Explained(torch.stack([tokens.kept.count, *moments]))
    return LossSum(loss.total, loss.weight, {**metrics, "explained_variance": explained})


def _penalty(e: Tensor, error: str, delta: float, value: Tensor, slope: Tensor) -> None:
    """h(e) into `value` and its derivative into `slope`."""
    if error == "square":
        torch.square(e, out=value)
        torch.mul(e, 2.0, out=slope)
        return
    torch.clamp(e, -delta, delta, out=slope)
    torch.sub(e, slope, alpha=0.5, out=value).mul_(slope)  # with s = clamp(e): s (e - s/2) is both branches
