"""Scripts that solve tasks of ManiSkill by their states: what records demonstrations, and answers to DAgger.

Each takes observations of N environments and gives actions in [-1, 1], float32 [N, 1, A].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_STEP = 0.1
"""Metres that the hand moves with an action of 1, of "pd_ee_delta_pos"."""
_HAND, _CUBE = slice(18, 21), slice(28, 31)
"""Where both are in PullCube-v1's 35 numbers: positions and speeds of nine joints come first, then the poses of the
hand, [7], the goal, [3], and the cube, [7]."""
_BEHIND, _ABOVE = 0.05, 0.12
"""Metres from the cube's middle to where the hand comes down behind it, and to where it passes above."""


def pull_cube(observation: Mapping[str, Tensor], instructions: Sequence[str] | None = None) -> Tensor:
    """PullCube-v1 with control "pd_ee_delta_pos": goes over the cube, comes down behind it, and pulls.

    Raises:
        ValueError: the state is not that of PullCube-v1.
    """
    state = observation["state"]
    if state.shape[1] != 35:
        raise ValueError(f"the script for PullCube-v1 looks at 35 numbers, and the state has {state.shape[1]}")
    hand, cube = state[:, _HAND], state[:, _CUBE]
    behind = hand[:, 0] > cube[:, 0] + 0.03
    low = hand[:, 2] < cube[:, 2] + 0.02
    aside = (hand[:, 1] - cube[:, 1]).abs() > 0.01
    wanted = cube.clone()
    wanted[:, 0] += _BEHIND
    wanted[:, 2] += torch.where(behind & ~aside, 0.0, _ABOVE)
    pulling = behind & low & ~aside
    wanted[:, 0] = torch.where(pulling, cube[:, 0] - 0.1, wanted[:, 0])
    moved = ((wanted - hand) / _STEP).clamp(-1.0, 1.0)
    closed = -torch.ones(len(state), 1, dtype=moved.dtype, device=moved.device)
    return torch.cat([moved, closed], 1)[:, None]
