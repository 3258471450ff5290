"""SimplerEnv's adapter before a stand-in of `simpler_env` and of a task of ManiSkill 2."""

from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch

from rlinf.envs.adapters.simpler import Simpler
from rlinf.envs.base import CannotSimulate, WrongOption
from tests.envs.benchmarks.stand_ins import missing, stand_in
from tests.envs.protocol import ProtocolSuite, begin, everyone

TASKS = ["google_robot_pick_coke_can", "widowx_carrot_on_plate"]
HIGH = np.array([1, 1, 1, np.pi / 2, np.pi / 2, np.pi / 2, 1], np.float32)


class Task:
    """The part of an environment of gymnasium 0.28 that is used."""

    robot_uid = "widowx_bridge_dataset_camera_setup"
    spec = SimpleNamespace(max_episode_steps=60)
    action_space = SimpleNamespace(low=-HIGH, high=HIGH)
    observation_space: ClassVar = {"agent": {"qpos": SimpleNamespace(shape=(8,))}}

    def __init__(self, name):
        self.name, self.unwrapped = name, self

    def reset(self, seed=None, options=None):
        self.random = np.random.default_rng(seed)
        start = self.random.normal() if options is None else options["obj_init_options"]["episode_id"]
        self.joints, self.steps = np.full(8, start, np.float64), 0
        return self.observed(), {"episode_id": start}

    def step(self, action):
        assert action.shape == (7,)
        assert (np.abs(action) <= HIGH).all()
        self.joints[:7] += action + 0.01 * self.random.normal(size=7)
        self.steps += 1
        done = bool(action[6] > 0.99)
        return self.observed(), float(done), done, self.steps >= 60, {"success": done}

    def get_language_instruction(self):
        return "put carrot on plate"

    def observed(self):
        picture = np.full((48, 64, 3), 5, np.uint8)
        return {"agent": {"qpos": self.joints.copy()}, "image": {"3rd_view_camera": {"rgb": picture}}}

    def close(self):
        pass


def picture_of(env, obs, camera_name=None):
    assert "widowx" in env.robot_uid
    return obs["image"]["3rd_view_camera"]["rgb"]


@pytest.fixture(autouse=True)
def package(monkeypatch):
    stand_in(
        monkeypatch,
        {
            "simpler_env": {"ENVIRONMENTS": TASKS, "make": Task},
            "simpler_env.utils.env.observation_utils": {"get_image_from_maniskill2_obs_dict": picture_of},
        },
    )


class TestStandIn(ProtocolSuite):
    def make(self, num_envs):
        return Simpler(num_envs, task="widowx_carrot_on_plate", image_size=4)


def test_a_seed_chooses_the_start_and_bounds_and_limits_are_the_tasks():
    simulator = Simpler(2, task="widowx_carrot_on_plate")
    observed = begin(simulator, [3, 25])
    assert observed["state"][:, 0].tolist() == [3.0, 1.0]
    assert observed["rgb"].shape == (2, 224, 224, 3)
    assert (observed["rgb"] == 5).all()
    assert torch.allclose(simulator.action_spec.scaled(torch.ones(7)), torch.from_numpy(HIGH))
    assert simulator.max_steps == 60
    assert simulator.instructions() == ["put carrot on plate"] * 2
    drawn = begin(Simpler(2, task="widowx_carrot_on_plate", starts=None), [3, 27])["state"][:, 0]
    assert drawn[0] != drawn[1]


def test_a_solved_task_terminates_with_its_reward():
    simulator = Simpler(2, task="widowx_carrot_on_plate", image_size=4)
    begin(simulator, [0, 1])
    actions = torch.zeros(2, 7)
    actions[0, 6] = 1.0
    moved = simulator.step(actions, everyone(simulator))
    assert moved.reward.tolist() == [1, 0]
    assert moved.terminated.tolist() == moved.success.tolist() == [True, False]


def test_an_unknown_task_and_a_missing_package_are_said(monkeypatch):
    with pytest.raises(WrongOption, match=r"did.*mean widowx_carrot_on_plate"):
        Simpler(1, task="widowx_carot_on_plate")
    with pytest.raises(WrongOption, match="at least 1"):
        Simpler.check_options({"task": TASKS[0], "starts": 0})
    missing(monkeypatch, "simpler_env")
    with pytest.raises(CannotSimulate, match=r"simpler_env.*installed:.*clone .*SimplerEnv"):
        Simpler(1, task=TASKS[0])
