"""`python -m benchmarks.embodied_learning`: policies that begin with demonstrations get better by acting."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.embodied_learning import improved
from benchmarks.embodied_learning_cases import CASES, Expert, SparseReach, shrunk
from benchmarks.embodied_learning_run import outcome
from rlinf.actors.env import EnvActor
from rlinf.envs.toy import NEAR, Reach
from rlinf.flows.evaluate import trials
from rlinf.runtime.system.system import ActorSystem
from tests.launching import launch


def test_a_sparse_reward_is_one_where_the_task_is_solved_and_nothing_else_changes() -> None:
    dense, sparse = Reach(32, dims=2), SparseReach(32, dims=2)
    everybody, active = torch.arange(32), torch.ones(32, dtype=torch.bool)
    for simulator in (dense, sparse):
        simulator.reset(torch.arange(32), everybody)
    draw = torch.Generator().manual_seed(0)
    rewards = []
    for _ in range(20):
        actions = torch.rand(32, 2, generator=draw) * 0.5 - 0.25
        mine, theirs = sparse.step(actions, active), dense.step(actions, active)
        point, target = mine.observation["state"].chunk(2, 1)
        assert torch.equal(mine.reward, ((point - target).abs() <= NEAR).all(1).float())
        assert torch.equal(mine.observation["state"], theirs.observation["state"])
        assert torch.equal(mine.terminated, theirs.terminated)
        rewards.append(mine.reward)
    assert 0 < torch.stack(rewards).mean() < 1


async def test_the_script_solves_every_episode_in_time() -> None:
    case = CASES["mlp-grpo"]
    async with ActorSystem.local() as system:
        env = await system.spawn(
            EnvActor, name="env", simulator=case.simulator, options=dict(case.options), num_envs=64, workers=0,
            max_steps=case.max_steps, auto_reset=False,
        )  # fmt: skip
        episodes = await trials(env, await system.spawn(Expert, name="expert"), 64)
    assert all(episode.success_once and episode.total == 1.0 for episode in episodes)
    assert max(episode.length for episode in episodes) <= 8  # the world is 8 actions wide


def test_grpo_on_a_sparse_reward_improves_on_a_start_from_demonstrations(tmp_path: Path) -> None:
    found = asyncio.run(outcome("mlp-grpo", CASES["mlp-grpo"], 1, tmp_path, 64))
    assert 0.2 < found.before < 0.8
    assert improved(found)
    assert found.env_steps == sum(1 for _ in found.curve) * 12 * 128  # every decision is one step, and none is lost


def test_a_vla_goes_through_the_same_steps(tmp_path: Path) -> None:
    case = replace(shrunk(CASES["vla-ppo"]), demonstrations=8)
    found = asyncio.run(outcome("vla-ppo", case, 0, tmp_path, 8))
    assert 1e5 < found.parameters < 1e6
    assert len(found.curve) == 2
    again = asyncio.run(outcome("vla-ppo", case, 0, tmp_path / "again", 8))
    assert (again.before, again.after, again.curve) == (found.before, found.after, found.curve)


def test_a_configuration_by_grpo_learns_from_nothing(tmp_path: Path) -> None:
    launch("--config", "configs/embodied/toy_grpo.yaml", f"output_dir={tmp_path}", "steps=15", "trace=false")
    solved = [
        line["evaluation/success_once"]
        for line in map(json.loads, (tmp_path / "toy-grpo" / "metrics.jsonl").read_text().splitlines())
        if "evaluation/success_once" in line
    ]
    assert solved[0] < 0.2
    assert solved[-1] > 0.8
