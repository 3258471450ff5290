"""Environments that others wrote, as agents that bring their tasks with them; docs/environments-of-others.md.

In: the name of an environment of somebody's package. Out: an object that is an agent, `await environment(task, llm)`,
and has `tasks()` and `held_out()`: rows to learn from, and others to be evaluated on, where a run names no data. Its
class is made when a run is prepared, so making one starts nothing; what it needs is opened by `async with`. One that
is `Adapting` makes each task when it is drawn, by what came of those before: an endless source with a curriculum.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, Protocol, runtime_checkable

from pydantic import BaseModel, Field, ValidationError, model_validator, validate_call

from rlinf.config.importing import resolve
from rlinf.data.sample import Prompt
from rlinf.rewards.base import Score
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.processes.supervisor import Child

ENVIRONMENTS = {
    "gymnasium_text": "rlinf.agents.environments.gymnasium_text.GymnasiumText",
    "harbor": "rlinf.agents.environments.harbor.Harbor",
    "mcp": "rlinf.agents.environments.mcp.MCP",
    "nemo_gym": "rlinf.agents.environments.nemo_gym.NemoGym",
    "openenv": "rlinf.agents.environments.openenv.OpenEnv",
    "reasoning_gym": "rlinf.agents.environments.reasoning_gym.ReasoningGym",
    "textarena": "rlinf.agents.environments.textarena.TextArena",
    "verifiers": "rlinf.agents.environments.verifiers.Verifiers",
}
"""Short names that `agent.function` takes for a dotted path."""

Size = Annotated[int, Field(ge=1, le=1 << 20)]
"""Tasks, turns or players: at least one; seeds of what is held out begin behind the most."""
Seconds = Annotated[float, Field(gt=0)]
"""Time that something has."""
HeldOut = Annotated[int, Field(ge=0, le=1 << 20)]
"""Tasks to be evaluated on; 0 evaluates on none."""
_LONGEST_REASON = 500
"""Characters of a reason that are shown."""


@runtime_checkable
class Adapting(Protocol):
    """An environment whose next tasks depend on what came of those before."""

    def draw(self, task: Prompt) -> Prompt:
        """A task as it is worked on, of one that was drawn from `tasks()`; called in a thread. All attempts at it work
        on the same, also those after a resume. `task.id` differs also where a row comes round again."""

    def learn(self, outcomes: Sequence[tuple[Prompt, float]]) -> Mapping[str, float]:
        """Take in the tasks that ended in a step, in the order of their ids, each with the mean of its attempts'
        rewards; returns metrics of the step. Called between steps; failed attempts do not count."""

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on from here, as JSON; checkpoints keep it."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""


def checked(init: Callable[..., None]) -> Callable[..., None]:
    """An environment's `__init__` that refuses arguments of other types, or out of range, with a line for each."""
    validated = validate_call(config={"arbitrary_types_allowed": True})(init)

    @functools.wraps(init)
    def checking(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            validated(self, *args, **kwargs)
        except ValidationError as error:
            wrong = {".".join(str(at) for at in each["loc"][:2]): each for each in error.errors()}
            lines = [f"{where}={each['input']!r:.60}: {each['msg']}" for where, each in wrong.items()]
            raise UserError(f"{type(self).__name__}: {'; '.join(lines)}") from None

    return checking


def by_path(argument: str, value: Any) -> Any:
    """Look up the object that an argument names by a dotted path; what is no text is it already.

    Raises:
        UserError: there is nothing of that name.
    """
    if not isinstance(value, str):
        return value
    try:
        return resolve(value)
    except (ImportError, AttributeError) as error:
        raise UserError(f"{argument}={value!r}: {error}") from error


def import_package(environment: str, name: str, install: str = "'rlinf[environments]'") -> Any:
    """Import somebody's package.

    Raises:
        UserError: it is not installed, or needs what is not.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"{environment}: {error}; pip install {install}") from error


def reason(text: str) -> str:
    """The last line that a process wrote as it died, or that it wrote nothing."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip()[:_LONGEST_REASON] if lines else "it said nothing"


def last_words(child: Child) -> str:
    """The last line that a supervised process wrote."""
    return reason("\n".join(child.output))


def verdict(text: str, of: str, besides: Collection[str] = ()) -> Score:
    """The score that a server returned as JSON: a number, or an object whose `reward`, or else `score`, is one. Other
    numbers of it are reported.

    Args:
        text: what it returned.
        of: who, for errors.
        besides: names that say nothing about the answer.

    Raises:
        RuntimeError: there is no such number.
    """
    try:
        value = json.loads(text)
        values = value if isinstance(value, Mapping) else {"reward": value}
        scores = {name: float(one) for name, one in values.items() if isinstance(one, int | float)}
        scores = {name: one for name, one in scores.items() if name not in besides}
        return Score(scores["reward"] if "reward" in scores else scores["score"], scores)
    except (KeyError, ValueError) as error:
        raise RuntimeError(f"{of} gave no reward: {text!r:.200}") from error


# Tasks ---------------------------------------------------------------------------------------------------------------

_APART = 1 << 20
"""Distance between the seeds of what is learned and of what is held out."""
_ONE_IN = 8
"""Of so many tasks of a list at least, one is held out."""


class Seeded:
    """An environment whose tasks differ by their seeds."""

    sizes: tuple[int, int]
    """Tasks to learn from, and held out."""
    seed: int = 0
    """First seed of what is learned."""

    def row(self, index: int, seed: int) -> dict[str, Any]:
        """A task.

        Args:
            index: of the task among those that are learned from, or held out.
            seed: of its own.
        """
        raise NotImplementedError

    def tasks(self) -> list[dict[str, Any]]:
        """Tasks to learn from."""
        return [self.row(index, self.seed + index) for index in range(self.sizes[0])]

    def held_out(self) -> list[dict[str, Any]]:
        """Tasks to be evaluated on."""
        return [self.row(index, self.seed + _APART + index) for index in range(self.sizes[1])]


class Listed:
    """An environment whose tasks are a list, of which the last ones are held out."""

    most_held_out: int
    """How many; at most one in eight."""

    def rows(self) -> Sequence[dict[str, Any]]:
        """All tasks."""
        raise NotImplementedError

    def tasks(self) -> list[dict[str, Any]]:
        """Tasks to learn from."""
        return self._split()[0]

    def held_out(self) -> list[dict[str, Any]]:
        """Tasks to be evaluated on."""
        return self._split()[1]

    def _split(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        rows = list(self.rows())
        learned = len(rows) - min(self.most_held_out, len(rows) // _ONE_IN)
        return rows[:learned], rows[learned:]


# Difficulty ----------------------------------------------------------------------------------------------------------

Share = Annotated[float, Field(ge=0, le=1)]
"""A mean reward."""


class Rule(BaseModel, extra="forbid", frozen=True):
    """When a level changes."""

    up: Share = 0.8
    """A level is learned at this mean reward: the next tasks are one level harder."""
    down: Share = 0.2
    """At this mean reward, or below, it is too hard: the next tasks are one level easier."""
    tasks: int = Field(default=32, ge=1)
    """Tasks of a kind at its level that such a mean is taken of, at least; then it is counted anew."""
    start: int = Field(default=0, ge=0)
    """Level that all kinds begin at."""

    @model_validator(mode="after")
    def _apart(self) -> Rule:
        if not self.down < self.up:
            raise ValueError(f"down={self.down:g} must be below up={self.up:g}")
        return self


class Levels:
    """The level of each kind of task, which rises where most of its tasks are solved.

    Levels move between steps only, by one, and by sums that are the same in whatever order episodes ended, so a run
    that goes on from its checkpoint has the levels that it would have had.

    Args:
        rule: of the levels.
        highest: of each kind, from 0.
    """

    def __init__(self, rule: Rule, highest: Mapping[str, int]) -> None:
        self._rule, self._highest = rule, dict(highest)
        self._now = {kind: min(rule.start, most) for kind, most in highest.items()}
        self._sums = dict.fromkeys(highest, (0, 0.0))  # tasks at this level since it was last decided, and rewards

    def __getitem__(self, kind: str) -> int:
        return self._now[kind]

    def learn(self, outcomes: Iterable[tuple[str, int, float]]) -> dict[str, float]:
        """Take in what came of tasks, and decide on the levels of the next ones.

        Args:
            outcomes: kind, level and mean reward of each; those of another level than the kind's now tell nothing.

        Returns:
            Metrics: `curriculum/KIND/level` of the next tasks.
        """
        rewards: dict[str, list[float]] = {}
        for kind, level, reward in outcomes:
            if level == self._now[kind]:
                rewards.setdefault(kind, []).append(reward)
        for kind, own in rewards.items():
            count, total = self._sums[kind]
            self._decide(kind, count + len(own), math.fsum([total, *own]))
        return {f"curriculum/{kind}/level": float(level) for kind, level in self._now.items()}

    def _decide(self, kind: str, count: int, total: float) -> None:
        if count < self._rule.tasks:
            self._sums[kind] = count, total
            return
        moved = (total / count >= self._rule.up) - (total / count <= self._rule.down)
        self._now[kind] = min(max(self._now[kind] + moved, 0), self._highest[kind])
        self._sums[kind] = 0, 0.0

    def state_dict(self) -> dict[str, Any]:
        """Levels and sums, as JSON."""
        return {kind: [level, *self._sums[kind]] for kind, level in self._now.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from saved levels; a kind that is new begins where it would."""
        for kind in self._now.keys() & state.keys():
            level, count, total = state[kind]
            self._now[kind], self._sums[kind] = min(level, self._highest[kind]), (count, total)
