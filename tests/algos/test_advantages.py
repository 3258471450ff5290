"""Advantages against their formulas, written out in numpy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.algos.advantages import (
    distillation,
    gae,
    gae_tokens,
    group_relative,
    leave_one_out,
    reinforce_pp,
    turn_relative,
    whiten,
)
from tests.algos import references


def by_the_formula(rewards, groups, scale):
    out = np.zeros(len(rewards))
    for i, group in enumerate(groups):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        if len(set(members)) == 1:
            continue
        mean = sum(members) / len(members)
        out[i] = rewards[i] - mean
        if scale == "std":
            variance = sum((member - mean) ** 2 for member in members) / (len(members) - 1)
            out[i] /= variance**0.5 + 1e-6
    return out


answers = st.lists(
    st.tuples(st.sampled_from([0.0, 0.1, 0.5, 1.0, -2.0, 3.7]), st.integers(-2, 3)), min_size=1, max_size=40
)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.sampled_from([0.0, 0.5, -1.0, 2.0]), min_size=1, max_size=4)),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from([1.0, 0.5, 0.0]),
    st.sampled_from(["std", "none"]),
)
def test_turns_are_the_formula_of_their_returns_by_turn(played, gamma, scale):
    longest = max(len(rewards) for _, rewards in played)
    table = torch.tensor([[*rewards, *[9.0] * (longest - len(rewards))] for _, rewards in played])
    there = torch.tensor([[turn < len(rewards) for turn in range(longest)] for _, rewards in played])
    groups = torch.tensor([group for group, _ in played])
    found = turn_relative(table, groups, there, gamma=gamma, scale=scale)
    expected = np.zeros(table.shape)
    for turn in range(longest):
        rows = [row for row, (_, rewards) in enumerate(played) if turn < len(rewards)]
        returns = [sum(gamma**k * r for k, r in enumerate(played[row][1][turn:])) for row in rows]
        expected[rows, turn] = by_the_formula(returns, [played[row][0] for row in rows], scale)
    np.testing.assert_allclose(found.numpy(), expected, rtol=2e-5, atol=1e-6)


@given(answers, st.sampled_from(["std", "none"]))
def test_it_is_the_formula(answers, scale):
    rewards, groups = map(list, zip(*answers, strict=True))
    found = group_relative(torch.tensor(rewards), torch.tensor(groups), scale=scale)
    np.testing.assert_allclose(found.numpy(), by_the_formula(rewards, groups, scale), rtol=2e-5, atol=1e-6)


def test_one_right_answer_in_four_by_hand():
    found = group_relative(torch.tensor([1.0, 0, 0, 0]), torch.tensor([7, 7, 7, 7]))
    assert found.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)  # mean 1/4, std 1/2


@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 20), st.sampled_from(["std", "none"]))
def test_equal_rewards_give_exactly_zero(reward, count, scale):
    found = group_relative(torch.full((count,), reward), torch.zeros(count, dtype=torch.int64), scale=scale)
    assert found.tolist() == [0.0] * count


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_whatever_comes_in_float32_comes_out(dtype):
    found = group_relative(torch.tensor([1, 0, 0, 0]).to(dtype), torch.zeros(4, dtype=torch.int64))
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


@given(answers)
def test_leave_one_out_is_the_distance_from_the_others(answers):
    rewards, groups = map(list, zip(*answers, strict=True))
    expected = []
    for i, group in enumerate(groups):
        others = [r for j, r in enumerate(rewards) if groups[j] == group and j != i]
        expected.append(rewards[i] - sum(others) / len(others) if others else 0.0)
    found = leave_one_out(torch.tensor(rewards), torch.tensor(groups))
    np.testing.assert_allclose(found.numpy(), expected, rtol=2e-5, atol=1e-6)


@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 20))
def test_leave_one_out_of_equal_rewards_is_exactly_zero(reward, count):
    assert leave_one_out(torch.full((count,), reward), torch.zeros(count)).tolist() == [0.0] * count


@given(st.integers(0, 2**31), st.integers(0, 6), st.integers(1, 3), st.floats(0, 1), st.floats(0, 1))
def test_gae_is_the_sum_over_what_is_ahead(seed, steps, count, gamma, lam):
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=(steps, count)), rng.normal(size=(steps + 1, count))
    dones = rng.random((steps + 1, count)) < 0.3
    found = gae(*map(torch.tensor, (rewards, values, dones)), gamma=gamma, lam=lam)
    for x, expected in zip(found, references.gae(rewards, values, dones, gamma, lam), strict=True):
        np.testing.assert_allclose(x.numpy(), expected, rtol=1e-9, atol=1e-9)


def test_what_stands_behind_an_end_is_not_read():
    values = torch.tensor([[0.0], [math.nan], [math.inf]])
    found, _ = gae(torch.ones(1, 1), values[:2], torch.tensor([[0], [1]]))
    assert found.item() == 1.0


@given(st.integers(0, 2**31), st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=50)
def test_gae_over_tokens_is_gae_of_each_answer_by_itself(seed, gamma, lam):
    rng = np.random.default_rng(seed)
    mask = rng.random((4, 6)) < 0.6
    rewards, values = np.where(mask, rng.normal(size=(4, 6)), np.nan), np.where(mask, rng.normal(size=(4, 6)), np.nan)
    found = gae_tokens(*map(torch.tensor, (rewards, values, mask)), gamma=gamma, lam=lam)
    for row in range(4):
        inside = mask[row]
        alone = np.append(values[row][inside], 0.0)[:, None]
        ends = np.arange(len(alone))[:, None] == inside.sum()
        expected = references.gae(rewards[row][inside][:, None], alone, ends, gamma, lam)
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x[row].numpy()[inside], y[:, 0], rtol=1e-9, atol=1e-9)
            assert (x[row].numpy()[~inside] == 0).all()


@given(st.integers(0, 2**31), st.booleans(), st.booleans(), st.booleans())
@settings(max_examples=50)
def test_reinforce_pp_is_the_formula(seed, with_kl, with_groups, per_token):
    rng = np.random.default_rng(seed)
    mask = rng.random((5, 4)) < 0.7
    mask[0, 0] = True
    rewards = np.where(mask, rng.normal(size=(5, 4)), 0.0) if per_token else rng.normal(size=5)
    kl = rng.normal(size=(5, 4)) if with_kl else None
    groups = rng.integers(0, 2, 5) if with_groups else None
    options = {"kl": None if kl is None else torch.tensor(kl), "kl_beta": 0.1 if with_kl else 0.0}
    found = reinforce_pp(
        torch.tensor(rewards), torch.tensor(mask), **options, groups=None if groups is None else torch.tensor(groups)
    )
    expected = references.reinforce_pp(rewards, mask, kl, 0.1, groups)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-6)


@given(st.integers(0, 2**31), st.sampled_from([torch.float32, torch.float64]))
def test_whitening_gives_mean_zero_and_variance_one(seed, dtype):
    rng = np.random.default_rng(seed)
    x, mask = rng.normal(3, 2, size=(4, 5)), rng.random((4, 5)) < 0.6
    mask[0, :2] = True
    found = whiten(torch.tensor(x, dtype=dtype), torch.tensor(mask))
    np.testing.assert_allclose(found.numpy(), references.whitened(x, mask), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("baseline", [False, True])
@pytest.mark.parametrize("reward", [0.0, 0.1, -7.3e8])
def test_reinforce_pp_gives_exactly_nothing_where_all_rewards_are_equal(baseline, reward):
    mask, kl = torch.ones(6, 3), 1e-7 * torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    groups = torch.tensor([0, 0, 1, 1, 2, 2]) if baseline else None
    rewards = torch.full((6,), reward, dtype=torch.float64)
    assert (reinforce_pp(rewards, mask, kl=kl, kl_beta=1e-3, groups=groups) == 0).all()
    of_tokens = rewards[:, None] * torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64)
    assert (reinforce_pp(of_tokens, mask, groups=groups) == 0).all()


def test_whitening_shares_gives_what_whitening_all_does():
    x, mask = torch.randn(9, 3, dtype=torch.float64), torch.rand(9, 3) < 0.7
    sums = []

    def passes(rank_of, which):
        """Run one share up to its next sum, with the sums so far answered."""

        def reduce(own):
            sums[which].append(own)
            if len(sums[which]) <= len(rank_of):
                return rank_of[len(sums[which]) - 1]
            raise StopIteration

        return reduce

    shares = [slice(0, 0), slice(0, 2), slice(2, 9)]  # the first has nothing at all
    answered = []
    for _ in range(2):
        sums = [[] for _ in shares]
        for which, share in enumerate(shares):
            with pytest.raises(StopIteration):
                whiten(x[share], mask[share], reduce=passes(answered, which))
        answered.append(sum(of_rank[-1] for of_rank in sums))
    sums = [[] for _ in shares]
    found = [whiten(x[s], mask[s], reduce=passes(answered, i)) for i, s in enumerate(shares)]
    torch.testing.assert_close(torch.cat(found), whiten(x, mask))


def test_whitening_equal_numbers_or_nothing_gives_zero():
    for number in (1e3, 0.1, -1e9 / 3):
        assert whiten(torch.full((30, 7), number, dtype=torch.float64), torch.ones(30, 7)).abs().sum() == 0
    assert whiten(torch.randn(3, 2), torch.zeros(3, 2)).abs().sum() == 0
    assert whiten(torch.tensor([5.0, math.nan]), torch.tensor([1, 0])).tolist() == [0.0, 0.0]


def test_distillation_is_the_teachers_verdict():
    found = distillation(
        torch.tensor([-1.0, -math.inf, math.nan]), torch.tensor([-3.0, -1, -1]), torch.tensor([1, 1, 0])
    )
    assert found.tolist() == [2.0, -20.0, 0.0]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: group_relative(torch.zeros(2, 2), torch.zeros(4)), r"rewards \[2, 2\].*groups \[4\]"),
        (lambda: group_relative(torch.zeros(2), torch.zeros(2), scale="nome"), "'none'"),
        (lambda: gae(torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(4, 2)), r"one row more.*values \[3, 2\]"),
        (lambda: gae(torch.zeros(3, 2), torch.zeros(4, 2), torch.zeros(4, 2), gamma=1.5), "gamma=1.5"),
        (lambda: leave_one_out(torch.zeros(2, 2), torch.zeros(4)), r"leave_one_out: .*groups \[4\]"),
        (lambda: reinforce_pp(torch.zeros(3), torch.zeros(2, 2)), r"mask \[2, 2\] and rewards \[3\]"),
        (lambda: reinforce_pp(torch.zeros(2), torch.zeros(2, 2), kl_beta=0.1), "kl_beta=0.1 without kl"),
        (lambda: reinforce_pp(torch.zeros(2), torch.zeros(2, 2), kl=torch.zeros(2)), r"kl \[2\]"),
        (lambda: whiten(torch.zeros(2), torch.zeros(3)), r"mask \[3\].*shape.*\[2\]"),
        (lambda: distillation(torch.zeros(2), torch.zeros(3), torch.zeros(2)), r"logprobs \[3\]"),
        (lambda: gae_tokens(torch.zeros(2, 2), torch.zeros(2, 3), torch.zeros(2, 2)), r"values \[2, 3\]"),
    ],
)
def test_what_does_not_fit_is_named(call, text):
    with pytest.raises(ValueError, match=text):
        call()
