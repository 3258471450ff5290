"""Opens data sets: files, directories, hub names and Python objects become rows, with columns for prompt and answer.

In: what a user wrote or passed. Out: `Rows` where any row can be read, one mapping per row, by number, each with a name
by which a person finds it; or an `Iterated` where rows only come one after the other. Lines of jsonl stay in the file
and tables stay in Arrow's memory; a row becomes Python objects when it is read.

`Columns` says which column is the prompt, the answer and the worked response. Columns may be nested:
`reward_model.ground_truth` is the key `ground_truth` of the mapping in `reward_model`. Of multiple-choice rows,
`lettered` makes lettered options and the right letter.
"""

from __future__ import annotations

import ast
import csv
import glob
import hashlib
import json
import mmap
import re
from array import array
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from string import ascii_uppercase
from typing import Any, Protocol

import numpy as np

from rlinf.config.importing import looks_local, resolve, shipped_file
from rlinf.config.reading import parse_json
from rlinf.data.library_progress import fold_datasets
from rlinf.data.rng import permutation
from rlinf.data.sample import DataError

Row = Mapping[str, Any]
"""One row: values by column."""

_SAMPLED = 64
"""Rows that a fingerprint looks at: a change of one row in a hundred is noticed with probability 1/2, and a data set
that was shuffled, filtered, extended or replaced with near certainty, in milliseconds whatever its size."""
_BATCH = 4096
"""Rows that are turned into Python objects at once while a table is checked."""
_ADDRESS = re.compile(r" ?<[^<>]* at 0x[0-9a-f]+>")
"""Text that Python prints for an object without a text of its own; nobody can read it."""
_LONGEST_FIELD = 2**31 - 1
"""Most characters in one field of a csv file; Python's own limit, 131,072, is less than many a document."""


class Mismatch(DataError):
    """The data and the model do not go together, whatever the row: no row is to blame, and leaving one out helps
    nobody."""


class Rows(Protocol):
    """Rows by number."""

    name: str
    """Where they are from, for people."""

    def __len__(self) -> int:
        """How many."""
        ...

    def __getitem__(self, index: int) -> Row:
        """One of them. Raises `DataError` if it cannot be read."""
        ...

    def where(self, index: int) -> str:
        """Where a person finds it, such as "train.jsonl, line 12"."""
        ...

    def scan(self, columns: Sequence[str]) -> Iterator[Row | DataError]:
        """All of them in order, with these columns at least; an error in place of a row that cannot be read."""
        ...


class ListRows:
    """Rows in memory.

    Args:
        name: where they are from.
        rows: the mappings.
        unit: what a row is called, such as "row" or "line".
        numbers: number of each row for people; None counts from 1.
    """

    def __init__(self, name: str, rows: Sequence[Any], *, unit: str = "row", numbers: Sequence[int] | None = None):
        self.name = name
        self._rows = rows
        self._unit = unit
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return checked(self._rows[index], self.where(index))

    def where(self, index: int) -> str:
        return f"{self.name}, {self._unit} {index + 1 if self._numbers is None else self._numbers[index]}"

    def scan(self, columns: Sequence[str]) -> Iterator[Row | DataError]:
        return _one_by_one(self)


class JsonLines:
    """A file with one JSON object per line; empty lines are skipped.

    Raises:
        DataError: from reading a row that is no JSON object.
    """

    def __init__(self, path: Path):
        self.name = str(path)
        self._starts = array("q")
        self._lines = array("q")
        self._data: mmap.mmap | bytes = b""
        if path.stat().st_size:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        start = 3 if self._data[:3] == b"\xef\xbb\xbf" else 0  # a byte order mark
        number = 0
        while start < len(self._data):
            number += 1
            end = self._end(start)
            if self._data[start:end].strip():
                self._starts.append(start)
                self._lines.append(number)
            start = end + 1

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Row:
        start = self._starts[index]
        try:
            row = parse_json(self._data[start : self._end(start)])
        except ValueError as error:  # not JSON, or not UTF-8
            raise DataError(f"{self.where(index)} is no JSON: {error}") from error
        return checked(row, self.where(index))

    def where(self, index: int) -> str:
        return f"{self.name}, line {self._lines[index]}"

    def scan(self, columns: Sequence[str]) -> Iterator[Row | DataError]:
        return _one_by_one(self)

    def _end(self, start: int) -> int:
        end = self._data.find(b"\n", start)
        return len(self._data) if end < 0 else end


