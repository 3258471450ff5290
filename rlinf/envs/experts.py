"""Scripted experts for tasks of gymnasium, ManiSkill and Meta-World: they record demonstrations, and answer to DAgger.

Each takes observations of N environments and gives actions in [-1, 1], float32 [N, 1, A]. Those of ManiSkill solve
tasks by their states. Those of Meta-World are its own, one for each of its tasks, chosen by the instruction; Meta-World
is imported with the first question.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.envs.metaworld import INSTRUCTIONS, STATE, registry

_GRAVITY, _TORQUE = 10.0, 2.0  # of Pendulum-v1


def pendulum(observation: Mapping[str, Tensor], instructions: Sequence[str] | None = None) -> Tensor:
    """Pendulum-v1: pumps energy in until the pendulum could just stand, and balances it there.

    Energy above that of standing is speed^2 / 6 - g / 2 (1 - cos angle), for a rod of mass and length 1.
    """
    cosine, sine, speed = observation["state"].unbind(1)
    excess = speed.square() / 6.0 - _GRAVITY / 2.0 * (1.0 - cosine)
    pumped = -2.0 * excess * torch.where(speed >= 0.0, 1.0, -1.0)
    angle = torch.atan2(sine, cosine)
    balanced = -(10.0 * angle + 2.0 * speed)
    torque = torch.where(cosine > 0.9, balanced, pumped)
    return (torque / _TORQUE).clamp(-1.0, 1.0)[:, None, None]


def mountain_car(observation: Mapping[str, Tensor], instructions: Sequence[str] | None = None) -> Tensor:
    """MountainCarContinuous-v0: pushes the way that the car rolls already."""
    return torch.where(observation["state"][:, 1:2] >= 0.0, 1.0, -1.0)[:, None]


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


def scripted(observation: Mapping[str, Tensor], instructions: Sequence[str] | None = None) -> Tensor:
    """Does what an instruction asks for, by Meta-World's script for that task.

    Args:
        observation: "state", float32 [N, S]: it begins with Meta-World's 39 numbers, the goal among them.
        instructions: N of `tasks.INSTRUCTIONS`, which say whose script is asked.

    Returns:
        Actions in [-1, 1], float32 [N, 1, 4].

    Raises:
        ValueError: there are no instructions, or the state lacks numbers that scripts look at.
    """
    state = observation["state"]
    if instructions is None or state.shape[1] < STATE:
        raise ValueError(
            f"Meta-World's scripts look at {STATE} numbers of the state and at instructions, but there are "
            f"{state.shape[1]} and {'none' if instructions is None else len(instructions)}: set env.options.observe "
            "to state or state+rgb"
        )
    rows = state[:, :STATE].double().cpu().numpy()
    actions = [_script(words).get_action(row) for words, row in zip(instructions, rows, strict=True)]
    return torch.from_numpy(np.stack(actions)).float().clamp(-1.0, 1.0)[:, None]


@cache
def _script(words: str) -> Any:
    """The script for an instruction; it remembers nothing from one question to the next."""
    registry()  # says what to install, if need be
    from metaworld.policies import ENV_POLICY_MAP

    policy: Callable[[], Any] = ENV_POLICY_MAP[_TASKS[words]]
    return policy()


_TASKS = {words: task for task, words in INSTRUCTIONS.items()}
