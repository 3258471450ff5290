"""Single answers under way are told by name, and another rollout goes on with them."""

import asyncio

import numpy as np
import pytest

from rlinf import ActorSystem
from rlinf.actors.rollout import Rollout
from tests.actors.test_rollout import SHARED, asked
from tests.actors.test_rollout_engine import PROCESS

LONG = {**SHARED, "max_new_tokens": 60, "temperature": 3.0, "max_rows": 2}


@pytest.mark.parametrize(
    ("first", "second", "goes_on"),
    [
        ("transformers", "transformers", True),
        ("transformers", PROCESS, True),
        (PROCESS, "transformers", True),
        ("transformers", "tests.actors.test_rollout_engine.plain", False),
    ],
)
async def test_an_answer_goes_on_where_another_rollout_was_stopped(first, second, goes_on):
    async with ActorSystem.local() as system:
        one = await system.spawn(Rollout, name="one", engine=first, **LONG)
        other = await system.spawn(Rollout, name="other", engine=second, **LONG)
        ids, whole = asked(1)[0].token_ids, {"min_new_tokens": 50}
        expected = await asyncio.gather(*(one[0].answer(ids, seed=seed, **whole) for seed in range(3)))
        calls = [
            asyncio.ensure_future(one[0].answer(ids, seed=seed, name=f"call {seed}", **whole)) for seed in range(3)
        ]
        nameless = asyncio.ensure_future(one[0].answer(ids, seed=0, **whole))
        (begun,) = await one.answering()
        while len(begun) < 2:  # two rows; each asking lets some tokens be made
            (begun,) = await one.answering()
        await one.pause()
        (begun,) = await one.answering()
        assert begun.keys() <= {"call 0", "call 1", "call 2"}
        assert all(0 < len(partial.response_ids) < 60 for partial in begun.values())
        assert all(len(partial.response_ids) == len(partial.logprobs) for partial in begun.values())
        for seed in range(3):
            rest = begun.get(f"call {seed}")
            found = await other[0].answer(ids, seed=seed, name="again", begun=rest, **whole)
            assert found.response_ids.tolist() == expected[seed].response_ids.tolist()
            if rest is not None and goes_on:
                count = len(rest.logprobs)
                np.testing.assert_array_equal(found.logprobs[:count], rest.logprobs)
        await one.resume()
        found = await asyncio.gather(*calls, nameless)
        assert [each.response_ids.tolist() for each in found[:3]] == [each.response_ids.tolist() for each in expected]
        assert await one.answering() == [{}], "those that have ended are told no more"


async def test_an_answer_whose_caller_has_left_is_told_no_more():
    async with ActorSystem.local() as system:
        rollout = await system.spawn(Rollout, name="rollout", **LONG)
        endless = {"max_new_tokens": 30_000, "min_new_tokens": 30_000}
        call = asyncio.ensure_future(rollout[0].answer(asked(1)[0].token_ids, seed=1, name="call", **endless))
        while not (await rollout.answering())[0]:
            pass
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        async with asyncio.timeout(30):
            while await rollout.answering() != [{}]:  # each asking lets the cancellation come further
                pass
