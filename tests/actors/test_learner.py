"""The learner against a plain loop, and its independence of how a batch is cut."""

import math

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlinf.actors.learner import Learner
from rlinf.data.batch import pad, policy_batch
from rlinf.data.sample import Prompt, Sample

CLIP = {"clip_low": 0.2, "clip_high": 0.28}
VOCABULARY = 13


def model(seed=0):
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        "qwen2", vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=48, tie_word_embeddings=True,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def samples(count=9, seed=0, temperature=0.8):
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        length = int(rng.integers(1, 7))
        made.append(
            Sample(
                prompt=Prompt(number, rng.integers(0, VOCABULARY, rng.integers(1, 6))),
                index=0,
                response_ids=rng.integers(0, VOCABULARY, length),
                logprobs=(-2.5 + 0.3 * rng.normal(size=length)).astype(np.float32),
                versions=np.zeros(length, dtype=np.int32),
                text="",
                truncated=False,
                temperature=temperature,
            )
        )
    return made, rng.normal(size=count).tolist()


def gradients(of):
    return {name: parameter.grad.clone() for name, parameter in of.named_parameters()}


def by_a_plain_loop(net, made, advantages):
    """One sample after the other, one token after the other, no padding; returns the mean loss."""
    total, count = torch.zeros(()), 0
    for sample, gain in zip(made, advantages, strict=True):
        ids = torch.tensor([[*sample.prompt.token_ids, *sample.response_ids]])
        logprobs = torch.log_softmax(net(ids).logits[0] / sample.temperature, dim=-1)
        for i, token in enumerate(sample.response_ids):
            ratio = (logprobs[len(sample.prompt.token_ids) - 1 + i, token] - sample.logprobs[i]).exp()
            total = total + torch.maximum(-gain * ratio, -gain * ratio.clamp(0.8, 1.28))
            count += 1
    return total / count


def cut_into(made, advantages, sizes):
    start = 0
    for size in sizes:
        yield policy_batch(made[start : start + size], advantages[start : start + size])
        start += size
    assert start == len(made)


@pytest.mark.parametrize("sizes", [[9], [1] * 9, [4, 5], [2, 6, 1]])
def test_gradients_are_those_of_a_plain_loop_however_the_batch_is_cut(sizes):
    made, advantages = samples()
    plain = model()
    loss = by_a_plain_loop(plain, made, advantages)
    loss.backward()
    expected = gradients(plain)

    ours = model()
    learner = Learner(ours, lr=0.0, grad_clip=math.inf)
    learner.begin()
    for batch in cut_into(made, advantages, sizes):
        learner.learn_policy(batch, **CLIP)
    tokens = sum(len(sample.response_ids) for sample in made)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad / tokens, expected[name], atol=1e-6, rtol=1e-5)
    gathered, numbers = learner.step()
    assert numbers["loss"] == pytest.approx(float(loss.detach()), abs=1e-6)
    assert float(gathered.weight) == tokens
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in expected.values()))
    assert numbers["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_supervised_gradients_are_those_of_a_plain_loop():
    made, _ = samples()
    plain, ours = model(), model()
    losses = []
    for sample in made:
        ids = torch.tensor([[*sample.prompt.token_ids, *sample.response_ids]])
        logprobs = torch.log_softmax(plain(ids).logits[0, :-1], dim=-1).gather(1, ids[0, 1:, None])
        losses.append(-logprobs[len(sample.prompt.token_ids) - 1 :])
    torch.cat(losses).mean().backward()
    learner = Learner(ours, lr=0.0, grad_clip=math.inf)
    for piece in (made[:3], made[3:]):
        learner.learn_answers(pad([(sample.prompt.token_ids, sample.response_ids) for sample in piece]))
    tokens = sum(len(sample.response_ids) for sample in made)
    for name, expected in gradients(plain).items():
        torch.testing.assert_close(dict(ours.named_parameters())[name].grad / tokens, expected, atol=1e-6, rtol=1e-5)


def test_steps_are_those_of_adam_with_warm_up_and_clipping():
    made, advantages = samples()
    plain, ours = model(), model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    learner = Learner(ours, lr=0.01, warmup_steps=3, betas=(0.9, 0.99), weight_decay=0.1, grad_clip=0.05)
    for number in range(5):
        optimizer.zero_grad()
        by_a_plain_loop(plain, made, advantages).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * min(1, (number + 1) / 3)
        optimizer.step()
        learner.learn_policy(policy_batch(made, advantages), **CLIP)
        assert learner.step()[1]["lr"] == pytest.approx(group["lr"])
    for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


def test_entropy_is_that_of_the_distribution():
    net = model()
    learner = Learner(net, lr=0.0)
    made, advantages = samples(count=1, temperature=1.0)
    batch = policy_batch(made, advantages)
    _, entropy = learner.logprobs(batch.tokens, batch.temperature)
    spread = torch.distributions.Categorical(logits=net(batch.tokens.input_ids).logits[:, :-1]).entropy()
    torch.testing.assert_close(entropy[batch.tokens.mask], spread[batch.tokens.mask])


def test_the_mismatch_is_measured_when_asked():
    made, advantages = samples()
    learner = Learner(model(), lr=0.0)
    learner.learn_policy(policy_batch(made, advantages), **CLIP)
    learner.learn_policy(policy_batch(made, advantages), **CLIP, compare=True)
    values = learner.step()[0].values()
    assert 0 < values["mismatch/mean"] < values["mismatch/max"] < 10


def test_a_step_without_a_token_is_refused():
    learner = Learner(model(), lr=0.1)
    with pytest.raises(ValueError, match="not one token"):
        learner.step()
    learner.learn_answers(pad([(np.array([1, 2]), np.array([], dtype=np.int64))]))
    with pytest.raises(ValueError, match="not one token"):
        learner.step()


def test_a_loss_that_is_no_number_changes_nothing():
    net = model()
    before = [parameter.clone() for parameter in net.parameters()]
    learner = Learner(net, lr=0.1)
    made, _ = samples()
    learner.learn_policy(policy_batch(made, [math.nan] * len(made)), **CLIP)
    with pytest.raises(FloatingPointError, match="not both finite"):
        learner.step()
    for parameter, old in zip(net.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
    learner.learn_policy(policy_batch(made, [1.0] * len(made)), **CLIP)  # and it goes on
    learner.step()
