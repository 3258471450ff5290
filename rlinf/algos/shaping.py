"""Shaping: what is done to rewards and levels before advantages are taken. Rewards in, rewards out."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlinf.algos.tensor.masks import keep, wide
from rlinf.algos.validation import one_of, same_shape


def overlong(lengths: Tensor, *, longest: int, cache: int) -> Tensor:
    """A penalty that grows as an answer nears the length limit.

        0                                            up to longest - cache
        (longest - cache - length) / cache           up to longest, where it is -1
        -1                                           beyond

    Soft overlong punishment, DAPO (arXiv:2503.14476, eq. 13; there 20480 and 4096). Add it to the rewards.

    Args:
        lengths: of each answer, tokens, any shape.
        longest: the limit, tokens.
        cache: how many tokens before the limit the penalty begins.

    Returns:
        Penalties, the same shape, float32, from -1 to 0.

    Raises:
        ValueError: `cache` is not between 1 and `longest`.
    """
    if not 0 < cache <= longest:
        raise ValueError(f"overlong: cache={cache} must be between 1 and longest={longest}, both in tokens")
    return ((longest - cache - lengths.double()) / cache).clamp(-1.0, 0.0).float()


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
    still = counted.flip(1).cumsum(1).flip(1)  # how many count from here on: 1 at the last one
    return torch.where(counted & (still == 1), wide(rewards.detach())[:, None], 0.0)


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
    kept = keep(mask, wide(rewards.detach()).dtype)
    penalty = beta * kept.only(kept.clean(kl).to(kept.dtype))
    if rewards.ndim == 1:
        return wide(rewards.detach()) - penalty.sum(1)
    return kept.only(kept.clean(rewards)) - penalty


def bootstrap(rewards: Tensor, truncated: Tensor, final_values: Tensor, *, gamma: float) -> Tensor:
    """Give a step that was cut short the value of what it did not live to see: r + gamma V(final observation).

    Pardo et al., "Time limits in reinforcement learning" (arXiv:1712.00378, eq. 6). An episode that really ended has
    nothing to come; so `truncated` must be false where it did.

    Args:
        rewards: of each step, any shape.
        truncated: whether a limit cut the episode after this step, same shape, bool or 0/1.
        final_values: value of the observation after it, same shape; not read elsewhere.
        gamma: discount per step.

    Raises:
        ValueError: shapes differ.
    """
    same_shape("bootstrap", "rewards", rewards, truncated=truncated, final_values=final_values)
    rewards = wide(rewards.detach())
    return torch.where(truncated.bool(), rewards + gamma * final_values.detach().to(rewards.dtype), rewards)


def chunk_rewards(rewards: Tensor, dones: Tensor) -> tuple[Tensor, Tensor]:
    """Rewards and ends of chunks of actions that are learned from as one: the sum, and whether any step ended.

    Args:
        rewards: of each step, [..., chunk].
        dones: whether the episode ended there, same shape, bool or 0/1.

    Returns:
        Both without the last axis; the second is bool.

    Raises:
        ValueError: shapes differ.
    """
    same_shape("chunk_rewards", "rewards", rewards, dones=dones)
    return wide(rewards.detach()).sum(-1), dones.bool().any(-1)


def logprob_level(logprobs: Tensor, level: Literal["token", "action", "chunk"]) -> Tensor:
    """Log-probs of a chunk of actions at the level that is learned from; differentiable.

    Args:
        logprobs: of each action's dimensions (or tokens), nats, [batch, chunk, dimensions].
        level: "token" as they are, "action" [batch, chunk], "chunk" [batch].

    Raises:
        ValueError: another shape, or an unknown level.
    """
    one_of("logprob_level", "level", level, ("token", "action", "chunk"))
    if logprobs.ndim != 3:
        raise ValueError(f"logprob_level: logprobs must be [batch, chunk, dimensions], got {list(logprobs.shape)}")
    if level == "token":
        return logprobs
    return wide(logprobs).sum(2) if level == "action" else wide(logprobs).sum((1, 2))


def agent_scales(
    trajectories: Tensor, agents: Tensor, lengths: Tensor, *, agent: bool = True, turn: bool = True
) -> Tensor:
    """Factors of the turns' losses, so that agents who speak often, or turns that are long, weigh as meant.

        agent: 1 / (agents in the trajectory x turns of this agent in it)
        turn:  turns of this agent in the trajectory x tokens of the turn / tokens of all of them

    For losses that average over sequences ("seq-mean-…"), one sequence per turn. With both, every agent of a
    trajectory weighs the same, and every token of an agent does.

    Args:
        trajectories: which trajectory each turn belongs to, whole numbers, [turns].
        agents: which agent took it, whole numbers, [turns].
        lengths: tokens that count in it, [turns].
        agent, turn: which factors to apply.

    Returns:
        Factors, [turns], float32.

    Raises:
        ValueError: shapes differ.
    """
    same_shape("agent_scales", "trajectories", trajectories, agents=agents, lengths=lengths)
    pairs, seat, turns = torch.unique(
        torch.stack([trajectories, agents], 1), dim=0, return_inverse=True, return_counts=True
    )
    _, place, present = torch.unique(pairs[:, 0], return_inverse=True, return_counts=True)
    scale = torch.ones(len(lengths), dtype=torch.float64, device=lengths.device)
    if agent:
        scale = scale / (present[place] * turns)[seat]
    if turn:
        spoken = torch.zeros(len(turns), dtype=torch.float64, device=lengths.device)
        spoken = spoken.index_add(0, seat, lengths.double())
        scale = scale * turns[seat] * lengths / spoken[seat].clamp(min=1)
    return scale.float()
