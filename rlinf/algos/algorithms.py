"""Algorithms as data: a frozen `AlgorithmSpec`, any field of which can be changed, and its work on a batch.

    recipes.get("dapo")
    recipes.get("dapo", {"loss.clip_high": 0.3, "kl": {"place": "loss", "beta": 0.01}})
    recipes.get("grpo", {"loss": "sapo", "advantage": my_function})

Judged groups become one `Answers`; `advantages_of` gives each answer (or token) its advantage; the trainer cuts
`MicroBatch`es and adds up their `loss_of`, then divides once by the summed weight. Pure, without I/O.

At each place of a spec stands a part: a frozen dataclass that holds its own hyper-parameters and nothing else, so a key
that is accepted is a key that is used. Advantages and losses are functions, too; a user's own function, or frozen
dataclass with `__call__`, stands in the same place. `override` reads changes from mappings such as YAML gives.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from rlinf.algos import advantages, divergences, losses
from rlinf.algos.advantages import Reduce, all_equal, at_end, less_kl, uneven, whiten
from rlinf.algos.loss_sum import Advantages, Answers, LossSum, Metric, MicroBatch, one_of, same_shape, within

# Advantages ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GroupRelative:
    """The reward relative to the group: `advantages.group_relative`."""

    scale: Literal["std", "none"] = "std"
    """Divide by the group's standard deviation (GRPO), or not (Dr. GRPO)."""

    def __post_init__(self) -> None:
        one_of("advantage.group_relative", "scale", self.scale, ("std", "none"))

    def __call__(self, answers: Answers, penalty: Tensor | None, reduce: Reduce | None) -> Tensor:
        relative = advantages.group_relative(
            _totals(answers, penalty), answers.groups, scale=self.scale, weights=answers.weights
        )
        if penalty is None or self.scale == "none":
            return relative
        # where rewards are equal the penalty alone is left, and the division would make it as large as any difference
        return torch.where(uneven(answers.rewards, answers.groups), relative, 0.0)


@dataclass(frozen=True, slots=True)
class TurnRelative:
    """The reward to come at each turn, relative to that turn of the group's other answers: `advantages.turn_relative`.
    Rewards of turns count where they fell, the rest of an answer's reward at its last turn."""

    gamma: float = 1.0
    """Discount per turn."""
    scale: Literal["std", "none"] = "std"
    """Divide by the standard deviation, or not."""

    def __post_init__(self) -> None:
        within("advantage.turn_relative", "gamma", self.gamma, 0.0, 1.0)
        one_of("advantage.turn_relative", "scale", self.scale, ("std", "none"))

    def __call__(self, answers: Answers, penalty: Tensor | None, reduce: Reduce | None) -> Tensor:
        counted = answers.mask.bool()
        turns = torch.zeros_like(counted, dtype=torch.int64) if answers.turns is None else answers.turns
        rewards = _rewards_of_tokens(answers)
        rewards = torch.where(counted, rewards if penalty is None else rewards - penalty, 0.0)
        shape = (len(turns), int(turns.max()) + 1 if turns.numel() else 1)
        of_turns = rewards.new_zeros(shape).scatter_add(1, turns, rewards)
        there = torch.zeros(shape, dtype=torch.int64).scatter_add(1, turns, counted.long()) > 0
        relative = advantages.turn_relative(
            of_turns, answers.groups, there, gamma=self.gamma, scale=self.scale, weights=answers.weights
        )
        return torch.where(counted, relative.gather(1, turns), 0.0)


@dataclass(frozen=True, slots=True)
class LeaveOneOut:
    """The reward less the others' mean: `advantages.leave_one_out`."""

    def __call__(self, answers: Answers, penalty: Tensor | None, reduce: Reduce | None) -> Tensor:
        return advantages.leave_one_out(_totals(answers, penalty), answers.groups, weights=answers.weights)


