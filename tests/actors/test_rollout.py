"""The rollout as an actor: groups, seeds, settings, stopping, and new weights."""

import asyncio
import dataclasses

import numpy as np
import pytest
import torch

from rlinf import ActorSystem, Stream
from rlinf.actors.rollout import Rollout
from rlinf.data.datasets.toy_tasks import PromptStream, make_task
from rlinf.data.tokenizer import load_tokenizer
from rlinf.data.weights import Weights
from rlinf.models.language.build import build_model
from rlinf.runtime.actor.actor import endpoint

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


def weights(version, seed=1, dtype=torch.float32):
    model = build_model(MODEL, TOKENIZER, seed=seed)
    return Weights.pack(((name, tensor.to(dtype)) for name, tensor in model.named_parameters()), version)


def essence(groups):
    """Everything about the samples, to the last bit, in order of arrival."""
    return [
        (s.group, s.index, s.response_ids.tolist(), s.logprobs.tobytes(), s.text)
        for group in groups
        for s in group.samples
    ]


def answered(group):
    """What was answered, in order of the samples."""
    return [(sample.group, sample.index, sample.response_ids.tolist(), sample.text) for sample in group.samples]


async def collected(stream):
    return [group async for group in stream]


async def test_a_run_repeats_bit_for_bit_whatever_came_before(system):
    settings = {**SHARED, "max_new_tokens": 9, "max_rows": 10, "max_tokens": 100}
    one = await system.spawn(Rollout, name="one", **settings)
    two = await system.spawn(Rollout, name="two", **settings)
    await collected(two.generate(asked(7, seed=3), n=3))  # as a run has behind it that was not resumed
    first = essence(await collected(one.generate(asked(12), n=4)))
    assert essence(await collected(two.generate(Stream.of(asked(12)), n=4))) == first


async def test_stop_texts_stay_and_end_tokens_go(system):
    rollout = await system.spawn(Rollout, name="rollout", **SHARED, max_new_tokens=30, temperature=3.0, stop=["1"])
    samples = [s for group in await collected(rollout.generate(asked(20), n=4)) for s in group.samples]
    by_text = [s for s in samples if s.text.endswith("1")]
    by_token = [s for s in samples if s.response_ids[-1] == TOKENIZER.eos_token_id]
    assert by_text
    assert by_token
    for sample in samples:
        assert "1" not in sample.text[:-1]
        assert "<eos>" not in sample.text
        assert sample.truncated == (len(sample.response_ids) == 30 and sample not in by_text + by_token)
    (group,) = await collected(rollout.generate(asked(1), stop=["2"], top_k=5, min_new_tokens=2, top_p=0.9, min_p=0.1))
    assert len(group.samples[0].response_ids) >= 2


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"stops": ["x"]}, TypeError, r"setting stops"),
        ({"top_p": 0.0}, ValueError, "top_p=0.0"),
        ({"stop": [""]}, ValueError, "stop_texts"),
    ],
)
async def test_wrong_settings_are_named(system, settings, error, text):
    rollout = await system.spawn(Rollout, name="rollout", **SHARED)
    with pytest.raises(error, match=text):
        await collected(rollout.generate(asked(1), **settings))


async def test_overlapping_calls_are_answered_each_by_its_own_rules(system):
    rollout = await system.spawn(Rollout, name="rollout", **SHARED, max_new_tokens=12, max_rows=8)
    alone = essence(await collected(rollout.generate(asked(6), n=2, temperature=0.0)))
    sampled, greedy = await asyncio.gather(
        collected(rollout.generate(asked(10), n=3)), collected(rollout.generate(asked(6), n=2, temperature=0.0))
    )
    assert sorted(group.prompt.id for group in sampled) == list(range(10))
    assert sorted(row[:3] for row in essence(greedy)) == sorted(row[:3] for row in alone)


