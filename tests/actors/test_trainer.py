"""The trainer as an actor, on one rank: what goes in, what comes out, and what happens when something is wrong."""

import asyncio
import dataclasses
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlinf import ActorSystem, Stream
from rlinf.actors.trainer import Trainer
from rlinf.data.sample import Example, Group, Learned, NotScored, Prompt, Sample
from tests.actors import toys

SHARED = {"model": toys.configuration(), "tokenizer": toys.ALPHABET}


@pytest.fixture
async def system():
    async with ActorSystem.local() as system:
        yield system


@pytest.fixture
def trainer(system):
    """Starts trainers with settings of their own."""

    async def spawn(name="trainer", cls=Trainer, **settings):
        return await system.spawn(cls, name=name, **{**SHARED, "lr": 0.01, **settings})

    return spawn


def scored(rewards=(1.0, 0.0), number=0, length=3, outcome="ok", truncated=False):
    prompt = Prompt(number, np.array([4, 5, 6]), text=f"{number}>", answer="12")
    samples = tuple(
        Sample(
            prompt, index, np.arange(3, 3 + length), np.full(length, -2.0, np.float32), np.arange(length) // 2, "12",
            truncated, reward=reward, outcome=outcome if reward is None else None,
        )
        for index, reward in enumerate(rewards)
    )  # fmt: skip
    return Group(prompt, samples)


def spoilt(group):
    """The group with log-probs of its first answer that are no numbers."""
    first, *others = group.samples
    return Group(group.prompt, (dataclasses.replace(first, logprobs=np.full_like(first.logprobs, np.nan)), *others))


async def flat(trainer):
    return torch.cat([tensor.reshape(-1) for _, tensor in (await trainer.weights()).named()])


# Learning -----------------------------------------------------------------------------------------------------------


async def test_training_reports_what_the_batch_was_and_how_it_went(trainer):
    first = await (await trainer(epochs=2)).train([scored((1.0, 0.0, 0.0), number) for number in range(4)])
    assert first["reward/mean"] == pytest.approx(1 / 3)
    assert (first["groups"], first["samples"], first["response_tokens"], first["tokens"]) == (4, 12, 36, 72)
    for name in ("loss", "grad_norm", "clip_frac", "approx_kl", "entropy", "mismatch/mean", "ratio/max", "lr"):
        assert np.isfinite(first[name])


async def test_weights_asked_for_while_a_batch_is_learned_are_those_after_it(trainer):
    learning = await trainer(epochs=3, micro_batch_tokens=1)
    before = await flat(learning)
    training = asyncio.ensure_future(learning.train([scored(number=number) for number in range(4)]))
    await asyncio.sleep(0)
    asked = [await learning.weights() for _ in range(2)]
    await training
    assert [weights.version for weights in asked] == [1, 1]
    assert not torch.equal(await flat(learning), before)
    for weights in asked:
        assert torch.equal(weights.buckets[0], (await learning.weights()).buckets[0])


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"epochs": 2, "minibatches": 3},
        {"algorithm": "reinforce_pp"},
        {"algorithm": "grpo_tis", "minibatches": 2},
    ],
)
async def test_by_prompt_the_order_of_arrival_changes_not_one_bit(trainer, how):
    batch = toys.told(toys.groups(8))
    found = []
    for number, order in enumerate([range(8), (7, 3, 0, 1, 5, 2, 6, 4), reversed(range(8))]):
        learning = await trainer(f"t{number}", micro_batch_tokens=40, **how)
        metrics = await learning.train(slowly([batch[i] for i in order], pauses=number))
        found.append((metrics, await flat(learning)))
    for metrics, weights in found[1:]:
        assert metrics == found[0][0]
        assert torch.equal(weights, found[0][1])


async def slowly(groups, pauses):
    for group in groups:
        for _ in range(3 * pauses):
            await asyncio.sleep(0)
        yield group