@dataclass(frozen=True, slots=True)
class ReinforcePP:
    """The reward to come, whitened over the batch: `advantages.reinforce_pp`."""

    baseline: bool = False
    """Subtract the group's mean first."""

    def __call__(self, answers: Answers, penalty: Tensor | None, reduce: Reduce | None) -> Tensor:
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

    def __call__(self, answers: Answers, penalty: Tensor | None, reduce: Reduce | None) -> tuple[Tensor, Tensor]:
        rewards = _rewards_of_tokens(answers)
        if penalty is not None:
            rewards = less_kl(rewards, penalty, answers.mask, beta=1.0)
        values, returns = advantages.gae_tokens(
            rewards, answers.need("values"), answers.mask, gamma=self.gamma, lam=self.lam
        )
        if not self.whiten:
            return values, returns
        if self._rewards_are_equal(answers, reduce):
            return torch.zeros_like(values), returns
        return whiten(values, answers.mask, reduce=reduce), returns

    @staticmethod
    def _rewards_are_equal(answers: Answers, reduce: Reduce | None) -> bool:
        """All answers that count have the same reward, and so have all their turns."""
        per_token = answers.token_rewards
        equal = all_equal(answers.unspent, answers.mask.any(1), reduce=reduce)
        return equal and (per_token is None or all_equal(per_token, answers.mask.bool(), reduce=reduce))


@dataclass(frozen=True, slots=True)
class Distillation:
    """Log-prob of the teacher less the student's, per token: `advantages.distillation`."""

    def __call__(self, answers: Answers, penalty: Tensor | None, reduce: Reduce | None) -> Tensor:
        gains = advantages.distillation(answers.need("teacher_logprobs"), answers.need("logprobs"), answers.mask)
        return gains if penalty is None else gains - penalty


def _rewards_of_tokens(answers: Answers) -> Tensor:
    """Rewards where they fell, [answers, tokens]; what an answer's is more falls at its last token."""
    per_token = answers.token_rewards
    if per_token is None:
        return at_end(answers.unspent, answers.mask)
    return at_end(answers.unspent - per_token.sum(1), answers.mask) + per_token


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
    ratio: losses.Ratio = "token"
    """A ratio per token, or one per sequence (GSPO)."""

    def __post_init__(self) -> None:
        losses.check_clip("loss.clipped", self.clip_low, self.clip_high, self.dual_clip)
        one_of("loss.clipped", "ratio", self.ratio, losses.RATIOS)

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
    outside: losses.Outside = "mask"
    """A larger one is cut to it (truncate), or its token counts as 0 (mask)."""
    proximal: Literal["recompute", "interpolate"] = "recompute"
    """Where the proximal log-probs come from: a forward pass before the update, or `losses.interpolate`."""

    def __post_init__(self) -> None:
        losses.check_clip("loss.decoupled", self.clip_low, self.clip_high, self.dual_clip)
        losses.check_bounds("loss.decoupled", self.cap, 0.0, self.outside)
        one_of("loss.decoupled", "proximal", self.proximal, ("recompute", "interpolate"))

    def __call__(self, batch: MicroBatch, aggregation: Aggregation, weights: Tensor | None) -> LossSum:
        if self.proximal == "interpolate":
            proximal = losses.interpolate(
                batch.logprobs, batch.need("old_logprobs"), batch.need("versions"), current=batch.next_version()
            )
        else:
            proximal = batch.need("proximal_logprobs")
        settings = {name: value for name, value in _settings(self).items() if name != "proximal"}
        tensors = (proximal, batch.need("old_logprobs"), batch.need("advantages"), batch.mask)
        return losses.decoupled(batch.logprobs, *tensors, **settings, **_options(batch, aggregation, weights))


@dataclass(frozen=True, slots=True)
class Cispo:
    """Clipped weights on the likelihood: `losses.cispo`."""

    clip_low: float = 1.0
    """The weight is clipped below at 1 - clip_low; 1 for no bound."""
    clip_high: float = 4.0
    """The weight is clipped above at 1 + clip_high."""

    def __post_init__(self) -> None:
        losses.check_clip("loss.cispo", self.clip_low, self.clip_high)

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
        losses.check_sapo("loss.sapo", self.tau_pos, self.tau_neg)

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
        losses.check_aipo("loss.aipo", self.cap, self.mask_low, self.mask_high, self.drift)

    def __call__(self, batch: MicroBatch, aggregation: Aggregation, weights: Tensor | None) -> LossSum:
        return _surrogate(losses.aipo, self, batch, aggregation, weights)


