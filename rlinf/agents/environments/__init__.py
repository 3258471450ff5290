"""Environments that others wrote, as agents that bring their tasks with them; docs/environments-of-others.md.

In: the name of an environment of somebody's package. Out: an object that is an agent, `await environment(task, llm)`,
and has `tasks()` and `held_out()`: rows to learn from, and others to be evaluated on, where a run names no data. Its
class is made when a run is prepared, so making one starts nothing; what it needs is opened by `async with`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field, ValidationError, validate_call

from rlinf.runtime.base.errors import UserError
from rlinf.runtime.processes.supervisor import Child

ENVIRONMENTS = {
    "openenv": "rlinf.agents.environments.openenv.OpenEnv",
    "reasoning_gym": "rlinf.agents.environments.reasoning_gym.ReasoningGym",
    "textarena": "rlinf.agents.environments.textarena.TextArena",
    "verifiers": "rlinf.agents.environments.verifiers.Verifiers",
}
"""Short names that `agent.function` takes for a dotted path."""

Size = Annotated[int, Field(ge=1, le=1 << 20)]
"""Tasks, turns or players: at least one; seeds of what is held out begin behind the most."""
HeldOut = Annotated[int, Field(ge=0, le=1 << 20)]
"""Tasks to be evaluated on; 0 evaluates on none."""
_LONGEST_REASON = 500
"""Characters of a reason that are shown."""


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


def reason(text: str) -> str:
    """The last line that a process wrote as it died, or that it wrote nothing."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip()[:_LONGEST_REASON] if lines else "it said nothing"


def last_words(child: Child) -> str:
    """The last line that a supervised process wrote."""
    return reason("\n".join(child.output))
