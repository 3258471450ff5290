"""Metrics that are sums: right after adding, whatever was added first."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.algos import losses
from rlinf.algos.loss_sum import Explained, LossSum, Mean


@given(st.integers(0, 2**31), st.integers(0, 12), st.integers(0, 12))
@settings(max_examples=40)
def test_explained_variance_of_parts_adds_up_to_that_of_all(seed, first, second):
    rng = np.random.default_rng(seed)
    target = rng.normal(5, 1, size=first + second)
    guess = target + rng.normal(size=first + second)

    def of(part):
        new, wanted = torch.tensor(guess[part]), torch.tensor(target[part])
        return losses.value(new, new, wanted, torch.ones(len(new))).metrics["explained_variance"]

    added = of(slice(0, first)) + of(slice(first, None))
    if first + second > 1:
        assert added.value == pytest.approx(1 - np.var(target - guess) / np.var(target), rel=1e-6)
    else:
        assert added.value == 0.0


def test_targets_that_do_not_vary_have_nothing_to_explain():
    equal = torch.full((1000,), 0.1)
    found = losses.value(torch.randn(1000), equal, equal, torch.ones(1000)).metrics["explained_variance"]
    assert found.value == 0.0


def test_the_share_of_clipped_values_looks_at_how_far_they_moved():
    new, old = torch.tensor([0.0, 0.5, -0.5, 0.1]), torch.zeros(4)
    found = losses.value(new, old, old, torch.ones(4), clip=0.2)
    assert found.values()["value_clip_frac"] == 0.5


@given(st.integers(0, 2**31), st.integers(0, 12), st.integers(1, 12))
@settings(max_examples=40)
def test_what_differs_by_age_is_told_age_by_age_and_adds_up_over_parts(seed, first, second):
    rng = np.random.default_rng(seed)
    count, current, oldest = first + second, 7, 2
    new, old = -rng.random(count) * 3, -rng.random(count) * 3
    versions, mask = rng.integers(3, current + 1, count), rng.random(count) < 0.8
    versions[~mask] = -1
    new[~mask] = np.nan

    def of(part):
        given = (torch.tensor(x[part]) for x in (new, old, versions, mask))
        found = losses.by_age(*given, current=current, oldest=oldest)
        return LossSum(torch.zeros(()), torch.zeros(()), found)

    found = (of(slice(0, first)) + of(slice(first, None))).values()
    apart, ages = new - old, np.minimum(current - versions, oldest)
    expected = {}
    for age, name in enumerate(("mismatch/mean", "staleness/drift/1", "staleness/drift/2")):
        if len(those := np.abs(apart[mask & (ages == age)])):
            expected[name] = those.mean()
            expected |= {"mismatch/max": those.max()} if age == 0 else {}
    if mask.any():
        weights = np.exp(apart[mask])
        expected["staleness/ess"] = weights.sum() ** 2 / (len(weights) * (weights**2).sum())
    assert found == pytest.approx(expected), "an age that no token has is absent, and not 0"


def test_the_effective_size_of_equal_weights_is_all_and_of_one_that_has_everything_its_share():
    old, versions, mask = torch.zeros(4), torch.zeros(4), torch.ones(4)
    equal = losses.by_age(old - 0.7, old, versions, mask, current=1, oldest=1)
    assert equal["staleness/ess"].value == pytest.approx(1.0)
    one = torch.tensor([0.0, -20.0, -20.0, -20.0])
    assert losses.by_age(one, old, versions, mask, current=1, oldest=1)["staleness/ess"].value == pytest.approx(0.25)


def test_a_further_term_keeps_the_weight_and_adds_its_metrics():
    one = LossSum(torch.tensor(3.0), torch.tensor(2.0), {"a": Mean(torch.tensor(1.0), torch.tensor(1.0))})
    two = LossSum(torch.tensor(4.0), torch.tensor(2.0), {"b": Mean(torch.tensor(5.0), torch.tensor(1.0))})
    both = one.plus(two, 0.5)
    assert (float(both.total), float(both.weight), both.values()) == (5.0, 2.0, {"a": 1.0, "b": 5.0})


def test_kinds_of_metric_do_not_mix():
    a = LossSum(torch.tensor(1.0), torch.tensor(1.0), {"m": Explained(torch.zeros(5))})
    b = LossSum(torch.tensor(1.0), torch.tensor(1.0), {"m": Mean(torch.tensor(1.0), torch.tensor(1.0))})
    with pytest.raises(TypeError, match="two names"):
        a + b
