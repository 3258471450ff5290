"""What travels between simulation, policy and trainer: what is seen, and what came of acting on it.

A `Seen` goes from simulation to policy at every decision, actions go back; a `Trajectory` goes from the policy to the
trainer, once per slice and step. Observations so cross each boundary once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlinf.algos.chunk_advantages import Chunks
from rlinf.envs.base import Observation
from rlinf.envs.episodes import Chunk, Episode
from rlinf.models.policy.base import Stored


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """What the environments of a slice show."""

    __plain__: ClassVar[bool] = True  # holds no promise: the runtime need not look for one in its arrays

    observation: Observation
    """To act on next, N rows."""
    instructions: tuple[str, ...] | None
    """What each environment is to do, in words."""
    chunk: Chunk | None
    """What the last actions did; None at the beginning of a step."""
    seeds: Tensor
    """For what is drawn next, one per environment, int64 [N]: a function of seed, epoch, environment and time, so that
    what a policy draws does not depend on slices or on who asks when."""
    first: int
    """Number of the first environment among those of its simulation."""


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """T decisions for each of N environments, in order of time."""

    __plain__: ClassVar[bool] = True  # see Seen

    chunks: Chunks
    """Rewards, ends and values, [T, N, C]; episodes that were lost are not valid in it."""
    stored: Stored
    """All that log-probs depend on, [T, N, ...]."""
    logprobs: Tensor
    """Of what was drawn, at the policy's level, nats: [T, N], [T, N, C] or [T, N, C, A]."""
    success: Tensor | None
    """Whether the first episode that ended here was solved at some time, bool [N]; None if nobody says."""
    episodes: tuple[Episode, ...]
    """Those that ended."""
    lost: int
    """Episodes that died with their simulator."""
    first: int
    """Number of the first environment among those of its simulation."""
    rank: int
    """Of the simulation."""
    version: int
    """Of the weights that decided."""


def in_order(parts: Sequence[Trajectory]) -> list[Trajectory]:
    """Slices by simulation and environment, whatever order they came in."""
    return sorted(parts, key=lambda part: (part.rank, part.first))


def joined(parts: Sequence[Trajectory]) -> Trajectory:
    """Several slices as one, in the order of simulation and environment, whatever order they came in.

    Raises:
        ValueError: there are none, or they are of different lengths.
    """
    if not parts:
        raise ValueError("train: not one trajectory came")
    parts = in_order(parts)
    if len({part.logprobs.shape[0] for part in parts}) > 1:
        lengths = [part.logprobs.shape[0] for part in parts]
        raise ValueError(f"train: trajectories have {lengths} decisions; let all slices act equally often")
    if len(parts) == 1:
        return parts[0]

    def along(name: str, dim: int = 1) -> Tensor | None:
        found = [getattr(part.chunks, name) for part in parts]
        return None if any(each is None for each in found) else torch.cat(found, dim)

    def whole(name: str) -> Tensor:
        found = along(name)
        assert found is not None
        return found

    successes = [part.success for part in parts if part.success is not None]
    return Trajectory(
        chunks=Chunks(
            rewards=whole("rewards"),
            terminated=whole("terminated"),
            truncated=whole("truncated"),
            valid=whole("valid"),
            values=along("values"),
            next_values=along("next_values", 0),
            final_values=along("final_values"),
        ),
        stored={name: torch.cat([part.stored[name] for part in parts], 1) for name in parts[0].stored},
        logprobs=torch.cat([part.logprobs for part in parts], 1),
        success=torch.cat(successes) if len(successes) == len(parts) else None,
        episodes=tuple(episode for part in parts for episode in part.episodes),
        lost=sum(part.lost for part in parts),
        first=parts[0].first,
        rank=parts[0].rank,
        version=min(part.version for part in parts),
    )
