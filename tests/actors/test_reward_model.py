"""The reward model: every answer gets the model's score in its reward, or a reason; groups stream through it."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace

import numpy as np
import pytest

from rlinf import ActorSystem, Stream
from rlinf.actors.judge import RewardError
from rlinf.actors.reward_model import GenerativeJudge, RewardModel
from rlinf.actors.rollout import Rollout
from rlinf.data.sample import Group, Prompt, Sample
from rlinf.models.scoring import load_classifier
from tests.models.scoring.saved import TOKENIZER, saved_classifier, saved_language_model

TEXTS = ("12", "3", "4567", "89")
WRITES = {"template": "{prompt}{response}>", "max_new_tokens": 3, "pattern": "()"}
"""Settings of a judge that writes, whatever that is worth."""


@pytest.fixture
async def system():
    async with ActorSystem.local() as system:
        yield system


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    return saved_classifier(directory), saved_language_model(directory)


def answered(number=0, texts=TEXTS, reward=None, **row):
    prompt = Prompt(number, np.array([2]), f"{number}>", "7", row)
    none = np.zeros(1)
    samples = (Sample(prompt, i, np.array([3]), none, none, text, truncated=i == 1) for i, text in enumerate(texts))
    if reward is not None:
        samples = (sample.judged(reward, "ok", scores={}) for sample in samples)
    return Group(prompt, tuple(samples))


def expected(path, groups):
    """Scores by the network itself, one answer at a time."""
    net = load_classifier(path, TOKENIZER)
    texts = [group.prompt.text + sample.text for group in groups for sample in group.samples]
    return [net.scores([TOKENIZER(text)["input_ids"]], 64)[0] for text in texts]


def rewards(groups):
    return [sample.reward for group in sorted(groups, key=lambda g: g.prompt.id) for sample in group.samples]


async def scored(system, groups, path, actor=RewardModel, **settings):
    model = await system.spawn(actor, path=path, name="reward_model", **settings)
    try:
        return await model.score(groups).collect()
    finally:
        await system.kill(model)


@pytest.mark.parametrize("order", ["prompt", "arrival"])
@pytest.mark.parametrize("tokens", [1, 20, 8192])
async def test_scores_are_the_classifiers_however_groups_are_packed(system, saved, order, tokens):
    groups = [answered(number) for number in range(5)]
    found = await scored(system, Stream.of(groups), saved[0], order=order, micro_batch_tokens=tokens)
    np.testing.assert_allclose(rewards(found), expected(saved[0], groups), atol=2e-6)
    assert [sample.outcome for sample in found[0].samples] == ["ok", "truncated", "ok", "ok"]


async def test_the_score_is_added_to_the_judges_reward_with_its_weight_and_both_are_told(system, saved):
    group = answered(reward=1.0)
    (raw,) = await scored(system, [answered()], saved[0])
    (found,) = await scored(system, [group], saved[0], weight=0.5)
    np.testing.assert_allclose(rewards([found]), [1 + 0.5 * one for one in rewards([raw])], atol=1e-6)
    assert found.samples[0].scores == pytest.approx({"judge": 1.0, "reward_model": raw.rewards[0]})
    (alone,) = await scored(system, [group], saved[0], alone=True)
    assert rewards([alone]) == rewards([raw])
    assert alone.samples[0].scores == {"reward_model": raw.rewards[0]}


async def test_named_parts_of_the_judge_stay(system, saved):
    sample = answered(texts=("1",)).samples[0].judged(3.0, "ok", scores={"right": 1.0, "form": 2.0}, extracted="1")
    (found,) = await scored(system, [Group(sample.prompt, (sample,))], saved[0])
    assert {*found.samples[0].scores} == {"right", "form", "reward_model"}
    assert found.samples[0].extracted == "1"


async def test_scores_are_normalized_within_their_group_or_squeezed(system, saved):
    groups = [answered(), answered(1, texts=("5", "5"))]
    (by_group, even) = await scored(system, groups, saved[0], normalize="group")
    values = np.array([sample.scores["reward_model"] for sample in by_group.samples])
    np.testing.assert_allclose(values, expected(saved[0], groups[:1]), atol=2e-6)
    np.testing.assert_allclose(by_group.rewards, (values - values.mean()) / values.std(), atol=1e-9)
    assert even.rewards == [0, 0]
    (squeezed, _) = await scored(system, groups, saved[0], normalize="sigmoid")
    values = np.array([sample.scores["reward_model"] for sample in squeezed.samples])
    np.testing.assert_allclose(squeezed.rewards, 1 / (1 + np.exp(-values)), atol=1e-9)


async def test_answers_whose_judging_failed_are_left_alone(system, saved):
    group = answered()
    lost = group.samples[0].judged(None, "timeout", scores={}, remark="slow")
    (found,) = await scored(system, [Group(group.prompt, (lost, *group.samples[1:]))], saved[0])
    assert (found.samples[0].reward, found.samples[0].outcome, found.samples[0].remark) == (None, "timeout", "slow")
    assert len(found.scored) == 3
    (all_lost,) = await scored(system, [Group(group.prompt, (lost,))], saved[0])
    assert not all_lost.scored


async def test_what_is_too_long_has_no_reward_and_says_why_until_there_is_no_hope(system, saved):
    (found,) = await scored(system, [answered()], saved[0], max_tokens=4)
    assert [sample.outcome for sample in found.samples] == ["ok", "truncated", "error", "ok"]
    assert re.search(r"\b6\b.*\b4\b", found.samples[2].remark)
    groups = [answered(number) for number in range(17)]
    with pytest.raises(RewardError, match=r"reward_model.*anything: 64 answers"):
        await scored(system, groups, saved[0], max_tokens=1)


@pytest.mark.parametrize(("kind", "reads"), [("classifier", 5), ("choices", 4), ("writes", 2)])
async def test_what_is_beyond_its_context_length_has_no_reward_unless_that_is_set_lower(system, tmp_path, kind, reads):
    """A judge's reply must fit too: the choices of one token, or the longest text that it may write."""
    make = saved_classifier if kind == "classifier" else saved_language_model
    path = make(tmp_path, max_position_embeddings=5)
    settings = {
        "classifier": {},
        "choices": {"kind": "generative", "template": "{response}", "choices": {"1": 1.0, "0": 0.0}},
        "writes": {**WRITES, "template": "{response}"},
    }[kind]
    actor = GenerativeJudge if kind == "writes" else RewardModel
    # the classifier reads the prompt too, of two tokens
    texts = [("1" * (length - 2 * (kind == "classifier"))) for length in (reads, reads + 1)]
    fits, long = (await scored(system, [answered(texts=texts)], path, actor, **settings))[0].samples
    assert "tokens to read" not in fits.remark
    assert re.search(rf"\b{reads + 1}\b.*\b{reads}\b", long.remark)
    for allowed, most in ((1, 1), (100, reads)):
        (told,) = await scored(system, [answered(texts=texts)], path, actor, max_tokens=allowed, **settings)
        assert f"and it reads {most} " in told.samples[1].remark


