"""Genesis: N arms that each lift a cube, simulated together on a GPU or on the CPU (genesis-world.readthedocs.io).

Tensors stay on the device. Genesis is a simulator without tasks of its own: this one has Franka's arm on a plane, a
cube before it, and a camera.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.envs.adapters.serial import check_name, imported
from rlinf.envs.base import ActionSpec, ArraySpec, CannotSimulate, Observation, Simulator, State, Transition
from rlinf.runtime.base.tensors import enter_device

INSTALL = "pip install genesis-world"
"""Command that installs Genesis with the arm's model."""
MAX_STEPS = 200
"""Steps of an episode."""
_HOME = (0.0, -0.4, 0.0, -2.2, 0.0, 2.0, 0.8, 0.04, 0.04)
"""Where the seven joints, in radians, and the two fingers, in metres, are at the start."""
_ARM = 7
_OPEN = 0.04
"""Where an open finger is, in metres."""
_STIFFNESS = (4500.0, 4500.0, 3500.0, 3500.0, 2000.0, 2000.0, 2000.0, 100.0, 100.0)
_DAMPING = (450.0, 450.0, 350.0, 350.0, 200.0, 200.0, 200.0, 10.0, 10.0)
_FORCE = (87.0, 87.0, 87.0, 87.0, 12.0, 12.0, 12.0, 100.0, 100.0)
"""Gains and limits of the arm's motors, those of Genesis's examples."""
_HALF = 0.02
"""Half of the cube's edge, in metres."""
_PLACES = ((0.45, -0.2), (0.7, 0.2))
"""Corner and opposite corner of where the cube begins, (x, y) in metres."""
_OBSERVE = ("state", "state+rgb")
_REWARDS = ("dense", "sparse")


