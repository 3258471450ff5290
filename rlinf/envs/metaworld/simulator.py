"""Meta-World on the CPU: N simulations, each of a task that its seed chooses, one after the other in one process.

In and out: what `Simulator` says. Nothing of Meta-World is imported before a task is looked up. Each task is simulated
once; rows of one task take turns in it, and the start of each goal is computed once and then loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.envs.base import ActionSpec, ArraySpec, Moved, SerialSimulator, State, WrongOption
from rlinf.envs.metaworld.pictures import CAMERAS, Painter
from rlinf.envs.metaworld.simulation import GOALS, Simulation, Snapshot, goal_vectors, packed, unpacked
from rlinf.envs.metaworld.tasks import INSTRUCTIONS, chosen_tasks

MAX_STEPS = 500
"""Steps of an episode in Meta-World."""
STATE = 39
"""Numbers of Meta-World's observation: hand, gripper and objects now and one step before, and the goal."""
_FELT = 4
"""Numbers at its beginning that the robot itself feels: where the hand is, and how far the gripper is open."""
_MOST_REWARD = 10.0
"""Meta-World's reward where a task is solved."""
_OBSERVE = ("state", "rgb", "state+rgb")
_REWARDS = ("dense", "normalized_dense", "sparse")
_STILL = np.array([0.0, 0.0, 0.0, -1.0], np.float32)
"""No motion, with an open gripper."""


