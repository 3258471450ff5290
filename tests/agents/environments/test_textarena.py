"""Games of textarena: the rewards of its own loop, games beside each other as they are alone, everybody's own dice."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace

import pytest
import textarena

from rlinf.agents.environments.textarena import TextArena
from rlinf.runtime.base.errors import UserError
from tests.agents.acting import begun

GAMES = ("GuessTheNumber-v0", "TicTacToe-v0", "KuhnPoker-v0", "ConnectFour-v0", "Mastermind-v0", "FrozenLake-v0")


def moves(seed):
    drawn = random.Random(seed)
    return [drawn.choice([f"[{drawn.randint(0, 9)}]", "[right]", "[bet]", "[check]", "nonsense"]) for _ in range(60)]


def by_itself(game, players, seed, said):
    """What textarena's own loop gives, with its dice for itself."""
    random.seed(seed)
    env = textarena.make(game)
    env.reset(num_players=players, seed=seed)
    for action in said:
        env.get_observation()
        if env.step(action=action)[0]:
            break
    return env.close()[0]


async def played(environment, row, said):
    llm, actor = begun(*said)
    return await environment(SimpleNamespace(row=row), llm), actor, llm


@pytest.mark.parametrize("game", GAMES)
async def test_games_beside_each_other_end_as_each_does_in_textarenas_own_loop(game):
    environment = TextArena(game, size=30)
    rows = environment.tasks()
    outside = random.getstate()
    ended = await asyncio.gather(*(played(environment, row, moves(row["seed"])) for row in rows))
    assert random.getstate() == outside
    for row, (scores, _, _) in zip(rows, ended, strict=True):
        rewards = by_itself(game, row["players"], row["seed"], moves(row["seed"]))
        scores = {0: scores} if row["players"] == 1 else {int(name.split()[1]): one for name, one in scores.items()}
        assert {player: score.value for player, score in scores.items()} == rewards


async def test_a_game_of_several_turns_is_one_conversation_that_says_nothing_twice():
    environment = TextArena("GuessTheNumber-v0", size=1)
    _, actor, llm = await played(environment, environment.tasks()[0], ["[1]", "[2]", "[3]", "[4]", *["[5]"] * 9])
    assert len(actor.read) >= 4
    assert all(later.startswith(earlier) for earlier, later in zip(actor.read, actor.read[1:], strict=False))
    assert actor.read[-1].count("You are playing Guess The Number") == 1
    assert len(llm.samples(0.0)) == 1


async def test_against_an_opponent_one_seat_is_the_models_and_seats_take_turns():
    heard = []

    def opponent(text):
        heard.append(text)
        return f"[{8 - len(heard) % 9}]"

    environment = TextArena("TicTacToe-v0", opponent=opponent, size=4)
    rows = environment.tasks()
    assert [row["seat"] for row in rows] == [0, 1, 0, 1]
    scores, _, llm = await played(environment, rows[1], ["[0]", "[1]", "[2]", "[3]", "[4]"])
    assert list(scores) == ["player 1"]
    assert heard
    assert set(llm.agents) == {"", "player 1"}


async def test_a_game_that_does_not_end_is_ended():
    environment = TextArena("IteratedPrisonersDilemma-v0", turns=3)
    scores, actor, _ = await played(environment, environment.tasks()[0], ["[cooperate]"] * 4)
    assert len(actor.read) == 3
    assert {score.value for score in scores.values()} == {0.0}


def test_words_that_are_missing_are_named(monkeypatch):
    def refuses(name):
        raise LookupError(f"\n{'*' * 70}\n  Resource \x1b[93mwords\x1b[0m not found.\n  >>> nltk.download('words')\n")

    monkeypatch.setattr(textarena, "make", refuses)
    with pytest.raises(UserError, match=r"Hangman-v0.*nltk.*: Resource words not found\.$"):
        TextArena("Hangman-v0")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"games": "TicTacTo-v0"}, "TicTacToe-v0"),
        ({"games": []}, "games"),
        ({"games": "TicTacToe-v0", "players": 3}, "3"),
        ({"games": "TicTacToe-v0", "settings": {"size": 3}}, "size"),
        ({"games": "UsedCar-v0-balanced"}, "UsedCar-v0-balanced"),
    ],
)
def test_a_game_that_cannot_be_played_is_named(arguments, named):
    with pytest.raises(UserError, match=named):
        TextArena(**arguments)
