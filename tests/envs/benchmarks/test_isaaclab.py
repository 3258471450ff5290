"""Isaac Lab's adapter before a stand-in of a manager-based task: one seed for a call, resets inside of steps."""

from types import SimpleNamespace

import gymnasium
import pytest
import torch

from rlinf.envs.adapters import isaaclab
from rlinf.envs.adapters.isaaclab import IsaacLab
from rlinf.envs.base import CannotSimulate, WrongOption
from tests.envs.benchmarks.stand_ins import missing, stand_in
from tests.envs.protocol import ProtocolSuite, begin, everyone

TASK = "Isaac-Lift-Cube-Franka-v0"


class Scene:
    """Bodies in rows whose origins lie two metres from each other; in float64, or origins would round differently."""

    def __init__(self, count):
        self.env_origins = torch.arange(count)[:, None] * torch.tensor([[2.0, 0.0, 0.0]], dtype=torch.float64)
        self.pose, self.speed = self.env_origins.clone(), torch.zeros(count, 3, dtype=torch.float64)

    def get_state(self, is_relative=False):
        pose = self.pose - self.env_origins if is_relative else self.pose.clone()
        return {"articulation": {"robot": {"root_pose": pose}}, "rigid_object": {"cube": {"speed": self.speed.clone()}}}

    def reset_to(self, state, env_ids, is_relative=False):
        assert is_relative
        self.pose[env_ids] = state["articulation"]["robot"]["root_pose"] + self.env_origins[env_ids]
        self.speed[env_ids] = state["rigid_object"]["cube"]["speed"]


class Env:
    """The part of `ManagerBasedRLEnv` that is used. Speeds up by actions; what is high is solved."""

    max_episode_length = 50

    def __init__(self, config):
        count = config.scene.num_envs
        self.config, self.scene = config, Scene(count)
        self.episode_length_buf = torch.zeros(count, dtype=torch.long)
        self.action_manager = SimpleNamespace(total_action_dim=3)
        self.terms = {"time_out": torch.zeros(count, dtype=torch.bool), "success": torch.zeros(count, dtype=torch.bool)}
        self.termination_manager = SimpleNamespace(active_terms=list(self.terms), get_term=self.terms.__getitem__)
        self.obs_buf, self.unwrapped = {}, self

    def reset(self, seed=None, env_ids=None, options=None):
        if seed is not None:
            torch.manual_seed(seed)
        self._reset_idx(torch.arange(len(self.scene.pose)) if env_ids is None else env_ids)
        return self.observe(), {}

    def reset_to(self, state, env_ids, seed=None, is_relative=False):
        if seed is not None:
            torch.manual_seed(seed)
        self._reset_idx(env_ids)
        self.scene.reset_to(state, env_ids, is_relative=is_relative)
        return self.observe(), {}

    def _reset_idx(self, env_ids):
        self.scene.pose[env_ids] = torch.rand(len(env_ids), 3).double() + self.scene.env_origins[env_ids]
        self.scene.speed[env_ids] = 0
        self.episode_length_buf[env_ids] = 0

    def step(self, action):
        self.scene.speed += action
        self.scene.pose += self.scene.speed
        self.episode_length_buf += 1
        self.terms["success"][:] = self.scene.pose[:, 2] > 20
        self.terms["time_out"][:] = self.episode_length_buf >= self.max_episode_length
        ended = (self.terms["success"] | self.terms["time_out"]).nonzero().squeeze(-1)
        reward = self.scene.pose[:, 2].clone()
        if len(ended):
            self._reset_idx(ended)
        return self.observe(), reward, self.terms["success"], self.terms["time_out"], {}

    def observe(self):
        size = self.config.scene.table_cam.height
        picture = torch.zeros(len(self.scene.pose), size, size, 3, dtype=torch.uint8)
        picture[:] = self.episode_length_buf[:, None, None, None]
        self.obs_buf = {
            "policy": {
                "eef_pos": self.scene.pose - self.scene.env_origins,
                "table_cam": picture,
                "speed": self.scene.speed,
                "wrist_cam": picture + 100,
            }
        }
        return self.obs_buf

    def close(self):
        pass


def config_of(task, entry):
    assert (task, entry) == (TASK, "env_cfg_entry_point")
    camera = SimpleNamespace(height=200, width=200)
    scene = SimpleNamespace(num_envs=4096, table_cam=camera, robot=SimpleNamespace())
    return SimpleNamespace(scene=scene, sim=SimpleNamespace(device="cuda:0"))


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """What Isaac Sim was launched with."""
    asked = []

    class AppLauncher:
        def __init__(self, **arguments):
            asked.append(arguments)
            self.app = self

    isaaclab._launched.cache_clear()
    monkeypatch.setattr(gymnasium, "make", lambda task, cfg: Env(cfg))
    stand_in(
        monkeypatch,
        {
            "isaaclab.app": {"AppLauncher": AppLauncher},
            "isaaclab_tasks": {},
            "isaaclab_tasks.utils": {"load_cfg_from_registry": config_of},
        },
    )
    yield asked
    isaaclab._launched.cache_clear()


