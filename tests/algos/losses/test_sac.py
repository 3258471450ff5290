"""Off-policy learners for control, by hand and against their formulas."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf.algos import critic_losses

EVERY = torch.ones(3)


def test_the_smallest_prediction_of_all_or_of_some_critics():
    values = torch.tensor([[1.0, 5.0], [2.0, 4.0], [3.0, 3.0]])
    assert critic_losses.pessimistic(values).tolist() == [1.0, 3.0]
    possible = [[min(a[0], b[0]), min(a[1], b[1])] for a, b in itertools.combinations(values.tolist(), 2)]
    drawn = [
        critic_losses.pessimistic(values, subset=2, generator=torch.Generator().manual_seed(seed)).tolist()
        for seed in range(30)
    ]
    assert all(draw in possible for draw in drawn)  # without replacement: never one critic twice
    assert len({tuple(draw) for draw in drawn}) == 3


def test_the_target_looks_ahead_unless_the_episode_ended():
    found = critic_losses.soft_target(
        torch.tensor([1.0, 1.0]),
        torch.tensor([False, True]),
        torch.tensor([4.0, math.nan]),
        torch.tensor([-2.0, -2.0]),
        gamma=0.5,
        alpha=0.25,
        steps=2,
    )
    assert found.tolist() == [1 + 0.25 * (4 + 0.25 * 2), 1.0]


def test_targets_are_no_better_or_worse_than_any_return_can_be():
    rewards, ahead = torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.tensor([3.0, -1.0, 0.4, 0.0])
    ended = torch.tensor([False, False, False, True])
    found = critic_losses.soft_target(
        rewards, ended, ahead, torch.zeros(4), gamma=0.5, alpha=0.0, returns=(-0.25, 1.25)
    )
    assert found.tolist() == [1.25, -0.25, pytest.approx(1.2), 1.0]


def test_every_critic_is_drawn_to_the_target():
    values = torch.tensor([[1.0, 2.0, 9.0], [3.0, 2.0, 9.0]], requires_grad=True)
    found = critic_losses.critics(values, torch.tensor([2.0, 2.0, math.nan]), torch.tensor([1, 1, 0]))
    assert (float(found.total.detach()), float(found.weight)) == (1.0, 2.0)  # (1 + 1) / 2 + 0
    assert torch.autograd.grad(found.total, values)[0].tolist() == [[-1, 0, 0], [1, 0, 0]]
    assert found.values() == {"q/mean": 2.0, "target/mean": 2.0}


def test_moves_are_drawn_to_those_that_somebody_showed():
    moves = torch.tensor([[0.5, 0.0], [1.0, 1.0], [9.0, 9.0]], requires_grad=True)
    theirs = torch.tensor([[0.0, 1.0], [1.0, 1.0], [math.nan, 0.0]])
    found = critic_losses.likeness(moves, theirs, torch.tensor([1, 1, 0]))
    assert (float(found.total.detach()), float(found.weight)) == (1.25, 2.0)
    assert torch.autograd.grad(found.total, moves)[0].tolist() == [[1.0, -2.0], [0.0, 0.0], [0.0, 0.0]]


def test_the_policy_trades_value_for_entropy():
    logprobs, values = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True), torch.tensor([1.0, 1.0, 1.0])
    alpha = torch.tensor(0.5, requires_grad=True)
    found = critic_losses.actor(logprobs, values, EVERY, alpha=alpha)
    assert float(found.mean().detach()) == pytest.approx(0.5 * -2 - 1)
    assert torch.autograd.grad(found.total, logprobs)[0].tolist() == [0.5] * 3
    assert found.values()["entropy"] == 2.0


def test_the_temperature_rises_where_entropy_is_too_low():
    log_alpha = torch.tensor(0.0, requires_grad=True)
    for logprob, direction in ((-1.0, 1), (-5.0, -1)):  # entropies of 1 and 5 nats; 3 are wanted
        found = critic_losses.temperature(log_alpha, torch.full((3,), logprob), EVERY, target_entropy=3.0)
        slope = torch.autograd.grad(found.mean(), log_alpha)[0]
        assert float(-slope) * direction == pytest.approx(2.0)
    assert found.values()["alpha"] == 1.0


def test_a_target_network_follows_slowly():
    assert critic_losses.polyak(torch.tensor([0.0]), torch.tensor([1.0]), tau=0.25).tolist() == [0.25]


@pytest.mark.parametrize("loss", ["critics", "actor", "temperature"])
def test_gradients_are_derivatives_and_do_not_depend_on_the_split(loss):
    generator = torch.Generator().manual_seed(0)
    leaf, other = (torch.randn(5, dtype=torch.float64, generator=generator) for _ in range(2))
    mask = torch.tensor([1, 1, 0, 1, 1])

    def run(x, rows):
        return {
            "critics": lambda: critic_losses.critics(torch.stack([x, 2 * x])[:, rows], other[rows], mask[rows]),
            "actor": lambda: critic_losses.actor(x[rows], other[rows] * x[rows], mask[rows], alpha=0.3),
            "temperature": lambda: critic_losses.temperature(x[0], other[rows], mask[rows], target_entropy=1.0),
        }[loss]()

    leaf.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: run(x, slice(None)).mean(), (leaf,))
    whole, parts = run(leaf, slice(None)), run(leaf, slice(0, 2)) + run(leaf, slice(2, 5))
    torch.testing.assert_close(torch.autograd.grad(parts.mean(), leaf)[0], torch.autograd.grad(whole.mean(), leaf)[0])


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: critic_losses.pessimistic(torch.zeros(3)), r"\[critics, batch\], got \[3\]"),
        (lambda: critic_losses.pessimistic(torch.zeros(2, 3), subset=3), r"subset=3.*between 1.*2"),
        (lambda: critic_losses.soft_target(*[EVERY] * 3, torch.zeros(2), gamma=0.9, alpha=1.0), r"next_logprobs \[2\]"),
        (lambda: critic_losses.soft_target(*[EVERY] * 4, gamma=1.9, alpha=1.0), "gamma=1.9"),
        (lambda: critic_losses.critics(torch.zeros(2, 3), torch.zeros(2), EVERY), r"targets \[2\]"),
        (lambda: critic_losses.likeness(torch.zeros(3, 2), torch.zeros(3, 1), EVERY), r"theirs \[3, 1\]"),
        (lambda: critic_losses.actor(EVERY, torch.zeros(2), EVERY, alpha=1.0), r"values \[2\]"),
        (lambda: critic_losses.polyak(EVERY, torch.zeros(2), tau=0.5), r"source \[2\]"),
    ],
)
def test_what_does_not_fit_is_named(call, text):
    with pytest.raises(ValueError, match=text):
        call()


@given(
    st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=1, max_size=8),
    st.floats(0.05, 0.95),
)
def test_expectile_regression_weighs_what_is_above_and_below(pairs, tau):
    found, total, values = 0.0, 0.0, torch.tensor([v for _, v in pairs], requires_grad=True)
    targets = torch.tensor([q for q, _ in pairs])
    for q, v in zip(targets.tolist(), values.tolist(), strict=True):  # eq. 5, number by number
        found += abs(tau - (1 if q - v < 0 else 0)) * (q - v) ** 2
        total += 1
    loss = critic_losses.expectile(values, targets, torch.ones(len(pairs)), tau=tau)
    assert float(loss.mean().detach()) == pytest.approx(found / total, rel=1e-5, abs=1e-6)


@given(st.lists(st.tuples(st.floats(-3, 0), st.floats(-2, 4)), min_size=1, max_size=6), st.floats(0, 3))
def test_good_actions_are_imitated_more_than_bad_ones(pairs, beta):
    logprobs = torch.tensor([each for each, _ in pairs], requires_grad=True)
    advantages = torch.tensor([each for _, each in pairs])
    mask = torch.tensor([True] * len(pairs) + [False])
    loss = critic_losses.weighted_likelihood(
        torch.cat([logprobs, torch.tensor([math.nan])]),
        torch.cat([advantages, torch.tensor([math.inf])]),
        mask,
        beta=beta,
        most=10.0,
    )
    weights = [min(math.exp(beta * each), 10.0) for each in advantages.tolist()]  # eq. 7
    slope = torch.autograd.grad(loss.total, logprobs)[0]
    assert slope.tolist() == pytest.approx([-each for each in weights], rel=1e-5)
    assert loss.values()["weight/mean"] == pytest.approx(sum(weights) / len(weights), rel=1e-5)
