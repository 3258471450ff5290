"""Advantages: how much better an answer, or a token, was than expected. Rewards in, one number per answer or token out.

    group_relative, leave_one_out, reinforce_pp     answers against others, without a critic
    gae, gae_tokens             against a critic's predictions
    distillation                a teacher's log-probs against the student's
    whiten, all_equal           statistics of the whole batch
    overlong, at_end, less_kl   shaping of rewards, before advantages are taken
    uneven, mean_within, whole, Filling     which answers and groups are learned from, and how many more to draw

Statistics over the batch are global: where several ranks hold shares of it, `reduce` adds a tensor of sums up over them
(such as an all-reduce), and is the only thing here that knows of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlinf.algos.loss_sum import LOG_RATIO, Mask, one_of, same_shape, wide, within

Reduce = Callable[[Tensor], Tensor]
"""Adds a tensor of sums up over ranks and returns it."""

_SCALES = ("std", "none")
_EPSILON = 1e-6  # added to the standard deviation, as in the public GRPO implementations
_LEAST_VARIANCE = 1e-8  # what whitening divides by at least, so that tiny differences are not blown up without bound
_ROUNDING = 1e-12  # relative: numbers that differ by less are equal, but for the order in which float64 adds them up


def group_relative(
    rewards: Tensor, groups: Tensor, *, scale: Literal["std", "none"] = "std", weights: Tensor | None = None
) -> Tensor:
    """The reward relative to the other answers to the same prompt.

        A_i = (R_i - mean(R)) / (std(R) + 1e-6)        mean and std over the group of i, std with the n - 1 divisor

    GRPO (DeepSeekMath, arXiv:2402.03300, section 4.1.2, outcome supervision). `scale="none"` leaves the division out,
    which is Dr. GRPO (arXiv:2503.20783, section 3.2). A group of equal rewards gives exactly 0, and so does a group of
    one.

    Args:
        rewards: reward of each answer, [answers].
        groups: which group each answer belongs to, [answers], whole numbers; members need not stand together.
        scale: "std" divides by the group's standard deviation, "none" does not.
        weights: how many answers each counts as, [answers]; None: as one.

    Returns:
        Advantages, [answers], float32 (float64 if the rewards are).

    Raises:
        ValueError: shapes differ, or `scale` is unknown.
    """
    one_of("group_relative", "scale", scale, _SCALES)
    centred, group, count = _centred("group_relative", rewards, groups, weights)
    if scale == "none" or centred.numel() == 0:
        return centred
    squares = centred.square() if weights is None else centred.square() * weights
    variance = torch.zeros_like(count).index_add(0, group, squares) / (count - 1).clamp(min=1)
    return centred / (variance.sqrt()[group] + _EPSILON)


def leave_one_out(rewards: Tensor, groups: Tensor, *, weights: Tensor | None = None) -> Tensor:
    """The reward less the mean of the other answers' to the same prompt.

        A_i = R_i - mean over j != i of R_j = G / (G - 1) (R_i - mean(R))

    RLOO (arXiv:2402.14740, eq. 7). A group of equal rewards gives exactly 0, and so does a group of one, which has
    nothing to compare with.

    Args:
        rewards: reward of each answer, [answers].
        groups: which group each answer belongs to, [answers], whole numbers; members need not stand together.
        weights: how many answers each counts as, [answers]; None: as one.

    Returns:
        Advantages, [answers], float32 (float64 if the rewards are).

    Raises:
        ValueError: shapes differ.
    """
    centred, group, count = _centred("leave_one_out", rewards, groups, weights)
    return centred * (count / (count - 1).clamp(min=1))[group]


def _centred(
    where: str, rewards: Tensor, groups: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards less their group's mean, exactly 0 in a group of equals; each answer's group from 0; groups' sizes."""
    if rewards.ndim != 1 or groups.shape != rewards.shape:
        raise ValueError(
            f"{where}: rewards and groups must both be [answers], "
            f"got rewards {list(rewards.shape)} and groups {list(groups.shape)}"
        )
    same_shape(where, "rewards", rewards, weights=weights)
    rewards = wide(rewards.detach())
    group = _numbered(groups)
    count = torch.bincount(group, weights).to(rewards.dtype)
    sums = torch.zeros_like(count).index_add(0, group, rewards if weights is None else rewards * weights)
    centred = rewards - (sums / count)[group]
    # (R - mean) of equal rewards is a rounding error, which a division would blow up: ask for equality itself.
    return torch.where(uneven(rewards, groups), centred, 0.0), group, count


