"""What is in flight between steps: nothing is lost, made twice or older than the bound, whatever takes how long."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlinf.data.in_flight import InFlight
from rlinf.data.step import Step
from rlinf.runtime.base.clock import run_virtual

WIDTH = 2
"""Prompts of a step."""


@dataclass
class Actor:
    """Makes batches by the weights that it was given last."""

    version: int = 0

    async def load(self, version):
        await asyncio.sleep(0.25)
        self.version = version


@dataclass(frozen=True)
class Batch:
    """What a step learns from."""

    index: int
    prompts: tuple
    version: int


@dataclass
class Run:
    """A run that is killed and goes on, in virtual time: what outlives a process, and what happened in each."""

    steps: int
    every: int
    making: list  # seconds, taken in turn
    learning: list
    fails: set = field(default_factory=set)  # how many batches were begun when one fails
    checkpoint: tuple = (0, 0, ())  # steps done, prompts drawn, what was in flight
    trained: list = field(default_factory=list)  # batches by step; cut back to the checkpoint where a run goes on
    made: list = field(default_factory=list)  # indices of batches that were begun, in this process
    finished: set = field(default_factory=set)  # indices of batches that are complete
    begun: int = 0

    async def go_on(self, bound, killed_after=None):
        """One process: from the last checkpoint until it is killed, fails or is done."""
        done, self.drawn, kept = self.checkpoint
        self.trained, self.made = self.trained[:done], []
        self.finished = {each.step.index for each in kept if each.result is not None}
        actor, in_flight = Actor(done), InFlight(bound, draw=self.draw, kept=kept, version=done)
        running = asyncio.create_task(self.train(in_flight, actor, done, bound))
        await asyncio.wait([running], timeout=killed_after)
        if not running.done():
            running.cancel()
        found = (await asyncio.gather(running, return_exceptions=True))[0]
        await in_flight.close()
        assert [task for task in asyncio.all_tasks() if task.get_name().startswith("work for step")] == []
        if isinstance(found, Exception) and not isinstance(found, Fails):
            raise found

    async def draw(self, index):
        prompts = tuple(range(self.drawn, self.drawn + WIDTH))
        self.drawn += WIDTH
        await asyncio.sleep(0)
        return Step(index, prompts, 1, until=self.steps)

    async def train(self, in_flight, actor, done, bound):
        async def make(step):
            self.made.append(step.index)
            self.begun += 1
            version = actor.version
            await asyncio.sleep(self.making[step.index % len(self.making)])
            if self.begun in self.fails:
                self.fails.remove(self.begun)
                raise Fails
            assert actor.version == version, "weights were switched while a batch was made"
            self.finished.add(step.index)
            return Batch(step.index, tuple(step.prompts), version)

        for index in range(done, self.steps):
            step = await in_flight.step(index)
            batch = await in_flight.next_batch(step, make, actor)
            assert batch.index == step.index == index
            assert 0 <= index - batch.version <= bound, "older than the bound"
            await asyncio.sleep(self.learning[index % len(self.learning)])
            self.trained.append(batch)
            await in_flight.publish(actor, index + 1)
            if (index + 1) % self.every == 0:
                state = in_flight.state()
                assert {each.step.index for each in state if each.result is not None} == self.finished - {
                    *range(index + 1)
                }
                self.checkpoint = (index + 1, self.drawn, state)


class Fails(Exception):
    """Making a batch went wrong."""


SECONDS = st.lists(st.integers(0, 6).map(float), min_size=1, max_size=4)


@settings(max_examples=150)
@given(
    run=st.builds(Run, st.integers(1, 8), st.integers(1, 3), SECONDS, SECONDS, st.sets(st.integers(1, 12), max_size=2)),
    lives=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30).map(float)), max_size=4),
    bound=st.integers(0, 3),
)
@example(Run(4, 1, [1.0], [5.0]), [(3, 11.0)], 0)  # goes on under a smaller bound: what was kept is too old
def test_every_prompt_is_trained_once_in_order_and_no_batch_is_older_than_the_bound(run, lives, bound):
    async def main():
        for its_bound, seconds in lives:
            await resumed(run, its_bound, seconds)
        while len(run.trained) < run.steps:
            await resumed(run, bound)

    run_virtual(main())
    prompts = [prompt for batch in run.trained for prompt in batch.prompts]
    assert prompts == list(range(run.steps * WIDTH))


async def resumed(run, bound, seconds=None):
    """Goes on; what a checkpoint kept of batches is not made again, unless it has grown too old for the bound."""
    done, drawn, kept = run.checkpoint
    assert [each.step.index for each in kept] == list(range(done, done + len(kept)))
    assert drawn == (done + len(kept)) * WIDTH  # drawn = trained + in flight
    ready = {each.step.index for each in kept if each.result is not None and each.step.index - each.version <= bound}
    await run.go_on(bound, seconds)
    assert not ready & {*run.made}
    assert len(run.made) == len({*run.made}), "made twice in one process"


def test_the_work_of_a_step_begins_while_the_one_before_is_learned_from():
    def seconds(bound):
        run = Run(steps=5, every=1, making=[3.0], learning=[2.0])
        _, took = run_virtual(run.go_on(bound))
        assert len(run.trained) == 5
        return took

    load = 0.25
    assert seconds(0) == 5 * (3.0 + 2.0 + load)
    assert seconds(1) == 5 * 3.0 + 2.0 + 4 * load  # before three of the works, and at the end


async def test_steps_come_from_whoever_draws_them():
    with pytest.raises(ValueError, match="make it with `draw`"):
        await InFlight(1).step(0)
