"""Answers asked for one by one: the same as those of a group, from the same batch, on the same devices."""

import asyncio

import numpy as np
import pytest

from rlinf import ActorSystem
from rlinf.actors.rollout import Rollout
from rlinf.agents.llm import RolloutModel
from rlinf.data.rng import mix
from tests.actors.test_rollout import SHARED, Parked, asked, collected, weights

SETTINGS = {**SHARED, "max_new_tokens": 12, "temperature": 3.0}


@pytest.fixture
async def system():
    async with ActorSystem.local() as system:
        yield system


async def one_by_one(rank, prompts, n=2):
    """By (prompt, index), with the seeds that `generate` takes."""
    keys = [(prompt, index) for prompt in prompts for index in range(n)]
    found = await asyncio.gather(*(rank.answer(prompt, seed=mix(0, prompt.id, index)) for prompt, index in keys))
    return {(prompt.id, index): one.response_ids.tolist() for (prompt, index), one in zip(keys, found, strict=True)}


async def in_groups(rollout, prompts, n=2):
    groups = await collected(rollout.generate(prompts, n=n))
    return {(s.group, s.index): s.response_ids.tolist() for group in groups for s in group.samples}


async def test_answers_one_by_one_are_those_of_groups_and_run_beside_them(system):
    rollout = await system.spawn(Rollout, name="rollout", **SETTINGS, max_rows=6)
    prompts = asked(8)
    expected = await in_groups(rollout, prompts)
    ones, groups = await asyncio.gather(one_by_one(rollout[0], prompts), in_groups(rollout, prompts))
    assert ones == groups == expected
    prompt = prompts[0]
    for ids in (prompt.token_ids, prompt.token_ids.tolist()):  # token ids are as good as a prompt
        assert (await rollout[0].answer(ids, seed=mix(0, prompt.id, 0))).response_ids.tolist() == expected[0, 0]


async def test_a_caller_who_is_cancelled_frees_its_row(system):
    rollout = await system.spawn(Rollout, name="rollout", **SETTINGS, max_rows=1)
    ids = asked(1)[0].token_ids
    endless = asyncio.ensure_future(rollout[0].answer(ids, seed=1, max_new_tokens=30_000, min_new_tokens=30_000))
    await rollout[0].version()  # it has begun
    endless.cancel()
    short = await rollout[0].answer(ids, seed=2, max_new_tokens=3)
    assert len(short.response_ids) <= 3
    assert endless.cancelled()


async def test_a_streamed_answer_is_the_same_and_whoever_stops_listening_frees_its_row(system):
    rollout = await system.spawn(Rollout, name="rollout", **SETTINGS, max_rows=1)
    ids = asked(1)[0].token_ids
    expected = await rollout[0].answer(ids, seed=1)
    *told, answer = await collected(rollout[0].stream(ids, seed=1))
    assert answer.response_ids.tolist() == expected.response_ids.tolist()
    tokens = [token for tokens in told for token in tokens]
    assert tokens == expected.response_ids.tolist()[: len(tokens)]
    model = RolloutModel(lambda: rollout)
    named = await model.answer(ids, seed=1, name="of an episode", begun=None, hear=lambda _: None)
    assert named.response_ids.tolist() == expected.response_ids.tolist()
    begun = asyncio.Event()
    settings = {"max_new_tokens": 30_000, "min_new_tokens": 30_000, "hear": lambda _: begun.set()}
    endless = asyncio.ensure_future(model.answer(ids, seed=1, **settings))
    await begun.wait()
    endless.cancel()
    assert len((await model.answer(ids, seed=2, max_new_tokens=3)).response_ids) <= 3


async def test_abort_pause_and_new_weights_reach_single_answers(system):
    rollout = await system.spawn(Rollout, name="rollout", **SETTINGS, max_rows=2)
    ids = asked(1)[0].token_ids
    long = {"max_new_tokens": 30_000, "min_new_tokens": 30_000}
    tasks = [asyncio.ensure_future(rollout[0].answer(ids, seed=seed, **long)) for seed in range(3)]
    await rollout[0].version()  # they have begun
    await rollout.pause()
    await rollout.load(weights(1))
    await rollout.resume()
    assert await rollout[0].in_flight() == []  # nobody would wait for them after a restart
    await rollout[0].abort()
    found = await asyncio.gather(*tasks)
    assert [one.finish for one in found] == ["abort"] * 3
    after = await rollout[0].answer(ids, seed=0, max_new_tokens=3)
    assert set(after.versions.tolist()) == {1}


async def test_wrong_calls_are_told_what_is_wrong(system):
    rollout = await system.spawn(Rollout, name="rollout", **SETTINGS)
    with pytest.raises(TypeError, match=r"answer:.*setting"):
        await rollout[0].answer([1, 2], seed=0, topp=0.5)
    with pytest.raises(ValueError, match=r"empty prompt"):
        await rollout[0].answer([], seed=0)
    with pytest.raises(ValueError, match="temperature=-1"):
        await rollout[0].answer([3], seed=0, temperature=-1)
    with pytest.raises(ValueError, match=r"answer:.*prompt"):
        await rollout[0].answer("hello", seed=0)


async def test_two_that_do_not_fit_on_one_device_answer_in_turns():
    async with ActorSystem.local(device_memory={0: 100}) as system:
        alone = await system.spawn(Rollout, name="alone", **SETTINGS)
        prompts = asked(6)
        expected = await in_groups(alone, prompts)
        on_one = {"hosts": [0], "devices": [0], "resident_bytes": 80, "parked_bytes": 10}
        one = await system.spawn(Parked, name="one", **on_one, **SETTINGS, max_rows=3)
        two = await system.spawn(Parked, name="two", **on_one, **SETTINGS, max_rows=3)

        async def again_and_again(rank):
            return [await one_by_one(rank, [prompt]) for prompt in prompts]

        for parts in await asyncio.gather(again_and_again(one[0]), again_and_again(two[0])):
            assert {key: ids for part in parts for key, ids in part.items()} == expected
        assert (await one.times())[0] + (await two.times())[0] >= 3


async def test_a_thousand_callers_make_no_task_each_in_the_engine(system):
    rollout = await system.spawn(Rollout, name="rollout", **{**SETTINGS, "max_new_tokens": 2}, max_rows=64)
    ids = np.array([3, 4, 5])
    calls = [asyncio.ensure_future(rollout[0].answer(ids, seed=seed)) for seed in range(1000)]
    await rollout[0].version()
    assert len(asyncio.all_tasks()) < 2200  # a call is a task here, and we make one to wait for it
    assert len({tuple(one.response_ids.tolist()) for one in await asyncio.gather(*calls)}) > 20
