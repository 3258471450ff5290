"""ManiSkill 3 on a GPU: N simulations of one task, all in one.

In and out: what `Simulator` says; everything stays on the GPU. It differs from the CPU's in three ways, all PhysX's. An
episode does not repeat bit for bit. The seeds of one reset are used together: equal seeds of a reset give equal starts,
but a start also depends on which other seeds were reset with it. And a state is that of bodies and joints: what a task
draws when an episode begins, and keeps elsewhere, is not in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlinf.envs.base import CannotRender, CannotSimulate, Observation, Simulator, State, Transition, check_arguments
from rlinf.envs.maniskill import tasks as maniskill_tasks
from rlinf.envs.maniskill.tasks import Task
from rlinf.envs.trees import stacked_trees, tree_on_cpu, tree_rows
from rlinf.runtime.gpu.own_device import enter_device

_TOGETHER = "InScene25"
"""In the ids of tasks whose code asserts that all environments are reset at once."""


class ManiSkillBatched(Simulator):
    """Environments of ManiSkill 3, simulated on one GPU.

    Args:
        num_envs: how many.
        task: the fields of `tasks.Task`, such as id="PullCube-v1", control="pd_ee_delta_pos".

    Raises:
        ImportError, ValueError, MissingAssets: as `ManiSkill` does.
        RuntimeError: there is no CUDA device, or nothing can be drawn where pictures are asked for.
    """

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """See `Simulator.check_options`."""
        check_arguments(cls.__name__, Task, options)
        Task(**options)

    def __init__(self, num_envs: int, **task: Any):
        self._task = Task(**task)
        if not torch.cuda.is_available():
            raise CannotSimulate(f"{self._task.id}: ManiSkillBatched needs a CUDA device; on the CPU, take ManiSkill")
        self.device = enter_device()  # of this process or of whoever started it; PhysX itself would take GPU 0
        together = self._task.resets_together
        self.resets_together = _TOGETHER in self._task.id if together is None else together
        self._env = maniskill_tasks.make(self._task, num_envs, "physx_cuda", self.device.index)
        self.num_envs = num_envs
        self.observation_spec = maniskill_tasks.observation_spec(self._env)
        self.action_spec = maniskill_tasks.action_spec(self._env, self._task.id)
        self.max_steps = maniskill_tasks.find(self._task.id).max_episode_steps
        self._seeds = torch.arange(num_envs)

    @torch.no_grad()
    def reset(self, seeds: Tensor, env_ids: Tensor) -> Observation:
        rows = env_ids.to(self.device)
        self._seeds[env_ids] = seeds
        given = self._seeds.clone()
        given[0] = seeds[0]  # ManiSkill seeds torch by the first, whichever environments it resets
        observed, _ = self._env.reset(seed=given.tolist(), options={"env_idx": rows})
        first = {seed: row for row, seed in reversed(list(enumerate(seeds.tolist())))}
        source = env_ids[[first[seed] for seed in seeds.tolist()]].to(self.device)
        if not torch.equal(source, rows):  # members of a group: each takes over the start of its first
            observed = self._put(tree_rows(self._env.get_state_dict(), source), rows)
        return {name: array[rows] for name, array in maniskill_tasks.read(observed).items()}

    @torch.no_grad()
    def step(self, actions: Tensor, active: Tensor) -> Transition:
        observed, reward, terminated, _, said = self._env.step(actions)
        return Transition(
            observation=maniskill_tasks.read(observed),
            reward=reward.float().clone(),
            terminated=terminated.clone(),
            truncated=torch.zeros_like(terminated),
            success=said["success"].clone() if "success" in said else None,
        )

    def instructions(self) -> list[str] | None:
        return maniskill_tasks.words(self._env)

    @torch.no_grad()
    def render(self, env_ids: Tensor) -> Tensor:
        if not self._task.pictures:
            raise CannotRender(
                f"{self._task.id} has no pictures: set trials.options={{pictures: true}}, or trials.videos=0"
            )
        return self._env.render_rgb_array()[env_ids.to(self.device)]

    def save(self) -> list[State]:
        everything = self._env.get_state_dict()
        return [
            {"bodies": tree_on_cpu(tree_rows(everything, torch.tensor([env], device=self.device)))}
            for env in range(self.num_envs)
        ]

    @torch.no_grad()
    def restore(self, states: Sequence[State], env_ids: Tensor) -> None:
        self._put(stacked_trees([state["bodies"] for state in states], self.device), env_ids.to(self.device))

    def close(self) -> None:
        self._env.close()

    def _put(self, state: dict[str, Any], env_ids: Tensor) -> Any:
        """Put environments into states, and look."""
        self._env.set_state_dict(state, env_ids)
        if "controller" in state:
            whole = _placed(self._env.agent.get_controller_state(), env_ids, state["controller"])
            self._env.agent.set_controller_state(whole)
        return self._env.get_obs()


def _placed(tree: Any, rows: Tensor, new: Any) -> Any:
    """A copy of a tree whose rows are those of another."""
    if isinstance(tree, dict):
        return {name: _placed(part, rows, new[name]) for name, part in tree.items() if name in new}
    whole = tree.clone()
    whole[rows] = new
    return whole
