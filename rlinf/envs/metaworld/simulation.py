"""The simulation of a task of Meta-World: begins from a goal's vector, steps, is saved and loaded to the last bit.

Meta-World alone does not repeat an episode: where some tasks put their objects depends on how often they were reset
before. Here every episode begins as in a simulation that was just made. A state is what MuJoCo integrates, the two
arrays of its model that tasks write to, and the numbers that the task keeps beside them: so little that all episodes of
a task in one process take turns in one simulation, which costs less than models that push each other out of the cache.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlinf.envs.metaworld.tasks import registry

GOALS = 50
"""Goals that Meta-World draws for each task."""
_NEVER = 1 << 60
"""Steps after which Meta-World refuses to go on: whoever owns the simulator cuts episodes off."""
_KEPT = (bool, int, float, np.generic, type(None))
"""Kinds of a task's own attributes that are part of its state, besides arrays and lists of numbers."""

Snapshot = dict[str, Any]
"""A state as arrays: "physics" float64 [P], "body_pos" [B, 3], "site_pos" [T, 3], "own" by attribute's name."""


@cache
def goal_vectors(task: str, seed: int) -> NDArray[np.float64]:
    """The vectors that Meta-World's own `MT1(task, seed)` draws, of which each fixes objects and goal, [GOALS, V].

    What the arm does between two draws has no part in them, so it is left out.
    """
    import mujoco

    env = _made(task)
    env.np_random = np.random.RandomState(seed)  # the stream of np.random.seed, which Meta-World draws from
    env.seeded_rand_vec, env._freeze_rand_vec, env._set_task_called = True, False, True
    env.do_simulation = lambda *about: mujoco.mj_forward(env.model, env.data)
    drawn = []
    for _ in range(GOALS):
        env.reset()
        drawn.append(env._last_rand_vec)
    return np.array(drawn, np.float64)


class Simulation:
    """The one simulation of a task in this process, which episodes share by turns.

    Args:
        task: its name.
        hidden: whether the goal is left out of the observation, as zeros.
    """

    def __init__(self, task: str, hidden: bool):
        import mujoco

        self._mujoco: Any = mujoco
        self.task = task
        env = _made(task)
        env._partially_observable, env._set_task_called, env._freeze_rand_vec = hidden, True, True
        vars(env).pop("sawyer_observation_space", None)  # kept since the environment was made, when the goal was hidden
        env.max_path_length = _NEVER
        self._env = env
        self._kind = mujoco.mjtState.mjSTATE_INTEGRATION
        self._size = mujoco.mj_stateSize(env.model, self._kind)
        self._fresh = _copied(vars(env))
        self._placed = env.model.body_pos.copy(), env.model.site_pos.copy()
        self._kept: list[str] = []

    @property
    def model(self) -> Any:
        """MuJoCo's model."""
        return self._env.model

    @property
    def data(self) -> Any:
        """MuJoCo's data."""
        return self._env.data

    def begin(self, vector: NDArray[np.float64]) -> NDArray[np.float32]:
        """Begin an episode as in a simulation that was just made; the first observation, [39].

        Args:
            vector: fixes objects and goal, one row of `goal_vectors`.
        """
        vars(self._env).clear()
        vars(self._env).update(_copied(self._fresh))
        self.model.body_pos[:], self.model.site_pos[:] = self._placed
        self._env._last_rand_vec = vector.copy()
        observed, _ = self._env.reset()
        self._kept = [name for name, value in vars(self._env).items() if _is_kept(value)]
        return np.asarray(observed, np.float32)

    def step(self, action: NDArray[np.float32]) -> tuple[NDArray[np.float32], float, bool]:
        """Do one action; the observation [39], Meta-World's reward from 0 to 10, and whether the task is solved."""
        observed, reward, _, _, info = self._env.step(action)
        return np.asarray(observed, np.float32), float(reward), bool(info["success"])

    def save(self) -> Snapshot:
        """The state, from which `load` goes on bit for bit. The simulation must load one before it steps again."""
        physics = np.empty(self._size)
        self._mujoco.mj_getState(self.model, self.data, physics, self._kind)
        attributes = vars(self._env)
        return {
            "physics": physics,
            "body_pos": self.model.body_pos.copy(),
            "site_pos": self.model.site_pos.copy(),
            "own": {name: attributes[name] for name in self._kept},
        }

    def load(self, snapshot: Snapshot) -> None:
        """Go on from a state of this task. The simulation must have begun an episode before."""
        model = self.model
        model.body_pos[:], model.site_pos[:] = snapshot["body_pos"], snapshot["site_pos"]
        self._mujoco.mj_setState(model, self.data, snapshot["physics"], self._kind)
        vars(self._env).update(
            {n: v.copy() if type(v) is np.ndarray or type(v) is list else v for n, v in snapshot["own"].items()}
        )

    def look(self) -> None:
        """After `load`, bring all positions to what the state says, for pictures; a step does so by itself."""
        physics = np.empty(self._size)
        self._mujoco.mj_getState(self.model, self.data, physics, self._kind)
        self._mujoco.mj_forward(self.model, self.data)
        self._mujoco.mj_setState(self.model, self.data, physics, self._kind)  # where the solver starts was moved


def _made(task: str) -> Any:
    """Meta-World's environment of a task, which trusts MuJoCo that its matrices are rotations: a tenth of a step."""
    turns: Any = importlib.import_module("scipy.spatial.transform").Rotation
    kind = registry().ALL_V3_ENVIRONMENTS[task]
    its = vars(sys.modules[kind.__module__])
    if its.get("Rotation") == turns and "assume_valid" in inspect.signature(turns.from_matrix).parameters:
        its["Rotation"] = SimpleNamespace(from_matrix=partial(turns.from_matrix, assume_valid=True))
    return kind()


def packed(snapshot: Snapshot) -> dict[str, Any]:
    """A snapshot of tensors, numbers, lists and dicts alone."""
    own = {name: _tensor(value) for name, value in snapshot["own"].items()}
    return {"own": own, **{name: _tensor(snapshot[name]) for name in ("physics", "body_pos", "site_pos")}}


def unpacked(state: dict[str, Any]) -> Snapshot:
    """What `packed` was given."""
    own = {name: _array(value) for name, value in state["own"].items()}
    return {"own": own, **{name: _array(state[name]) for name in ("physics", "body_pos", "site_pos")}}


def _tensor(value: Any) -> Any:
    return torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray | np.generic) else value


def _array(value: Any) -> Any:
    return value.numpy()[()] if isinstance(value, torch.Tensor) else value  # [()]: a number, where there is but one


def _is_kept(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        while isinstance(value.base, np.ndarray):
            value = value.base
        return value.base is None  # others look into MuJoCo's memory, and follow it
    return isinstance(value, _KEPT) or (isinstance(value, list) and all(isinstance(each, _KEPT) for each in value))


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    """A copy of attributes, which share only what is not part of the state."""
    return {
        name: value.copy() if isinstance(value, np.ndarray | list) and _is_kept(value) else value
        for name, value in attributes.items()
    }
