"""Advantages: how much better an answer was than expected. Rewards in, one number per answer (or token) out."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Literal

import torch
from torch import Tensor

_SCALES = ("std", "none")
_EPSILON = 1e-6  # added to the standard deviation, as in the public GRPO implementations


def group_relative(rewards: Tensor, groups: Tensor, *, scale: Literal["std", "none"] = "std") -> Tensor:
    """The reward relative to the other answers to the same prompt.

        A_i = (R_i - mean(R)) / (std(R) + 1e-6)        mean and std over the group of i, std with the n - 1 divisor

    GRPO (DeepSeekMath, arXiv:2402.03300, section 4.1.2, outcome supervision). `scale="none"` leaves the division out,
    which is Dr. GRPO (arXiv:2503.20783, section 3.2). A group of equal rewards gives exactly 0, and so does a group of
    one.

    Args:
        rewards: reward of each answer, [answers].
        groups: which group each answer belongs to, [answers], whole numbers; members need not stand together.
        scale: "std" divides by the group's standard deviation, "none" does not.

    Returns:
        Advantages, [answers], float32 (float64 if the rewards are).

    Raises:
        ValueError: shapes differ, or `scale` is unknown.
    """
    if scale not in _SCALES:
        near = get_close_matches(str(scale), _SCALES, n=1)
        raise ValueError(
            f"group_relative: scale={scale!r} is none of {list(_SCALES)}" + (f"; meant {near[0]!r}?" if near else "")
        )
    if rewards.ndim != 1 or groups.shape != rewards.shape:
        raise ValueError(
            "group_relative: rewards and groups must both be [answers], "
            f"got rewards {list(rewards.shape)} and groups {list(groups.shape)}"
        )
    rewards = rewards if rewards.dtype == torch.float64 else rewards.float()
    if rewards.numel() == 0:
        return rewards
    group: Tensor = torch.unique(groups, return_inverse=True)[1]  # type: ignore[no-untyped-call, unused-ignore]
    count = torch.bincount(group)
    zeros = rewards.new_zeros(len(count))
    mean = zeros.index_add(0, group, rewards) / count
    centred = rewards - mean[group]
    # (R - mean) of equal rewards is a rounding error, which the division would blow up: ask for equality itself.
    largest = zeros.scatter_reduce(0, group, rewards, "amax", include_self=False)
    smallest = zeros.scatter_reduce(0, group, rewards, "amin", include_self=False)
    centred = torch.where((largest == smallest)[group], torch.zeros_like(centred), centred)
    if scale == "none":
        return centred
    std = (zeros.index_add(0, group, centred.square()) / (count - 1).clamp(min=1)).sqrt()
    return centred / (std[group] + _EPSILON)
