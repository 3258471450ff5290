"""Any environment of gymnasium, by its id: N of them, one after the other in one process.

In and out: what `Simulator` says. `spaces.py` tells what becomes of observations and actions. gymnasium's own time
limit is taken off, and its number of steps becomes `max_steps`, so that whoever owns the simulator may change it.

States are saved as the seed of the episode and the actions since, and restored by doing them again: that is exact for
every environment whose episodes follow from their seed, and needs no help from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from rlinf.config.importing import resolve
from rlinf.envs.base import Observation, Simulator, State, Transition
from rlinf.envs.gymnasium.spaces import actions_of, observations_of

SUCCESS = ("success", "is_success")
"""Names under which `info` says that the task is solved: Meta-World's and ManiSkill's, gymnasium-robotics'."""


class Gymnasium(Simulator):
    """Environments that `gymnasium.make` makes.

    Args:
        num_envs: how many.
        id: registered name, such as "CartPole-v1"; "module:Name-v0" imports a module that registers it.
        make: further arguments of `gymnasium.make`.
        wrappers: applied to each environment, first one first: classes or functions, or their dotted paths.
        pictures: make them able to `render`; some need pygame or OpenGL for that.
        success: name in `info` that says whether the task is solved; None looks for "success" and "is_success".

    Raises:
        ValueError: a space is of a kind that policies cannot use; the text says which.
    """

    def __init__(
        self,
        num_envs: int,
        *,
        id: str,
        make: Mapping[str, Any] | None = None,
        wrappers: Sequence[Any] = (),
        pictures: bool = False,
        success: str | None = None,
    ):
        settings: dict[str, Any] = {"disable_env_checker": True, **(make or {})}
        if pictures:
            settings["render_mode"] = "rgb_array"
        found = [resolve(wrapper) if isinstance(wrapper, str) else wrapper for wrapper in wrappers]
        self._envs = []
        for _ in range(num_envs):
            env = gymnasium.make(id, max_episode_steps=-1, **settings)
            for wrapper in found:
                env = wrapper(env)
            self._envs.append(env)
        self.num_envs = num_envs
        self.max_steps = gymnasium.spec(id.rpartition(":")[2]).max_episode_steps
        self.observation_spec, self._read = observations_of(self._envs[0].observation_space, id)
        self.action_spec, self._write = actions_of(self._envs[0].action_space, id)
        self._success = SUCCESS if success is None else (success,)
        self._rows: list[dict[str, np.ndarray]] = [
            {name: np.zeros(spec.shape, _NUMPY[spec.dtype]) for name, spec in self.observation_spec.items()}
            for _ in range(num_envs)
        ]
        self._seeds = [0] * num_envs
        self._history: list[list[np.ndarray]] = [[] for _ in range(num_envs)]

    def reset(self, seeds: Tensor, env_ids: Tensor) -> Observation:
        for env, seed in zip(env_ids.tolist(), seeds.tolist(), strict=True):
            self._begin(env, seed)
        return self._stacked(env_ids.tolist())

    def step(self, actions: Tensor, active: Tensor) -> Transition:
        reward = np.zeros(self.num_envs, np.float32)
        terminated, truncated, solved = (np.zeros(self.num_envs, np.bool_) for _ in range(3))
        tells = False
        numbers = actions.numpy()
        for env in active.nonzero().flatten().tolist():
            reward[env], terminated[env], truncated[env], info = self._move(env, numbers[env])
            for name in self._success:
                if name in info:
                    tells = True
                    solved[env] = bool(info[name])
        return Transition(
            observation=self._stacked(range(self.num_envs)),
            reward=torch.from_numpy(reward),
            terminated=torch.from_numpy(terminated),
            truncated=torch.from_numpy(truncated),
            success=torch.from_numpy(solved) if tells else None,
        )

    def render(self, env_ids: Tensor) -> Tensor:
        if self._envs[0].render_mode is None:
            raise NotImplementedError("these environments were made without pictures: set pictures=True")
        pictures: list[Any] = [self._envs[env].render() for env in env_ids.tolist()]
        return torch.from_numpy(np.stack(pictures))

    def save(self) -> list[State]:
        size = self.action_spec.size
        return [
            {"seed": seed, "actions": torch.from_numpy(np.array(history, np.float32).reshape(-1, size))}
            for seed, history in zip(self._seeds, self._history, strict=True)
        ]

    def restore(self, states: Sequence[State], env_ids: Tensor) -> None:
        for env, state in zip(env_ids.tolist(), states, strict=True):
            self._begin(env, state["seed"])
            for action in state["actions"].numpy():
                self._move(env, action)

    def close(self) -> None:
        for env in self._envs:
            env.close()

    def _begin(self, env: int, seed: int) -> None:
        observed, _ = self._envs[env].reset(seed=seed)
        self._rows[env] = self._read(observed)
        self._seeds[env] = seed
        self._history[env] = []

    def _move(self, env: int, action: np.ndarray) -> tuple[float, bool, bool, dict[str, Any]]:
        observed, reward, terminated, truncated, info = self._envs[env].step(self._write(action))
        self._rows[env] = self._read(observed)
        self._history[env].append(action.copy())
        return float(reward), terminated, truncated, info

    def _stacked(self, envs: Sequence[int]) -> Observation:
        return {
            name: torch.from_numpy(np.stack([self._rows[env][name] for env in envs])) for name in self.observation_spec
        }


_NUMPY = {torch.float32: np.float32, torch.uint8: np.uint8}
"""numpy's name of each type that `spaces.py` gives."""
