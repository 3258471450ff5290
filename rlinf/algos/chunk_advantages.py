"""Advantages of action chunks: rewards and ends of environments become advantages, returns and a mask.

Flow: a rollout of T chunks in N environments, C actions each, is one `Chunks`; `advantages_of_chunks` gives every
action or every chunk its advantage by GAE, `group_advantages` by comparing episodes that began alike. `rows` lays the
result out as `MicroBatch` wants it. Pure, without I/O.

An environment that ends an episode within a chunk does not go on in it: the actions behind the end are not `valid`,
count for nothing and take no time. The next chunk begins the next episode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlinf.algos import advantages
from rlinf.algos.advantages import Reduce, mean_within, uneven
from rlinf.algos.loss_sum import same_shape, wide


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """A rollout: T chunks of C actions in N environments, in order of time."""

    rewards: Tensor
    """Rewards of actions, [T, N, C]."""
    terminated: Tensor
    """The task ended with this action: nothing is earned behind, bool [T, N, C]."""
    truncated: Tensor
    """The episode was cut behind this action, though more could be earned, bool [T, N, C]."""
    valid: Tensor
    """The action was done at all, bool [T, N, C]: false behind an end, and in episodes that were lost."""
    values: Tensor | None = None
    """The critic's prediction before each action, [T, N, C], or before each chunk, [T, N]."""
    next_values: Tensor | None = None
    """Its prediction after the last chunk, [N]; where that ended an episode, anything."""
    final_values: Tensor | None = None
    """Its prediction for the last observation of the episode that a chunk cut, [T, N]; elsewhere, anything."""

    def __post_init__(self) -> None:
        if self.rewards.ndim != 3:
            raise ValueError(f"Chunks: rewards must be [T, N, C], not {list(self.rewards.shape)}")
        flags = {"terminated": self.terminated, "truncated": self.truncated, "valid": self.valid}
        same_shape("Chunks", "rewards", self.rewards, **flags)
        actions = self.rewards.shape
        for name, shape in {"values": actions[:2], "final_values": actions[:2], "next_values": actions[1:2]}.items():
            values: Tensor | None = getattr(self, name)
            if values is None or values.shape == shape or (name == "values" and values.shape == actions):
                continue
            raise ValueError(
                f"Chunks: {name} {list(values.shape)} must be {list(shape)} for rewards {list(actions)}"
                + (", or of their shape" if name == "values" else "")
            )

    @property
    def ended(self) -> Tensor:
        """Actions that an episode ended with, in whichever way, bool [T, N, C]."""
        return (self.terminated.bool() | self.truncated.bool()) & self.valid.bool()


@dataclass(frozen=True, slots=True, eq=False)
class ChunkAdvantages:
    """Advantages per action, [T, N, C], or per chunk, [T, N]."""

    values: Tensor
    """Advantages, 0 outside the mask, without gradient."""
    mask: Tensor
    """Actions or chunks that are learned from, bool."""
    returns: Tensor | None = None
    """Targets of the critic, 0 outside the mask; None where there is no critic."""


