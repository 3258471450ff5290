"""Divergences against their formulas written with plain probabilities, and against torch's own kl_div."""

import pytest
import torch
import torch.nn.functional as F

from rlinf.algos import recipes
from rlinf.algos.algorithms import loss_of
from rlinf.algos.divergences import KINDS, TAILS, divergence, over_top
from rlinf.algos.loss_sum import MicroBatch


def two(seed=0, rows=6, vocabulary=17):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(2, rows, vocabulary, dtype=torch.float64, generator=generator)
    return logits[0].log_softmax(-1), logits[1].requires_grad_()


def by_formula(teacher, student, kind, beta):
    """sum_x of the definition, by torch's kl_div: KL(target || input) from log-probs of both."""

    def kl(of, to):
        return F.kl_div(to, of, reduction="none", log_target=True).sum(-1)

    if kind == "forward":
        return kl(teacher, student)
    if kind == "reverse":
        return kl(student, teacher)
    mixture = (beta * teacher.exp() + (1 - beta) * student.exp()).log()
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def assert_equal(ours, theirs, logits):
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-10)
    weights = torch.arange(1.0, len(ours) + 1, dtype=torch.float64)
    gradients = [
        torch.autograd.grad((values * weights).sum(), logits, retain_graph=True)[0] for values in (ours, theirs)
    ]
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_value_and_gradient_are_those_of_the_formula(kind, beta):
    teacher, logits = two()
    student = logits.log_softmax(-1)
    assert_equal(divergence(teacher, student, kind, beta), by_formula(teacher, student, kind, beta), logits)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tail", TAILS)
def test_over_the_likeliest_tokens_others_are_one_token_or_none(kind, tail):
    teacher, logits = two()
    student = logits.log_softmax(-1)
    top, ids = teacher.topk(4)
    p, q = top.exp(), student.exp().gather(1, ids)
    if tail == "bucket":
        p, q = (torch.cat([each, 1 - each.sum(-1, keepdim=True)], 1) for each in (p, q))
    else:
        p, q = (each / each.sum(-1, keepdim=True) for each in (p, q))
    expected = by_formula(p.log(), q.log(), kind, 0.3)
    assert_equal(over_top(ids, top, student, kind, 0.3, tail), expected, logits)


@pytest.mark.parametrize("kind", KINDS)
def test_with_more_tokens_it_grows_to_the_whole_divergence(kind):
    teacher, logits = two(rows=3)
    student = logits.log_softmax(-1)
    whole = divergence(teacher, student, kind, 0.4)
    found = []
    for k in range(1, 18):
        top, ids = teacher.topk(k)
        found.append(over_top(ids, top, student, kind, 0.4))
    rising = torch.stack(found)
    assert bool((rising.diff(dim=0) > -1e-9).all())
    torch.testing.assert_close(rising[-1], whole)


def test_a_jsd_leans_to_either_side_near_its_ends():
    teacher, logits = two()
    student = logits.log_softmax(-1).detach()
    for beta, kind in ((1e-6, "forward"), (1 - 1e-6, "reverse")):
        scaled = divergence(teacher, student, "jsd", beta) / (beta * (1 - beta))
        torch.testing.assert_close(scaled, divergence(teacher, student, kind), atol=2e-3, rtol=1e-3)


def test_what_one_of_them_never_says_gives_numbers_and_gradients():
    teacher, logits = two()
    banned = teacher.clone()
    banned[:, 0] = -torch.inf
    for kind in KINDS:
        values = divergence(banned.log_softmax(-1), logits.log_softmax(-1), kind)
        (gradient,) = torch.autograd.grad(values.sum(), logits)
        assert bool(values.isfinite().all() and gradient.isfinite().all())


def test_the_loss_of_a_micro_batch_is_their_mean_over_what_counts():
    values = torch.tensor([0.5, 3.0, 1.0, 2.0], requires_grad=True)
    mask = torch.tensor([True, False, True, True])
    ids = torch.tensor([0, 0, 0, 1])
    for how, expected in (("token-mean", 3.5 / 3), ("seq-mean-token-mean", (0.75 + 2.0) / 2)):
        spec = recipes.get("opd", {"loss": "divergence", "aggregation": {"how": how}})
        loss = loss_of(spec, MicroBatch(torch.zeros(4), mask, divergence=values, sequences=ids))
        assert float(loss.mean().detach()) == pytest.approx(expected)
        assert loss.metrics["divergence"].value == pytest.approx(3.5 / 3)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"kind": "revers"}, "kind"),
        ({"beta": 1.5}, "beta"),
        ({"kind": "jsd", "beta": 0.0}, "beta"),
        ({"top_k": 0}, "top_k"),
        ({"tail": "cut"}, "tail"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_their_names(changes, key):
    with pytest.raises(ValueError, match=key):
        recipes.get("opd", {"loss": {"name": "divergence", **changes}})
