"""Every objective under every aggregation: its formula, its gradient, and that no cutting of a batch changes them."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.algos import losses
from rlinf.algos.loss_sum import LossSum
from tests.algos import references
from tests.algos.cases import AGGREGATIONS, CASES, batch, packed, part, tensors

every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_aggregation = pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda a: a["how"])


@every_case
@every_aggregation
def test_the_loss_is_the_formula(case, aggregation):
    for seed, spread in ((1, 0.4), (2, 3.0), (3, 0.01)):
        arrays = batch(seed, spread=spread)
        expected = references.averaged(case.reference(arrays), arrays["mask"], **aggregation)
        found = case.loss(tensors(arrays), **aggregation)
        assert float(found.mean().detach()) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@every_case
@every_aggregation
def test_packed_tokens_give_the_same_loss_and_gradient(case, aggregation):
    b = tensors(batch(4))
    flat, ids = packed(b)
    for found in (case.loss(flat, **aggregation, sequences=ids), case.loss(b, **aggregation)):
        (gradient,) = torch.autograd.grad(found.mean(), b["new"], retain_graph=True)
        expected = case.loss(b, **aggregation)
        torch.testing.assert_close(found.mean(), expected.mean())
        torch.testing.assert_close(gradient, torch.autograd.grad(expected.mean(), b["new"])[0])
        assert found.values() == pytest.approx(expected.values())


@pytest.mark.parametrize("case", [case for case in CASES if not case.stopped], ids=str)
@every_aggregation
def test_the_gradient_is_the_derivative(case, aggregation):
    b = tensors(batch(5, rows=2, tokens=3))
    assert torch.autograd.gradcheck(lambda new: case.loss({**b, "new": new}, **aggregation).mean(), (b["new"],))


def test_cispo_stops_the_gradient_of_its_weight():
    b = tensors(batch(6))
    found = losses.cispo(b["new"], b["old"], b["advantages"], b["mask"], clip_low=0.3, clip_high=0.4)
    ratio = (b["new"] - b["old"]).exp().clamp(0.7, 1.4).detach()
    plain = -(ratio * b["advantages"][:, None] * b["new"])[b["mask"]].sum()
    for expected, gradient in zip(*(torch.autograd.grad(x, b["new"]) for x in (plain, found.total)), strict=True):
        torch.testing.assert_close(gradient, expected)


def test_aipo_stops_the_gradient_of_its_weight_but_not_of_the_drift():
    b = tensors(batch(7))
    found = losses.aipo(b["new"], b["old"], b["advantages"], b["mask"], cap=1.2, drift=0.05)
    log = b["new"] - b["old"]
    per_token = -log.exp().clamp(max=1.2).detach() * b["advantages"][:, None] * b["new"] + 0.05 * log.square()
    (expected,) = torch.autograd.grad(per_token[b["mask"]].sum(), b["new"])
    torch.testing.assert_close(torch.autograd.grad(found.total, b["new"])[0], expected)


@st.composite
def cuts(draw):
    """A batch, and its rows shuffled into random micro-batches, each padded or packed, some of them empty."""
    rows = draw(st.integers(1, 7))
    order = draw(st.permutations(range(rows)))
    bounds = sorted(draw(st.lists(st.integers(0, rows), max_size=4)))
    pieces = [order[start:end] for start, end in itertools.pairwise([0, *bounds, rows])]
    return draw(st.integers(0, 2**31)), rows, [(piece, draw(st.booleans())) for piece in pieces]


@every_case
@given(cut=cuts(), aggregation=st.sampled_from(AGGREGATIONS))
@settings(max_examples=20)
def test_the_gradient_does_not_depend_on_split_packing_or_order(case, cut, aggregation):
    seed, rows, pieces = cut
    b = tensors(batch(seed, rows=rows))
    whole = case.loss(b, **aggregation)
    (expected,) = torch.autograd.grad(whole.mean(), b["new"])
    gathered, added = torch.zeros_like(expected), 0
    for piece, pack in pieces:
        if pack:
            flat, ids = packed(b, piece)
            loss = case.loss(flat, **aggregation, sequences=ids)
        else:
            loss = case.loss(part(b, piece), **aggregation)
        gathered += torch.autograd.grad(loss.total, b["new"])[0]  # as a trainer does: sums, and one division at the end
        added = loss.detach() + added if isinstance(added, LossSum) else loss.detach()
    torch.testing.assert_close(gathered / max(float(added.weight), 1.0), expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(added.mean(), whole.mean().detach(), rtol=1e-9, atol=1e-12)
    assert added.values() == pytest.approx(whole.values(), rel=1e-6, abs=1e-9)


@every_case
def test_what_the_mask_hides_cannot_hurt(case):
    arrays = batch(8)
    arrays["mask"][0] = False  # a whole row without a token
    clean = case.loss(tensors(arrays))
    for poison in (math.nan, math.inf, -math.inf, 1e30):
        dirty = {name: x.copy() for name, x in arrays.items()}
        for name in ("new", "old", "behavior", "teacher"):
            dirty[name][~arrays["mask"]] = poison
        dirty["advantages"][0] = poison
        b = tensors(dirty)
        found = case.loss(b)
        assert float(found.total.detach()) == float(clean.total.detach())
        assert found.values() == clean.values()
        (gradient,) = torch.autograd.grad(found.total, b["new"])
        assert gradient.isfinite().all()
        assert (gradient[~b["mask"]] == 0).all()


@every_case
@every_aggregation
def test_nothing_that_counts_gives_zero_and_not_nan(case, aggregation):
    for rows, tokens, filled in ((3, 4, 0.0), (0, 4, 1.0), (3, 0, 1.0)):
        b = tensors(batch(9, rows=rows, tokens=tokens, filled=filled))
        found = case.loss(b, **aggregation)
        assert float(found.mean().detach()) == 0.0
        assert (torch.autograd.grad(found.mean(), b["new"])[0] == 0).all()
        assert all(value == 0.0 for value in found.values().values())


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_impossible_tokens_and_huge_ratios_stay_finite(case, dtype):
    extreme = [0.0, -1e3, -1e30, -math.inf]
    pairs = torch.tensor(list(itertools.product(extreme, repeat=3)), dtype=dtype)
    for gain in (-1.0, 0.0, 1.0):
        b = dict(zip(("new", "old", "behavior"), pairs.T[:, :, None].contiguous(), strict=True))
        b["new"].requires_grad_()
        b |= {"teacher": b["behavior"], "advantages": torch.full((len(pairs),), gain)}
        b["mask"] = torch.ones(b["old"].shape, dtype=torch.bool)
        if case.name.startswith("value"):  # a return of 1e30 is no degenerate token but a wrong number
            b = {name: x.detach().clamp(min=-1e3) for name, x in b.items()}
            b["new"].requires_grad_()
        if case.name in ("supervised", "entropy bonus"):
            b["new"] = b["new"].detach().clamp(min=-1e30).requires_grad_()
        found = case.loss(b)
        assert found.total.isfinite()
        assert all(math.isfinite(value) for value in found.values().values())
        assert torch.autograd.grad(found.total, b["new"])[0].isfinite().all()


@every_case
def test_bf16_is_computed_in_float32(case):
    rounded = {name: x if x.dtype == torch.bool else x.detach().bfloat16() for name, x in tensors(batch(10)).items()}
    rounded["new"].requires_grad_()
    wide = {name: x if x.dtype == torch.bool else x.detach().float() for name, x in rounded.items()}
    found, expected = case.loss(rounded), case.loss({**wide, "new": wide["new"].requires_grad_()})
    assert found.total.dtype == torch.float32
    assert found.total == expected.total
    assert torch.autograd.grad(found.total, rounded["new"])[0].dtype == torch.bfloat16


@every_case
def test_a_nan_that_counts_is_not_hidden(case):
    arrays = batch(11, filled=1.0)
    arrays["new"][1, 2] = math.nan
    assert case.loss(tensors(arrays)).total.isnan()


@every_case
def test_packed_tokens_without_sequences_are_refused_where_answers_matter(case):
    flat, _ = packed(tensors(batch(12)))
    flat["advantages"] = torch.ones_like(flat["old"])
    if not case.by_sequence:
        case.loss(flat)
    with pytest.raises(ValueError, match=r"packed.*`sequences`"):
        case.loss(flat, how="seq-mean-token-mean")
