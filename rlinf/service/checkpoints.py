"""Checkpoints of a service's models on disk, by the paths that clients name: `tinker://RUN/weights/NAME`.

A run is a model that was made once, `SESSION:train:NUMBER`; `weights` go on with their optimizer, `sampler_weights`
answer, and `external_weights` can be downloaded. Each is a directory with adapters in peft's format, or all weights as
transformers has them, and `about.json`; it is there whole or not at all.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlinf.config.reading import parse_json, read_bytes
from rlinf.data.safetensors_io import sync_directory, write_text
from rlinf.runtime.base.errors import UserError

KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
"""Kinds of checkpoints by their part of a path, and what lists call them."""
OWNER = "local"
"""Name of the key of a service that has one key, and of whatever was made before it had several."""
_ABOUT = "about.json"
_RUN = re.compile(r"[0-9a-f]{8,64}:train:[0-9]{1,9}")
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


class Refused(UserError):
    """A request that is not served, and touched nothing.

    Args:
        message: a sentence for who sent it.
        status: of HTTP.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class CheckpointPath:
    """Name of a checkpoint."""

    run: str
    kind: str
    name: str

    @staticmethod
    def of(text: Any) -> CheckpointPath:
        """Read what a client wrote.

        Raises:
            Refused: it is no such path.
        """
        parts = str(text).removeprefix("tinker://").split("/") if str(text).startswith("tinker://") else ()
        if len(parts) != 3 or not _RUN.fullmatch(parts[0]) or parts[1] not in KINDS or not _NAME.fullmatch(parts[2]):
            raise Refused(
                f"{str(text)[:200]!r} is no path of a checkpoint: tinker://RUN/weights/NAME or …/sampler_weights/…"
            )
        return CheckpointPath(*parts)

    @staticmethod
    def named(run: str, kind: str, name: Any) -> CheckpointPath:
        """Name a checkpoint to be written.

        Raises:
            Refused: letters, digits, `.`, `_` and `-` alone make a name.
        """
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise Refused(f"path={str(name)[:200]!r} is no name: take up to 128 letters, digits, '.', '_' and '-'")
        return CheckpointPath(run, kind, name)

    def __str__(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"


class Store:
    """Directory of all checkpoints.

    Args:
        root: made if need be.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        for old in root.glob("*/*/.*.old"):  # a death came between the two renames of `_put`
            if not (target := old.with_name(old.name[1:-4])).exists():
                old.rename(target)

    def directory(self, path: CheckpointPath) -> Path:
        """Where a checkpoint is."""
        return self.root / path.run.replace(":", "-") / path.kind / path.name

    def about(self, path: CheckpointPath) -> dict[str, Any]:
        """Facts that were written beside a checkpoint.

        Raises:
            Refused: there is none, or it has expired.
        """
        about = self._read(self.directory(path))
        if about is None or about["path"] != str(path):
            raise Refused(f"there is no checkpoint {path}", 404)
        return about

    @staticmethod
    def _read(directory: Path) -> dict[str, Any] | None:
        try:
            about: dict[str, Any] = parse_json(read_bytes(directory / _ABOUT))
        except OSError:
            return None
        return None if (about["expires"] or float("inf")) < time.time() else about

    async def write(
        self, path: CheckpointPath, save: Callable[[Path], Awaitable[None]], about: Mapping[str, Any], *, over: bool
    ) -> None:
        """Write a checkpoint; on the disk when it returns.

        Args:
            path: its name.
            save: writes the weights into a directory.
            about: further values, JSON; `request`: the one that it is written for, which may come twice.
            over: in place of one of that name.

        Raises:
            Refused: there is one of that name.
        """
        target = self.directory(path)
        there = await asyncio.to_thread(self._read, target)
        if there is not None and there.get("request") == about["request"]:
            return
        if not over and there is not None:
            raise Refused(f"there is a checkpoint {path} already; take another name, or overwrite=True")
        partial = target.with_name(f".{path.name}.part")
        await asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True)
        await save(partial)
        facts = {**about, "path": str(path), "time": time.time()}
        await asyncio.to_thread(_put, partial, target, facts)

    def list(self, run: str | None, owner: str | None) -> list[dict[str, Any]]:
        """Checkpoints as clients read them, the newest first.

        Args:
            run: of this one alone.
            owner: of this key alone.
        """
        visible = (each for each in self._abouts(run) if owner in (None, each.get("owner", OWNER)))
        abouts = sorted(visible, key=lambda about: -about["time"])
        return [_listed(about) for about in abouts]

    def _abouts(self, run: str | None) -> Iterator[dict[str, Any]]:
        for file in self.root.glob(f"{'*' if run is None else run.replace(':', '-')}/*/*/{_ABOUT}"):
            if not file.parent.name.startswith(".") and (about := self._read(file.parent)) is not None:
                yield about

    def newest(self, run: str) -> dict[str, Any]:
        """Facts of the last checkpoint of a run.

        Raises:
            Refused: it has none.
        """
        about = max(self._abouts(run) if _RUN.fullmatch(run) else (), key=lambda about: about["time"], default=None)
        if about is None:
            raise Refused(f"there is no training run {run[:200]!r}", 404)
        return about

    def files(self, path: CheckpointPath) -> Sequence[str]:
        """Names of the files of a checkpoint that can be downloaded.

        Raises:
            Refused: there is none, or it is of another kind.
        """
        if path.kind != "external_weights":
            raise Refused(f"{path} is not for downloads; save_weights_external makes one that is")
        self.about(path)
        return sorted(file.name for file in self.directory(path).iterdir() if file.name != _ABOUT)

    async def expire(self, path: CheckpointPath, when: float | None) -> None:
        """Have a checkpoint expire at another time, or, for None, never.

        Raises:
            Refused: there is none.
        """
        about = {**self.about(path), "expires": when}
        await asyncio.to_thread(write_text, self.directory(path) / _ABOUT, json.dumps(about))

    async def copy(self, source: CheckpointPath, target: CheckpointPath, expires: float | None, owner: str) -> None:
        """Write a checkpoint once more, under another name and for the key that is named.

        Raises:
            Refused: there is no such checkpoint, or one of the new name.
        """
        about = self.about(source)

        async def save(directory: Path) -> None:
            await asyncio.to_thread(
                shutil.copytree, self.directory(source), directory, ignore=shutil.ignore_patterns(_ABOUT)
            )

        await self.write(target, save, {**about, "expires": expires, "owner": owner}, over=False)

    async def delete(self, path: CheckpointPath) -> None:
        """Delete a checkpoint.

        Raises:
            Refused: there is none.
        """
        self.about(path)
        target = self.directory(path)
        aside = target.with_name(f".{path.name}.gone")

        def remove() -> None:
            target.rename(aside)  # at once, so that nobody sees half of it
            shutil.rmtree(aside)
            sync_directory(target.parent)

        await asyncio.to_thread(remove)


def _put(partial: Path, target: Path, about: Mapping[str, Any]) -> None:
    """Have a directory stand at its place, whole."""
    size = sum(file.stat().st_size for file in partial.iterdir())
    write_text(partial / _ABOUT, json.dumps({**about, "size": size}))
    sync_directory(partial)
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    partial.rename(target)
    sync_directory(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def expiry(seconds: Any) -> float | None:
    """When a checkpoint expires, seconds since 1970.

    Raises:
        Refused: it is not between an hour and ten years.
    """
    if seconds is None:
        return None
    if not isinstance(seconds, int) or not 3600 <= seconds <= 10 * 366 * 24 * 3600:
        raise Refused(f"ttl_seconds={seconds!r} must be between an hour and ten years")
    return time.time() + seconds


def moment(seconds: float) -> str:
    """A time as clients read it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _listed(about: Mapping[str, Any]) -> dict[str, Any]:
    path = CheckpointPath.of(about["path"])
    return {
        "checkpoint_id": f"{path.kind}/{path.name}",
        "checkpoint_type": KINDS[path.kind],
        "time": moment(about["time"]),
        "tinker_path": str(path),
        "size_bytes": about["size"],
        "user_metadata": about["user_metadata"],
        "expires_at": about["expires"] and moment(about["expires"]),
    }
