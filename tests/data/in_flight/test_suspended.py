"""Work in flight that is stopped between two steps, as when roles move: nothing is lost, and nothing is made again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from rlinf import ActorSystem
from rlinf.data.in_flight import InFlight, Rules
from rlinf.data.in_flight.admission import Completed
from rlinf.data.step import Step
from rlinf.runtime.base.clock import run_virtual

BATCH, STEPS = 2, 6


@dataclass(eq=False)
class Half:
    """A prompt that is being answered, and how many of its tokens there are."""

    id: int
    tokens: int = 0


@dataclass
class Generator:
    """Makes a token a second for each of its prompts, and is replaced by another one when roles move."""

    lengths: list[int]
    made: dict[int, int]  # tokens by prompt, whoever made them
    loaded: int = 0
    halves: dict[int, Half] = field(default_factory=dict)
    paused: bool = False

    def answers(self, prompts):
        return self._answers(prompts)

    async def _answers(self, prompts):
        found: asyncio.Queue[Completed | None] = asyncio.Queue()

        async def answer(half):
            while half.tokens < self.length(half.id):
                await asyncio.sleep(1.0)
                if not self.paused:
                    half.tokens += 1
                    self.made[half.id] = self.made.get(half.id, 0) + 1
            await asyncio.sleep(0.5)  # on its way through the judge: not settled yet
            found.put_nowait(Completed(half.id, (half.id,)))

        async def read():
            async for one in prompts:
                half = one if isinstance(one, Half) else Half(one.id)
                self.halves[half.id] = half
                group.create_task(answer(half))

        async with asyncio.TaskGroup() as group:
            reading = group.create_task(read())
            while not reading.done() or self.halves:
                made = await found.get()
                yield made

    def length(self, number):
        return self.lengths[number % len(self.lengths)]

    async def load(self, version):
        self.loaded = version

    # as the keeper

    async def version(self):
        return self.loaded

    async def partials(self):
        return {half.id: (Half(half.id, half.tokens),) for half in self.halves.values()}

    async def settled(self, ids):
        for number in ids:
            self.halves.pop(number, None)

    async def drop(self, ids):
        return sum(self.halves.pop(number).tokens for number in ids)

    async def split(self):
        raise AssertionError("not asked for")

    async def pause(self):
        self.paused = True
        await asyncio.sleep(0.25)

    async def unpause(self):
        self.paused = False


@dataclass
class Prompt:
    """Something to answer."""

    id: int


class Keeper:
    """Whichever generator there is now."""

    def __init__(self, run):
        self._run = run

    def __getattr__(self, name):
        return getattr(self._run.generator, name)


class Run:
    """Steps of a run in virtual time; after some of them, all that makes answers is replaced."""

    def __init__(self, lengths):
        self.made, self.lengths, self.drawn, self.moves = {}, lengths, 0, 0
        self.generator = Generator(lengths, self.made)
        self.dropped_by = []

    async def draw(self, count):
        self.drawn += count
        return [Prompt(number) for number in range(self.drawn - count, self.drawn)]

    async def train(self, staleness, learning, moves):
        in_flight = InFlight(Rules(staleness, BATCH), draw=self.draw, keeper=Keeper(self), end=STEPS)
        trained = []
        for index in range(STEPS):
            batch = in_flight.next_batch(Step(index, (), 1), self.generator.answers, Keeper(self))
            trained += [number async for number in batch.groups]
            await asyncio.sleep(learning[index % len(learning)])
            await in_flight.publish(Keeper(self), index + 1)
            if index in moves:
                before = {one.id for one in in_flight.entries}
                await in_flight.suspend()
                assert before <= {one.id for one in in_flight.entries}, "and more, drawn until all had stopped"
                self.generator = Generator(self.lengths, self.made)
                await self.generator.load(index + 1)
                await asyncio.sleep(3.0)  # nothing goes on meanwhile
        await in_flight.close()
        return trained


SECONDS = st.lists(st.integers(0, 5).map(float), min_size=1, max_size=4)


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    learning=SECONDS,
    moves=st.sets(st.integers(0, STEPS - 2)),
    staleness=st.integers(0, 3),
)
def test_every_prompt_is_trained_once_and_every_token_made_once_whenever_roles_move(
    lengths, learning, moves, staleness
):
    run = Run(lengths)

    async def main():
        async with ActorSystem.local():
            return await run.train(staleness, learning, moves)

    trained, _ = run_virtual(main())
    assert sorted(trained) == list(range(BATCH * STEPS))
    assert run.made == {number: run.generator.length(number) for number in trained}
