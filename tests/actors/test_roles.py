"""The roles as actors: rollout, judge and trainer in a running system."""

import asyncio
import dataclasses

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlinf import ActorSystem, Stream
from rlinf.actors.judge import Judge
from rlinf.actors.modeling import build_model
from rlinf.actors.rollout import Rollout
from rlinf.actors.trainer import Trainer
from rlinf.data.sample import Example, Group, Prompt, Sample
from rlinf.data.tasks import PromptStream, make_task, prompts
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


def scored(rewards=(1.0, 0.0), number=0, length=3):
    prompt = Prompt(number, np.array([4, 5, 13]))
    samples = tuple(
        Sample(
            prompt, index, np.arange(3, 3 + length), np.full(length, -2.0, np.float32), np.zeros(length, np.int32), "",
            False, reward=reward,
        )
        for index, reward in enumerate(rewards)
    )  # fmt: skip
    return Group(prompt, samples)


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


# Judge --------------------------------------------------------------------------------------------------------------


def answered(*texts):
    prompt = Prompt(0, np.array([1]), "21>", "12", {"level": 2})
    return Group(
        prompt,
        tuple(
            Sample(prompt, i, np.array([1]), np.array([0.0]), np.array([0]), text, False)
            for i, text in enumerate(texts)
        ),
    )


def graded(response, answer, level):
    return level * float(response == answer)


async def slowly(response):
    await asyncio.sleep(0)
    return len(response)


@pytest.mark.parametrize(
    ("reward", "expected"), [(None, [1, 0]), (graded, [2, 0]), (slowly, [2, 3]), ("rlinf.rewards.exact", [1, 0])]
)
async def test_rewards_are_filled_in(system, reward, expected):
    judge = await system.spawn(Judge, name="judge", **({} if reward is None else {"reward": reward}))
    group = await judge[0].score(answered("12", "212"))
    assert group.rewards == expected
    assert [sample.text for sample in group.samples] == ["12", "212"]


async def test_a_reward_that_is_no_number_is_an_error(system):
    judge = await system.spawn(Judge, name="judge", reward=lambda response: None)
    with pytest.raises(ValueError, match="finite number"):
        await judge[0].score(answered("12"))


# Trainer ------------------------------------------------------------------------------------------------------------


async def test_training_makes_the_better_answer_likelier(system):
    trainer = (await system.spawn(Trainer, name="trainer", **SHARED, lr=0.01, epochs=2))[0]
    first = await trainer.train([scored((1.0, 0.0, 0.0), number) for number in range(4)])
    assert first["reward/mean"] == pytest.approx(1 / 3)
    assert (first["groups"], first["samples"], first["response_tokens"]) == (4, 12, 36)
    for name in ("loss", "grad_norm", "clip_frac", "approx_kl", "entropy", "mismatch/mean", "ratio/max", "lr"):
        assert np.isfinite(first[name])


async def test_every_update_is_a_version(system):
    trainer = (await system.spawn(Trainer, name="trainer", **SHARED, lr=0.01))[0]
    assert (await trainer.weights()).version == 0
    await trainer.sft([[Example(np.array([4, 5]), np.array([6, 1]))]] * 2)
    assert (await trainer.weights()).version == 2
    await trainer.train([scored()])
    assert (await trainer.weights()).version == 3


async def test_a_version_names_the_same_weights_whenever_it_is_asked_for(system):
    trainer = (await system.spawn(Trainer, name="trainer", **SHARED, lr=0.01, epochs=3, micro_batch_tokens=1))[0]
    seen = {}
    training = asyncio.ensure_future(trainer.train([scored(number=number) for number in range(4)]))
    while not training.done():
        weights = await trainer.weights()
        assert torch.equal(seen.setdefault(weights.version, weights.buckets[0]), weights.buckets[0])
    weights = await trainer.weights()
    assert torch.equal(seen.setdefault(weights.version, weights.buckets[0]), weights.buckets[0])
    assert weights.version == 1
    assert not torch.equal(seen[0], seen[1])


async def test_weights_do_not_change_once_they_are_out(system):
    trainer = (await system.spawn(Trainer, name="trainer", **SHARED, lr=0.01))[0]
    before = await trainer.weights()
    copy = before.buckets[0].clone()
    await trainer.train([scored()])
    assert torch.equal(before.buckets[0], copy)
    assert not torch.equal((await trainer.weights()).buckets[0], copy)


