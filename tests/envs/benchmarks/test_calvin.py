"""CALVIN's adapter before a stand-in of `calvin_env` and `calvin_agent`, which are not on PyPI."""

import numpy as np
import pytest
import torch
import yaml

from rlinf.envs.adapters.calvin import Calvin
from rlinf.envs.adapters.serial import resized
from rlinf.envs.base import CannotSimulate, WrongOption
from tests.envs.benchmarks.stand_ins import missing, stand_in
from tests.envs.protocol import ProtocolSuite, begin, everyone

TASKS = ["open_drawer", "turn_on_led", "push_into_drawer", "move_slider_left", "lift_red_block_table"]


class PlayTable:
    """The part of `PlayTableSimEnv` that is used. A task is done once the arm has moved far enough since it began."""

    sizes = 200, 84

    def __init__(self, folder, show_gui):
        assert not show_gui

    def reset(self, robot_obs, scene_obs):
        assert scene_obs.shape == (24,)
        self.robot = np.array(robot_obs, np.float64)
        return self.get_obs()

    def get_obs(self):
        static, wrist = (
            np.full((size, size, 3), value, np.uint8) for size, value in zip(self.sizes, (0, 77), strict=True)
        )
        static[0, 0] = 200
        return {
            "rgb_obs": {"rgb_static": static, "rgb_gripper": wrist},
            "depth_obs": {},
            "robot_obs": self.robot.copy(),
            "scene_obs": np.zeros(24),
        }

    def get_info(self):
        return {"robot_info": {"tcp_pos": self.robot[:3].copy(), "uid": 0}, "scene_info": {}}

    def step(self, action):
        assert action.shape == (7,)
        position, _, gripper = np.split(action, [3, 6])
        assert gripper[0] in (-1, 1)
        position *= 0.02  # in place, as CALVIN's robot does
        self.robot[:3] += position
        self.robot[14] = gripper[0]
        return self.get_obs(), 0, False, self.get_info()

    def close(self):
        pass


class Oracle:
    def get_task_info_for_set(self, start_info, end_info, task_filter):
        moved = end_info["robot_info"]["tcp_pos"] - start_info["robot_info"]["tcp_pos"]
        return set(task_filter) if moved[2] > 0.03 else set()


def start_of(condition):
    robot = np.arange(15.0) / 10
    robot[0] += condition["led"]
    return robot, np.zeros(24)


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """The scene's folder, with CALVIN's packages in place."""
    conf = tmp_path / "calvin_models" / "conf"
    for name, contents in {
        "callbacks/rollout/tasks/new_playtable_tasks.yaml": {"tasks": {}},
        "annotations/new_playtable_validation.yaml": {task: [f"please {task}", "other words"] for task in TASKS},
        "../../validation/.hydra/merged_config.yaml": {},
    }.items():
        path = conf / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(contents))
    chains = [({"led": number}, tuple(TASKS[number % 3 :] + TASKS[: number % 3])) for number in range(9)]
    stand_in(
        monkeypatch,
        {
            "calvin_env.envs.play_table_env": {"get_env": PlayTable},
            "calvin_agent": {"__file__": str(tmp_path / "calvin_models" / "calvin_agent" / "__init__.py")},
            "calvin_agent.evaluation.utils": {"get_env_state_for_initial_condition": start_of},
            "calvin_agent.evaluation.multistep_sequences": {"get_sequences": lambda count: chains[:count]},
            "hydra.utils": {"instantiate": lambda config: Oracle()},
        },
    )
    return str(tmp_path / "validation")


class TestStandIn(ProtocolSuite):
    @pytest.fixture(autouse=True)
    def scene(self, folder, monkeypatch):
        monkeypatch.setattr(PlayTable, "sizes", (6, 4))  # quicker to bring to one size
        self.folder = folder

    def make(self, num_envs):
        return Calvin(num_envs, dataset=self.folder, image_size=4)


def lift(up):
    return torch.tensor([[0.0, 0, 1.0 if high else 0, 0, 0, 0, 0.3] for high in up])


def test_a_task_that_is_done_earns_one_and_the_next_is_asked_for_until_the_chain_is_done(folder):
    simulator = Calvin(2, dataset=folder, length=2, image_size=4)
    begin(simulator, [0, 10])  # the chains 0, and 10 modulo 9
    assert simulator.instructions() == ["please open_drawer", "please turn_on_led"]
    assert simulator.tasks() is None
    rewards = []
    for _ in range(4):  # two steps of 2 cm for each task
        moved = simulator.step(lift([True, False]), everyone(simulator))
        rewards.append(moved.reward[0].item())
        if len(rewards) == 2:
            assert simulator.instructions() == ["please turn_on_led", "please turn_on_led"]
            assert not moved.terminated.any()
    assert rewards == [0, 1, 0, 1]
    assert moved.terminated.tolist() == moved.success.tolist() == [True, False]


def test_a_task_that_takes_too_long_truncates_the_episode(folder):
    simulator = Calvin(1, dataset=folder, task_steps=3, image_size=4)
    begin(simulator, [0])
    ends = []
    for up in (True, True, False, False, False):
        ends.append(simulator.step(lift([up]), everyone(simulator)).truncated.item())
    assert ends == [False, False, False, False, True]  # the second task began after two steps
    assert simulator.max_steps == 15


def test_cameras_have_one_size_the_state_is_felt_by_the_robot_and_the_gripper_is_open_or_closed(folder):
    simulator = Calvin(1, dataset=folder)
    observed = begin(simulator, [2])
    assert observed["rgb"].shape == (1, 200, 200, 6)
    assert observed["rgb"][0, 0, 0].tolist() == [200] * 3 + [77] * 3
    assert torch.allclose(observed["state"][0], torch.tensor([2.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6]))
    for number, expected in ((-0.2, -1), (0.0, 1), (0.9, 1)):
        simulator.step(torch.tensor([[0.0] * 6 + [number]]), everyone(simulator))
        assert simulator._simulation(0).robot[14] == expected
    assert simulator.render(torch.tensor([0])).shape == (1, 200, 200, 3)


def test_what_is_missing_is_said_with_the_command(folder, tmp_path, monkeypatch):
    with pytest.raises(CannotSimulate, match=r"\.hydra/merged_config\.yaml:.*folder `validation`"):
        Calvin(1, dataset=str(tmp_path))
    with pytest.raises(WrongOption, match="from 1 to 5"):
        Calvin.check_options({"dataset": folder, "length": 6})
    missing(monkeypatch, "calvin_env")
    with pytest.raises(CannotSimulate, match=r"calvin_env.*installed:.*clone .*mees/calvin"):
        Calvin(1, dataset=folder)


def test_pictures_are_resized_without_aliases():
    stripes = np.zeros((8, 8, 3), np.uint8)
    stripes[:, ::2] = 200
    small = resized(stripes, 2)
    assert small.shape == (2, 2, 3)
    assert abs(small.astype(int) - 100).max() <= 30  # every pixel is a mean of stripes, not one of them
    assert (resized(np.full((5, 7, 3), 9, np.uint8), 4) == 9).all()
