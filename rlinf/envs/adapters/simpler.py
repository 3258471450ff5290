"""SimplerEnv: tasks of the WidowX and of Google's robot that look like their real ones (arXiv:2405.05941).

Observations: "rgb" has the camera that SimplerEnv's own policies see by, "state" the robot's joints. SimplerEnv
simulates with ManiSkill 2, one environment at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlinf.envs.adapters.serial import Benchmark, check_name, imported
from rlinf.envs.base import Moved, WrongOption

INSTALL = (
    "git clone --recurse-submodules https://github.com/simpler-env/SimplerEnv && "
    "pip install -e SimplerEnv/ManiSkill2_real2sim -e SimplerEnv"
)
"""Command that installs SimplerEnv with its assets."""


class Simpler(Benchmark):
    """Environments of one of SimplerEnv's tasks.

    The seed of an episode, modulo `starts`, is the number of the start, SimplerEnv's `episode_id`. A solved task ends
    the episode with a reward of 1. Bounds of actions and the limit of steps are the task's.

    Args:
        num_envs: how many.
        task: its name, such as "widowx_carrot_on_plate", "google_robot_pick_coke_can".
        starts: how many of the task's starts are drawn from; the WidowX's tasks have 24. None leaves what is drawn to
            the seed, for tasks without numbered starts.
        image_size: height and width of the pictures.

    Raises:
        WrongOption: there is no such task, or no start.
        CannotSimulate: SimplerEnv is not installed.
    """

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """See `Simulator.check_options`."""
        super().check_options(options)
        if (starts := options.get("starts")) is not None and starts < 1:
            raise WrongOption("starts", "it must be at least 1")

    def __init__(self, num_envs: int, *, task: str, starts: int | None = 24, image_size: int = 224):
        Simpler.check_options({"task": task, "starts": starts})
        self._package = imported("simpler_env", INSTALL)
        self._picture = imported("simpler_env.utils.env.observation_utils", INSTALL).get_image_from_maniskill2_obs_dict
        check_name({"task": task}, "task", list(self._package.ENVIRONMENTS), "SimplerEnv")
        self._task, self._starts = task, starts
        first = self._package.make(task)
        bounds = first.action_space
        self.max_steps = first.spec.max_episode_steps
        joints = first.observation_space["agent"]["qpos"].shape[0]
        self._shape(num_envs, 1, image_size, joints, bounds.low.tolist(), bounds.high.tolist())
        self._simulations[0] = first

    def tasks(self) -> None:
        return None  # there is one; its words differ by the object of a start

    def _make(self, env: int) -> Any:
        return self._package.make(self._task)

    def _begin(self, env: int, seed: int) -> dict[str, np.ndarray]:
        simulation = self._simulation(env)
        number = None if self._starts is None else {"obj_init_options": {"episode_id": seed % self._starts}}
        observed, _ = simulation.reset(seed=seed, options=number)
        return self._read(env, observed)

    def _move(self, env: int, action: np.ndarray) -> Moved:
        observed, _, solved, truncated, _ = self._simulation(env).step(action)
        solved = bool(solved)  # SimplerEnv's tasks end when they are solved and in no other way
        return Moved(self._read(env, observed), float(solved), solved, bool(truncated) and not solved, solved)

    def _read(self, env: int, observed: Any) -> dict[str, np.ndarray]:
        base = self._simulation(env).unwrapped
        self._words[env] = str(base.get_language_instruction())  # tasks of two parts tell the second when it begins
        return self._row([self._picture(base, observed)], [observed["agent"]["qpos"]])
