"""Sums that stay un-normalised until the very end, and what advantages and losses are computed from.

A micro-batch flows in as tensors and comes out as a `LossSum`: the sum of a loss over its tokens, and how many tokens
that were. LossSums add; only the optimizer step divides, once, by the count of the whole batch. So the gradient does
not depend on how the batch was cut, packed, ordered or spread over ranks. A sequence lies whole in one micro-batch, so
that sums over sequences add over micro-batches and ranks like sums over tokens.

    LossSum, Mean, Max, Explained, EffectiveSize, MetricGroup       sums of a loss and of its metrics
    Mask, Sequences             which positions count, and which sequence they belong to
    Answers, Advantages, MicroBatch         plain data; `need` names what an algorithm misses in them
    one_of, same_shape, within  checks of arguments, whose errors say what was probably meant

Everything is float32 (float64 stays).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Self

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


@dataclass(frozen=True, slots=True)
class LossSum:
    """A loss before normalisation.

    `total.backward()` on every micro-batch, then dividing the gradient by the summed `weight`, is the gradient of the
    batch's mean loss.
    """

    total: Tensor
    """Sum over tokens of loss x mask (x coefficient, see `losses.coefficients`), [], differentiable."""
    weight: Tensor
    """Divisor: tokens, or sequences, [], float64 so that counting is exact beyond 2^24 tokens."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Metrics, as sums too; without gradient."""

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
        """This loss with further metrics."""
        return LossSum(self.total, self.weight, {**self.metrics, **metrics})

    def mean(self) -> Tensor:
        """The loss per token (or sequence), []; 0 with a zero gradient if none counts."""
        return self.total / torch.where(self.weight == 0, 1.0, self.weight).to(self.total.dtype)

    def average(self) -> float:
        """`mean` as a number."""
        return float(self.total) / (float(self.weight) or 1.0)

    def detach(self) -> LossSum:
        """These sums without the graph that made them, to keep while further micro-batches come."""
        return LossSum(self.total.detach(), self.weight, self.metrics)

    def to(self, device: torch.device) -> LossSum:
        """These sums on a device."""
        metrics = {name: _moved(metric, device) for name, metric in self.metrics.items()}
        return LossSum(self.total.to(device), self.weight.to(device), metrics)

    def zeros_like(self) -> LossSum:
        """Sums of the same names that add nothing: of a rank that computed the same tokens as another."""
        metrics = {name: metric.zeros_like() for name, metric in self.metrics.items()}
        return LossSum(torch.zeros_like(self.total), torch.zeros_like(self.weight), metrics)

    def values(self) -> dict[str, float]:
        """Every metric as a number; those over nothing are absent, since 0 would look like a measurement."""
        numbers: dict[str, float] = {}
        for name, metric in self.metrics.items():
            if isinstance(metric, MetricGroup):
                numbers |= metric.metrics(metric.sums)
            elif not metric.empty:
                numbers[name] = metric.value
        return numbers


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

    def zeros_like(self) -> Mean:
        """An average over nothing."""
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
        return 0.0 if self.empty else float(self.largest)

    @property
    def empty(self) -> bool:
        """Nothing has been compared."""
        return float(self.largest) == float("-inf")

    def zeros_like(self) -> Max:
        """A maximum over nothing."""
        return Max(torch.full_like(self.largest, float("-inf")))

    def __add__(self, other: Max) -> Max:
        return Max(torch.maximum(self.largest, other.largest))


@dataclass(frozen=True, slots=True)
class _Moments:
    """A metric that follows from sums. Adding two adds the sums."""

    moments: Tensor

    @property
    def empty(self) -> bool:
        """Nothing has been added up."""
        return not float(self.moments[0])

    def zeros_like(self) -> Self:
        """Sums over nothing."""
        return type(self)(torch.zeros_like(self.moments))

    def __add__(self, other: Self) -> Self:
        return type(self)(self.moments + other.moments)


