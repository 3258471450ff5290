"""The trainer by algorithms other than the plainest: what each asks for, what it is told, and what it makes of it."""

import copy
import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file

from rlinf import ActorSystem
from rlinf.actors.trainer import Trainer
from rlinf.data.sample import Group
from tests.actors import toys
from tests.actors.test_trainer import SHARED, flat, scored, spoilt, system_actor


@pytest.fixture
async def trainer():
    """Starts trainers with settings of their own."""
    async with ActorSystem.local() as system:

        async def spawn(name="trainer", **settings):
            return await system.spawn(Trainer, name=name, **{**SHARED, "lr": 0.01, **settings})

        yield spawn


@pytest.mark.parametrize("algorithm", ["grpo_tis", "async_grpo"])
async def test_later_epochs_begin_from_the_log_probs_before_the_first(trainer, algorithm):
    learning = await trainer(algorithm=algorithm, epochs=2, grad_clip=1e9, micro_batch_tokens=30)
    inner = system_actor(learning)
    before, after, gradients = copy.deepcopy(inner._back.model), copy.deepcopy(inner._back.model), []

    def look(*_):
        gradients.append(toys.gradients(inner._back.model))

    def keep(*_):
        if len(gradients) == 1:
            after.load_state_dict(inner._back.model.state_dict())

    inner._learner.optimizer.register_step_pre_hook(look)
    inner._learner.optimizer.register_step_post_hook(keep)
    batch = toys.told(toys.groups(6))
    await learning.train(batch)
    for net, found in zip((before, after), gradients, strict=True):
        net.set_attn_implementation("sdpa")
        toys.sample_by_sample(net, toys.ALGORITHMS[algorithm], batch, before).backward()
        assert toys.furthest(found, toys.gradients(net)) < 1e-5


async def test_what_an_algorithm_does_to_rewards_and_how_old_tokens_are_is_told(trainer):
    shaped = {"name": "dapo", "overrides": {"shaping": {"longest": 4, "cache": 2, "penalty": 1.0}}}
    metrics = await (await trainer(algorithm=shaped)).train([scored((1.0, 0.0), number) for number in range(3)])
    assert metrics["reward/mean"] == 0.5
    assert metrics["reward/shaped"] == 0.0  # three tokens: half way to the limit
    assert metrics["shaping/penalised"] == metrics["shaping/penalised_best"] == 1.0
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (pytest.approx(-1 / 3), 0.0)
    plain = await (await trainer("plain")).train([scored()])
    assert "reward/shaped" not in plain


async def test_answers_that_were_cut_give_no_gradient_if_they_are_masked(trainer):
    learning = await trainer(algorithm={"name": "grpo", "overrides": {"truncated": "mask"}})
    before = await flat(learning)
    metrics = await learning.train([scored(truncated=True)])
    assert torch.equal(await flat(learning), before)
    assert (metrics["update/skipped"], metrics["loss"], metrics["truncated"]) == (1.0, 0.0, 1.0)
    assert (await learning.weights()).version == 1
    group = scored((1.0, 0.0, 0.5))
    cut = dataclasses.replace(group.samples[2], truncated=True)
    metrics = await learning.train([Group(group.prompt, (*group.samples[:2], cut))])
    assert metrics["samples"] == 3
    shown = await learning.samples(3)
    assert [one["advantage"] for one in shown] == pytest.approx([1.0, -1.0, 0.0], abs=1e-5)


def long_one(rewards, number=0):
    """A group of which one answer is as long as the limit, 6, and the others are of 2 tokens."""
    group = scored(rewards, number, length=2)
    longer = scored(rewards[-1:], number, length=6).samples[0]
    return Group(group.prompt, (*group.samples[:-1], dataclasses.replace(longer, index=len(rewards) - 1)))


DAPO = {"name": "dapo", "overrides": {"shaping": {"longest": 6, "cache": 1}}}


@pytest.mark.parametrize("how", [{}, {"epochs": 2, "minibatches": 2}, {"schedule": "linear", "total_steps": 9}])
async def test_dynamic_sampling_learns_nothing_from_groups_of_equal_rewards_however_long_their_answers(trainer, how):
    learning = await trainer(algorithm=DAPO, **how)
    before = await flat(learning)
    metrics = await learning.train([long_one((0.0,) * 4, number) for number in range(2)])
    assert torch.equal(await flat(learning), before)
    assert (metrics["groups/uniform"], metrics["update/skipped"], metrics["grad_norm"]) == (1.0, 1.0, 0.0)
    assert metrics["reward/shaped"] == -0.125
    assert [one["advantage"] for one in await learning.samples(8)] == [0.0] * 8
    assert (await learning.weights()).version == 1  # there is a version for every batch, whatever came of it
    taught = await learning.learned()
    assert (taught.trained, taught.even) == ({}, {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]})


