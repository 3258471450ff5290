"""The rollout as an actor: groups, seeds, settings, and who may leave."""

import dataclasses

import pytest
import torch

from rlinf import ActorSystem, Stream
from rlinf.actors.rollout import Rollout
from rlinf.data.tasks import PromptStream, make_task
from rlinf.data.tokenizer import load_tokenizer
from rlinf.data.weights import Weights

MODEL = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "tie_word_embeddings": True,
}
TASK = make_task("copy", digits=2)
TOKENIZER = load_tokenizer(TASK.tokenizer)
SHARED = {"model": MODEL, "tokenizer": TASK.tokenizer}


@pytest.fixture
async def system():
    async with ActorSystem.local() as system:
        yield system


def asked(count=5, seed=0):
    return PromptStream(TASK.train, TOKENIZER, seed).take(count)


def essence(group):
    return [(sample.group, sample.index, sample.response_ids.tolist(), sample.text) for sample in group.samples]


# Rollout ------------------------------------------------------------------------------------------------------------


async def test_every_prompt_gets_its_group(system):
    rollout = await system.spawn(Rollout, name="rollout", **SHARED, max_new_tokens=4, max_rows=6)
    groups = await rollout.generate(asked(5), n=4).collect()
    assert sorted(group.prompt.id for group in groups) == list(range(5))
    for group in groups:
        assert [sample.index for sample in group.samples] == [0, 1, 2, 3]
        for sample in group.samples:
            assert 1 <= len(sample.response_ids) <= 4
            assert len(sample.logprobs) == len(sample.versions) == len(sample.response_ids)
            assert sample.truncated == (sample.response_ids[-1] != TOKENIZER.eos_token_id)
            written = TOKENIZER.decode(sample.response_ids)
            assert written == sample.text + ("" if sample.truncated else "<eos>")
            assert sample.reward is None


async def test_prompts_may_come_as_a_stream_and_ids_may_repeat(system):
    rollout = await system.spawn(Rollout, name="rollout", **SHARED, max_new_tokens=4)
    same = [dataclasses.replace(prompt, id=7) for prompt in asked(3)]
    groups = await rollout.generate(Stream.of(same), n=2).collect()
    assert {group.prompt.text for group in groups} == {prompt.text for prompt in same}


async def test_samples_depend_on_seed_and_prompt_and_on_nothing_else(system):
    one = await system.spawn(Rollout, name="one", **SHARED, seed=3, max_new_tokens=6, max_rows=5)
    two = await system.spawn(Rollout, name="two", **SHARED, seed=3, max_new_tokens=6)
    drawn = asked(6)
    first = {group.prompt.id: essence(group) async for group in one.generate(drawn, n=3)}
    again = {group.prompt.id: essence(group) async for group in two.generate(drawn[::-1], n=3)}
    assert first == again
    other = await system.spawn(Rollout, name="other", **SHARED, seed=4, max_new_tokens=6)
    assert first != {group.prompt.id: essence(group) async for group in other.generate(drawn, n=3)}


async def test_ranks_share_a_stream_of_prompts(system):
    rollout = await system.spawn(Rollout, hosts=[0, 0], name="rollout", **SHARED, max_new_tokens=4, max_rows=4)
    groups = await rollout.generate(Stream.of(asked(8)), n=2).collect()
    assert sorted(group.prompt.id for group in groups) == list(range(8))


async def test_temperature_zero_is_greedy(system):
    rollout = await system.spawn(Rollout, name="rollout", **SHARED, max_new_tokens=5)
    groups = await rollout.generate(asked(4), n=3, temperature=0.0).collect()
    for group in groups:
        assert len({tuple(sample.response_ids.tolist()) for sample in group.samples}) == 1
        assert group.samples[0].temperature == 0.0


async def test_settings_of_a_call_go_before_those_of_the_actor(system):
    rollout = await system.spawn(Rollout, name="rollout", **SHARED, max_new_tokens=5)
    groups = await rollout.generate(asked(2), max_new_tokens=1).collect()
    assert all(len(group.samples[0].response_ids) == 1 for group in groups)


async def test_special_tokens_inside_an_answer_stay_visible(system):
    rollout = await system.spawn(Rollout, name="rollout", **SHARED, max_new_tokens=6, temperature=5.0)
    groups = await rollout.generate(asked(20), n=4).collect()
    texts = [sample.text for group in groups for sample in group.samples]
    assert any("<pad>" in text for text in texts)
    assert not any("<eos>" in text for text in texts)


async def test_who_has_seen_enough_may_leave(system):
    rollout = await system.spawn(Rollout, name="rollout", **SHARED, max_new_tokens=4, max_rows=2)
    some = await rollout.generate(asked(20), n=2).take(3).collect()
    assert len(some) == 3
    assert len(await rollout.generate(asked(2), n=2).collect()) == 2


async def test_no_samples_are_a_mistake(system):
    rollout = await system.spawn(Rollout, name="rollout", **SHARED)
    with pytest.raises(ValueError, match="n=0"):
        await rollout.generate(asked(1), n=0).collect()


async def test_weights_that_do_not_fit_change_nothing(system):
    rollout = await system.spawn(Rollout, name="rollout", **SHARED)
    before = [essence(group) for group in await rollout.generate(asked(3)).collect()]
    with pytest.raises(ValueError, match="do not fit"):
        await rollout[0].load(Weights.pack([("a", torch.ones(1))], 5))
    assert await rollout[0].version() == 0
    assert [essence(group) for group in await rollout.generate(asked(3)).collect()] == before
