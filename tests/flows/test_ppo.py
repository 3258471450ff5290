"""The PPO flow: who is told what in which order, with scripted roles in virtual time; and that it learns."""

import asyncio

import numpy as np
import pytest

from rlinf import Actor, ActorSystem, Stream, endpoint
from rlinf.actors.critic import Critic
from rlinf.actors.judge import Judge
from rlinf.actors.rollout import Rollout
from rlinf.actors.trainer import Trainer
from rlinf.algos.algorithms import DynamicSampling
from rlinf.data.datasets.toy_tasks import PromptStream, make_task
from rlinf.data.sample import Group, Prompt, Sample
from rlinf.data.step import Step
from rlinf.data.tokenizer import load_tokenizer
from rlinf.flows.ppo import ppo
from rlinf.runtime.base.clock import run_virtual
from rlinf.runtime.streams.stream import each


def prompts(*numbers):
    return [Prompt(number, np.array([3])) for number in numbers]


class Role(Actor):
    """Works for given seconds and writes down when it did what."""

    async def setup(self, log, seconds=1.0):
        self.log, self.seconds = log, seconds

    async def did(self, what):
        self.log.append((asyncio.get_running_loop().time(), what))


class ScriptedRollout(Role):
    @endpoint
    async def generate(self, asked, n):
        async for prompt in each(asked):
            await asyncio.sleep(self.seconds)
            ids = np.arange(3)
            zeros, versions = np.zeros(3, np.float32), np.zeros(3, np.int32)
            yield Group(prompt, tuple(Sample(prompt, i, ids, zeros, versions, "", False) for i in range(n)))

    @endpoint(joint=True)
    async def load(self, weights):
        await self.did(f"rollout: {weights}")
        return 0


class ScriptedJudge(Role):
    @endpoint
    async def score(self, group):
        return Group(
            group.prompt,
            tuple(s.judged(float(s.index if group.prompt.id != 1 else 0), "ok", scores={}) for s in group.samples),
        )


class ScriptedReference(Role):
    @endpoint
    async def logprobs(self, groups):
        async for group in groups:
            yield group.with_column("ref_logprobs", [np.zeros(3, np.float32) for _ in group.samples])

    @endpoint(joint=True)
    async def follow(self, weights):
        await self.did(f"reference: {weights}")


class Learner(Role):
    """Reads its batch, then learns for its seconds."""

    batch: list

    @endpoint
    async def values(self, groups):
        async for group in groups:
            await asyncio.sleep(0.1)
            yield group.with_column("values", [np.full(3, 0.5, np.float32) for _ in group.samples])

    @endpoint(joint=True)
    async def train(self, groups):
        self.batch = [group async for group in groups]
        await self.did(f"{self.group.names[0]} begins")
        await asyncio.sleep(self.seconds)
        await self.did(f"{self.group.names[0]} ends")
        return {f"{self.group.names[0]}/groups": float(len(self.batch)), "reward/mean": 0.5}

    @endpoint
    async def seen(self):
        return [(group.prompt.id, sorted(group.samples[0].per_token)) for group in self.batch]

    @endpoint(joint=True)
    async def weights(self):
        return "new"


class Failing(Learner):
    """Cannot learn."""

    @endpoint(joint=True)
    async def train(self, groups):
        await anext(aiter(groups))
        raise FloatingPointError("no number")


class Roles:
    """Scripted roles, and what they wrote down."""

    async def spawn(self, system):
        self.system, self.log = system, []
        kinds = {"rollout": ScriptedRollout, "judge": ScriptedJudge, "critic": Learner, "trainer": Learner}
        self.all = {name: await system.spawn(kind, name=name, log=self.log) for name, kind in kinds.items()}
        self.reference = await system.spawn(ScriptedReference, name="reference", log=self.log)
        return self

    @property
    def said(self):
        return [what for _, what in self.log]


def play(scene):
    """Run a scene with scripted roles in virtual time."""

    async def main():
        async with ActorSystem.local() as system:
            await scene(await Roles().spawn(system))

    run_virtual(main())


