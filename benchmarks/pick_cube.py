"""gym-hil's Franka arm that picks up a cube, by its state alone; its expert, and a script that intervenes.

    pip install gym-hil
    python -m rlinf record --config benchmarks/pick_cube.yaml --episodes 2 --out DIR \\
      --expert benchmarks.pick_cube.expert
    python launch.py --config benchmarks/pick_cube.yaml off_policy.demonstrations=DIR

gym-hil makes a renderer even where nothing is drawn, which needs OpenGL; here nothing is drawn, and none is made. It
draws the cube's place from NumPy's global generator, which is seeded here with the episode. An action moves the hand by
2.5 cm at most and closes or opens the gripper; the reward is 1 when the cube is 10 cm up, which ends the episode, as
does a cube that was pushed away.

What moves is a point that the arm's controller pulls the hand towards, and the hand is up to 2.3 cm behind it: almost
as far as an action moves it. So the state has how far behind the hand is, and how fast it goes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

_MIDDLE, _SCALE = np.array([0.45, 0.0, 0.1], np.float32), 10.0
"""Middle of where the cube and the hand are, metres, and what brings places near -1 and 1."""
_STEP = 0.025
"""Metres that an action of 1 moves the hand."""
_HAND = slice(15, 18)
"""Where gym-hil's state has the place of the hand."""
_OPEN = 255.0
"""Greatest of the gripper's numbers: it is closed."""


class _NothingDrawn:
    """A renderer that draws nothing."""

    def __init__(self, *_: Any, **__: Any): ...

    def render(self) -> None: ...

    def close(self) -> None: ...


class PickCube(gymnasium.Wrapper[Any, Any, Any, Any]):
    """State of 16 numbers: how far the gripper is closed, the places of the hand and of the cube, the way from one to
    the other, how far the hand moved with the last action, and how far it is behind where it was told to go."""

    def __init__(self) -> None:
        import mujoco

        mujoco.Renderer = _NothingDrawn
        from gym_hil.envs.panda_pick_gym_env import PandaPickCubeGymEnv  # type: ignore[import-not-found]
        from gym_hil.wrappers.hil_wrappers import EEActionWrapper  # type: ignore[import-not-found]

        steps = dict.fromkeys(("x", "y", "z"), _STEP)
        super().__init__(EEActionWrapper(PandaPickCubeGymEnv(random_block_position=True), steps, use_gripper=True))
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (16,), np.float32)
        self._before: np.ndarray = _MIDDLE

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        np.random.seed(seed)
        observed, info = self.env.reset(seed=seed)
        self._before = observed["agent_pos"][_HAND]
        return self._state(observed), info

    def step(self, action: Any) -> Any:
        observed, reward, terminated, truncated, info = self.env.step(action)
        return self._state(observed), float(reward), terminated, truncated, {"success": bool(info["succeed"])}

    def _state(self, observed: Mapping[str, np.ndarray]) -> np.ndarray:
        gripper, hand, cube = observed["agent_pos"][14:15], observed["agent_pos"][_HAND], observed["environment_state"]
        told: Any = self.env.unwrapped
        ways = (hand - _MIDDLE, cube - _MIDDLE, cube - hand)
        moves = (hand - self._before, told.data.mocap_pos[0] - hand)
        self._before = hand
        parts = (gripper / _OPEN, *(way * _SCALE for way in ways), *(move / _STEP for move in moves))
        return np.concatenate(parts).astype(np.float32)


gymnasium.register("PickCubeState-v0", "benchmarks.pick_cube:PickCube", max_episode_steps=100)


def expert(observation: Mapping[str, Tensor], instructions: Sequence[str] | None = None) -> Tensor:
    """Goes over the cube with an open gripper, down to it, closes it and lifts.

    Args:
        observation: "state", float32 [N, 16].
        instructions: not looked at.

    Returns:
        Actions in [-1, 1], float32 [N, 1, 4].
    """
    state = observation["state"]
    closed, way = state[:, 0], state[:, 7:10] / _SCALE
    over = (way[:, :2].abs() < 0.015).all(1)
    there = over & (way[:, 2].abs() < 0.015)
    height = torch.where(over, way[:, 2], way[:, 2] + 0.08)
    lifts = there & (closed > 0.5)
    moves = torch.cat([way[:, :2], torch.where(lifts, _STEP, height)[:, None]], 1) / _STEP
    return torch.cat([moves, torch.where(there, 1.0, -1.0)[:, None]], 1).clamp(-1.0, 1.0)[:, None]


def person(observation: Mapping[str, Tensor], steps: Tensor, *, patience: int = 25) -> tuple[Tensor, Tensor]:
    """Stands in for a person: takes over where the cube is not up after so many steps, and lifts it.

    Args:
        observation: "state", float32 [N, 16].
        steps: of the episode so far, int64 [N].
        patience: steps; the expert itself needs 12 to 18. Somebody who sees failure coming and takes over at once hides
            what a mistake leads to, and its value stays too high.
    """
    return expert(observation)[:, 0], steps >= patience
