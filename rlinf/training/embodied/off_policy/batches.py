"""What steps of off-policy learners share: parts of a batch of transitions, and targets that follow."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlinf.algos.losses.sac import polyak
from rlinf.models.policy.base import Stored
from rlinf.training.embodied.off_policy.pictures import shifted
from rlinf.training.embodied.off_policy.replay_buffer import Rows


def inputs_of(rows: Rows, prefix: str) -> Stored:
    """The policy's inputs in transitions, "seen." or "following."."""
    return {name.removeprefix(prefix): row for name, row in rows.items() if name.startswith(prefix)}


def rewards_of(rows: Rows, gamma: float) -> Tensor:
    """What each transition earned, sum of gamma^i r_i, [B]."""
    rewards = rows["rewards"]
    return (rewards * gamma ** torch.arange(rewards.shape[1], device=rewards.device)).sum(1)


def shifts(batch: Rows, most: int, generator: torch.Generator) -> Rows:
    """The batch with its pictures moved at random by at most so many pixels, each by itself; see `pictures.shifted`."""
    if not most:
        return batch
    found = dict(batch)
    for name, rows in batch.items():
        if rows.dtype == torch.uint8 and rows.ndim == 4:  # height, width, channels
            found[name] = shifted(rows, torch.randint(-most, most + 1, (len(rows), 2), generator=generator))
    return found


@torch.no_grad()
def follow(target: nn.Module, source: nn.Module, tau: float) -> None:
    """Move a target network that share of the way towards its source."""
    for mine, theirs in zip(target.parameters(), source.parameters(), strict=True):
        mine.copy_(polyak(mine, theirs, tau=tau))