async def test_streams_and_lists_and_micro_batches_train_alike(system):
    groups = [scored((1.0, 0.0), number, length=2 + number % 3) for number in range(6)]
    results = []
    for number, (budget, given) in enumerate([(10_000, groups), (1, groups[::-1]), (25, Stream.of(groups))]):
        trainer = (
            await system.spawn(Trainer, name=f"t{number}", **SHARED, lr=0.01, epochs=2, micro_batch_tokens=budget)
        )[0]
        metrics = await trainer.train(given)
        results.append((metrics, (await trainer.weights()).buckets[0]))
    (expected, weights), *others = results
    for metrics, other in others:
        torch.testing.assert_close(other, weights, atol=2e-5, rtol=1e-4)
        assert metrics == pytest.approx(expected, abs=1e-4)


async def test_equal_rewards_teach_nothing(system):
    trainer = (await system.spawn(Trainer, name="trainer", **SHARED, lr=0.01))[0]
    before = (await trainer.weights()).buckets[0]
    metrics = await trainer.train([scored((1.0, 1.0)), scored((0.0, 0.0))])
    assert metrics["groups/uniform"] == 1.0
    assert metrics["grad_norm"] == 0.0
    assert torch.equal((await trainer.weights()).buckets[0], before)


async def test_supervised_training_learns_the_answers(system):
    trainer = (await system.spawn(Trainer, name="trainer", **SHARED))[0]
    batch = [Example(np.array([4, 13]), np.array([4, 1])), Example(np.array([5, 13]), np.array([5, 1]))]
    metrics = await trainer.sft(Stream.of([batch] * 30), lr=0.01)
    assert metrics["sft/steps"] == 30
    assert metrics["sft/loss"] < 0.1 < metrics["sft/loss_first"]


@pytest.mark.parametrize(
    ("groups", "text"), [([], "not one group"), ([scored((1.0, None))], "without a reward: put judge.score")]
)
async def test_what_cannot_be_trained_on_is_said(system, groups, text):
    trainer = (await system.spawn(Trainer, name="trainer", **SHARED))[0]
    with pytest.raises(ValueError, match=text):
        await trainer.train(groups)
    with pytest.raises(ValueError, match="not one batch"):
        await trainer.sft([])
    await trainer.train([scored()])  # and it goes on


async def test_several_ranks_are_refused(system):
    with pytest.raises(ValueError, match="trains on one host so far"):
        await system.spawn(Trainer, hosts=[0, 0], name="trainer", **SHARED)


async def test_a_checkpoint_is_what_transformers_loads(system, tmp_path):
    trainer = (await system.spawn(Trainer, name="trainer", **SHARED, lr=0.01))[0]
    path = tmp_path / "hf"
    assert await trainer.save(path) == str(path)
    await trainer.train([scored()])
    await trainer.save(path)  # over the old one
    assert [child.name for child in tmp_path.iterdir()] == ["hf"]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    weights = await trainer.weights()
    named = dict(model.named_parameters())
    for name, tensor in weights.named():
        assert torch.equal(named[name], tensor)
    ids = tokenizer("12>", return_tensors="pt").input_ids
    theirs = model.generate(ids, do_sample=False, max_new_tokens=5, pad_token_id=0)[0, 3:].tolist()

    rollout = await system.spawn(Rollout, name="rollout", model=str(path), tokenizer=str(path), max_new_tokens=5)
    question = prompts(TASK.held_out[:1], TOKENIZER)[0]
    question = dataclasses.replace(question, token_ids=ids[0].numpy())
    (group,) = await rollout.generate([question], temperature=0.0).collect()
    assert group.samples[0].response_ids.tolist() == theirs


# Models -------------------------------------------------------------------------------------------------------------


def test_the_same_seed_makes_the_same_model_and_leaves_randomness_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one, two, other = (build_model(MODEL, TOKENIZER, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert one.config.vocab_size == len(TOKENIZER)
    assert one.config.eos_token_id == TOKENIZER.eos_token_id


@pytest.mark.parametrize("source", [{"hidden_size": 32}, {"model_type": "no_such_model"}])
def test_a_configuration_that_makes_no_model_is_refused(source):
    with pytest.raises(ValueError, match=r"model_type|no_such_model"):
        build_model(source, TOKENIZER)
