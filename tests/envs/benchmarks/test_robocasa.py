"""RoboCasa's adapter before a stand-in of robosuite's `make` and of a kitchen."""

from typing import ClassVar

import numpy as np
import pytest
import torch

from rlinf.envs.adapters.robocasa import FELT, RoboCasa
from rlinf.envs.base import CannotSimulate, WrongOption
from tests.envs.benchmarks.stand_ins import missing, stand_in
from tests.envs.protocol import ProtocolSuite, begin, everyone

TASKS = ["CloseDrawer", "PnPCounterToCab"]


class Kitchen:
    """The part of an environment that is used."""

    made: ClassVar[list[str]] = []

    def __init__(self, env_name, seed, **arguments):
        assert arguments["ignore_done"]
        assert arguments["controller_configs"] == {"type": "HYBRID_MOBILE_BASE", "robot": "PandaOmron"}
        self.made.append(env_name)
        self.name, self.arguments, self.rng = env_name, arguments, np.random.default_rng(seed)

    def reset(self):
        self.place = self.rng.normal(size=3)
        self.object = ["bowl", "cup"][self.rng.integers(2)]
        return self.observed()

    def get_ep_meta(self):
        return {"lang": f"{self.name} the {self.object}", "layout_id": 1}

    def step(self, action):
        assert action.shape == (12,)
        self.action, self.place = action, self.place + action[:3] + 0.01 * self.rng.normal(size=3)
        return self.observed(), 0.0, False, {}

    def _check_success(self):
        return self.action[6] > 0.99

    def observed(self):
        seen = {name: np.full(size, number, float) for number, (name, size) in enumerate(FELT.items())}
        seen["robot0_base_pos"] = self.place.copy()
        for number, camera in enumerate(self.arguments["camera_names"]):
            picture = np.zeros((self.arguments["camera_heights"], self.arguments["camera_widths"], 3), np.uint8)
            picture[0] = number + 1  # the lowest row of what is seen
            seen[f"{camera}_image"] = picture
        return seen

    def close(self):
        pass


def config(controller, robot):
    assert controller is None
    return {"type": "HYBRID_MOBILE_BASE", "robot": robot}


@pytest.fixture(autouse=True)
def package(monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "egl")
    monkeypatch.setattr(Kitchen, "made", [])
    stand_in(
        monkeypatch,
        {
            "robocasa": {},
            "robosuite": {"make": Kitchen, "ALL_ENVIRONMENTS": {*TASKS, "Lift"}},
            "robosuite.controllers": {"load_composite_controller_config": config},
        },
    )


class TestStandIn(ProtocolSuite):
    def make(self, num_envs):
        return RoboCasa(num_envs, tasks=TASKS, image_size=4)


class TestMobileStandIn(ProtocolSuite):
    def make(self, num_envs):
        return RoboCasa(num_envs, tasks=TASKS[:1], mobile=True, image_size=4)


def test_a_seed_chooses_the_task_and_words_name_what_the_kitchen_has():
    simulator = RoboCasa(2, tasks=TASKS, image_size=4)
    begin(simulator, [2, 5])
    assert simulator.tasks() == TASKS
    assert [text.rpartition(" ")[0] for text in simulator.instructions()] == [f"{task} the" for task in TASKS]
    begin(simulator, [4, 8])
    assert Kitchen.made == [*TASKS, TASKS[0]]  # built anew where the task changed


def test_pictures_come_the_right_way_up_and_the_state_is_that_of_the_data_sets():
    simulator = RoboCasa(1, tasks=TASKS, image_size=4)
    observed = begin(simulator, [0])
    assert observed["rgb"][0, 3, 0].tolist() == [1] * 3 + [2] * 3
    assert observed["rgb"][0, 0, 0].tolist() == [0] * 6
    assert observed["state"][0, 3:].tolist() == [1.0] * 4 + [2.0] * 3 + [3.0] * 4 + [4.0] * 2
    chosen = RoboCasa(1, tasks=TASKS, state=["robot0_eef_quat", "robot0_gripper_qvel"], image_size=4)
    assert begin(chosen, [0])["state"].tolist() == [[7.0] * 4 + [5.0] * 2]


def test_the_arm_acts_and_the_base_rests_unless_the_robot_is_to_be_mobile():
    simulator = RoboCasa(2, tasks=TASKS, image_size=4)
    begin(simulator, [0, 1])
    actions = torch.full((2, 7), 0.5)
    actions[1, 6] = 1.0
    moved = simulator.step(actions, everyone(simulator))
    assert simulator._simulation(0).action.tolist() == [0.5] * 7 + [0.0] * 4 + [-1.0]
    assert moved.reward.tolist() == [0, 1]
    assert moved.terminated.tolist() == moved.success.tolist() == [False, True]
    assert RoboCasa(1, tasks=TASKS, mobile=True).action_spec.size == 12


def test_wrong_options_and_a_missing_package_are_said(monkeypatch):
    with pytest.raises(WrongOption, match=r"task 'Fly'"):
        RoboCasa(1, tasks=["Fly"])
    for wrong in ({"tasks": "CloseDrawer"}, {"tasks": []}, {"tasks": TASKS, "cameras": []}):
        with pytest.raises(WrongOption, match=r"list.*names"):
            RoboCasa.check_options(wrong)
    with pytest.raises(WrongOption, match=r"'robot0_wheels'.*none.*robot0_base_pos"):
        RoboCasa.check_options({"tasks": TASKS, "state": ["robot0_wheels"]})
    missing(monkeypatch, "robocasa")
    with pytest.raises(CannotSimulate, match=r"robocasa.*installed:.*download_kitchen_assets"):
        RoboCasa(1, tasks=TASKS)
