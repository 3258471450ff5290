"""What a key of another framework becomes: keys of ours, nothing since ours does so anyway, or no counterpart.

A table is a mapping from their dotted keys to rules; `a.b.*` holds for all that lies below and has no rule of its own.
A rule is a function of the key, its value and the whole configuration, since some of our keys are made of several of
theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Same:
    """Nothing is to be written: ours does so anyway, or has nothing to which it could apply."""

    why: str


@dataclass(frozen=True, slots=True)
class Absent:
    """There is no counterpart."""

    why: str


class Given:
    """A configuration of theirs, flattened, with its interpolations followed.

    Args:
        values: by dotted key.
    """

    def __init__(self, values: Mapping[str, Any]):
        self.values = values

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key; the default where it is null or not there."""
        found = self.values.get(key)
        return default if found is None else found


Ours = Mapping[str, Any]
"""Values by our dotted keys."""
Outcome = Ours | Same | Absent
Rule = Callable[[str, Any, Given], Outcome]
Table = Mapping[str, Rule]


def to(*ours: str, of: Callable[[Any], Any] = lambda value: value) -> Rule:
    """The value, or what `of` makes of it, under keys of ours; null is the default of both."""

    def rule(key: str, value: Any, given: Given) -> Outcome:
        return Same("null leaves the default") if value is None else {each: of(value) for each in ours}

    return rule


def choice(ours: str, values: Mapping[Any, Any], absent: str) -> Rule:
    """One of some values under a key of ours; any other has no counterpart."""

    def rule(key: str, value: Any, given: Given) -> Outcome:
        if value is None:
            return Same("null leaves the default")
        known = isinstance(value, str | int | float | bool) and value in values
        return {ours: values[value]} if known else Absent(f"{absent}; there is {', '.join(map(str, values))}")

    return rule


def same(why: str) -> Rule:
    """For every value."""
    return lambda key, value, given: Same(why)


def absent(why: str) -> Rule:
    """For every value."""
    return lambda key, value, given: Absent(why)


def when(on: Callable[[Given], bool], rule: Rule, why_not: str) -> Rule:
    """A rule that holds under a condition; otherwise the key means nothing."""
    return lambda key, value, given: rule(key, value, given) if on(given) else Same(why_not)


def unless(off: Any, why_off: str, why: str) -> Rule:
    """Nothing to do while it is off (one of some values, null among them); otherwise no counterpart."""
    quiet = (None, *(off if isinstance(off, tuple) else (off,)))

    def rule(key: str, value: Any, given: Given) -> Outcome:
        empty = isinstance(value, list | dict) and not value
        return Same(why_off) if empty or any(value == each for each in quiet) else Absent(why)

    return rule


def rule_of(table: Table, key: str) -> Rule | None:
    """The rule of a key: its own, or that of the nearest `.*` above; None if there is none."""
    if key in table:
        return table[key]
    parts = key.split(".")
    above = (".".join([*parts[:count], "*"]) for count in range(len(parts) - 1, 0, -1))
    return next((table[each] for each in above if each in table), None)
