"""Steps that a program puts together itself: gradients of given tokens that gather, and steps of AdamW."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlinf.data.sample import Datum, Sample
from tests.runs.library.small import small


def data(seed, sizes=(5, 9, 1), vocabulary=13):
    """Texts with numbers for every loss; of the first, a target is not the next token."""
    rng = np.random.default_rng(seed)
    made = []
    for size in sizes:
        ids = rng.integers(2, vocabulary, size + 1)
        inputs = {name: rng.normal(size=size).astype(np.float32) for name in ("weights", "logprobs", "advantages")}
        made.append(Datum(ids[:-1], ids[1:].copy(), inputs))
    made[0].targets[1] = (made[0].targets[1] + 1) % vocabulary
    return made


def plain_logprobs(net, datum):
    logits = net(torch.tensor(datum.tokens)[None]).logits[0]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(datum.targets)[:, None])[:, 0]


def plain_loss(net, batch, loss):
    """One text after the other, by the definitions of the API."""
    total = torch.zeros(())
    for datum in batch:
        logp = plain_logprobs(net, datum)
        weights, old, gains = (torch.tensor(datum.inputs[name]) for name in ("weights", "logprobs", "advantages"))
        if loss == "cross_entropy":
            total = total - (logp * weights).sum()
        else:
            ratio = torch.exp(logp - old)
            total = total - torch.min(ratio * gains, ratio.clamp(0.8, 1.2) * gains).sum()
    return total


@pytest.mark.parametrize("loss", ["cross_entropy", "ppo"])
async def test_gradients_gather_until_a_step_and_three_steps_are_those_of_a_plain_loop(tmp_path, loss):
    adam = {"learning_rate": 3e-3, "weight_decay": 0.1, "grad_clip_norm": 4.0}
    async with small(tmp_path, trainer={"micro_batch_tokens": 8}) as session:
        net = AutoModelForCausalLM.from_pretrained((await session.checkpoint()) / "hf", dtype=torch.float32)
        theirs = torch.optim.AdamW(net.parameters(), lr=3e-3, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.1)
        for step in range(3):
            first = await session.forward_backward(data(step), loss)
            second = await session.forward_backward(data(step + 10), loss)
            numbers = await session.optim_step(**adam)
            expected = plain_loss(net, data(step) + data(step + 10), loss)
            expected.backward()
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 4.0)
            assert first.loss + second.loss == pytest.approx(expected.item(), rel=1e-5, abs=1e-5)
            assert numbers["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
            theirs.step()
            theirs.zero_grad()
        for datum, found in zip(data(9), (await session.forward(data(9))).logprobs, strict=True):
            np.testing.assert_allclose(found, plain_logprobs(net, datum).detach().numpy(), atol=1e-5)
        assert session.step == 3


async def test_samples_are_learned_by_their_likelihood_and_answers_come_from_what_was_published(tmp_path):
    async with small(tmp_path) as session:
        before = await session.sample("12>", n=3, seed=5)
        assert [list(each.ids) for each in await session.sample("12>", n=3, seed=5)] == [list(r.ids) for r in before]
        groups = await session.generate(["7>"], n=4).collect()
        samples = [sample for group in groups for sample in group.samples]
        for _ in range(20):
            losses = await session.forward_backward(samples, "cross_entropy")
            await session.optim_step(0.02)
        assert losses.loss < 0.5 * sum(-sample.logprobs.sum() for sample in samples)
        await session.publish()
        assert {int(version) for each in await session.sample("7>", n=2) for version in each.versions} == {20}


async def test_a_step_without_gradients_and_gradients_that_training_would_drop_are_refused(tmp_path):
    async with small(tmp_path) as session:
        with pytest.raises(ValueError, match="forward_backward"):
            await session.optim_step()
        await session.forward_backward(data(0))
        groups = await session.generate(["7>"], n=4).collect()
        with pytest.raises(ValueError, match="optim_step"):
            await session.trainer.train(groups)
        await session.optim_step()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"inputs": {}}, "weights"),
        ({"inputs": {"weights": np.ones(3, np.float32)}}, "weights"),
        ({"inputs": {"weights": np.array([1, np.nan, 1, 1, 1], np.float32)}}, "weights"),
        ({"targets": np.array([1, 2, 3])}, "target_tokens"),
        ({"targets": np.array([1, 2, 3, 4, 99])}, "target_tokens"),
        ({"tokens": np.array([1, -2, 3, 4, 5])}, "model_input"),
        ({"tokens": np.zeros(0, int)}, "model_input"),
        ({"tokens": np.zeros(100, int)}, "model_input"),
    ],
)
async def test_a_datum_of_which_no_loss_can_be_computed_is_named_and_adds_nothing(session_of_all, change, named):
    good = data(0)
    parts = {"tokens": good[0].tokens, "targets": good[0].targets, "inputs": good[0].inputs, **change}
    with pytest.raises(ValueError, match=f"datum 2: {named}"):
        await session_of_all.forward_backward([*good[1:], Datum(**parts)])
    with pytest.raises(ValueError, match="optim_step"):
        await session_of_all.optim_step()


@pytest.fixture
async def session_of_all(tmp_path):
    async with small(tmp_path) as session:
        yield session


async def test_misuse_is_named(session_of_all):
    with pytest.raises(TypeError, match="list"):
        await session_of_all.forward_backward(data(0)[0])
    with pytest.raises(ValueError, match="at least one"):
        await session_of_all.forward_backward([])
    sample = (await session_of_all.generate(["7>"], n=2).collect())[0].samples[0]
    with pytest.raises(TypeError, match="advantage"):
        await session_of_all.forward_backward([sample], "ppo")
    with pytest.raises(TypeError, match="lr"):
        session_of_all.optim_step(lr=1)
    with pytest.raises(ValueError, match="beta2"):
        session_of_all.optim_step(beta2=1.0)


async def test_a_datum_of_a_sample_has_its_numbers_where_its_learned_tokens_are_predicted(session_of_all):
    (group,) = await session_of_all.generate(["78>"], n=1).collect()
    sample: Sample = group.samples[0]
    datum = Datum.of(sample, advantage=2.0)
    prompt, count = len(sample.prompt.token_ids), len(sample.response_ids)
    assert list(datum.targets[prompt - 1 :]) == list(sample.response_ids)
    np.testing.assert_array_equal(datum.inputs["advantages"], [0.0] * (prompt - 1) + [2.0] * count)
    np.testing.assert_array_equal(datum.inputs["logprobs"][prompt - 1 :], sample.logprobs)
    (found,) = (await session_of_all.forward([datum])).logprobs
    np.testing.assert_allclose(found[prompt - 1 :], sample.logprobs, atol=1e-5)