def advantages_of_chunks(
    chunks: Chunks, *, gamma: float, lam: float, whiten: bool = True, reduce: Reduce | None = None
) -> ChunkAdvantages:
    """Generalised advantage estimation over actions or over chunks, at the level of `chunks.values`.

        r_t = r_t + gamma V(last observation)          where the episode was cut at t and had not terminated
        A_t = GAE of r, V                              nothing passes from an episode to the next

    Over chunks, r_t is the sum of the rewards of the chunk's valid actions, an episode ends with the chunk in which it
    ended, and gamma is per chunk; over actions, gamma is per action. Episodes that go on behind the last chunk are
    bootstrapped with `next_values`. GAE: arXiv:1506.02438, eq. 16. Bootstrapping at time limits: Pardo et al.
    (arXiv:1712.00378, eq. 6). Levels: RLinf-VLA (arXiv:2510.06710).

    Args:
        chunks: with `values` and `next_values`, and with `final_values` if anything was truncated.
        gamma: discount, 0 to 1.
        lam: weight of longer looks ahead, 0 to 1.
        whiten: give advantages mean 0 and variance 1 over the batch, once.
        reduce: adds a float64 tensor of sums up over ranks; None if this is all.

    Raises:
        ValueError: a value that is needed is missing, or a discount is out of range.
    """
    values, following = chunks.values, chunks.next_values
    if values is None or following is None:
        raise ValueError("advantages_of_chunks: Chunks.values and next_values are missing, which GAE needs")
    valid, ended = chunks.valid.bool(), chunks.ended
    rewards = torch.where(valid, wide(chunks.rewards) + gamma * _bootstrap(chunks), 0.0)
    if values.ndim == 2:
        rewards, ended, mask = rewards.sum(-1), ended.any(-1), valid.any(-1)
        per_step = _gae(rewards, values, following, ended, mask, gamma, lam)
    else:
        steps = [_order(x) for x in (rewards, values, ended, valid)]
        per_step = _gae(steps[0], steps[1], following, steps[2], steps[3], gamma, lam)
        per_step = _chunked(per_step[0], rewards.shape[2]), _chunked(per_step[1], rewards.shape[2])
        mask = valid
    gains, returns = (torch.where(mask, x, 0.0) for x in per_step)
    return ChunkAdvantages(advantages.whiten(gains, mask, reduce=reduce) if whiten else gains, mask, returns)


def _bootstrap(chunks: Chunks) -> Tensor:
    """The value behind each action that cut its episode, 0 elsewhere, [T, N, C]."""
    cut = chunks.truncated.bool() & ~chunks.terminated.bool() & chunks.valid.bool()
    if chunks.final_values is None:
        if bool(cut.any()):
            raise ValueError(
                "advantages_of_chunks: episodes were truncated, but Chunks.final_values, the values of their last "
                "observations, are missing"
            )
        return torch.zeros_like(wide(chunks.rewards))
    return torch.where(cut, wide(chunks.final_values.detach())[..., None], 0.0)


