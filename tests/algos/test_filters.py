"""What is learned from, and how a batch is filled."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf.algos import advantages
from rlinf.algos.advantages import Filling


def test_groups_of_equal_rewards_are_found():
    rewards, groups = torch.tensor([1.0, 0, 0, 0, 1.0, 2.0]), torch.tensor([4, 9, 4, 9, 7, 9])
    assert advantages.uneven(rewards, groups).tolist() == [True, True, True, True, False, True]
    assert advantages.uneven(torch.ones(3), torch.zeros(3)).tolist() == [False] * 3
    assert advantages.uneven(torch.zeros(0), torch.zeros(0)).tolist() == []


def test_answers_that_were_cut_lose_their_tokens():
    mask = torch.tensor([[1, 1], [1, 0]])
    assert advantages.whole(mask, torch.tensor([True, False])).tolist() == [[False, False], [True, False]]


@given(st.integers(1, 20), st.integers(1, 8), st.lists(st.booleans(), max_size=400))
def test_a_batch_is_filled_exactly_or_the_rounds_are_used_up(wanted, max_rounds, luck):
    filling, drawn, kept = Filling(wanted, max_rounds), iter(luck), 0
    while draw := filling.next_round():
        assert 1 <= draw <= wanted
        kept += sum(filling.offer(next(drawn, False)) for _ in range(draw))
    assert kept == filling.kept <= wanted
    assert filling.rounds <= max_rounds
    assert kept == wanted or filling.rounds == max_rounds
    assert filling.next_round() == 0


def test_a_round_asks_for_what_the_luck_so_far_lets_expect():
    filling = Filling(wanted=10, max_rounds=9)
    assert filling.next_round() == 10
    assert [filling.offer(i < 8) for i in range(10)].count(True) == 8
    assert filling.next_round() == 3  # two are missing, and eight of ten were kept


def test_what_comes_when_the_batch_is_full_is_not_kept():
    filling = Filling(wanted=1, max_rounds=1)
    assert filling.offer(True)
    assert not filling.offer(True)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: advantages.uneven(torch.zeros(2), torch.zeros(3)), r"groups \[3\]"),
        (lambda: advantages.whole(torch.zeros(2, 3), torch.zeros(3)), r"truncated \[3\]"),
        (lambda: Filling(wanted=0, max_rounds=1), "wanted=0"),
    ],
)
def test_what_does_not_fit_is_named(call, text):
    with pytest.raises(ValueError, match=text):
        call()