class Explained(_Moments):
    """How much of the variance of targets a prediction explains: 1 - Var(target - prediction) / Var(target).

    Its moments: number of targets, their sum and sum of squares, then the same two of target - prediction, float64 [5].
    """

    __slots__ = ()

    @classmethod
    def of(cls, prediction: Tensor, target: Tensor, mask: Mask) -> Explained:
        """The metric of predictions where `mask` counts."""
        error, target = (target - prediction).detach().double(), target.detach().double()
        sums = mask.sums((target, target.square(), error, error.square()))
        return cls(torch.stack([mask.number, *sums]))

    @property
    def value(self) -> float:
        """1 for a perfect prediction, 0 for a constant one; 0.0 where the targets do not vary."""
        count, target, target_square, error, error_square = self.moments.tolist()
        variance = target_square - target * target / count if count else 0.0
        # Of equal targets only rounding is left, which must not be divided by.
        if variance <= 1e-12 * max(target_square, error_square):
            return 0.0
        return float(1.0 - (error_square - error * error / count) / variance)

    @property
    def empty(self) -> bool:
        """False: over nothing, it is 0."""
        return False


class EffectiveSize(_Moments):
    """The share of samples that is left when they count with unequal weights: (sum w)^2 / (n sum w^2), of Kish.

    Its moments: number of weights, their sum and their sum of squares, float64 [3].
    """

    __slots__ = ()

    @classmethod
    def of(cls, weights: Tensor, mask: Mask) -> EffectiveSize:
        """The metric of weights where `mask` counts."""
        return cls(torch.stack([mask.number, *mask.sums((weights, weights.square()))]))

    @property
    def value(self) -> float:
        """1 where all weights are equal, 1 / n where one has all of it; 1.0 over nothing."""
        count, total, square = self.moments.tolist()
        return float(total * total / (count * square)) if square else 1.0


@dataclass(frozen=True, slots=True)
class MetricGroup:
    """Several metrics of the same sums. Adding two adds the sums."""

    sums: Tensor
    """Sums of any shape, float64."""
    metrics: Callable[[Tensor], Mapping[str, float]]
    """Metrics by their names, from the sums of the whole batch."""

    def zeros_like(self) -> MetricGroup:
        """Sums over nothing."""
        return MetricGroup(torch.zeros_like(self.sums), self.metrics)

    def __add__(self, other: MetricGroup) -> MetricGroup:
        return MetricGroup(self.sums + other.sums, self.metrics)


Metric = Mean | Max | Explained | EffectiveSize | MetricGroup


def _moved(metric: Metric, device: torch.device) -> Metric:
    parts = {each.name: getattr(metric, each.name) for each in fields(metric)}
    there = {name: part.to(device) for name, part in parts.items() if isinstance(part, Tensor)}
    return replace(metric, **there)  # type: ignore[arg-type]  # of each kind its own


def _join(a: Metric, b: Metric) -> Metric:
    if type(a) is not type(b):
        raise TypeError(
            f"one metric name stands for a {type(a).__name__} and a {type(b).__name__}: give them two names"
        )
    return a + b  # type: ignore[operator]


def mean_of(values: Tensor, mask: Tensor) -> Mean:
    """The average of `values` where `mask` is true (both of one shape), without gradient."""
    values = torch.where(mask, values.detach(), values.new_zeros(()))
    return Mean(values.sum(dtype=torch.float64), mask.sum(dtype=torch.float64))


def max_of(values: Tensor, mask: Tensor | None) -> Max:
    """The largest of `values` where `mask` is true (both of one shape; None: everywhere), without gradient."""
    if values.numel() == 0:
        return Max(torch.full((), float("-inf"), dtype=torch.float64, device=values.device))
    counted = values.detach() if mask is None else torch.where(mask, values.detach(), float("-inf"))
    return Max(counted.max().double())


LOG_RATIO = 20.0
"""Bound of |log ratio|: exp(20) = 5e8 is beyond every clip and still squares within float32."""


