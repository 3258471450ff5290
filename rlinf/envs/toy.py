"""A task so small that every return can be worked out by hand: move a point onto a target.

In each of D dimensions the point starts on a grid of 1/8 between -1 and 1, and so does the target. An action moves it
by at most 1/4, and the walls at -1 and 1 hold it. The reward is minus the mean distance that is left, or, if it is
`sparse`, 1 for the step that solves the task and 0 before; the task is solved, and ends, when no dimension is further
than 1/8 away. All numbers are multiples of powers of two, so that sums come out exactly, in any order.

It is for tests, for examples, and for trying a policy from pixels within minutes: `pixels` draws the world.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlinf.data.rng import mix
from rlinf.envs.base import ActionSpec, ArraySpec, Observation, Simulator, State, Transition, WrongOption

REACH = 0.25
"""Most that one action moves the point."""
NEAR = 0.125
"""Distance in every dimension from which the task is solved."""
_GRID = 8
"""Places on each side of 0 where points and targets start."""
_PICTURE = 64
"""Pixels on a side of the pictures for people."""
_WIND = 1 / 16
"""By so much, or not at all, each step's wind moves the point in either direction."""


class Reach(Simulator):
    """N points that look for their targets.

    Args:
        num_envs: how many.
        dims: dimensions, D: 1 or 2.
        pixels: side of the square pictures in the observation ("rgb"); 0 for none.
        wind: a random push in every step, which follows from the seed of the episode and the step alone.
        words: give each environment an instruction.
        sparse: reward nothing but the solution.
        max_steps: time limit.
    """

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """See `Simulator.check_options`."""
        super().check_options(options)
        if (dims := options.get("dims", 1)) not in (1, 2):
            raise WrongOption("dims", f"dims={dims} must be 1 or 2")

    def __init__(
        self,
        num_envs: int,
        *,
        dims: int = 1,
        pixels: int = 0,
        wind: bool = False,
        words: bool = False,
        sparse: bool = False,
        max_steps: int = 12,
    ):
        Reach.check_options({"dims": dims})
        self.num_envs = num_envs
        self.max_steps = max_steps
        self.action_spec = ActionSpec(torch.full((dims,), -REACH), torch.full((dims,), REACH))
        self.observation_spec = {"state": ArraySpec((2 * dims,), torch.float32)}
        if pixels:
            self.observation_spec["rgb"] = ArraySpec((pixels, pixels, 3), torch.uint8)
        self._dims, self._pixels, self._wind, self._words, self._sparse = dims, pixels, wind, words, sparse
        self._point = torch.zeros(num_envs, dims)
        self._target = torch.zeros(num_envs, dims)
        self._seed = torch.zeros(num_envs, dtype=torch.int64)
        self._step = torch.zeros(num_envs, dtype=torch.int64)

    def reset(self, seeds: Tensor, env_ids: Tensor) -> Observation:
        starts = torch.tensor([start_of(seed, self._dims) for seed in seeds.tolist()])
        self._point[env_ids], self._target[env_ids] = starts[:, 0], starts[:, 1]
        self._seed[env_ids] = seeds
        self._step[env_ids] = 0
        return self._look(env_ids)

    def step(self, actions: Tensor, active: Tensor) -> Transition:
        push = self._pushes() if self._wind else 0.0
        moved = (self._point + actions + push).clamp(-1.0, 1.0)
        self._point = torch.where(active[:, None], moved, self._point)
        self._step += active
        distance = (self._point - self._target).abs()
        solved = (distance <= NEAR).all(1)
        return Transition(
            observation=self._look(torch.arange(self.num_envs)),
            reward=solved.float() if self._sparse else -distance.mean(1),
            terminated=solved,
            truncated=torch.zeros_like(solved),
            success=solved,
        )

    def instructions(self) -> Sequence[str] | None:
        sides = ("left", "right")
        return [f"go {sides[int(x > 0)]}" for x in self._target[:, 0].tolist()] if self._words else None

    def render(self, env_ids: Tensor) -> Tensor:
        return draw(self._point[env_ids], self._target[env_ids], _PICTURE)

    def save(self) -> list[State]:
        rows = zip(self._point, self._target, self._seed.tolist(), self._step.tolist(), strict=True)
        return [
            {"point": point.clone(), "target": target.clone(), "seed": seed, "step": step}
            for point, target, seed, step in rows
        ]

    def restore(self, states: Sequence[State], env_ids: Tensor) -> None:
        for env, state in zip(env_ids.tolist(), states, strict=True):
            self._point[env], self._target[env] = state["point"], state["target"]
            self._seed[env], self._step[env] = state["seed"], state["step"]

    def _look(self, env_ids: Tensor) -> Observation:
        point, target = self._point[env_ids], self._target[env_ids]
        observation = {"state": torch.cat([point, target], 1)}
        if self._pixels:
            observation["rgb"] = draw(point, target, self._pixels)
        return observation

    def _pushes(self) -> Tensor:
        """Push on each environment in its next step, [N, D]."""
        keys = zip(self._seed.tolist(), self._step.tolist(), strict=True)
        return torch.tensor([[_WIND * (mix(*key, dim) % 3 - 1) for dim in range(self._dims)] for key in keys])


def start_of(seed: int, dims: int) -> list[list[float]]:
    """Where the point and the target of an episode start, [2, D]; never so near that there is nothing to do."""
    attempt = 0
    while True:
        places = [[mix(seed, attempt, what, dim) % (2 * _GRID + 1) for dim in range(dims)] for what in range(2)]
        start = [[place / _GRID - 1.0 for place in each] for each in places]
        if any(abs(point - target) > NEAR for point, target in zip(*start, strict=True)):
            return start
        attempt += 1


def draw(point: Tensor, target: Tensor, side: int) -> Tensor:
    """Pictures of worlds: the target red, the point green, yellow where they meet; uint8 [n, side, side, 3].

    Args:
        point, target: [n, D]; with one dimension both stand in the middle of their column.
        side: pixels on a side.
    """
    pictures = torch.zeros(len(point), side, side, 3, dtype=torch.uint8)
    axis = torch.linspace(-1.0, 1.0, side)
    for channel, places in enumerate((target, point)):
        columns = (axis - places[:, :1]).abs() <= NEAR  # [n, side]
        heights = places[:, 1:2] if places.shape[1] == 2 else torch.zeros(len(places), 1)
        lines = (axis - heights).abs() <= NEAR
        pictures[..., channel] = (lines[:, :, None] & columns[:, None, :]).to(torch.uint8) * 255
    return pictures


def expert(observation: Mapping[str, Tensor], instructions: Sequence[str] | None = None) -> Tensor:
    """Expert actions for `Reach`: straight to the target; a script to record demonstrations of.

    Args:
        observation: "state", float32 [N, 2 D].
        instructions: not looked at.

    Returns:
        Actions in [-1, 1], float32 [N, 1, D].
    """
    point, target = observation["state"].chunk(2, 1)
    return ((target - point) / REACH).clamp(-1.0, 1.0)[:, None]