def test_critic_and_trainer_learn_at_the_same_time_from_every_group():
    async def check(roles):
        metrics = await ppo(Step(0, Stream.of(prompts(0, 2, 3)), 2), **roles.all)
        assert {name: value for name, value in metrics.items() if name.endswith("groups")} == {
            "critic[0]/groups": 3.0, "trainer[0]/groups": 3.0,
        }  # fmt: skip
        for role in ("critic", "trainer"):
            assert await roles.all[role][0].seen() == [(number, ["values"]) for number in (0, 2, 3)]
        times = {what: time for time, what in roles.log}
        assert times["critic[0] begins"] == times["trainer[0] begins"]
        assert roles.said[-1] == "rollout: new"
        assert times["rollout: new"] == times["trainer[0] ends"] == times["critic[0] ends"]

    play(check)


def test_while_the_critic_warms_up_the_policy_stays_as_it_is():
    async def check(roles):
        metrics = await ppo(Step(0, Stream.of(prompts(0, 2)), 2, critic_only=True), **roles.all)
        assert metrics["critic[0]/groups"] == 2.0
        assert roles.said == ["critic[0] begins", "critic[0] ends"]

    play(check)


def test_a_reference_is_asked_before_the_critic_and_follows_where_it_moves():
    async def check(roles):
        step = Step(0, Stream.of(prompts(0)), 2, moving_reference=True)
        await ppo(step, **roles.all, reference=roles.reference)
        assert await roles.all["critic"][0].seen() == [(0, ["ref_logprobs", "values"])]
        assert roles.said[-2:] == ["rollout: new", "reference: new"]

    play(check)


def test_groups_of_equal_rewards_are_drawn_again_where_the_algorithm_says_so():
    async def check(roles):
        async def draw(count):
            return prompts(*range(5, 5 + count))

        step = Step(0, prompts(0, 1), 2, prompts_per_step=2, sampling=DynamicSampling(3), draw=draw)
        metrics = await ppo(step, **roles.all)
        assert (metrics["sampling/rounds"], metrics["sampling/kept"]) == (2.0, 2.0)
        assert [number for number, _ in await roles.all["trainer"][0].seen()] == [0, 5]

    play(check)


def test_a_role_that_fails_fails_the_step_and_the_policy_is_not_published():
    async def check(roles):
        roles.all["trainer"] = await roles.system.spawn(Failing, name="failing", log=roles.log)
        with pytest.raises(FloatingPointError, match="no number"):
            await ppo(Step(0, prompts(0, 2), 2), **roles.all)
        assert not [what for what in roles.said if what.startswith("rollout")]

    play(check)


# Learning ------------------------------------------------------------------------------------------------------------

MODEL = {
    "model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 192, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.repeated  # with the quickstart's model in examples/ and tests/runs
async def test_copying_a_digit_is_learned_with_a_critic_on_one_device_that_all_roles_share():
    task = make_task("copy", digits=1)
    tokenizer = load_tokenizer(task.tokenizer)
    supply = PromptStream(task.train, tokenizer, 0)
    shared = {"model": MODEL, "tokenizer": task.tokenizer, "hosts": [0], "devices": [[0]]}
    learns = {"algorithm": "ppo", "lr": 1e-3, "epochs": 2}
    async with ActorSystem.local() as system:
        roles = {
            "rollout": await system.spawn(Rollout, name="rollout", max_new_tokens=2, **shared),
            "judge": await system.spawn(Judge, name="judge"),
            "critic": await system.spawn(Critic, name="critic", **shared, **learns),
            "trainer": await system.spawn(Trainer, name="trainer", **shared, **learns),
        }
        steps = [
            await ppo(Step(index, Stream.of(supply.take(64)), 4, critic_only=index < 3), **roles) for index in range(50)
        ]
    assert steps[0]["reward/mean"] < 0.3
    assert steps[-1]["reward/mean"] > 0.7
    explained = [metrics["critic/explained_variance"] for metrics in steps]
    assert min(explained) > -1.0
    assert np.mean(explained[-10:]) > 0.15