def wide(x: Tensor) -> Tensor:
    """In float32, or in float64 if it is."""
    return x if x.dtype == torch.float64 else x.float()


def finite(x: Tensor) -> Tensor:
    """In float32 (float64 stays), with a number for -inf, so that two impossible tokens are equally likely."""
    x, least = wide(x), torch.finfo(x.dtype).min / 4  # a quarter of the range: their difference is 0, and no NaN
    # on a CPU the way back through a clamp takes longer than to see that there is nothing to do
    if x.requires_grad and x.device.type == "cpu" and x.numel() and float(x.detach().min()) >= least:
        return x
    return x.clamp(min=least)


@dataclass(frozen=True, slots=True)
class Mask:
    """Positions that count, and how much each does; what lies outside may be anything, NaN and inf included."""

    inside: Tensor
    """bool"""
    number: Tensor
    """How many count, [], float64."""
    weight: Tensor | None
    """How many tokens each position counts as in a mean, in the shape of `inside`, 0 outside it; None: as one."""
    dtype: torch.dtype
    """float32 or float64."""
    whole: bool = False
    """Every position counts, as far as that is known without waiting for a device: nothing need be left out."""

    @classmethod
    def of(cls, mask: Tensor, like: Tensor) -> Mask:
        """Read a mask.

        Args:
            mask: bool or 0/1. One of floats is also how much each position counts: a loss with 2.0 at all tokens of a
                sequence is that of a batch which has the sequence twice. Metrics count every position once.
            like: what is masked: in float64 if it is, else in float32.
        """
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        inside = mask.bool()
        number, weight = inside.sum(), mask.to(dtype) if mask.is_floating_point() else None
        whole = number.device.type == "cpu" and int(number) == inside.numel()
        return cls(inside, number.double(), weight, dtype, whole)

    def fill(self, x: Tensor) -> Tensor:
        """`x` where it counts, finite for -inf, and 0 elsewhere, also in gradients; a NaN that counts stays one."""
        return finite(x.to(self.dtype) if self.whole else torch.where(self.inside, x.to(self.dtype), 0.0))

    def watch(self, metrics: Mapping[str, Tensor]) -> dict[str, Metric]:
        """Averages of numbers, without gradient, over what counts; of names that end in /max, maxima."""
        watched = {name: x for name, x in metrics.items() if not name.endswith("/max")}
        means = {
            name: Mean(total, self.number) for name, total in zip(watched, self.sums(watched.values()), strict=True)
        }
        inside = None if self.whole else self.inside
        return {name: means[name] if name in means else max_of(x, inside) for name, x in metrics.items()}

    def sums(self, parts: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """Sums over what counts, without gradient, [] each, float64: together, since each operation on a few numbers
        costs as much as on a thousand."""
        rows = [wide(x.detach()) for x in parts]
        if not rows:
            return ()
        table = torch.stack(rows)
        counted = table if self.whole else torch.where(self.inside, table, 0.0)
        return counted.flatten(1).sum(1).double().unbind()


_NUMBERS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Number of sequences by their ids, for ids on accelerators: kept beside the tensor, which losses of any origin hand
on."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """Sums within sequences, and back."""

    ids: Tensor | None
    """Sequence of each token, int64, in the tokens' shape; None: each row is one."""
    number: int
    """How many sequences there are, those without a token that counts included."""

    def sum(self, x: Tensor) -> Tensor:
        """Sum of `x`, [rows, tokens] or the shape of `ids`, within each sequence, [sequences]."""
        if self.ids is None:
            return x.sum(1)
        # float64, since a sum of thousands one after the other would lose digits, other ones for other packings
        gathered = torch.zeros(self.number, dtype=torch.float64, device=x.device)
        return gathered.index_add_(0, self.ids.flatten(), x.flatten().double()).to(x.dtype)

    def lengths(self, mask: Mask) -> Tensor:
        """Tokens that count in each sequence, [sequences]."""
        return self.sum(mask.inside.to(mask.dtype))

    def spread(self, x: Tensor) -> Tensor:
        """`x`, [sequences], for each token: broadcastable to the tokens' shape."""
        return x[:, None] if self.ids is None else x.index_select(0, self.ids.flatten()).view(self.ids.shape)


def counted(ids: Tensor, number: int) -> Tensor:
    """The ids, of which it is known that they are from 0 to below `number`, so that no device is asked for the largest.

    Args:
        ids: int64.
        number: how many sequences there are.
    """
    if ids.device.type != "cpu":
        _NUMBERS[ids] = number
    return ids


def sequences_in(where: str, like: Tensor, ids: Tensor | None) -> Sequences:
    """The sequences of tokens laid out as `like`.

    Args:
        where: function to name in errors.
        like: [rows, tokens], or packed [tokens].
        ids: in the shape of `like`, whole numbers from 0; None: each row is a sequence.

    Raises:
        ValueError: packed tokens without ids, or ids that are not whole numbers from 0 in that shape.
    """
    if ids is None:
        if like.ndim != 2:
            raise ValueError(
                f"{where}: tokens {list(like.shape)} are packed, so `sequences` must say which sequence each belongs "
                "to: whole numbers in the same shape (sequences.ids_of_lengths makes them)"
            )
        return Sequences(None, like.shape[0])
    same_shape(where, "the tokens", like, sequences=ids)
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"{where}: sequences must be whole numbers from 0, not {ids.dtype}")
    if ids.device.type != "cpu" and (number := _NUMBERS.get(ids)) is not None:
        return Sequences(ids, number)
    if ids.numel() == 0:
        return Sequences(ids.long(), 0)
    lowest, highest = ids.aminmax()
    if int(lowest) < 0:
        raise ValueError(f"{where}: sequences must be whole numbers from 0, found {int(lowest)}")
    return Sequences(ids.long(), int(highest) + 1)


