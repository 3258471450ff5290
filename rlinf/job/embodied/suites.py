"""The sets of environments that trials are played in, as a configuration names them.

In: `trials` of a configuration. Out: suites by name, or what is wrong with them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlinf.config.embodied import EmbodiedConfig


@dataclass(frozen=True, slots=True)
class Suite:
    """A set of environments that trials are played in."""

    episodes: int
    """How many."""
    options: dict[str, Any]
    """Of its simulators."""
    max_steps: int | None
    """Steps after which an episode is cut off; None for the simulator's own limit."""


_SUITE = {"options": dict, "episodes": int, "max_steps": int}
"""Keys of an entry of `trials.suites`, and their types."""


def suites_of(config: EmbodiedConfig) -> dict[str, Suite]:
    """The sets of environments that trials are played in, by name; those of training are "" and come first.

    Args:
        config: without mistakes in `trials.suites`.
    """
    env, trials = config.env, config.trials
    common = {**env.options, **trials.options}
    suites = {"": Suite(trials.episodes, common, env.max_steps)}
    for name, entry in trials.suites.items():
        options = {**common, **entry.get("options", {})}
        suites[name] = Suite(entry.get("episodes", trials.episodes), options, entry.get("max_steps", env.max_steps))
    return {name: suite for name, suite in suites.items() if suite.episodes}


def suite_mistakes(suites: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, advice) for every mistake in `trials.suites`.

    Args:
        suites: as they were written.
    """
    for name, entry in suites.items():
        key = f"trials.suites.{name}"
        if not re.fullmatch(r"[\w.-]+", str(name)) or str(name).startswith("."):
            yield key, "this names metrics and directories: write it with letters, digits, - and _ alone"
        if not isinstance(entry, Mapping):
            yield key, "write {options: {...}}, and episodes or max_steps where they differ"
            continue
        for each, value in entry.items():
            if each not in _SUITE:
                yield f"{key}.{each}", f"it has no such key; its keys are {', '.join(_SUITE)}"
            elif not isinstance(value, _SUITE[each]) or isinstance(value, bool) or value == 0:
                wanted = "a mapping of options" if each == "options" else "a whole number from 1 on"
                yield f"{key}.{each}", f"{value!r}: write {wanted}"
