"""Reward functions: `reward(response, answer, **row) -> float`, plain or async, given as itself or as a dotted path.

A function takes what it names: `response`, `answer`, `prompt` (its text), `truncated`, or any column of the data set;
with `**kwargs` it takes all of them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

from rlinf.data.sample import Sample
from rlinf.dotted import resolve

RewardFunction = Callable[..., Any]
"""Returns a number, or an awaitable of one."""


def load_reward(reward: RewardFunction | str) -> RewardFunction:
    """The reward function itself.

    Args:
        reward: a function, or its dotted path, such as "rlinf.rewards.exact".

    Raises:
        ValueError: the path leads nowhere, or not to a function.
    """
    found: Any = reward
    if isinstance(reward, str):
        try:
            found = resolve(reward)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"reward {reward!r} cannot be found: {error}") from error
    if not callable(found):
        raise ValueError(f"reward {reward!r} is a {type(found).__name__}, not a function")
    return found


class Reward:
    """A reward function with its arguments bound by name.

    Args:
        function: what to call.

    Raises:
        ValueError: from a call: the function names something that a sample does not have, or returns no finite
            number.
    """

    def __init__(self, function: RewardFunction):
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004  # an object with an async __call__
        )
        parameters = inspect.signature(function).parameters.values()
        self._takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._names = {parameter.name for parameter in named}
        self._needed = {parameter.name for parameter in named if parameter.default is parameter.empty}

    def __call__(self, sample: Sample) -> Any:
        """Call the function for a sample; an awaitable if it is async."""
        offered = {
            **sample.prompt.row,
            "response": sample.text,
            "answer": sample.prompt.answer,
            "prompt": sample.prompt.text,
            "truncated": sample.truncated,
        }
        if missing := self._needed - offered.keys():
            raise ValueError(
                f"reward {self.name} takes {sorted(missing)}, which is no column here; there are {sorted(offered)}"
            )
        if not self._takes_all:
            offered = {name: value for name, value in offered.items() if name in self._names}
        return self.function(**offered)

    def checked(self, value: Any) -> float:
        """`value` as a finite number."""
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"reward {self.name} returned {value!r}: it must return a finite number")
        return number