@pytest.mark.parametrize(
    ("how", "first"),
    [
        ({"order": "prompt"}, "learn"),
        ({"order": "arrival"}, "learn"),
        ({"algorithm": "grpo_tis", "minibatches": 2}, "_scores"),
    ],
)
async def test_it_computes_while_groups_are_still_to_come(trainer, how, first):
    learning = await trainer(micro_batch_tokens=5, **how)  # the answers are alike: all of them are 6 tokens
    reached = asyncio.Event()
    inner = system_actor(learning)
    compute, computed = inner.compute, []

    async def watched(fn, *arguments, **more):
        result = await compute(fn, *arguments, **more)
        computed.append(getattr(fn, "func", fn).__name__)  # a partial names its function
        reached.set()
        return result

    inner.compute = watched

    async def groups():
        yield scored(number=0)
        yield scored((1.0, 0.0, 1.0, 0.0), 1)
        yield scored((1.0, 0.0, 1.0, 0.0), 2)
        await reached.wait()  # hangs unless something was computed before the end
        yield scored(number=3)

    await learning.train(groups())
    assert computed[0] == first


def system_actor(group):
    """The actor behind a handle in this process."""
    return group[0]._owner.cells[group[0]._actor].actor


async def test_equal_rewards_teach_nothing(trainer):
    learning = await trainer()
    before = await flat(learning)
    metrics = await learning.train([scored((1.0, 1.0)), scored((0.0, 0.0), 1)])
    assert metrics["groups/uniform"] == 1.0
    assert metrics["grad_norm"] == 0.0
    assert torch.equal(await flat(learning), before)


async def test_samples_that_could_not_be_judged_count_as_not_drawn(trainer):
    lost = scored((1.0, None, 0.0, None), 0, outcome="timeout")
    none_left = scored((None, None), 1, outcome="error")
    kept = Group(lost.prompt, lost.scored)
    with_losses, without = await trainer("one"), await trainer("two")
    metrics = await with_losses.train([lost, none_left, scored(number=2, truncated=True)])
    expected = await without.train([kept, scored(number=2, truncated=True)])
    assert torch.equal(await flat(with_losses), await flat(without))
    assert {k: v for k, v in metrics.items() if not k.startswith("outcomes/")} == {
        k: v for k, v in expected.items() if not k.startswith("outcomes/")
    }
    shares = {name: metrics[f"outcomes/{name}"] for name in ("ok", "truncated", "timeout", "error")}
    assert shares == {"ok": 2 / 8, "truncated": 2 / 8, "timeout": 2 / 8, "error": 2 / 8}


async def test_it_tells_once_which_samples_it_has_learned_from(trainer):
    learning = await trainer()
    assert await learning.learned() == Learned()
    await learning.train([scored((1.0, None, 0.0, None), 0, outcome="timeout"), scored(number=2, truncated=True)])
    with pytest.raises(NotScored):
        await learning.train([scored((None, None), 1, outcome="error")])
    await learning.train([scored(number=2)])
    found = await learning.learned()
    assert found.trained == {0: [0, 2], 2: [0, 1, 0, 1]}, "one batch learned what the other had learned"
    assert found.unscored == {0: [1, 3]}
    assert found.tokens > 0
    assert await learning.learned() == Learned()


async def test_adapters_learn_and_the_model_under_them_does_not(trainer):
    learning = await trainer(lora={"r": 2, "alpha": 4, "target_modules": ["q_proj", "gate_proj"]})
    before = dict((await learning.weights()).named())
    plain = toys.model()
    assert before.keys() == dict(plain.named_parameters()).keys()
    for _ in range(3):
        await learning.train([scored()])
    for name, tensor in (await learning.weights()).named():
        changed = "q_proj.weight" in name or "gate_proj.weight" in name
        assert torch.equal(tensor, before[name]) != changed


async def test_the_last_batch_can_be_looked_at(trainer):
    learning = await trainer()
    assert await learning.samples(3) == []
    await learning.train([scored(number=1), scored((0.5, None), 0, outcome="timeout")])
    shown = await learning.samples(3)
    assert [(one["prompt_id"], one["index"]) for one in shown] == [(0, 0), (0, 1), (1, 0)]
    assert [one["outcome"] for one in shown] == ["ok", "timeout", "ok"]
    assert [one["reward"] for one in shown] == [0.5, None, 1.0]
    assert shown[1]["advantage"] is None
    assert shown[2]["advantage"] == pytest.approx(np.sqrt(0.5), rel=1e-4)
    assert shown[0] | {"reward": 0.5, "advantage": 0.0} == {
        "prompt_id": 0, "index": 0, "prompt": "123", "task": "0>", "response": "12", "answer": "12", "reward": 0.5,
        "outcome": "ok", "scores": {}, "remark": "", "advantage": 0.0, "length": 3, "versions": [0, 1], "group": 2,
    }  # fmt: skip
    assert len(json.dumps(await learning.samples(100))) > 100