@dataclass(frozen=True, slots=True)
class Dro:
    """The weighted likelihood with a square penalty, for tokens of any policy: `losses.dro`."""

    beta: float = 0.05
    """Coefficient of the penalty."""

    def __post_init__(self) -> None:
        within("loss.dro", "beta", self.beta, 0.0)

    def __call__(self, batch: MicroBatch, aggregation: Aggregation, weights: Tensor | None) -> LossSum:
        return _surrogate(losses.dro, self, batch, aggregation, weights)


@dataclass(frozen=True, slots=True)
class Divergence:
    """The divergence from a teacher's whole distribution of each token: `divergences.divergence`."""

    kind: divergences.DivergenceKind = "reverse"
    """reverse, KL(student || teacher); forward, KL(teacher || student); or jsd, between them."""
    beta: float = 0.5
    """Of jsd: the teacher's share of the mixture; near 0 like forward, near 1 like reverse."""
    top_k: int | None = None
    """Over the teacher's so many likeliest tokens; None for the whole vocabulary."""
    tail: divergences.Tail = "bucket"
    """With top_k: all other tokens count as one (bucket), or not at all (renormalize)."""

    def __post_init__(self) -> None:
        divergences.check_divergence("loss.divergence", self.kind, self.beta, self.top_k, self.tail)

    def __call__(self, batch: MicroBatch, aggregation: Aggregation, weights: Tensor | None) -> LossSum:
        return divergences.divergence_loss(
            batch.need("divergence"), batch.mask, **_options(batch, aggregation, weights)
        )


def _surrogate(
    loss: Callable[..., LossSum], part: Any, batch: MicroBatch, aggregation: Aggregation, weights: Tensor | None
) -> LossSum:
    """A loss of log-probs, old log-probs, advantages and mask, with the part's fields as its hyper-parameters."""
    tensors = (batch.logprobs, batch.need("old_logprobs"), batch.need("advantages"), batch.mask)
    return loss(*tensors, **_settings(part), **_options(batch, aggregation, weights))


def _settings(part: Any) -> dict[str, Any]:
    """The fields of a part by name, as keywords of its function."""
    return {name: getattr(part, name) for name in part.__dataclass_fields__}


def _options(batch: MicroBatch, aggregation: Aggregation, weights: Tensor | None) -> losses.Options:
    """Keywords of every surrogate."""
    return {**aggregation.of(batch.sequences), "weights": weights, "entropy": batch.entropy}


# The rest ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Aggregation:
    """How losses of tokens become one: `losses.reduce`."""

    how: losses.How = "token-mean"
    """token-mean, seq-mean-token-sum, seq-mean-token-mean or seq-mean-token-sum-norm."""
    norm_length: float | None = None
    """Constant length, tokens, of seq-mean-token-sum-norm: the longest response allowed. None elsewhere."""

    def __post_init__(self) -> None:
        one_of("aggregation", "how", self.how, losses.HOWS)
        if self.norm_length is not None and self.how != "seq-mean-token-sum-norm":
            raise ValueError(
                f"aggregation: norm_length={self.norm_length} is used by how='seq-mean-token-sum-norm' only, not by "
                f"{self.how!r}"
            )

    def of(self, sequences: Tensor | None) -> losses.Aggregating:
        """Keywords of a loss over tokens of these sequences."""
        return {"how": self.how, "norm_length": self.norm_length, "sequences": sequences}


