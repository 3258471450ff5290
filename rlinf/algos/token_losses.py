"""Losses of tokens that a client names and sums itself: by name, with bounds of its own, without any mean.

Training services (the Tinker API and its like) take tokens with numbers beside them and add the gradient of a plain sum
over tokens; nobody divides. Each loss here is one of `losses` under the name and the bounds that clients know:

    cross_entropy           -weight logp
    importance_sampling     -A r                                                r = exp(logp - old)
    ppo                     -min(A r, A clip(r, clip_low_threshold, clip_high_threshold))
    cispo                   -sg[clip(r, clip_low_threshold, clip_high_threshold)] A logp
    gspo                    ppo's, with one ratio for all tokens of a datum, see `_gspo`
    dro                     -A logp + (beta / 2) (logp - old)^2

A token whose weight or advantage is 0 adds exactly 0 to a sum, but for dro's penalty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlinf.algos import losses
from rlinf.algos.loss_sum import LossSum, finite, one_of, within

TARGETS, WEIGHTS, LOGPROBS, ADVANTAGES = "target_tokens", "weights", "logprobs", "advantages"
MARKS = "sequence_ratio_mask"
"""Inputs of a loss by their names: the tokens to be predicted, factors, log-probs of who drew them, advantages, and
which tokens a datum's ratio is of."""
_LOW, _HIGH = "clip_low_threshold", "clip_high_threshold"
_CLIP = {_LOW: 0.8, _HIGH: 1.2}


def _bounds(where: str, settings: Mapping[str, float]) -> dict[str, float]:
    """Bounds of a ratio as distances from 1, as our losses have them."""
    within(where, _LOW, settings[_LOW], 0.0, 1.0)
    within(where, _HIGH, settings[_HIGH], 1.0)
    return {"clip_low": 1.0 - settings[_LOW], "clip_high": settings[_HIGH] - 1.0}


def _gspo(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    marks: Tensor,
    mask: Tensor,
    *,
    sequences: Tensor,
    clip_low: float,
    clip_high: float,
) -> LossSum:
    """The clipped surrogate of a ratio per sequence (GSPO, arXiv:2507.18071, eq. 13):

        r_t = sg[exp(mean over the marked tokens of logp - old)] p_t / sg[p_t]

    which is ppo's with `old` moved, in each sequence, so far that every token's ratio is the sequence's.
    """
    tokens = losses.Tokens.of("gspo", logprobs, marks != 0, {"sequences": sequences}, old_logprobs=old)
    new = tokens.constant(logprobs)
    origin = finite(logprobs.detach()) - tokens.sequence_mean(new - tokens.constant(old))
    return losses.policy(logprobs, origin, advantages, mask, clip_low=clip_low, clip_high=clip_high)


@dataclass(frozen=True, slots=True)
class _Kind:
    """One of the losses."""

    loss: Callable[..., LossSum]
    inputs: tuple[str, ...] = (LOGPROBS, ADVANTAGES)
    defaults: Mapping[str, float] | None = None
    keywords: Callable[[str, Mapping[str, float]], dict[str, float]] = lambda where, settings: dict(settings)


_KINDS = {
    "cross_entropy": _Kind(losses.supervised, (WEIGHTS,)),
    "importance_sampling": _Kind(losses.policy, keywords=lambda *_: {"clip_low": 1.0, "clip_high": float("inf")}),
    "ppo": _Kind(losses.policy, defaults=_CLIP, keywords=_bounds),
    "cispo": _Kind(losses.cispo, defaults=_CLIP, keywords=_bounds),
    "gspo": _Kind(_gspo, (LOGPROBS, ADVANTAGES, MARKS), _CLIP, _bounds),
    "dro": _Kind(losses.dro, defaults={"beta": 0.05}),
}
NAMES = tuple(_KINDS)
"""The losses there are."""
_SECRET = ("stable_reinforce",)
"""Names that clients know, and without a public definition."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """One of the losses with its bounds; plain data, made by `of`."""

    name: str
    """One of `NAMES`."""
    keywords: tuple[tuple[str, float], ...] = ()
    """Of the function in `losses`."""

    @staticmethod
    def of(name: str, settings: Mapping[str, Any] | None = None) -> TokenLoss:
        """A loss by its name.

        Args:
            name: one of `NAMES`.
            settings: its bounds, by the names that clients know; what is left out has its default.

        Raises:
            ValueError: no loss or setting of that name, or one out of range.
        """
        if name in _SECRET:
            raise ValueError(f"loss {name} is not served, since nobody published what it is; take ppo, cispo or gspo")
        one_of("loss", "name", name, NAMES)
        kind, where = _KINDS[name], f"loss {name}"
        defaults = kind.defaults or {}
        for key, value in (settings or {}).items():
            if key not in defaults:
                there = f"its settings are {', '.join(defaults)}" if defaults else "it has none"
                raise ValueError(f"{where}: there is no setting {key!r}; {there}")
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{where}: {key}={value!r} must be a number")
        keywords = kind.keywords(where, {**defaults, **(settings or {})})
        if "beta" in keywords:
            within(where, "beta", keywords["beta"], 0.0)
        return TokenLoss(name, tuple((key, float(value)) for key, value in keywords.items()))

    @property
    def inputs(self) -> tuple[str, ...]:
        """Numbers that it needs of every token, besides the tokens themselves."""
        return _KINDS[self.name].inputs

    def __call__(self, logprobs: Tensor, inputs: Mapping[str, Tensor], sequences: Tensor | None = None) -> LossSum:
        """The sum over tokens; its `weight`, by which nobody divides, is their number.

        Args:
            logprobs: of the tokens, under the policy that learns, [tokens]; differentiable.
            inputs: by the names of `inputs`, in that shape.
            sequences: datum of each token, whole numbers from 0; None: all are of one.
        """
        kind, numbers = _KINDS[self.name], [inputs[name] for name in self.inputs]
        everywhere = torch.ones_like(logprobs, dtype=torch.bool)
        if kind.loss is losses.supervised:  # its weights may have any sign, so they are no mask
            return losses.reduce(-finite(logprobs) * numbers[0], everywhere)
        keywords: dict[str, Any] = dict(self.keywords)
        if kind.loss is _gspo:
            keywords["sequences"] = torch.zeros_like(everywhere, dtype=torch.long) if sequences is None else sequences
        return kind.loss(logprobs, *numbers, everywhere, **keywords)
