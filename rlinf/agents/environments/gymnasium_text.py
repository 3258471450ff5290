"""Environments of gymnasium that can be read and written: observations as text, actions by name or number.

In: the id of a registered environment. Out: an agent that plays an episode to its end: an observation is a message to
the model, the action is what its answer names last, and the reward is the sum of the steps' rewards. An observation is
a text where the environment's are texts, its `ansi` picture where it draws one, and else its value.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlinf.agents.environments import HeldOut, Seeded, Size, by_path, checked, import_package
from rlinf.agents.tools.tool import output_text
from rlinf.rewards.base import Score
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.base.tasks import in_thread

_ACTIONS = {
    "FrozenLake": ("left", "down", "right", "up"),
    "FrozenLake8x8": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
}
"""Names of the actions of gymnasium's toy texts, in its order."""
_COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_COLOURED = re.compile(r"\x1b\[([\d;]*)m(.*?)\x1b\[0?m", re.DOTALL)


class GymnasiumText(Seeded):
    """Episodes of an environment of gymnasium.

    Args:
        env: its id, such as `FrozenLake-v1`, or `my_module:MyEnv-v0`, which is imported first.
        actions: names of its discrete actions, in order; None: those of gymnasium's toy texts, or numbers alone.
        observation: `observation(value, environment) -> text`, or its dotted path; None: see above.
        instructions: system message; None for none. What actions there are stands under the first observation.
        turns: after which an episode is ended. An answer that names no action is a turn in which nothing happens but
            that the model is told.
        size: episodes to learn from, each from a seed of its own; all attempts at one begin the same.
        held_out: episodes to be evaluated on.
        settings: further arguments of `gymnasium.make`.

    Raises:
        UserError: the package or the environment is not there, or its actions are neither discrete nor texts.
    """

    @checked
    def __init__(
        self,
        env: str,
        *,
        actions: Sequence[str] | None = None,
        observation: Any = None,
        instructions: str | None = None,
        turns: Size = 100,
        size: Size = 1000,
        held_out: HeldOut = 100,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._id, self._settings = env, dict(settings or {})
        self._instructions, self._turns, self.sizes = instructions, turns, (size, held_out)
        self._show = by_path("gymnasium_text: observation", observation)
        self._package = import_package("gymnasium_text", "gymnasium", "gymnasium")
        probe, spaces = self._make(), self._package.spaces
        space, self._draws = probe.action_space, "ansi" in probe.metadata.get("render_modes", ())
        self._draws = self._draws and not isinstance(probe.observation_space, spaces.Text) and self._show is None
        probe.close()
        if not isinstance(space, spaces.Discrete | spaces.Text):
            raise UserError(f"gymnasium_text: {env}: its actions, {space}, are neither discrete nor texts")
        self._words: dict[str, int] | None = None
        if isinstance(space, spaces.Discrete):
            numbers = range(int(space.start), int(space.start) + int(space.n))
            toy = _ACTIONS.get(env.rpartition(":")[2].rpartition("-v")[0])
            self._names = list(actions or toy or map(str, numbers))
            if len(self._names) != len(numbers):
                raise UserError(f"gymnasium_text: actions: {len(self._names)} names, and {env} has {len(numbers)}")
            self._words = {str(number): number for number in numbers}
            self._words |= {name.lower(): number for name, number in zip(self._names, numbers, strict=True)}
            longest = sorted(map(re.escape, self._words), key=len, reverse=True)
            self._word = re.compile(rf"(?<![\w.-])({'|'.join(longest)})(?!\w|[.-]\w)")
            self._hint = f"Actions: {', '.join(self._names)}."

    def _make(self, **more: Any) -> Any:
        try:
            return self._package.make(self._id, **self._settings, **more)
        except (self._package.error.Error, ImportError, TypeError, ValueError) as error:
            raise UserError(f"gymnasium_text: {self._id}: {error}") from error

    def row(self, index: int, seed: int) -> dict[str, Any]:
        """An episode; what it begins with is known when it begins."""
        return {"prompt": f"{self._id}, seed {seed}", "seed": seed}

    async def __call__(self, task: Any, llm: Any) -> Score:
        """Play an episode to its end."""
        env = await in_thread(lambda: self._make(**({"render_mode": "ansi"} if self._draws else {})))
        try:
            value, _ = await in_thread(lambda: env.reset(seed=task.row["seed"]))
            messages = [{"role": "system", "content": self._instructions}] if self._instructions else []
            text = self._text(value, env) + ("" if self._words is None else f"\n{self._hint}")
            total, done, turn, wrong = 0.0, False, 0, 0
            while not done and turn < self._turns:
                answer = await llm.chat([*messages, {"role": "user", "content": text}])
                messages += [{"role": "user", "content": text}, answer.message]
                turn += 1
                if (action := self._action(answer.text)) is None:
                    wrong, text = wrong + 1, f"That names no action. {self._hint}"
                    continue
                value, reward, ended, cut, _ = await in_thread(functools.partial(env.step, action))
                total, done, text = total + float(reward), bool(ended or cut), self._text(value, env)
        finally:
            env.close()
        return Score(total, {"done": float(done), "turns": float(turn), "no_action": wrong / turn})

    def _text(self, value: Any, env: Any) -> str:
        if self._show is not None:
            return str(self._show(value, env))
        return _plain(str(env.render())) if self._draws else output_text(value)

    def _action(self, answer: str) -> Any:
        """The action that an answer names last; None where it names none."""
        if self._words is None:
            return answer
        named = self._word.findall(answer.lower())
        return self._words[named[-1]] if named else None


def _plain(picture: str) -> str:
    """A picture of characters, its coloured ones between tags that name their colour."""

    def named(match: re.Match[str]) -> str:
        codes = [int(code) % 10 for code in match[1].split(";") if code and int(code) >= 30]
        colour = _COLOURS[codes[0]] if codes and codes[0] < len(_COLOURS) else "marked"
        return f"<{colour}>{match[2]}</{colour}>"

    return _COLOURED.sub(named, picture).strip("\n")
