"""Which column is what: from a user's rows to prompt, answer and worked response.

Columns may be nested: `reward_model.ground_truth` is the key `ground_truth` of the mapping in `reward_model`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from rlinf.data.datasets.multiple_choice import lettered
from rlinf.data.datasets.rows import DataError, Row, unwritable

OURS = ("prompt", "answer", "response", "choices", "images")
"""What a mapping of columns may name. `choices` is a column of options, or the columns with one each, the right one
first. None of a column says that there is none, whatever a data set has."""
_GUESSES = {
    "prompt": ("prompt", "question", "problem"),
    "answer": (
        "answer",
        "reward_model.ground_truth.target",  # Search-R1's, a list of right answers
        "reward_model.ground_truth",
        "golden_answers",
        "ground_truth",
        "solution",
    ),
    "response": ("response",),
    "choices": (),
    "images": ("images", "image", "decoded_image"),
}
"""Columns that mean ours in public data sets (the layouts of verl, Search-R1, Geometry3K and MathVista
among them), the likeliest first."""
_EXACT = 2.0**53
"""Whole numbers of a float are exact below it."""
_FIELD = re.compile(r"\{\{\{(?P<within>[^{}\n]+)\}\}\}|\{\{(?P<plain>[^{}]*)\}\}|\{(?P<name>[^{}\n]+)\}")
"""In a template: braces that are meant as such, or those around a name."""
_NAME = re.compile(r"[^\W\d][\w .-]*")
"""What can only be meant as a column's name: `{the txt}` is a mistake, `\\frac{1}{2}` is not."""


def lookup(row: Row, path: str) -> Any:
    """The value of a column, which may be nested; None if there is none."""
    if path in row:
        return row[path]
    value: Any = row
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return None
        value = value[name]
    return value


@dataclass(frozen=True, slots=True)
class Columns:
    """Where the parts of a problem are in a row."""

    prompt: str | None
    """Text or chat messages; None if a template makes the prompt."""
    answer: str | None
    """What the reward compares with; None if there is nothing to compare with."""
    response: str | None
    """A worked response, for supervised training; None takes the answer."""
    choices: str | tuple[str, ...] | None
    """Options of multiple choice: one column with all, or one column for each, the right one first."""
    others: tuple[str, ...] = ()
    """Further columns that a template takes."""
    images: str | None = None
    """Pictures of the prompt, one or a list."""

    @staticmethod
    def find(
        rows: Sequence[Row],
        given: Mapping[str, Any],
        *,
        where: str,
        template: str | None = None,
        inherited: Mapping[str, Any] | None = None,
    ) -> Columns:
        """Match names.

        Args:
            rows: the first ones, to see what there is.
            given: ours to theirs, as the user said; every column must be there.
            where: the data set, for messages.
            template: makes the prompt from columns.
            inherited: said for another data set: taken where `given` says nothing and the column is there.

        Raises:
            DataError: a column is not there, or nothing tells which is the prompt.
        """
        if unknown := given.keys() - set(OURS):
            raise DataError(f"columns: {sorted(unknown)} is none of ours, which are {', '.join(OURS)}")
        names = sorted({name for row in rows for name in row})
        found: dict[str, Any] = {}
        for ours in OURS:
            if ours in given and given[ours] is None:
                found[ours] = None
            elif ours in given:
                _check_there(given[ours], f"for {ours}", rows, names, where)
                found[ours] = _kept(given[ours])
            else:
                guesses = [*([inherited[ours]] if inherited and ours in inherited else []), *_GUESSES[ours]]
                found[ours] = next((_kept(guess) for guess in guesses if not _missing(guess, rows)), None)
        if template is None and found["prompt"] is None:
            raise DataError(
                f"{where} has no column for the prompt; there are {names}. Name it in data.columns, such as "
                "{prompt: question}, or make the prompt from columns by data.template"
            )
        others = tuple(name for name in fields(template or "", rows) if name not in ("prompt", "choices"))
        _check_there(others, "as data.template says", rows, names, where)
        return Columns(**found, others=others)

    @property
    def top_level(self) -> list[str]:
        """Columns whose values are looked at in each row."""
        named = [self.prompt, self.answer, *_each(self.choices or ()), *self.others]
        return [part for name in named if name for part in {name, name.partition(".")[0]}]

    @property
    def named(self) -> list[tuple[str, str]]:
        """What was found, for people: ours and theirs."""
        pairs = [(ours, getattr(self, ours)) for ours in ("prompt", "answer", "response", "images")]
        found = [(ours, theirs) for ours, theirs in pairs if theirs is not None]
        return [*found, *([("choices", ", ".join(_each(self.choices)))] if self.choices else [])]

    def problem_in(self, row: Row) -> str | None:
        """What is wrong with a row, in words; None if nothing is."""
        wanted = [("prompt", self.prompt), ("answer", self.answer), *(("value", name) for name in self.others)]
        for ours, name in wanted:
            if name is None:
                continue
            value = lookup(row, name)
            if missing(value) or (ours == "prompt" and not value):
                there = sorted(name for name, item in row.items() if not missing(item))
                said = _absent(row, name) if value is None else "not a number (NaN)" if missing(value) else "empty"
                return f"no {ours}: column {name!r} is {said}; there are {there}"
            if ours == "prompt" and (wrong := _no_prompt(value)):
                return f"no prompt: column {name!r} {wrong}"
            if (wrong := unwritable(value)) is not None:
                return f"column {name!r}: {wrong}"
        return None

    def answer_in(self, row: Row) -> str:
        """The answer as text: numbers as they are written, lists and mappings as JSON."""
        value = None if self.answer is None else lookup(row, self.answer)
        if isinstance(value, list | tuple | dict):
            return json.dumps(value, default=str)
        return "" if missing(value) else as_text(value)

    def choices_in(self, row: Row, index: int, where: str) -> tuple[str, str] | None:
        """The lettered options and the right letter; None if this is no multiple choice.

        Options with a column each are shuffled, with the row's number as the key: the right one would always be A.
        """
        if self.choices is None:
            return None
        if isinstance(self.choices, str):
            answer = None if self.answer is None else lookup(row, self.answer)
            return lettered(lookup(row, self.choices), answer, where)
        return lettered([lookup(row, name) for name in self.choices], 0, where, shuffle=index)

    def rest_of(self, row: Row) -> dict[str, Any]:
        """The columns that a prompt does not hold already; reward functions get them by name."""
        return {
            name: value for name, value in row.items() if name not in (self.prompt, self.images, "prompt", "answer")
        }


