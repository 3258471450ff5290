"""From losses of tokens to one un-normalised sum and the weight that normalises it.

The four ways differ in two numbers only, a coefficient per token and a weight:

    how                        coefficient of token t of sequence s     weight
    token-mean                 1                                        tokens
    seq-mean-token-sum         1                                        sequences
    seq-mean-token-mean        1 / tokens of s                          sequences
    seq-mean-token-sum-norm    1                                        sequences x norm_length

Both add over micro-batches and ranks; the optimizer step divides the summed gradient once by the summed weight. A
sequence without a token that counts is none: padding rows, or an empty share, change nothing. Where the mask gives the
tokens of a sequence a weight w, the sequence counts as w of its kind: coefficient and weight are both w times as large.

Base of all token losses: checks and masks a micro-batch, runs a formula block by block, sums values and slopes.

Estimates of a Kullback-Leibler divergence from the sampled tokens alone.

One function for every place that needs one. Its arguments are named: k3 is not symmetric, and swapping them changes
what is optimised without any sign of it.

Importance weights: corrections for tokens sampled by an older policy or by the inference engine.

In flow log-probs under two policies; out come weights for the tokens' losses, without gradient, and what to watch about
them. The inference engine and the trainer never agree exactly on the same weights; an older policy agrees even less.

Clipped surrogate losses: PPO, GRPO, DAPO, GSPO and decoupled PPO.

Surrogate losses with soft or stop-gradient clipping: CISPO, AIPO, SAPO.

Diagnostic metrics: log-probs of trainer and engine that differ, and how far the policy is from older tokens.

Losses on likelihoods: of worked answers, towards a reference (KL), and entropy.

The critic's loss: predicted against observed returns, with a bound on how far one batch may move a prediction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from rlinf.algos import loss_sum
from rlinf.algos.loss_sum import (
    LOG_RATIO,
    EffectiveSize,
    Explained,
    Kept,
    LossSum,
    Max,
    Mean,
    Metric,
    Sequences,
    attach,
    indicator,
    keep,
    known_finite,
    largest,
    log_ratio,
    max_of,
    mean_of,
    one_of,
    same_shape,
    sequences_in,
    wide,
    within,
)

How = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
HOWS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def reduce(
    loss: Tensor,
    mask: Tensor,
    how: How = "token-mean",
    norm_length: float | None = None,
    *,
    sequences: Tensor | None = None,
) -> LossSum:
    """Sum the losses of tokens, with the weight that makes the sum the mean asked for.

    `token-mean` is DAPO's (arXiv:2503.14476, eq. 12); `seq-mean-token-mean` GRPO's (arXiv:2402.03300, eq. 3);
    `seq-mean-token-sum-norm` Dr. GRPO's (arXiv:2503.20783, listing 1).

    Args:
        loss: of each token, [rows, tokens] or packed [tokens]; differentiable. It may be NaN where it does not count,
            but what it was computed from may not: autograd would carry 0 x NaN back.
        mask: which tokens count, same shape, bool or 0/1.
        how: see the table above.
        norm_length: the constant that `seq-mean-token-sum-norm` divides by, tokens; the longest response allowed.
        sequences: sequence of each token, whole numbers from 0, same shape; None: each row is one.

    Returns:
        The sum, differentiable by `loss`, and its weight; `.mean()` divides.

    Raises:
        ValueError: shapes do not fit, `how` is unknown, or `norm_length` is missing or would be ignored.
    """
    same_shape("reduce", "loss", loss, mask=mask)
    values = wide(loss.detach())
    kept = keep(mask, values.dtype)
    coefficient, weight = coefficients("reduce", kept, how, norm_length, sequences)
    slope = kept.mask.to(values.dtype) if coefficient is None else kept.only(coefficient.expand_as(values))
    values = kept.only(kept.clean(loss))
    total = values.sum() if coefficient is None else (values * coefficient).sum()
    return LossSum(attach(loss, total, slope), weight)


def coefficients(
    where: str, kept: Kept, how: str, norm_length: float | None, sequences: Tensor | None
) -> tuple[Tensor | None, Tensor]:
    """The coefficient of each token and the weight of all.

    Args:
        where: function to name in errors.
        kept: which tokens count.
        how, norm_length, sequences: see `reduce`.

    Returns:
        The coefficient, broadcastable to the tokens' shape, or None for 1 everywhere; the weight, [], float64.
    """
    one_of(where, "how", how, HOWS)
    if (norm_length is not None) != (how == "seq-mean-token-sum-norm"):
        raise ValueError(
            f"{where}: norm_length={norm_length} with how={how!r}: 'seq-mean-token-sum-norm' needs it, no other has it"
        )
    if norm_length is not None and not norm_length > 0:
        raise ValueError(f"{where}: norm_length={norm_length} must be more than 0")
    weight = kept.weight
    if how == "token-mean":
        return weight, kept.count if weight is None else weight.double().sum()
    grouped = sequences_in(where, kept.mask, sequences)
    lengths = grouped.lengths(kept)
    share = 1.0 / lengths.clamp(min=1)
    filled = (lengths > 0).sum().double() if weight is None else (grouped.sum(weight) * share).double().sum()
    if how == "seq-mean-token-mean":
        share = grouped.spread(share)
        return share if weight is None else share * weight, filled
    return weight, filled * (norm_length or 1.0)


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


def kept_log_ratio(kept: Kept, new: Tensor, old: Tensor) -> Tensor:
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


Level = Literal["token", "sequence", "geometric"]
LEVELS = ("token", "sequence", "geometric")
Outside = Literal["truncate", "mask"]
OUTSIDES = ("truncate", "mask")

_LOG2_E = math.log2(math.e)


def weights(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    *,
    cap: float = 2.0,
    floor: float = 0.0,
    level: Level = "token",
    outside: Outside = "truncate",
    sequences: Tensor | None = None,
) -> tuple[Tensor, dict[str, Metric]]:
    """Weights that make tokens drawn by one policy count as if another had drawn them.

        w_t = exp(logp_t - behavior_t)                      level="token": biased, little variance
        w_t = exp(sum of that over t's sequence)            level="sequence": unbiased before it is cut, more variance
        w_t = exp(mean of that over t's sequence)           level="geometric": no wider for longer sequences
        w   = clip(w, floor, cap)                           outside="truncate"
        w   = w if floor <= w <= cap else 0                 outside="mask"

    Truncated importance sampling (Yao et al., "Your efficient RL framework secretly brings you off-policy RL training",
    2025) and its masked form (IcePop, Ling team, 2025; there 0.5 and 2 to 5). The geometric mean of a sequence's ratios
    is the ratio of GSPO (arXiv:2507.18071, eq. 7). A masked token stays in the denominator of the loss, so that the
    rest is not scaled up.

    Args:
        logprobs: under the policy to correct towards (the trainer's, for the weights that sampled), [rows, tokens] or
            packed [tokens].
        behavior_logprobs: under what drew the tokens, same shape.
        mask: which tokens count, same shape, bool or 0/1.
        cap, floor: bounds of a weight.
        level: a weight per token, or one per sequence: the product of its tokens' ratios, or their geometric mean.
        outside: what becomes of a weight outside the bounds.
        sequences: sequence of each token, whole numbers from 0, same shape; None: each row is one.

    Returns:
        Weights in the shape of `logprobs`, 0 outside the mask; metrics `is/mean` and `is/max` of the weights before
        they are cut, `is/outside` the share of tokens whose weight is beyond a bound.

    Raises:
        ValueError: shapes differ, bounds are out of order, or a name is unknown.
    """
    same_shape("importance.weights", "logprobs", logprobs, behavior_logprobs=behavior_logprobs, mask=mask)
    one_of("importance.weights", "level", level, LEVELS)
    kept = keep(mask, wide(logprobs.detach()).dtype)
    check_bounds("importance.weights", cap, floor, outside)
    difference = log_ratio(logprobs, behavior_logprobs, kept)
    if level != "token":
        grouped = sequences_in("importance.weights", logprobs, sequences)
        if level == "geometric":
            whole = _mean_within(grouped, difference, kept)
        else:
            whole = grouped.sum(difference).clamp_(-LOG_RATIO, LOG_RATIO)
        difference = grouped.spread(whole).expand_as(difference)
    cut, ratio, inside = cut_weights(exponential(difference), kept, cap, floor, outside)
    beyond = Mean(kept.count - kept.only_(inside).sum(), kept.count)
    return cut, {"is/mean": kept.mean(ratio), "is/max": largest(ratio), "is/outside": beyond}


def cut_weights(ratio: Tensor, kept: Kept, cap: float, floor: float, outside: str) -> tuple[Tensor, Tensor, Tensor]:
    """Weights within bounds and weights as they are, both 0 outside the mask, and which were within bounds.

    Args:
        ratio: weights before the cut, finite, in the mask's shape; used up.
        kept: which tokens count.
        cap, floor, outside: see `weights`.
    """
    ratio = kept.only_(ratio)
    cut = ratio.clamp(floor, cap)
    inside = indicator(torch.eq, cut, ratio)
    if outside == "mask":
        torch.mul(ratio, inside, out=cut)
    return kept.only_(cut), ratio, inside


def exponential(x: Tensor, out: Tensor | None = None) -> Tensor:
    """exp(x) as 2^(x log2 e), which takes a third of the time on a CPU; into `out`, which may be `x`, or a new tensor.

    Rounding the exponent shifts the result by up to 1e-6 of it at |x| = 20 and less nearer to 0: as much as rounding
    two float32 log-probs shifts their difference.
    """
    return torch.mul(x, _LOG2_E, out=out).exp2_()


def check_bounds(where: str, cap: float, floor: float, outside: str) -> None:
    """Check the bounds of weights.

    Raises:
        ValueError: they are out of order, or `outside` is unknown.
    """
    one_of(where, "outside", outside, OUTSIDES)
    if not 0.0 <= floor < cap:
        raise ValueError(f"{where}: floor={floor} must be at least 0 and less than cap={cap}")


def drifted(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    most: float,
    sequences: Tensor | None = None,
) -> tuple[Tensor, dict[str, Metric]]:
    """Weights that leave out bad answers which the policy has already left behind.

        w_t = 0 where A < 0 and mean over the sequence of (old - logp) > most, else 1

    Off-policy sequence masking, DeepSeek-V3.2 (arXiv:2512.02556, section 3.1). What is left out stays in the
    denominator.

    Args:
        logprobs: under the policy being trained, [rows, tokens] or packed [tokens].
        old_logprobs: under the policy that drew the tokens, same shape.
        advantages: of that shape, or one per row or sequence.
        mask: which tokens count, same shape.
        most: mean drift allowed, nats per token.
        sequences: see `weights`.

    Returns:
        Weights 0 or 1 that broadcast to `logprobs`; metric `drifted`, the share of tokens left out.

    Raises:
        ValueError: shapes differ.
    """
    same_shape("importance.drifted", "logprobs", logprobs, old_logprobs=old_logprobs, mask=mask)
    kept = keep(mask, wide(logprobs.detach()).dtype)
    grouped = sequences_in("importance.drifted", logprobs, sequences)
    if advantages.shape != logprobs.shape and advantages.shape != (grouped.number,):
        raise ValueError(
            f"importance.drifted: advantages {list(advantages.shape)} fit neither logprobs {list(logprobs.shape)} nor "
            f"one per sequence [{grouped.number}]"
        )
    mean = _mean_within(grouped, log_ratio(old_logprobs, logprobs, kept), kept)
    bad = (advantages if advantages.shape == logprobs.shape else grouped.spread(advantages)).detach() < 0
    gone = kept.only((bad & grouped.spread(mean > most)).to(kept.dtype).expand_as(logprobs))
    return 1.0 - gone, {"drifted": kept.mean(gone)}


def rejected(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    *,
    floor: float,
    cap: float,
    least: float = 0.0,
    sequences: Tensor | None = None,
) -> tuple[Tensor, dict[str, Metric]]:
    """Weights that leave out whole sequences which the policy would hardly have drawn.

        w_t = 1 where floor <= exp(mean over t's sequence of (logp - behavior)) <= cap
                and every ratio exp(logp - behavior) of the sequence is at least `least`, else 0

    Rejection by the geometric mean of the ratios (Liu, Li et al., "When speed kills stability: demystifying RL collapse
    from the training-inference mismatch", 2025; there 0.999 to 1.001 for long answers of the same weights), with their
    veto of single tokens. What is left out stays in the denominator.

    Args:
        logprobs: under the policy to correct towards, [rows, tokens] or packed [tokens].
        behavior_logprobs: under what drew the tokens, same shape.
        mask: which tokens count, same shape.
        floor, cap: bounds of a sequence's geometric mean ratio.
        least: smallest ratio that any token of it may have; 0 for no bound.
        sequences: see `weights`.

    Returns:
        Weights 0 or 1 that broadcast to `logprobs`; metric `rejected`, the share of tokens left out.

    Raises:
        ValueError: shapes differ, or bounds are out of order.
    """
    same_shape("importance.rejected", "logprobs", logprobs, behavior_logprobs=behavior_logprobs, mask=mask)
    check_rejection("importance.rejected", floor, cap, least)
    kept = keep(mask, wide(logprobs.detach()).dtype)
    grouped = sequences_in("importance.rejected", logprobs, sequences)
    difference = log_ratio(logprobs, behavior_logprobs, kept)
    ratio = _mean_within(grouped, difference, kept).exp()
    out = (ratio < floor) | (ratio > cap)
    if least:
        out |= grouped.sum(kept.only((difference < math.log(least)).to(kept.dtype))) > 0
    gone = kept.only(grouped.spread(out).to(kept.dtype).expand_as(logprobs))
    return 1.0 - gone, {"rejected": kept.mean(gone)}


def check_rejection(where: str, floor: float, cap: float, least: float) -> None:
    """Check the bounds of sequences.

    Raises:
        ValueError: they are out of order: they must hold 1, the ratio of a policy to itself.
    """
    if not 0.0 <= floor < 1.0 < cap:
        raise ValueError(f"{where}: floor={floor} must be at least 0 and less than 1, and cap={cap} more than 1")
    if not 0.0 <= least < 1.0:
        raise ValueError(f"{where}: least={least} must be at least 0 and less than 1")


def _mean_within(grouped: Sequences, x: Tensor, kept: Kept) -> Tensor:
    """The mean of `x`, 0 outside the mask, over the tokens of each sequence that count, [sequences]; 0 over none."""
    return grouped.sum(x) / grouped.lengths(kept).clamp(min=1)


def interpolate(
    logprobs: Tensor, behavior_logprobs: Tensor, versions: Tensor, *, current: int, proximal: int | None = None
) -> Tensor:
    """Proximal log-probs without a forward pass, on the line between the policies before and after.

        a = (v_prox - v_behavior) / (v_current - v_behavior), within 0 and 1
        log pi_prox = log pi_behavior + a (log pi - log pi_behavior)

    AReaL's log-linear approximation of decoupled PPO. Tokens of the proximal version or newer have a = 0: there the
    proximal policy is the one that drew them.

    Args:
        logprobs: under the policy being trained, any shape; not differentiated.
        behavior_logprobs: under the policy that drew the tokens, same shape.
        versions: version of the weights that drew each token, whole numbers, same shape.
        current: version that the weights being trained will have.
        proximal: version of the proximal weights; None for current - 1, those just before the update.

    Returns:
        Log-probs in the shape of `logprobs`, without gradient.

    Raises:
        ValueError: shapes differ, or the proximal version is not before the current one.
    """
    same_shape("interpolate", "logprobs", logprobs, behavior_logprobs=behavior_logprobs, versions=versions)
    proximal = current - 1 if proximal is None else proximal
    if proximal >= current:
        raise ValueError(f"interpolate: proximal={proximal} must be before current={current}")
    drawn = wide(versions.detach())
    share = ((proximal - drawn) / (current - drawn).clamp(min=1)).clamp(0.0, 1.0)
    new, old = wide(logprobs.detach()), wide(behavior_logprobs.detach())
    between: Tensor = old + torch.where(share == 0, 0.0, share * (new - old))  # 0 x inf would be NaN
    return between


Ratio = Literal["token", "sequence"]
RATIOS = ("token", "sequence")


class Clip(NamedTuple):
    """Bounds of a ratio."""

    low: float
    """Clipped below at 1 - low."""
    high: float
    """Clipped above at 1 + high."""
    dual: float | None
    """Clipped above here where A < 0."""


def policy(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    entropy: Tensor | None = None,
    ratio: Ratio = "token",
    weights: Tensor | None = None,
    how: How = "token-mean",
    norm_length: float | None = None,
    sequences: Tensor | None = None,
) -> LossSum:
    """The clipped surrogate.

        r_t = exp(logp_t - old_t)                                      ratio="token"
        r_t = exp(mean over the sequence's tokens of logp - old)       ratio="sequence"
        L_t = max(-A r_t, -A clip(r_t, 1 - clip_low, 1 + clip_high))
        L_t = min(L_t, -dual_clip A)                                   where A < 0, if dual_clip is given

    PPO (arXiv:1707.06347, eq. 7) with a bound of its own on each side (DAPO, arXiv:2503.14476, eq. 10) and, optionally,
    the dual clip (arXiv:1912.09729, eq. 5). `ratio="sequence"` is GSPO (arXiv:2507.18071, eq. 5 to 7) in its token form
    (eq. 13): d r_t / d logp_t = r_t, so that under `how="seq-mean-token-mean"` the gradient is that of eq. 5. How
    tokens are averaged is `how`: "token-mean" is DAPO's (eq. 12), "seq-mean-token-mean" GRPO's (arXiv:2402.03300, eq.
    3); see `aggregate`.

    Args:
        logprobs: log-probs of the sampled tokens under the policy being trained, [rows, tokens] or packed [tokens].
        old_logprobs: the same under the policy that the ratio starts from, same shape; never differentiated.
        advantages: of that shape, or one per row or sequence, [rows] or [sequences]; never differentiated.
        mask: which tokens count, same shape as `logprobs`, bool or 0/1.
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        dual_clip: bound of the loss where A < 0, in units of |A|; more than 1.
        entropy: entropy of each token's distribution, nats, same shape as `logprobs`; only watched.
        ratio: per token, or one per sequence.
        weights: further factors of each token's loss, broadcastable to `logprobs`, such as `importance.weights` gives.
        how, norm_length: of `aggregate.reduce`.
        sequences: sequence of each token, whole numbers from 0, same shape; None: each row is one.

    Returns:
        Sums; metrics `clip_frac` (share of tokens whose gradient the clip removes), `dual_clip_frac`, `approx_kl`
        (mean of r - 1 - log r, an estimate of KL(old || new), nats), `ratio/mean`, `ratio/max`, `entropy`.

    Raises:
        ValueError: shapes do not fit, a bound is out of range, or a name is unknown.
    """
    check_clip("policy", clip_low, clip_high, dual_clip)
    one_of("policy", "ratio", ratio, RATIOS)
    given = {"old_logprobs": old_logprobs, "entropy": entropy}
    tokens = TokenLoss.of("policy", logprobs, mask, how, norm_length, sequences, weights, **given)
    clip = Clip(clip_low, clip_high, dual_clip)
    more = {"mean": _mean_of_sequence(logprobs, old_logprobs, tokens)} if ratio == "sequence" else {}

    def formula(
        kept: Kept, slope: Tensor, leaf: Tensor, old_logprobs: Tensor, cost: Tensor, mean: Tensor | None = None
    ) -> Part:
        if mean is None:
            difference = kept_log_ratio(kept, leaf, old_logprobs)
        else:
            difference = kept.only_(mean.expand(leaf.shape).clone(memory_format=torch.contiguous_format))
        return _clipped(kept, slope, difference, cost, clip)

    return tokens.sum(formula, cost=tokens.cost(advantages), **more)


def _mean_of_sequence(new: Tensor, old: Tensor, tokens: TokenLoss) -> Tensor:
    """The mean log-ratio of its sequence, for each token."""
    grouped = sequences_in(tokens.name, tokens.leaf, tokens.sequences)
    mean = grouped.sum(loss_sum.log_ratio(new, old, tokens.kept)) / grouped.lengths(tokens.kept).clamp(min=1)
    return grouped.spread(mean)


def _clipped(kept: Kept, slope: Tensor, difference: Tensor, cost: Tensor, clip: Clip) -> Part:
    """The clipped surrogate of a block, with the ratio exp(difference), 1 outside the mask; cost is -A.

    Where a bound decides, the larger or smaller term is another one than cost r, and the token has no slope. Without a
    dual clip, the bound where A < 0 is that of all ratios, so that a clamped one has no slope either.
    """
    ratio = exponential(difference)
    part = Part(difference)  # its memory is the loss's, as soon as it has been used
    watch_ratio(part, kept, ratio, difference)
    ceiling = cost.clamp(min=0.0).mul_(HIGHEST_RATIO if clip.dual is None else clip.dual)
    cost = kept.only(cost)
    plain = torch.mul(ratio, cost, out=slope)
    value = torch.clamp(ratio, 1.0 - clip.low, 1.0 + clip.high, out=part.value).mul_(cost)
    torch.maximum(value, plain, out=value)
    bounds = None if clip.dual is None else torch.gt(value, ceiling, out=ratio).sum()
    torch.minimum(value, ceiling, out=value)
    free = torch.eq(value, plain, out=ratio)
    part.watch_lack("clip_frac", free)
    if bounds is not None:
        part.sums["dual_clip_frac"] = bounds
        part.sums["clip_frac"] -= bounds
    slope.mul_(free)
    return part


def _weigh(part: Part, slope: Tensor, kept: Kept, difference: Tensor, cap: float, outside: str) -> None:
    """Multiply by the ratio exp(difference), cut as `importance.weights` does; `difference` is used up."""
    weight, ratio, inside = cut_weights(exponential(difference, difference), kept, cap, 0.0, outside)
    part.value.mul_(weight)
    slope.mul_(weight)
    part.watch("is/mean", ratio)
    part.watch_top("is/max", ratio)
    part.watch_lack("is/outside", inside)


def decoupled(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    cap: float = 2.0,
    outside: Outside = "mask",
    weights: Tensor | None = None,
    entropy: Tensor | None = None,
    how: How = "token-mean",
    norm_length: float | None = None,
    sequences: Tensor | None = None,
) -> LossSum:
    """Decoupled PPO: the policy that the ratio is clipped around is not the one that drew the tokens.

        u_t = exp(logp_t - proximal_t)        w_t = exp(proximal_t - behavior_t)
        L_t = w_t max(-A u_t, -A clip(u_t, 1 - clip_low, 1 + clip_high))

    Hilton et al. (arXiv:2110.00641, eq. 2); AReaL (arXiv:2505.24298, eq. 5). w beyond `cap` is cut to it, or its token
    counts as 0 (`outside="mask"`, still in the denominator). The proximal log-probs are those of the weights just
    before the update, computed anew or by `importance.interpolate`.

    Args:
        logprobs, proximal_logprobs, behavior_logprobs: under the three policies, [rows, tokens] or packed [tokens];
            only the first is differentiated.
        advantages, mask, clip_low, clip_high, dual_clip, entropy: see `policy`.
        cap: largest w.
        outside: what becomes of a larger one, "truncate" or "mask".
        weights: further factors of each token's loss, broadcastable to `logprobs`.
        how, norm_length, sequences: see `policy`.

    Returns:
        Sums; the metrics of `policy`, with the ratio u, and those of `importance.weights`.

    Raises:
        ValueError: as `policy`.
    """
    check_clip("decoupled", clip_low, clip_high, dual_clip)
    check_bounds("decoupled", cap, 0.0, outside)
    given = {"proximal_logprobs": proximal_logprobs, "behavior_logprobs": behavior_logprobs, "entropy": entropy}
    tokens = TokenLoss.of("decoupled", logprobs, mask, how, norm_length, sequences, weights, **given)
    clip = Clip(clip_low, clip_high, dual_clip)

    def formula(
        kept: Kept, slope: Tensor, leaf: Tensor, proximal_logprobs: Tensor, behavior_logprobs: Tensor, cost: Tensor
    ) -> Part:
        part = _clipped(kept, slope, kept_log_ratio(kept, leaf, proximal_logprobs), cost, clip)
        _weigh(part, slope, kept, kept_log_ratio(kept, proximal_logprobs, behavior_logprobs), cap, outside)
        return part

    return tokens.sum(formula, cost=tokens.cost(advantages))


_LEAST = -1e4
"""Floor of a log-prob in a loss's value, nats: far below what exists, and a sum of millions stays within float32."""


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
    weights: Tensor | None = None,
    entropy: Tensor | None = None,
    how: How = "token-mean",
    norm_length: float | None = None,
    sequences: Tensor | None = None,
) -> LossSum:
    """Clipped importance weights on the likelihood: no token loses its gradient.

        r_t = exp(logp_t - old_t)
        L_t = -sg[clip(r_t, 1 - clip_low, 1 + clip_high)] A logp_t

    CISPO (MiniMax-M1, arXiv:2506.13585, eq. 4 and 5); sg stops the gradient. The defaults leave the lower side open and
    cut r at 5, as ScaleRL does (arXiv:2510.13786).

    Args:
        logprobs, old_logprobs, advantages, mask, entropy: see `policy`.
        clip_low, clip_high: the weight is clipped to [1 - clip_low, 1 + clip_high].
        weights: further factors of each token's loss, broadcastable to `logprobs`.
        how, norm_length, sequences: see `policy`.

    Returns:
        Sums; metrics `clip_frac` (share of tokens whose weight is cut), `approx_kl`, `ratio/mean`, `ratio/max`,
        `entropy`.

    Raises:
        ValueError: shapes do not fit, or a bound is out of range.
    """
    check_clip("cispo", clip_low, clip_high)
    given = {"old_logprobs": old_logprobs, "entropy": entropy}
    tokens = TokenLoss.of("cispo", logprobs, mask, how, norm_length, sequences, weights, **given)

    def formula(kept: Kept, slope: Tensor, leaf: Tensor, old_logprobs: Tensor, cost: Tensor) -> Part:
        difference = kept_log_ratio(kept, leaf, old_logprobs)
        ratio = exponential(difference)
        part = Part(difference)  # its memory is the loss's, as soon as it has been used
        watch_ratio(part, kept, ratio, difference)
        clipped = torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high, out=slope)
        # 1 is never cut, so nothing outside the mask is
        part.watch_lack("clip_frac", torch.eq(clipped, ratio, out=ratio))
        kept.only_(slope.mul_(cost))
        torch.clamp(leaf, min=_LEAST, out=part.value).mul_(slope)
        return part

    return tokens.sum(formula, cost=tokens.cost(advantages))


def aipo(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    cap: float,
    mask_low: float | None = None,
    mask_high: float | None = None,
    drift: float = 0.0,
    weights: Tensor | None = None,
    entropy: Tensor | None = None,
    how: How = "token-mean",
    norm_length: float | None = None,
    sequences: Tensor | None = None,
) -> LossSum:
    """Off-policy policy gradient with weights cut from above, and optionally held near the policy that sampled.

        r_t = exp(logp_t - behavior_t)
        L_t = -sg[min(r_t, cap)] A logp_t + drift (log r_t)^2

    AIPO (LlamaRL, arXiv:2505.24034, section 5). With the bounds, a token's first term is dropped where the update would
    carry the probability further away than it already is: A > 0 and pi - mu > mask_high, or A < 0 and mu - pi >
    mask_low (probabilities, not log-probs); together with `drift` that is the default of prime-rl.

    Args:
        logprobs, advantages, mask, entropy: see `policy`.
        behavior_logprobs: under the policy that drew the tokens, same shape; never differentiated.
        cap: largest weight.
        mask_low, mask_high: largest distance in probability, 0 to 1; None for no bound.
        drift: coefficient of the squared log-ratio.
        weights, how, norm_length, sequences: see `cispo`.

    Returns:
        Sums; metrics `clip_frac` (share of tokens whose weight is cut), `drop_frac` (with bounds), `approx_kl`,
        `ratio/mean`, `ratio/max`, `entropy`.

    Raises:
        ValueError: shapes do not fit, or a bound is out of range.
    """
    if not cap > 0:
        raise ValueError(f"aipo: cap={cap} must be more than 0")
    within("aipo", "drift", drift, 0.0)
    limit_low, limit_high = (1.0 if limit is None else limit for limit in (mask_low, mask_high))
    within("aipo", "mask_low", limit_low, 0.0, 1.0)
    within("aipo", "mask_high", limit_high, 0.0, 1.0)
    given = {"behavior_logprobs": behavior_logprobs, "entropy": entropy}
    tokens = TokenLoss.of("aipo", logprobs, mask, how, norm_length, sequences, weights, **given)

    def formula(kept: Kept, slope: Tensor, leaf: Tensor, behavior_logprobs: Tensor, cost: Tensor) -> Part:
        difference = kept_log_ratio(kept, leaf, behavior_logprobs)
        ratio = exponential(difference)
        kept.only_(torch.clamp(ratio, max=cap, out=slope).mul_(cost))
        dropped: Tensor | None = None
        if mask_low is not None or mask_high is not None:
            further = leaf.exp() - behavior_logprobs.exp()
            dropped = ((slope < 0) & (further > limit_high)) | ((slope > 0) & (further < -limit_low))
            slope.masked_fill_(dropped, 0.0)
        part = Part(leaf.clamp(min=_LEAST).mul_(slope))
        part.watch("clip_frac", kept.only_(indicator(torch.gt, ratio, cap)))
        if dropped is not None:
            part.watch("drop_frac", dropped.to(slope.dtype))
        if drift:
            part.value.addcmul_(difference, difference, value=drift)
            slope.add_(difference, alpha=2.0 * drift)
        watch_ratio(part, kept, ratio, difference)
        return part

    return tokens.sum(formula, cost=tokens.cost(advantages))


def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    weights: Tensor | None = None,
    entropy: Tensor | None = None,
    how: How = "token-mean",
    norm_length: float | None = None,
    sequences: Tensor | None = None,
) -> LossSum:
    """A soft gate instead of a clip.

        r_t = exp(logp_t - old_t)        tau = tau_pos where A > 0, else tau_neg
        L_t = -(4 / tau) sigmoid(tau (r_t - 1)) A

    SAPO (arXiv:2511.20347, eq. 5 and 6); at r = 1 the gradient is that of the plain policy gradient. The paper averages
    by "seq-mean-token-mean".

    Args:
        logprobs, old_logprobs, advantages, mask, entropy: see `policy`.
        tau_pos, tau_neg: how fast the gradient falls off with the distance of r from 1; more than 0.
        weights, how, norm_length, sequences: see `cispo`.

    Returns:
        Sums; metrics `gate` (mean of the factor that the gate puts on the gradient, 1 at r = 1), `approx_kl`,
        `ratio/mean`, `ratio/max`, `entropy`.

    Raises:
        ValueError: shapes do not fit, or a temperature is not positive.
    """
    if not (tau_pos > 0 and tau_neg > 0):
        raise ValueError(f"sapo: tau_pos={tau_pos} and tau_neg={tau_neg} must be more than 0")
    given = {"old_logprobs": old_logprobs, "entropy": entropy}
    tokens = TokenLoss.of("sapo", logprobs, mask, how, norm_length, sequences, weights, **given)

    def formula(kept: Kept, slope: Tensor, leaf: Tensor, old_logprobs: Tensor, cost: Tensor) -> Part:
        difference = kept_log_ratio(kept, leaf, old_logprobs)
        ratio = exponential(difference)
        # by arithmetic, which is exact with 0 and 1: `where` is slow
        good = indicator(torch.lt, cost, 0.0)
        tau = good * tau_pos + (1.0 - good) * tau_neg
        part = Part(difference)  # its memory is the loss's, as soon as it has been used
        watch_ratio(part, kept, ratio, difference)
        gate = torch.sub(ratio, 1.0, out=part.value).mul_(tau).sigmoid_()
        fall = kept.only_(torch.addcmul(gate, gate, gate, value=-1.0, out=slope).mul_(4.0))  # 4 gate (1 - gate)
        part.watch("gate", fall)
        slope.mul_(ratio).mul_(cost)
        kept.only_(part.value.mul_(cost * (4.0 / tau)))
        return part

    return tokens.sum(formula, cost=tokens.cost(advantages))


def mismatch(logprobs: Tensor, engine_logprobs: Tensor, mask: Tensor) -> dict[str, Metric]:
    """How far the trainer's log-probs are from the inference engine's for the same tokens and weights.

    Args:
        logprobs, engine_logprobs: [rows, tokens] or [tokens].
        mask: which tokens count, same shape, bool or 0/1.

    Returns:
        Metrics `mismatch/mean` and `mismatch/max` of |logp_trainer - logp_engine|, nats.

    Raises:
        ValueError: shapes differ.
    """
    same_shape("mismatch", "logprobs", logprobs, engine_logprobs=engine_logprobs, mask=mask)
    kept = keep(mask, torch.float64)
    ours, theirs = wide(logprobs.detach()), wide(engine_logprobs.detach())
    apart = torch.where(ours == theirs, 0.0, (ours - theirs).abs())  # -inf - -inf would be NaN
    return {"mismatch/mean": mean_of(apart, kept.mask), "mismatch/max": max_of(apart, kept.mask)}


def by_age(
    logprobs: Tensor, behavior_logprobs: Tensor, versions: Tensor, mask: Tensor, *, current: int, oldest: int
) -> dict[str, Metric]:
    """How far the policy has moved away from tokens of older weights, age by age.

    Args:
        logprobs: under the weights of version `current`, [rows, tokens] or [tokens].
        behavior_logprobs: under what drew the tokens, same shape.
        versions: version of the weights that made each token, whole numbers, same shape.
        mask: which tokens count, same shape, bool or 0/1.
        current: version of the weights being trained, before the update.
        oldest: age, in versions, from which on tokens count as of one age.

    Returns:
        `mismatch/mean` and `mismatch/max` as of `mismatch`, of tokens that these weights made themselves: there, engine
        and trainer should agree. `staleness/drift/AGE` for each age from 1 to `oldest`: the mean of
        |logp - behavior|, nats. (`LossSum.values` leaves out those of an age that no token has.) `staleness/ess`: the
        share of tokens that is left if they count with the weights exp(logp - behavior), which make them the policy's
        own (Kish's effective sample size).

    Raises:
        ValueError: shapes differ.
    """
    same_shape("by_age", "logprobs", logprobs, behavior_logprobs=behavior_logprobs, versions=versions, mask=mask)
    age = (current - versions.long()).clamp(0, oldest)
    kept = keep(mask, torch.float64)
    apart = log_ratio(logprobs, behavior_logprobs, kept).double()
    found = mismatch(logprobs, behavior_logprobs, kept.mask & (age == 0))
    for number in range(1, oldest + 1):
        found[f"staleness/drift/{number}"] = mean_of(apart.abs(), kept.mask & (age == number))
    weights = kept.only(apart.exp())
    moments = torch.stack([kept.count.to(weights.device), weights.sum(), weights.square().sum()])
    return {**found, "staleness/ess": EffectiveSize(moments)}


def supervised(
    logprobs: Tensor,
    mask: Tensor,
    *,
    how: How = "token-mean",
    norm_length: float | None = None,
    sequences: Tensor | None = None,
) -> LossSum:
    """Negative log-likelihood of given answers: L_t = -logp_t. Maximum likelihood, nats per token.

    Args:
        logprobs: log-probs of the answers' tokens, [rows, tokens] or [tokens].
        mask: which tokens count, same shape, bool or 0/1.
        how, norm_length, sequences: see `policy`.

    Raises:
        ValueError: shapes differ.
    """
    tokens = TokenLoss.of("supervised", logprobs, mask, how, norm_length, sequences)
    return tokens.sum(_negative)


def _negative(kept: Kept, slope: Tensor, leaf: Tensor) -> Part:
    """L_t = -leaf_t"""
    if kept.number is None:
        slope.fill_(-1.0)
    else:
        torch.neg(kept.number, out=slope)
    return Part(leaf * slope)


def kl(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    *,
    kind: Kind = "k3",
    cut: float | None = CUT,
    old_logprobs: Tensor | None = None,
    how: How = "token-mean",
    norm_length: float | None = None,
    sequences: Tensor | None = None,
) -> LossSum:
    """KL penalty towards a reference: L_t = KL_t of `kl.estimate`, to be added with `LossSum.plus`.

    With `old_logprobs` it is corrected for tokens that an older policy drew: L_t = r_t KL_t with r_t = exp(logp_t -
    old_t), whose gradient includes that of r (DeepSeek-V3.2, arXiv:2512.02556, section 3.1). r is clamped like every
    ratio.

    Args:
        logprobs: of the policy, [rows, tokens] or packed [tokens]; differentiable.
        ref_logprobs: of the reference, same shape; never differentiated.
        mask: which tokens count, same shape.
        kind: "k1", "k2", "k3" or "abs".
        cut: bound of k3, nats, beyond which a token has no gradient; None for none.
        old_logprobs: of the policy that sampled, same shape; None leaves r out.
        how, norm_length, sequences: see `policy`; the same as those of the loss it is added to.

    Returns:
        Sums; metric `kl`, the mean of KL_t (without r), nats, and for k3 `kl/cut`, the share of tokens that are cut.

    Raises:
        ValueError: shapes differ, or a name is unknown.
    """
    one_of("kl", "kind", kind, KINDS)
    given = {"ref_logprobs": ref_logprobs, "old_logprobs": old_logprobs}
    tokens = TokenLoss.of("kl", logprobs, mask, how, norm_length, sequences, **given)

    def formula(
        kept: Kept, slope: Tensor, leaf: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor | None = None
    ) -> Part:
        # not clamped here, since beyond the clamp of `parts` there is no slope
        value, change = (kept.only_(x) for x in parts(kept.only_(leaf - ref_logprobs), kind, cut))
        part = Part(value)
        part.watch("kl", value)
        if kind == "k3" and cut is not None:
            part.watch("kl/cut", indicator(torch.ge, value, cut))
        if old_logprobs is None:
            slope.copy_(change)
        else:
            ratio = exponential(kept_log_ratio(kept, leaf, old_logprobs))
            torch.add(change, value, out=slope).mul_(ratio)
            part.value = ratio.mul_(value)
        return part

    return tokens.sum(formula)


def entropy_bonus(
    entropy: Tensor,
    mask: Tensor,
    *,
    how: How = "token-mean",
    norm_length: float | None = None,
    sequences: Tensor | None = None,
) -> LossSum:
    """Reward for staying undecided: L_t = -H_t, to be added with `LossSum.plus`.

    Args:
        entropy: entropy of each token's distribution, nats, [rows, tokens] or packed [tokens]; differentiable.
        mask: which tokens count, same shape.
        how, norm_length, sequences: see `policy`; the same as those of the loss it is added to.

    Returns:
        Sums; metric `entropy`, nats.

    Raises:
        ValueError: shapes differ.
    """
    tokens = TokenLoss.of("entropy_bonus", entropy, mask, how, norm_length, sequences, entropy=entropy)
    return tokens.sum(_negative)


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