# Mistakes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        ([], "not one group"),
        ([dataclasses.replace(scored(), samples=(dataclasses.replace(scored().samples[0], reward=None),))], "judge"),
        ([scored((None, None), outcome="error")], r"1 groups.*reward"),
        ([scored(length=0)], "not one token"),
        ([scored((1.0, float("nan")), 3)], r"sample 1.*prompt 3"),
        ([scored((1.0, float("inf")), 3)], r"sample 1.*prompt 3"),
        ([scored().with_column("rewards", [np.array([0.0, 1.0, 0.0]), np.array([0.0, np.nan, 0.0])])], "rewards.* nan"),
        ([dataclasses.replace(scored(), prompt=Prompt(5, np.array([], dtype=np.int64)))], r"prompt 5.*token"),
        (
            [scored().with_column("loss_mask", [np.ones(3)] * 2)],
            r"0.*per_token\['loss_mask'\].*nothing:.*teacher_logprobs.*Sample.loss_mask",
        ),
        ([scored().with_column("ref_logprob", [np.ones(3)] * 2)], r"per_token\['ref_logprob'\].* leave.*out"),
    ],
)
async def test_what_cannot_be_trained_on_is_said(trainer, groups, text):
    learning = await trainer()
    with pytest.raises(ValueError, match=text):
        await learning.train(groups)
    with pytest.raises(ValueError, match="not one batch"):
        await learning.sft([])
    with pytest.raises(ValueError, match="not one token"):
        await learning.sft([[Example(np.array([4]), np.array([], dtype=np.int64))]])
    await learning.train([scored()])  # and it goes on


async def test_an_input_that_fails_fails_the_call_and_leaves_nothing_behind(trainer):
    learning, untouched = await trainer("one", micro_batch_tokens=12), await trainer("two", micro_batch_tokens=12)

    async def broken():
        yield scored(number=0)
        yield scored(number=1)
        raise OSError("the judge's disk is full")

    with pytest.raises(OSError, match=r"disk.*full"):
        await learning.train(broken())
    batch = [scored(number=0), scored(number=1)]
    assert await learning.train(batch) == await untouched.train(batch)
    assert torch.equal(await flat(learning), await flat(untouched))


async def test_a_cancelled_batch_leaves_nothing_behind(trainer):
    learning, untouched = await trainer("one", micro_batch_tokens=12), await trainer("two", micro_batch_tokens=12)
    waits, ended = asyncio.Event(), asyncio.Event()

    async def endless():
        try:
            yield scored(number=0)
            yield scored(number=1)
            waits.set()
            await asyncio.Event().wait()
        finally:
            ended.set()

    training = asyncio.ensure_future(learning.train(Stream.of(endless())))
    await waits.wait()
    training.cancel()
    with pytest.raises(asyncio.CancelledError):
        await training
    del training
    batch = [scored(number=0), scored(number=1)]
    assert await learning.train(batch) == await untouched.train(batch)
    assert torch.equal(await flat(learning), await flat(untouched))
    await ended.wait()


async def test_a_loss_that_is_no_number_stops_with_the_batch_saved(trainer, tmp_path):
    learning = await trainer(rescue_dir=str(tmp_path / "rescued"), epochs=2)
    await learning.train([scored()])
    before = await flat(learning)
    bad = [spoilt(scored((1.0, 0.0, None), 1, outcome="timeout")), scored(number=2)]
    with pytest.raises(FloatingPointError, match=r"not both finite.*nan_step_1\.safetensors"):
        await learning.train(bad)
    assert torch.equal(await flat(learning), before)
    kept = load_file(tmp_path / "rescued" / "nan_step_1.safetensors")
    assert kept["lengths"].tolist() == [[3, 3]] * 4
    assert kept["response_ids"].tolist() == [3, 4, 5] * 4
    assert kept["logprobs"].isnan().tolist() == [True] * 3 + [False] * 9
    assert kept["advantages"].isfinite().all()
    told = json.loads((tmp_path / "rescued" / "nan_step_1.json").read_text())
    assert [one["outcome"] for one in told["samples"]] == ["ok", "ok", "timeout", "ok", "ok"]
    assert told["samples"][0]["prompt"] == "1>"
    assert (await learning.weights()).version == 1
    await learning.train([scored(number=2)])  # and it goes on


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"dtype": "float16"}, r"dtype='float16': expected.*float32, bfloat16"),
        ({"order": "random"}, r"order='random': expected"),
        ({"epochs": 0}, r"trainer: epochs=0: expected.*at.*1"),
        ({"lora": {"r": 8}}, r"needs exactly"),
        ({"learning_rate": 1.0, "epoch": 2}, r"learning_rate: unknown setting.*epoch:"),
        ({"schedule": "cosine"}, "needs total_steps"),
    ],
)
async def test_settings_that_cannot_be_are_refused(trainer, settings, text):
    with pytest.raises(ValueError, match=text):
        await trainer(**settings)


