"""What all losses share: a micro-batch read once (checked, cleaned, masked), and its sum taken at the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlinf.algos.aggregate import coefficients
from rlinf.algos.masks import LOG_RATIO, Kept, attach, indicator, keep, known_finite, wide
from rlinf.algos.naming import same_shape, within
from rlinf.algos.sequences import sequences_in
from rlinf.algos.sums import LossSum, Max, Mean, Metric


@dataclass(slots=True)
class Part:
    """What a formula says of a block of tokens: all in the tokens' shape, without gradient, 0 outside the mask."""

    value: Tensor
    """Loss of each token."""
    slope: Tensor
    """Its derivative by `leaf`."""
    means: dict[str, Tensor] = field(default_factory=dict)
    """Metrics to average over tokens."""
    peaks: dict[str, Tensor] = field(default_factory=dict)
    """Metrics to take the maximum of."""


Formula = Callable[..., Part]
"""From (Kept, *tensors), cut to a block, to a Part."""

_BLOCK = 1 << 16
"""Elements of a block: in float32 256 KB, few enough to stay in a core's cache, many enough that calls cost little."""


HIGHEST_RATIO = math.exp(LOG_RATIO - 1e-5)
"""A ratio beyond has been clamped: it is constant, so it has no slope."""


@dataclass(frozen=True, slots=True)
class Ground:
    """One loss over one micro-batch."""

    name: str
    """Of the loss, for errors."""
    leaf: Tensor
    """What is differentiated: log-probs or values, as they came."""
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
        **others: Tensor | None,
    ) -> Ground:
        """Check shapes and names; `others` must have the shape of `leaf`, which is called logprobs unless a value."""
        same_shape(name, "values" if name == "value" else "logprobs", leaf, mask=mask, **others)
        kept = keep(mask, wide(leaf.detach()).dtype)
        coefficient, weight = coefficients(name, kept, how, norm_length, sequences)
        return cls(name, leaf, kept, coefficient, weight, sequences)

    def read(self, x: Tensor) -> Tensor:
        """`x` in the tokens' shape and the dtype of the loss, without gradient."""
        return x.detach().expand_as(self.leaf).to(self.kept.dtype)

    def sum(
        self,
        formula: Formula,
        *tensors: Tensor,
        factors: Sequence[Tensor | None] = (),
        entropy: Tensor | None = None,
    ) -> LossSum:
        """The loss of the micro-batch, differentiable by `leaf`.

        On a CPU the formula runs over one block of rows after the other, so that its intermediate results stay in the
        cache and in memory that is already mapped, which was measured to take a third off.

        Args:
            formula: losses, slopes and metrics of the tokens of a block.
            tensors: its arguments, cut along the first axis.
            factors: what to multiply loss and slope of each token by, broadcastable to `leaf`.
            entropy: to watch, in the shape of `leaf`.
        """
        scales = [self.kept.clean(self.read(factor)) for factor in factors if factor is not None]
        entropies = None if entropy is None else self.kept.clean(self.read(entropy))
        if self.coefficient is not None:
            scales.append(self.coefficient)
        slope = torch.empty(self.leaf.shape, dtype=self.kept.dtype, device=self.leaf.device)
        totals: list[Tensor] = []
        means: dict[str, list[Tensor]] = {}
        peaks: dict[str, list[Tensor]] = {}

        def add(block: slice) -> None:  # a function, so that nothing of a block outlives it
            kept = self.kept.part(block)
            part = formula(kept, *(x[block] for x in tensors))
            if entropies is not None:
                part.means["entropy"] = kept.only(entropies[block])
            for factor in scales:
                part.value, part.slope = part.value * factor[block], part.slope * factor[block]
            slope[block] = part.slope
            totals.append(part.value.sum())
            for name, x in part.means.items():
                means.setdefault(name, []).append(x.sum())
            for name, x in part.peaks.items():
                peaks.setdefault(name, []).append(x.amax() if x.numel() else x.new_full((), float("-inf")))

        for block in _blocks(self.leaf):
            add(block)
        metrics: dict[str, Metric] = {name: Mean(_added(sums), self.kept.count) for name, sums in means.items()}
        metrics |= {name: Max(torch.stack(tops).amax().double()) for name, tops in peaks.items()}
        return LossSum(attach(self.leaf, _added(totals).to(self.kept.dtype), slope), self.weight, metrics)

    def cost(self, advantages: Tensor) -> Tensor:
        """-advantages, broadcastable to the tokens' shape; anything finite outside the mask.

        Raises:
            ValueError: they are neither one per token nor one per sequence.
        """
        shape = self.leaf.shape
        per_sequence = advantages.ndim == 1 and (self.sequences is not None or self.leaf.ndim == 2)
        if advantages.shape == shape:
            return -self.kept.clean(self.read(advantages))
        expected = list(shape[:1]) if self.sequences is None else ["sequences"]
        unfit = (
            f"{self.name}: advantages {list(advantages.shape)} fit neither logprobs {list(shape)} "
            f"nor one per {'row' if self.sequences is None else 'sequence'} {expected}"
        )
        if not per_sequence:
            raise ValueError(unfit)
        grouped = sequences_in(self.name, self.leaf, self.sequences)
        if len(advantages) < grouped.number or (self.sequences is None and len(advantages) != grouped.number):
            raise ValueError(unfit)
        costs = -wide(advantages.detach()).to(self.kept.dtype)
        if not known_finite(costs):  # what belongs to a wholly masked sequence may be anything
            filled = torch.zeros_like(costs, dtype=torch.bool)
            filled[: grouped.number] = grouped.lengths(self.kept) > 0
            costs = torch.where(filled, costs, 0.0)
        return grouped.spread(costs)


