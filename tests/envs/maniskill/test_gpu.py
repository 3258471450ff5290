"""Simulators on GPUs are on the GPU of the process that has them made, in whichever thread or child that happens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rlinf.envs.maniskill import fast_poses, headless, tasks
from rlinf.envs.maniskill.gpu import ManiSkillBatched
from rlinf.envs.pool import EnvironmentPool
from rlinf.runtime.gpu.own_device import choose_device
from tests.cards import pretend


@pytest.fixture
def made(monkeypatch):
    """What ManiSkill was asked for, and on which GPU the thread was that asked."""
    asked = []

    def make(**arguments):
        asked.append(arguments | {"thread": torch.cuda.current_device()})
        return SimpleNamespace(close=lambda: None)

    spec = SimpleNamespace(default_kwargs={}, max_episode_steps=7, cls=make)
    monkeypatch.setattr(tasks, "find", lambda *about: spec)
    monkeypatch.setattr(tasks, "_refuse_missing", lambda *about: None)
    monkeypatch.setattr(tasks, "observation_spec", lambda env: {})
    monkeypatch.setattr(tasks, "action_spec", lambda env, name: None)
    monkeypatch.setattr(headless, "can_draw", lambda: True)
    monkeypatch.setattr(fast_poses, "quicken", lambda: None)
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
    tasks.make(tasks.Task(id="PullCube-v1", observe="rgb"), 1, "physx_cpu")
    assert (made[0]["sim_backend"], made[0]["render_backend"]) == ("physx_cpu", "cpu")


async def test_in_a_thread_of_its_process_it_is_on_the_same_gpu(made, monkeypatch):
    pretend(monkeypatch, rank=3)
    async with EnvironmentPool(ManiSkillBatched, {"id": "PullCube-v1"}, num_envs=2, workers=0):
        assert (made[0]["sim_backend"], made[0]["thread"]) == ("physx_cuda:3", 3)


@pytest.mark.parametrize("index", [0, 5])
async def test_worker_processes_are_told_which_gpu_is_that_of_their_parent(monkeypatch, index):
    pretend(monkeypatch, rank=None)
    choose_device(index)
    async with EnvironmentPool("tests.envs.on_a_card.OnACard", num_envs=2, workers=2) as pool:
        assert pool.max_steps == index
