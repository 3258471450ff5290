"""The reward functions that come with the package."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.rewards.exact import exact
from rlinf.rewards.format import format
from rlinf.rewards.math import math
from rlinf.rewards.regex import regex


@pytest.mark.parametrize(("response", "reward"), [("1234", 1.0), ("1243", 0.0), ("1234 ", 0.0), ("", 0.0)])
def test_exact_is_character_for_character(response, reward):
    assert exact(response, "1234") == reward


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        (" <think>\na\n</think>\n\n<answer>b</answer>\n", 1),
        ("<think></think><answer></answer>", 1),
        ("x<think>a</think><answer>b</answer>", 0),
        ("<think>a</think>x<answer>b</answer>", 0),
        ("<think>a</think><answer>b</answer>x", 0),
        ("<answer>b</answer><think>a</think>", 0),
        ("<think>a<answer>b</answer></think>", 0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0),
        ("<think>a</think><answer>b", 0),
        ("<think>a<answer></think>b</answer>", 0),
        ("", 0),
    ],
)
def test_format_wants_each_tag_once_in_order_and_nothing_else(response, reward):
    assert format(response) == reward


@given(st.lists(st.sampled_from(["<a>", "</a>", "<b>", "</b>", "x", " "]), max_size=8).map("".join))
def test_format_agrees_with_the_regular_expression_that_says_the_same(text):
    import re

    pattern = r"\s*<a>(?:(?!</?[ab]>).)*</a>\s*<b>(?:(?!</?[ab]>).)*</b>\s*"
    assert format(text, tags=("a", "b")) == float(re.fullmatch(pattern, text, re.DOTALL) is not None)


def test_a_pattern_is_looked_for_anywhere():
    assert regex("so\nit is 5", "", pattern=r"it.is \d").value == 1
    assert regex("so it is x", "", pattern=r"it is \d").value == 0
    assert regex("it\nis 5", "", pattern=r"it.is").value == 1


def test_the_last_group_named_answer_is_compared():
    found = regex("answer: A, no, answer:  B .", "B", pattern=r"answer:(?P<answer>[^,.]+)")
    assert (found.value, found.extracted) == (1, "B")
    assert regex("answer: A.", "B", pattern=r"answer:(?P<answer>[^,.]+)").value == 0
    assert regex("nothing", "B", pattern=r"answer:(?P<answer>[^,.]+)").value == 0


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        (r"so \boxed{\frac12}", "0.5", True),
        ("the answer is 42.", "42", True),
        ("the answer is 41.", "42", False),
        ("It is $x=3$", "3", True),
        ("1,234", "1234", True),
        (r"first 5, then \boxed{6}", "6", True),
        (r"\boxed{6} and 5 more", r"\boxed{6}", True),
        (r"\boxed{\{1,2\}}", r"$\{2,1\}$", True),
        (r"\boxed{(x+1)^2}", "x^2+2x+1", True),
        ("7 eggs", "5 + 2 = 7\n#### 7", True),
        ("5 eggs", "5 + 2 = 7\n#### 7", False),
        ("nothing", "4", False),
        ("", "4", False),
    ],
)
def test_mathematics_is_compared_by_what_it_means(response, answer, right):
    assert math(response, answer).value == right


def test_what_was_extracted_is_told():
    assert math(r"\boxed{\frac12}", "0.5").extracted == "1/2"
    assert math("nothing", "1").extracted is None


def test_an_answer_that_is_no_mathematics_is_nobody_s_wrong_answer():
    with pytest.raises(ValueError, match=r"read.*mathematics"):
        math("5", "")
