"""RoboTwin's adapter before a stand-in of its repository: its files, its modules, and a task by its interface."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from rlinf.envs.adapters.robotwin import RoboTwin
from rlinf.envs.base import CannotSimulate, WrongOption
from tests.envs.benchmarks.stand_ins import missing, stand_in
from tests.envs.protocol import ProtocolSuite, begin, everyone

FILES = {
    "task_config/_eval_step_limit.yml": {"lift_pot": 200, "click_bell": 100},
    "task_config/_camera_config.yml": {"D435": {"fovy": 37, "w": 32, "h": 24}},
    "task_config/_embodiment_config.yml": {"aloha-agilex": {"file_path": "./assets/embodiments/aloha-agilex"}},
    "task_config/demo_clean.yml": {
        "embodiment": ["aloha-agilex"],
        "camera": {"head_camera_type": "D435", "wrist_camera_type": "D435", "collect_wrist_camera": False},
        "data_type": {"rgb": False, "endpose": True},
        "domain_randomization": {"random_light": False},
        "render_freq": 5,
    },
    "assets/embodiments/aloha-agilex/config.yml": {"arm_joints_name": [[f"l{n}" for n in range(6)], list("abcdef")]},
    "description/task_instruction/lift_pot.json": {"full_description": "lift the pot", "seen": [], "unseen": []},
}


class UnStableError(Exception):
    pass


class lift_pot:
    """The part of a task that is used. Seeds that end in 3 fall over; the planner fails in those that end in 5."""

    plans = 0

    def setup_demo(self, *, now_ep_num, seed, is_test, **kwargs):
        assert is_test
        assert kwargs["eval_mode"]
        assert kwargs["render_freq"] == 0
        assert kwargs["data_type"] == {"rgb": True, "endpose": True, "qpos": True}
        assert kwargs["camera"]["collect_wrist_camera"]
        assert kwargs["dual_arm_embodied"]
        assert len(kwargs["left_embodiment_config"]["arm_joints_name"][0]) == 6
        assert Path(kwargs["left_robot_file"]).is_dir()  # its files are named from its folder
        kwargs["domain_randomization"].clear()  # a task may write to what it is given
        self.seed, self.step_lim, self.take_action_cnt, self.eval_success = seed, 200, 0, False
        if seed % 10 == 3:
            raise UnStableError(f"Objects is unstable in seed({seed})")
        self.random, self.plan_success, self.open = np.random.default_rng(seed), True, True
        self.joints = self.random.normal(size=14)

    def play_once(self):
        type(self).plans += 1
        self.plan_success = self.seed % 10 != 5
        return {"info": {"{A}": "060_kitchenpot/base0"}}

    def check_success(self):
        return True

    def set_instruction(self, instruction=None):
        self.instruction = instruction

    def take_action(self, action, action_type="qpos"):
        assert self.open
        assert action_type == "qpos"
        assert action.shape == (14,)
        if self.take_action_cnt == self.step_lim or self.eval_success:
            return
        self.take_action_cnt += 1
        self.joints = 0.5 * self.joints + 0.5 * action + 0.01 * self.random.normal(size=14)
        self.eval_success = bool(action[6] == 0 and action[13] == 0)

    def get_obs(self):
        pictures = {
            f"{name}_camera": {"rgb": np.full((24, 32, 3), value, np.uint8)}
            for name, value in (("head", 1), ("left", 2), ("right", 3), ("front", 4))
        }
        return {"observation": pictures, "joint_action": {"vector": self.joints.copy()}, "pointcloud": []}

    def close_env(self, clear_cache=False):
        self.open = False


def descriptions(task, episodes, most):
    import random

    text = f"{random.choice(['take', 'grab'])} {episodes[0]['{A}']}"
    return [{"episode_index": 0, "seen": [text, "seen"], "unseen": [text] * most}]


@pytest.fixture(autouse=True)
def root(monkeypatch, tmp_path):
    for name, contents in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(contents) if path.suffix == ".json" else yaml.safe_dump(contents))
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setattr(lift_pot, "plans", 0)
    stand_in(
        monkeypatch,
        {
            "envs.lift_pot": {"lift_pot": lift_pot},
            "envs.utils.create_actor": {"UnStableError": UnStableError},
            "generate_episode_instructions": {"generate_episode_descriptions": descriptions},
        },
    )
    return str(tmp_path)


class TestStandIn(ProtocolSuite):
    @pytest.fixture(autouse=True)
    def folder(self, root):
        self.root = root

    def make(self, num_envs):
        return RoboTwin(num_envs, root=self.root, task="lift_pot", image_size=4)


def test_three_cameras_and_both_arms_are_seen(root):
    simulator = RoboTwin(1, root=root, task="lift_pot")
    observed = begin(simulator, [0])
    assert observed["rgb"].shape == (1, 224, 224, 9)
    assert observed["rgb"][0, 9, 9].tolist() == [1] * 3 + [2] * 3 + [3] * 3
    assert torch.allclose(observed["state"][0], torch.tensor(np.random.default_rng(100000).normal(size=14)).float())
    assert simulator.max_steps == 200
    assert simulator.instructions() == ["lift the pot"]


def test_joints_have_no_bounds_and_grippers_open_from_zero_to_one(root):
    spec = RoboTwin(1, root=root, task="lift_pot").action_spec
    assert spec.low.tolist() == [-math.inf] * 6 + [0] + [-math.inf] * 6 + [0]
    acted = spec.scaled(torch.tensor([3.0] * 6 + [-1.0] + [-4.0] * 6 + [0.5]))
    assert acted.tolist() == [3.0] * 6 + [0.0] + [-4.0] * 6 + [0.75]


def test_a_solved_task_terminates_with_its_reward(root):
    simulator = RoboTwin(2, root=root, task="lift_pot", image_size=4)
    begin(simulator, [0, 1])
    actions = torch.zeros(2, 14)
    actions[1, 6] = 0.5
    moved = simulator.step(actions, everyone(simulator))
    assert moved.reward.tolist() == [1, 0]
    assert moved.terminated.tolist() == moved.success.tolist() == [True, False]


def test_starts_that_fall_over_are_skipped_and_with_the_expert_those_that_nobody_solves(root):
    simulator = RoboTwin(3, root=root, task="lift_pot", starts=10, image_size=4)
    begin(simulator, [3, 13, 5])
    assert [simulator._simulation(env).seed for env in range(3)] == [100004, 100004, 100005]
    assert lift_pot.plans == 0
    simulator = RoboTwin(3, root=root, task="lift_pot", starts=10, first_seed=0, expert=True, image_size=4)
    begin(simulator, [3, 13, 5])
    assert [simulator._simulation(env).seed for env in range(3)] == [4, 4, 6]
    assert lift_pot.plans == 3  # 4, and 5 and 6; nothing twice
    first = simulator.instructions()
    assert first[0].endswith("060_kitchenpot/base0")
    again = RoboTwin(3, root=root, task="lift_pot", starts=10, first_seed=0, expert=True, image_size=4)
    begin(again, [3, 13, 5])
    assert again.instructions() == first == [simulator._simulation(env).instruction for env in range(3)]


def test_wrong_names_and_what_is_missing_are_said(root, tmp_path, monkeypatch):
    with pytest.raises(WrongOption, match=r"did.*mean lift_pot"):
        RoboTwin(1, root=root, task="lift_pots")
    with pytest.raises(WrongOption, match=r"config 'clean'; .*demo_clean"):
        RoboTwin(1, root=root, task="lift_pot", config="clean")
    with pytest.raises(CannotSimulate, match=r"RoboTwin's repository:.*RoboTwin"):
        RoboTwin(1, root=str(tmp_path / "nowhere"), task="lift_pot")
    missing(monkeypatch, "envs")
    with pytest.raises(CannotSimulate, match=r"envs.lift_pot needs.*package envs.*script/_install\.sh"):
        RoboTwin(1, root=root, task="lift_pot")
