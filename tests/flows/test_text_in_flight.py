"""A flow on text with something in flight: answers for the next step are generated while this one is learned from."""

from __future__ import annotations

import asyncio

import pytest

from rlinf.data.in_flight import InFlight
from rlinf.data.step import Step
from rlinf.runtime.actor.actor import Actor, endpoint
from rlinf.runtime.base.clock import run_virtual
from rlinf.runtime.system.system import ActorSystem
from tests.flows.scripted import Scripted, prompt
from tests.flows.test_grpo import Judge

UNEVEN = [0.0, 1.0]


class Trainer(Actor):
    """Takes five seconds for a batch."""

    async def setup(self):
        self.learned, self.version = [], 0

    @endpoint(joint=True)
    async def train(self, groups):
        await asyncio.sleep(5.0)
        self.learned += [group.prompt.id for group in groups]
        self.version += 1
        return {"loss": 0.5}

    @endpoint(joint=True)
    async def weights(self):
        return f"weights {self.version}"

    @endpoint(joint=True)
    async def told(self):
        return self.learned


async def grpo_in_flight(step, rollout, judge, trainer):
    """`flows.grpo`, one step behind."""

    async def answered(step):
        return [group async for group in judge.score.map(rollout.generate(step.prompts, n=step.group_size))]

    groups = await step.in_flight.next_batch(step, answered, rollout)
    metrics = await trainer.train(groups)
    await step.in_flight.publish(rollout, trainer.weights())
    return metrics


@pytest.mark.parametrize(("staleness", "expected"), [(0, 4 * (3.0 + 1.0 + 5.0)), (1, 3.0 + 1.0 + 4 * 5.0)])
def test_generation_goes_on_beside_training_and_weights_change_between_steps(staleness, expected):
    async def main():
        async with ActorSystem.local() as system:
            rollout = await system.spawn(Scripted, name="rollout", seconds=[3.0] * 8, rewards=[UNEVEN] * 8)
            judge = await system.spawn(Judge, name="judge")
            trainer = await system.spawn(Trainer, name="trainer")

            async def draw(index):
                prompts = [prompt(2 * index), prompt(2 * index + 1)]
                return Step(index, prompts, 2, until=4, in_flight=in_flight)

            in_flight = InFlight(staleness, draw=draw)
            for index in range(4):
                await grpo_in_flight(await in_flight.step(index), rollout, judge, trainer)
            await in_flight.close()
            return await trainer.told(), (await rollout.told())[0]

    (learned, log), seconds = run_virtual(main())
    assert seconds == expected
    assert learned == list(range(8))
    assert [line for line in log if "loads" in line][-1] == "loads weights 4"
    loaded = log.index("loads weights 1")
    assert log[:loaded].count("ended") == 1 + staleness  # no batch has answers of two versions
    assert log[:loaded].count("began") == 1 + staleness