def turn_relative(
    rewards: Tensor,
    groups: Tensor,
    there: Tensor,
    *,
    gamma: float = 1.0,
    scale: Literal["std", "none"] = "std",
    weights: Tensor | None = None,
) -> Tensor:
    """The reward still to come at each turn, relative to the same turn of the other answers to the same prompt.

        G_it = sum over k >= t of gamma^(k - t) r_ik
        A_it = (G_it - mean(G_t)) / (std(G_t) + 1e-6)    mean and std over the answers of i's group that have a turn t

    Group-relative advantages by turn, as MT-GRPO (arXiv:2505.11821) and other turn-level recipes have them, with the
    return in place of a single turn's reward. A turn that one answer of a group alone has gets exactly 0.

    Args:
        rewards: of each turn, [answers, turns].
        groups: which group each answer belongs to, [answers], whole numbers.
        there: which turns there are, bool [answers, turns].
        gamma: discount per turn.
        scale: as of `group_relative`.
        weights: how many answers each counts as, [answers]; None: as one.

    Returns:
        Advantages, [answers, turns], 0 where there is no turn; dtype as of `group_relative`.

    Raises:
        ValueError: shapes differ, or `scale` is unknown.
    """
    if rewards.ndim != 2 or rewards.shape != there.shape:
        raise ValueError(
            f"turn_relative: rewards and there must both be [answers, turns], got {list(rewards.shape)} and "
            f"{list(there.shape)}"
        )
    same_shape("turn_relative", "groups", groups, weights=weights)
    coming = torch.where(there, wide(rewards.detach()), 0.0)
    for turn in range(coming.shape[1] - 2, -1, -1):
        coming[:, turn] += gamma * coming[:, turn + 1]
    answer, turn_number = there.nonzero(as_tuple=True)
    some = None if weights is None else weights[answer]
    alike = _numbered(groups)[answer] * there.shape[1] + turn_number
    relative = group_relative(coming[there], alike, scale=scale, weights=some)
    return torch.zeros_like(coming, dtype=relative.dtype).masked_scatter(there, relative)