class TableRows:
    """An Arrow table, or a data set of the `datasets` library, which is one in files.

    Args:
        name: where it is from.
        table: `pyarrow.Table` or `datasets.Dataset`.
    """

    def __init__(self, name: str, table: Any):
        self.name = name
        self._table = table
        self._is_arrow = hasattr(table, "to_batches")

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Row:
        if self._is_arrow:
            return self._table.slice(index, 1).to_pylist()[0]  # type: ignore[no-any-return]
        try:
            return self._table[int(index)]  # type: ignore[no-any-return]
        except Exception as error:  # of whatever decodes its columns, such as a picture that is broken
            reason = _ADDRESS.sub("", " ".join(str(error).split()))
            raise DataError(f"{self.where(index)} cannot be read: {type(error).__name__}: {reason}") from error

    def where(self, index: int) -> str:
        return f"{self.name}, row {index + 1}"

    def scan(self, columns: Sequence[str]) -> Iterator[Row | DataError]:
        there = [name for name in self._table.column_names if name in columns]
        if not there:
            yield from ({} for _ in range(len(self)))
        elif self._is_arrow:
            for batch in self._table.select(there).to_batches(max_chunksize=_BATCH):
                yield from batch.to_pylist()
        else:
            for values in self._table.select_columns(there).iter(_BATCH):
                yield from (dict(zip(there, row, strict=True)) for row in zip(*values.values(), strict=True))


class JoinedRows:
    """Several sets of rows, one after the other."""

    def __init__(self, name: str, parts: Sequence[Rows]):
        self.name = name
        self._parts = parts
        self._length = sum(map(len, parts))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Row:
        part, at = self._find(index)
        return part[at]

    def where(self, index: int) -> str:
        part, at = self._find(index)
        return part.where(at)

    def scan(self, columns: Sequence[str]) -> Iterator[Row | DataError]:
        for part in self._parts:
            yield from part.scan(columns)

    def _find(self, index: int) -> tuple[Rows, int]:
        for part in self._parts:
            if index < len(part):
                return part, index
            index -= len(part)
        raise IndexError(index)


def read_csv(path: Path) -> ListRows:
    """The rows of a csv file whose first line names the columns.

    Raises:
        DataError: a row has more or fewer values than there are columns, or the file is no text.
    """
    csv.field_size_limit(_LONGEST_FIELD)
    rows: list[Row] = []
    lines: list[int] = []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            for row in reader:
                if None in row or None in row.values():
                    values = sum(value is not None for name, value in row.items() if name is not None)
                    values += len(row.get(None) or ())  # type: ignore[call-overload]
                    columns = len(reader.fieldnames or ())
                    raise DataError(
                        f"{path}, line {reader.line_num}: {values} values for {columns} columns; put quotes around "
                        "values with commas or line ends in them"
                    )
                rows.append(row)
                lines.append(reader.line_num)
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path} is no csv file: {error}") from error
    return ListRows(str(path), rows, unit="line", numbers=lines)


def read_json(path: Path) -> ListRows:
    """The rows of a JSON file: a list of objects, or an object with such a list under "data".

    Raises:
        DataError: it is neither.
    """
    try:
        content = parse_json(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path} is no JSON: {error}; one object per line goes into a .jsonl file") from error
    rows = content.get("data") if isinstance(content, dict) else content
    if not isinstance(rows, list):
        raise DataError(f'{path} is neither a list of rows nor {{"data": [...]}}')
    return ListRows(str(path), rows)