class MetaWorld(SerialSimulator):
    """Environments of Meta-World's tasks.

    The seed of an episode chooses the task, and which of its 50 goals: seed modulo the number of tasks, and the
    quotient modulo 50. The goals are those of Meta-World's own `MT1(task, goal_seed)`, so that another `goal_seed`
    gives goals that were never trained on. An episode begins as in a simulation that was just made.

    Args:
        num_envs: how many.
        suite: "MT10", "MT25", "MT50", or "ML10-train", "ML10-test" and likewise 25 and 45; None if tasks are named.
        tasks: names such as "reach-v3"; with a suite, those of it that are drawn from.
        observe: "state": Meta-World's 39 numbers. "rgb": pictures, and as "state" the four that the robot feels.
            "state+rgb": pictures and all numbers.
        reward: "normalized_dense" (at most 1 in each step), "dense" (at most 10) or "sparse" (1 where it is solved).
        hide_goal: the goal is zeros in the state; None does so in suites that begin with ML.
        number_tasks: which of the tasks it is follows on the state, one-hot.
        goal_seed: of the goals.
        settle: steps without motion at the start of an episode.
        end_on_success: a solved task ends the episode; in Meta-World it goes on until its limit.
        cameras: of the observed pictures: corner, corner2, corner3, corner4, topview, behindGripper, gripperPOV.
        image_size: height and width of the observed pictures.
        picture_size: height and width of pictures for people.

    Raises:
        WrongOption: there is no such suite, task, camera or mode.
        MissingMetaWorld: Meta-World is not installed.
        CannotSimulate: pictures are asked for where nothing can be drawn; the text says what is missing.
    """

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """See `Simulator.check_options`."""
        super().check_options(options)
        chosen_tasks(options.get("suite"), options.get("tasks"))
        for name, known in (("observe", _OBSERVE), ("reward", _REWARDS)):
            if name in options and options[name] not in known:
                raise WrongOption(name, f"{name}={options[name]!r} is none of {', '.join(known)}")
        cameras = options.get("cameras", CAMERAS[:1])
        if not cameras or isinstance(cameras, str) or not set(cameras) <= set(CAMERAS):
            raise WrongOption("cameras", f"cameras={cameras!r} must be a list of some of {', '.join(CAMERAS)}")

    def __init__(
        self,
        num_envs: int,
        *,
        suite: str | None = None,
        tasks: Sequence[str] | None = None,
        observe: str = "state",
        reward: str = "normalized_dense",
        hide_goal: bool | None = None,
        number_tasks: bool = False,
        goal_seed: int = 0,
        settle: int = 0,
        end_on_success: bool = False,
        cameras: Sequence[str] = ("corner2",),
        image_size: int = 224,
        picture_size: int = 256,
    ):
        MetaWorld.check_options(
            {"suite": suite, "tasks": tasks, "observe": observe, "reward": reward, "cameras": cameras}
        )
        self._tasks = chosen_tasks(suite, tasks)
        self._hidden = hide_goal if hide_goal is not None else suite is not None and suite.startswith("ML")
        self._reward, self._end, self._settle = reward, end_on_success, settle
        self._goal_seed = goal_seed
        self._one_hot = np.eye(len(self._tasks), len(self._tasks) if number_tasks else 0)
        self._felt = _FELT if observe == "rgb" else STATE
        self.max_steps = MAX_STEPS
        self.action_spec = ActionSpec(-torch.ones(4), torch.ones(4))
        self.observation_spec = {"state": ArraySpec((self._felt + self._one_hot.shape[1],), torch.float32)}
        self._eyes = None
        if observe != "state":
            self._eyes = Painter(tuple(cameras), image_size)
            self.observation_spec["rgb"] = ArraySpec((image_size, image_size, 3 * len(cameras)), torch.uint8)
        self._people = Painter(CAMERAS[:1], picture_size)
        self._simulations: dict[str, Simulation] = {}
        self._starts: dict[tuple[str, int], tuple[Snapshot, np.ndarray]] = {}
        self._names = [self._tasks[0]] * num_envs  # the task of each row
        self._inside: dict[str, int | None] = {}  # the row whose episode a simulation holds
        self._left: list[Snapshot | None] = [None] * num_envs  # the episodes of the others
        self._track(num_envs)

    def tasks(self) -> list[str]:
        return list(self._names)

    def instructions(self) -> list[str]:
        return [INSTRUCTIONS[name] for name in self._names]

    def render(self, env_ids: Tensor) -> Tensor:
        pictures = []
        for env in env_ids.tolist():
            simulation = self._enter(env)
            simulation.look()
            pictures.append(self._people.drawn(simulation))
        return torch.from_numpy(np.stack(pictures))

    def save(self) -> list[State]:
        return [
            {
                "task": self._names[env],
                "seed": self._seeds[env],
                "row": {name: torch.from_numpy(array.copy()) for name, array in self._rows[env].items()},
                **packed(self._enter(env).save()),
            }
            for env in range(self.num_envs)
        ]

    def restore(self, states: Sequence[State], env_ids: Tensor) -> None:
        for env, state in zip(env_ids.tolist(), states, strict=True):
            self._seeds[env] = state["seed"]
            self._rows[env] = {name: array.numpy().copy() for name, array in state["row"].items()}
            self._put(env, state["task"], unpacked(state))

    def close(self) -> None:
        for painter in (self._eyes, self._people):
            if painter is not None:
                painter.close()

    def _restart(self, env: int, seed: int) -> None:
        self._rows[env], self._seeds[env] = self._begin(env, seed), seed

    def _advance(self, env: int, action: np.ndarray) -> Moved:
        moved = self._move(env, action)
        self._rows[env] = moved.row
        return moved

    def _begin(self, env: int, seed: int) -> dict[str, np.ndarray]:
        task, goal = self._tasks[seed % len(self._tasks)], seed // len(self._tasks) % GOALS
        if (task, goal) not in self._starts:
            self._leave(task)
            simulation = self._simulation(task)
            observed = simulation.begin(goal_vectors(task, self._goal_seed)[goal])
            for _ in range(self._settle):
                observed, *_ = simulation.step(_STILL)
            self._starts[task, goal] = simulation.save(), observed
        start, observed = self._starts[task, goal]
        self._put(env, task, start)
        if self._eyes is not None:
            self._enter(env).look()
        return self._seen(self._enter(env), observed)

    def _move(self, env: int, action: np.ndarray) -> Moved:
        simulation = self._enter(env)
        observed, reward, solved = simulation.step(action)
        if self._reward == "sparse":
            reward = float(solved)
        elif self._reward == "normalized_dense":
            reward /= _MOST_REWARD
        return Moved(self._seen(simulation, observed), reward, solved and self._end, False, solved)

    def _seen(self, simulation: Simulation, observed: np.ndarray) -> dict[str, np.ndarray]:
        number = self._one_hot[self._tasks.index(simulation.task)]
        row = {"state": np.concatenate((observed[: self._felt], number), dtype=np.float32)}
        if self._eyes is not None:
            row["rgb"] = self._eyes.drawn(simulation)
        return row

    def _put(self, env: int, task: str, snapshot: Snapshot) -> None:
        """From now on an environment is in this state."""
        if self._inside.get(self._names[env]) == env:
            self._inside[self._names[env]] = None
        self._names[env], self._left[env] = task, snapshot

    def _enter(self, env: int) -> Simulation:
        """The simulation of an environment's task, in which its episode goes on."""
        task = self._names[env]
        simulation = self._simulation(task)
        if self._inside.get(task) != env:
            if (snapshot := self._left[env]) is None:
                raise RuntimeError(f"environment {env} has no episode yet: call reset() first")
            self._leave(task)
            simulation.load(snapshot)
            self._inside[task] = env
        return simulation

    def _leave(self, task: str) -> None:
        """Keep the state of the episode that is in a simulation."""
        if (inside := self._inside.get(task)) is not None:
            self._left[inside] = self._simulations[task].save()
            self._inside[task] = None

    def _simulation(self, task: str) -> Simulation:
        if task not in self._simulations:
            self._simulations[task] = Simulation(task, self._hidden)
            self._simulations[task].begin(goal_vectors(task, self._goal_seed)[0])  # its own arrays, as in an episode
        return self._simulations[task]