@dataclass(frozen=True, slots=True)
class Kl:
    """A penalty for leaving a reference policy: `losses.estimate`."""

    place: Literal["loss", "reward"] = "loss"
    """Added to the loss, or taken off the rewards token by token."""
    kind: losses.Kind = "k3"
    """Which estimate: k3 or k2 in a loss, k1 in rewards."""
    beta: float = 0.001
    """Its weight; above 0."""
    corrected: bool = False
    """In the loss: multiply by the ratio to the policy that sampled, which makes it unbiased off-policy."""
    cut: float | None = losses.CUT
    """Bound of k3, nats: beyond it a token has no gradient, and `kl/cut` counts it. None for none, as published."""

    def __post_init__(self) -> None:
        if self.cut is not None and not self.cut > 0:
            raise ValueError(f"kl: cut={self.cut} must be more than 0 nats; for no bound null")
        one_of("kl", "place", self.place, ("loss", "reward"))
        one_of("kl", "kind", self.kind, losses.KINDS)
        if not self.beta > 0:
            raise ValueError(f"kl: beta={self.beta} must be more than 0; for no penalty leave the part out (kl: null)")
        if self.corrected and self.place != "loss":
            raise ValueError("kl: corrected=true belongs to place='loss'; in rewards the sampling policy is meant")
        if self.kind == "k1" and self.place == "loss" and not self.corrected:
            raise ValueError("kl: the gradient of k1 in a loss has mean zero: it penalises nothing; use k2 or k3")


@dataclass(frozen=True, slots=True)
class Correction:
    """Importance sampling between engine and trainer: `losses.weights`.

    The old log-probs are then the trainer's own, recomputed before the first update; the engine's are the behaviour.
    """

    cap: float = 2.0
    """Largest weight old / behavior."""
    floor: float = 0.0
    """Smallest weight."""
    level: losses.Level = "token"
    """A weight per token, or one per sequence: the product of its tokens' ratios, or their geometric mean."""
    outside: losses.Outside = "truncate"
    """A weight beyond the bounds is cut to them (truncate, TIS), or its token counts as 0 (mask, IcePop)."""

    def __post_init__(self) -> None:
        losses.check_bounds("correction", self.cap, self.floor, self.outside)
        one_of("correction", "level", self.level, losses.LEVELS)


@dataclass(frozen=True, slots=True)
class Rejection:
    """Leaves out sequences that the trainer, before the first update, finds too unlike those it would have drawn:
    `losses.rejected`."""

    floor: float = 0.5
    """Smallest geometric mean of the ratios trainer / engine of a sequence's tokens, less than 1."""
    cap: float = 2.0
    """The largest, more than 1."""
    least: float = 0.0
    """Smallest ratio that any token of it may have; 0 for no bound."""

    def __post_init__(self) -> None:
        losses.check_rejection("rejection", self.floor, self.cap, self.least)


@dataclass(frozen=True, slots=True)
class Overlong:
    """A penalty near the length limit: `advantages.overlong`."""

    longest: int = 20480
    """The limit, tokens."""
    cache: int = 4096
    """How many tokens before it the penalty begins."""
    penalty: float = 0.5
    """Reward that an answer at the limit loses; above 0. Half of what a right answer is above a wrong one,
    where those are 1 and 0: with 1 a right answer at the limit would be worth no more than a short wrong one, and
    answers would only become shorter. DAPO takes 1 off rewards of 1 and -1, which is the same half."""

    def __post_init__(self) -> None:
        if not 0 < self.cache <= self.longest:
            raise ValueError(f"shaping: cache={self.cache} must be between 1 and longest={self.longest}")
        if not self.penalty > 0:
            raise ValueError(f"shaping: penalty={self.penalty} must be more than 0; for none leave shaping out (null)")


@dataclass(frozen=True, slots=True)
class DynamicSampling:
    """Drop groups that give no gradient and draw more until the batch is full: `advantages.Filling`."""

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
    error: losses.Error = "huber"
    """huber or square."""
    delta: float = 10.0
    """Where Huber's error turns straight."""

    def __post_init__(self) -> None:
        losses.check_value("critic", self.error, self.delta, self.clip)


