"""The generators of reasoning-gym: puzzles, sums, games and logic, scored by the package itself.

In: names of generators, with weights and settings. Out: an agent that asks the model each question once and returns
the score that the generator gives the answer. A row carries a generator's name and the number of an entry, which stays
here, whatever it is made of.
"""

from __future__ import annotations

import functools
import importlib
import math
import random
import warnings
import zlib
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from rlinf.agents.environments import HeldOut, Size, checked
from rlinf.config.schema import nearest
from rlinf.rewards.base import Score
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.base.tasks import in_thread

TAGGED = "default"
"""Instructions of the package that ask for the answer between <answer> and </answer>."""
_SEEDS_APART = 1 << 24
"""Entries between two seeds: reasoning-gym's entry n of seed s is entry 0 of seed s + n."""
_ONE_IN = 8
"""Of so many questions one is kept to be evaluated on, by a sum of its text."""


class ReasoningGym:
    """Tasks of reasoning-gym, each answered once.

    Args:
        generators: a name such as `chain_sum`; a list of them; or a mapping from names to settings of the generator
            (`{"chain_sum": {"max_terms": 3}}`), of which `weight` is its share of the tasks.
        size: tasks to learn from, all made when the run is prepared: a second for most generators, and minutes for a
            few, such as knight_swap, whose puzzles are searched for.
        held_out: tasks to be evaluated on: none of them is learned from.
        seed: of both.
        instructions: system message: a key of the package's own (`default`, `DeepSeekZero`, …), which all ask for
            <answer> tags; a text of your own; or None for none.
        tagged: the answer is what the model writes between <answer> and </answer>, and an answer without them gets
            0; False takes the whole text. None is True where the instructions are the package's.

    Raises:
        UserError: the package is not installed, there is no such generator, or it does not take its settings.
    """

    @checked
    def __init__(
        self,
        generators: str | Sequence[str] | Mapping[str, Mapping[str, Any] | None],
        *,
        size: Size = 1000,
        held_out: HeldOut = 200,
        seed: int = 0,
        instructions: str | None = TAGGED,
        tagged: bool | None = None,
    ) -> None:
        package = _package()
        named = package.utils.SYSTEM_PROMPTS
        if instructions and instructions not in named and (close := nearest(instructions, named)):
            raise UserError(f"reasoning_gym: instructions={instructions!r}: did you mean {close}?")
        self._system = named.get(instructions, instructions) if instructions else None
        self._tagged = instructions in named if tagged is None else tagged
        self._extract = package.utils.extract_answer
        self._size, self._held_out, self._seed = size, held_out, seed
        self._most = 2 * size + 2 * _ONE_IN * held_out  # entries that are looked at for so many of each kind
        self._entries: dict[int, dict[str, Any]] = {}  # by number, as they were made
        if isinstance(generators, str):
            generators = [generators]
        settings = generators if isinstance(generators, Mapping) else dict.fromkeys(generators)
        if not settings:
            raise UserError("reasoning_gym: `generators` names none")
        self._weights = {name: _weight(name, (how or {}).get("weight", 1.0)) for name, how in settings.items()}
        self._generators = {name: self._generator(package, name, how or {}) for name, how in settings.items()}

    def _generator(self, package: Any, name: str, how: Mapping[str, Any]) -> Any:
        own = {key: value for key, value in how.items() if key != "weight"}
        if name == "composite":
            raise UserError("reasoning_gym: generators.composite: a mixture is what `generators` itself is")
        if name not in package.factory.DATASETS:
            close = nearest(name, package.factory.DATASETS)
            hint = f"did you mean {close}?" if close else f"there are {', '.join(sorted(package.factory.DATASETS))}"
            raise UserError(f"reasoning_gym: there is no generator {name!r}; {hint}")
        try:
            return package.create_dataset(name, **{"size": self._most, "seed": self._seed * _SEEDS_APART, **own})
        except (TypeError, ValueError, AssertionError) as error:
            raise UserError(f"reasoning_gym: generators.{name}: {error}") from error

    def tasks(self) -> list[dict[str, Any]]:
        """Rows to learn from: question, answer ("" where there are many), generator and number of the entry."""
        return list(islice((row for row in self._rows if not _kept_out(row)), self._size))

    def held_out(self) -> list[dict[str, Any]]:
        """Different rows to be evaluated on; fewer than asked for where the generators have no more questions."""
        different = {row["question"]: row for row in self._rows if _kept_out(row)}
        return list(islice(different.values(), self._held_out))

    @functools.cached_property
    def _rows(self) -> list[dict[str, Any]]:
        """All rows; an entry is made once, since some generators make another of the same number."""
        dice, rows = random.Random(self._seed), []
        names, weights = list(self._weights), list(self._weights.values())
        missing = [self._size, self._held_out]
        for index in range(self._most):
            name = dice.choices(names, weights)[0]
            entry = self._generators[name][index]
            rows.append({"question": entry["question"], "answer": entry["answer"] or "", "generator": name})
            rows[-1]["entry"] = index
            self._entries[index] = entry
            missing[_kept_out(rows[-1])] -= 1
            if max(missing) <= 0:
                break
        return rows

    async def __call__(self, task: Any, llm: Any) -> Score:
        """Ask a question, and score the answer."""
        row = task.row
        generator, entry = self._generators[row["generator"]], self._entries[row["entry"]]
        messages = [{"role": "user", "content": entry["question"]}]
        if self._system is not None:
            messages.insert(0, {"role": "system", "content": self._system})
        text = (await llm.chat(messages)).text
        answer = self._extract(text) if self._tagged else text.strip()
        score = await in_thread(lambda: generator.score_answer(answer, entry))  # some solve an equation, or play a game
        return Score(float(score), {row["generator"]: float(score)}, extracted=answer)


def _weight(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UserError(f"reasoning_gym: generators.{name}.weight={value!r}: a number above 0")
    return float(value)


def _kept_out(row: Mapping[str, Any]) -> bool:
    """A row is evaluated on, and so is never learned from."""
    return zlib.crc32(row["question"].encode()) % _ONE_IN == 0


def _package() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of what it imports
            package = importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise UserError(f"reasoning_gym: {error}; pip install 'rlinf[environments]'") from error
    importlib.import_module("reasoning_gym.factory")
    importlib.import_module("reasoning_gym.utils")
    return package