def read_parquet(path: Path) -> TableRows:
    """The rows of a parquet file, read row group by row group.

    Raises:
        DataError: it is none, or pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{path}: parquet files need pyarrow: pip install rlinf[data]") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            groups = [file.read_row_group(number) for number in range(file.num_row_groups)]
            schema = file.schema_arrow
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is no parquet file: {error} Write or copy it anew, or name another one") from error
    return TableRows(str(path), pyarrow.concat_tables(groups) if groups else schema.empty_table())


def checked(row: Any, where: str) -> Row:
    """`row`, if it is one, with Python's own lists and numbers. Raises `DataError` if not."""
    if not isinstance(row, Mapping):
        raise DataError(f"{where} is a {type(row).__name__}, not a row with named columns")
    return without_arrays(row)  # type: ignore[no-any-return]


def without_arrays(value: Any) -> Any:
    """A value with lists and numbers of Python's in place of numpy's, such as pandas makes of the lists in a parquet
    file. Arrays of numbers with several dimensions stay: they are pictures."""
    if isinstance(value, np.ndarray):
        return [without_arrays(item) for item in value] if value.dtype == object or value.ndim == 1 else value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        changed = {name: without_arrays(item) for name, item in value.items()}
        return changed if any(changed[name] is not item for name, item in value.items()) else value
    if isinstance(value, list):
        items = [without_arrays(item) for item in value]
        return items if any(one is not other for one, other in zip(items, value, strict=True)) else value
    return value


def counted(number: int, what: str) -> str:
    """A number of things, in words: `1 row`, `2,000 rows`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def unwritable(value: Any) -> str | None:
    """Why a text, or one within lists and mappings, cannot be encoded: it has half of a character. None if it can."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            half = value[error.start]
            return (
                f"the text has {half!r} at character {error.start + 1}, half of a surrogate pair, as cut emoji leave: "
                "no UTF-8 text can hold it; remove it, or write the character whole"
            )
        return None
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return next((wrong for each in inner if (wrong := unwritable(each)) is not None), None)


def fingerprint(rows: Rows) -> str:
    """Tells whether rows are the same as another time: hex, of their number and of some of them."""
    count = len(rows)
    digest = hashlib.sha256(str(count).encode())
    for index in sorted({round(step * (count - 1) / (_SAMPLED - 1)) for step in range(_SAMPLED)} if count else ()):
        try:
            digest.update(canonical(rows[index]))
        except DataError:  # which costs that row alone where it is drawn
            digest.update(b"unreadable")
    return digest.hexdigest()[:16]


def canonical(row: Row) -> bytes:
    """A row as bytes that are the same whenever it is."""
    return json.dumps(row, sort_keys=True, default=_as_text).encode()


def _as_text(value: Any) -> str:
    """Text for a value that JSON does not know, equal whenever the value is; for pictures, whose `repr` is where they
    lie in memory, it is made of their pixels."""
    if hasattr(value, "tobytes") and hasattr(value, "mode"):
        return f"{value.mode} {value.size} {hashlib.sha256(value.tobytes()).hexdigest()}"
    return str(value)


def _one_by_one(rows: Rows) -> Iterator[Row | DataError]:
    for index in range(len(rows)):
        try:
            row: Row | DataError = rows[index]
        except DataError as error:
            row = error
        yield row


def lettered(
    options: Sequence[Any] | Mapping[str, Any], answer: Any, where: str, *, shuffle: int | None = None
) -> tuple[str, str]:
    """The options as lines "A) …", and the letter of the right one.

    Args:
        options: the texts; or texts by letter; or `{"label": [...], "text": [...]}`; or a text that lists them.
        answer: the right one: its position from 0, its letter or label, or its text.
        where: the row, for messages.
        shuffle: key of another order of the options; None keeps theirs.

    Raises:
        DataError: the answer is none of the options.
    """
    if isinstance(options, str):  # a csv file has texts alone
        options, answer = _listed(options), int(answer) if str(answer).isdecimal() else answer
    labels, texts = _both(options, where)
    right = _position(answer, labels, texts)
    if right is None or len(texts) > len(ascii_uppercase):
        raise DataError(f"{where}: the answer {answer!r} is none of the {len(texts)} options {texts}")
    order = list(range(len(texts))) if shuffle is None else permutation(len(texts), shuffle).tolist()
    lines = [f"{letter}) {texts[index]}" for letter, index in zip(ascii_uppercase, order, strict=False)]
    return "\n".join(lines), ascii_uppercase[order.index(right)]