async def test_a_template_shows_columns_and_a_missing_one_is_named(system, saved):
    template = "{answer}>{level}>{response}"
    group = answered(level=3)
    (found,) = await scored(system, [group], saved[0], template=template)
    net = load_classifier(saved[0], TOKENIZER)
    ids = [TOKENIZER(f"7>3>{text}")["input_ids"] for text in TEXTS]
    np.testing.assert_allclose(found.rewards, net.scores(ids, 64), atol=2e-6)
    with pytest.raises(Exception, match=r"reward_model.template names.*column"):
        await scored(system, [answered()], saved[0], template=template)


async def test_conversations_go_through_its_own_chat_template(system, saved, tmp_path):
    path = saved_classifier(tmp_path)
    tokenizer = type(TOKENIZER).from_pretrained(path)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] | length }}>{{ m['content'] }}>{% endfor %}"
    tokenizer.save_pretrained(path)
    group = answered(texts=("1", "23"), messages=[{"role": "user", "content": "45"}])
    (found,) = await scored(system, [group], path)
    ids = [tokenizer(f"4>45>9>{text}>", add_special_tokens=False)["input_ids"] for text in ("1", "23")]
    np.testing.assert_allclose(found.rewards, load_classifier(path, tokenizer).scores(ids, 64), atol=2e-6)
    plain = answered(texts=("1", "23"))
    assert (await scored(system, [plain], path))[0].rewards == (await scored(system, [plain], saved[0]))[0].rewards
    with pytest.raises(ValueError, match=r"template.*false"):
        await scored(system, [plain], saved[0], chat=True)


async def test_groups_stream_through_it(system, saved):
    """Each is scored while the source still makes the next, which waits until the one before has come back."""
    returned = asyncio.Event()

    async def source():
        for number in range(3):
            yield answered(number)
            await asyncio.wait_for(returned.wait(), 20)
            returned.clear()

    model = await system.spawn(RewardModel, path=saved[0], name="reward_model")
    came = []
    async for group in model.score(Stream.of(source())):
        came.append(group.prompt.id)
        returned.set()
    assert came == [0, 1, 2]


