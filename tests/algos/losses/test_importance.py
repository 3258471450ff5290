"""Corrections for tokens that another policy drew."""

import math

import pytest
import torch

from rlinf.algos import losses

# ratios 2, 1/2 and 3 of one answer, 1 of another; the last token is hidden
NEW = torch.tensor([[math.log(2.0), math.log(0.5), math.log(3.0)], [0.0, 0.0, math.nan]])
OLD = torch.zeros(2, 3)
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"cap": 2.5}, [[2.0, 0.5, 2.5], [1.0, 1.0, 0.0]]),
        ({"cap": 2.5, "floor": 0.7}, [[2.0, 0.7, 2.5], [1.0, 1.0, 0.0]]),
        ({"cap": 2.5, "floor": 0.7, "outside": "mask"}, [[2.0, 0.0, 0.0], [1.0, 1.0, 0.0]]),
        ({"cap": 5.0, "level": "sequence"}, [[3.0, 3.0, 3.0], [1.0, 1.0, 0.0]]),
        ({"cap": 2.0, "level": "sequence"}, [[2.0, 2.0, 2.0], [1.0, 1.0, 0.0]]),
        ({"cap": 2.0, "level": "sequence", "outside": "mask"}, [[0.0, 0.0, 0.0], [1.0, 1.0, 0.0]]),
        ({"cap": 5.0, "level": "geometric"}, [[3 ** (1 / 3)] * 3, [1.0, 1.0, 0.0]]),
        ({"cap": 1.4, "level": "geometric", "outside": "mask"}, [[0.0, 0.0, 0.0], [1.0, 1.0, 0.0]]),
    ],
)
def test_weights_by_hand(options, expected):
    found, _ = losses.weights(NEW, OLD, MASK, **options)
    torch.testing.assert_close(found, torch.tensor(expected))
    kept = MASK.bool()
    ids = torch.tensor([[0] * 3, [1] * 3])[kept]
    flat, _ = losses.weights(NEW[kept], OLD[kept], torch.ones(5), **options, sequences=ids)
    torch.testing.assert_close(flat, torch.tensor(expected)[kept])


def test_what_to_watch_is_told_before_the_cut():
    _, metrics = losses.weights(NEW, OLD, MASK, cap=2.5, floor=0.7)
    assert metrics["is/mean"].value == pytest.approx((2 + 0.5 + 3 + 1 + 1) / 5)
    assert metrics["is/max"].value == pytest.approx(3)
    assert metrics["is/outside"].value == pytest.approx(2 / 5)


def test_extreme_sequences_stay_finite():
    found, metrics = losses.weights(torch.zeros(1, 9), torch.full((1, 9), -15.0), torch.ones(1, 9), level="sequence")
    assert found.tolist() == [[2.0] * 9]
    assert math.isfinite(metrics["is/max"].value)
    found, _ = losses.weights(torch.full((1, 2), -math.inf), torch.zeros(1, 2), torch.ones(1, 2))
    assert found.max() < 1e-8


def test_bad_answers_that_were_left_behind_drop_out():
    new = torch.tensor([[-3.0, -1.0], [-3.0, -1.0], [-1.0, -1.0]])
    old = torch.tensor([[-1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0]])  # mean drift 1, 1 and 0
    advantages = torch.tensor([-1.0, 1.0, -1.0])
    found, metrics = losses.drifted(new, old, advantages, torch.ones(3, 2), most=0.5)
    assert found.tolist() == [[0, 0], [1, 1], [1, 1]]
    assert metrics["drifted"].value == pytest.approx(1 / 3)
    per_token, _ = losses.drifted(new, old, advantages[:, None].expand(3, 2), torch.ones(3, 2), most=0.5)
    assert per_token.tolist() == found.tolist()


@pytest.mark.parametrize(
    ("bounds", "stays"),
    [
        ({"floor": 0.5, "cap": 1.5}, True),  # the geometric mean is 3 ** (1 / 3) = 1.44
        ({"floor": 0.5, "cap": 1.4}, False),
        ({"floor": 0.5, "cap": 1.5, "least": 0.4}, True),
        ({"floor": 0.5, "cap": 1.5, "least": 0.6}, False),  # one ratio is 1/2
    ],
)
def test_an_answer_is_rejected_whole_by_its_mean_or_by_one_token(bounds, stays):
    found, metrics = losses.rejected(NEW, OLD, MASK, **bounds)
    assert found.expand(2, 3)[MASK.bool()].tolist() == [float(stays)] * 3 + [1.0, 1.0]
    assert metrics["rejected"].value == pytest.approx(0 if stays else 3 / 5)
    mirrored, _ = losses.rejected(OLD, NEW, MASK, floor=1 / bounds["cap"], cap=10.0)
    assert mirrored[0, 0] == (bounds["cap"] == 1.5), "a mean that is too small counts like one that is too large"


def test_the_proximal_policy_lies_on_the_line_by_versions():
    new, old = torch.full((4,), -1.0), torch.full((4,), -3.0)
    versions = torch.tensor([0, 2, 3, 4])  # the update makes version 4; just before it was 3
    found = losses.interpolate(new, old, versions, current=4)
    assert found.tolist() == pytest.approx([-3 + 2 * 3 / 4, -3 + 2 * 1 / 2, -3.0, -3.0])


def test_the_proximal_policy_of_impossible_tokens_is_no_nan():
    found = losses.interpolate(torch.zeros(1), torch.full((1,), -math.inf), torch.tensor([3]), current=4)
    assert not found.isnan().any()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: losses.weights(NEW, OLD[:1], MASK), r"behavior_logprobs \[1, 3\]"),
        (lambda: losses.weights(NEW, OLD, MASK, cap=0.5, floor=0.7), r"floor=0.7.*least 0.*less"),
        (lambda: losses.weights(NEW, OLD, MASK, level="seq"), r"level='seq'.*none"),
        (lambda: losses.weights(NEW, OLD, MASK, outside="masked"), "meant 'mask'"),
        (lambda: losses.drifted(NEW, OLD, torch.zeros(5), MASK, most=1.0), r"advantages \[5\]"),
        (lambda: losses.rejected(NEW, OLD[:1], MASK, floor=0.5, cap=2.0), r"behavior_logprobs \[1, 3\]"),
        (lambda: losses.rejected(NEW, OLD, MASK, floor=1.0, cap=2.0), r"floor=1.0.*least 0.*less"),
        (lambda: losses.rejected(NEW, OLD, MASK, floor=0.5, cap=2.0, least=1.5), r"least=1.5.*least 0"),
        (lambda: losses.interpolate(NEW, OLD, OLD, current=4, proximal=4), r"before current=4"),
    ],
)
def test_what_does_not_fit_is_named(call, text):
    with pytest.raises(ValueError, match=text):
        call()