async def test_all_ranks_switch_to_new_weights(system):
    rollout = await system.spawn(Rollout, hosts=[0, 0], name="rollout", **SHARED, max_new_tokens=6)
    assert await rollout.load(weights(4)) == 4
    assert await rollout.version() == [4, 4]
    fresh = await system.spawn(Rollout, name="fresh", **SHARED, max_new_tokens=6)
    await fresh.load(weights(4, dtype=torch.bfloat16))
    groups = await collected(rollout.generate(asked(3), temperature=0.0))
    assert all(set(s.versions.tolist()) == {4} for group in groups for s in group.samples)


async def test_weights_that_do_not_fit_are_taken_by_nobody(system):
    rollout = await system.spawn(Rollout, hosts=[0, 0], name="rollout", **SHARED)
    with pytest.raises(ValueError, match="do not fit"):
        await rollout.load(Weights.pack([("a", torch.ones(1))], 5))
    assert await rollout.version() == [0, 0]


async def test_weights_may_change_while_answers_are_made(system):
    rollout = await system.spawn(Rollout, name="rollout", **SHARED, max_new_tokens=400, temperature=5.0, max_rows=4)
    stream = rollout.generate([dataclasses.replace(prompt) for prompt in asked(40)], n=1)
    groups = [await anext(aiter(stream))]
    await rollout.load(weights(7))
    groups += await collected(stream)
    versions = [s.versions.tolist() for group in groups for s in group.samples]
    assert all(row == sorted(row) for row in versions)
    assert versions[0][0] == 0
    assert versions[-1][-1] == 7


async def test_abort_hands_out_what_there_is(system):
    rollout = await system.spawn(
        Rollout, name="rollout", **SHARED, max_new_tokens=30_000, temperature=100.0, max_rows=8
    )
    stream = rollout.generate(asked(3000), n=4)
    groups = [await anext(aiter(stream))]
    await rollout.abort()
    groups += await collected(stream)
    assert len(groups) < 3000
    cut = [s for group in groups for s in group.samples if s.truncated]
    assert 1 <= len(cut) <= 8
    assert all(len(s.response_ids) == len(s.logprobs) > 0 for group in groups for s in group.samples)
    assert all(s.response_ids[-1] != TOKENIZER.eos_token_id for s in cut)
    assert len(await collected(rollout.generate(asked(3), n=2, max_new_tokens=3))) == 3


async def test_pausing_loses_nothing(system):
    rollout = await system.spawn(Rollout, name="rollout", **SHARED, max_new_tokens=60, max_rows=8, temperature=3.0)
    expected = sorted(row[:3] for row in essence(await collected(rollout.generate(asked(10), n=2))))
    stream = rollout.generate(asked(10), n=2)
    groups = [await anext(aiter(stream))]
    await rollout.pause()
    await rollout.resume()
    groups += await collected(stream)
    assert sorted(row[:3] for row in essence(groups)) == expected


class Parked(Rollout):
    """Counts how often its device was taken from it."""

    async def setup(self, **settings):
        self.parked = 0
        await super().setup(**settings)

    async def offload(self):
        self.parked += 1
        await super().offload()
        assert self._engine._batch._rows.bands == []

    @endpoint
    async def times(self):
        return self.parked


async def test_two_that_do_not_fit_on_one_device_take_turns():
    async def coming(prompts):
        for prompt in prompts:
            await asyncio.sleep(0.02)  # longer than a device is kept that others want
            yield prompt

    settings = {**SHARED, "max_new_tokens": 12, "temperature": 3.0, "max_rows": 4}
    async with ActorSystem.local(device_memory={0: 100}) as system:
        alone = await system.spawn(Rollout, name="alone", **settings)
        expected = sorted(row[:3] for row in essence(await collected(alone.generate(asked(4), n=2))))
        on_one = {"hosts": [0], "devices": [0], "resident_bytes": 80, "parked_bytes": 10}
        one = await system.spawn(Parked, name="one", **on_one, **settings)
        two = await system.spawn(Parked, name="two", **on_one, **settings)
        both = await asyncio.gather(
            collected(one.generate(Stream.of(coming(asked(4))), n=2)),
            collected(two.generate(Stream.of(coming(asked(4))), n=2)),
        )
        for groups in both:
            assert sorted(row[:3] for row in essence(groups)) == expected
        assert (await one.times())[0] + (await two.times())[0] >= 3


