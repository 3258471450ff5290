"""A rollout as the model of conversations: each stays on one rank, the one with the fewest."""

import asyncio

import numpy as np
import pytest

from rlinf.agents.llm import RolloutModel

IDS = np.array([1, 2])


class Rank:
    """Answers with its number, once it may."""

    def __init__(self, number, may):
        self.number, self.may, self.forgotten, self.asked = number, may, [], []

    async def answer(self, ids, *, seed, conversation, **sampling):
        self.asked.append((conversation, sampling))
        await self.may.wait()
        if seed < 0:
            raise ValueError("the engine is broken")
        return self.number

    async def forget(self, conversations):
        self.forgotten += conversations


def ranks(count):
    may = asyncio.Event()
    may.set()
    return [Rank(number, may) for number in range(count)], may


def test_a_conversation_stays_where_it_began_and_the_rank_with_the_fewest_takes_the_next():
    async def whole():
        rollout, _ = ranks(2)
        model = RolloutModel(lambda: rollout)
        assert [await model.answer(IDS, seed=0, conversation=number) for number in (5, 6, 7, 5, 6)] == [0, 1, 0, 0, 1]
        model.ended(5)
        model.ended(7)
        model.ended(99)  # never answered
        assert [await model.answer(IDS, seed=0, conversation=number, top_p=0.5) for number in (8, 9)] == [0, 0]
        assert (rollout[0].forgotten, rollout[1].forgotten) == ([5, 7], [])
        assert rollout[0].asked[-1] == (9, {"top_p": 0.5})

    asyncio.run(whole())


def test_single_answers_are_spread_by_how_many_are_under_way():
    async def whole():
        rollout, may = ranks(2)
        model = RolloutModel(lambda: rollout)
        may.clear()
        asked = [asyncio.create_task(model.answer(IDS, seed=seed, conversation=None)) for seed in (0, 0, 0, -1)]
        await asyncio.sleep(0)
        assert [len(rank.asked) for rank in rollout] == [2, 2]
        may.set()
        assert await asyncio.gather(*asked[:3]) == [0, 1, 0]
        with pytest.raises(ValueError, match=r"engine.*broken"):
            await asked[3]
        assert await model.answer(IDS, seed=0, conversation=None) == 0
        assert rollout[0].asked[-1] == (None, {})

    asyncio.run(whole())


def test_a_rollout_that_has_moved_to_fewer_ranks_is_no_trouble():
    async def whole():
        before, _ = ranks(3)
        now = before
        model = RolloutModel(lambda: now)
        assert [await model.answer(IDS, seed=0, conversation=number) for number in range(3)] == [0, 1, 2]
        now = before[:1]
        assert await model.answer(IDS, seed=0, conversation=2) == 0

    asyncio.run(whole())
