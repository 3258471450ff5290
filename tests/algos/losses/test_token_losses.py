"""Sums over tokens by the names that clients know: each is what its public definition says, and so is its gradient."""

import numpy as np
import pytest
import torch

from rlinf.algos.token_losses import NAMES, TokenLoss


def cross_entropy(logp, weights):
    return (-logp * weights).sum()


def importance_sampling(logp, old, gains):
    return -(torch.exp(logp - old) * gains).sum()


def ppo(logp, old, gains, low=0.8, high=1.2):
    ratio = torch.exp(logp - old)
    return -torch.min(ratio * gains, torch.clamp(ratio, low, high) * gains).sum()


def cispo(logp, old, gains, low=0.8, high=1.2):
    return -(torch.clamp(torch.exp(logp - old), low, high).detach() * logp * gains).sum()


def gspo(logp, old, gains, marks, low=0.8, high=1.2, parts=(170, 230)):
    total = 0.0
    for each in zip(*(x.split(parts) for x in (logp, old, gains, marks)), strict=True):
        new, past, advantages, marked = each
        mean = (new.detach() - past)[marked != 0].mean()
        ratio = torch.exp(mean + new - new.detach())
        total = total - torch.min(ratio * advantages, torch.clamp(ratio, low, high) * advantages).sum()
    return total


def dro(logp, old, gains, beta=0.05):
    return -(logp * gains - 0.5 * beta * (logp - old) ** 2).sum()


PUBLIC = {each.__name__: each for each in (cross_entropy, importance_sampling, ppo, cispo, gspo, dro)}


@pytest.mark.parametrize(
    ("name", "settings", "keywords"),
    [
        *((name, {}, {}) for name in NAMES),
        ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3}, {"low": 0.9, "high": 1.3}),
        ("gspo", {"clip_low_threshold": 0.5, "clip_high_threshold": 2}, {"low": 0.5, "high": 2.0}),
        ("cispo", {"clip_low_threshold": 0, "clip_high_threshold": 5}, {"low": 0.0, "high": 5.0}),
        ("dro", {"beta": 0.7}, {"beta": 0.7}),
    ],
)
def test_a_sum_and_its_gradient_are_those_of_the_public_definition(name, settings, keywords):
    rng = np.random.default_rng(3)
    inputs = {key: torch.tensor(rng.normal(size=400)) for key in ("weights", "logprobs", "advantages")}
    inputs["advantages"][::3] = 0.0
    inputs["sequence_ratio_mask"] = torch.tensor(rng.integers(2, size=400).astype(float))
    sequences = torch.tensor([0] * 170 + [1] * 230)
    ours, theirs = (torch.tensor(rng.normal(size=400), requires_grad=True) for _ in range(2))
    theirs.data.copy_(ours.data)
    loss = TokenLoss.of(name, settings)
    total = loss(ours, inputs, sequences).total
    expected = PUBLIC[name](theirs, *(inputs[each] for each in loss.inputs), **keywords)
    total.backward()
    expected.backward()
    torch.testing.assert_close(total, expected, atol=1e-11, rtol=1e-12)
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_a_token_without_weight_or_advantage_adds_nothing_however_impossible_it_is(name):
    logprobs = torch.tensor([-1.0, -torch.inf, -2.0], requires_grad=True)
    inputs = {"weights": torch.tensor([1.0, 0.0, -0.5]), "logprobs": torch.tensor([-1.1, -torch.inf, -2.1])}
    inputs["advantages"] = inputs["sequence_ratio_mask"] = inputs["weights"]
    total = TokenLoss.of(name)(logprobs, inputs).total
    total.backward()
    assert torch.isfinite(total)
    assert logprobs.grad[1] == 0
    assert (logprobs.grad[[0, 2]] != 0).all()


@pytest.mark.parametrize(
    ("name", "settings", "named"),
    [
        ("ppoo", {}, "'ppo'"),
        ("stable_reinforce", {}, "stable_reinforce"),
        ("gspo", {"clip_high_threshold": 0.9}, "clip_high_threshold"),
        ("cross_entropy", {"beta": 1}, "'beta'"),
        ("ppo", {"clip_high_threshold": 0.5}, "clip_high_threshold"),
        ("cispo", {"clip_low_threshold": float("nan")}, "clip_low_threshold"),
        ("ppo", {"clip_low_threshold": "much"}, "clip_low_threshold"),
        ("dro", {"beta": -1}, "beta"),
    ],
)
def test_a_loss_that_there_is_not_is_refused_by_what_is_wrong(name, settings, named):
    with pytest.raises(ValueError, match=named):
        TokenLoss.of(name, settings)
