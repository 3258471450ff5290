"""The parts of an algorithm, as data: what can stand at each place of an `AlgorithmSpec`.

Each is a frozen dataclass that holds its own hyper-parameters and nothing else, so a key that is accepted is a key that
is used. Advantages and losses are also functions, called as written in `apply`; a user's own function, or frozen
dataclass with `__call__`, stands in the same place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

from rlinf.algos import advantages, losses
from rlinf.algos.filters import uneven
from rlinf.algos.losses import importance
from rlinf.algos.losses.aggregate import HOWS, How
from rlinf.algos.losses.base import check_clip
from rlinf.algos.losses.clipped import RATIOS, Ratio
from rlinf.algos.losses.divergence import CUT, KINDS, Kind
from rlinf.algos.losses.importance import LEVELS, Level, Outside
from rlinf.algos.losses.value import ERRORS, Error
from rlinf.algos.shaping import at_end, less_kl
from rlinf.algos.tensor.batches import Answers, MicroBatch
from rlinf.algos.tensor.loss_sum import LossSum
from rlinf.algos.validation import one_of, within

# Advantages ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GroupRelative:
    """The reward relative to the group: `advantages.group_relative`."""

    scale: Literal["std", "none"] = "std"
    """Divide by the group's standard deviation (GRPO), or not (Dr. GRPO)."""

    def __post_init__(self) -> None:
        one_of("advantage.group_relative", "scale", self.scale, ("std", "none"))

    def __call__(self, answers: Answers, penalty: Tensor | None, reduce: advantages.Reduce | None) -> Tensor:
        found = advantages.group_relative(
            _totals(answers, penalty), answers.groups, scale=self.scale, weights=answers.weights
        )
        if penalty is None or self.scale == "none":
            return found
        # where rewards are equal the penalty alone is left, and the division would make it as large as any difference
        return torch.where(uneven(answers.rewards, answers.groups), found, 0.0)


@dataclass(frozen=True, slots=True)
class LeaveOneOut:
    """The reward less the others' mean: `advantages.leave_one_out`."""

    def __call__(self, answers: Answers, penalty: Tensor | None, reduce: advantages.Reduce | None) -> Tensor:
        return advantages.leave_one_out(_totals(answers, penalty), answers.groups, weights=answers.weights)


@dataclass(frozen=True, slots=True)
class ReinforcePP:
    """The reward to come, whitened over the batch: `advantages.reinforce_pp`."""

    baseline: bool = False
    """Subtract the group's mean first."""

    def __call__(self, answers: Answers, penalty: Tensor | None, reduce: advantages.Reduce | None) -> Tensor:
        groups = answers.groups if self.baseline else None
        beta = 0.0 if penalty is None else 1.0  # the penalty comes weighted
        return advantages.reinforce_pp(
            answers.rewards,
            answers.mask,
            kl=penalty,
            kl_beta=beta,
            groups=groups,
            weights=answers.weights,
            reduce=reduce,
        )


@dataclass(frozen=True, slots=True)
class Gae:
    """Generalised advantage estimation over tokens, with a critic: `advantages.gae`. Rewards of turns count where they
    fell."""

    gamma: float = 1.0
    """Discount per token."""
    lam: float = 1.0
    """Weight of longer looks ahead."""
    whiten: bool = True
    """Whiten over the batch, once. Where the rewards of all answers are equal, nothing but the critic's noise would be
    left, for whitening takes the level away: advantages are 0 then, and the critic alone learns."""

    def __post_init__(self) -> None:
        within("advantage.gae", "gamma", self.gamma, 0.0, 1.0)
        within("advantage.gae", "lam", self.lam, 0.0, 1.0)

    def __call__(
        self, answers: Answers, penalty: Tensor | None, reduce: advantages.Reduce | None
    ) -> tuple[Tensor, Tensor]:
        rewards, fallen = answers.unspent, answers.token_rewards
        rewards = at_end(rewards if fallen is None else rewards - fallen.sum(1), answers.mask)
        rewards = rewards if fallen is None else rewards + fallen
        if penalty is not None:
            rewards = less_kl(rewards, penalty, answers.mask, beta=1.0)
        found, returns = advantages.gae_tokens(
            rewards, answers.need("values"), answers.mask, gamma=self.gamma, lam=self.lam
        )
        if not self.whiten:
            return found, returns
        if self._says_nothing(answers, reduce):
            return torch.zeros_like(found), returns
        return advantages.whiten(found, answers.mask, reduce=reduce), returns

    @staticmethod
    def _says_nothing(answers: Answers, reduce: advantages.Reduce | None) -> bool:
        """Rewards are equal, of all answers that count and of all their turns."""
        counted, fallen = answers.mask.any(1), answers.token_rewards
        alike = advantages.all_equal(answers.unspent, counted, reduce=reduce)
        return alike and (fallen is None or advantages.all_equal(fallen, answers.mask.bool(), reduce=reduce))