def _absent(row: Row, path: str) -> str:
    """How a column has no value: there is no such key, or it is null."""
    outer, _, last = path.rpartition(".")
    holder = lookup(row, outer) if outer and path not in row else row
    there = path in row or (isinstance(holder, Mapping) and last in holder)
    return "empty (null)" if there else "missing"


def missing(value: Any) -> bool:
    """There is no value: null, or the NaN by which pandas says so."""
    return value is None or (isinstance(value, float) and value != value)


def as_text(value: Any) -> str:
    """A single value as text: whole numbers without the fraction that pandas gives them beside missing ones."""
    whole = isinstance(value, float) and value.is_integer() and abs(value) < _EXACT
    return str(int(value)) if whole else str(value)


def fields(template: str, rows: Sequence[Row] = ()) -> list[str]:
    """The columns that a template names: `{name}`, `{outer.inner}`, or any other name of a column in `rows`."""
    named = [match["within"] or match["name"] for match in _FIELD.finditer(template)]
    return [name for name in named if name and (_NAME.fullmatch(name) or not _missing(name, rows))]


def fill(template: str, row: Row, where: str, key: str = "data.template") -> str:
    """A template with columns filled in, as Python's own are: `{{name}}` stands for `{name}`, `{{}}` for `{}`, and
    `{{{name}}}` for the column in braces; other braces stand for themselves.

    Args:
        template: text with columns in braces.
        row: their values.
        where: the row is, for errors.
        key: of the configuration that has the template, for errors.

    Raises:
        DataError: a column is not there.
    """

    def value(match: re.Match[str]) -> str:
        if match["plain"] is not None:
            return f"{{{match['plain']}}}"
        name = match["within"] or match["name"]
        found = lookup(row, name)
        if found is None and not _NAME.fullmatch(name):
            return match[0]
        if found is None:
            there = sorted(name for name, item in row.items() if item is not None)
            raise DataError(
                f"{where}: {key} names {name!r}, which is no column here; there are {there}. "
                f"Write {{{{{name}}}}} for braces that are meant as such"
            )
        return f"{{{found}}}" if match["within"] else str(found)

    return _FIELD.sub(value, template)


def _check_there(name: Any, why: str, rows: Sequence[Row], names: list[str], where: str) -> None:
    for absent in _missing(name, rows):
        if absent in names:
            others = [each for each in names if each not in _missing(names, rows)]
            raise DataError(
                f"{where}: column {absent!r} ({why}) is empty in all rows; there is something in {others or 'none'}"
            )
        near = get_close_matches(absent, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise DataError(f"{where} has no column {absent!r} {why}{hint} There are {names}")


def _missing(name: Any, rows: Sequence[Row]) -> list[str]:
    """Those of the names that are in none of the rows."""
    return [each for each in _each(name) if all(lookup(row, each) is None for row in rows)]


def _each(name: Any) -> list[str]:
    return [name] if isinstance(name, str) else [str(each) for each in name]


def _kept(name: Any) -> Any:
    return name if isinstance(name, str) else tuple(_each(name))


def _no_prompt(value: Any) -> str | None:
    """Why a value is neither text nor chat messages; None if it is."""
    if isinstance(value, str):
        return None
    if not isinstance(value, list | tuple):
        return f"is a {type(value).__name__}, neither text nor a list of chat messages"
    for message in value:
        names = message.keys() if isinstance(message, Mapping) else set()
        if not ({"role", "content"} <= names or {"from", "value"} <= names or {"role", "tool_calls"} <= names):
            return 'has a chat message that is no {"role": …, "content": …}'
    return None
