"""The critic in one process: what it predicts, what it learns from, and how it goes on."""

import asyncio

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForTokenClassification

from rlinf import ActorSystem, Stream
from rlinf.actors.trainer import Trainer
from rlinf.algos import recipes
from rlinf.data.sample import Group, Prompt, Sample
from rlinf.training.batch_metrics import describe_values
from rlinf.training.policy import value_rows
from tests.actors import toys
from tests.actors.programs import critics

SHARED = {"model": toys.configuration(), "tokenizer": toys.ALPHABET, "lr": 0.01, "micro_batch_tokens": 30}
PPO = recipes.get("ppo")


@pytest.fixture
async def system():
    async with ActorSystem.local() as system:
        yield system


@pytest.fixture
def critic(system):
    """Starts critics with settings of their own."""

    async def spawn(name="critic", **settings):
        return (await system.spawn(critics.WatchedCritic, name=name, **{**SHARED, **settings}))[0]

    return spawn


def answered(values, reward=1.0, number=0, truncated=False, outcome=None):
    """A group of one answer, each token of which has been valued."""
    prompt = Prompt(number, np.array([4, 5]))
    length = len(values)
    sample = Sample(
        prompt, 0, np.arange(3, 3 + length), np.full(length, -2.0, np.float32), np.zeros(length, np.int32), "",
        truncated, reward=reward, outcome=outcome, per_token={"values": np.array(values, np.float32)},
    )  # fmt: skip
    return Group(prompt, (sample,))


async def weights(actor):
    return (await actor.inspect())["weights"]


# What there is to learn ----------------------------------------------------------------------------------------------


def test_returns_are_those_of_an_episode_reckoned_by_hand():
    discounted = recipes.get("ppo", {"advantage": {"gamma": 0.9, "lam": 0.5}})
    ((row,),) = value_rows(discounted, [answered([0.5, 0.25])]).rows
    # last token: 1 - 0.25 = 0.75; first: 0.9 x 0.25 - 0.5 = -0.275, and 0.9 x 0.5 x 0.75 of what follows
    np.testing.assert_allclose(row.columns["returns"], [0.5 - 0.275 + 0.3375, 1.0], rtol=1e-6)
    ((row,),) = value_rows(PPO, [answered([0.5, 0.25])]).rows  # neither discount nor trust in the critic
    np.testing.assert_allclose(row.columns["returns"], [1.0, 1.0], rtol=1e-6)


def test_a_penalty_in_the_reward_lowers_the_returns_of_what_led_to_it():
    penalised = recipes.get("ppo", {"kl": {"place": "reward", "kind": "k1", "beta": 0.1}})
    group = answered([0.0, 0.0, 0.0])
    with pytest.raises(
        ValueError,
        match=r"ref_logprobs.*reference\.logprobs between judge.score.*critic.train",
    ):
        value_rows(penalised, [group])
    told = group.with_column("ref_logprobs", [np.array([-2.0, -3.0, -2.0], np.float32)])
    ((row,),) = value_rows(penalised, [told]).rows
    np.testing.assert_allclose(row.columns["returns"], [0.9, 0.9, 1.0], rtol=1e-6)


def test_answers_that_were_cut_are_left_out_where_the_algorithm_says_so():
    groups = [answered([0.0] * 3, truncated=True), answered([0.0] * 2, number=1)]
    assert [len(rows) for rows in value_rows(PPO, groups).rows] == [1, 1]
    assert [len(rows) for rows in value_rows(recipes.get("ppo", {"truncated": "mask"}), groups).rows] == [0, 1]


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        ([], r"critic.train:.*group came"),
        ([answered([])], r"critic.train:.*token.*learn"),
        ([answered([0.0], reward=None, outcome="timeout")], r"1 groups.*reward.*'timeout'"),
        ([answered([0.0], reward=None)], "judged|reward"),
        (toys.groups(2), r"values.*critic.values between judge.score.*critic.train"),
    ],
)
async def test_what_cannot_be_learned_from_is_said(critic, groups, text):
    learner = await critic()
    with pytest.raises(ValueError, match=text):
        await learner.train(groups)


def test_explained_variance_is_of_the_values_that_came():
    groups = [answered([value] * 3, reward, number) for number, (value, reward) in enumerate([(0.1, 0), (0.9, 1)])]
    found = describe_values(groups, value_rows(PPO, groups).rows)
    assert found["critic/explained_variance"] == pytest.approx(1 - 0.1**2 / 0.5**2)
    assert (found["values/mean"], found["returns/mean"], found["reward/mean"]) == pytest.approx((0.5, 0.5, 0.5))


@given(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=5), st.sampled_from([0.0, 1.0, -0.3]))
def test_of_equal_rewards_there_is_no_variance_to_explain(said, reward):
    groups = [answered([value] * 4, reward, number) for number, value in enumerate(said)]
    assert describe_values(groups, value_rows(PPO, groups).rows)["critic/explained_variance"] == 0.0


