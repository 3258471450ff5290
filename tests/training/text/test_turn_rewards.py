"""Rewards of turns: GAE has them where they fell, group-relative advantages by their sum."""

from dataclasses import replace

import numpy as np
import pytest

from rlinf.algos import recipes
from rlinf.data.sample import REWARDS, Group, Prompt, Sample
from rlinf.training.policy import RETURNS, advantage_rows, value_rows

PROMPT = Prompt(0, np.array([1]))


def sample(index, reward, fallen=None):
    """Two tokens, one that was only read, and one more."""
    mask = np.array([True, True, False, True])
    zeros = np.zeros(4, np.float32)
    told = {"values": zeros} if fallen is None else {"values": zeros, REWARDS: np.array(fallen, np.float32)}
    return Sample(
        PROMPT,
        index,
        np.arange(4),
        zeros,
        zeros.astype(np.int32),
        "",
        False,
        reward=reward,
        per_token=told,
        loss_mask=mask,
    )


def group(*samples):
    return Group(PROMPT, samples)


def test_returns_are_the_rewards_that_are_still_to_come():
    spec = recipes.get("ppo", {"advantage": {"gamma": 0.5, "whiten": False}})
    both = group(sample(0, 3.0, [0, 1, 0, 1.5]), sample(1, 3.0))  # half a reward more at the end of the first
    first, second = value_rows(spec, [both]).rows[0]
    assert first.columns[RETURNS].tolist() == [0.5 * (1 + 0.5 * 2), 1 + 0.5 * 2, 2]
    assert second.columns[RETURNS].tolist() == [0.75, 1.5, 3]


@pytest.mark.parametrize("old", [False, True])
def test_turns_are_compared_with_the_same_turn_of_others(old):
    spec = recipes.get("grpo", {"advantage": {"name": "turn_relative", "gamma": 0.5, "scale": "none"}})
    both = [sample(0, 3.0, [0, 1, 0, 2]), sample(1, 4.0, [0, 0, 0, 3])]
    if old:  # the first token of the first turn is too old: the turns are what they were
        both = [
            replace(
                one,
                loss_mask=np.array([False, True, False, True]),
                versions=np.array([0, 1, -1, 1], np.int32),
                too_old=1,
            )
            for one in both
        ]
    found = advantage_rows(spec, [group(*both)]).advantages
    to_come = [[1 + 0.5 * 2, 2], [0.5 * 4, 4]]
    expected = [[turn[0] - 2.0, turn[1] - 3.0] for turn in to_come]
    for gains, (early, late) in zip(found, expected, strict=True):
        assert gains.tolist() == [early] * (1 if old else 2) + [late]


def test_a_group_is_compared_by_the_sums():
    told = advantage_rows(recipes.get("grpo"), [group(sample(0, 3.0, [0, 1, 0, 2]), sample(1, 1.0, [0, 1, 0, 0]))])
    plain = advantage_rows(recipes.get("grpo"), [group(sample(0, 3.0), sample(1, 1.0))])
    assert (
        told.advantages == plain.advantages == [pytest.approx(0.5**0.5, abs=1e-5), pytest.approx(-(0.5**0.5), abs=1e-5)]
    )
