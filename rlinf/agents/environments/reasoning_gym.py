"""The generators of reasoning-gym: puzzles, sums, games and logic, scored by the package itself.

In: names of generators, with weights and settings. Out: an agent that asks the model each question once and returns
the score that the generator gives the answer. A row carries a generator's name, its level and the number of an entry,
which stays here, whatever it is made of. With a curriculum a question is made when its task is drawn, at the level
that its generator has then; the package says what settings a level has.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import random
import warnings
import zlib
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from rlinf.agents.environments import HeldOut, Levels, Rule, Size, checked, import_package
from rlinf.config.schema import nearest
from rlinf.data.sample import Prompt
from rlinf.rewards.base import Score
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.base.tasks import in_thread

TAGGED = "default"
"""Instructions of the package that ask for the answer between <answer> and </answer>."""
_SEEDS_APART = 1 << 24
"""Entries between two seeds: reasoning-gym's entry n of seed s is entry 0 of seed s + n."""
_ONE_IN = 8
"""Of so many questions one is kept to be evaluated on, by a sum of its text."""
_TRIES = 64
"""Entries of each task with a curriculum: the first that is not kept to be evaluated on is its question."""


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
        curriculum: the generators' difficulty follows how often their tasks are solved: `{"up": 0.8, "down": 0.2,
            "tasks": 32, "start": 0}`, see `environments.Rule`. Held-out tasks are of all levels. A generator's settings
            hold at each of its levels.

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
        curriculum: Rule | None = None,
    ) -> None:
        package = self._package = _package()
        named = package.utils.SYSTEM_PROMPTS
        if instructions and instructions not in named and (close := nearest(instructions, named)):
            raise UserError(f"reasoning_gym: instructions={instructions!r}: did you mean {close}?")
        self._system = named.get(instructions, instructions) if instructions else None
        self._tagged = instructions in named if tagged is None else tagged
        self._extract = package.utils.extract_answer
        self._size, self._held_out, self._seed = size, held_out, seed
        self._most = 2 * size + 2 * _ONE_IN * held_out  # entries that are looked at for so many of each kind
        self._entries: dict[tuple[str, int, int], dict[str, Any]] = {}  # as they were made, by level and number
        if isinstance(generators, str):
            generators = [generators]
        settings = generators if isinstance(generators, Mapping) else dict.fromkeys(generators)
        if not settings:
            raise UserError("reasoning_gym: `generators` names none")
        self._weights = {name: _weight(name, (how or {}).get("weight", 1.0)) for name, how in settings.items()}
        self._settings = {name: self._by_level(name, how or {}, curriculum) for name, how in settings.items()}
        highest = {name: len(own) - 1 for name, own in self._settings.items()}
        self._levels = None if curriculum is None else Levels(curriculum, highest)
        for name in self._settings:
            self._dataset(name, 0 if self._levels is None else self._levels[name])

    def _by_level(self, name: str, how: Mapping[str, Any], curriculum: Rule | None) -> list[dict[str, Any]]:
        """A generator's settings at each level that it opens with; one without a curriculum."""
        own = {key: value for key, value in how.items() if key != "weight"}
        if name == "composite":
            raise UserError("reasoning_gym: generators.composite: a mixture is what `generators` itself is")
        generators, curricula = self._package.factory.DATASETS, self._package.factory.CURRICULA
        if name not in generators:
            close = nearest(name, generators)
            hint = f"did you mean {close}?" if close else f"there are {', '.join(sorted(generators))}"
            raise UserError(f"reasoning_gym: there is no generator {name!r}; {hint}")
        fields = [field.name for field in dataclasses.fields(generators[name][1]) if field.name not in ("seed", "size")]
        for key in own:
            if key not in fields and key not in ("seed", "size"):
                close = nearest(key, fields)
                hint = f"did you mean {close}?" if close else f"there are {', '.join(fields)}"
                raise UserError(f"reasoning_gym: generators.{name}: there is no setting {key!r}; {hint}")
        if curriculum is None:
            return [{"size": self._most, "seed": self._seed * _SEEDS_APART, **own}]
        if name not in curricula:
            raise UserError(
                f"reasoning_gym: curriculum: the package has no levels of {name}; take it out of generators"
            )
        attributes, levels, refusal = curricula[name](), [], ""
        for level in range(max(len(each.levels) for each in attributes.attributes.values())):
            attributes.set_global_level(level)
            settings = {**vars(attributes.generate_configuration()), "size": _SEEDS_APART}
            settings |= {"seed": self._seed * _SEEDS_APART, **own}
            try:
                generators[name][1](**settings).validate()
                levels.append(settings)
            except (TypeError, ValueError, AssertionError) as error:  # some levels are beyond their own generator
                refusal = refusal or str(error)
        if not levels:
            raise UserError(f"reasoning_gym: generators.{name}: it opens at none of its levels: {refusal}")
        return levels

    @functools.cache  # noqa: B019 - an environment lasts as long as its run
    def _dataset(self, name: str, level: int) -> Any:
        try:
            return self._package.create_dataset(name, **self._settings[name][level])
        except (TypeError, ValueError, AssertionError) as error:
            raise UserError(f"reasoning_gym: generators.{name}: {error}") from error

    def _entry(self, name: str, level: int, number: int) -> dict[str, Any]:
        """An entry, made once, since some generators make another of the same number."""
        at = (name, level, number)
        if at not in self._entries:
            self._entries[at] = self._dataset(name, level)[number]
        return self._entries[at]

    def _row(self, name: str, level: int, number: int) -> dict[str, Any]:
        entry = self._entry(name, level, number)
        row = {"question": entry["question"], "answer": entry["answer"] or "", "generator": name, "entry": number}
        return row if self._levels is None else {**row, "level": level}

    def tasks(self) -> list[dict[str, Any]]:
        """Rows to learn from: question, answer ("" where there are many), generator and number of the entry; with a
        curriculum their generators alone."""
        if self._levels is None:
            return list(islice((row for row in self._rows if not _kept_out(row)), self._size))
        names = random.Random(self._seed).choices(list(self._weights), list(self._weights.values()), k=self._size)
        return [{"question": f"{name}, task {index}", "generator": name} for index, name in enumerate(names)]

    def held_out(self) -> list[dict[str, Any]]:
        """Different rows to be evaluated on; fewer than asked for where the generators have no more questions."""
        different = {row["question"]: row for row in self._rows if _kept_out(row)}
        return list(islice(different.values(), self._held_out))

    @functools.cached_property
    def _rows(self) -> list[dict[str, Any]]:
        """All rows; with a curriculum, of all levels in turn, and as many as show what is held out."""
        dice, rows = random.Random(self._seed), []
        names, weights = list(self._weights), list(self._weights.values())
        missing = [self._size if self._levels is None else 0, self._held_out]
        first = 0 if self._levels is None else _SEEDS_APART // 2  # behind what is drawn
        for index in range(self._most):
            name = dice.choices(names, weights)[0]
            rows.append(self._row(name, index % len(self._settings[name]), first + index))
            missing[_kept_out(rows[-1])] -= 1
            if max(missing) <= 0:
                break
        return rows

    # Difficulty ---------------------------------------------------------------------------------------------------

    def draw(self, task: Prompt) -> Prompt:
        """A task with its question, of the level that its generator has now."""
        if self._levels is None:
            return task
        name = task.row["generator"]
        level, first = self._levels[name], task.id * _TRIES % (_SEEDS_APART // 2)
        for number in range(first, first + _TRIES):
            if not _kept_out(row := self._row(name, level, number)):
                return dataclasses.replace(task, text=row["question"], answer=row["answer"], row={**task.row, **row})
            del self._entries[name, level, number]
        raise UserError(f"reasoning_gym: {name} has too few questions at level {level} to hold any out")

    def learn(self, outcomes: Sequence[tuple[Prompt, float]]) -> Mapping[str, float]:
        """Take in what came of tasks; returns the levels of the next ones."""
        if self._levels is None:
            return {}
        for task, _ in outcomes:
            self._entries.pop((task.row["generator"], task.row["level"], task.row["entry"]), None)
        return self._levels.learn((task.row["generator"], task.row["level"], reward) for task, reward in outcomes)

    def state_dict(self) -> dict[str, Any]:
        """The levels, as JSON."""
        return {} if self._levels is None else self._levels.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from saved levels."""
        if self._levels is not None:
            self._levels.load_state_dict(state)

    # Episodes -----------------------------------------------------------------------------------------------------

    async def __call__(self, task: Any, llm: Any) -> Score:
        """Ask a question, and score the answer."""
        row = task.row
        at = (row["generator"], row.get("level", 0))
        generator, entry = self._dataset(*at), self._entry(*at, row["entry"])
        messages = [{"role": "user", "content": entry["question"]}]
        if self._system is not None:
            messages.insert(0, {"role": "system", "content": self._system})
        text = (await llm.chat(messages)).text
        answer = self._extract(text) if self._tagged else text.strip()
        score = await in_thread(lambda: generator.score_answer(answer, entry))  # some solve an equation, or play a game
        return Score(float(score), {row["generator"]: float(score)}, extracted=answer)

    def player(self, task: Any, messages: Any) -> str:
        """Answer a question as its generator does, for a warm-up.

        Raises:
            UserError: it gives no answer, as where there are many.
        """
        row = task.row
        answer = self._entry(row["generator"], row.get("level", 0), row["entry"])["answer"]
        if not answer:
            raise UserError(f"reasoning_gym: {row['generator']} gives no answer of its own: name agent.player")
        return f"<answer>{answer}</answer>" if self._tagged else str(answer)


def _weight(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UserError(f"reasoning_gym: generators.{name}.weight={value!r}: a number above 0")
    return float(value)


def _kept_out(row: Mapping[str, Any]) -> bool:
    """A row is evaluated on, and so is never learned from."""
    return zlib.crc32(row["question"].encode()) % _ONE_IN == 0


def _package() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of what it imports
        package = import_package("reasoning_gym", "reasoning_gym")
    importlib.import_module("reasoning_gym.factory")
    importlib.import_module("reasoning_gym.utils")
    return package
