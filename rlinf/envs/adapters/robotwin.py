"""RoboTwin 2: fifty tasks of two arms at a table (arXiv:2506.18088).

Observations: "rgb" has the camera on the head and those on both wrists, "state" and actions the joints and the gripper
of the left arm, then of the right. Starts, words and limits are those of its own evaluation.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from rlinf.envs.adapters.serial import Benchmark, check_name, imported
from rlinf.envs.base import CannotSimulate, Moved, WrongOption

INSTALL = (
    "git clone https://github.com/RoboTwin-Platform/RoboTwin && cd RoboTwin && bash script/_install.sh && "
    "bash script/_download_assets.sh"
)
"""Command that installs RoboTwin with its robots and objects."""
_CAMERAS = ("head_camera", "left_camera", "right_camera")
_NEVER = 1 << 60
"""Actions after which RoboTwin ignores others: whoever owns the simulator cuts episodes off."""
_TRIES = 100
"""Seeds that are tried for a start: RoboTwin drops those whose objects fall over."""


class RoboTwin(Benchmark):
    """Environments of one of RoboTwin's tasks.

    The start of an episode is RoboTwin's seed `first_seed` plus the episode's seed modulo `starts`, or the next one
    after it whose objects stay where they are. An action is where all joints shall be, in radians, which no bounds
    hold, and how far each gripper is open, from 0 to 1. A solved task ends the episode with a reward of 1.

    Args:
        num_envs: how many.
        root: folder of RoboTwin's repository.
        task: its name, such as "beat_block_hammer".
        config: name of a file in RoboTwin's `task_config`, such as "demo_clean" or "demo_randomized".
        first_seed: of the starts; RoboTwin evaluates from 100000 on and gathers demonstrations from 0 on.
        starts: how many there are.
        expert: whether only starts are taken that RoboTwin's planner can solve, as its evaluation does; each is planned
            once, which takes long. The instruction then names the objects of the start; it is the task's otherwise.
        words: "seen" or "unseen", of the instructions with `expert`.
        image_size: height and width of the pictures.

    Raises:
        WrongOption: there is no such task or file.
        CannotSimulate: RoboTwin is not in `root`, or not installed; the text says what to do.
    """

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """See `Simulator.check_options`."""
        super().check_options(options)
        if options.get("starts", 1) < 1:
            raise WrongOption("starts", "it must be at least 1")
        check_name({"words": "unseen", **options}, "words", ("seen", "unseen"), "RoboTwin")

    def __init__(
        self,
        num_envs: int,
        *,
        root: str,
        task: str,
        config: str = "demo_clean",
        first_seed: int = 100000,
        starts: int = 1000,
        expert: bool = False,
        words: str = "unseen",
        image_size: int = 224,
    ):
        RoboTwin.check_options({"root": root, "task": task, "starts": starts, "words": words})
        self._root = Path(root).expanduser().resolve()
        if not (self._root / "task_config" / "_eval_step_limit.yml").is_file():
            raise CannotSimulate(f"root={root} is not RoboTwin's repository: {INSTALL}")
        limits = self._load("task_config/_eval_step_limit.yml")
        check_name({"task": task}, "task", list(limits), "RoboTwin")
        configs = [path.stem for path in (self._root / "task_config").glob("*.yml") if path.stem[0] != "_"]
        check_name({"config": config}, "config", sorted(configs), "RoboTwin's task_config")
        self._task, self._expert, self._kind = task, expert, words
        self._first, self._starts = first_seed, starts
        for folder in (self._root, self._root / "description" / "utils"):
            if str(folder) not in sys.path:
                sys.path.insert(0, str(folder))
        self._kwargs, left_arm, right = self._configured(config)
        with self._inside():
            self._class = getattr(imported(f"envs.{task}", INSTALL), task)
            self._unstable = imported("envs.utils.create_actor", INSTALL).UnStableError
        self._found: dict[int, tuple[int, str]] = {}
        self.max_steps = int(limits[task])
        arms = [([-math.inf] * joints + [0.0], [math.inf] * joints + [1.0]) for joints in (left_arm, right)]
        low, high = (arms[0][side] + arms[1][side] for side in (0, 1))
        self._shape(num_envs, len(_CAMERAS), image_size, left_arm + right + 2, low, high)

    def close(self) -> None:
        for simulation in self._simulations.values():
            simulation.close_env(clear_cache=True)
        self._simulations.clear()

    def _make(self, env: int) -> Any:
        return self._class()

    def _begin(self, env: int, seed: int) -> dict[str, np.ndarray]:
        running = env in self._simulations
        simulation = self._simulation(env)
        if running:
            simulation.close_env()
        with self._inside():
            number = self._first + seed % self._starts
            if number not in self._found:
                self._found[number] = self._find(simulation, number)
            start, self._words[env] = self._found[number]
            self._set_up(simulation, start)
            simulation.set_instruction(instruction=self._words[env])
        simulation.step_lim = _NEVER
        return self._read(simulation.get_obs())

    def _move(self, env: int, action: np.ndarray) -> Moved:
        simulation = self._simulation(env)
        simulation.take_action(action.astype(np.float64), action_type="qpos")
        solved = bool(simulation.eval_success)
        return Moved(self._read(simulation.get_obs()), float(solved), solved, False, solved)

    def _find(self, simulation: Any, number: int) -> tuple[int, str]:
        """The first of RoboTwin's seeds, from a number on, that is a start, and its instruction."""
        for seed in range(number, number + _TRIES):
            try:
                self._set_up(simulation, seed)
                episode = simulation.play_once() if self._expert else {}
                good = not self._expert or (simulation.plan_success and simulation.check_success())
            except self._unstable:
                good = False
            simulation.close_env()
            if good:
                return seed, self._told(seed, episode.get("info"))
        raise CannotSimulate(
            f"{self._task}: none of RoboTwin's seeds from {number} to {number + _TRIES - 1} is a start"
        )

    def _told(self, seed: int, info: Any) -> str:
        """The instruction of a start."""
        if info is None:
            return str(self._load(f"description/task_instruction/{self._task}.json")["full_description"])
        describe = imported("generate_episode_instructions", INSTALL).generate_episode_descriptions
        before = random.getstate()
        random.seed(seed)  # RoboTwin draws words from it without a seed
        try:
            texts = describe(self._task, [info], 100)[0][self._kind]
        finally:
            random.setstate(before)
        return str(texts[seed % len(texts)])

    def _set_up(self, simulation: Any, seed: int) -> None:
        simulation.setup_demo(now_ep_num=0, seed=seed, is_test=True, **copy.deepcopy(self._kwargs))

    def _configured(self, config: str) -> tuple[dict[str, Any], int, int]:
        """Arguments of `setup_demo` for a configuration, and the joints of the left and of the right arm."""
        settings = self._load(f"task_config/{config}.yml")
        robots = self._load("task_config/_embodiment_config.yml")
        names = settings["embodiment"]  # one robot with two arms, or two robots and their distance
        left_arm, right = (str(robots[names[place]]["file_path"]) for place in (0, 1 if len(names) == 3 else 0))
        head = self._load("task_config/_camera_config.yml")[settings["camera"]["head_camera_type"]]
        arms = [self._load(f"{file}/config.yml") for file in (left_arm, right)]
        settings |= {"task_name": self._task, "task_config": config, "eval_mode": True, "render_freq": 0}
        settings |= {"left_robot_file": left_arm, "right_robot_file": right, "dual_arm_embodied": len(names) == 1}
        settings |= {"left_embodiment_config": arms[0], "right_embodiment_config": arms[1]}
        settings |= {
            "head_camera_h": head["h"],
            "head_camera_w": head["w"],
            "save_data": False,
            "eval_video_log": False,
        }
        settings["camera"] |= {"collect_head_camera": True, "collect_wrist_camera": True}
        settings["data_type"] = {**settings.get("data_type", {}), "rgb": True, "qpos": True}
        if len(names) == 3:
            settings["embodiment_dis"] = names[2]
        return settings, len(arms[0]["arm_joints_name"][0]), len(arms[1]["arm_joints_name"][1])

    def _load(self, file: str) -> Any:
        path = self._root / file
        return json.loads(path.read_text()) if path.suffix == ".json" else yaml.safe_load(path.read_text())

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """Be in RoboTwin's folder, from which it names its files."""
        with contextlib.chdir(self._root):
            yield

    def _read(self, observed: dict[str, Any]) -> dict[str, np.ndarray]:
        pictures = [observed["observation"][camera]["rgb"] for camera in _CAMERAS]
        return self._row(pictures, [observed["joint_action"]["vector"]])
