"""Trajectories with what followed every decision, which learning from remembered transitions needs.

In: what a slice of environments shows. Out: an `Experience`, a `Trajectory` that also says what was seen behind each
chunk: where it ended an episode, the last observation of that one, not the first of the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlinf.models.policy.base import Stored
from rlinf.training.embodied.replay_buffer import Rows
from rlinf.training.embodied.trajectory import Trajectory, joined


@dataclass(frozen=True, slots=True, eq=False)
class Experience(Trajectory):
    """T decisions for each of N environments, and what followed."""

    following: Stored
    """The policy's inputs behind each chunk, [T, N, ...]."""


def transitions(parts: Sequence[Trajectory]) -> tuple[Trajectory, Rows]:
    """Several slices as one, and their transitions, in the order of time and then of environment.

    Args:
        parts: of all slices, in any order, all of them `Experience`.

    Returns:
        All trajectories in one, and for the R chunks of which anything was done: `seen.*`, the policy's inputs; and
        `actions`, in its own terms; `following.*`; `rewards` of each action, 0 where it was not done, float32 [R, C];
        `steps`, how many were done, int64 [R]; `terminated`, bool [R].

    Raises:
        ValueError: there are none, they are of different lengths, or do not say what followed.
    """
    told = [part for part in parts if isinstance(part, Experience)]
    if len(told) < len(parts):
        raise ValueError("train: trajectories do not say what followed each decision: let an OffPolicyDecider act")
    whole = joined(told)
    told.sort(key=lambda part: (part.rank, part.first))
    chunks = whole.chunks
    valid = chunks.valid.bool()
    there = valid.any(-1)

    def of(tensor: Tensor) -> Tensor:
        return tensor[there]

    rows = {f"seen.{name}": of(stored) for name, stored in whole.stored.items() if name != "actions"}
    for name in told[0].following:
        rows[f"following.{name}"] = of(torch.cat([part.following[name] for part in told], 1))
    return whole, {
        **rows,
        "actions": of(whole.stored["actions"]),
        "rewards": of(torch.where(valid, chunks.rewards, 0.0).float()),
        "steps": of(valid.sum(-1)),
        "terminated": of((chunks.terminated.bool() & valid).any(-1)),
    }
