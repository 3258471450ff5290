"""A flow on text with something in flight: answers for the next step are generated while this one is learned from."""

from __future__ import annotations

import asyncio

import pytest

from rlinf.data.in_flight import InFlight, Rules
from rlinf.data.step import Step
from rlinf.flows.grpo_async import grpo_async
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
