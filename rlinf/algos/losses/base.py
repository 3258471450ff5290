"""Base of all token losses: checks and masks a micro-batch, runs a formula block by block, sums values and slopes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from rlinf.algos.losses.aggregate import coefficients
from rlinf.algos.tensor.loss_sum import LossSum, Max, Mean, Metric
from rlinf.algos.tensor.masks import LOG_RATIO, Kept, keep, known_finite, wide
from rlinf.algos.tensor.sequences import sequences_in
from rlinf.algos.validation import same_shape, within


@dataclass(slots=True)
class Part:
    """What a formula says of a block of tokens, beside their slopes.

    Metrics are summed at once, while their numbers are in the cache and before the memory of those is needed again.
    """

    value: Tensor
    """Loss of each token, 0 outside the mask; used up."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Of metrics to average over tokens, []."""
    tops: dict[str, Tensor] = field(default_factory=dict)
    """Largest of metrics to take the maximum of, []."""

    def watch(self, name: str, x: Tensor) -> None:
        """Average `x`, 0 outside the mask, over tokens."""
        self.sums[name] = x.sum()

    def watch_lack(self, name: str, x: Tensor) -> None:
        """Average 1 - `x` over tokens; `x` is 1 outside the mask."""
        self.sums[name] = x.numel() - x.sum()

    def watch_top(self, name: str, x: Tensor) -> None:
        """Take the maximum of `x`, 0 outside the mask."""
        self.tops[name] = x.amax() if x.numel() else x.new_full((), float("-inf"))


Formula = Callable[..., Part]
"""From (kept, slope, leaf, **others), all of one block, to a Part; it writes the derivative by `leaf` into `slope`.

What the mask hides may be anything. A formula multiplies by the mask and need not care that 0 x NaN is NaN: where a sum
is not finite, `TokenLoss.sum` asks again, with cleaned tensors.
"""

_BLOCK = 1 << 16
"""Elements of a block: in float32 256 KB, few enough to stay in a core's cache, many enough that calls cost little."""

