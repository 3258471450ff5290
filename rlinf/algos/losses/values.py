"""The critic's loss: predicted against observed returns, with a bound on how far one batch may move a prediction."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlinf.algos.aggregate import How
from rlinf.algos.losses.ground import Ground, Part
from rlinf.algos.masks import Kept, indicator
from rlinf.algos.naming import one_of
from rlinf.algos.sums import Explained, LossSum

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
    ground = Ground.of("value", values, mask, how, norm_length, sequences, old_values=old_values, returns=returns)
    new, old, target = (ground.kept.clean(ground.read(x)) for x in (values, old_values, returns))

    def formula(kept: Kept, new: Tensor, old: Tensor, target: Tensor) -> Part:
        new, old, target = kept.only(new), kept.only(old), kept.only(target)
        part = Part(*_penalty(new - target, error, delta), {"value/mean": new, "return/mean": target})
        if clip is not None:
            moved = new - old
            held, _ = _penalty(moved.clamp(-clip, clip).add_(old).sub_(target), error, delta)
            # The unclipped prediction is asked: the clipped one is never beyond the bound.
            part.means["value_clip_frac"] = indicator(torch.gt, moved.abs_(), clip)
            taken = indicator(torch.gt, held, part.value)
            part.value = torch.maximum(part.value, held)
            part.slope = torch.addcmul(part.slope, part.slope, taken, value=-1.0)
        return part

    loss = ground.sum(formula, new, old, target)
    return loss.watching({"explained_variance": _explained(target, new, ground.kept)})


def _penalty(e: Tensor, error: str, delta: float) -> tuple[Tensor, Tensor]:
    """h(e) and its derivative."""
    if error == "square":
        return e.square(), 2.0 * e
    slope = e.clamp(-delta, delta)
    return slope * (e - slope / 2.0), slope  # with s = clamp(e): s (e - s/2) is both branches


def _explained(target: Tensor, new: Tensor, kept: Kept) -> Explained:
    target, error = kept.only(target), kept.only(target - new)
    sums = (target.sum(), torch.linalg.vector_norm(target) ** 2, error.sum(), torch.linalg.vector_norm(error) ** 2)
    return Explained(torch.stack([kept.count, *(x.double() for x in sums)]))
