"""RoboCasa: tasks of a robot on wheels in kitchens that are drawn anew (arXiv:2406.02523).

Observations: "rgb" has the cameras that are named, "state" what the robot feels. RoboCasa and robosuite pin a numpy of
their own: where it excludes ours, `rlinf.envs.remote` runs this adapter in their Python.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlinf.envs.adapters.serial import Benchmark, imported
from rlinf.envs.base import Moved, WrongOption

INSTALL = (
    "pip install git+https://github.com/ARISE-Initiative/robosuite git+https://github.com/robocasa/robocasa && "
    "python -m robocasa.scripts.setup_macros && python -m robocasa.scripts.download_kitchen_assets"
)
"""Command that installs RoboCasa, and its kitchens and objects, about 5 GB."""
MAX_STEPS = 300
"""Steps of an episode, as RLinf has them."""
FELT = {
    "robot0_base_pos": 3,
    "robot0_base_quat": 4,
    "robot0_base_to_eef_pos": 3,
    "robot0_base_to_eef_quat": 4,
    "robot0_gripper_qpos": 2,
    "robot0_gripper_qvel": 2,
    "robot0_eef_pos": 3,
    "robot0_eef_quat": 4,
}
"""Entries of the robot's state, and how many numbers each is."""
_STATE = tuple(FELT)[:5]
"""The 16 numbers of RoboCasa's data sets, in their order."""
_ARM, _WHOLE = 7, 12
"""Numbers of an action: of the arm and the gripper; and with three of the base, one of the torso and the mode."""


class RoboCasa(Benchmark):
    """Environments of RoboCasa's tasks.

    The seed of an episode, modulo the number of tasks, chooses the task; the kitchen, its objects and where they stand
    are drawn from it. An environment whose task changes is built anew. A solved task ends the episode, and earns 1.

    Args:
        num_envs: how many.
        tasks: names such as "PnPCounterToCab", "CloseDrawer".
        robot: name of a robot of robosuite's.
        mobile: whether an action also moves the base and the torso, and says which of arm and base it moves: 12 numbers
            instead of 7.
        cameras: names of the cameras.
        state: names of what is felt, of `FELT`.
        image_size: height and width of the pictures.
        make: further arguments of `robosuite.make`, such as `layout_ids`, `style_ids`, `obj_instance_split`.

    Raises:
        WrongOption: an option is not one of those that there are.
        CannotSimulate: RoboCasa is not installed.
    """

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """See `Simulator.check_options`."""
        super().check_options(options)
        for name in ("tasks", "cameras", "state"):
            if name in options and (isinstance(options[name], str) or not options[name]):
                raise WrongOption(name, f"it must be a list of names, not {options[name]!r}")
        if unknown := [name for name in options.get("state", ()) if name not in FELT]:
            raise WrongOption("state", f"{unknown[0]!r} is none of {', '.join(FELT)}")

    def __init__(
        self,
        num_envs: int,
        *,
        tasks: Sequence[str],
        robot: str = "PandaOmron",
        mobile: bool = False,
        cameras: Sequence[str] = ("robot0_agentview_left", "robot0_eye_in_hand"),
        state: Sequence[str] = _STATE,
        image_size: int = 224,
        make: Mapping[str, Any] | None = None,
    ):
        RoboCasa.check_options({"tasks": tasks, "cameras": cameras, "state": state})
        os.environ.setdefault("MUJOCO_GL", "egl")  # the only one that needs no display and uses a GPU where one is
        imported("robocasa", INSTALL)  # it registers its tasks with robosuite
        self._robosuite = imported("robosuite", INSTALL)
        names = self._robosuite.ALL_ENVIRONMENTS
        if unknown := [task for task in tasks if task not in names]:
            raise WrongOption("tasks", f"RoboCasa has no task {unknown[0]!r}")
        controllers = imported("robosuite.controllers", INSTALL)
        self._arguments = {
            "robots": robot,
            "controller_configs": controllers.load_composite_controller_config(controller=None, robot=robot),
            "camera_names": list(cameras),
            "camera_heights": image_size,
            "camera_widths": image_size,
            "camera_depths": False,
            "has_renderer": False,
            "has_offscreen_renderer": True,
            "use_camera_obs": True,
            "use_object_obs": True,
            "ignore_done": True,
            "translucent_robot": False,
            **(make or {}),
        }
        self._tasks, self._cameras, self._felt = list(tasks), list(cameras), list(state)
        self._names = [self._tasks[0]] * num_envs
        self.max_steps = MAX_STEPS
        size = _WHOLE if mobile else _ARM
        felt = sum(FELT[name] for name in state)
        self._shape(num_envs, len(self._cameras), image_size, felt, [-1.0] * size, [1.0] * size)

    def tasks(self) -> list[str]:
        return list(self._names)

    def _make(self, env: int) -> Any:
        return self._robosuite.make(env_name=self._names[env], seed=0, **self._arguments)

    def _begin(self, env: int, seed: int) -> dict[str, np.ndarray]:
        task = self._tasks[seed % len(self._tasks)]
        if task != self._names[env]:
            if env in self._simulations:
                self._simulations.pop(env).close()
            self._names[env] = task
        simulation = self._simulation(env)
        simulation.rng = np.random.default_rng(seed)  # a reset draws everything from it
        observed = simulation.reset()
        self._words[env] = str(simulation.get_ep_meta()["lang"])
        return self._read(observed)

    def _move(self, env: int, action: np.ndarray) -> Moved:
        if len(action) == _ARM:
            action = np.concatenate((action, np.zeros(_WHOLE - _ARM - 1), [-1.0]))  # the mode: the arm, not the base
        simulation = self._simulation(env)
        observed, *_ = simulation.step(action.astype(np.float64))
        solved = bool(simulation._check_success())
        return Moved(self._read(observed), float(solved), solved, False, solved)

    def _read(self, observed: Mapping[str, Any]) -> dict[str, np.ndarray]:
        pictures = [observed[f"{camera}_image"][::-1] for camera in self._cameras]  # OpenGL's rows begin below
        return self._row(pictures, [observed[name] for name in self._felt])
