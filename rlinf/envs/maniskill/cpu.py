"""ManiSkill 3 on the CPU: N simulations of one task, one after the other in one process.

In and out: what `Simulator` says. Nobody is woken: `pool.py` puts such simulators into processes, one per core.

An episode follows from its seed and its actions bit for bit, which ManiSkill alone does not give: PhysX solves contacts
in an order that remembers earlier episodes, and bodies keep how long they have lain still. After another history, one
episode in ten that had contacts was seen to end differently. So every reset moves the bodies into a new physics scene
(0.3 ms; building all anew would take 20).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.envs.base import CannotRender, Moved, SerialSimulator, check_arguments
from rlinf.envs.maniskill import tasks as maniskill_tasks
from rlinf.envs.maniskill.tasks import Task


class ManiSkill(SerialSimulator):
    """Environments of ManiSkill 3, simulated on the CPU.

    Args:
        num_envs: how many.
        task: the fields of `tasks.Task`, such as id="PullCube-v1", control="pd_ee_delta_pos".

    Raises:
        ImportError: ManiSkill is not installed.
        ValueError: no such task, or it has not what was asked for.
        MissingAssets: files must be downloaded first; the text names the command.
        RuntimeError: pictures are asked for where nothing can be drawn; the text names the packages.
    """

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """See `Simulator.check_options`."""
        check_arguments(cls.__name__, Task, options)
        Task(**options)

    def __init__(self, num_envs: int, **task: Any):
        self._task = Task(**task)
        with torch.inference_mode():
            self._envs = [maniskill_tasks.make(self._task, 1, "physx_cpu") for _ in range(num_envs)]
            self._bodies = [_bodies(env) for env in self._envs]
            self.observation_spec = maniskill_tasks.observation_spec(self._envs[0])
        self.action_spec = maniskill_tasks.action_spec(self._envs[0], self._task.id)
        self.max_steps = maniskill_tasks.find(self._task.id).max_episode_steps
        self._track(num_envs)

    def instructions(self) -> list[str] | None:
        told = [maniskill_tasks.words(env) for env in self._envs]
        return None if told[0] is None else [text for each in told for text in each or ()]

    def render(self, env_ids: Tensor) -> Tensor:
        if not self._task.pictures:
            raise CannotRender(
                f"{self._task.id} has no pictures: set trials.options={{pictures: true}}, or trials.videos=0"
            )
        with torch.inference_mode():
            drawn = [self._envs[env].render_rgb_array() for env in env_ids.tolist()]
        return torch.cat(drawn)

    def close(self) -> None:
        for env in self._envs:
            env.close()

    @torch.inference_mode()
    def _begin(self, env: int, seed: int) -> dict[str, np.ndarray]:
        simulation = self._envs[env]
        if simulation.reconfiguration_freq == 0:
            _renew(simulation)
            for body in self._bodies[env]:
                body.put_to_sleep()  # a body wakes with its full time until it may sleep again
                body.wake_up()
        return _row(simulation.reset(seed=seed)[0])

    @torch.inference_mode()  # a tenth faster: ManiSkill does hundreds of tiny operations in a step
    def _move(self, env: int, action: np.ndarray) -> Moved:
        observed, reward, terminated, _, said = self._envs[env].step(torch.from_numpy(action)[None])
        success = bool(said["success"]) if "success" in said else None
        return Moved(_row(observed), float(reward), bool(terminated), False, success)


def _row(observed: Any) -> dict[str, np.ndarray]:
    return {name: array[0].numpy() for name, array in maniskill_tasks.read(observed).items()}


def _bodies(env: Any) -> list[Any]:
    """Bodies of a simulation that move by themselves and may fall asleep."""
    from sapien.physx import PhysxRigidDynamicComponent

    parts = [entity.find_component_by_type(PhysxRigidDynamicComponent) for entity in env.scene.sub_scenes[0].entities]
    return [part for part in parts if part is not None and not part.kinematic]


def _renew(env: Any) -> None:
    """Move everything into a new physics scene, so that nothing of earlier episodes is left in the solver."""
    import sapien
    from sapien.physx import PhysxCpuSystem

    scene = env.scene
    old = scene.sub_scenes[0]
    env._set_scene_config()  # PhysX's settings are the process's, and a new scene takes them as they are
    physics = PhysxCpuSystem()
    physics.timestep = scene.px.timestep
    drawing = [old.render_system] if scene.can_render() else []
    entities = sorted(old.entities, key=lambda entity: entity.per_scene_id)
    for entity in entities:
        entity.remove_from_scene()
    new = sapien.Scene([physics, *drawing])
    for entity in entities:  # in their order, by which they are numbered and drawn
        entity.add_to_scene(new)
    scene.sub_scenes[0] = new
    scene.px = physics
