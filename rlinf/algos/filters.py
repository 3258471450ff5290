"""Filters: which answers and groups are learned from, and how many more must be drawn to fill a batch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rlinf.algos.validation import same_shape


def uneven(rewards: Tensor, groups: Tensor) -> Tensor:
    """Which answers are in a group whose rewards are not all equal: the others have no advantage to learn from.

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
    group: Tensor = torch.unique(groups, return_inverse=True)[1]  # type: ignore[no-untyped-call, unused-ignore]
    rewards = rewards.detach().double()
    empty = torch.zeros(int(group.max()) + 1, dtype=torch.float64, device=rewards.device)
    highest = empty.scatter_reduce(0, group, rewards, "amax", include_self=False)
    lowest = empty.scatter_reduce(0, group, rewards, "amin", include_self=False)
    return (highest != lowest)[group]


def mean_within(rewards: Tensor, groups: Tensor, low: float, high: float) -> Tensor:
    """Which answers are in a group whose mean reward lies between two bounds: the others are too hard or too easy
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
    group: Tensor = torch.unique(groups, return_inverse=True)[1]  # type: ignore[no-untyped-call, unused-ignore]
    empty = torch.zeros(int(group.max()) + 1, dtype=torch.float64, device=rewards.device)
    means = empty.scatter_reduce(0, group, rewards.detach().double(), "mean", include_self=False)
    return ((means >= low) & (means <= high))[group]


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
    kept = ~truncated.bool()
    return mask.bool() & kept.reshape(-1, *[1] * (mask.ndim - 1))


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
