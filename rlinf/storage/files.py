"""Files of a run: JSON lines for programs, and the manifest of a checkpoint.

metrics.jsonl, samples.jsonl and ledger.jsonl: what a run leaves for programs, one JSON object per line.

In: a step's metrics, or some of its samples. Out: lines on disk before the next step starts: a crash loses none.

The manifest of a checkpoint: every file with its size and checksum, so that damage is found before anything is used.

All of it blocks; files are read by a few threads at once, which leave the interpreter's lock to others. Checksums are
CRC-32, which any tool can compute again; they find damage, not forgery.
"""

from __future__ import annotations

import io
import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rlinf.config.reading import open_regular, parse_json

MANIFEST = "manifest.json"
FORMAT = 1
"""Version of the manifest's format; a reader refuses what is newer."""
READERS = 4
"""Files that are read at once: a CRC-32 takes 2-3 GB/s of one core, and disks give a few GB/s."""
CHUNK = 4 << 20
"""Bytes that are read at once: small enough for a processor's cache, large enough that calls do not count."""


class Damaged(ValueError):
    """A checkpoint is not what was written, or cannot be read; the text says which file."""


def write_manifest(directory: Path, step: int) -> None:
    """Have every file and directory of a complete checkpoint on the disk, and note what each file holds.

    Args:
        directory: nobody changes it any more.
        step: after which the checkpoint was made.

    Raises:
        OSError: something cannot be read or written.
    """
    names = sorted(_files(directory))
    with ThreadPoolExecutor(READERS, "manifest") as threads:
        sums = list(threads.map(lambda name: _sum(directory / name, sync=True), names))
    files = {name: {"bytes": size, "crc32": f"{crc:08x}"} for name, (size, crc) in zip(names, sums, strict=True)}
    with (directory / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump({"format": FORMAT, "step": step, "files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    for folder, _, _ in os.walk(directory):
        sync(Path(folder))


def verify(directory: Path, below: str = "") -> int | None:
    """See that a checkpoint's files hold what was written; returns its step, or None if it has no manifest.

    Args:
        directory: the checkpoint.
        below: look at this file alone, or at the files of this sub-directory, such as `hf`.

    Raises:
        Damaged: they do not.
    """
    try:
        content = (directory / MANIFEST).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Damaged(f"{MANIFEST} cannot be read: {error.strerror or error}") from None
    step, files = _parsed(content)
    wanted = {name: entry for name, entry in files.items() if f"{name}/".startswith(f"{below}/" if below else "")}
    with ThreadPoolExecutor(READERS, "manifest") as threads:
        differences = threads.map(lambda item: _difference(directory, *item), wanted.items())
        wrong = [each for each in differences if each is not None]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise Damaged("; ".join(wrong[:3]) + more)
    return step


def verify_part(path: Path) -> None:
    """See that a part of a checkpoint, such as `step_000100/hf`, holds what was written; nothing else is looked at.

    Args:
        path: of the part. Where no checkpoint with a manifest is above it, nothing is known and nothing happens.

    Raises:
        Damaged: it does not hold that; the text names the checkpoint.
    """
    path = path.expanduser().resolve()
    for directory in path.parents[:2]:
        if (directory / MANIFEST).is_file():
            try:
                verify(directory, path.relative_to(directory).as_posix())
            except Damaged as damage:
                raise Damaged(f"{directory} is damaged: {damage}; take an earlier checkpoint") from None
            return


def sync(path: Path) -> None:
    """Wait until the disk has a file, or the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _files(directory: Path) -> Iterator[str]:
    """All files of a directory and those below, by their paths from there; the manifest itself is none of them."""
    for folder, _, names in os.walk(directory):
        for name in names:
            path = Path(folder, name)
            if path.is_file() and path != directory / MANIFEST:
                yield path.relative_to(directory).as_posix()


def _sum(path: Path, *, sync: bool = False) -> tuple[int, int]:
    """Bytes and CRC-32 of a file.

    Args:
        sync: wait until the disk has it.
    """
    size = crc = 0
    chunk = memoryview(bytearray(CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(chunk):
            size, crc = size + count, zlib.crc32(chunk[:count], crc)
        if sync:
            os.fsync(file.fileno())
    return size, crc


def _parsed(manifest: bytes) -> tuple[int, dict[str, Any]]:
    """Step and files of a manifest.

    Raises:
        Damaged: it is none.
    """
    try:
        content: Any = parse_json(manifest)
        newer, step, files = content["format"] > FORMAT, int(content["step"]), dict(content["files"])
        valid = all(
            _manifest_plain(name) and isinstance(entry["bytes"], int) and isinstance(entry["crc32"], str)
            for name, entry in files.items()
        )
    except (ValueError, TypeError, LookupError):
        raise Damaged(f"{MANIFEST} is no manifest") from None
    if newer:
        raise Damaged(f"{MANIFEST} is of format {content['format']}, and this version reads up to {FORMAT}")
    if not valid:
        raise Damaged(f"{MANIFEST} is no manifest")
    return step, files


def _manifest_plain(name: str) -> bool:
    """True if a name leads to a file of the checkpoint, and to nowhere else."""
    return not name.startswith("/") and ".." not in name.split("/")


def _difference(directory: Path, name: str, entry: Any) -> str | None:
    """How a file differs from what a manifest says of it; None if it does not."""
    path = directory / name
    try:
        if path.is_dir():
            return f"{name} is a directory"
        if (size := path.stat().st_size) != entry["bytes"]:
            return f"{name} has {size:,} bytes instead of {entry['bytes']:,}"
        _, crc = _sum(path)
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror or error}"
    return None if f"{crc:08x}" == entry["crc32"] else f"{name} has another checksum"


METRICS, SAMPLES, ENVIRONMENT, EXPLAINED = "metrics.jsonl", "samples.jsonl", "environment.json", "explained.jsonl"
ALARMS = "alarms.jsonl"
"""File names in a run directory."""


def replace_text(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Replace a file in one step, so that a reader never meets half of it.

    It is written aside first, in a file that is new: a link that stands there, in a directory of somebody else, leads
    nowhere else.

    Args:
        path: of the file.
        text: its content.
        mode: its permissions, less the umask.
    """
    aside = path.with_name(f".{path.name}.partial")
    aside.unlink(missing_ok=True)
    handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with open(handle, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(handle)
    aside.replace(path)


class JsonLines:
    """A file to which lines are added; each is flushed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab")
        self._size = os.fstat(self._file.fileno()).st_size

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write one line per row; NaN and infinity become null, because JSON has no word for them."""
        text = "".join(f"{json.dumps(_plain(row), ensure_ascii=False)}\n" for row in rows)
        lines = text.encode(errors="backslashreplace")  # half a surrogate pair, as JSON writes it
        self._file.write(lines)
        self._file.flush()
        self._size += len(lines)

    def damage(self) -> str | None:
        """Return the damage done to the file, as its name shows it; None if all lines are there.

        The file that is open goes on without its name, and takes lines that nobody will ever read.
        """
        try:
            size = os.stat(self._path).st_size
        except FileNotFoundError:
            return f"{self._path} is gone: it was moved or removed"
        return None if size >= self._size else f"{self._path} was cut short or replaced"

    def sync(self) -> None:
        """Have the lines on disk: they outlive the machine's end."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Nothing more will come."""
        self._file.close()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class MetricsFile(JsonLines):
    """metrics.jsonl: one line per step."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the line of a step."""
        self.add([{"step": step, **metrics}])


class SamplesFile(JsonLines):
    """samples.jsonl: a few lines per step, each one sampled answer.

    A line holds `step` and what the trainer tells of a sample: `prompt`, `response`, `answer`, `reward`, `outcome`,
    `advantage`, `length` (tokens), `versions` (of the weights that made it) and `group` (answers to its prompt,
    of which some may have no line).
    """

    def write(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add the lines of a step."""
        self.add({"step": step, **row} for row in rows)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines; a line cut short by a crash, and whatever is no object, is left out."""
    if not path.exists():
        return
    with io.TextIOWrapper(open_regular(path), encoding="utf-8", errors="replace") as file:
        for line in file:
            if (row := _row(line)) is not None:
                yield row


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _plain(value: Any) -> Any:
    """A value as JSON knows it: numbers that are not finite become null, arrays lists, all else text."""
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    if hasattr(value, "tolist"):  # numpy and torch, which this module need not import
        return _plain(value.tolist())
    return str(value)
