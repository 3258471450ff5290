"""Mistakes in what an environment is made with are one line each, which names the argument."""

from __future__ import annotations

import pytest

from rlinf.agents.environments.openenv import OpenEnv
from rlinf.agents.environments.reasoning_gym import ReasoningGym
from rlinf.agents.environments.textarena import TextArena
from rlinf.runtime.base.errors import UserError

WRONG = [
    (ReasoningGym, {"generators": 5}, "generators"),
    (ReasoningGym, {"generators": [5]}, "generators"),
    (ReasoningGym, {"generators": {"chain_sum": 3}}, "chain_sum"),
    (ReasoningGym, {"generators": {"chain_sum": {"weight": "a"}}}, "chain_sum.weight"),
    (ReasoningGym, {"generators": {"chain_sum": {"weight": -1}}}, "chain_sum.weight"),
    (ReasoningGym, {"generators": "chain_sum", "size": "a"}, "size"),
    (ReasoningGym, {"generators": "chain_sum", "size": 0}, "size"),
    (ReasoningGym, {"generators": "chain_sum", "held_out": -1}, "held_out"),
    (ReasoningGym, {"generators": "chain_sum", "seed": "a"}, "seed"),
    (ReasoningGym, {"generators": "chain_sum", "instructions": 5}, "instructions"),
    (ReasoningGym, {"generators": "chain_sum", "instructions": "deepseekzero"}, "DeepSeekZero"),
    (ReasoningGym, {"generators": "composite"}, "mixture"),
    (TextArena, {"games": 5}, "games"),
    (TextArena, {"games": "TicTacToe-v0", "settings": [1]}, "settings"),
    (TextArena, {"games": "TicTacToe-v0", "turns": 0}, "turns"),
    (TextArena, {"games": "TicTacToe-v0", "players": 0}, "players"),
    (TextArena, {"games": "TicTacToe-v0", "opponent": 5}, "opponent"),
    (TextArena, {"games": "TicTacToe-v0", "opponent": "math.pi"}, "opponent"),
    (TextArena, {"games": "TicTacToe-v0", "opponent": "no_such_module.opponent"}, "opponent"),
    (TextArena, {"games": "GuessTheNumber-v0", "opponent": print}, "opponent"),
    (TextArena, {"games": "GuessTheNumber-v0", "settings": {"min_number": "a"}}, "settings"),
    (OpenEnv, {"server": "http://127.0.0.1:1", "size": 0}, "size"),
    (OpenEnv, {"server": 5}, "server"),
    (OpenEnv, {"server": {"command": ["serve"], "starting": 0}}, "server"),
    (OpenEnv, {"server": {"command": []}}, "server"),
    (OpenEnv, {"server": "http://127.0.0.1:1", "observation": "{prompt} {"}, "observation"),
]


@pytest.mark.parametrize(("kind", "arguments", "named"), WRONG)
def test_a_wrong_argument_is_named(kind, arguments, named):
    with pytest.raises(UserError, match=named):
        kind(**arguments)


def test_nothing_need_be_held_out():
    assert ReasoningGym("chain_sum", size=3, held_out=0).held_out() == []
