"""What judged answers come to: right ones are counted by one rule, whatever the rewards."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rlinf.data.sample import Group, Prompt, Sample
from rlinf.flows.evaluate import measure


def problem(number: int, answers: list[tuple[str, float | None]]) -> Group:
    """A problem and its answers: of each the text, and the reward if it was scored."""
    prompt = Prompt(number, np.zeros(1, np.int64), f"{number}>", "a")
    tokens, empty = np.zeros(2, np.int64), np.zeros(2, np.float32)
    return Group(
        prompt,
        tuple(
            Sample(
                prompt, 0, tokens, empty, empty, text, False, reward=reward, outcome="error" if reward is None else "ok"
            )
            for text, reward in answers
        ),
    )


REWARDS = st.one_of(st.none(), st.sampled_from([0.0, 0.2, 0.5, 0.51, 1.0]), st.floats(-10, 10))
ANSWERS = st.lists(st.tuples(st.sampled_from("abc"), REWARDS), min_size=1, max_size=5)
PROBLEMS = st.lists(ANSWERS, min_size=1, max_size=4)


@given(PROBLEMS.filter(lambda problems: any(reward is not None for each in problems for _, reward in each)))
@example([[("a", 0.2), ("b", 1.0), ("b", 0.4)]])
def test_maj_at_1_is_pass_at_1_for_any_rewards(problems):
    metrics = measure([problem(i, answers) for i, answers in enumerate(problems)], [1])
    shares = [[reward > 0.5 for _, reward in each if reward is not None] for each in problems]
    right = np.mean([np.mean(each) for each in shares if each])
    assert metrics["maj@1"] == pytest.approx(metrics["pass@1"]) == pytest.approx(right)


def test_a_graded_reward_is_a_mean_and_its_answers_are_still_right_or_wrong():
    metrics = measure([problem(0, [("a", 0.2), ("a", 0.2), ("b", 1.0)])], [1, 3])
    assert metrics["accuracy"] == pytest.approx(1.4 / 3)
    assert metrics["pass@1"] == pytest.approx(1 / 3) == metrics["maj@1"]
    assert (metrics["pass@3"], metrics["maj@3"]) == (1.0, 0.0), "the majority is partly right, which is not right"