def reinforce_pp(
    rewards: Tensor,
    mask: Tensor,
    *,
    kl: Tensor | None = None,
    kl_beta: float = 0.0,
    groups: Tensor | None = None,
    weights: Tensor | None = None,
    reduce: Reduce | None = None,
) -> Tensor:
    """The reward still to come, whitened over the whole batch.

        G_t = sum over i >= t of (r_i - kl_beta KL_i)        with one reward R per answer: R - kl_beta sum of KL_i
        G_t = G_t - mean of R over the answer's group        if `groups` is given: the baseline variant
        A_t = (G_t - mean(G)) / sqrt(max(var(G), 1e-8))      over all tokens that count, of all ranks

    REINFORCE++ (arXiv:2501.03262, eq. 5 to 7) and REINFORCE++-baseline (section 3.3). This is the only normalisation:
    the result is not to be whitened again. Where rewards (less the baseline) are equal all over the batch, advantages
    are exactly 0: what is left is the penalty's rounding, and whitening would make a full-size step of it.

    Both variants take the penalty in the reward, k1. Later versions of the paper put a k2 loss beside the advantage of
    the baseline variant instead, which `kl: {place: loss, kind: k2}` is; on-policy, and but for the whitening, the two
    have the same gradient (arXiv:2510.01555).

    Args:
        rewards: of each answer, [answers], or of each token, [answers, tokens].
        mask: which tokens count, [answers, tokens], bool or 0/1; or how much each does, see `whiten`.
        kl: KL_t of the sampling policy to the reference (k1), nats, [answers, tokens].
        kl_beta: its weight; not 0 only with `kl`.
        groups: which group each answer belongs to, [answers], whole numbers.
        weights: how many answers each counts as in its group's mean, [answers]; None: as one.
        reduce: adds a tensor of sums up over ranks; None if this is the whole batch.

    Returns:
        Advantages, [answers, tokens], 0 outside the mask.

    Raises:
        ValueError: shapes do not fit, or `kl_beta` without `kl`.
    """
    if mask.ndim != 2 or rewards.shape not in (mask.shape, mask.shape[:1]):
        raise ValueError(
            f"reinforce_pp: mask must be [answers, tokens] and rewards [answers] or of mask's shape, got mask "
            f"{list(mask.shape)} and rewards {list(rewards.shape)}"
        )
    same_shape("reinforce_pp", "mask", mask, kl=kl)
    if kl is None and kl_beta != 0.0:
        raise ValueError(f"reinforce_pp: kl_beta={kl_beta} without kl, the penalty per token that it weighs")
    counted = Mask.of(mask, rewards)
    per_answer = rewards.ndim == 1
    totals = wide(rewards.detach()) if per_answer else counted.fill(rewards.detach()).sum(1)
    coming = totals[:, None].expand(mask.shape) if per_answer else _to_go(counted.fill(rewards.detach()))
    if groups is not None:
        centred = _centred("reinforce_pp", totals, groups, weights)[0]
        coming = coming - (totals - centred)[:, None] if not per_answer else centred[:, None].expand(mask.shape)
    if all_equal(coming, mask, reduce=reduce):
        return torch.zeros_like(coming)
    if kl is not None and kl_beta != 0.0:
        coming = coming - kl_beta * _to_go(counted.fill(kl.detach()))
    return whiten(coming, mask, reduce=reduce)


def _to_go(x: Tensor) -> Tensor:
    """Sum over i >= t along the last axis."""
    return x.double().flip(1).cumsum(1).flip(1).to(x.dtype)