ADVANTAGES = {
    "group_relative": GroupRelative,
    "turn_relative": TurnRelative,
    "leave_one_out": LeaveOneOut,
    "reinforce_pp": ReinforcePP,
    "gae": Gae,
    "distillation": Distillation,
}
"""Parts that can stand at `advantage`, by name."""

LOSSES = {
    "clipped": Clipped,
    "decoupled": Decoupled,
    "cispo": Cispo,
    "sapo": Sapo,
    "aipo": Aipo,
    "dro": Dro,
    "divergence": Divergence,
}
"""Parts that can stand at `loss`, by name."""


@dataclass(frozen=True, slots=True)
class AlgorithmSpec:
    """How judged answers become a gradient."""

    name: str
    """Name of the recipe it came from."""
    advantage: Callable[..., Any] = GroupRelative()
    """(Answers, penalty of tokens or None, reduce) -> advantages, or (advantages, returns); one of `ADVANTAGES`."""
    loss: Callable[..., Any] = Clipped()
    """(MicroBatch, Aggregation, weights or None) -> LossSum; one of `LOSSES`."""
    aggregation: Aggregation = Aggregation()
    """How losses of tokens become one."""
    kl: Kl | None = None
    """Penalty for leaving a reference policy."""
    entropy_bonus: float = 0.0
    """Weight of the reward for staying undecided, at least 0."""
    correction: Correction | None = None
    """Importance sampling between engine and trainer."""
    rejection: Rejection | None = None
    """Sequences left out whole, by how far engine and trainer are apart over them."""
    max_drift: float | None = None
    """Bad answers that the policy has left further behind are left out, nats per token; None for no bound."""
    shaping: Overlong | None = None
    """Penalty near the length limit."""
    truncated: Literal["keep", "mask"] = "keep"
    """Answers that the length limit cut are learned from like others, or give no gradient."""
    sampling: DynamicSampling | None = None
    """Draw more groups in place of those whose rewards are all equal."""
    critic: Critic | None = None
    """Train a critic beside the policy."""

    def __post_init__(self) -> None:
        where = f"algorithm {self.name!r}"
        one_of(where, "truncated", self.truncated, ("keep", "mask"))
        within(where, "entropy_bonus", self.entropy_bonus, 0.0)
        for place, part in (("advantage", self.advantage), ("loss", self.loss)):
            if not callable(part):
                raise ValueError(f"{where}: {place}={part!r} is not a function")
            _check_call(f"{where}: {place}", part, _CALLED_WITH[place])
        if isinstance(self.advantage, Gae) != (self.critic is not None):
            raise ValueError(f"{where}: advantage 'gae' and `critic` need each other: set both or neither")
        if self.correction is not None and isinstance(self.loss, Decoupled):
            raise ValueError(f"{where}: loss 'decoupled' corrects by itself: leave `correction` out")
        if self.aggregation.how == "seq-mean-token-sum-norm" and self.aggregation.norm_length is None:
            raise ValueError(
                f"{where}: aggregation.norm_length must be set, to the longest response allowed (tokens): it is the "
                "constant that losses of answers are divided by"
            )

    @property
    def needs_whole_batch(self) -> bool:
        """Advantages depend on all answers of the step, so training cannot begin before the last one is judged."""
        whitened = isinstance(self.advantage, Gae) and self.advantage.whiten
        return whitened or getattr(self.advantage, "needs_whole_batch", isinstance(self.advantage, ReinforcePP))

    @property
    def compares_within_groups(self) -> bool:
        """Answers are compared with others to the same prompt, so a single one teaches nothing."""
        baseline = isinstance(self.advantage, ReinforcePP) and self.advantage.baseline
        return (
            baseline
            or isinstance(self.advantage, GroupRelative | TurnRelative | LeaveOneOut)
            or self.sampling is not None
        )

    @property
    def needs_reference(self) -> bool:
        """Log-probs of a reference policy are needed."""
        return self.kl is not None

    @property
    def needs_teacher(self) -> bool:
        """Log-probs of a teacher are needed."""
        return isinstance(self.advantage, Distillation) or isinstance(self.loss, Divergence)

    @property
    def needs_recomputed_logprobs(self) -> bool:
        """The trainer must compute log-probs with the weights just before the update."""
        decoupled = isinstance(self.loss, Decoupled) and self.loss.proximal == "recompute"
        return decoupled or self.correction is not None or self.rejection is not None