def ids_of_lengths(lengths: Sequence[int] | Tensor) -> Tensor:
    """The sequence of each token when sequences of these lengths lie one after the other, int64 [tokens]."""
    lengths = torch.as_tensor(lengths)
    return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)


@dataclass(frozen=True, slots=True)
class Answers:
    """A batch of judged answers; what a spec does not need may be missing."""

    rewards: Tensor
    """Reward of each answer, [answers]; an advantage is shown them in float64, after shaping."""
    groups: Tensor
    """Which group each belongs to, whole numbers, [answers]."""
    mask: Tensor
    """Which tokens count, bool [answers, tokens]; an advantage is shown floats, how much each counts, if there are
    `weights`."""
    weights: Tensor | None = None
    """How many answers each counts as, more than 0, [answers]; None: as one."""
    truncated: Tensor | None = None
    """Answers that the length limit cut, bool [answers]."""
    logprobs: Tensor | None = None
    """Under the policy that sampled, nats, [answers, tokens]."""
    ref_logprobs: Tensor | None = None
    """Under the reference, nats, [answers, tokens]."""
    teacher_logprobs: Tensor | None = None
    """Under the teacher, nats, [answers, tokens]."""
    values: Tensor | None = None
    """The critic's prediction before each token, [answers, tokens]."""
    token_rewards: Tensor | None = None
    """The parts of `rewards` that fell at tokens, [answers, tokens]; what `rewards` is more falls at the last one."""

    turns: Tensor | None = None
    """Number of the turn that each token belongs to, from 0, int64 [answers, tokens]; None: each answer is one."""

    lengths: Tensor | None = None
    """How many tokens were generated for each, [answers]; None: as many as count."""
    spent: Tensor | None = None
    """The parts of `rewards` that fell at generated tokens which do not count, [answers]; None: none did."""

    @property
    def unspent(self) -> Tensor:
        """The part of `rewards` that falls at tokens that count, [answers]."""
        return self.rewards if self.spent is None else self.rewards - self.spent

    def need(self, name: str) -> Tensor:
        """A tensor that this algorithm cannot do without.

        Raises:
            ValueError: it was not given.
        """
        return _given(self, name)