@dataclass(frozen=True, slots=True)
class Distillation:
    """Log-prob of the teacher less the student's, per token: `advantages.distillation`."""

    def __call__(self, answers: Answers, penalty: Tensor | None, reduce: advantages.Reduce | None) -> Tensor:
        found = advantages.distillation(answers.need("teacher_logprobs"), answers.need("logprobs"), answers.mask)
        return found if penalty is None else found - penalty


def _totals(answers: Answers, penalty: Tensor | None) -> Tensor:
    """Rewards of answers, each less the penalties of its tokens."""
    return answers.rewards if penalty is None else less_kl(answers.rewards, penalty, answers.mask, beta=1.0)


# Losses --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Clipped:
    """The clipped surrogate of PPO, GRPO, DAPO and GSPO: `losses.policy`."""

    clip_low: float = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: float | None = None
    """Bound of the loss where A < 0, in units of |A|; more than 1."""
    ratio: Ratio = "token"
    """A ratio per token, or one per sequence (GSPO)."""

    def __post_init__(self) -> None:
        check_clip("loss.clipped", self.clip_low, self.clip_high, self.dual_clip)
        one_of("loss.clipped", "ratio", self.ratio, RATIOS)

    def __call__(self, batch: MicroBatch, aggregation: Aggregation, weights: Tensor | None) -> LossSum:
        return _surrogate(losses.policy, self, batch, aggregation, weights)


@dataclass(frozen=True, slots=True)
class Decoupled:
    """Decoupled PPO, for tokens of older policies: `losses.decoupled`."""

    clip_low: float = 0.2
    """The ratio to the proximal policy is clipped below at 1 - clip_low."""
    clip_high: float = 0.2
    """... and above at 1 + clip_high."""
    dual_clip: float | None = None
    """Bound of the loss where A < 0, in units of |A|; more than 1."""
    cap: float = 2.0
    """Largest weight proximal / behavior."""
    outside: Outside = "mask"
    """What becomes of a larger one."""
    proximal: Literal["recompute", "interpolate"] = "recompute"
    """Where the proximal log-probs come from: a forward pass before the update, or `importance.interpolate`."""

    def __post_init__(self) -> None:
        check_clip("loss.decoupled", self.clip_low, self.clip_high, self.dual_clip)
        importance.check_bounds("loss.decoupled", self.cap, 0.0, self.outside)
        one_of("loss.decoupled", "proximal", self.proximal, ("recompute", "interpolate"))

    def __call__(self, batch: MicroBatch, aggregation: Aggregation, weights: Tensor | None) -> LossSum:
        if self.proximal == "interpolate":
            proximal = importance.interpolate(
                batch.logprobs, batch.need("old_logprobs"), batch.need("versions"), current=batch.next_version()
            )
        else:
            proximal = batch.need("proximal_logprobs")
        return losses.decoupled(
            batch.logprobs,
            proximal,
            batch.need("old_logprobs"),
            batch.need("advantages"),
            batch.mask,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
            cap=self.cap,
            outside=self.outside,
            **_options(batch, aggregation, weights),
        )


@dataclass(frozen=True, slots=True)
class Cispo:
    """Clipped weights on the likelihood: `losses.cispo`."""

    clip_low: float = 1.0
    """The weight is clipped below at 1 - clip_low; 1 for no bound."""
    clip_high: float = 4.0
    """The weight is clipped above at 1 + clip_high."""

    def __post_init__(self) -> None:
        check_clip("loss.cispo", self.clip_low, self.clip_high)

    def __call__(self, batch: MicroBatch, aggregation: Aggregation, weights: Tensor | None) -> LossSum:
        return _surrogate(losses.cispo, self, batch, aggregation, weights)


