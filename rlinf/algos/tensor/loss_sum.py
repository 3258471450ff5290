"""Sums that stay un-normalised until the very end.

A micro-batch flows in as tensors and comes out as a `LossSum`: the sum of a loss over its tokens, and how many tokens
that were. LossSums add; only the optimizer step divides, once, by the count of the whole batch. So the gradient does
not depend on how the batch was cut, packed, ordered or spread over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Mean:
    """A metric that is an average: its sum and what to divide it by. Adding two averages over both."""

    total: Tensor
    """Sum of the values, []."""
    weight: Tensor
    """Number of values (or their total weight), []."""

    @property
    def value(self) -> float:
        """The average; 0.0 over nothing."""
        weight = float(self.weight)
        return float(self.total) / weight if weight else 0.0

    @property
    def empty(self) -> bool:
        """Nothing has been added up."""
        return not float(self.weight)

    def nothing(self) -> Mean:
        """What adds nothing."""
        return Mean(torch.zeros_like(self.total), torch.zeros_like(self.weight))

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.weight + other.weight)


@dataclass(frozen=True, slots=True)
class Max:
    """A metric that is a maximum. Adding two takes the larger."""

    largest: Tensor
    """The largest value so far, []; -inf over nothing."""

    @property
    def value(self) -> float:
        """The maximum; 0.0 over nothing."""
        largest = float(self.largest)
        return largest if largest != float("-inf") else 0.0

    @property
    def empty(self) -> bool:
        """Nothing has been compared."""
        return float(self.largest) == float("-inf")

    def nothing(self) -> Max:
        """What adds nothing."""
        return Max(torch.full_like(self.largest, float("-inf")))

    def __add__(self, other: Max) -> Max:
        return Max(torch.maximum(self.largest, other.largest))


@dataclass(frozen=True, slots=True)
class Explained:
    """How much of the variance of targets a prediction explains: 1 - Var(target - prediction) / Var(target)."""

    moments: Tensor
    """Number of targets, their sum and sum of squares, then the same two of target - prediction, float64 [5]."""

    @property
    def value(self) -> float:
        """1 for a perfect prediction, 0 for a constant one; 0.0 where the targets do not vary."""
        count, target, target_square, error, error_square = self.moments.tolist()
        variance = target_square - target * target / count if count else 0.0
        # Of equal targets only rounding is left, which must not be divided by.
        if variance <= 1e-12 * max(target_square, error_square):
            return 0.0
        return float(1.0 - (error_square - error * error / count) / variance)

    def nothing(self) -> Explained:
        """What adds nothing."""
        return Explained(torch.zeros_like(self.moments))

    def __add__(self, other: Explained) -> Explained:
        return Explained(self.moments + other.moments)


@dataclass(frozen=True, slots=True)
class EffectiveSize:
    """The share of samples that is left when they count with unequal weights: (sum w)^2 / (n sum w^2), of Kish."""

    moments: Tensor
    """Number of weights, their sum and their sum of squares, float64 [3]."""

    @property
    def value(self) -> float:
        """1 where all weights are equal, 1 / n where one has all of it; 1.0 over nothing."""
        count, total, square = self.moments.tolist()
        return float(total * total / (count * square)) if square else 1.0

    @property
    def empty(self) -> bool:
        """There are no weights."""
        return not float(self.moments[0])

    def nothing(self) -> EffectiveSize:
        """What adds nothing."""
        return EffectiveSize(torch.zeros_like(self.moments))

    def __add__(self, other: EffectiveSize) -> EffectiveSize:
        return EffectiveSize(self.moments + other.moments)


@dataclass(frozen=True, slots=True)
class Several:
    """Several metrics of the same sums. Adding two adds the sums."""

    sums: Tensor
    """Of any shape, float64."""
    told: Callable[[Tensor], Mapping[str, float]]
    """Metrics by their names, of the sums of the whole batch."""

    def nothing(self) -> Several:
        """What adds nothing."""
        return Several(torch.zeros_like(self.sums), self.told)

    def __add__(self, other: Several) -> Several:
        return Several(self.sums + other.sums, self.told)


Metric = Mean | Max | Explained | EffectiveSize | Several


@dataclass(frozen=True, slots=True)
class LossSum:
    """A loss before normalisation.

    `total.backward()` on every micro-batch, then dividing the gradient by the summed `weight`, is the gradient of the
    batch's mean loss.
    """

    total: Tensor
    """Sum over tokens of loss x mask (x coefficient, see `aggregate`), [], differentiable."""
    weight: Tensor
    """What to divide by: tokens, or sequences, [], float64 so that counting is exact beyond 2^24 tokens."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """What to watch, as sums too; without gradient."""

    def __add__(self, other: LossSum) -> LossSum:
        metrics = dict(self.metrics)
        for name, metric in other.metrics.items():
            metrics[name] = _join(metrics[name], metric) if name in metrics else metric
        return LossSum(self.total + other.total, self.weight + other.weight, metrics)

    def __radd__(self, other: int) -> LossSum:
        if other != 0:  # sum() starts from the number 0
            return NotImplemented
        return self

    def plus(self, term: LossSum, scale: float = 1.0) -> LossSum:
        """Another term of the same loss over the same tokens: totals and metrics gather, the weight stays.

        Args:
            term: such as a KL penalty, aggregated in the same way.
            scale: what to multiply it by.
        """
        return LossSum(self.total + scale * term.total, self.weight, {**self.metrics, **term.metrics})

    def watching(self, metrics: Mapping[str, Metric]) -> LossSum:
        """The same loss with further metrics."""
        return LossSum(self.total, self.weight, {**self.metrics, **metrics})

    def mean(self) -> Tensor:
        """The loss per token (or sequence), []; 0 with a zero gradient if none counts."""
        return self.total / torch.where(self.weight == 0, 1.0, self.weight).to(self.total.dtype)

    def average(self) -> float:
        """`mean` as a number."""
        return float(self.total) / (float(self.weight) or 1.0)

    def detach(self) -> LossSum:
        """The same sums without the graph that made them, to keep while further micro-batches come."""
        return LossSum(self.total.detach(), self.weight, self.metrics)

    def told_by_another(self) -> LossSum:
        """Sums of the same names that add nothing: of a rank that computed the same tokens as another."""
        none = {name: metric.nothing() for name, metric in self.metrics.items()}
        return LossSum(torch.zeros_like(self.total), torch.zeros_like(self.weight), none)

    def values(self) -> dict[str, float]:
        """Every metric as a number; those over nothing are absent, since 0 would look like a measurement."""
        found: dict[str, float] = {}
        for name, metric in self.metrics.items():
            if isinstance(metric, Several):
                found |= metric.told(metric.sums)
            elif isinstance(metric, Explained) or not metric.empty:
                found[name] = metric.value
        return found


def _join(a: Metric, b: Metric) -> Metric:
    if isinstance(a, Mean) and isinstance(b, Mean):
        return a + b
    if isinstance(a, Max) and isinstance(b, Max):
        return a + b
    if isinstance(a, Explained) and isinstance(b, Explained):
        return a + b
    if isinstance(a, EffectiveSize) and isinstance(b, EffectiveSize):
        return a + b
    if isinstance(a, Several) and isinstance(b, Several):
        return a + b
    raise TypeError(f"one metric name stands for a {type(a).__name__} and a {type(b).__name__}: give them two names")


def mean_of(values: Tensor, mask: Tensor) -> Mean:
    """The average of `values` where `mask` is true (both of one shape), without gradient."""
    values = torch.where(mask, values.detach(), values.new_zeros(()))
    return Mean(values.sum(dtype=torch.float64), mask.sum(dtype=torch.float64))


def max_of(values: Tensor, mask: Tensor) -> Max:
    """The largest of `values` where `mask` is true (both of one shape), without gradient."""
    if values.numel() == 0:
        return Max(torch.full((), float("-inf"), dtype=torch.float64, device=values.device))
    return Max(torch.where(mask, values.detach(), values.new_full((), float("-inf"))).max().double())