# Judges that reply ----------------------------------------------------------------------------------------------------


async def test_choices_score_by_their_probability_without_generating(system, saved):
    settings = {"kind": "generative", "template": "{prompt}{response}>", "choices": {"1": 1.0, "0": 0.0}}
    (found,) = await scored(system, [answered()], saved[1], **settings)
    assert all(0 < reward < 1 for reward in found.rewards)
    assert len(set(found.rewards)) == 4


async def test_a_judge_that_writes_is_read_by_its_pattern(system, saved):
    """What it writes is what a rollout of the same model writes of the same question."""
    groups = [answered(number) for number in range(4)]
    shared = {"max_new_tokens": 6, "max_rows": 3}
    found = await scored(
        system,
        Stream.of(groups),
        saved[1],
        GenerativeJudge,
        template="{prompt}{response}>",
        pattern=r"(\d\d?)",
        **shared,
    )
    rollout = await system.spawn(Rollout, model=saved[1], tokenizer=saved[1], temperature=0.0, name="rollout", **shared)
    asked = [
        Prompt(4 * g + i, np.array(TOKENIZER(f"{g}>{text}>")["input_ids"]))
        for g in range(4)
        for i, text in enumerate(TEXTS)
    ]
    replies = {reply.prompt.id: reply.samples[0].text for reply in await rollout.generate(asked).collect()}
    for group in found:
        for sample in group.samples:
            numbers = re.findall(r"\d\d?", replies[4 * group.prompt.id + sample.index])
            if numbers:
                assert sample.reward == float(numbers[-1])
            else:
                assert sample.outcome == "error"
                assert "no score" in sample.remark
    assert any(group.scored for group in found)


async def test_groups_without_anything_to_ask_come_through_a_judge_that_writes(system, saved):
    group = answered()
    lost = Group(group.prompt, tuple(s.judged(None, "error", scores={}, remark="no") for s in group.samples))
    long = replace(answered(1).samples[0], text="0" * 40)
    found = await scored(
        system, [lost, Group(long.prompt, (long,)), answered(2)], saved[1], GenerativeJudge,
        template="{response}>", max_tokens=30, max_new_tokens=4, pattern=r"(\d)",
    )  # fmt: skip
    assert sorted(group.prompt.id for group in found) == [0, 1, 2]
    by_id = {group.prompt.id: group for group in found}
    assert [sample.remark for sample in by_id[0].samples] == ["no"] * 4
    assert "41 tokens" in by_id[1].samples[0].remark


async def test_wrong_settings_are_told_at_once(system, saved):
    with pytest.raises(ValueError, match=r"saved model"):
        await system.spawn(RewardModel, path=None, name="a")
    with pytest.raises(ValueError, match="spawn a GenerativeJudge"):
        await system.spawn(RewardModel, path=saved[1], kind="generative", template="{response}", name="b")
    with pytest.raises((TypeError, ValueError), match="weigth"):
        await system.spawn(RewardModel, path=saved[0], weigth=1.0, name="c")


async def test_models_that_share_a_device_park_for_each_other_and_score_the_same(saved):
    groups = [answered(number) for number in range(3)]
    async with ActorSystem.local(device_memory={0: 100}) as system:
        shared = {"path": saved[0], "hosts": [0], "devices": [0], "resident_bytes": 80}
        models = [await system.spawn(RewardModel, name=name, **shared) for name in ("one", "other")]
        for _ in range(2):  # the second time, each comes back from where it was parked
            for model in models:
                found = await model.score(groups).collect()
                np.testing.assert_allclose(rewards(found), expected(saved[0], groups), atol=2e-6)


@pytest.mark.parametrize("kind", [RewardModel, GenerativeJudge])
async def test_a_reader_that_leaves_early_ends_the_scoring_and_it_scores_on(system, saved, kind):
    closed = asyncio.Event()

    async def endless():
        try:
            for number in range(8):
                yield answered(number)
            await asyncio.Event().wait()
        finally:
            closed.set()

    settings = {"path": saved[0]} if kind is RewardModel else WRITES | {"path": saved[1]}
    model = await system.spawn(kind, name="reward_model", **settings)
    scores = model.score(Stream.of(endless()))
    assert len((await anext(aiter(scores))).samples) == 4
    await scores.close()
    await asyncio.wait_for(closed.wait(), 20)
    assert len(await model.score([answered(7)]).collect()) == 1