@dataclass(frozen=True, slots=True)
class Sapo:
    """A soft gate: `losses.sapo`."""

    tau_pos: float = 1.0
    """How fast the gradient falls off where A > 0."""
    tau_neg: float = 1.05
    """... and elsewhere."""

    def __post_init__(self) -> None:
        for name in ("tau_pos", "tau_neg"):
            if not getattr(self, name) > 0:
                raise ValueError(f"loss.sapo: {name}={getattr(self, name)} must be more than 0")

    def __call__(self, batch: MicroBatch, aggregation: Aggregation, weights: Tensor | None) -> LossSum:
        return _surrogate(losses.sapo, self, batch, aggregation, weights)


@dataclass(frozen=True, slots=True)
class Aipo:
    """Weights cut from above, for tokens of older policies: `losses.aipo`."""

    cap: float = 4.0
    """Largest weight; 2 to 10 in the paper."""
    mask_low: float | None = None
    """Largest fall in probability of a token with A < 0."""
    mask_high: float | None = None
    """Largest rise in probability of a token with A > 0."""
    drift: float = 0.0
    """Coefficient of the squared log-ratio."""

    def __post_init__(self) -> None:
        if not self.cap > 0:
            raise ValueError(f"loss.aipo: cap={self.cap} must be more than 0")
        within("loss.aipo", "drift", self.drift, 0.0)

    def __call__(self, batch: MicroBatch, aggregation: Aggregation, weights: Tensor | None) -> LossSum:
        return _surrogate(losses.aipo, self, batch, aggregation, weights)


def _surrogate(
    loss: Callable[..., LossSum], part: Any, batch: MicroBatch, aggregation: Aggregation, weights: Tensor | None
) -> LossSum:
    """A loss of log-probs, old log-probs, advantages and mask, with the part's fields as its hyper-parameters."""
    own = {field.name: getattr(part, field.name) for field in fields(part)}
    tensors = (batch.logprobs, batch.need("old_logprobs"), batch.need("advantages"), batch.mask)
    return loss(*tensors, **own, **_options(batch, aggregation, weights))


def _options(batch: MicroBatch, aggregation: Aggregation, weights: Tensor | None) -> dict[str, Any]:
    """What every loss takes alike."""
    return {
        "weights": weights,
        "entropy": batch.entropy,
        "how": aggregation.how,
        "norm_length": aggregation.norm_length,
        "sequences": batch.sequences,
    }


# The rest ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Aggregation:
    """How losses of tokens become one: `aggregate.reduce`."""

    how: How = "token-mean"
    """token-mean, seq-mean-token-sum, seq-mean-token-mean or seq-mean-token-sum-norm."""
    norm_length: float | None = None
    """Constant length, tokens, of seq-mean-token-sum-norm: the longest response allowed. None elsewhere."""

    def __post_init__(self) -> None:
        one_of("aggregation", "how", self.how, HOWS)
        if self.norm_length is not None and self.how != "seq-mean-token-sum-norm":
            raise ValueError(
                f"aggregation: norm_length={self.norm_length} is used by how='seq-mean-token-sum-norm' only, not by "
                f"{self.how!r}"
            )


@dataclass(frozen=True, slots=True)
class Kl:
    """A penalty for leaving a reference policy: `kl.estimate`."""

    place: Literal["loss", "reward"] = "loss"
    """Added to the loss, or taken off the rewards token by token."""
    kind: Kind = "k3"
    """Which estimate: k3 or k2 in a loss, k1 in rewards."""
    beta: float = 0.001
    """Its weight; above 0."""
    corrected: bool = False
    """In the loss: multiply by the ratio to the policy that sampled, which makes it unbiased off-policy."""
    cut: float | None = CUT
    """Bound of k3, nats: beyond it a token has no gradient, and `kl/cut` counts it. None for none, as published."""

    def __post_init__(self) -> None:
        if self.cut is not None and not self.cut > 0:
            raise ValueError(f"kl: cut={self.cut} must be more than 0 nats; for no bound null")
        one_of("kl", "place", self.place, ("loss", "reward"))
        one_of("kl", "kind", self.kind, KINDS)
        if not self.beta > 0:
            raise ValueError(f"kl: beta={self.beta} must be more than 0; for no penalty leave the part out (kl: null)")
        if self.corrected and self.place != "loss":
            raise ValueError("kl: corrected=true belongs to place='loss'; in rewards the sampling policy is meant")
        if self.kind == "k1" and self.place == "loss" and not self.corrected:
            raise ValueError("kl: the gradient of k1 in a loss has mean zero: it penalises nothing; use k2 or k3")