_CALLED_WITH = {"advantage": ("answers", "penalty", "reduce"), "loss": ("batch", "aggregation", "weights")}
"""Arguments of the functions at these places, by position."""


def _check_call(where: str, function: Callable[..., Any], arguments: tuple[str, ...]) -> None:
    """See that a function can be called with these arguments; raises `ValueError` if not."""
    if inspect.iscoroutinefunction(function):
        raise ValueError(
            f"{where}: {getattr(function, '__name__', function)} is an `async def`; a plain `def` is called"
        )
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        name, names = getattr(function, "__name__", type(function).__name__), ", ".join(arguments)
        raise ValueError(f"{where}: {name} is called as {name}({names}), by position, and: {error}") from None


def advantages_of(spec: AlgorithmSpec, answers: Answers, reduce: Reduce | None = None) -> Advantages:
    """The advantages of a batch.

    If `spec.needs_whole_batch`, `answers` must be all answers of an optimizer step (or `reduce` must see the other
    ranks' shares); otherwise any number of whole groups will do, so that training can begin while others still decode.

    Args:
        spec: the algorithm.
        answers: judged answers.
        reduce: adds a tensor of sums up over ranks; None if this is all.

    Raises:
        ValueError: a tensor that the spec needs is missing, or shapes do not fit.
    """
    per_answer = {"groups": answers.groups, "truncated": answers.truncated, "weights": answers.weights}
    same_shape("advantages_of", "rewards", answers.rewards, **per_answer)
    mask = answers.mask.bool()
    rewards = shaped(spec, answers.rewards, mask.sum(1) if answers.lengths is None else answers.lengths)
    if spec.truncated == "mask":
        mask = advantages.whole(mask, answers.need("truncated"))
    penalty = None
    if spec.kl is not None and spec.kl.place == "reward":
        logprobs, reference = answers.need("logprobs").detach(), answers.need("ref_logprobs")
        ours, theirs = (torch.where(answers.mask.bool(), x, 0.0) for x in (logprobs, reference))
        penalty = spec.kl.beta * losses.estimate(ours, theirs, kind=spec.kl.kind, cut=spec.kl.cut)
    counted = mask if answers.weights is None else mask * answers.weights[:, None]
    result = spec.advantage(replace(answers, rewards=rewards, mask=counted), penalty, reduce)
    values, returns = result if isinstance(result, tuple) else (result, None)
    return Advantages(values.float(), mask, rewards, None if returns is None else returns.float())


def shaped(spec: AlgorithmSpec, rewards: Tensor, lengths: Tensor) -> Tensor:
    """Rewards as an algorithm compares them: with its penalty for long answers, if it has one.

    In float64, since rewards may be large numbers that differ little, such as minus nanoseconds.

    Args:
        spec: the algorithm.
        rewards: of each answer, [answers].
        lengths: its generated tokens, [answers].
    """
    rewards, part = rewards.detach().double(), spec.shaping
    if part is None:
        return rewards
    return rewards + advantages.overlong(lengths, longest=part.longest, cache=part.cache, penalty=part.penalty)