@dataclass(frozen=True, slots=True)
class Advantages:
    """Advantages of a batch of answers, and what goes with them to the loss."""

    values: Tensor
    """Advantage of each answer, [answers], or of each token, [answers, tokens]; float32, without gradient."""
    mask: Tensor
    """Which tokens count in the loss, bool [answers, tokens]."""
    rewards: Tensor
    """After shaping, float64 [answers]."""
    returns: Tensor | None = None
    """Targets of the critic, [answers, tokens]."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Tokens to learn from, [rows, tokens] or packed [tokens]; what a spec does not need may be missing."""

    logprobs: Tensor
    """Under the policy being trained, nats; differentiable."""
    mask: Tensor
    """Which tokens count, bool; or, in floats, how much each does."""
    old_logprobs: Tensor | None = None
    """Under the policy that the ratio starts from (with `loss.decoupled`: the one that drew the tokens)."""
    advantages: Tensor | None = None
    """Per token, or one per row or sequence."""
    sequences: Tensor | None = None
    """Sequence of each token, whole numbers from 0; None: each row is one."""
    entropy: Tensor | None = None
    """Entropy of each token's distribution, nats; differentiable if the spec has a bonus for it."""
    ref_logprobs: Tensor | None = None
    """Under the reference."""
    behavior_logprobs: Tensor | None = None
    """The engine's, for `correction` and `rejection`."""
    proximal_logprobs: Tensor | None = None
    """Under the weights just before the update, for `loss.decoupled` and `rejection`."""
    divergence: Tensor | None = None
    """Divergence from the teacher's distribution of each token, nats; differentiable."""
    versions: Tensor | None = None
    """Version of the weights that made each token."""
    version: int | None = None
    """Version of the weights being trained, before the update."""

    def need(self, name: str) -> Tensor:
        """A tensor that this algorithm cannot do without.

        Raises:
            ValueError: it was not given.
        """
        return _given(self, name)

    def next_version(self) -> int:
        """The version that this update makes.

        Raises:
            ValueError: `version` was not given.
        """
        if self.version is None:
            raise ValueError("MicroBatch.version is missing, which this algorithm needs")
        return self.version + 1


def _given(holder: Answers | MicroBatch, name: str) -> Tensor:
    value: Tensor | None = getattr(holder, name)
    if value is None:
        raise ValueError(f"{type(holder).__name__}.{name} is missing, which this algorithm needs")
    return value


def one_of(where: str, argument: str, value: object, choices: Iterable[str]) -> None:
    """Check that `value` is one of the names.

    Raises:
        ValueError: it is not; the text names the nearest.
    """
    names = list(choices)
    if value not in names:
        near = get_close_matches(str(value), names, n=1)
        raise ValueError(
            f"{where}: {argument}={value!r} is none of {names}" + (f"; meant {near[0]!r}?" if near else "")
        )


def same_shape(where: str, of: str, like: Tensor, **others: Tensor | None) -> None:
    """Check that the tensors given (None is not) have the shape of `like`, which the text calls `of`.

    Raises:
        ValueError: one has not.
    """
    for argument, value in others.items():
        if value is not None and value.shape != like.shape:
            raise ValueError(f"{where}: {argument} {list(value.shape)} must have the shape of {of} {list(like.shape)}")


def within(where: str, argument: str, value: float, low: float = float("-inf"), high: float = float("inf")) -> None:
    """Check that low <= value <= high, and that it is a number.

    Raises:
        ValueError: it is not.
    """
    if not low <= value <= high:
        bounds = f"at least {low:g}" if high == float("inf") else f"between {low:g} and {high:g}"
        raise ValueError(f"{where}: {argument}={value} must be {bounds}")
