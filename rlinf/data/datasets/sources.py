"""Where rows come from: files, directories, hub names, Python objects.

In: what a user wrote or passed. Out: `Rows` where any row can be read, or an `Iterated` where they only come one after
the other.
"""

from __future__ import annotations

import glob
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf.config.importing import looks_local, resolve
from rlinf.data.datasets.rows import (
    DataError,
    JoinedRows,
    JsonLines,
    ListRows,
    Row,
    Rows,
    TableRows,
    read_csv,
    read_json,
    read_parquet,
)
from rlinf.data.library_bars import fold_datasets

Source = str | Path | Iterable[Row] | AsyncIterable[Row] | Callable[[], Iterable[Row] | AsyncIterable[Row]]
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
"""What reads a file, by its suffix."""


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
    name = getattr(source, "__qualname__", type(source).__name__)
    if isinstance(source, AsyncIterable):
        again = _RememberedAsync(name, source) if hasattr(source, "__anext__") else source
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
        {name: None if gone[index] else values[index] for name, (values, gone) in columns.items()}
        for index in range(len(source))
    ]


class _Kept:
    """The first rows of an iterator, as many as are kept; None when there were more.

    Args:
        name: of the iterator, for errors.
    """

    def __init__(self, name: str):
        self._name = name
        self._rows: list[Row] | None = []

    def keep(self, row: Row) -> None:
        """Keep one more row, or none any longer."""
        if self._rows is not None:
            self._rows.append(row)
            if len(self._rows) > _REMEMBERED:
                self._rows = None

    def first(self) -> list[Row]:
        """The rows so far.

        Raises:
            DataError: they were too many.
        """
        if self._rows is None:
            raise DataError(
                f"{self._name} gave more than {_REMEMBERED:,} rows, which is what is kept of what can be read "
                "only once, so it cannot be begun again: give a list, or a function that makes the iterable anew for "
                "each pass"
            )
        return self._rows


class _Remembered:
    """An iterator that can be gone through again, from its first row, as far as its rows are kept.

    Args:
        name: for errors.
        rows: the iterator.
    """

    def __init__(self, name: str, rows: Iterable[Row]):
        self._kept = _Kept(name)
        self._rows = iter(rows)

    def __iter__(self) -> Iterator[Row]:
        yield from list(self._kept.first())
        for row in self._rows:
            self._kept.keep(row)
            yield row


class _RememberedAsync:
    """An async iterator that can be gone through again; see `_Remembered`."""

    def __init__(self, name: str, rows: AsyncIterable[Row]):
        self._kept = _Kept(name)
        self._rows = aiter(rows)

    async def __aiter__(self) -> AsyncIterator[Row]:
        for row in list(self._kept.first()):
            yield row
        async for row in self._rows:
            self._kept.keep(row)
            yield row


def _made(name: str, make: Callable[[], Any]) -> Rows | Iterated:
    """What a function returns: a list is as good as any; of an iterator, the function makes another for each pass."""
    first = make()
    if hasattr(first, "__next__") or hasattr(first, "__anext__"):
        waiting = [first]
        is_async = hasattr(first, "__anext__")
        return Iterated(name, lambda: waiting.pop() if waiting else make(), once=False, is_async=is_async)
    return open_rows(first)


def _named(source: str, split: str) -> Rows | Iterated:
    path = Path(source).expanduser()
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