def loss_of(spec: AlgorithmSpec, batch: MicroBatch) -> LossSum:
    """The loss of a micro-batch: the surrogate with its corrections, plus KL, less the entropy bonus.

    Args:
        spec: the algorithm.
        batch: log-probs and what belongs to them.

    Returns:
        Un-normalised sums, differentiable by `batch.logprobs` (and `batch.entropy`); LossSums of micro-batches and
        ranks add, and the summed gradient is divided by the summed weight once.

    Raises:
        ValueError: a tensor that the spec needs is missing, or shapes do not fit.
    """
    weights, metrics = _weights(spec, batch)
    surrogate: LossSum = spec.loss(batch, spec.aggregation, weights)
    if not isinstance(surrogate, LossSum):
        name = getattr(spec.loss, "__name__", type(spec.loss).__name__)
        raise TypeError(
            f"loss {name} returned a {type(surrogate).__name__}, not a LossSum: end it with rlinf.algos.losses.policy "
            "or its like, or with LossSum of your own sums (docs/algorithms.md)"
        )
    loss, aggregation = surrogate.watching(metrics), spec.aggregation.of(batch.sequences)
    if (kl := spec.kl) is not None and kl.place == "loss":
        old, reference = batch.need("old_logprobs") if kl.corrected else None, batch.need("ref_logprobs")
        term = losses.kl(
            batch.logprobs, reference, batch.mask, kind=kl.kind, cut=kl.cut, old_logprobs=old, **aggregation
        )
        loss = loss.plus(term, kl.beta)
    if spec.entropy_bonus:
        loss = loss.plus(losses.entropy_bonus(batch.need("entropy"), batch.mask, **aggregation), spec.entropy_bonus)
    return loss


def value_loss_of(
    spec: AlgorithmSpec,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    sequences: Tensor | None = None,
) -> LossSum:
    """The critic's loss of a micro-batch, aggregated as the policy's.

    Args:
        spec: an algorithm with a critic.
        values, old_values, returns, mask, sequences: see `losses.value`.

    Raises:
        ValueError: the spec has no critic, or shapes do not fit.
    """
    if spec.critic is None:
        raise ValueError(f"algorithm {spec.name!r} has no critic: name one (critic: {{}}), or take 'ppo'")
    return losses.value(values, old_values, returns, mask, **_settings(spec.critic), **spec.aggregation.of(sequences))


def _weights(spec: AlgorithmSpec, batch: MicroBatch) -> tuple[Tensor | None, dict[str, Metric]]:
    """Factors of the tokens' losses by `correction`, `rejection` and `max_drift`, and what to watch about them."""
    parts: list[tuple[Tensor, dict[str, Metric]]] = []
    mask, sequences = batch.mask, batch.sequences
    if spec.correction is not None:
        tensors = batch.need("old_logprobs"), batch.need("behavior_logprobs"), mask
        parts.append(losses.weights(*tensors, **_settings(spec.correction), sequences=sequences))
    if spec.rejection is not None:
        tensors = batch.need("proximal_logprobs"), batch.need("behavior_logprobs"), mask
        parts.append(losses.rejected(*tensors, **_settings(spec.rejection), sequences=sequences))
    if spec.max_drift is not None:
        old, gains = batch.need("old_logprobs"), batch.need("advantages")
        parts.append(losses.drifted(batch.logprobs, old, gains, mask, most=spec.max_drift, sequences=sequences))
    weights: Tensor | None = None
    metrics: dict[str, Metric] = {}
    for factor, watched in parts:
        weights = factor if weights is None else weights * factor
        metrics |= watched
    return weights, metrics


Resolve = Callable[[str], Any]
"""Turns a dotted path into what it names."""

_PARTS: dict[str, Any] = {
    "aggregation": Aggregation,
    "kl": Kl,
    "correction": Correction,
    "rejection": Rejection,
    "shaping": Overlong,
    "sampling": DynamicSampling,
    "critic": Critic,
}
"""Places that one kind of part can stand at."""

_CHOICES: dict[str, dict[str, Any]] = {"advantage": dict(ADVANTAGES), "loss": dict(LOSSES)}
"""Places that one of several can stand at, by name."""


