"""Running statistics against those of everything at once."""

from functools import partial

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf.models.policy.actor_critic import RunningNorm


@given(st.lists(st.integers(0, 7), min_size=1, max_size=5), st.integers(0, 2**31), st.floats(-1e3, 1e3))
def test_batches_one_after_the_other_are_as_good_as_all_at_once(lengths, seed, offset):
    rng = np.random.default_rng(seed)
    batches = [offset + rng.normal(size=(length, 3)) * [1e-2, 1, 50] for length in lengths]
    norm = RunningNorm(3)
    for batch in batches:
        norm.update(torch.from_numpy(batch))
    whole = np.concatenate(batches)
    assert norm.count == len(whole)
    if len(whole):
        np.testing.assert_allclose(norm.mean.numpy(), whole.mean(0), rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(norm.squares.numpy() / len(whole), whole.var(0), rtol=1e-6, atol=1e-8)


def replaced(sums, by):
    return by


def given_by(rank, share):
    """The sums that a rank would give to be added up."""
    told, copy = [], RunningNorm(3)
    copy.load_state_dict(rank.state_dict())
    copy.update(share, reduce=lambda sums: told.append(sums) or sums)
    return told[0]


def test_ranks_that_add_their_sums_up_agree_with_one_that_saw_all():
    torch.manual_seed(0)
    shares = torch.randn(4, 3).double() + 5, torch.randn(9, 3).double() - 2
    alone, ranks = RunningNorm(3), [RunningNorm(3), RunningNorm(3)]
    for _ in range(2):
        alone.update(torch.cat(shares))
        added = sum(given_by(rank, share) for rank, share in zip(ranks, shares, strict=True))
        for rank, share in zip(ranks, shares, strict=True):
            rank.update(share, reduce=partial(replaced, by=added))
    for rank in ranks:
        for name, buffer in rank.state_dict().items():
            torch.testing.assert_close(buffer, alone.state_dict()[name])


def test_rows_that_do_not_count_change_nothing():
    rows = torch.tensor([[1.0], [100.0], [3.0]])
    norm, other = RunningNorm(1), RunningNorm(1)
    norm.update(rows, torch.tensor([True, False, True]))
    other.update(rows[[0, 2]])
    assert torch.equal(norm.mean, other.mean)
    norm.update(rows, torch.zeros(3, dtype=torch.bool))
    assert torch.equal(norm.squares, other.squares)


def test_before_anything_was_seen_rows_pass_as_they_are_up_to_the_limit():
    norm = RunningNorm(2, limit=4.0)
    assert norm(torch.tensor([[0.5, -9.0]])).tolist() == [[0.5, -4.0]]


def test_a_number_that_never_varies_becomes_zero_and_not_nan():
    norm = RunningNorm(1)
    norm.update(torch.full((5, 1), 7.3))
    assert norm(torch.full((2, 1), 7.3)).abs().max() < 0.1


def test_statistics_keep_their_precision_in_a_model_of_another_dtype():
    norm = RunningNorm(1)
    norm.update(torch.full((1000, 1), 1234.567))
    norm.to(torch.bfloat16)
    assert norm.mean.dtype == torch.float64
    assert norm.count == 1000