HIGHEST_RATIO = math.exp(LOG_RATIO - 1e-5)
"""A ratio beyond has been clamped: it is constant, so it has no slope."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """One loss over one micro-batch."""

    name: str
    """Of the loss, for errors."""
    leaf: Tensor
    """What is differentiated: log-probs or values, as they came."""
    others: Mapping[str, Tensor]
    """What else the formula is given by name, and `entropy` and `weights`, in the shape of `leaf`, without gradient."""
    kept: Kept
    """Which tokens count."""
    coefficient: Tensor | None
    """Of each token in the sum; None for 1."""
    weight: Tensor
    """What the sum is to be divided by, [], float64."""
    sequences: Tensor | None
    """Sequence of each token, as it came."""

    @classmethod
    def of(
        cls,
        name: str,
        leaf: Tensor,
        mask: Tensor,
        how: str,
        norm_length: float | None,
        sequences: Tensor | None,
        weights: Tensor | None = None,
        **others: Tensor | None,
    ) -> TokenLoss:
        """Check shapes and names.

        Args:
            name: of the loss.
            leaf: called logprobs in errors, unless the loss is `value`.
            mask, how, norm_length, sequences, weights: see `losses.policy`.
            others: what the formula is given beside `leaf`, None left out; `entropy` is watched instead.

        Raises:
            ValueError: a shape does not fit, or a name is unknown.
        """
        same_shape(name, "values" if name == "value" else "logprobs", leaf, mask=mask, **others)
        kept = keep(mask, wide(leaf.detach()).dtype)
        coefficient, weight = coefficients(name, kept, how, norm_length, sequences)
        if weights is not None:
            others["weights"] = weights.expand_as(leaf)
        read = {key: x.detach().to(kept.dtype) for key, x in others.items() if x is not None}
        return cls(name, leaf, read, kept, coefficient, weight, sequences)

    def sum(self, formula: Formula, **more: Tensor) -> LossSum:
        """The loss of the micro-batch, differentiable by `leaf`.

        Args:
            formula: losses, slopes and metrics of the tokens of a block.
            more: what it is given beside `others`; as many rows as `leaf`, broadcastable to its shape.
        """
        tensors = {"leaf": self.leaf.detach().to(self.kept.dtype), **self.others, **more}
        gathered = None
        if self.leaf.device.type == "cpu":  # to ask an accelerator would stop its queue
            gathered = self._gather(formula, tensors)
        if gathered is None or not known_finite(gathered.sums):
            gathered = self._gather(formula, {key: self.kept.clean(x) for key, x in tensors.items()})
        total, *means = gathered.sums.unbind()
        metrics: dict[str, Metric] = {
            key: Mean(x, self.kept.count) for key, x in zip(gathered.means, means, strict=True)
        }
        metrics |= {key: Max(x) for key, x in zip(gathered.peaks, gathered.tops, strict=True)}
        attached: Tensor = _Summed.apply(self.leaf, total.to(self.kept.dtype), gathered.slope)
        return LossSum(attached, self.weight, metrics)

    def _gather(self, formula: Formula, tensors: Mapping[str, Tensor]) -> _Gathered:
        """Everything of all blocks, one after the other, so that what a formula makes does not leave the cache."""
        slopes = torch.empty(self.leaf.shape, dtype=self.kept.dtype, device=self.leaf.device)
        sums: list[Tensor] = []
        tops: list[Tensor] = []

        def add(kept: Kept, slope: Tensor, block: dict[str, Tensor]) -> tuple[tuple[str, ...], tuple[str, ...]]:
            entropy = block.pop("entropy", None)
            factors = [block.pop(key) for key in ("weights", "coefficient") if key in block]
            part = formula(kept, slope, **block)
            if entropy is not None:
                part.watch("entropy", kept.only(entropy))
            for factor in factors:
                part.value.mul_(factor)
                slope.mul_(factor)
            sums.extend((part.value.sum(), *part.sums.values()))
            tops.extend(part.tops.values())
            return tuple(part.sums), tuple(part.tops)

        for kept, slope, block in self._blocks(slopes, tensors):
            means, peaks = add(kept, slope, block)
        added = torch.stack(sums).view(-1, 1 + len(means)).sum(0, dtype=torch.float64)
        highest = torch.stack(tops).view(-1, len(peaks)).amax(0).double().unbind() if tops else ()
        return _Gathered(slopes, added, means, highest, peaks)

    def _blocks(
        self, slopes: Tensor, tensors: Mapping[str, Tensor]
    ) -> Iterator[tuple[Kept, Tensor, dict[str, Tensor]]]:
        """Rows that make up a block; all at once on an accelerator, which wants large kernels."""
        if self.coefficient is not None:
            tensors = {**tensors, "coefficient": self.coefficient}
        rows, elements = slopes.shape[0], slopes.numel()
        if slopes.device.type != "cpu" or elements <= _BLOCK:
            yield self.kept, slopes, dict(tensors)
            return
        step = max(1, _BLOCK * rows // elements)
        number = repeat(None) if self.kept.number is None else self.kept.number.split(step)
        cut = zip(number, slopes.split(step), *(x.split(step) for x in tensors.values()), strict=False)
        for numbers, slope, *block in cut:
            kept = self.kept if numbers is None else replace(self.kept, number=numbers)
            yield kept, slope, dict(zip(tensors, block, strict=True))

    def cost(self, advantages: Tensor) -> Tensor:
        """-advantages, broadcastable to the tokens' shape; anything outside the mask.

        Raises:
            ValueError: they are neither one per token nor one per sequence.
        """
        shape = self.leaf.shape
        costs = -wide(advantages.detach()).to(self.kept.dtype)
        if advantages.shape == shape:
            return costs
        expected = list(shape[:1]) if self.sequences is None else ["sequences"]
        unfit = (
            f"{self.name}: advantages {list(advantages.shape)} fit neither logprobs {list(shape)} "
            f"nor one per {'row' if self.sequences is None else 'sequence'} {expected}"
        )
        if advantages.ndim != 1 or (self.sequences is None and self.leaf.ndim != 2):
            raise ValueError(unfit)
        grouped = sequences_in(self.name, self.leaf, self.sequences)
        if len(advantages) < grouped.number or (self.sequences is None and len(advantages) != grouped.number):
            raise ValueError(unfit)
        return grouped.spread(costs)


@dataclass(frozen=True, slots=True)
class _Gathered:
    """What the blocks add up to."""

    slope: Tensor
    """In the shape of the leaf."""
    sums: Tensor
    """Of the loss, then of the means, float64 [1 + means]."""
    means: tuple[str, ...]
    """Names."""
    tops: tuple[Tensor, ...]
    """Largest of each peak, []."""
    peaks: tuple[str, ...]
    """Names."""


class _Summed(torch.autograd.Function):
    """A sum whose derivative by the leaf is known."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, total: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        ctx.dtype = leaf.dtype
        return total.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        slope: Tensor = ctx.saved_tensors[0]
        # `total.backward()` asks for 1 x slope, and to write that out anew was a fifth of the time of both passes.
        if not (grad.device.type == "cpu" and grad.item() == 1.0):
            slope = slope * grad
        return slope.to(ctx.dtype), None, None


def log_ratio(kept: Kept, new: Tensor, old: Tensor) -> Tensor:
    """log(new / old), clamped to +-20; 0 outside the mask if finite there. A new tensor."""
    return kept.only_(torch.sub(new, old).clamp_(-LOG_RATIO, LOG_RATIO))


def watch_ratio(part: Part, kept: Kept, ratio: Tensor, difference: Tensor) -> None:
    """Note metrics of a ratio exp(difference) that is 1 outside the mask; `difference` is used up."""
    part.watch("approx_kl", torch.sub(ratio, difference, out=difference).sub_(1.0))
    counting = kept.only(ratio)
    part.watch("ratio/mean", counting)
    part.watch_top("ratio/max", counting)


def check_clip(where: str, clip_low: float, clip_high: float, dual_clip: float | None = None) -> None:
    """Check the bounds of a ratio.

    Raises:
        ValueError: one is out of range.
    """
    within(where, "clip_low", clip_low, 0.0, 1.0)
    within(where, "clip_high", clip_high, 0.0)
    if dual_clip is not None and not dual_clip > 1.0:
        raise ValueError(f"{where}: dual_clip={dual_clip} must be more than 1")
