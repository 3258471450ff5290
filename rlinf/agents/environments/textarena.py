"""Games of textarena: one player alone, several that are all the model, or the model against somebody else.

In: names of games. Out: an agent that plays one to its end and returns each player's reward. What a player has not yet
heard is one user message, so a game of n turns is one conversation, whose tokens are read once; textarena's own text
repeats the whole game each turn. Players that are the model are agents of their own (`player 0`, `player 1`), so each
is compared with what played the same part.

textarena rolls Python's global dice. Each game here has dice of its own, which are laid on the table for as long as the
game thinks: games beside each other are what they are alone, and nobody else's numbers change.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rlinf.agents.agent import worked_on
from rlinf.agents.environments import HeldOut, Seeded, Size, by_path, checked, import_package
from rlinf.config.schema import nearest
from rlinf.rewards.base import Score
from rlinf.runtime.base.errors import UserError

_MOST_PLAYERS = 16
"""Numbers of players up to this are tried where nobody says how many a game has."""
_PAST = "past"
"""As the opponent: an earlier version of the model."""


class TextArena(Seeded):
    """Games of textarena, played to their ends.

    Args:
        games: a name such as `GuessTheNumber-v0`, or a list of them, which take turns.
        players: of each game; None takes the fewest that it can be played by.
        opponent: `opponent(text) -> action`, plain or async, or its dotted path, for all players but one; `past`: these
            are an earlier version of the model, in tasks for which the run draws one, see `llm.past`; None: all of them
            are the model.
        size: games to learn from, each from a seed of its own; all attempts at one begin the same.
        held_out: games to be evaluated on.
        seed: of both.
        turns: after which a game is ended, without a reward of its own: 0.
        settings: further arguments of the games.

    Raises:
        UserError: the package is not installed, or there is no such game.
    """

    @checked
    def __init__(
        self,
        games: str | Sequence[str],
        *,
        players: Size | None = None,
        opponent: Any = None,
        size: Size = 1000,
        held_out: HeldOut = 100,
        seed: int = 0,
        turns: Size = 100,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._names = [games] if isinstance(games, str) else list(games)
        if not self._names:
            raise UserError("textarena: `games` names none")
        self._players, self._turns, self._settings = players, turns, dict(settings or {})
        self._past = opponent == _PAST
        self._opponent = opponent if self._past else by_path("textarena: opponent", opponent)
        if self._opponent is not None and not self._past and not callable(self._opponent):
            raise UserError(f"textarena: opponent={opponent!r} is no function from a text to an action")
        self.sizes, self.seed = (size, held_out), seed
        self._openings = [self._opening(name) for name in self._names]
        if self._opponent is not None and any(count == 1 for count, _ in self._openings):
            raise UserError("textarena: opponent: a game with one player would never ask it")

    def _opening(self, name: str) -> tuple[int, str]:
        """Players of a game, and what the first of them reads."""
        counts = range(1, _MOST_PLAYERS + 1) if self._players is None else (self._players,)
        refusal = ""
        for count in counts:
            try:
                return count, _Game(name, self._settings, count, self.seed).turn()[1]
            except _Players as error:
                refusal = str(error)
        many = f"1 to {_MOST_PLAYERS}" if self._players is None else str(self._players)
        raise UserError(f"textarena: {name} is not played by {many} players, or not with its settings; {refusal}")

    def row(self, index: int, seed: int) -> dict[str, Any]:
        """A game: name, seed, the seat of the model against an opponent, and the opening text."""
        which, round_ = index % len(self._names), index // len(self._names)
        players, text = self._openings[which]
        at = {"game": self._names[which], "players": players, "seed": seed, "seat": round_ % players}
        return {"prompt": text, **at}

    async def __call__(self, task: Any, llm: Any) -> Any:
        """Play a game to its end."""
        row = task.row
        game = _Game(row["game"], self._settings, row["players"], row["seed"])
        alone = row["players"] == 1
        own = range(row["players"]) if self._opponent is None else [row["seat"]]
        seats = {player: llm if alone else llm.agent(f"player {player}") for player in own}
        if self._past:
            seats |= {player: llm.past(f"player {player}") for player in range(row["players"]) if player not in seats}
        talks: dict[int, list[dict[str, Any]]] = {player: [] for player in seats}
        for _ in range(self._turns):
            player, text = game.turn()
            if player in seats:
                talks[player].append({"role": "user", "content": text})
                answer = await seats[player].chat(talks[player])
                talks[player].append(answer.message)
                action = answer.text
            else:
                action = await worked_on(lambda text, _: self._opponent(text), text, llm)
                if not isinstance(action, str):
                    raise UserError(f"textarena: the opponent returned {action!r:.60}, which is no text")
            if game.over_after(action):
                break
        rewards, wrong = game.outcome()
        scores = {
            player: Score(float(rewards.get(player, 0.0)), {"invalid_move": float(wrong.get(player, False))})
            for player in seats
        }
        return scores[0] if alone else {f"player {player}": score for player, score in scores.items()}


class _Players(UserError):
    """A game is not played by so many."""


_UNABLE = (TypeError, ValueError, LookupError, ImportError, SyntaxError, OSError)
"""Errors of games that cannot be opened: they want a newer Python, files that their package left out, words that they
would download, or a key to somebody's model."""


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
"""How a text on a terminal is coloured."""


