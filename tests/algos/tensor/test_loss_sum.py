"""Metrics that are sums: right after adding, whatever was added first."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.algos import losses
from rlinf.algos.losses import Explained, LossSum, Mean


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


def test_staleness_is_in_versions():
    found = losses.staleness(torch.tensor([3, 5, 0]), torch.tensor([1, 1, 0]), current=5)
    assert {name: metric.value for name, metric in found.items()} == {"staleness/mean": 1.0, "staleness/max": 2.0}


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