async def test_beside_groups_that_teach_those_of_equal_rewards_change_nothing(trainer):
    alone, among = await trainer("alone", algorithm=DAPO), await trainer("among", algorithm=DAPO)
    teaching = [long_one((0.0, 1.0, 0.0, 0.0), number) for number in (0, 2)]
    await alone.train(teaching)
    metrics = await among.train([teaching[0], long_one((1.0,) * 4, 1), teaching[1]])
    assert torch.equal(await flat(alone), await flat(among))
    assert metrics["groups/uniform"] == 1 / 3
    assert "update/skipped" not in metrics


async def test_a_penalty_for_length_makes_answers_of_equal_reward_differ_where_no_group_is_dropped(trainer):
    kept = {"name": "grpo", "overrides": {"shaping": {"longest": 6, "cache": 1}}}
    metrics = await (await trainer(algorithm=kept)).train([long_one((0.0,) * 4)])
    assert metrics["groups/uniform"] == 0.0
    assert metrics["grad_norm"] > 0


async def test_steps_without_an_update_move_the_schedule_on_to_its_end(trainer):
    learning = await trainer(algorithm=DAPO, epochs=2, schedule="linear", total_steps=6, lr=0.6)
    rates = []
    for rewards in ((1.0, 0.0, 0.0), (0.0,) * 3, (1.0, 0.0, 0.0)):
        rates.append((await learning.train([long_one(rewards)]))["lr"])
    assert rates == pytest.approx([0.5, 0.0, 0.1])


async def test_a_batch_of_fewer_groups_than_minibatches_moves_the_schedule_on(trainer):
    learning = await trainer(minibatches=3, schedule="linear", total_steps=6, lr=0.6)
    rates = [(await learning.train([scored(number=number)]))["lr"] for number in range(2)]
    assert rates == pytest.approx([0.6, 0.3])


async def test_a_batch_with_advantages_of_tokens_is_saved_with_what_was_said_of_them(trainer, tmp_path):
    learning = await trainer(rescue_dir=str(tmp_path), algorithm="reinforce_pp")
    batch = toys.told(toys.groups(3))
    with pytest.raises(FloatingPointError, match="nan_step_0"):
        await learning.train([batch[0], spoilt(batch[1]), batch[2]])
    kept = load_file(tmp_path / "nan_step_0.safetensors")
    tokens = int(kept["lengths"][:, 1].sum())
    assert len(kept["advantages"]) == len(kept["ref_logprobs"]) == len(kept["response_ids"]) == tokens
    assert len(json.loads((tmp_path / "nan_step_0.json").read_text())["samples"]) == 12


@pytest.mark.parametrize(
    ("algorithm", "text"),
    [
        ("deepseek_grpo", r"'deepseek_grpo' needs ref_logprobs .*reference\.logprobs.*adapters_off"),
        ("reinforce_pp", "needs ref_logprobs"),
        ("opd", r"needs teacher_logprobs .*teacher\.logprobs"),
        ("ppo", r"values .*critic\.values"),
    ],
)
async def test_what_nobody_said_is_asked_for_by_the_name_of_who_should(trainer, algorithm, text):
    learning = await trainer(algorithm=algorithm)
    with pytest.raises(ValueError, match=text):
        await learning.train([scored()])


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"algorithm": "grop"}, "grpo"),
        ({"algorithm": {"overrides": {}}}, r"keys.*overrides"),
        ({"algorithm": {"name": "grpo", "overrides": {"loss.clip": 1}}}, "clip_low"),
        ({"reference": "adapters_off"}, r"needs adapters:"),
        (
            {"reference": "self", "lora": {"r": 2, "alpha": 4, "target_modules": "auto"}},
            r"self.*adapter_config.json",
        ),
        ({"teacher": "self"}, r"teacher='self'.*adapters"),
    ],
)
async def test_algorithms_that_cannot_be_are_refused(trainer, settings, text):
    with pytest.raises(ValueError, match=text):
        await trainer(**settings)