def _in_a_line(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f"its own code wants a newer Python ({error})"
    lines = [_COLOUR.sub("", line).strip(" *") for line in str(error).splitlines()]
    first = next((line for line in lines if line), type(error).__name__)
    nltk = isinstance(error, LookupError) and "nltk" in str(error)
    return f"it wants words of nltk that are not here: {first}" if nltk else first


class _Game:
    """One game with its dice.

    Args:
        name: of the game.
        settings: its further arguments.
        players: how many.
        seed: of the dice.
    """

    def __init__(self, name: str, settings: Mapping[str, Any], players: int, seed: int) -> None:
        package = import_package("textarena", "textarena")
        games = package.envs.registration.ENV_REGISTRY
        if name not in games:
            close = nearest(name, games)
            raise UserError(f"textarena: there is no game {name!r}" + (f"; did you mean {close}?" if close else ""))
        self._dice = random.Random(seed).getstate()
        with self._own_dice():
            try:
                self._env = package.make(name, **settings)
            except _UNABLE as error:
                raise UserError(f"textarena: {name} cannot be played here: {_in_a_line(error)}") from error
            try:
                self._env.reset(num_players=players, seed=seed)
            except (AssertionError, ValueError) as error:  # how games refuse a number of players
                raise _Players(f"textarena: {name}: {players} players: {_in_a_line(error)}") from error
            except _UNABLE as error:
                raise UserError(f"textarena: {name} cannot be played here: {_in_a_line(error)}") from error
        self._bare = self._env
        while isinstance(self._bare, package.Wrapper):
            self._bare = self._bare.env
        self._own_action = package.ObservationType.PLAYER_ACTION

    def turn(self) -> tuple[int, str]:
        """Whose turn it is, and what that player has not read yet."""
        with self._own_dice():
            player, messages = self._bare.get_observation()
        lines = []
        for sender, message, kind in messages:
            text = (
                message if isinstance(message, str) else str(kind)
            )  # some games pass their own message shifted by one
            if sender in range(_MOST_PLAYERS):
                lines += [] if sender == player and kind is self._own_action else [f"[{self._name_of(sender)}] {text}"]
            else:
                lines.append(text)
        return player, "\n".join(lines)

    def _name_of(self, player: int) -> str:
        return str(getattr(self._bare.state, "role_mapping", {}).get(player, f"Player {player}"))

    def over_after(self, action: str) -> bool:
        """Take the turn, and tell whether the game is over."""
        with self._own_dice():
            over, _ = self._env.step(action=action)
        return bool(over)

    def outcome(self) -> tuple[Mapping[int, float], Mapping[int, bool]]:
        """Each player's reward, none before the end; and who was ruled out by an invalid move."""
        rewards, about = self._env.close()
        return rewards or {}, {player: one.get("invalid_move", False) for player, one in (about or {}).items()}

    @contextmanager
    def _own_dice(self) -> Iterator[None]:
        others = random.getstate()
        random.setstate(self._dice)
        try:
            yield
        finally:
            self._dice = random.getstate()
            random.setstate(others)