class TestStandIn(ProtocolSuite):
    def make(self, num_envs):
        return IsaacLab(num_envs, task=TASK, image_size=4)


def test_an_episode_that_ends_stays_at_its_end_until_it_is_reset():
    simulator = IsaacLab(2, task=TASK, image_size=4)
    begin(simulator, [1, 2])
    actions = torch.zeros(2, 3)
    actions[0, 2] = 25.0
    moved = simulator.step(actions, everyone(simulator))
    assert moved.terminated.tolist() == moved.success.tolist() == [True, False]
    assert moved.observation["state"][0, 2] > 20
    moved = simulator.step(torch.zeros(2, 3), everyone(simulator))
    assert moved.observation["state"][0, 2] > 40, "it goes on, but not from a new start"
    assert simulator.reset(torch.tensor([5]), torch.tensor([0]))["state"][0, 2] < 1


def test_time_that_is_over_truncates_and_counts_on_after_restoring():
    simulator = IsaacLab(2, task=TASK, image_size=4)
    begin(simulator, [1, 2])
    simulator._env.episode_length_buf[1] = 48
    saved = simulator.save()
    for _ in range(2):
        moved = simulator.step(torch.zeros(2, 3), everyone(simulator))
        assert not moved.terminated.any()
    assert moved.truncated.tolist() == [False, True]
    simulator.restore(saved[::-1], torch.arange(2))
    assert simulator._env.episode_length_buf.tolist() == [48, 0]


def test_pictures_and_numbers_are_told_apart_and_cameras_get_their_size(launched):
    simulator = IsaacLab(3, task=TASK, instruction="lift it", image_size=4)
    observed = begin(simulator)
    assert launched == [{"headless": True, "enable_cameras": True, "device": "cpu"}]
    assert simulator._env.config.scene.num_envs == 3
    assert simulator._env.config.sim.device == "cpu"
    assert observed["rgb"].shape == (3, 4, 4, 6)
    assert observed["rgb"][0, 0, 0].tolist() == [0] * 3 + [100] * 3
    assert observed["state"].shape == (3, 6)
    assert simulator.instructions() == ["lift it"] * 3
    assert simulator.render(torch.tensor([2])).shape == (1, 4, 4, 3)
    assert IsaacLab(1, task=TASK).observation_spec["rgb"].shape == (200, 200, 6)


def test_the_generators_of_the_process_go_on_as_if_nobody_had_seeded_them():
    simulator = IsaacLab(2, task=TASK, image_size=4)
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    begin(simulator, [3, 3])
    simulator.restore(simulator.save(), torch.arange(2))
    assert torch.equal(torch.rand(2), expected)


def test_rewards_are_the_tasks_or_whether_it_is_solved():
    actions = torch.tensor([[0.0, 0.0, 25.0], [0.0, 0.0, 0.0]])
    dense, sparse = (IsaacLab(2, task=TASK, reward=reward, image_size=4) for reward in ("dense", "sparse"))
    for simulator in (dense, sparse):
        begin(simulator, [1, 2])
    assert (dense.step(actions, everyone(dense)).reward > torch.tensor([20.0, 0.0])).all()
    assert sparse.step(actions, everyone(sparse)).reward.tolist() == [1, 0]
    silent = IsaacLab(2, task=TASK, success=None, image_size=4)
    begin(silent, [1, 2])
    assert silent.step(actions, everyone(silent)).success is None


def test_wrong_options_and_a_missing_package_are_said(monkeypatch):
    with pytest.raises(WrongOption, match=r"terminations.*'sucess'"):
        IsaacLab(1, task=TASK, success="sucess")
    with pytest.raises(WrongOption, match=r"needs.*termination"):
        IsaacLab.check_options({"task": TASK, "reward": "sparse", "success": None})
    with pytest.raises(WrongOption, match="greater than 0"):
        IsaacLab.check_options({"task": TASK, "bound": 0.0})
    isaaclab._launched.cache_clear()
    missing(monkeypatch, "isaaclab")
    with pytest.raises(CannotSimulate, match=r"installed:.*'isaacsim.*isaaclab\.sh"):
        IsaacLab(1, task=TASK)
