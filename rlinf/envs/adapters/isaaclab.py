"""Isaac Lab: N environments of one of its tasks, simulated together on one GPU (arXiv:2301.04195).

Tensors stay on the GPU. Isaac Lab begins the next episode inside the step that ends one; here that is put off until
`reset`, so that the last observation is that of the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rlinf.envs.adapters.serial import check_name, imported
from rlinf.envs.base import (
    ActionSpec,
    ArraySpec,
    Observation,
    Simulator,
    State,
    Transition,
    WrongOption,
    stacked_trees,
    tree_on_cpu,
    tree_rows,
)
from rlinf.runtime.base.tensors import enter_device

INSTALL = (
    "pip install 'isaacsim[all,extscache]' --extra-index-url https://pypi.nvidia.com && "
    "git clone https://github.com/isaac-sim/IsaacLab && IsaacLab/isaaclab.sh --install"
)
"""Command that installs Isaac Lab, which needs an NVIDIA GPU with ray tracing where pictures are observed."""
_REWARDS = ("dense", "sparse")


class IsaacLab(Simulator):
    """Environments of a task of Isaac Lab whose workflow is manager-based.

    Observations are those of the group "policy": terms that are pictures, uint8 [N, H, W, 3], one behind the other as
    "rgb", and all other numbers as "state". Each seed of a reset is begun by a call of its own, since Isaac Lab draws a
    start from one seed for all environments of a call; members of a group share the call. Episodes of equal seeds are
    equal but for rounding, since each environment lies elsewhere; what a task draws during an episode does not repeat.
    A state is that of bodies and joints, without what the task keeps beside them. A process has one simulator.

    Args:
        num_envs: how many.
        task: name that it is registered under, such as "Isaac-Lift-Cube-Franka-v0".
        instruction: what is to be done, in words; None for none.
        reward: "dense": the task's; "sparse": 1 while it is solved.
        success: name of the task's termination that says that it is solved; None where there is none.
        bound: actions go from minus this to this.
        image_size: height and width of the scene's cameras; None leaves them.
        package: module that registers the task when it is imported.

    Raises:
        WrongOption: there is no such termination, or "sparse" without one.
        CannotSimulate: Isaac Lab is not installed.
    """

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """See `Simulator.check_options`."""
        super().check_options(options)
        check_name({"reward": "dense", **options}, "reward", _REWARDS, "Isaac Lab")
        if options.get("reward") == "sparse" and options.get("success", "success") is None:
            raise WrongOption("success", "reward=sparse needs the name of the termination that says so")
        if options.get("bound", 1.0) <= 0:
            raise WrongOption("bound", "it must be greater than 0")

    def __init__(
        self,
        num_envs: int,
        *,
        task: str,
        instruction: str | None = None,
        reward: str = "dense",
        success: str | None = "success",
        bound: float = 1.0,
        image_size: int | None = None,
        package: str = "isaaclab_tasks",
    ):
        IsaacLab.check_options({"task": task, "reward": reward, "success": success, "bound": bound})
        self.device = enter_device()
        _launched(str(self.device))
        imported(package, INSTALL)
        config = imported("isaaclab_tasks.utils", INSTALL).load_cfg_from_registry(task, "env_cfg_entry_point")
        config.scene.num_envs, config.sim.device = num_envs, str(self.device)
        for sensor in vars(config.scene).values():
            if image_size is not None and hasattr(sensor, "height") and hasattr(sensor, "width"):
                sensor.height = sensor.width = image_size
        self._env = imported("gymnasium", INSTALL).make(task, cfg=config).unwrapped
        terms = self._env.termination_manager.active_terms
        if success is not None:
            check_name({"success": success}, "success", terms, f"{task}: name one of its terminations or null; it")
        self._success, self._sparse = success, reward == "sparse"
        self._words = None if instruction is None else [instruction] * num_envs
        self.num_envs = num_envs
        self.max_steps = int(self._env.max_episode_length)
        size = self._env.action_manager.total_action_dim
        self.action_spec = ActionSpec(torch.full((size,), -bound), torch.full((size,), bound))
        with torch.random.fork_rng(self._cards):
            self._env.reset(seed=0)
        self.observation_spec = {
            name: ArraySpec(tuple(array.shape[1:]), array.dtype) for name, array in self._observed().items()
        }

    @torch.no_grad()
    def reset(self, seeds: Tensor, env_ids: Tensor) -> Observation:
        rows = env_ids.to(self.device)
        with torch.random.fork_rng(self._cards):  # Isaac Lab seeds the generators of the process
            for seed in seeds.unique().tolist():
                first, *others = rows[(seeds == seed).to(self.device)].split(1)
                self._env.reset(seed=seed, env_ids=first)
                if others:
                    start = tree_rows(self._env.scene.get_state(is_relative=True), first.repeat(len(others)))
                    self._env.reset_to(start, torch.cat(others), seed=seed, is_relative=True)
        return {name: array[rows] for name, array in self._observed().items()}

    @torch.no_grad()
    def step(self, actions: Tensor, active: Tensor) -> Transition:
        with self._without_resets():
            _, reward, terminated, truncated, _ = self._env.step(actions)
        solved = None
        if self._success is not None:
            solved = self._env.termination_manager.get_term(self._success).clone()
        return Transition(
            observation=self._observed(),
            reward=solved.float() if self._sparse and solved is not None else reward.float().clone(),
            terminated=terminated.clone(),
            truncated=truncated & ~terminated,
            success=solved,
        )

    def instructions(self) -> Sequence[str] | None:
        return self._words

    def render(self, env_ids: Tensor) -> Tensor:
        if "rgb" not in self.observation_spec:
            raise NotImplementedError("the task observes no pictures: record no videos with it")
        return self._observed()["rgb"][env_ids.to(self.device), ..., :3]

    def save(self) -> list[State]:
        scene, steps = self._env.scene.get_state(is_relative=True), self._env.episode_length_buf
        rows = torch.arange(self.num_envs, device=self.device).split(1)
        return [{"scene": tree_on_cpu(tree_rows(scene, row)), "steps": int(steps[row])} for row in rows]

    @torch.no_grad()
    def restore(self, states: Sequence[State], env_ids: Tensor) -> None:
        rows = env_ids.to(self.device)
        scene = stacked_trees([state["scene"] for state in states], self.device)
        with torch.random.fork_rng(self._cards):
            self._env.reset_to(scene, rows, is_relative=True)
        steps = torch.tensor([state["steps"] for state in states], device=self.device)
        self._env.episode_length_buf[rows] = steps

    def close(self) -> None:
        self._env.close()

    @property
    def _cards(self) -> list[torch.device]:
        return [self.device] if self.device.type == "cuda" else []

    @contextlib.contextmanager
    def _without_resets(self) -> Iterator[None]:
        """Let episodes that end stay where they are."""
        self._env._reset_idx = lambda env_ids: None
        try:
            yield
        finally:
            del self._env._reset_idx  # the class's own is there again

    def _observed(self) -> Observation:
        """Observations of all environments, copied out of Isaac Lab's buffers."""
        group = self._env.obs_buf["policy"]
        terms = list(group.values()) if isinstance(group, dict) else [group]
        pictures = [term for term in terms if term.ndim == 4 and term.dtype == torch.uint8]
        numbers = [term.flatten(1).float() for term in terms if term.ndim < 4]
        parts = {"state": numbers, "rgb": [picture[..., :3] for picture in pictures]}
        return {name: torch.cat(arrays, -1) for name, arrays in parts.items() if arrays}


@cache
def _launched(device: str) -> Any:
    """Isaac Sim, which must run before Isaac Lab's tasks are imported; once in a process."""
    return imported("isaaclab.app", INSTALL).AppLauncher(headless=True, enable_cameras=True, device=device).app