@dataclass(frozen=True, slots=True)
class Correction:
    """Importance sampling between engine and trainer: `importance.weights`, `importance.drifted`.

    The old log-probs are then the trainer's own, recomputed before the first update; the engine's are the behaviour.
    """

    cap: float = 2.0
    """Largest weight old / behavior."""
    floor: float = 0.0
    """Smallest weight."""
    level: Level = "token"
    """A weight per token, or one per sequence: the product of its tokens' ratios, or their geometric mean."""
    outside: Outside = "truncate"
    """What becomes of a weight beyond the bounds: truncate it (TIS), or mask its token (IcePop)."""

    def __post_init__(self) -> None:
        importance.check_bounds("correction", self.cap, self.floor, self.outside)
        one_of("correction", "level", self.level, LEVELS)


@dataclass(frozen=True, slots=True)
class Rejection:
    """Leaves out sequences that the trainer, before the first update, finds too unlike those it would have drawn:
    `importance.rejected`."""

    floor: float = 0.5
    """Smallest geometric mean of the ratios trainer / engine of a sequence's tokens, less than 1."""
    cap: float = 2.0
    """The largest, more than 1."""
    least: float = 0.0
    """Smallest ratio that any token of it may have; 0 for no bound."""

    def __post_init__(self) -> None:
        importance.check_rejection("rejection", self.floor, self.cap, self.least)


@dataclass(frozen=True, slots=True)
class Overlong:
    """A penalty near the length limit: `shaping.overlong`."""

    longest: int = 20480
    """The limit, tokens."""
    cache: int = 4096
    """How many tokens before it the penalty begins."""
    penalty: float = 0.5
    """What an answer at the limit loses, in units of reward; above 0. Half of what a right answer is above a wrong one,
    where those are 1 and 0: with 1 a right answer at the limit would be worth no more than a short wrong one, and
    answers would only become shorter. DAPO takes 1 off rewards of 1 and -1, which is the same half."""

    def __post_init__(self) -> None:
        if not 0 < self.cache <= self.longest:
            raise ValueError(f"shaping: cache={self.cache} must be between 1 and longest={self.longest}")
        if not self.penalty > 0:
            raise ValueError(f"shaping: penalty={self.penalty} must be more than 0; for none leave shaping out (null)")


@dataclass(frozen=True, slots=True)
class DynamicSampling:
    """Drop groups that give no gradient and draw more until the batch is full: `filters.Filling`."""

    max_rounds: int = 10
    """Rounds of generation per step at most."""

    def __post_init__(self) -> None:
        if self.max_rounds < 1:
            raise ValueError(f"sampling: max_rounds={self.max_rounds} must be at least 1")


@dataclass(frozen=True, slots=True)
class Critic:
    """The critic's loss: `losses.value`."""

    clip: float | None = 0.2
    """How far one batch may move a prediction; None for no bound."""
    error: Error = "huber"
    """huber or square."""
    delta: float = 10.0
    """Where Huber's error turns straight."""

    def __post_init__(self) -> None:
        one_of("critic", "error", self.error, ERRORS)
        if not self.delta > 0 or (self.clip is not None and not self.clip > 0):
            raise ValueError(f"critic: clip={self.clip} and delta={self.delta} must be more than 0")


ADVANTAGES = {
    "group_relative": GroupRelative,
    "leave_one_out": LeaveOneOut,
    "reinforce_pp": ReinforcePP,
    "gae": Gae,
    "distillation": Distillation,
}
"""What can stand at `advantage`, by name."""

LOSSES = {"clipped": Clipped, "decoupled": Decoupled, "cispo": Cispo, "sapo": Sapo, "aipo": Aipo}
"""What can stand at `loss`, by name."""