def _gae(
    rewards: Tensor, values: Tensor, following: Tensor, ended: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """`advantages.gae`, [steps, N]; where a step is followed by none, nothing passes over the gap."""
    dones = torch.cat([ended[:1], ended])  # row t + 1: an episode ended with step t ...
    dones[1:-1] |= ~mask[1:]  # ... or the step behind it is none
    before = torch.where(mask, wide(values.detach()), 0.0)
    return advantages.gae(rewards, torch.cat([before, wide(following.detach())[None]]), dones, gamma=gamma, lam=lam)


def group_advantages(
    chunks: Chunks,
    groups: Tensor,
    *,
    success: Tensor | None = None,
    scale: Literal["std", "none"] = "std",
    level: Literal["action", "chunk"] = "action",
    returns_within: tuple[float, float] | None = None,
    success_within: tuple[float, float] | None = None,
) -> ChunkAdvantages:
    """The return of an episode relative to the others of its group, which began in the same state.

    Every environment counts with its first episode of the rollout: its return is the sum of its rewards, each of its
    actions has the same advantage, and what came behind its end counts for nothing. `rows` with `episode_ids` and
    `how="seq-mean-token-mean"` divide its loss by its length (RLinf-VLA, arXiv:2510.06710).

    Args:
        chunks: from the reset on; values are not looked at.
        groups: which group each environment belongs to, whole numbers, [N].
        success: whether each environment's episode solved its task, bool [N]: groups in which all did, or none, are not
            learned from. None filters nothing, which for equal returns comes to the same.
        scale: see `advantages.group_relative`.
        level: of the result.
        returns_within: groups whose mean return lies outside are not learned from; None for no bounds.
        success_within: groups whose share of successes lies outside are not learned from; None for no bounds.

    Raises:
        ValueError: shapes do not fit.
    """
    mask = chunks.valid.bool() & first_episode(chunks.ended)
    returns = torch.where(mask, wide(chunks.rewards), 0.0).sum((0, 2))
    present = mask.any(2).any(0)  # an episode that was lost is no member of its group
    members = groups[present]
    gains = torch.zeros_like(returns)
    gains[present] = advantages.group_relative(returns[present], members, scale=scale)
    teaching = present.clone()
    if success is not None:
        same_shape("group_advantages", "groups", groups, success=success)
        teaching[present] &= uneven(success[present].float(), members)
    for scores, bounds in ((returns, returns_within), (success, success_within)):
        if bounds is not None and scores is not None:
            teaching[present] &= mean_within(scores[present].double(), members, *bounds)
    mask = mask & teaching[None, :, None]
    if level == "chunk":
        return ChunkAdvantages(torch.where(mask.any(-1), gains[None], 0.0), mask.any(-1))
    return ChunkAdvantages(torch.where(mask, gains[None, :, None], 0.0), mask)


def first_episode(ended: Tensor) -> Tensor:
    """Actions of each environment's first episode, the one that ends it included.

    Args:
        ended: whether an episode ended with an action, bool [T, N, C].

    Returns:
        bool [T, N, C].
    """
    over = _order(ended).long()
    return _chunked(over.cumsum(0) - over == 0, ended.shape[2])


def episode_ids(ended: Tensor) -> Tensor:
    """Which episode each chunk belongs to, for losses that average over episodes.

    Args:
        ended: whether an episode ended with an action, bool [T, N, C].

    Returns:
        Whole numbers from 0, no two environments sharing one, int64 [T, N].
    """
    over = ended.any(-1).long()
    number = over.cumsum(0) - over  # ends in earlier chunks
    most = number[-1] + 1 if len(number) else over.sum(0)
    return number + (most.cumsum(0) - most)


def without_lost(valid: Tensor, ended: Tensor, lost: Tensor) -> Tensor:
    """`valid` without the episodes that were lost when a simulator crashed: what they were to earn nobody knows.

    Args:
        valid, ended: bool [T, N, C].
        lost: whether the episode that an environment was in at that chunk was lost there, bool [T, N]; the next chunk
            begins another.

    Returns:
        bool [T, N, C].
    """
    ends = ended.clone()
    ends[..., -1] |= lost
    ids = episode_ids(ends)
    lost_episodes = torch.zeros(int(ids.max()) + 1 if ids.numel() else 0, dtype=torch.bool, device=ids.device)
    lost_episodes[ids[lost]] = True
    return valid.bool() & ~lost_episodes[ids][..., None]


def rows(advantage: Tensor, logprobs: Tensor, mask: Tensor, episodes: Tensor | None = None) -> dict[str, Tensor]:
    """Advantages and mask in the layout of log-probs, a row per chunk, as `MicroBatch` takes them.

    Args:
        advantage, mask: per action, [T, N, C], or per chunk, [T, N].
        logprobs: of the policy: [T, N, C, A] (token level), [T, N, C] (action) or [T, N] (chunk).
        episodes: which episode each chunk belongs to, [T, N], for losses that average over episodes; of `episode_ids`.

    Returns:
        "logprobs", "advantages", "mask" and, with `episodes`, "sequences", each [T x N, tokens].

    Raises:
        ValueError: shapes do not fit, or advantages per action meet log-probs per chunk.
    """
    if mask.shape != advantage.shape or logprobs.shape[: advantage.ndim] != advantage.shape:
        raise ValueError(
            f"rows: advantages {list(advantage.shape)} and mask {list(mask.shape)} must be per action or per chunk of "
            f"log-probs {list(logprobs.shape)}; log-probs per chunk cannot use advantages per action"
        )
    tensors = {"logprobs": logprobs, "advantages": advantage, "mask": mask}
    if episodes is not None:
        tensors["sequences"] = episodes

    def row_per_chunk(x: Tensor) -> Tensor:
        spread = x.reshape(*x.shape, *[1] * (logprobs.ndim - x.ndim)).expand(logprobs.shape)
        return spread.reshape(logprobs.shape[0] * logprobs.shape[1], -1)

    return {name: row_per_chunk(x) for name, x in tensors.items()}


def _order(x: Tensor) -> Tensor:
    """Actions one after the other, [T x C, N]."""
    return x.movedim(2, 1).flatten(0, 1)


def _chunked(x: Tensor, chunk: int) -> Tensor:
    """The inverse of `_order`, [T, N, C]."""
    return x.reshape(-1, chunk, *x.shape[1:]).movedim(1, 2)
