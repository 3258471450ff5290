"""Rows of a data set that can be read in any order: one mapping per row, by number.

In: files and objects that are open already (`sources.py` opens them). Out: rows, and for each a name by which a person
finds it. Lines of jsonl stay in the file and tables stay in Arrow's memory; a row becomes Python objects when it is
read.
"""

from __future__ import annotations

import csv
import hashlib
import json
import mmap
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rlinf.config.reading import parse_json

Row = Mapping[str, Any]
"""One row: values by column."""

_SAMPLED = 64
"""Rows that a fingerprint looks at: a change of one row in a hundred is noticed with probability 1/2, and a data set
that was shuffled, filtered, extended or replaced with near certainty, in milliseconds whatever its size."""
_BATCH = 4096
"""Rows that are turned into Python objects at once while a table is checked."""
_ADDRESS = re.compile(r" ?<[^<>]* at 0x[0-9a-f]+>")
"""What Python prints of an object without a text of its own; nobody can read it."""
_LONGEST_FIELD = 2**31 - 1
"""Most characters in one field of a csv file; Python's own limit, 131,072, is less than many a document."""


class DataError(ValueError):
    """Something is wrong with the data that a user gave; the text names file, row and remedy."""


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
            said = _ADDRESS.sub("", " ".join(str(error).split()))
            raise DataError(f"{self.where(index)} cannot be read: {type(error).__name__}: {said}") from error

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
                    given = sum(value is not None for name, value in row.items() if name is not None)
                    given += len(row.get(None) or ())  # type: ignore[call-overload]
                    columns = len(reader.fieldnames or ())
                    raise DataError(
                        f"{path}, line {reader.line_num}: {given} values for {columns} columns; put quotes around "
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
        found = parse_json(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path} is no JSON: {error}; one object per line goes into a .jsonl file") from error
    rows = found.get("data") if isinstance(found, dict) else found
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
        raise DataError(f"{path} is no parquet file: {error}") from error
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
    """What JSON does not know, as text that is the same whenever the value is; of pictures, whose `repr` is where they
    lie in memory, their pixels."""
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