def gae(
    rewards: Tensor, values: Tensor, dones: Tensor, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation.

        d_t = r_t + gamma V_{t+1} (1 - done_{t+1}) - V_t
        A_t = d_t + gamma lam (1 - done_{t+1}) A_{t+1}        return_t = A_t + V_t

    GAE (arXiv:1506.02438, eq. 16). `dones` and `values` have one row more than `rewards`: done_t says that step t
    begins a new episode, so nothing behind it counts for t - 1. Whiten afterwards, once, if at all.

    Args:
        rewards: [steps, batch].
        values: predictions V_0 .. V_T, [steps + 1, batch].
        dones: bool or 0/1, [steps + 1, batch]; the first row is not read.
        gamma: discount per step, 0 to 1.
        lam: weight of longer looks ahead, 0 to 1.

    Returns:
        Advantages and returns, [steps, batch], without gradient.

    Raises:
        ValueError: shapes do not fit, or a discount is out of range.
    """
    longer = (rewards.shape[0] + 1, *rewards.shape[1:]) if rewards.ndim else ()
    if rewards.ndim < 1 or values.shape != longer or dones.shape != longer:
        raise ValueError(
            "gae: values and dones must have one row more than rewards [steps, batch], got rewards "
            f"{list(rewards.shape)}, values {list(values.shape)} and dones {list(dones.shape)}"
        )
    within("gae", "gamma", gamma, 0.0, 1.0)
    within("gae", "lam", lam, 0.0, 1.0)
    rewards, values, ended = wide(rewards.detach()), wide(values.detach()), dones.bool()
    following = torch.where(ended[1:], 0.0, values[1:])  # behind an end anything may stand, inf included
    deltas = rewards + gamma * following - values[:-1]
    decay = gamma * lam * (~ended[1:]).to(deltas.dtype)
    advantages = torch.empty_like(deltas)
    ahead = torch.zeros_like(deltas[0]) if len(deltas) else deltas
    for t in range(len(deltas) - 1, -1, -1):
        ahead = torch.addcmul(deltas[t], decay[t], ahead)
        advantages[t] = ahead
    return advantages, advantages + values[:-1]


def gae_tokens(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """`gae` over the tokens of answers of different lengths; each answer is an episode that ends with it.

    Tokens outside the mask, such as those that a tool wrote in between, take no time.

    Args:
        rewards: of each token, [answers, tokens].
        values: the critic's prediction before each token, [answers, tokens].
        mask: which tokens count, [answers, tokens], bool or 0/1.
        gamma, lam: see `gae`.

    Returns:
        Advantages and returns, [answers, tokens], 0 outside the mask, without gradient.

    Raises:
        ValueError: shapes differ.
    """
    same_shape("gae_tokens", "rewards", rewards, values=values, mask=mask)
    counted = mask.bool()
    order = (~counted).byte().argsort(dim=1, stable=True)  # what counts first, in its order
    lengths = counted.sum(1)
    packed = [torch.where(counted, wide(x.detach()), 0.0).gather(1, order).T for x in (rewards, values)]
    dones = torch.arange(mask.shape[1] + 1, device=mask.device)[:, None] >= lengths
    ahead = torch.cat([packed[1], packed[1].new_zeros(1, len(lengths))])
    in_order = gae(packed[0], ahead, dones, gamma=gamma, lam=lam)
    advantages, returns = (torch.zeros_like(x.T).scatter(1, order, x.T) for x in in_order)
    return torch.where(counted, advantages, 0.0), torch.where(counted, returns, 0.0)


def distillation(teacher_logprobs: Tensor, logprobs: Tensor, mask: Tensor) -> Tensor:
    """Advantage of on-policy distillation, per sampled token: A_t = log pi_teacher - log pi_student.

    On-policy distillation (Lu et al., Thinking Machines, 2025). Not normalised; clamped to +-20.

    Args:
        teacher_logprobs: of the sampled tokens under the teacher, any shape.
        logprobs: under the student that drew them, same shape.
        mask: which tokens count, same shape, bool or 0/1.

    Returns:
        Advantages in that shape, 0 outside the mask, without gradient.

    Raises:
        ValueError: shapes differ.
    """
    same_shape("distillation", "teacher_logprobs", teacher_logprobs, logprobs=logprobs, mask=mask)
    counted = Mask.of(mask, logprobs)
    difference = counted.fill(teacher_logprobs.detach()) - counted.fill(logprobs.detach())
    return difference.clamp(-LOG_RATIO, LOG_RATIO)


def whiten(x: Tensor, mask: Tensor, *, reduce: Reduce | None = None) -> Tensor:
    """Give what counts mean 0 and variance 1, over the whole batch.

        (x - mean) / sqrt(max(var, 1e-8))

    Args:
        x: any shape.
        mask: which elements count, same shape, bool or 0/1; of floats: how much each counts.
        reduce: adds a float64 tensor of sums up over ranks; called twice, on every rank alike. None: this is all.

    Returns:
        The same shape, 0 outside the mask, without gradient; 0 everywhere if all are equal.

    Raises:
        ValueError: shapes differ.
    """
    same_shape("whiten", "x", x, mask=mask)
    centred, variance, mean = _centred_by_batch(x, mask, reduce)
    if _is_rounding(variance, mean):
        centred = torch.zeros_like(centred)
    return (centred / variance.clamp(min=_LEAST_VARIANCE).sqrt()).to(wide(x).dtype)


def all_equal(x: Tensor, mask: Tensor, *, reduce: Reduce | None = None) -> bool:
    """Everything that counts is one number, on all ranks; true of nothing, too.

    Args:
        x, mask, reduce: see `whiten`.
    """
    _, variance, mean = _centred_by_batch(x, mask, reduce)
    return _is_rounding(variance, mean)


def _is_rounding(variance: Tensor, mean: Tensor) -> bool:
    return bool(variance <= (_ROUNDING * mean).square())


def _centred_by_batch(x: Tensor, mask: Tensor, reduce: Reduce | None) -> tuple[Tensor, Tensor, Tensor]:
    """Deviations from the mean of what counts, 0 elsewhere, float64; variance and mean."""
    counted = Mask.of(mask, x)
    add = reduce if reduce is not None else (lambda sums: sums)
    values = counted.fill(x.detach()).double()
    weight = 1.0 if counted.weight is None else counted.weight.double()
    number = counted.number if counted.weight is None else counted.weight.double().sum()
    total, count = add(torch.stack([(values * weight).sum(), number])).unbind()
    mean = total / count.clamp(min=1)
    centred = torch.where(counted.inside, values - mean, 0.0)
    variance = add((centred.square() * weight).sum().reshape(1))[0] / count.clamp(min=1)
    return centred, variance, mean


def overlong(lengths: Tensor, *, longest: int, cache: int, penalty: float = 1.0) -> Tensor:
    """A penalty that grows as an answer nears the length limit.

        0                                            up to longest - cache
        p (longest - cache - length) / cache         up to longest, where it is -p
        -p                                           beyond

    Soft overlong punishment, DAPO (arXiv:2503.14476, eq. 13; there 20480, 4096 and p = 1, beside rewards of 1 and -1,
    eq. 7). Add it to the rewards.

    Args:
        lengths: of each answer, tokens, any shape.
        longest: the limit, tokens.
        cache: how many tokens before the limit the penalty begins.
        penalty: p, in units of reward.

    Returns:
        Penalties, the same shape, float64, from -p to 0.

    Raises:
        ValueError: `cache` is not between 1 and `longest`.
    """
    if not 0 < cache <= longest:
        raise ValueError(f"overlong: cache={cache} must be between 1 and longest={longest}, both in tokens")
    return penalty * ((longest - cache - lengths.double()) / cache).clamp(-1.0, 0.0)


def at_end(rewards: Tensor, mask: Tensor) -> Tensor:
    """Rewards of answers as rewards of tokens: each on the answer's own last token that counts.

    Args:
        rewards: of each answer, [answers].
        mask: which tokens count, [answers, tokens], bool or 0/1.

    Returns:
        [answers, tokens], 0 elsewhere; an answer without a token has nowhere to carry its reward.

    Raises:
        ValueError: shapes do not fit.
    """
    if mask.ndim != 2 or rewards.shape != mask.shape[:1]:
        raise ValueError(
            f"at_end: rewards must be [answers] and mask [answers, tokens], got {list(rewards.shape)} and "
            f"{list(mask.shape)}"
        )
    counted = mask.bool()
    remaining = counted.flip(1).cumsum(1).flip(1)  # how many count from here on: 1 at the last one
    return torch.where(counted & (remaining == 1), wide(rewards.detach())[:, None], 0.0)


def less_kl(rewards: Tensor, kl: Tensor, mask: Tensor, *, beta: float) -> Tensor:
    """Rewards with the divergence from a reference taken off: r_t - beta KL_t.

    The KL in the reward of classic RLHF (arXiv:1909.08593, eq. 2), with k1 = log(pi_old / pi_ref).

    Args:
        rewards: of each token, [answers, tokens], or of each answer, [answers], which then pays for its tokens' sum.
        kl: KL_t, nats, [answers, tokens].
        mask: which tokens count, [answers, tokens], bool or 0/1.
        beta: weight, reward per nat.

    Returns:
        The shape of `rewards`; tokens outside the mask are 0.

    Raises:
        ValueError: shapes do not fit.
    """
    same_shape("less_kl", "mask", mask, kl=kl)
    if mask.ndim != 2 or rewards.shape not in (mask.shape, mask.shape[:1]):
        raise ValueError(f"less_kl: rewards {list(rewards.shape)} fit neither mask {list(mask.shape)} nor its rows")
    counted = Mask.of(mask, rewards)
    penalty = beta * counted.fill(kl.detach())
    if rewards.ndim == 1:
        return wide(rewards.detach()) - penalty.sum(1)
    return counted.fill(rewards.detach()) - penalty


def uneven(rewards: Tensor, groups: Tensor) -> Tensor:
    """Answers in a group whose rewards are not all equal: the others have no advantage to learn from.

    Args:
        rewards: of each answer, [answers].
        groups: which group each answer belongs to, whole numbers, [answers].

    Returns:
        bool [answers].

    Raises:
        ValueError: shapes differ.
    """
    same_shape("uneven", "rewards", rewards, groups=groups)
    if rewards.numel() == 0:
        return rewards.bool()
    group = _numbered(groups)
    highest, lowest = _over_groups(rewards, group, "amax"), _over_groups(rewards, group, "amin")
    return (highest != lowest)[group]


def mean_within(rewards: Tensor, groups: Tensor, low: float, high: float) -> Tensor:
    """Answers in a group whose mean reward lies between two bounds: the others are too hard or too easy
    (PRIME, arXiv:2502.01456; for robots SimpleVLA-RL, arXiv:2509.09674).

    Args:
        rewards: of each answer, [answers].
        groups: which group each answer belongs to, whole numbers, [answers].
        low, high: bounds, themselves inside.

    Returns:
        bool [answers].
    """
    same_shape("mean_within", "rewards", rewards, groups=groups)
    if rewards.numel() == 0:
        return rewards.bool()
    group = _numbered(groups)
    means = _over_groups(rewards, group, "mean")
    return ((means >= low) & (means <= high))[group]


def _numbered(groups: Tensor) -> Tensor:
    """Each answer's group as a number from 0."""
    numbers: Tensor = torch.unique(groups, return_inverse=True)[1]  # type: ignore[no-untyped-call, unused-ignore]
    return numbers


def _over_groups(rewards: Tensor, group: Tensor, how: Literal["amax", "amin", "mean"]) -> Tensor:
    """Largest, smallest or mean reward of each group, float64 [groups]."""
    empty = torch.zeros(int(group.max()) + 1, dtype=torch.float64, device=rewards.device)
    return empty.scatter_reduce(0, group, rewards.detach().double(), how, include_self=False)


def whole(mask: Tensor, truncated: Tensor) -> Tensor:
    """The mask without the answers that the length limit cut (overlong filtering, DAPO section 3.4).

    Args:
        mask: which tokens count, [answers, tokens] or [answers].
        truncated: whether the limit cut each answer, [answers].

    Raises:
        ValueError: shapes do not fit.
    """
    if truncated.shape != mask.shape[:1]:
        raise ValueError(f"whole: truncated {list(truncated.shape)} must be one per row of mask {list(mask.shape)}")
    finished = ~truncated.bool()
    return mask.bool() & finished.reshape(-1, *[1] * (mask.ndim - 1))


@dataclass(slots=True)
class Filling:
    """How far a batch is filled whose silent groups are dropped. Pure counting: nothing waits or draws here.

    Dynamic sampling, DAPO (arXiv:2503.14476, section 3.2): drop the groups that are all right or all wrong, and keep
    sampling until the batch is full or a cap of rounds is reached.

        filling = Filling(wanted=64, max_rounds=10)
        while draw := filling.next_round():
            kept += [group for group in generate(draw) if filling.offer(teaches(spec, group))]
    """

    wanted: int
    """Groups of a full batch."""
    max_rounds: int
    """Rounds of generation at most; at least 1."""
    rounds: int = 0
    """Rounds begun."""
    offered: int = 0
    """Groups seen."""
    kept: int = 0
    """Groups kept."""

    def __post_init__(self) -> None:
        if self.wanted < 1 or self.max_rounds < 1:
            raise ValueError(f"Filling: wanted={self.wanted} and max_rounds={self.max_rounds} must be at least 1")

    @property
    def missing(self) -> int:
        """Groups that are still wanted."""
        return self.wanted - self.kept

    def offer(self, teaches: bool) -> bool:
        """Count a group in; whether it is to be kept: it gives a gradient, and the batch is not yet full."""
        self.offered += 1
        good = self.missing > 0 and teaches
        self.kept += good
        return good

    def next_round(self) -> int:
        """Begin a round: how many prompts to draw for it; 0 if the batch is full or there may be no more rounds.

        As many as the share kept so far lets expect to fill the batch, but no more than a full batch.
        """
        if self.missing <= 0 or self.rounds >= self.max_rounds:
            return 0
        self.rounds += 1
        if self.kept == 0:
            return self.wanted
        return min(self.wanted, math.ceil(self.missing * self.offered / self.kept))
