"""Estimates of the divergence."""

import math

import pytest
import torch

from rlinf.algos import losses, recipes
from tests.algos import references


@pytest.mark.parametrize("kind", losses.KINDS)
def test_it_is_the_formula(kind):
    new, ref = torch.randn(50, dtype=torch.float64), torch.randn(50, dtype=torch.float64) * 3
    expected = [references.kl_of(a, b, kind) for a, b in zip(new.tolist(), ref.tolist(), strict=True)]
    assert losses.estimate(new, ref, kind).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(("kind", "tolerance"), [("k1", 1e-9), ("k3", 1e-9), ("k2", 0.02)])
def test_the_expectation_over_tokens_is_the_divergence(kind, tolerance):
    policy, reference = (torch.softmax(torch.randn(40, dtype=torch.float64) * s, 0) for s in (0.3, 0.2))
    expected = (policy * (policy / reference).log()).sum()
    found = (policy * losses.estimate(policy.log(), reference.log(), kind)).sum()
    assert float(found) == pytest.approx(float(expected), abs=tolerance)


@pytest.mark.parametrize("kind", losses.KINDS)
def test_the_gradient_is_the_derivative(kind):
    new = torch.randn(20, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: losses.estimate(x, torch.zeros_like(x), kind), (new,))


@pytest.mark.parametrize("kind", losses.KINDS)
def test_extremes_stay_finite_and_lose_their_slope(kind):
    new = torch.tensor([-1e30, 0.0, -math.inf, -math.inf, -300.0], requires_grad=True)
    ref = torch.tensor([0.0, -1e30, -math.inf, 0.0, 0.0])
    found = losses.estimate(new, ref, kind)
    (slope,) = torch.autograd.grad(found.sum(), new)
    assert found.isfinite().all()
    assert found[2] == 0
    assert slope[[0, 1, 3, 4]].tolist() == [0.0] * 4
    if kind == "k3":
        assert found.max() == 10.0


def test_k3_is_cut_where_one_chooses_and_the_share_of_tokens_that_are_is_told():
    new = torch.tensor([-3.0, -2.0, 0.5, -50.0], dtype=torch.float64, requires_grad=True)
    ref, mask = torch.zeros(4, dtype=torch.float64), torch.tensor([1, 1, 1, 0])
    for cut, expected in ((10.0, 1 / 3), (1.0, 2 / 3), (None, None)):
        found = losses.kl(new, ref, mask, cut=cut)
        (slope,) = torch.autograd.grad(found.total, new)
        pulled = [1.0 - math.exp(-d) for d in (-3.0, -2.0, 0.5)]
        free = [cut is None or math.exp(-d) - 1 + d <= cut for d in (-3.0, -2.0, 0.5)]
        assert slope.tolist() == pytest.approx([each * yes for each, yes in zip(pulled, free, strict=True)] + [0.0])
        assert found.values().get("kl/cut") == (None if expected is None else pytest.approx(expected))
    far = torch.tensor([-1e30, -math.inf], requires_grad=True)
    assert losses.estimate(far, torch.zeros(2), cut=None).isfinite().all()
    assert recipes.get("deepseek_grpo", {"kl.cut": None}).kl.cut is None
    with pytest.raises(ValueError, match="cut=0"):
        recipes.get("deepseek_grpo", {"kl.cut": 0})


def test_wrong_names_and_shapes_are_named():
    with pytest.raises(ValueError, match=r"kind='k4'.*none"):
        losses.estimate(torch.zeros(2), torch.zeros(2), "k4")
    with pytest.raises(ValueError, match=r"ref_logprobs \[3\].*shape.*logprobs \[2\]"):
        losses.estimate(torch.zeros(2), torch.zeros(3))