# Predicting and learning ---------------------------------------------------------------------------------------------


async def test_groups_are_valued_while_others_are_still_to_come(critic):
    learner = await critic()
    batch, rest = toys.groups(12), asyncio.Event()

    async def slow():
        for group in batch[:11]:
            yield group
        await rest.wait()
        yield batch[11]

    seen = []
    async for group in learner.values(Stream.of(slow())):
        seen.append(group.prompt.id)
        rest.set()  # at the first: it came although the last had not
    assert seen == list(range(12))


async def test_training_that_is_asked_for_first_waits_for_the_values_it_needs(critic):
    learner, ready = await critic(), asyncio.Event()

    async def valued():
        await ready.wait()
        async for group in learner.values(toys.groups(5)):
            yield group

    training = asyncio.ensure_future(learner.train(Stream.of(valued())))
    await asyncio.sleep(0)
    assert len(await learner.values(toys.groups(5)).collect()) == 5  # training has not taken the turn
    ready.set()
    assert (await training)["values/mean"] == 0.0


async def test_advantages_are_whitened_over_the_whole_batch_however_it_is_cut(system):
    batch, found = critics.told(toys.groups(9)), []
    for number, budget in enumerate((8, 10_000)):
        settings = {**SHARED, "micro_batch_tokens": budget, "algorithm": critics.ALGORITHM}
        trainer = await system.spawn(Trainer, name=f"trainer{number}", **settings)
        metrics = await trainer.train(Stream.of(batch))
        shown = await trainer.samples(100)
        found.append((metrics["loss"], metrics["grad_norm"], [sample["advantage"] for sample in shown]))
    assert found[0][:2] == pytest.approx(found[1][:2], rel=1e-6)
    assert found[0][2] == found[1][2]
    lengths = [sample["length"] for sample in shown if sample["advantage"] is not None]
    means = [sample["advantage"] for sample in shown if sample["advantage"] is not None]
    assert np.average(means, weights=lengths) == pytest.approx(0.0, abs=1e-5)


# Going on ------------------------------------------------------------------------------------------------------------


async def test_training_goes_on_from_a_checkpoint_bit_for_bit(critic, tmp_path):
    learner, batches = await critic(epochs=2, minibatches=2), [toys.groups(7, seed) for seed in range(3)]
    for batch in batches[:2]:
        await learner.train(learner.values(Stream.of(batch)))
    await learner.save(tmp_path / "saved")
    other = await critic("other", epochs=2, minibatches=2)
    assert await other.restore(tmp_path / "saved") == 2
    results = []
    for one in (learner, other):
        metrics = await one.train(one.values(Stream.of(batches[2])))
        results.append((metrics, await weights(one)))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(tensor, results[1][1][name]) for name, tensor in results[0][1].items())


async def test_a_checkpoint_is_what_transformers_loads_for_token_classification(critic, tmp_path):
    learner = await critic()
    await learner.train(critics.told(toys.groups(7)))
    await learner.save(tmp_path / "saved")
    net = AutoModelForTokenClassification.from_pretrained(tmp_path / "saved" / "hf", num_labels=1)
    valued = await learner.values(toys.groups(3)).collect()
    for group in valued:
        for sample in group.scored:
            with torch.no_grad():
                expected = critics.plain_values(net, sample.prompt.token_ids, sample.response_ids)
            np.testing.assert_allclose(sample.per_token["values"], expected, atol=2e-6, rtol=1e-5)


async def test_weights_of_a_policy_become_the_layers_and_others_are_refused(critic, system):
    learner = await critic()
    await learner.train(critics.told(toys.groups(7)))
    before = await weights(learner)
    wider = {**SHARED, "model": toys.configuration(hidden_size=64)}
    stranger = await system.spawn(Trainer, name="stranger", **wider)
    with pytest.raises(ValueError, match=r"critic.load:.*policy's.*tensors.*critic.model"):
        await learner.load(stranger.weights())
    assert all(torch.equal(tensor, before[name]) for name, tensor in (await weights(learner)).items())
    policy = await system.spawn(Trainer, name="policy", **{**SHARED, "seed": 3})
    assert await learner.load(policy.weights()) == 0
    taken, given_ = await weights(learner), dict((await policy.weights()).named())
    assert all(torch.equal(taken[name], tensor) for name, tensor in given_.items())
    assert torch.equal(taken["score.weight"], before["score.weight"])


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"algorithm": "grpo"}, r"'grpo'.*'ppo'"),
        ({"algorithm": "pop"}, "ppo"),
        ({"epochs": 0, "minibatches": 0}, r"epochs=0: expected.*least 1; minibatches=0: expected"),
        ({"order": "random"}, r"order='random': expected"),
        ({"dtype": "float16"}, "float16"),
    ],
)
async def test_settings_that_cannot_be_are_refused(critic, settings, text):
    with pytest.raises(ValueError, match=text):
        await critic(**settings)
