"""Environments of gymnasium in text: their scores are gymnasium's own, actions are read as people would read them."""

from __future__ import annotations

import random
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest

from rlinf.agents.environments.gymnasium_text import GymnasiumText
from rlinf.runtime.base.errors import UserError
from tests.agents.acting import begun


class Letters(gymnasium.Env):
    """Texts for texts: half a point for each letter of the right answer, which is the observation backwards."""

    observation_space = action_space = gymnasium.spaces.Text(8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word = "".join(self.np_random.choice(list("abc"), 3))
        return self.word, {}

    def step(self, action):
        return self.word, 0.5 * sum(map(str.__eq__, action, self.word[::-1])), True, False, {}


gymnasium.register("Letters-v0", entry_point=Letters)


def task(seed):
    return SimpleNamespace(row={"seed": seed})


def own_loop(name, seed, actions):
    """gymnasium's loop: the sum of rewards, and how many actions it took."""
    env, total, count = gymnasium.make(name), 0.0, 0
    env.reset(seed=seed)
    for action in actions:
        _, reward, ended, cut, _ = env.step(action)
        total, count = total + reward, count + 1
        if ended or cut:
            break
    env.close()
    return total, count


@pytest.mark.parametrize("name", ["FrozenLake-v1", "CliffWalking-v1", "Blackjack-v1", "Taxi-v4"])
async def test_episodes_end_as_in_gymnasiums_own_loop(name):
    environment, dice = GymnasiumText(name, turns=30), random.Random(name)
    for seed in range(25):
        moves = [dice.randrange(len(environment._names)) for _ in range(30)]
        said = [
            dice.choice([environment._names[at], f"So: {environment._names[at].upper()}!", str(at)]) for at in moves
        ]
        llm, actor = begun(*said)
        score = await environment(task(seed), llm)
        assert (score.value, score.scores["turns"]) == own_loop(name, seed, moves)
        assert actor.read[-1].startswith(actor.read[0])
        assert len(llm.samples(0.0)) == 1


async def test_an_environment_of_texts_is_read_and_answered_as_it_stands():
    environment = GymnasiumText("Letters-v0")
    for seed in range(5):
        word = "".join(np.random.Generator(np.random.PCG64(seed)).choice(list("abc"), 3))
        llm, actor = begun(word[::-1])
        assert (await environment(task(seed), llm)).value == 1.5
        assert word in actor.read[0]
        assert "Actions" not in actor.read[0]


@pytest.mark.parametrize(
    ("answer", "action"),
    [("left", 0), ("Not left, I go right.", 2), ("**Up**", 3), ("2", 2), ("1.5 or -1 or 12", None), ("upright", None),
     ("I chose 3.", 3), ("", None), ("go\nDOWN", 1)],
)  # fmt: skip
def test_the_action_is_what_an_answer_names_last(answer, action):
    assert GymnasiumText("FrozenLake-v1")._action(answer) == action


async def test_an_answer_without_an_action_is_told_and_nothing_moves():
    environment = GymnasiumText("FrozenLake-v1", turns=2, instructions="Reach G.")
    llm, actor = begun("hm", "right")
    score = await environment(task(0), llm)
    assert score.scores == {"done": 0.0, "turns": 2.0, "no_action": 0.5}
    assert "<red>S</red>FFF" in actor.read[0]
    assert "left, down, right, up" in actor.read[1].removeprefix(actor.read[0])


async def test_what_is_seen_can_be_written_by_a_function_of_yours():
    environment = GymnasiumText("Blackjack-v1", turns=1, observation=lambda seen, env: f"my hand is {seen[0]}")
    llm, actor = begun("stick")
    await environment(task(0), llm)
    assert "my hand is" in actor.read[0]


@pytest.mark.parametrize(
    ("env", "arguments", "named"),
    [("FrozenLike-v1", {}, "FrozenLake"), ("no_such_module:X-v0", {}, "no_such_module"),
     ("FrozenLake-v1", {"settings": {"foo": 3}}, "foo"), ("FrozenLake-v1", {"actions": ["a"]}, "actions"),
     ("MountainCarContinuous-v0", {}, "Box"), ("Blackjack-v1", {"observation": "no.where"}, "no.where")],
)  # fmt: skip
def test_a_mistake_is_named(env, arguments, named):
    with pytest.raises(UserError, match=named):
        GymnasiumText(env, **arguments)
