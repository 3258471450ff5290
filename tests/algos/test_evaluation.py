"""pass@k and maj@k against their definitions, by enumeration."""

import itertools
from collections import Counter
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.algos.evaluation import majority_at_k, pass_at_k, standard_errors, wilson_interval


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(right, data):
    k = data.draw(st.integers(1, len(right)))
    draws = list(itertools.combinations(right, k))
    assert pass_at_k(right, k) == pytest.approx(sum(any(draw) for draw in draws) / len(draws))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), min_size=1, max_size=7), st.data())
def test_maj_at_k_is_the_mean_over_all_draws_where_they_are_few(answers, data):
    k = data.draw(st.integers(1, len(answers)))
    texts, right = [text for text, _ in answers], [is_right for _, is_right in answers]

    def voted(draw):
        votes = Counter(texts[i] for i in draw)
        most = max(votes.values())
        firsts = {text: next(right[i] for i in draw if texts[i] == text) for text in votes if votes[text] == most}
        return sum(firsts.values()) / len(firsts)

    draws = list(itertools.combinations(range(len(answers)), k))
    exact = sum(voted(draw) for draw in draws) / len(draws)
    assert majority_at_k(texts, right, k) == pytest.approx(exact, abs=1e-9)


def test_the_most_frequent_answer_wins_even_if_it_is_wrong():
    assert majority_at_k(["7", "8", "8"], [True, False, False], 3) == 0.0
    assert majority_at_k(["8", "7", "7"], [False, True, True], 3) == 1.0
    for right in ([False, True], [True, False]):
        assert majority_at_k(["8", "7"], right, 2) == 0.5, "of equals, each has its share, whatever the order"


@pytest.mark.parametrize("k", [0, 3])
def test_more_answers_than_there_are_cannot_be_drawn(k):
    with pytest.raises(ValueError, match=r"between 1.*answers, 2"):
        pass_at_k([True, False], k)
    with pytest.raises(ValueError, match=r"between 1.*answers, 2"):
        majority_at_k(["a", "b"], [True, False], k)
    with pytest.raises(ValueError, match=r"2 answers, 1.*them"):
        majority_at_k(["a", "b"], [True], 1)


def test_maj_at_k_estimates_the_mean_where_the_draws_are_many():
    answers, right = ["7"] * 12 + ["8"] * 8, [True] * 12 + [False] * 8
    most_are_sevens = sum(comb(12, i) * comb(8, 5 - i) for i in range(3, 6)) / comb(20, 5)
    assert majority_at_k(answers, right, 5) == pytest.approx(most_are_sevens, abs=0.1)


@given(st.integers(1, 500), st.data())
def test_a_rate_at_either_end_of_its_interval_would_just_be_found_so_far_off(count, data):
    """The ends are where the score test stands at its quantile: |p - e| = z sqrt(e (1 - e) / n)."""
    solved, z = data.draw(st.integers(0, count)), data.draw(st.floats(0.5, 4))
    share = solved / count
    low, high = wilson_interval(solved, count, z)
    assert 0 <= low <= share <= high <= 1
    for end in (low, high):
        if 0 < end < 1:
            assert abs(share - end) == pytest.approx(z * (end * (1 - end) / count) ** 0.5, abs=1e-9)
    assert (low > 0, high < 1) == (solved > 0, solved < count)


def test_an_interval_is_the_textbooks_and_needs_an_attempt():
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)  # Newcombe (1998), table I
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    for solved, count in ((0, 0), (3, 2), (-1, 2)):
        with pytest.raises(ValueError, match=f"{solved} of {count} attempts"):
            wilson_interval(solved, count)


def test_standard_errors_are_the_spread_that_answering_again_and_other_problems_would_have():
    rng = np.random.default_rng(0)
    chances = rng.beta(0.5, 0.5, size=30)
    means, drawing = [], []
    for _ in range(400):
        answers = rng.random((30, 32)) < chances[:, None]
        means.append(answers.mean())
        drawing.append(standard_errors(answers.astype(float).tolist())[0])
    assert np.mean(drawing) == pytest.approx(np.std(means), rel=0.15)  # of 400 means: within 3.5 % in most cases
    of_problems = [(rng.random((30, 32)) < rng.beta(0.5, 0.5, size=(30, 1))).astype(float) for _ in range(400)]
    found = [standard_errors(each.tolist())[1] for each in of_problems]
    assert np.mean(found) == pytest.approx(np.std([each.mean() for each in of_problems]), rel=0.15)


def test_an_error_that_cannot_be_known_is_none():
    assert standard_errors([[1.0], [0.0]]) == (None, pytest.approx(0.5))
    assert standard_errors([[1.0, 0.0]]) == (pytest.approx(0.5), None)
    assert standard_errors([[1.0, 1.0], [1.0, 1.0]]) == (0.0, 0.0)