def _listed(text: str) -> Any:
    """The list that a text is, in Python's notation or JSON's; the text itself if it is none."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def _both(options: Any, where: str) -> tuple[list[str], list[str]]:
    if isinstance(options, Mapping):
        if options.keys() >= {"label", "text"}:
            return [str(label) for label in options["label"]], [str(text) for text in options["text"]]
        return [str(label) for label in options], [str(text) for text in options.values()]
    if not isinstance(options, Sequence) or isinstance(options, str):
        raise DataError(f"{where}: the options are a {type(options).__name__}, not a list")
    return list(ascii_uppercase[: len(options)]), [str(text) for text in options]


def _position(answer: Any, labels: list[str], texts: list[str]) -> int | None:
    if isinstance(answer, int) and not isinstance(answer, bool):
        return answer if 0 <= answer < len(texts) else None
    text = str(answer)
    for candidates in (texts, labels):
        if candidates.count(text) == 1:
            return candidates.index(text)
    return None


OURS = ("prompt", "answer", "response", "choices", "images")
"""Names of ours that a mapping of columns may have. `choices` is a column of options, or the columns with one each, the
right one first. None of a column says that there is none, whatever a data set has."""
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
"""Pattern of text that can only be meant as a column's name: `{the txt}` is a mistake, `\\frac{1}{2}` is not."""


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
    """Column that the reward compares with; None if there is nothing to compare with."""
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
        columns: Mapping[str, Any],
        *,
        where: str,
        template: str | None = None,
        inherited: Mapping[str, Any] | None = None,
    ) -> Columns:
        """Match names.

        Args:
            rows: the first ones, to see what there is.
            columns: ours to theirs, as the user said; every column must be there.
            where: the data set, for messages.
            template: makes the prompt from columns.
            inherited: said for another data set: taken where `columns` says nothing and the column is there.

        Raises:
            DataError: a column is not there, or nothing tells which is the prompt.
        """
        if unknown := columns.keys() - set(OURS):
            raise DataError(f"columns: {sorted(unknown)} is none of ours, which are {', '.join(OURS)}")
        names = sorted({name for row in rows for name in row})
        matches: dict[str, Any] = {}
        for ours in OURS:
            if ours in columns and columns[ours] is None:
                matches[ours] = None
            elif ours in columns:
                _check_there(columns[ours], f"for {ours}", rows, names, where)
                matches[ours] = _kept(columns[ours])
            else:
                guesses = [*([inherited[ours]] if inherited and ours in inherited else []), *_GUESSES[ours]]
                matches[ours] = next((_kept(guess) for guess in guesses if not _missing(guess, rows)), None)
        if matches["prompt"] is None and (template is None or "prompt" in fields(template)):
            void = ", and prompt is null in those rows that were looked at" if "prompt" in names else ""
            raise DataError(
                f"{where} has no column for the prompt; there are {names}{void}. Name it in data.columns, such as "
                "{prompt: question}, or make the prompt from columns by data.template"
            )
        others = tuple(name for name in fields(template or "", rows) if name not in ("prompt", "choices"))
        _check_there(others, "as data.template says", rows, names, where)
        return Columns(**matches, others=others)

    @property
    def top_level(self) -> list[str]:
        """Columns whose values are looked at in each row."""
        named = [self.prompt, self.answer, *_each(self.choices or ()), *self.others]
        return [part for name in named if name for part in {name, name.partition(".")[0]}]

    @property
    def named(self) -> list[tuple[str, str]]:
        """Pairs of a column's name here and its name in the data set, for messages."""
        pairs = [(ours, getattr(self, ours)) for ours in ("prompt", "answer", "response", "images")]
        matches = [(ours, theirs) for ours, theirs in pairs if theirs is not None]
        return [*matches, *([("choices", ", ".join(_each(self.choices)))] if self.choices else [])]

    def problem_in(self, row: Row) -> str | None:
        """Describe in words why a row cannot be used; None if it can."""
        wanted = [("prompt", self.prompt), ("answer", self.answer), *(("value", name) for name in self.others)]
        for ours, name in wanted:
            if name is None:
                continue
            value = lookup(row, name)
            if missing(value) or (ours == "prompt" and not value):
                there = sorted(name for name, item in row.items() if not missing(item))
                state = _absent(row, name) if value is None else "not a number (NaN)" if missing(value) else "empty"
                return f"no {ours}: column {name!r} is {state}; there are {there}"
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
        content = lookup(row, name)
        if content is None and not _NAME.fullmatch(name):
            return match[0]
        if content is None:
            there = sorted(name for name, item in row.items() if item is not None)
            raise DataError(
                f"{where}: {key} names {name!r}, which is no column here; there are {there}. "
                f"Write {{{{{name}}}}} for braces that are meant as such"
            )
        return f"{{{content}}}" if match["within"] else str(content)

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


