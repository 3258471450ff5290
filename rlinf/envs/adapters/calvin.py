"""CALVIN: five tasks in a row, each told in words when the one before is done (arXiv:2112.03227).

Observations: "rgb" has the static camera and the one on the gripper, "state" the gripper's position, its Euler angles
and its opening. Starts, chains of tasks, words and what counts as done are CALVIN's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlinf.envs.adapters.serial import Benchmark, imported
from rlinf.envs.base import CannotSimulate, Moved, WrongOption

INSTALL = "git clone --recurse-submodules https://github.com/mees/calvin && cd calvin && sh install.sh"
"""Command that installs CALVIN: its simulator `calvin_env`, and `calvin_agent` with tasks and words."""
LONGEST = 5
"""Tasks in a chain of CALVIN's evaluation."""
_CAMERAS = ("rgb_static", "rgb_gripper")
_STATE = 7
"""Numbers of `robot_obs` that are taken: position, Euler angles, opening of the gripper."""
_ACTION = 7
"""Relative position and Euler angles, each from -1 to 1, and the gripper: open from 0 on, closed below."""


class Calvin(Benchmark):
    """Environments of CALVIN's evaluation by chains of tasks.

    The seed of an episode, modulo `chains`, chooses one of CALVIN's chains with its start. Each task that is done
    earns 1 and changes the instruction, so that an episode's return is the length that CALVIN reports. An episode
    terminates, solved, after its last task, and is truncated where a task takes more than `task_steps`.

    Args:
        num_envs: how many.
        dataset: folder whose `.hydra/merged_config.yaml` describes the scene, such as `validation` of a data set of
            CALVIN's.
        chains: how many chains CALVIN draws, of which episodes take one each.
        length: tasks of a chain that are asked for, from its first.
        task_steps: steps within which each task must be done.
        image_size: height and width of the pictures; the static camera has 200, the gripper's 84.

    Raises:
        WrongOption: an option is out of its range.
        CannotSimulate: CALVIN is not installed, or the folder describes no scene; the text says what to do.
    """

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """See `Simulator.check_options`."""
        super().check_options(options)
        if not 1 <= options.get("length", LONGEST) <= LONGEST:
            raise WrongOption("length", f"it must be from 1 to {LONGEST}, the tasks of a chain")
        for name in ("chains", "task_steps", "image_size"):
            if options.get(name, 1) < 1:
                raise WrongOption(name, "it must be at least 1")

    def __init__(
        self,
        num_envs: int,
        *,
        dataset: str,
        chains: int = 1000,
        length: int = LONGEST,
        task_steps: int = 360,
        image_size: int = 200,
    ):
        Calvin.check_options({"dataset": dataset, "chains": chains, "length": length, "task_steps": task_steps})
        self._get_env = imported("calvin_env.envs.play_table_env", INSTALL).get_env
        self._folder = Path(dataset).expanduser()
        if not (self._folder / ".hydra" / "merged_config.yaml").is_file():
            raise CannotSimulate(
                f"{self._folder} has no .hydra/merged_config.yaml: name the folder `validation` of a data set of "
                "CALVIN's, which `sh dataset/download_data.sh debug` of its repository downloads"
            )
        agent = imported("calvin_agent", INSTALL)
        self._start_of = imported("calvin_agent.evaluation.utils", INSTALL).get_env_state_for_initial_condition
        self._chains = imported("calvin_agent.evaluation.multistep_sequences", INSTALL).get_sequences(chains)
        load = imported("omegaconf", INSTALL).OmegaConf.load
        conf = Path(agent.__file__).resolve().parents[1] / "conf"
        self._oracle = imported("hydra.utils", INSTALL).instantiate(
            load(conf / "callbacks/rollout/tasks/new_playtable_tasks.yaml")
        )
        self._texts = load(conf / "annotations/new_playtable_validation.yaml")
        self._length, self._task_steps = length, task_steps
        self.max_steps = length * task_steps
        self._ahead: list[list[str]] = [[] for _ in range(num_envs)]  # the task that is asked for, and those after it
        self._since: list[Any] = [None] * num_envs  # what the scene was like when the task was asked for
        self._steps = [0] * num_envs  # since then
        self._shape(num_envs, len(_CAMERAS), image_size, _STATE, [-1.0] * _ACTION, [1.0] * _ACTION)

    def tasks(self) -> None:
        return None  # instructions change within an episode: success is counted for all chains together

    def _make(self, env: int) -> Any:
        return self._get_env(self._folder, show_gui=False)

    def _begin(self, env: int, seed: int) -> dict[str, np.ndarray]:
        start, chain = self._chains[seed % len(self._chains)]
        robot, scene = self._start_of(start)
        simulation = self._simulation(env)
        observed = simulation.reset(robot_obs=robot, scene_obs=scene)
        self._ahead[env] = [str(task) for task in chain][: self._length]
        self._ask(env, simulation.get_info())
        return self._read(observed)

    def _move(self, env: int, action: np.ndarray) -> Moved:
        done = np.append(action[:-1], 1.0 if action[-1] >= 0 else -1.0).astype(np.float64)
        observed, _, _, info = self._simulation(env).step(done)
        self._steps[env] += 1
        task = self._ahead[env][0]
        solved = bool(self._oracle.get_task_info_for_set(self._since[env], info, {task}))
        last = solved and len(self._ahead[env]) == 1
        if solved and not last:
            self._ahead[env].pop(0)
            self._ask(env, info)
        late = not solved and self._steps[env] >= self._task_steps
        return Moved(self._read(observed), float(solved), last, late, last)

    def _ask(self, env: int, info: Any) -> None:
        """Ask for the next task in a scene."""
        self._words[env] = str(self._texts[self._ahead[env][0]][0])
        self._since[env], self._steps[env] = info, 0

    def _read(self, observed: dict[str, Any]) -> dict[str, np.ndarray]:
        return self._row([observed["rgb_obs"][name] for name in _CAMERAS], [observed["robot_obs"][:_STATE]])
