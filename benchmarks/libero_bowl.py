"""A task of libero_spatial by the true places of its objects, and a script that solves it.

    make libero
    .venv-libero/bin/python -m benchmarks.libero_bowl --starts 0 1 2

The bowl between the plate and the ramekin is put on the plate. Success is the task's own, and rewarded with 1; starts
are the fifty that LIBERO recorded. Nothing is drawn, so no OpenGL context is made. The hand keeps its orientation: an
action has the four numbers of place and gripper.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import gymnasium
import numpy as np
import torch
from torch import Tensor

from rlinf.envs.adapters import libero

_TASK = 0
_STILL = np.array([0.0, 0.0, 0.0, -1.0], np.float32)
_SETTLE = 10
"""Steps without motion in which objects fall into place, as in OpenVLA's evaluation."""
_SCALE = 5.0
"""What brings metres on the table near -1 and 1."""
_HEIGHT = 0.9
"""Metres from the floor to the table."""
_RIM = np.array([0.0, 0.05, 0.032], np.float32)
"""From the middle of the bowl's bottom to its wall, metres, which is 5 cm away there and stands between the fingers."""
_OPEN = 0.08
"""Metres between the fingers."""
_STARTS = {"all": slice(None), "even": slice(0, None, 2), "odd": slice(1, None, 2)}
"""Which of LIBERO's fifty starts: half are for learning, the others for trials."""