def watch_ratio(part: Part, kept: Kept, ratio: Tensor, difference: Tensor) -> None:
    """Note metrics of a ratio exp(difference) that is 1 outside the mask; both tensors are used up."""
    part.means["approx_kl"] = torch.sub(ratio, difference, out=difference).sub_(1.0)
    part.means["ratio/mean"] = part.peaks["ratio/max"] = kept.only_(ratio)


def _blocks(like: Tensor) -> Iterator[slice]:
    """Slices of the first axis; one for everything on an accelerator, which wants large kernels."""
    if like.device.type != "cpu" or like.numel() <= _BLOCK:
        yield slice(None)
        return
    step = max(1, _BLOCK * like.shape[0] // like.numel())
    for start in range(0, like.shape[0], step):
        yield slice(start, start + step)


def _added(sums: list[Tensor]) -> Tensor:
    return sums[0].double() if len(sums) == 1 else torch.stack(sums).sum(dtype=torch.float64)


def by_sign(cost: Tensor, *numbers: tuple[float, float, float]) -> list[Tensor]:
    """For each cost (a negative advantage) a number by its sign, for each triple of numbers.

    Args:
        cost: any shape.
        numbers: what to take for a positive advantage, for 0, and for a negative one.
    """
    # By arithmetic, which is exact with 0 and 1 and costs a third of `where`.
    above, below = indicator(torch.lt, cost, 0.0), indicator(torch.gt, cost, 0.0)
    neither = 1.0 - above - below
    return [good * above + even * neither + bad * below for good, even, bad in numbers]


def check_clip(where: str, clip_low: float, clip_high: float, dual_clip: float | None = None) -> None:
    """Check the bounds of a ratio.

    Raises:
        ValueError: one is out of range.
    """
    within(where, "clip_low", clip_low, 0.0, 1.0)
    within(where, "clip_high", clip_high, 0.0)
    if dual_clip is not None and not dual_clip > 1.0:
        raise ValueError(f"{where}: dual_clip={dual_clip} must be more than 1")
