"""What a policy did in environments, on its way to the trainer.

In: one `Trajectory` per slice of environments and step, put together by the actor of the policy. Out: one of all slices
(`joined`); `off_policy/transitions.py` makes rows of a replay buffer of it. Nobody waits here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlinf.algos.chunk_advantages import Chunks
from rlinf.envs.episodes import Episode
from rlinf.models.policy.base import Stored


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """T decisions for each of N environments, in order of time."""

    __plain__: ClassVar[bool] = True  # holds no promise: the runtime need not look for one in its arrays

    chunks: Chunks
    """Rewards, ends and values, [T, N, C]; episodes that were lost are not valid in it."""
    stored: Stored
    """All that log-probs depend on, [T, N, ...]."""
    logprobs: Tensor
    """Of the actions drawn, at the policy's level, nats: [T, N], [T, N, C] or [T, N, C, A]."""
    success: Tensor | None
    """Whether the first episode that ended here was solved at some time, bool [N]; None if nobody says."""
    episodes: tuple[Episode, ...]
    """Those that ended."""
    lost: int
    """Episodes that died with their simulator."""
    first: int
    """Number of the first environment among those of its actor."""
    rank: int
    """Of the actor of the environments."""
    version: int
    """Of the weights that decided."""
    following: Stored | None = None
    """The policy's inputs after each chunk, [T, N, ...]: where a chunk ended an episode, of the last observation of
    that episode, not of the first of the next. None where learning does not need them."""


def in_order(parts: Sequence[Trajectory]) -> list[Trajectory]:
    """Slices by actor and environment, whatever order they came in."""
    return sorted(parts, key=lambda part: (part.rank, part.first))


def joined(parts: Sequence[Trajectory]) -> Trajectory:
    """Several slices as one, in the order of actor and environment, whatever order they came in.

    Raises:
        ValueError: there are none, or they are of different lengths.
    """
    if not parts:
        raise ValueError("train: not one trajectory came")
    parts = in_order(parts)
    lengths = [part.logprobs.shape[0] for part in parts]
    if len(set(lengths)) > 1:
        raise ValueError(f"train: trajectories have {lengths} decisions; let all slices act equally often")
    if len(parts) == 1:
        return parts[0]
    chunks = [part.chunks for part in parts]
    return Trajectory(
        chunks=Chunks(**{name.name: _joined(chunks, name.name) for name in fields(Chunks)}),
        stored=_joined(parts, "stored"),
        logprobs=_joined(parts, "logprobs"),
        success=_joined(parts, "success"),
        episodes=tuple(episode for part in parts for episode in part.episodes),
        lost=sum(part.lost for part in parts),
        first=parts[0].first,
        rank=parts[0].rank,
        version=min(part.version for part in parts),
        following=_joined(parts, "following"),
    )


def _joined(parts: Sequence[Any], name: str) -> Any:
    """A field of all parts along the environments; None if one part has none."""

    def along(tensors: Sequence[Any]) -> Any:
        if isinstance(tensors[0], dict):
            return {key: along([tensor[key] for tensor in tensors]) for key in tensors[0]}
        return torch.cat(list(tensors), 0 if tensors[0].ndim == 1 else 1)  # [N], else [T, N, ...]

    found = [getattr(part, name) for part in parts]
    return None if any(each is None for each in found) else along(found)
