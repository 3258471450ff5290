"""A mixture of tasks is a simulator like any other, and which task an episode is of follows from its seed."""

from __future__ import annotations

import pytest
import torch

from rlinf.envs.environment import Environment, Rules
from rlinf.envs.toy import Reach
from rlinf.envs.workers import EnvironmentPool
from rlinf.envs.wrappers import Mixture
from rlinf.runtime.processes.supervisor import ChildDied
from tests.envs.breaking import Mortal, NotFinite
from tests.envs.protocol import ProtocolSuite, begin, everyone

TASKS = [{"name": "still", "weight": 3}, {"name": "windy", "options": {"wind": True, "max_steps": 4}}]


class TestMixture(ProtocolSuite):
    def make(self, num_envs):
        return Mixture(num_envs, simulator=Reach, tasks=TASKS, options={"dims": 2})

    steps = 2  # within three a random walk may be there


def test_tasks_are_drawn_by_their_weights_and_groups_share_them():
    mixture = Mixture(8, simulator=Reach, tasks=TASKS)
    drawn = [mixture.task_of(seed) for seed in range(4000)]
    assert sum(drawn) / len(drawn) == pytest.approx(0.25, abs=0.03)  # 4 standard deviations
    assert [mixture.task_of(seed) for seed in range(4000)] == drawn
    Environment(mixture, Rules(group_size=4)).reset(5)
    names = mixture.tasks()
    assert names[:4] == [names[0]] * 4
    assert names[4:] == [names[4]] * 4
    mixture.weigh([0.0, 1.0])
    assert {mixture.task_of(seed) for seed in range(100)} == {1}


def test_each_row_is_that_of_its_own_task_and_ends_by_its_limit():
    mixture = Mixture(12, simulator=Reach, tasks=TASKS)
    parts = {"still": Reach(12), "windy": Reach(12, wind=True, max_steps=4)}
    seeds = list(range(10, 22))
    seen = begin(mixture, seeds)
    for part in parts.values():
        begin(part, seeds)
    names = mixture.tasks()
    assert set(names) == set(parts)
    actions = torch.full((12, 1), 0.01)
    for step in range(1, 5):
        moved = mixture.step(actions, everyone(mixture))
        told = {name: part.step(actions, everyone(part)) for name, part in parts.items()}
        for row, name in enumerate(names):
            assert torch.equal(moved.observation["state"][row], told[name].observation["state"][row])
            assert moved.reward[row] == told[name].reward[row]
            assert moved.success[row] == told[name].success[row]
            assert bool(moved.truncated[row]) == (name == "windy" and step == 4)
    assert seen.keys() == {"state"}


def test_episodes_tell_their_task():
    environment = Environment(Mixture(8, simulator=Reach, tasks=TASKS, options={"words": True}), Rules(max_steps=2))
    environment.reset(0)
    names = environment.simulator.tasks()
    assert [episode.task for episode in environment.step(torch.zeros(8, 2, 1)).episodes] == names


def test_tasks_that_one_policy_could_not_act_in_are_refused():
    with pytest.raises(ValueError, match=r"tasks.*1 differ"):
        Mixture(2, simulator=Reach, tasks=[{"name": "flat"}, {"options": {"dims": 2}}])


def test_tasks_that_reset_all_environments_together_are_refused(monkeypatch):
    monkeypatch.setattr(Reach, "resets_together", True)
    with pytest.raises(ValueError, match=r"environments together"):
        Mixture(2, simulator=Reach, tasks=TASKS)


async def test_new_weights_hold_in_all_slices_and_processes(monkeypatch):
    monkeypatch.setattr("rlinf.envs.workers.Worker", Mortal)
    options = {"simulator": Reach, "tasks": TASKS}
    async with EnvironmentPool(Mixture, options, num_envs=4, workers=1, rules=Rules(max_steps=2)) as pool:
        (whole,) = pool.slices
        await whole.reset()
        await whole.weigh([0.0, 1.0])
        pool._workers[0].fates = [("step", ChildDied)]
        assert (await whole.step(torch.zeros(4, 2, 1))).lost.all()
        chunk = await whole.step(torch.zeros(4, 2, 1))
        assert [episode.task for episode in chunk.episodes] == ["windy"] * 4


def test_what_mixes_no_tasks_says_so():
    with pytest.raises(NotImplementedError, match=r"NotFinite mixes.*tasks:.*env.tasks"):
        NotFinite(1).weigh([1.0])
