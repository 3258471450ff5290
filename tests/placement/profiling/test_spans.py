"""Arithmetic on stretches of time says what counting small cells one by one says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.placement.bound import NEVER, fair_shares, in_turn, joined, length, spans, until

CELLS = 12
pairs = st.lists(st.tuples(st.integers(0, CELLS), st.integers(0, CELLS)).map(sorted).map(tuple), max_size=6)


def cells(intervals):
    return {cell for start, end in intervals for cell in range(int(start), int(end))}


def array(intervals):
    return np.array(intervals, float).reshape(-1, 2)


@given(pairs, pairs)
def test_joined_time_is_the_same_time_in_order_and_apart(first, second):
    both = joined(array(first), array(second))
    assert cells(both) == cells(first) | cells(second)
    assert length(both) == len(cells(first) | cells(second))
    assert (both[1:, 0] > both[:-1, 1]).all()
    assert (both[:, 1] > both[:, 0]).all()


@given(pairs, st.lists(st.integers(0, CELLS), max_size=5))
def test_the_time_before_a_moment_is_what_lies_before_it(intervals, moments):
    apart = joined(array(intervals))
    before = [sum(cell < moment for cell in cells(intervals)) for moment in moments]
    assert until(apart, np.array(moments, float)) == pytest.approx(before)


@given(st.lists(pairs, min_size=1, max_size=4))
def test_shares_divide_each_moment_among_those_who_are_on(parts):
    own = [cells(part) for part in parts]
    expected = [sum(1 / sum(cell in other for other in own) for cell in mine) for mine in own]
    assert fair_shares([joined(array(part)) for part in parts]) == pytest.approx(expected)


@given(st.lists(pairs, min_size=1, max_size=4))
def test_in_turn_each_gets_what_those_before_it_leave(parts):
    own = [cells(part) for part in parts]
    expected = [len(mine - set().union(*own[:number])) for number, mine in enumerate(own)]
    assert in_turn([joined(array(part)) for part in parts]) == pytest.approx(expected)


def test_intervals_are_cut_to_their_step():
    assert spans(((8.0, 11.0), (12.0, 13.0), (14.0, 20.0)), 10.0, 15.0).tolist() == [[0, 1], [2, 3], [4, 5]]
    assert spans((), 0.0, 1.0).shape == NEVER.shape
