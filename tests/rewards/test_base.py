"""Reward functions and how their arguments are found."""

import numpy as np
import pytest

from rlinf.data.sample import Prompt, Sample
from rlinf.rewards.base import Reward, load_reward
from rlinf.rewards.exact import exact


def sample(text="12", **row):
    prompt = Prompt(0, np.array([1]), "21>", "12", row)
    return Sample(prompt, 0, np.array([1]), np.array([0.0]), np.array([0]), text, truncated=True)


@pytest.mark.parametrize(("response", "reward"), [("1234", 1.0), ("1243", 0.0), ("1234 ", 0.0), ("", 0.0)])
def test_exact_is_character_for_character(response, reward):
    assert exact(response, "1234") == reward


def test_a_dotted_path_or_the_function_itself():
    assert load_reward("rlinf.rewards.exact") is exact
    assert load_reward("rlinf.rewards.exact.exact") is exact
    assert load_reward(exact) is exact


@pytest.mark.parametrize("path", ["rlinf.rewards.exact.exacd", "no.such.thing", "rlinf.rewards.exact.__name__"])
def test_a_path_to_nothing_is_named(path):
    with pytest.raises(ValueError, match=path):
        load_reward(path)


def test_arguments_are_bound_by_name():
    assert Reward(exact)(sample()) == 1.0
    assert Reward(lambda prompt, truncated: (prompt, truncated))(sample()) == ("21>", True)
    assert Reward(lambda level, answer="x": (level, answer))(sample(level=3)) == (3, "12")
    assert Reward(lambda other=5: other)(sample()) == 5


def test_a_function_that_takes_everything_gets_everything():
    got = Reward(lambda response, **row: (response, row))(sample(level=3))
    assert got == ("12", {"answer": "12", "prompt": "21>", "truncated": True, "level": 3})


def test_a_column_that_is_not_there_is_named():
    def graded(response, level):
        return 1.0

    with pytest.raises(ValueError, match=r"graded takes \['level'\].*\['answer', 'prompt', 'response', 'truncated'\]"):
        Reward(graded)(sample())


@pytest.mark.parametrize("value", [None, "a", float("nan"), float("inf"), []])
def test_only_finite_numbers_are_rewards(value):
    with pytest.raises(ValueError, match="finite number"):
        Reward(exact).checked(value)


def test_async_functions_and_objects_are_recognised():
    class Slow:
        async def __call__(self, response):
            return 1.0

    async def slow(response):
        return 1.0

    assert Reward(slow).is_async
    assert Reward(Slow()).is_async
    assert not Reward(exact).is_async