Source = ListRows | str | Path | Iterable[Row] | AsyncIterable[Row] | Callable[[], Iterable[Row] | AsyncIterable[Row]]
"""A file, several by a pattern with `*`, a directory, a hub name, `module.name` of an object; or that object: a list, a
table of pandas, polars, Arrow or `datasets`, an iterable or async iterable of mappings, or a function making one."""

_REMEMBERED = 20_000
"""Rows of an iterator that are kept, so that it can be gone through again: tens of megabytes of text."""

READERS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": JsonLines,
    ".json": read_json,
    ".csv": read_csv,
    ".parquet": read_parquet,
}
"""Functions that read a file, by its suffix."""


@dataclass(frozen=True, slots=True)
class Iterated:
    """Rows that come one after the other."""

    name: str
    """Where they are from, for people."""
    open: Callable[[], Iterable[Row] | AsyncIterable[Row]]
    """Begins again at the first one; unless `once`."""
    once: bool
    """It is an iterator already: only its first rows can be gone through again."""
    is_async: bool
    """It is gone through by `async for`."""


def open_rows(source: Source, *, split: str = "train") -> Rows | Iterated:
    """Find and open the rows.

    Args:
        source: what the user gave.
        split: which split of a directory or a data set on the hub.

    Raises:
        DataError: there is nothing, or nothing that can be read.
    """
    if isinstance(source, str | Path):
        return _named(str(source), split)
    if isinstance(source, ListRows):
        return source
    name = getattr(source, "__qualname__", type(source).__name__)
    if isinstance(source, AsyncIterable):
        again = _Remembered(name, source) if hasattr(source, "__anext__") else source
        return Iterated(name, lambda: again, again is not source, is_async=True)
    if hasattr(source, "column_names") and hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        return TableRows(name, source)
    if (records := _records(source)) is not None:
        return ListRows(f"a {name}", records)
    if hasattr(source, "__len__") and hasattr(source, "__getitem__") and not isinstance(source, Mapping | bytes):
        return ListRows(f"a {name}" if isinstance(source, list | tuple) else name, source)  # type: ignore[arg-type]
    if isinstance(source, Iterable) and not isinstance(source, Mapping | bytes):
        rows = _Remembered(name, source) if hasattr(source, "__next__") else source
        return Iterated(name, lambda: rows, rows is not source, is_async=False)
    if callable(source):
        return _made(name, source)
    raise DataError(f"data: a {type(source).__name__} holds no rows; give a file, a list or an iterable of dicts")


def _records(source: Any) -> list[Row] | None:
    """The rows of a table of pandas or polars, with None where a value is missing; None of anything else."""
    if hasattr(source, "to_dicts") and hasattr(source, "columns"):
        return list(source.to_dicts())
    if not (hasattr(source, "iloc") and hasattr(source, "columns")):
        return None
    missing = source.isna()
    columns = {str(name): (source[name].tolist(), missing[name].tolist()) for name in source.columns}
    return [
        {name: None if absent[index] else values[index] for name, (values, absent) in columns.items()}
        for index in range(len(source))
    ]