def override(spec: AlgorithmSpec, changes: Mapping[str, Any], *, resolve: Resolve | None = None) -> AlgorithmSpec:
    """A spec with some fields changed.

    Args:
        spec: what to start from; not changed.
        changes: by place. A mapping changes the keys it names: `{"loss": {"clip_high": 0.3}}`, the same as
            `{"loss.clip_high": 0.3}`. A name takes another part with its defaults: `{"loss": "sapo"}`; a mapping with
            `name` takes one with these values: `{"loss": {"name": "sapo", "tau_neg": 1.1}}`. None leaves an optional
            part out. A part or a function stands for itself, and a dotted path for what `resolve` says.
        resolve: turns a dotted path into the function it names.

    Raises:
        ValueError: no place, key or choice of that name (the text gives the nearest), or a bad value.
    """
    where = f"algorithm {spec.name!r}"
    places = [field.name for field in dataclasses.fields(spec) if field.name != "name"]
    changed: dict[str, Any] = {}
    for place, change in _nested(changes).items():
        one_of(where, "key", place, places)
        old = changed.get(place, getattr(spec, place))
        if place in _CHOICES:
            changed[place] = _choose(f"{where}: {place}", old, change, _CHOICES[place], resolve)
        elif place in _PARTS:
            changed[place] = _optional_part(
                f"{where}: {place}", old, change, _PARTS[place], optional=place != "aggregation"
            )
        else:
            changed[place] = _check_value(where, place, change, typing.get_type_hints(AlgorithmSpec)[place])
    return dataclasses.replace(spec, **changed)


def _nested(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested mappings, merged with those that are nested already."""
    nested: dict[str, Any] = {}
    for key, value in changes.items():
        place, _, inner = key.partition(".")
        if inner:
            fields = nested.setdefault(place, {})
            if not isinstance(fields, dict):
                raise ValueError(f"{key} and {place} are both given: write one of them")
            fields[inner] = value
        elif isinstance(value, Mapping) and isinstance(nested.get(place, {}), dict):
            nested[place] = {**nested.get(place, {}), **value}
        elif place in nested:
            raise ValueError(f"{place} is given twice: write it once")
        else:
            nested[place] = value
    return nested


def _choose(where: str, old: Any, change: Any, choices: dict[str, Any], resolve: Resolve | None) -> Any:
    """One of several parts, or a user's own."""
    if isinstance(change, Mapping):
        values = dict(change)
        kind = values.pop("name", None)
        if kind is None:
            return _set_fields(where, old, values)
        return _set_fields(where, _choose(where, old, kind, choices, resolve), values)
    if isinstance(change, str):
        if "." in change and resolve is not None:
            change = resolve(change)
            return change() if isinstance(change, type) else change
        one_of(where, "name", change, choices)
        return choices[change]()
    return change() if isinstance(change, type) else change


def _optional_part(where: str, old: Any, change: Any, kind: Any, *, optional: bool) -> Any:
    """A part that may be left out."""
    if isinstance(change, Mapping):
        return _set_fields(where, kind() if old is None else old, dict(change))
    if isinstance(change, kind) or (change is None and optional):
        return change
    raise ValueError(
        f"{where} must be a mapping of {[field.name for field in dataclasses.fields(kind)]}"
        + (" or null" if optional else "")
        + f", not {change!r}"
    )


def _set_fields(where: str, part: Any, values: dict[str, Any]) -> Any:
    """A part with some of its fields changed."""
    if not dataclasses.is_dataclass(part) or isinstance(part, type):
        if not values:
            return part
        raise ValueError(f"{where} is a function, {part!r}, without fields to set: {sorted(values)}")
    hints = typing.get_type_hints(type(part))
    names = [field.name for field in dataclasses.fields(part)]
    for key in values:
        one_of(f"{where} ({type(part).__name__})", "key", key, names)
    checked = {key: _check_value(where, key, value, hints[key]) for key, value in values.items()}
    return dataclasses.replace(part, **checked)


def _check_value(where: str, key: str, value: Any, hint: Any) -> Any:
    """A plain value of the type that the field has; whole numbers stand for floats."""
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    for kind in kinds:
        if value is None and kind is type(None):
            return None
        if typing.get_origin(kind) is Literal:
            one_of(where, key, value, typing.get_args(kind))
            return value
        if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if kind in (bool, int, str) and type(value) is kind:
            return value
    names = " or ".join("null" if kind is type(None) else getattr(kind, "__name__", str(kind)) for kind in kinds)
    raise ValueError(f"{where}: {key}={value!r} must be {names}")