class BowlOnPlate(gymnasium.Env[np.ndarray, np.ndarray]):
    """State of 13 numbers: the places of the hand and of the bowl, the ways from the hand to the bowl's rim and from
    the bowl to the plate, and how far the gripper is open.

    Args:
        starts: one of `_STARTS`.
        noise: standard deviation of what the hand does besides what it is told, as a part of the largest action: who
            demonstrates shows how to come back from it (DART, arXiv:1703.09327).
    """

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (13,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)

    def __init__(self, starts: str = "all", noise: float = 0.0) -> None:
        libero._prepare()
        from libero.libero import benchmark, get_libero_path
        from libero.libero.envs.env_wrapper import ControlEnv
        from robosuite.environments import base

        suite = benchmark.get_benchmark_dict()["libero_spatial"]()
        task = suite.get_task(_TASK)
        file = Path(get_libero_path("bddl_files"), task.problem_folder, task.bddl_file)
        drawn = {"use_camera_obs": False, "has_offscreen_renderer": False, "has_renderer": False}
        original, base.MjSim = base.MjSim, _undrawn(base.MjSim)
        try:
            self._simulation = ControlEnv(bddl_file_name=str(file), **drawn, horizon=10**6, hard_reset=False)
        finally:
            base.MjSim = original
        self._starts, self._noise = suite.get_task_init_states(_TASK)[_STARTS[starts]], noise
        self._draws = np.random.default_rng(0)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        """The start of that number, modulo how many there are."""
        self._simulation.seed(seed)
        libero._reset(self._simulation.env)
        self._simulation.set_init_state(self._starts[(seed or 0) % len(self._starts)])
        self._draws = np.random.default_rng(seed)
        for _ in range(_SETTLE):
            state, *_ = self._step(_STILL)
        return state, {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """As LIBERO, with `noise`."""
        moves = action[:3] + self._noise * self._draws.standard_normal(3) if self._noise else action[:3]
        return self._step(np.append(moves, action[3]).clip(-1.0, 1.0))

    def _step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        sim = self._simulation.env.sim
        sim.moves = True
        observed, reward, solved, _ = self._simulation.step([*action[:3], 0.0, 0.0, 0.0, action[3]])
        sim.moves = False
        hand, bowl, plate = (observed[f"{name}_pos"] for name in ("robot0_eef", "akita_black_bowl_1", "plate_1"))
        above = np.array([0.0, 0.0, _HEIGHT])
        ways = (hand - above, bowl - above, bowl + _RIM - hand, plate - bowl)
        fingers = observed["robot0_gripper_qpos"]
        state = np.concatenate([*(way * _SCALE for way in ways), [(fingers[0] - fingers[1]) / _OPEN]])
        return state.astype(np.float32), float(reward), bool(solved), False, {"success": bool(solved)}


def _undrawn(base: Any) -> Any:
    """A class of robosuite's simulations without textures, most of their memory, which computes each step once.

    robosuite has a step computed whole before its controller, again within that, and a third time to move; the
    controller needs places and speeds alone, the first half of it. So while it `moves`, that half is computed before,
    and the other then. The solver of contacts begins from where it ended a step ago, not twice from its own answer:
    after a hundred steps of the script places are 1e-6 metres elsewhere.
    """
    import mujoco

    class Undrawn(base):  # type: ignore[misc]
        moves = begun = False

        @classmethod
        def from_xml_string(cls, xml: str) -> Any:
            root = ElementTree.fromstring(xml)
            for texture in root.iter("texture"):
                for key in [key for key in texture.attrib if key.startswith("file")]:
                    del texture.attrib[key]
                texture.attrib |= {"builtin": "flat", "width": "1", "height": "6"}
            return super().from_xml_string(ElementTree.tostring(root, encoding="unicode"))

        def forward(self) -> None:
            if not self.moves:
                super().forward()
            elif not self.begun:
                mujoco.mj_step1(self.model._model, self.data._data)
                self.begun = True

        def step(self, with_udd: bool = True) -> None:
            mujoco.mj_step2(self.model._model, self.data._data)
            self.begun = False

    return Undrawn


gymnasium.register("LiberoBowl-v0", "benchmarks.libero_bowl:BowlOnPlate", max_episode_steps=220)


def expert(observation: Mapping[str, Tensor], instructions: Sequence[str] | None = None) -> Tensor:
    """Takes the bowl by its rim, lifts it, carries it over the plate, and lets go.

    Args:
        observation: "state", float32 [N, 13].
        instructions: not looked at.

    Returns:
        Actions in [-1, 1], float32 [N, 1, 4].
    """
    state = observation["state"]
    rim, plate, opened = state[:, 6:9] / _SCALE, state[:, 9:12] / _SCALE, state[:, 12]
    height = -plate[:, 2]
    there = (rim.abs() < torch.tensor([0.02, 0.02, 0.014])).all(1)
    holds = there & (opened < 0.15)
    over = (plate[:, :2].abs() < 0.012).all(1)
    laid = over & (height < 0.035)
    above = (rim[:, :2].abs() > 0.012).any(1)
    reach = torch.cat([rim[:, :2], (rim[:, 2] + torch.where(above, 0.1, 0.0))[:, None]], 1)
    carry = torch.cat([torch.where(height[:, None] > 0.06, plate[:, :2], 0.0), (0.08 - height)[:, None]], 1)
    lower = torch.cat([plate[:, :2], torch.full_like(height, -0.02)[:, None]], 1)
    ways = torch.where(over[:, None], lower, carry).clamp(-0.012, 0.012)  # slowly, or the rim slips from the fingers
    still = laid | (there & ~holds)
    moves = torch.where(holds[:, None], ways, reach) * torch.where(still, 0.0, 1.0)[:, None]
    closes = torch.where(there & ~laid, 1.0, -1.0)
    return torch.cat([moves / 0.05 * 1.5, closes[:, None]], 1).clamp(-1.0, 1.0)[:, None]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--every", type=int, default=0, metavar="STEPS", help="say where things are")
    options = parser.parse_args()
    torch.set_num_threads(1)
    environment = gymnasium.make("LiberoBowl-v0")
    for start in options.starts:
        state, _ = environment.reset(seed=start)
        begun, steps, ended, info = time.process_time(), 0, False, {}
        while not ended:
            action = expert({"state": torch.from_numpy(state)[None]})[0, 0].numpy()
            if options.every and steps % options.every == 0:
                print(steps, np.round(np.append(state[:12] / _SCALE, state[12]), 3), np.round(action, 2), flush=True)
            state, _, terminated, truncated, info = environment.step(action)
            steps, ended = steps + 1, terminated or truncated
        cost = (time.process_time() - begun) / steps
        solved = "solved" if info["success"] else "not solved"
        print(f"start {start}: {solved} in {steps} steps, {1e3 * cost:.0f} ms each", flush=True)


if __name__ == "__main__":
    main()
