"""A flow on text with something in flight: answers for the next step are generated while this one is learned from."""

from __future__ import annotations

import asyncio

import pytest

from rlinf.algos.algorithms import DynamicSampling
from rlinf.data.face import GroupFace, face_of
from rlinf.data.in_flight import InFlight, Rules
from rlinf.data.step import Step
from rlinf.flows.grpo_async import grpo_async
from rlinf.runtime.actor.actor import Actor, endpoint
from rlinf.runtime.base.clock import run_virtual
from rlinf.runtime.system.system import ActorSystem
from tests.data.in_flight.modelled import Books
from tests.flows.scripted import Scripted, prompt
from tests.flows.test_grpo import Judge

EVEN, UNEVEN = [1.0, 1.0], [0.0, 1.0]


class Trainer(Actor):
    """Takes five seconds for a batch."""

    async def setup(self):
        self.learned, self.version = [], 0

    @endpoint(joint=True)
    async def train(self, groups):
        batch = [group async for group in groups]
        await asyncio.sleep(5.0)
        self.learned += [group.prompt.id for group in batch]
        self.version += 1
        return {"loss": 0.5}

    @endpoint(joint=True)
    async def weights(self):
        return f"weights {self.version}"

    @endpoint(joint=True)
    async def told(self):
        return self.learned


@pytest.mark.parametrize(("staleness", "expected"), [(0, 4 * (3.0 + 1.0 + 5.0)), (1, 3.0 + 1.0 + 4 * 5.0)])
def test_generation_goes_on_beside_training(staleness, expected):
    async def main():
        async with ActorSystem.local() as system:
            rollout = await system.spawn(Scripted, name="rollout", seconds=[3.0] * 8, rewards=[UNEVEN] * 8)
            judge = await system.spawn(Judge, name="judge")
            trainer = await system.spawn(Trainer, name="trainer")
            drawn = iter(range(100))

            async def draw(count):
                return [prompt(next(drawn)) for _ in range(count)]

            in_flight = InFlight(Rules(staleness, 2), draw=draw, end=4)
            for index in range(4):
                await grpo_async(Step(index, (), 2, in_flight=in_flight), rollout, judge, trainer)
            await in_flight.close()
            return sorted(await trainer.told()), (await rollout.told())[0]

    (learned, log), seconds = run_virtual(main())
    assert seconds == expected
    assert learned == list(range(8))
    assert [line for line in log if "loads" in line] == [f"loads weights {version}" for version in (1, 2, 3, 4)]
    assert log.count("began") == 1  # one call, which goes on from step to step


class DistantJudge(Actor):
    """Its groups stay where it is."""

    @endpoint(stays=face_of)
    async def score(self, group):
        await asyncio.sleep(1.0)
        return group


async def steps_of(system, in_flight, first, last, rewards):
    """The trainer's groups, of steps whose roles are all on another host than the flow."""
    there = {"hosts": [1]}
    rollout = await system.spawn(Scripted, name="rollout", seconds=[3.0] * 16, rewards=rewards, **there)
    judge = await system.spawn(DistantJudge, name="judge", **there)
    trainer = await system.spawn(Trainer, name="trainer", **there)
    for index in range(first, last):
        await grpo_async(Step(index, (), 2, in_flight=in_flight), rollout, judge, trainer)
    return await trainer.told()


def test_groups_stay_elsewhere_are_kept_whole_by_a_checkpoint_and_go_on_from_it():
    async def main():
        drawn = iter(range(100))

        async def draw(count):
            return [prompt(next(drawn)) for _ in range(count)]

        rules, rewards = Rules(3, 2, sampling=DynamicSampling(8)), [UNEVEN, EVEN] * 8
        async with ActorSystem.local(hosts=2, serialize=True) as system:
            in_flight = InFlight(rules, draw=draw, end=4)
            before = await steps_of(system, in_flight, 0, 2, rewards)
            await asyncio.sleep(5.0)  # some are complete by now
            complete = [one for one in in_flight.entries if one.result is not None]
            kept = await in_flight.state()
            await in_flight.close()
        async with ActorSystem.local(hosts=2, serialize=True) as system:
            in_flight = InFlight(rules, draw=draw, end=4, snapshot=kept)
            after = await steps_of(system, in_flight, 2, 4, rewards)
            await in_flight.close()
            await asyncio.sleep(1.0)
            left = [key for other in system._network.systems.values() for key in other._host.values.kept]
        return before, complete, kept, after, left

    (before, complete, kept, after, left), _ = run_virtual(main())
    assert not left, "what was learned is forgotten where it was made"
    assert complete
    assert all(type(group) is GroupFace for one in complete for group in one.result)
    whole = {one.id: one.result for one in kept.entries if one.result is not None}
    assert {*whole} == {one.id for one in complete}
    assert all(group.samples[0].response_ids.tolist() == [7] for groups in whole.values() for group in groups)
    assert sorted(before + after) == [0, 2, 4, 6, 8, 10, 12, 14], "those whose rewards differ, each once"


def test_what_is_too_old_of_groups_elsewhere_is_masked():
    async def main():
        drawn = iter(range(100))

        async def draw(count):
            return [prompt(next(drawn)) for _ in range(count)]

        books = Books()
        async with ActorSystem.local(hosts=2, serialize=True) as system:
            in_flight = InFlight(Rules(1, 2), draw=draw, ledger=books, end=4)
            learned = await steps_of(system, in_flight, 0, 4, [UNEVEN] * 16)
            await in_flight.close()
        return learned, books

    (learned, books), _ = run_virtual(main())
    assert sorted(learned) == list(range(8))
    assert books.masked_tokens == 2 * 2 * 2, "all that the last two steps learned: the rollout says of all that it is 0"
