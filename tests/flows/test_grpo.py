"""The GRPO flow: who gets what from whom, how much of it overlaps, and that what it does can be repeated."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools

import numpy as np
import pytest

from rlinf import ActorSystem, Stream
from rlinf.actors.rollout import Rollout
from rlinf.algos.algorithms import DynamicSampling
from rlinf.data.datasets.toy_tasks import PromptStream, make_task
from rlinf.data.step import Step
from rlinf.data.tokenizer import load_tokenizer
from rlinf.flows.grpo import grpo
from rlinf.flows.text import filled, generate
from rlinf.runtime.actor.actor import Actor, endpoint
from rlinf.runtime.base.clock import run_virtual
from tests.actors import toys
from tests.flows.scripted import Scripted, prompt

EVEN, UNEVEN = [1.0, 1.0], [0.0, 1.0]


class Judge(Actor):
    """Takes a second for each group, several at a time; what the rollout gave stays."""

    @endpoint
    async def score(self, group):
        await asyncio.sleep(1.0)
        return group


class Reference(Actor):
    """Takes a second for each group, one at a time."""

    async def setup(self, column):
        self.column, self.followed = column, []

    @endpoint
    async def logprobs(self, groups):
        async for group in groups:
            await asyncio.sleep(1.0)
            yield group.with_column(self.column, [np.zeros(1, np.float32) for _ in group.samples])

    @endpoint
    async def follow(self, weights):
        self.followed.append(weights)

    @endpoint
    async def told(self):
        return self.followed


class Trainer(Actor):
    """Takes a second for each group, one at a time; its ranks answer as one."""

    async def setup(self):
        self.groups, self.published = [], 0

    @endpoint(joint=True)
    async def train(self, groups):
        if self.rank == 0:
            self.groups += [group async for group in slowly(groups)]
        return {"loss": 0.5}

    @endpoint(joint=True)
    async def weights(self):
        self.published += 1
        return f"weights {self.published}" if self.rank == 0 else None

    @endpoint(joint=True)
    async def learned(self):
        return self.groups


async def slowly(groups):
    async for group in groups:
        await asyncio.sleep(1.0)
        yield group


class Answering(Scripted):
    """Writes its rank into the versions of what it answers."""

    @endpoint
    async def generate(self, prompts, n=2):
        async for made in super().generate(prompts, n):
            own = [dataclasses.replace(one, versions=np.array([self.rank], np.int32)) for one in made.samples]
            yield dataclasses.replace(made, samples=tuple(own))


def play(scene, rewards, *, hosts=1):
    """Run a scene with all five roles in virtual time; a prompt of id i is answered after i + 1 seconds."""

    async def main():
        last = hosts - 1
        async with ActorSystem.local(hosts, serialize=hosts > 1) as system:
            seconds = [number + 1.0 for number in range(len(rewards))]
            rollout = await system.spawn(Scripted, hosts=[last, 0], name="rollout", seconds=seconds, rewards=rewards)
            judge = await system.spawn(Judge, hosts=[0], name="judge")
            reference = await system.spawn(Reference, hosts=[last, 0], name="reference", column="ref_logprobs")
            teacher = await system.spawn(Reference, hosts=[last], name="teacher", column="teacher_logprobs")
            trainer = await system.spawn(Trainer, hosts=[0, last], name="trainer")
            return await scene(rollout, judge, trainer, reference, teacher)

    return run_virtual(main())


@pytest.mark.parametrize("hosts", [1, 2])
def test_every_role_works_while_others_still_do(hosts):
    async def scene(rollout, judge, trainer, reference, teacher):
        step = Step(0, Stream.of([prompt(n) for n in range(4)]), 2)
        metrics = await grpo(step, rollout, judge, trainer, reference[:1], teacher)
        return metrics, await trainer.learned()

    (metrics, learned), seconds = play(scene, [UNEVEN, EVEN, EVEN, UNEVEN], hosts=hosts)
    assert seconds == 4.0 + 4 * 1.0  # the last answer comes after 4 s, and goes through four more hands
    assert metrics == {"loss": 0.5}
    assert [group.prompt.id for group in learned] == [0, 1, 2, 3]
    told = [set(sample.per_token) for group in learned for sample in group.samples]
    assert told == [{"ref_logprobs", "teacher_logprobs"}] * 8


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("moving", [False, True])
def test_weights_are_published_once_for_all_who_take_them_over(hosts, moving):
    async def scene(rollout, judge, trainer, reference, teacher):
        for index in range(2):
            step = Step(index, Stream.of([prompt(0), prompt(1)]), 2, moving_reference=moving)
            await grpo(step, rollout, judge, trainer, reference)
        return await rollout.told(), await reference.told()

    (logs, followed), _ = play(scene, [UNEVEN, UNEVEN], hosts=hosts)
    for log in logs:
        assert [line for line in log if "loads" in line] == ["loads weights 1", "loads weights 2"]
    assert followed == [["weights 1", "weights 2"] if moving else []] * 2


def test_with_dynamic_sampling_only_groups_of_unequal_rewards_are_learned_from():
    async def scene(rollout, judge, trainer, reference, teacher):
        rest = iter(range(3, 6))

        async def draw(count):
            return [prompt(next(rest)) for _ in range(count)]

        prompts = [prompt(n) for n in range(3)]
        step = Step(0, prompts, 2, prompts_per_step=3, sampling=DynamicSampling(), draw=draw)
        metrics = await grpo(step, rollout, judge, trainer, reference)
        return metrics, await trainer.learned()

    (metrics, learned), _ = play(scene, [EVEN, UNEVEN, UNEVEN, EVEN, UNEVEN, EVEN])
    assert [group.prompt.id for group in learned] == [1, 2, 4]
    assert (metrics["loss"], metrics["sampling/rounds"], metrics["sampling/kept"]) == (0.5, 2.0, 3.0)


# With a real rollout -------------------------------------------------------------------------------------------------

TASK = make_task("copy", digits=2)
TOKENIZER = load_tokenizer(TASK.tokenizer)


async def judged(groups):
    """Half of the answers are right, whatever they are, but for one prompt in three."""
    async for group in groups:
        rewards = [float(group.prompt.id % 3 > 0 and sample.index % 2) for sample in group.samples]
        samples = [dataclasses.replace(s, reward=r, outcome="ok") for s, r in zip(group.samples, rewards, strict=True)]
        yield dataclasses.replace(group, samples=tuple(samples))


async def two_steps(pause):
    """The bits of all that two steps with dynamic sampling learn from, if learning from a group takes so long."""
    async with ActorSystem.local() as system:
        shared = {"model": toys.configuration(), "tokenizer": TASK.tokenizer}
        rollout = await system.spawn(Rollout, **shared, max_new_tokens=50, max_rows=8)
        supply = PromptStream(TASK.train, TOKENIZER, seed=0)

        async def draw(count):
            return supply.take(count)

        def answers(prompts):
            return Stream.of(judged(rollout.generate(prompts, n=4)))

        found = []
        for index in range(2):
            batch = filled(Step(index, supply.take(8), 4, 8, DynamicSampling(), draw), answers)
            async for group in batch.groups:
                await asyncio.sleep(pause)
                found += [(s.group, s.index, s.response_ids.tobytes(), s.logprobs.tobytes()) for s in group.samples]
            found.append(sorted(batch.metrics.items()))
        return found


async def test_steps_repeat_bit_for_bit_however_far_generation_had_come_when_it_was_stopped():
    expected = await two_steps(0.0)
    assert len(expected) == 2 * (8 * 4 + 1)
    for pause in (0.003, 0.01):
        assert await two_steps(pause) == expected


@pytest.mark.parametrize("sampling", [None, DynamicSampling(max_rounds=3)])
def test_dealt_prompts_are_answered_by_the_rank_whose_turn_they_are_however_long_it_takes(sampling):
    async def who_answers(seconds):
        rewards = [UNEVEN, EVEN, UNEVEN, UNEVEN, UNEVEN, EVEN]
        numbers = iter(range(6))

        async def draw(count):
            return [prompt(number) for number in itertools.islice(numbers, count)]

        async with ActorSystem.local(2, serialize=True) as system:
            rollout = await system.spawn(Answering, name="rollout", seconds=seconds, rewards=rewards)
            deal = await draw(4)
            more = {"prompts_per_step": 4, "sampling": sampling, "draw": draw}
            step = Step(0, Stream.of(deal), 2, deal=deal, **more)
            batch = filled(step, functools.partial(generate, step, rollout))
            return {group.id: group.samples[0].versions[0] for group in await batch.groups.collect()}

    dealt = {0: 0, 2: 0, 3: 1, 4: 0} if sampling else {0: 0, 1: 1, 2: 0, 3: 1}
    for seconds in ([1.0] * 6, [9.0, 1.0, 9.0, 1.0, 9.0, 1.0], [1.0, 9.0, 1.0, 1.0, 2.0, 3.0]):
        assert run_virtual(who_answers(seconds))[0] == dealt