class GenesisLift(Simulator):
    """Environments in which Franka's arm lifts a cube.

    The seed of an episode says where the cube lies. An action moves the seven joints, by `stride` at most, and opens
    (1) or closes (-1) the gripper. The state is positions and speeds of the nine joints, where the hand is and how it
    is turned, and the same of the cube. An episode is solved, and ends, when the cube is `height` above the plane. A
    saved state is positions, speeds and targets, so that what follows a restore repeats but for the solver's rounding.

    Args:
        num_envs: how many.
        observe: "state", or "state+rgb" with pictures of a camera, which need a CUDA device.
        reward: "dense": a quarter for how near the hand is, the rest for how high the cube is; "sparse": 1 when solved.
        height: of the cube when it is solved, in metres.
        stride: most that a joint's target moves in a step, in radians.
        substeps: steps of the simulation, of 10 ms each, in one step.
        image_size: height and width of the pictures.

    Raises:
        WrongOption: an option is not one of those that there are.
        CannotSimulate: Genesis is not installed, or pictures are asked for without a CUDA device.
    """

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """See `Simulator.check_options`."""
        super().check_options(options)
        check_name({"observe": "state", **options}, "observe", _OBSERVE, "Genesis")
        check_name({"reward": "dense", **options}, "reward", _REWARDS, "Genesis")

    def __init__(
        self,
        num_envs: int,
        *,
        observe: str = "state",
        reward: str = "dense",
        height: float = 0.2,
        stride: float = 0.05,
        substeps: int = 4,
        image_size: int = 128,
    ):
        GenesisLift.check_options({"observe": observe, "reward": reward})
        self.device = enter_device()
        draws = observe != "state"
        if draws and self.device.type != "cuda":
            raise CannotSimulate("observe=state+rgb: Genesis draws many environments at once on a CUDA device alone")
        gs = _started(self.device.type)
        self.num_envs, self.max_steps = num_envs, MAX_STEPS
        self._height, self._stride, self._substeps, self._sparse = height, stride, substeps, reward == "sparse"
        renderer = {"renderer": gs.renderers.BatchRenderer(use_rasterizer=True)} if draws else {}
        self._scene = gs.Scene(sim_options=gs.options.SimOptions(dt=0.01), show_viewer=False, **renderer)
        self._scene.add_entity(gs.morphs.Plane())
        self._arm = self._scene.add_entity(gs.morphs.MJCF(file="xml/franka_emika_panda/panda.xml"))
        self._cube = self._scene.add_entity(gs.morphs.Box(size=(2 * _HALF,) * 3, pos=(0.6, 0.0, _HALF)))
        self._camera = None
        if draws:
            self._camera = self._scene.add_camera(
                res=(image_size, image_size), pos=(1.6, 0.0, 0.9), lookat=(0.4, 0.0, 0.2), fov=45, GUI=False
            )
        self._scene.build(n_envs=num_envs)
        self._arm.set_dofs_kp(np.array(_STIFFNESS))
        self._arm.set_dofs_kv(np.array(_DAMPING))
        self._arm.set_dofs_force_range(-np.array(_FORCE), np.array(_FORCE))
        self._limits = tuple(limit.reshape(-1)[: len(_HOME)] for limit in self._arm.get_dofs_limit())
        self._hand = self._arm.get_link("hand")
        self._target = torch.tensor(_HOME, device=self.device).repeat(num_envs, 1)
        self.action_spec = ActionSpec(-torch.ones(_ARM + 1), torch.ones(_ARM + 1))
        self.observation_spec = {"state": ArraySpec((2 * len(_HOME) + 14,), torch.float32)}
        if draws:
            self.observation_spec["rgb"] = ArraySpec((image_size, image_size, 3), torch.uint8)

    def reset(self, seeds: Tensor, env_ids: Tensor) -> Observation:
        places = [np.random.default_rng(seed).uniform(*_PLACES) for seed in seeds.tolist()]
        rows = env_ids.to(self.device)
        cube = torch.tensor([[x, y, _HALF, 1.0, 0.0, 0.0, 0.0] for x, y in places], device=self.device)
        home = torch.tensor(_HOME, device=self.device).repeat(len(rows), 1)
        self._put(rows, arm=home, arm_speed=home * 0, target=home, cube=cube.float(), cube_speed=home[:, :6] * 0)
        return {name: array[rows] for name, array in self._observed().items()}

    def step(self, actions: Tensor, active: Tensor) -> Transition:
        fingers = (actions[:, -1:] + 1) / 2 * _OPEN
        moved = torch.cat((self._target[:, :_ARM] + self._stride * actions[:, :_ARM], fingers, fingers), -1)
        moved = moved.clamp(*self._limits)
        self._target = torch.where(active[:, None], moved, self._target)
        self._arm.control_dofs_position(self._target)
        for _ in range(self._substeps):
            self._scene.step()
        cube = self._cube.get_pos()
        solved = cube[:, 2] > self._height
        near = 1 - torch.tanh(5 * (self._hand.get_pos() - cube).norm(dim=-1))
        lifted = ((cube[:, 2] - _HALF) / (self._height - _HALF)).clamp(0, 1)
        reward = solved.float() if self._sparse else 0.25 * near + 0.75 * lifted
        return Transition(self._observed(), reward.float(), solved, torch.zeros_like(solved), solved.clone())

    def instructions(self) -> list[str]:
        return ["lift the cube"] * self.num_envs

    def render(self, env_ids: Tensor) -> Tensor:
        if self._camera is None:
            raise NotImplementedError("GenesisLift has pictures with observe=state+rgb alone")
        return self._observed()["rgb"][env_ids.to(self.device)]

    def save(self) -> list[State]:
        parts = {
            "arm": self._arm.get_qpos(),
            "arm_speed": self._arm.get_dofs_velocity(),
            "target": self._target,
            "cube": self._cube.get_qpos(),
            "cube_speed": self._cube.get_dofs_velocity(),
        }
        whole = {name: part.cpu() for name, part in parts.items()}
        return [{name: part[env].clone() for name, part in whole.items()} for env in range(self.num_envs)]

    def restore(self, states: Sequence[State], env_ids: Tensor) -> None:
        parts = {name: torch.stack([state[name] for state in states]).to(self.device) for name in states[0]}
        self._put(env_ids.to(self.device), **parts)

    def close(self) -> None:
        self._scene.destroy()

    def _put(
        self, rows: Tensor, *, arm: Tensor, arm_speed: Tensor, target: Tensor, cube: Tensor, cube_speed: Tensor
    ) -> None:
        """Put some environments into a state; arguments are [n, ...] each."""
        self._arm.set_qpos(arm, envs_idx=rows)
        self._arm.set_dofs_velocity(arm_speed, envs_idx=rows)
        self._cube.set_qpos(cube, envs_idx=rows)
        self._cube.set_dofs_velocity(cube_speed, envs_idx=rows)
        self._target = self._target.index_copy(0, rows, target)
        self._arm.control_dofs_position(target, envs_idx=rows)

    def _observed(self) -> Observation:
        """Observations of all environments, copied out of Genesis's buffers."""
        arm = (self._arm.get_qpos(), self._arm.get_dofs_velocity(), self._hand.get_pos(), self._hand.get_quat())
        observed = {"state": torch.cat((*arm, self._cube.get_qpos()), -1).float()}
        if self._camera is not None:
            pictures, *_ = self._camera.render(rgb=True)
            observed["rgb"] = torch.as_tensor(pictures, device=self.device)[..., :3].to(torch.uint8).clone()
        return observed


@cache
def _started(device: str) -> Any:
    """Genesis, which is started once in a process."""
    gs = imported("genesis", INSTALL)
    gs.init(backend=gs.cuda if device == "cuda" else gs.cpu, precision="32", logging_level="warning")
    return gs
