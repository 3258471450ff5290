"""The plain loop of `benchmarks.embodied` does what our flow does."""

import asyncio
import subprocess
import sys

import pytest
import torch

from benchmarks import embodied_cartpole, embodied_plain
from benchmarks.embodied import overlaps
from benchmarks.embodied_overhead import overhead
from benchmarks.embodied_plain import Job, Loop
from benchmarks.grpo_turns import processor_seconds
from rlinf.actors.env import EnvActor
from rlinf.actors.policy import PolicyActor
from rlinf.actors.policy_trainer import PolicyTrainer
from rlinf.data.step import EmbodiedStep
from rlinf.envs.toy import Reach
from rlinf.flows.embodied import embodied
from rlinf.runtime.system.system import ActorSystem

JOB = Job(
    options={}, policy={"type": "mlp", "hidden": [16], "state_size": 2, "action_size": 1}, seed=3, steps=3, num_envs=8,
    workers=1, horizon=10, epochs=2, minibatch=30, kl_stop=None, gamma=0.9, lam=0.8, lr=1e-3, grad_clip=0.5,
)  # fmt: skip
PPO = {
    "advantage.gamma": 0.9, "advantage.lam": 0.8, "loss.dual_clip": None, "critic.clip": None, "critic.error": "square",
}  # fmt: skip


class Reaching:
    """The toy in the place of worker processes; nothing ends before the horizon."""

    def __init__(self, job, simulator):
        self.simulator = Reach(job.num_envs)
        self.all = torch.arange(job.num_envs)

    def reset(self, seeds):
        return self.simulator.reset(torch.from_numpy(seeds), self.all)["state"]

    def step(self, actions):
        scaled = self.simulator.action_spec.scaled(torch.from_numpy(actions))
        found = self.simulator.step(scaled, torch.ones_like(self.all, dtype=torch.bool))
        return [found.observation["state"], found.reward]


async def our_run():
    async with ActorSystem.local() as system:
        roles = {
            "env": await system.spawn(
                EnvActor, name="env", simulator="rlinf.envs.toy.Reach", num_envs=8, workers=0, slices=2, seed=3,
                ignore_terminations=True, max_steps=10,
            ),
            "policy": await system.spawn(PolicyActor, name="policy", policy=JOB.policy),
            "trainer": await system.spawn(
                PolicyTrainer, name="trainer", policy=JOB.policy, algorithm={"name": "ppo", "overrides": PPO}, seed=3,
                lr=JOB.lr, epochs=JOB.epochs, minibatch=JOB.minibatch, grad_clip=JOB.grad_clip,
            ),
        }  # fmt: skip
        means = [(await embodied(EmbodiedStep(index, 10, 2), **roles))["reward/mean"] for index in range(3)]
        return means, dict((await roles["trainer"].weights()).named())


def test_the_plain_loop_learns_what_our_flow_learns(monkeypatch):
    monkeypatch.setattr(embodied_plain, "Workers", Reaching)
    loop = Loop(JOB, "ours")
    means = [loop.round(index) for index in range(JOB.steps)]
    ours, weights = asyncio.run(our_run())
    assert means == pytest.approx(ours, abs=1e-4)
    for name, tensor in loop.policy.state_dict().items():
        torch.testing.assert_close(weights[name], tensor, atol=2e-4, rtol=1e-3, msg=lambda text, name=name: name + text)


def test_the_flow_overlaps_as_far_as_its_stages_allow():
    assert [line.verdict for line in overlaps(horizon=20)] == ["pass"] * 3


def test_overhead_is_measured_around_nothing():
    found = overhead(4, 2, steps=1, workers=0, horizon=5)
    assert found.cpu > 0
    assert 0 < found.wall < 1


def test_cleanrls_loop_gets_better_at_cartpole():
    torch.manual_seed(0)
    loop = embodied_cartpole.Loop(seed=1, steps=8, sizes=embodied_cartpole.Sizes())
    before = embodied_cartpole.judged(loop, "CartPole-v1", 8, seed=1)
    for index in range(8):
        loop.step(index)
    assert embodied_cartpole.judged(loop, "CartPole-v1", 8, seed=1) > 2 * before


def test_the_processor_time_of_a_turn_is_that_of_all_its_processes():
    burn = "import sys, time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\nsys.stdin.read()"
    with subprocess.Popen(["sh", "-c", f'{sys.executable} -c "{burn}"; :'], stdin=-1, stdout=-1) as shell:
        shell.stdout.readline()
        assert processor_seconds(shell.pid) >= 0.28  # its child's, as its own is nothing; in whole ticks of the clock
        shell.stdin.close()