async def test_two_ranks_on_one_host_are_refused(system):
    with pytest.raises(ValueError, match=r"ranks.*host"):
        await system.spawn(Trainer, hosts=[0, 0], name="trainer", **SHARED)


# Checkpoints and devices --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"algorithm": "grpo_tis", "minibatches": 2}, {"algorithm": "reinforce_pp"}])
async def test_training_goes_on_from_a_checkpoint_bit_for_bit(trainer, tmp_path, how):
    settings = {"epochs": 2, "micro_batch_tokens": 40, "schedule": "linear", "total_steps": 20, "seed": 3, **how}
    first, second = toys.told(toys.groups(6)), toys.told(toys.groups(6, seed=1))
    elsewhere = settings["seed"] if "minibatches" in how else 4  # which also draws the order of minibatches
    one, other = await trainer("one", **settings), await trainer("two", **{**settings, "seed": elsewhere})
    await one.train(first)
    assert await one.save(tmp_path / "saved") == str(tmp_path / "saved")
    expected = await one.train(second)
    assert await other.restore(tmp_path / "saved") == 1
    assert await other.train(second) == expected
    assert torch.equal(await flat(other), await flat(one))
    assert (await other.weights()).version == 2


@pytest.mark.parametrize("lora", [None, {"r": 2, "alpha": 4, "target_modules": ["q_proj"]}])
async def test_a_checkpoint_is_what_transformers_loads(trainer, tmp_path, lora):
    learning = await trainer(lora=lora)
    await learning.train([scored()])
    await learning.save(tmp_path / "saved")
    net = AutoModelForCausalLM.from_pretrained(tmp_path / "saved" / "hf")
    named = dict(net.named_parameters())
    for name, tensor in (await learning.weights()).named():
        assert torch.equal(named[name], tensor)
    ids = AutoTokenizer.from_pretrained(tmp_path / "saved" / "hf")("12>", return_tensors="pt").input_ids
    assert net.generate(ids, max_new_tokens=4).shape[1] > ids.shape[1]


@pytest.mark.parametrize(
    ("own", "wanted", "expected"),
    [
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.bfloat16, "float32", torch.float32),
        (torch.float32, "auto", torch.float32),
        (None, "bfloat16", torch.bfloat16),
    ],
)
async def test_a_model_is_saved_in_the_precision_that_it_came_in_or_in_that_which_is_asked_for(
    trainer, tmp_path, own, wanted, expected
):
    source = toys.configuration()
    if own is not None:
        toys.model().to(own).save_pretrained(tmp_path / "own")
        source = str(tmp_path / "own")
    learning = await trainer(model=source, saved_dtype=wanted)
    await learning.train([scored()])
    await learning.save(tmp_path / "saved")
    net = AutoModelForCausalLM.from_pretrained(tmp_path / "saved" / "hf")
    assert net.dtype == net.config.dtype == expected
    named = dict(net.named_parameters())
    for name, tensor in (await learning.weights()).named():
        assert tensor.dtype == torch.float32, "training is in full precision"
        assert torch.equal(named[name], tensor.to(expected))


async def test_training_and_saving_do_not_wait_for_the_disk(trainer, tmp_path):
    learning = await trainer()
    saving = asyncio.ensure_future(learning.save(tmp_path / "saved"))
    before = await learning.weights()
    await learning.train([scored()])
    await saving
    restored = await trainer("other", seed=9)
    await restored.restore(tmp_path / "saved")
    assert torch.equal((await restored.weights()).buckets[0], before.buckets[0])


async def test_a_second_epoch_that_fails_leaves_a_version_of_its_own(trainer):
    learning = await trainer(epochs=2, lr=1e30)
    before = await flat(learning)
    with pytest.raises(FloatingPointError):
        await learning.train([scored()])
    assert (await learning.weights()).version == 1  # other weights than version 0
    assert not torch.equal(await flat(learning), before)
