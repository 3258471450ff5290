"""The manifest of a checkpoint: every file with its size and checksum, so that damage is found before anything is used.

In: a directory that is complete, or one that may be damaged. Out: `manifest.json`, with everything on the disk; or what
is wrong, in words. All of it blocks; files are read by a few threads at once, which leave the interpreter's lock to
others. Checksums are CRC-32, which any tool can compute again; they find damage, not forgery.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rlinf.config.reading import parse_json

MANIFEST = "manifest.json"
FORMAT = 1
"""Of the manifest; a reader refuses what is newer."""
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
        told = (directory / MANIFEST).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Damaged(f"{MANIFEST} cannot be read: {error.strerror or error}") from None
    step, files = _parsed(told)
    wanted = {name: said for name, said in files.items() if f"{name}/".startswith(f"{below}/" if below else "")}
    with ThreadPoolExecutor(READERS, "manifest") as threads:
        found = threads.map(lambda item: _difference(directory, *item), wanted.items())
        wrong = [each for each in found if each is not None]
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


def _parsed(told: bytes) -> tuple[int, dict[str, Any]]:
    """Step and files of a manifest.

    Raises:
        Damaged: it is none.
    """
    try:
        content: Any = parse_json(told)
        newer, step, files = content["format"] > FORMAT, int(content["step"]), dict(content["files"])
        known = all(
            _plain(name) and isinstance(said["bytes"], int) and isinstance(said["crc32"], str)
            for name, said in files.items()
        )
    except (ValueError, TypeError, LookupError):
        raise Damaged(f"{MANIFEST} is no manifest") from None
    if newer:
        raise Damaged(f"{MANIFEST} is of format {content['format']}, and this version reads up to {FORMAT}")
    if not known:
        raise Damaged(f"{MANIFEST} is no manifest")
    return step, files


def _plain(name: str) -> bool:
    """Whether a name leads to a file of the checkpoint, and to nowhere else."""
    return not name.startswith("/") and ".." not in name.split("/")


def _difference(directory: Path, name: str, said: Any) -> str | None:
    """How a file differs from what a manifest says of it; None if it does not."""
    path = directory / name
    try:
        if path.is_dir():
            return f"{name} is a directory"
        if (size := path.stat().st_size) != said["bytes"]:
            return f"{name} has {size:,} bytes instead of {said['bytes']:,}"
        _, crc = _sum(path)
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror or error}"
    return None if f"{crc:08x}" == said["crc32"] else f"{name} has another checksum"
