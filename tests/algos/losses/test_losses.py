"""The losses against slow references written from the formulas, and their independence of how a batch is cut."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.algos import losses

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def by_the_formula(new, old, advantages, mask, clip_low, clip_high, dual_clip):
    """Loss sum and metrics, one token after the other."""
    total, seen, clipped_tokens, kl, ratios = 0.0, 0, 0, 0.0, []
    for row in range(new.shape[0]):
        for t in range(new.shape[1]):
            if not mask[row, t]:
                continue
            log_ratio = min(max(new[row, t] - old[row, t], -20.0), 20.0)
            ratio, gain = math.exp(log_ratio), advantages[row]
            clipped = min(max(ratio, 1 - clip_low), 1 + clip_high)
            loss = max(-gain * ratio, -gain * clipped)
            clipped_tokens += -gain * clipped > -gain * ratio
            if dual_clip is not None and gain < 0:
                loss = min(loss, -dual_clip * gain)
            total += loss
            seen += 1
            kl += ratio - 1 - log_ratio
            ratios.append(ratio)
    return total, seen, clipped_tokens, kl, ratios


def batch(seed, rows=3, tokens=5, spread=0.5):
    rng = np.random.default_rng(seed)
    old = -rng.random((rows, tokens)) * 3
    new = old + rng.normal(size=(rows, tokens)) * spread
    return new, old, rng.normal(size=rows), rng.random((rows, tokens)) < 0.7


def tensors(new, old, advantages, mask, dtype=torch.float32):
    return (
        torch.tensor(new, dtype=dtype, requires_grad=True),
        torch.tensor(old, dtype=dtype),
        torch.tensor(advantages, dtype=dtype),
        torch.tensor(mask),
    )


@given(st.integers(0, 2**31), st.floats(0, 1), st.floats(0, 2), st.sampled_from([None, 1.5, 3.0]), st.floats(0.01, 3))
@settings(max_examples=60)
def test_the_policy_loss_is_the_formula(seed, clip_low, clip_high, dual_clip, spread):
    numbers = batch(seed, spread=spread)
    found = losses.policy(
        *tensors(*numbers, dtype=torch.float64), clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    total, seen, clipped, kl, ratios = by_the_formula(*numbers, clip_low, clip_high, dual_clip)
    assert float(found.total.detach()) == pytest.approx(total, rel=1e-9, abs=1e-9)
    assert float(found.weight) == seen
    values = found.values()
    if seen:
        assert float(found.mean().detach()) == pytest.approx(total / seen, rel=1e-9, abs=1e-9)
        assert values["clip_frac"] == pytest.approx(clipped / seen)
        assert values["approx_kl"] == pytest.approx(kl / seen, rel=1e-6, abs=1e-9)
        assert values["ratio/mean"] == pytest.approx(sum(ratios) / seen)
        assert values["ratio/max"] == pytest.approx(max(ratios))


def test_one_token_by_hand():
    # ratio e^0.5 = 1.649 beyond 1.28: for a good token the gradient is gone, for a bad one it is not
    new, old, mask = torch.tensor([0.5], requires_grad=True), torch.tensor([0.0]), torch.tensor([True])
    good = losses.policy(new, old, torch.tensor([2.0]), mask, **CLIP)
    assert float(good.total.detach()) == pytest.approx(-2 * 1.28)
    assert torch.autograd.grad(good.total, new)[0].tolist() == [0.0]
    bad = losses.policy(new, old, torch.tensor([-2.0]), mask, **CLIP)
    assert float(bad.total.detach()) == pytest.approx(2 * math.exp(0.5))
    assert torch.autograd.grad(bad.total, new)[0].tolist() == pytest.approx([2 * math.exp(0.5)])


def test_the_dual_clip_bounds_what_a_bad_token_costs():
    new, old, mask = torch.tensor([3.0], requires_grad=True), torch.tensor([0.0]), torch.tensor([True])
    found = losses.policy(new, old, torch.tensor([-2.0]), mask, **CLIP, dual_clip=3.0)
    assert float(found.total.detach()) == 6.0
    assert found.values()["dual_clip_frac"] == 1.0
    assert torch.autograd.grad(found.total, new)[0].tolist() == [0.0]


@given(st.floats(-20, 20, width=32), st.floats(-20, 0, width=32))
@settings(max_examples=60)
def test_a_ratio_in_float32_is_as_exact_as_the_log_probs_are(difference, old):
    leaf, old = torch.tensor([old + difference]), torch.tensor([old])
    ratio = losses.policy(leaf, old, torch.ones(1), torch.ones(1), **CLIP).values()["ratio/max"]
    exact = math.exp(min(max(leaf.double().item() - old.double().item(), -20.0), 20.0))
    rounding = max(leaf.abs().item(), old.abs().item(), 1.0) * 2.0**-23  # of the log-probs and of their difference
    assert ratio == pytest.approx(exact, rel=2 * rounding)


def test_bf16_is_computed_in_float32():
    new, old, advantages, mask = tensors(*batch(6), dtype=torch.bfloat16)
    found = losses.policy(new, old, advantages, mask, **CLIP)
    expected = losses.policy(new.float(), old.float(), advantages.float(), mask, **CLIP)
    assert found.total.dtype == torch.float32
    assert found.total == expected.total


def test_the_supervised_loss_is_the_likelihood():
    logprobs = torch.tensor([[-1.0, -2.0], [-3.0, math.nan]], requires_grad=True)
    found = losses.supervised(logprobs, torch.tensor([[1, 1], [1, 0]]))
    assert float(found.mean().detach()) == 2.0
    assert torch.autograd.grad(found.mean(), logprobs)[0].flatten().tolist() == pytest.approx([-1 / 3] * 3 + [0])


def test_the_mismatch_is_mean_and_largest_distance():
    ours, theirs = torch.tensor([-1.0, -2.0, -math.inf, 5.0]), torch.tensor([-1.5, -2.25, -math.inf, 0.0])
    found = losses.mismatch(ours, theirs, torch.tensor([1, 1, 1, 0]))
    assert found["mismatch/mean"].value == 0.25
    assert found["mismatch/max"].value == 0.5


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"old_logprobs": torch.zeros(2, 4)}, r"old_logprobs \[2, 4\].*logprobs \[2, 3\]"),
        ({"mask": torch.zeros(3)}, r"mask \[3\]"),
        ({"advantages": torch.zeros(3)}, r"advantages \[3\].*\[2, 3\]"),
        ({"clip_low": 1.5}, "clip_low=1.5"),
        ({"clip_high": -0.1}, "clip_high=-0.1"),
        ({"dual_clip": 1.0}, r"dual_clip=1.0.*more.*1"),
    ],
)
def test_what_does_not_fit_is_named(change, text):
    good = {"old_logprobs": torch.zeros(2, 3), "advantages": torch.zeros(2), "mask": torch.ones(2, 3), **CLIP}
    with pytest.raises(ValueError, match=text):
        losses.policy(torch.zeros(2, 3), **{**good, **change})


def test_a_keyword_that_no_loss_has_is_refused_by_name():
    args = torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2), torch.ones(2, 3)
    with pytest.raises(TypeError, match=r"policy\(\).*'dual'"):
        losses.policy(*args, **CLIP, dual=3.0)
    with pytest.raises(TypeError, match=r"supervised\(\).*'norm'"):
        losses.supervised(args[0], args[3], norm=3.0)
