"""Rewards and success by functions of one's own: called once a step with all rows, and named where they fail."""

from __future__ import annotations

import pytest
import torch

from rlinf.envs.toy import Reach
from rlinf.envs.wrappers import OFFERED, Mixture, Scored, mistake_in_function
from tests.envs.protocol import ProtocolSuite, begin, everyone


def progress(observation, before, *, worth=1.0):
    """By how much nearer each point came to its target."""
    near, was = ((seen["state"][:, 0] - seen["state"][:, 1]).abs() for seen in (observation, before))
    return worth * (was - near)


def always(observation):
    return torch.ones(len(observation["state"]), dtype=torch.bool)


def everything(**offered):
    SEEN.append(offered)
    return offered["reward"]


def one_number(reward):
    return 1.0


def failing(observation):
    return observation["velocity"]


SEEN: list[dict] = []


def scored(**settings):
    return Scored(4, simulator=Reach, **settings)


class TestScored(ProtocolSuite):
    def make(self, num_envs):
        functions = {"reward": f"{__name__}.progress", "success": f"{__name__}.always", "scale": 3.0}
        return Scored(num_envs, simulator=Reach, options={"wind": True}, **functions)

    steps = 1  # within two steps a random walk may be there


def test_a_reward_is_that_of_the_function_times_its_scale():
    simulator = scored(reward=f"{__name__}.progress", arguments={"worth": 2.0}, scale=10.0)
    before = begin(simulator)["state"]
    for _ in range(2):
        moved = simulator.step(torch.full((4, 1), 0.125), everyone(simulator))
        after = moved.observation["state"]
        nearer = (before[:, 0] - before[:, 1]).abs() - (after[:, 0] - after[:, 1]).abs()
        assert torch.equal(moved.reward, 20.0 * nearer)
        before = after


def test_success_is_what_the_function_says_and_all_else_stays_the_simulators():
    simulator, plain = scored(success=f"{__name__}.always"), Reach(4)
    begin(simulator), begin(plain)
    actions = torch.zeros(4, 1)
    mine, theirs = (each.step(actions, everyone(each)) for each in (simulator, plain))
    assert mine.success.all()
    assert not theirs.success.all()
    assert torch.equal(mine.reward, theirs.reward)
    assert torch.equal(mine.terminated, theirs.terminated)


def test_what_is_offered_is_what_is_documented():
    SEEN.clear()
    tasks = [{"name": "only"}]
    simulator = Scored(
        4, simulator=Mixture, options={"simulator": Reach, "tasks": tasks, "options": {"words": True}},
        reward=f"{__name__}.everything",
    )  # fmt: skip
    seen = begin(simulator)
    simulator.step(torch.full((4, 1), 0.1), everyone(simulator))
    (offered,) = SEEN
    assert tuple(offered) == OFFERED
    assert torch.equal(offered["before"]["state"], seen["state"])
    assert offered["tasks"] == ["only"] * 4
    assert offered["instructions"][0].startswith("go ")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("one_number", r"one_number: .*\[\].*\[4\]"),
        ("failing", "failing: KeyError: 'velocity'"),
    ],
)
def test_a_function_that_fails_is_named_with_its_key(name, said):
    simulator = scored(reward=f"{__name__}.{name}")
    begin(simulator)
    with pytest.raises(RuntimeError, match=f"env.reward = {__name__}.{said}"):
        simulator.step(torch.zeros(4, 1), everyone(simulator))


def test_a_function_that_could_not_be_called_is_told_beforehand():
    assert mistake_in_function(progress, {"worth": 1}) is None
    assert mistake_in_function(everything, {"any": 1}) is None
    assert mistake_in_function(progress, {"worht": 1}).endswith("worht")
    told = mistake_in_function(lambda observation, velocity: None, {})
    assert told is not None
    assert told.startswith("it takes velocity; ")
    assert mistake_in_function(3, {}) is not None
