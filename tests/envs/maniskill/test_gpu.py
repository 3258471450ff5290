"""Simulators on GPUs are on the GPU of the process that has them made, in whichever thread or child that happens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rlinf.envs import maniskill
from rlinf.envs.maniskill import ManiSkillBatched
from rlinf.envs.workers import EnvironmentPool
from rlinf.runtime.base.tensors import choose_device
from tests.cards import pretend


@pytest.fixture
def made(monkeypatch):
    """What ManiSkill was asked for, and on which GPU the thread was that asked."""
    asked = []

    def make(**arguments):
        asked.append(arguments | {"thread": torch.cuda.current_device()})
        return SimpleNamespace(close=lambda: None)

    spec = SimpleNamespace(default_kwargs={}, max_episode_steps=7, cls=make)
    monkeypatch.setattr(maniskill, "find", lambda *about: spec)
    monkeypatch.setattr(maniskill, "_refuse_missing", lambda *about: None)
    monkeypatch.setattr(maniskill, "observation_spec", lambda env: {})
    monkeypatch.setattr(maniskill, "action_spec", lambda env, name: None)
    monkeypatch.setattr(maniskill, "can_draw", lambda: True)
    monkeypatch.setattr(maniskill, "quicken", lambda: None)
    return asked


def test_it_simulates_and_draws_on_the_gpu_of_its_process(made, monkeypatch):
    pretend(monkeypatch, rank=3)
    simulator = ManiSkillBatched(4, id="PullCube-v1", observe="rgb")
    assert simulator.device == torch.device("cuda", 3)
    (asked,) = made
    backends = asked["sim_backend"], asked["render_backend"], asked["num_envs"]
    assert backends == ("physx_cuda:3", "sapien_cuda:3", 4)
    assert asked["thread"] == 3, "what PhysX does not say the device of is on the current one"


def test_on_the_cpu_it_names_no_gpu(made, monkeypatch):
    pretend(monkeypatch, rank=3)
    maniskill.make(maniskill.Task(id="PullCube-v1", observe="rgb"), 1, "physx_cpu")
    assert (made[0]["sim_backend"], made[0]["render_backend"]) == ("physx_cpu", "cpu")


async def test_in_a_thread_of_its_process_it_is_on_the_same_gpu(made, monkeypatch):
    pretend(monkeypatch, rank=3)
    async with EnvironmentPool(ManiSkillBatched, {"id": "PullCube-v1"}, num_envs=2, workers=0):
        assert (made[0]["sim_backend"], made[0]["thread"]) == ("physx_cuda:3", 3)


async def test_worker_processes_are_told_which_gpu_is_that_of_their_parent(monkeypatch):
    pretend(monkeypatch, rank=None)
    choose_device(5)
    async with EnvironmentPool("tests.envs.on_a_card.OnACard", num_envs=1, workers=1) as pool:
        assert pool.max_steps == 5


class Batched:
    """ManiSkill's batched interface, of three environments whose state is one number, drawn as a picture."""

    single_action_space = SimpleNamespace(shape=(1,), low=[-1.0], high=[1.0])

    def __init__(self):
        self.place = torch.zeros(3)
        self.agent = SimpleNamespace()

    def get_obs(self):
        picture = self.place.byte()[:, None, None, None].expand(3, 2, 2, 3).clone()
        numbers = {"agent": {"place": self.place.clone()[:, None]}, "extra": {}}
        return {**numbers, "sensor_data": {"3rd_view_camera": {"rgb": picture, "segmentation": picture[..., :1]}}}

    @property
    def _init_raw_obs(self):
        return self.get_obs()

    def reset(self, seed, options):
        generator = torch.Generator().manual_seed(seed[0])  # a start depends on what else is reset, as with ManiSkill
        self.place[options["env_idx"]] = torch.randint(100, (len(options["env_idx"]),), generator=generator).float()
        return self.get_obs(), {}

    def step(self, action):
        self.place = self.place + action[:, 0]
        solved = self.place > 1000
        return self.get_obs(), solved.float(), solved, torch.zeros(3, dtype=torch.bool), {"success": solved}

    def get_state_dict(self):
        return {"actors": {"cube": self.place.clone()[:, None]}}

    def set_state_dict(self, state, env_ids):
        self.place[env_ids] = state["actors"]["cube"][:, 0]

    def get_language_instruction(self):
        return ["put carrot on plate", "put spoon on plate", "put carrot on plate"]

    def render_rgb_array(self):
        return self.get_obs()["sensor_data"]["3rd_view_camera"]["rgb"]

    def close(self):
        pass


@pytest.fixture
def batched(monkeypatch):
    """A simulator over the stand-in, whose device is the CPU."""
    spec = SimpleNamespace(default_kwargs={}, max_episode_steps=80, cls=lambda **arguments: Batched())
    monkeypatch.setattr(maniskill, "find", lambda *about: spec)
    monkeypatch.setattr(maniskill, "_refuse_missing", lambda *about: None)
    monkeypatch.setattr(maniskill, "can_draw", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(maniskill, "enter_device", lambda: torch.device("cpu"))
    return ManiSkillBatched(3, id="PutOnPlateInScene25Main-v3", observe="rgb", pictures=True)


def test_tasks_whose_code_resets_all_or_none_are_known_and_others_are_said(batched):
    assert batched.resets_together
    assert not ManiSkillBatched(3, id="PutOnPlateInScene25Main-v3", resets_together=False).resets_together
    assert not ManiSkillBatched(3, id="PullCube-v1").resets_together
    assert ManiSkillBatched(3, id="PullCube-v1", resets_together=True).resets_together


def test_a_batch_is_reset_in_part_and_members_of_a_group_take_over_its_start(batched):
    assert (batched.max_steps, batched.observation_spec["rgb"].shape) == (80, (2, 2, 3))
    first = batched.reset(torch.tensor([4, 4, 9]), torch.arange(3))["state"][:, 0]
    assert first[0] == first[1] != first[2]
    moved = batched.step(torch.tensor([[1.0], [0.5], [0.25]]), torch.ones(3, dtype=torch.bool))
    again = batched.reset(torch.tensor([4]), torch.tensor([1]))
    assert again["state"].shape == (1, 1)
    assert again["rgb"].shape == (1, 2, 2, 3)
    after = batched.step(torch.zeros(3, 1), torch.ones(3, dtype=torch.bool)).observation["state"][:, 0]
    assert after[[0, 2]].tolist() == moved.observation["state"][[0, 2], 0].tolist(), "the others did not notice"
    assert after[1] == again["state"][0, 0]


def test_a_batch_tells_its_words_success_and_pictures_and_goes_on_from_saved_states(batched):
    batched.reset(torch.tensor([1, 2, 3]), torch.arange(3))
    assert batched.instructions()[:2] == ["put carrot on plate", "put spoon on plate"]
    saved = batched.save()
    moved = batched.step(torch.tensor([[2000.0], [0.0], [1.0]]), torch.ones(3, dtype=torch.bool))
    assert moved.success.tolist() == moved.terminated.tolist() == [True, False, False]
    batched.restore([saved[2], saved[0]], torch.tensor([0, 2]))
    back = batched.render(torch.arange(3))[:, 0, 0, 0]
    assert back.tolist() == [int(saved[env]["bodies"]["actors"]["cube"].item()) for env in (2, 1, 0)]
