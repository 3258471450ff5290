"""Sums and weights of the four aggregations, by hand."""

import math

import pytest
import torch

from rlinf.algos import losses
from rlinf.algos.loss_sum import ids_of_lengths

LOSS = torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0], [5.0, 5.0, 5.0]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])  # sums 3 over two tokens, 10 over one, nothing over none

BY_HAND = [
    ("token-mean", None, 13.0, 3.0),
    ("seq-mean-token-sum", None, 13.0, 2.0),
    ("seq-mean-token-mean", None, 11.5, 2.0),
    ("seq-mean-token-sum-norm", 5.0, 13.0, 10.0),
]


@pytest.mark.parametrize(("how", "norm_length", "total", "weight"), BY_HAND)
def test_totals_and_weights_by_hand(how, norm_length, total, weight):
    found = losses.reduce(LOSS, MASK, how, norm_length)
    assert (float(found.total), float(found.weight)) == (total, weight)


@pytest.mark.parametrize(("how", "norm_length", "total", "weight"), BY_HAND)
def test_it_is_differentiable_and_the_same_packed(how, norm_length, total, weight):
    loss = LOSS.clone().requires_grad_()
    found = losses.reduce(loss.square(), MASK, how, norm_length)
    kept = MASK.bool()
    ids = torch.arange(3)[:, None].expand(3, 3)[kept]
    flat = losses.reduce(loss[kept].square(), torch.ones(3), how, norm_length, sequences=ids)
    gradients = [torch.autograd.grad(x.mean(), loss)[0] for x in (found, flat)]
    torch.testing.assert_close(*gradients)
    scale = {"seq-mean-token-mean": torch.tensor([[0.5], [1.0], [0.0]])}.get(how, 1.0)
    torch.testing.assert_close(gradients[0], 2 * LOSS * MASK * scale / weight)


def test_a_hidden_nan_does_not_pass():
    found = losses.reduce(torch.where(MASK.bool(), LOSS, math.nan), MASK, "seq-mean-token-mean")
    assert float(found.total) == 11.5


def test_ids_of_lengths_may_be_empty_in_between():
    assert ids_of_lengths([2, 0, 1]).tolist() == [0, 0, 2]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"how": "token_mean"}, r"how='token_mean'.*none.*; meant"),
        ({"how": "seq-mean-token-sum-norm"}, "needs it"),
        ({"how": "token-mean", "norm_length": 3.0}, "norm_length"),
        ({"how": "seq-mean-token-sum-norm", "norm_length": 0.0}, r"norm_length=0.0.*more.*0"),
        ({"how": "seq-mean-token-sum", "sequences": torch.zeros(3, dtype=torch.int64)}, r"sequences \[3\]"),
        ({"how": "seq-mean-token-sum", "sequences": torch.zeros(3, 3)}, "whole numbers"),
        ({"how": "seq-mean-token-sum", "sequences": torch.full((3, 3), -1)}, "found -1"),
    ],
)
def test_what_does_not_fit_is_named(arguments, text):
    with pytest.raises(ValueError, match=text):
        losses.reduce(LOSS, MASK, **arguments)


def test_a_mask_of_another_shape_is_named():
    with pytest.raises(ValueError, match=r"mask \[2, 3\].*loss \[3, 3\]"):
        losses.reduce(LOSS, MASK[:2])