async def test_bfloat16_is_computed_in_bfloat16(system):
    rollout = await system.spawn(Rollout, name="rollout", **SHARED, dtype="bfloat16", max_new_tokens=8)
    await rollout.load(weights(1))
    groups = await collected(rollout.generate(asked(3), n=2))
    assert all(np.isfinite(s.logprobs).all() for group in groups for s in group.samples)
    with pytest.raises(ValueError, match="dtype='float8'"):
        await system.spawn(Rollout, name="other", **SHARED, dtype="float8")


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
    first = {group.prompt.id: answered(group) async for group in one.generate(drawn, n=3)}
    again = {group.prompt.id: answered(group) async for group in two.generate(drawn[::-1], n=3)}
    assert first == again
    other = await system.spawn(Rollout, name="other", **SHARED, seed=4, max_new_tokens=6)
    assert first != {group.prompt.id: answered(group) async for group in other.generate(drawn, n=3)}


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


async def test_no_samples_are_a_mistake(system):
    rollout = await system.spawn(Rollout, name="rollout", **SHARED)
    with pytest.raises(ValueError, match="n=0"):
        await rollout.generate(asked(1), n=0).collect()


async def test_texts_in_place_of_prompts_are_a_mistake(system):
    rollout = await system.spawn(Rollout, name="rollout", **SHARED)
    with pytest.raises(TypeError, match=r"generate:.*prompt"):
        await rollout.generate(["hello"]).collect()


@pytest.fixture
def chat_model(tmp_path):
    """A saved model whose generation_config lists the end of a turn beside the end of a text."""
    model = build_model({**MODEL, "max_position_embeddings": 64}, TOKENIZER, seed=0)
    model.generation_config.eos_token_id = [TOKENIZER.eos_token_id, 5]
    model.save_pretrained(tmp_path)
    return str(tmp_path)


async def test_answers_end_where_the_models_own_files_say(system, chat_model):
    settings = {"model": chat_model, "tokenizer": TASK.tokenizer, "max_new_tokens": 40, "temperature": 3.0}
    rollout = await system.spawn(Rollout, name="rollout", **settings, stop_token_ids=[7])
    samples = [s for group in await collected(rollout.generate(asked(20), n=4)) for s in group.samples]
    ends = {TOKENIZER.eos_token_id, 5, 7}
    assert {int(s.response_ids[-1]) for s in samples if not s.truncated} == ends
    for s in samples:
        assert not ends & set(s.response_ids[:-1].tolist())
        assert s.text == TOKENIZER.decode(s.response_ids if s.truncated else s.response_ids[:-1])
        assert s.truncated == (int(s.response_ids[-1]) not in ends)


async def test_texts_beyond_the_models_positions_are_refused_plainly(system, chat_model):
    settings = {"model": chat_model, "tokenizer": TASK.tokenizer}
    with pytest.raises(ValueError, match=r"rollout\.max_new_tokens=64 leaves.*64"):
        await system.spawn(Rollout, name="none", **settings, max_new_tokens=64)
    rollout = await system.spawn(Rollout, name="rollout", **settings, max_new_tokens=50)
    (prompt,) = asked(1)
    assert len(await collected(rollout.generate([prompt]))) == 1
    long = dataclasses.replace(prompt, token_ids=np.full(15, 4))
    with pytest.raises(ValueError, match=r"65 tokens.*15.*64:.*rollout\.max_new_tokens"):
        await collected(rollout.generate([prompt, long]))


async def test_ids_of_a_padded_vocabulary_are_never_answered(system):
    """A head with four times as many ids as the tokenizer: three of four draws would be of the others."""
    padded = {**MODEL, "vocab_size": 4 * len(TOKENIZER)}
    rollout = await system.spawn(Rollout, model=padded, tokenizer=TASK.tokenizer, max_new_tokens=8)
    for temperature in (1.0, 0.0):
        async for group in rollout.generate(asked(), n=4, temperature=temperature):
            for sample in group.samples:
                assert sample.response_ids.max() < len(TOKENIZER)
                assert np.isfinite(sample.logprobs).all()
