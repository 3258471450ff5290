"""Losses on pairs, beside a loop in plain Python."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf.algos.preference import bradley_terry, dpo

NUMBER = st.floats(-30, 30, width=32)
PAIRS = st.lists(
    st.tuples(NUMBER, NUMBER, NUMBER, NUMBER, st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5
)


def softplus(x):
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def by_hand(pair, kind, beta, smoothing):
    chosen, rejected, ref_chosen, ref_rejected, length, other = pair
    apart = (chosen - ref_chosen) - (rejected - ref_rejected)
    if kind == "ipo":
        return ((chosen - ref_chosen) / length - (rejected - ref_rejected) / other - 1 / (2 * beta)) ** 2
    if kind == "hinge":
        return max(0.0, 1 - beta * apart)
    return (1 - smoothing) * softplus(-beta * apart) + smoothing * softplus(beta * apart)


@given(
    PAIRS,
    st.sampled_from([("sigmoid", 0.0), ("sigmoid", 0.2), ("ipo", 0.0), ("hinge", 0.0)]),
    st.floats(0.01, 2),
)
def test_dpo_is_the_formula_of_each_pair_and_its_gradient_too(pairs, how, beta):
    kind, smoothing = how
    columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*pairs, strict=True)]
    chosen, rejected = (column.requires_grad_() for column in columns[:2])
    found = dpo(
        chosen, rejected, *columns[2:4], loss=kind, beta=beta, label_smoothing=smoothing, lengths=tuple(columns[4:])
    )
    expected = [by_hand(pair, kind, beta, smoothing) for pair in pairs]
    assert found.mean().item() == pytest.approx(sum(expected) / len(pairs), rel=1e-9, abs=1e-12)
    apart = [(one - ref) - (other - ref_other) for one, other, ref, ref_other, *_ in pairs]
    metrics = found.values()
    assert metrics["rewards/margins"] == pytest.approx(beta * sum(apart) / len(pairs), rel=1e-9, abs=1e-9)
    assert metrics["rewards/accuracies"] == sum(each > 0 for each in apart) / len(pairs)
    assert metrics["rewards/chosen"] - metrics["rewards/rejected"] == pytest.approx(
        metrics["rewards/margins"], rel=1e-9, abs=1e-9
    )
    if kind == "sigmoid":  # the others have corners
        found.total.backward()
        for pair, slope in zip(pairs, chosen.grad.tolist(), strict=True):
            step = 1e-5
            ahead, behind = (by_hand((pair[0] + sign * step, *pair[1:]), kind, beta, smoothing) for sign in (1, -1))
            assert slope == pytest.approx((ahead - behind) / (2 * step), abs=1e-6)


@given(PAIRS, st.sampled_from([0.0, 0.1]), st.booleans())
def test_bradley_terry_is_the_formula_of_each_pair(pairs, center, margins):
    chosen, rejected, margin = (
        torch.tensor(column, dtype=torch.float64) for column in list(zip(*pairs, strict=True))[:3]
    )
    found = bradley_terry(chosen, rejected, margin if margins else None, center=center)
    expected = [
        softplus(-(one - other - (extra if margins else 0.0))) + center * (one + other) ** 2
        for one, other, extra, *_ in pairs
    ]
    assert float(found.mean()) == pytest.approx(sum(expected) / len(pairs), rel=1e-9)
    assert found.values()["rewards/accuracies"] == sum(one > other for one, other, *_ in pairs) / len(pairs)


def test_no_pair_is_a_loss_of_nothing():
    none = torch.empty(0, requires_grad=True)
    for found in (dpo(none, none, none, none), bradley_terry(none, none)):
        assert float(found.weight) == 0
        assert found.mean().item() == 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"loss": "sigmod"}, "sigmoid"),
        ({"beta": 0.0}, r"beta=0.0.*more.*0"),
        ({"label_smoothing": 0.6}, "label_smoothing"),
        ({"loss": "hinge", "label_smoothing": 0.1}, r"sigmoid.*hinge"),
        ({"loss": "ipo"}, r"give.*lengths"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        dpo(*torch.ones(4, 1), **settings)