class _Remembered:
    """An iterator, or an async one, that can be gone through again from its first row, as far as its rows are kept.

    Args:
        name: for errors.
        rows: the iterator.
    """

    def __init__(self, name: str, rows: Any):
        self._name, self._source = name, rows
        self._rows: list[Row] | None = []  # the first ones; None when there were too many

    def __iter__(self) -> Iterator[Row]:
        yield from self._first()
        for row in self._source:
            yield self._keep(row)

    async def __aiter__(self) -> AsyncIterator[Row]:
        for row in self._first():
            yield row
        async for row in self._source:
            yield self._keep(row)

    def _keep(self, row: Row) -> Row:
        if self._rows is not None:
            self._rows.append(row)
            if len(self._rows) > _REMEMBERED:
                self._rows = None
        return row

    def _first(self) -> list[Row]:
        if self._rows is None:
            raise DataError(
                f"{self._name} gave more than {_REMEMBERED:,} rows, which is what is kept of what can be read "
                "only once, so it cannot be begun again: give a list, or a function that makes the iterable anew for "
                "each pass"
            )
        return list(self._rows)


def _made(name: str, make: Callable[[], Any]) -> Rows | Iterated:
    """Open what a function returns: a list is as good as any; of an iterator, the function makes another for each
    pass."""
    first = make()
    if hasattr(first, "__next__") or hasattr(first, "__anext__"):
        waiting = [first]
        is_async = hasattr(first, "__anext__")
        return Iterated(name, lambda: waiting.pop() if waiting else make(), once=False, is_async=is_async)
    return open_rows(first)


def _named(source: str, split: str) -> Rows | Iterated:
    path = Path(shipped_file(source)).expanduser()
    if path.is_dir():
        return _directory(path, split)
    if path.is_file():
        return _file(path)
    if any(character in source for character in "*?["):
        files = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
        if not files:
            raise DataError(f"data: no file is called {source}, looked for from {Path.cwd()}")
        return _joined(source, files)
    if path.suffix in READERS or looks_local(source):
        raise DataError(f"data: there is no file {source}, looked for from {Path.cwd()}")
    if "/" not in source and "." in source:
        return _object(source)
    return _hub(source, split)


def _object(path: str) -> Rows | Iterated:
    try:
        return open_rows(resolve(path))
    except (ImportError, AttributeError) as error:
        raise DataError(f"data: {path!r} is neither a file nor a Python object: {error}") from error


def _file(path: Path) -> Rows:
    if path.suffix not in READERS:
        raise DataError(f"data: {path} is none of {', '.join(READERS)}, which can be read")
    return READERS[path.suffix](path)


def _joined(name: str, files: list[Path]) -> Rows:
    return _file(files[0]) if len(files) == 1 else JoinedRows(name, [_file(file) for file in files])


def _directory(path: Path, split: str) -> Rows:
    """A data set that `save_to_disk` wrote, or files whose names begin with the split's, here or in data/."""
    if (path / "dataset_dict.json").exists() or (path / "dataset_info.json").exists():
        loaded = _datasets(str(path)).load_from_disk(str(path))
        if isinstance(loaded, Mapping):
            if split not in loaded:
                raise DataError(f"data: {path} has the splits {', '.join(sorted(loaded))}; {split!r} is none of them")
            loaded = loaded[split]
        return TableRows(str(path), loaded)
    there = sorted(file for place in (path, path / "data") for file in place.glob("*") if file.suffix in READERS)
    files = [file for file in there if file.stem == split or file.stem.startswith((f"{split}-", f"{split}_"))]
    if not files:
        names = ", ".join(file.name for file in there[:8]) or "nothing of the kind"
        raise DataError(
            f"data: {path} has no file {split}.jsonl, {split}-*.parquet or the like; there is {names}. Name the file, "
            "several by a pattern with *, or another split"
        )
    return _joined(str(path), files)


def _hub(source: str, split: str) -> Rows:
    """`owner/name`, or `owner/name:subset`."""
    name, _, subset = source.partition(":")
    library = _datasets(source)
    try:
        loaded = library.load_dataset(name, subset or None, split=split)
    except Exception as error:  # a wrong name, no network, an unknown split: many types, most of other libraries
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"data: there is no file {source}, and the hub does not give a data set of that name (split {split!r}): "
            f"{reason}"
        ) from error
    return TableRows(source, loaded)


def _datasets(source: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"data: {source} needs the library `datasets`: pip install rlinf[data]") from error
    fold_datasets()
    return datasets
