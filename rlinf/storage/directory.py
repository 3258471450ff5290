"""The lock of a run directory: one live run at a time goes by its name, on this machine and on others.

In: the path of a run directory. Out: it is held until the `with` block ends, or an error that says by whom it is held.
A thread gives a sign of life every `HEARTBEAT` seconds; it ends when the lock is given back.

The lock is a file beside the directory, `.<name>.lock`, since a new run moves the directory of an earlier one. It names
its owner. On one machine the kernel decides (`flock`): what a dead process held is free. An owner on another machine,
whose kernel cannot be asked, is believed to live until it has been silent for `SILENT_AFTER`.

The directory of one run: what lies where, and how it gets there whole.

    outputs/<name>/
      resolved.yaml  metrics.jsonl  samples.jsonl  explained.jsonl  alarms.jsonl  ledger.jsonl  trace.json
      report.html    live.json (while the run lives)
      checkpoints/step_000100/{state/, hf/, queue.json, manifest.json}   latest -> step_000100  best -> step_000040

Whatever is written in more than one piece is written aside and renamed, so a reader never meets half of it. A
checkpoint is on the disk, with a checksum of every file, before it has its name; it is compared with them before use.
An earlier run of the same name is moved out of the way, never overwritten; a resumed run goes on in its own directory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlinf.config.reading import parse_json, parse_yaml, read_bytes
from rlinf.storage.files import (
    ENVIRONMENT,
    MANIFEST,
    Damaged,
    JsonLines,
    read_lines,
    replace_text,
    sync,
    verify,
    write_manifest,
)

HEARTBEAT = 10.0
"""Seconds between two signs of life: rare beside any file system's work, and often enough for `SILENT_AFTER`."""
SILENT_AFTER = 6 * HEARTBEAT
"""Seconds of silence after which the owner on another machine counts as dead: as `system.host_timeout`'s default."""
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""Error numbers of file systems that know no `flock`."""
ATTEMPTS = 5
"""How often to begin anew when the file changes hands meanwhile; each time somebody else has got on."""


class Held(Exception):
    """Somebody else has the run directory; the text says who."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that holds a lock."""

    pid: int
    """Its process."""
    host: str
    """Its machine's name, for people."""
    kernel: str
    """Which start of which kernel it runs on."""
    space: str
    """Within which its number is its own: containers of one kernel have numbers of their own."""
    began: str
    """When the process began, as the kernel counts: numbers of processes come again."""
    since: str
    """When it took the lock, for people."""

    @staticmethod
    def here() -> Owner:
        """This process."""
        pid, now = os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S")
        return Owner(pid, socket.gethostname(), _kernel(), _space(), _began(pid), now)

    @property
    def near(self) -> bool:
        """It runs on this kernel, whose word on locks then counts."""
        return self.kernel == _kernel()

    @property
    def dead(self) -> bool:
        """It was a process of this machine, and has ended. False where this cannot be told."""
        if not self.near or self.space != _space():
            return False
        return _began(self.pid) != self.began if self.began else not _exists(self.pid)

    def __str__(self) -> str:
        """`pid 17 on node3, since 2026-11-23 10:00:00`."""
        return f"pid {self.pid} on {self.host}, since {self.since}"


class Lock:
    """The lock of a run directory, held by this process.

    Args:
        path: of the run directory.

    Raises:
        Held: somebody else has it.
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = lock_file(path)
        self.taken_from: Owner | None = None
        """A dead owner who had not given it back."""
        self._owner = Owner.here()
        for _ in range(ATTEMPTS):
            if (file := self._attempt()) is not None:
                self._file = file
                break
        else:
            raise Held(f"{self.path} changes hands all the time")
        self._over = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="run directory lock", daemon=True)
        self._beating.start()

    def lost(self) -> str | None:
        """Why this run must not write any more: somebody else has its lock. None while nobody has.

        A lock that was removed is taken once more.
        """
        if self._is_ours(self._file):
            return None
        try:
            while not self.path.exists():
                if (file := self._attempt()) is not None:
                    os.close(self._file)
                    self._file = file
                    return None
        except (Held, OSError) as error:
            return f"{self.path}, the lock of its run directory, was taken from it: {error}"
        return (
            f"{self.path}, the lock of its run directory, was taken from it by {_owner(self.path) or 'another process'}"
        )

    def give_back(self) -> None:
        """Let others have the directory."""
        self._over.set()
        self._beating.join()
        if self._is_ours(self._file):
            self.path.unlink(missing_ok=True)
        os.close(self._file)

    def _attempt(self) -> int | None:
        """The file, if it can be had; None if it changed hands meanwhile.

        Raises:
            Held: somebody else has it.
        """
        try:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            try:
                file = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            return self._take_over(file)
        return self._closed(file) if _flock(file) is False else self._signed(file)

    def _take_over(self, file: int) -> int | None:
        """A file that is there, if nobody has it any more.

        Raises:
            Held: somebody has.
        """
        free, owner, age = _flock(file), _owner(self.path), _age(self.path)
        if not self._is_ours(file):
            return self._closed(file)
        if owner is None:  # whoever made it is about to sign it, or died before he had
            alive = free is False or (free is None and age < HEARTBEAT)
        elif owner.dead:
            alive = False
        elif owner.near:
            alive = free is not True
        else:
            alive = free is False or age < SILENT_AFTER
        if alive:
            os.close(file)
            raise Held(_held_by(owner, self.path, age))
        self.taken_from = owner
        if free is False:  # by children that the dead one has left behind
            self.path.unlink(missing_ok=True)
            return self._closed(file)
        return self._signed(file)

    @staticmethod
    def _closed(file: int) -> None:
        os.close(file)

    def _signed(self, file: int) -> int:
        """The file, with this owner in it."""
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(asdict(self._owner)).encode(), 0)
        os.fsync(file)
        return file

    def _is_ours(self, file: int) -> bool:
        """True if the name still leads to an open file."""
        try:
            return os.path.samestat(os.fstat(file), os.stat(self.path))
        except OSError:
            return False

    def _beat(self) -> None:
        while not self._over.wait(HEARTBEAT):
            with contextlib.suppress(OSError):
                os.utime(self._file)


@contextlib.contextmanager
def held(path: Path) -> Iterator[Lock]:
    """`Lock`, given back however the block ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = Lock(path)
    try:
        yield lock
    finally:
        lock.give_back()


def lock_file(path: Path) -> Path:
    """Where the lock of a run directory lies."""
    return path.with_name(f".{path.name}.lock")


def _held_by(owner: Owner | None, path: Path, age: float) -> str:
    if owner is None:
        return f"a process that is just beginning ({path})"
    if owner.near:
        return f"{owner}; wait for its end, or end it (kill {owner.pid})"
    return (
        f"{owner}, last heard of {age:.0f} s ago. It counts as dead after {SILENT_AFTER:.0f} s of silence; if you know "
        f"that it is dead: rm {path}"
    )


def _flock(file: int) -> bool | None:
    """True if the kernel gives us the lock of a file; None where the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in NO_LOCKS:
            return None
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def _owner(path: Path) -> Owner | None:
    """Return the owner that has signed a lock; None if nobody has, or nobody can read it."""
    try:
        owner = parse_json(path.read_bytes())
        return Owner(int(owner.pop("pid")), **{str(name): str(value) for name, value in owner.items()})
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return None


def _age(path: Path) -> float:
    """Seconds since the last sign of life, by the clock of the file system, which may be another machine's."""
    probe = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        probe.touch()
        return probe.stat().st_mtime - path.stat().st_mtime
    except OSError:
        return 0.0
    finally:
        probe.unlink(missing_ok=True)


def _kernel() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _space() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _began(pid: int) -> str:
    """When a process began, in the kernel's ticks; "" if it is dead, or where this cannot be told."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if after_name[0] in "ZX" else after_name[19]


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


QUEUE = "queue.json"
"""The rest of a checkpoint beside model and optimizer: step, cursors, what was in the queues."""
_STEP = re.compile(r"step_(\d+)")


class RunDirectory:
    """Paths of one run, and the few ways in which something is written there."""

    def __init__(self, path: Path, moved: Path | None = None, removed: Sequence[Path] = ()) -> None:
        self.path = path
        self.moved = moved
        """Where an earlier run of the same name now lies, if there was one."""
        self.removed = removed
        """Earlier runs of the same name that are gone: this path itself, if the run there had come to nothing."""
        self.changed: list[str] = []
        """Keys whose values are others than in the run that is gone on with, and what becomes of them, in words."""
        self.lock: Lock | None = None
        """The run's hold of it; None where nobody else can come."""
        self.resumed_by = 'resume="auto"'
        """Words that go on from its newest checkpoint: for programs, this argument."""
        self.resolved = path / "resolved.yaml"
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples.jsonl"
        self.explained = path / "explained.jsonl"
        self.ledger = path / "ledger.jsonl"
        self.alarms = path / "alarms.jsonl"
        self.trace = path / "trace.json"
        self.report = path / "report.html"
        self.checkpoints = path / "checkpoints"

    @classmethod
    def create(cls, path: Path, previous: int = 0) -> RunDirectory:
        """Make a run directory; an earlier one with results in it is renamed to `<name>.previous-<n>`.

        Args:
            path: of it.
            previous: how many earlier runs of the name stay, 0 for all. The oldest are removed; and so is, unless all
                stay, one that had come to nothing: it failed or was stopped before its first step was over.

        Raises:
            OSError: it cannot be made.
        """
        moved, removed = None, []
        if path.exists() and _holds_results(path):
            if previous and _came_to_nothing(path):
                removed = [path]
            else:
                earlier = previous_runs(path)
                number = int(earlier[-1].name.rpartition("-")[2]) + 1 if earlier else 1
                moved = path.with_name(f"{path.name}.previous-{number}")
                path.rename(moved)
                runs = [run for run in (*earlier, moved) if (run / "resolved.yaml").exists()]  # not somebody's notes
                removed = runs[:-previous] if previous else []
            for run in removed:
                shutil.rmtree(run)
        directory = cls(path, moved, removed)
        directory.checkpoints.mkdir(parents=True, exist_ok=True)
        sync(path.parent)
        sync(path)
        return directory

    def give_back(self) -> bool:
        """Put the earlier run back that was moved out of the way, if nothing was written in its place.

        Returns:
            False if there is none, or something was.

        Raises:
            OSError: it cannot be moved.
        """
        if self.moved is None or not self.moved.is_dir() or _holds_results(self.path, PASSED):
            return False
        if self.path.exists():
            shutil.rmtree(self.path)
        self.moved.rename(self.path)
        self.moved = None
        sync(self.path.parent)
        return True

    @classmethod
    def reopen(cls, path: Path, step: int) -> RunDirectory:
        """Go on in an existing directory from a checkpoint of `step`.

        What was noted of later steps is dropped; later checkpoints are kept under the name `superseded_step_...`.

        Raises:
            OSError: it cannot be written to.
        """
        directory = cls(path)
        for lines in (directory.metrics, directory.samples, directory.explained, directory.ledger, directory.alarms):
            if lines.exists():
                directory.write_text(lines, "".join(_up_to(lines, step)))
        for partial in directory.checkpoints.glob(".*.partial"):
            if partial.is_dir():
                _remove(partial)  # a checkpoint's, or a link that was on its way to replace another
        for later in [entry for entry in _checkpoints_in(directory.checkpoints) if _step_of(entry) > step]:
            superseded = later.with_name(f"superseded_{later.name}")
            _remove(superseded)
            later.rename(superseded)
        if (current := directory.checkpoints / f"step_{step:06d}").exists():
            directory._point(directory.latest, current)
        if directory.best.is_symlink() and not directory.best.exists():
            directory.best.unlink()
        return directory

    def write_text(self, path: Path, text: str) -> None:
        """Replace a file in one step."""
        replace_text(path, text)
        sync(path.parent)

    def begin_checkpoint(self, step: int) -> Path:
        """An empty directory to fill, beside where the checkpoint of `step` will be."""
        aside = self._aside(step)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()  # not its parents: a run directory that is gone is not made anew, without metrics
        return aside

    def finish_checkpoint(self, step: int, keep: int = 0, best: int | None = None) -> Path:
        """Give the filled directory its name `step_<step>`, point `latest` to it, and remove older ones.

        Before it has the name, its manifest is written, and it and the run's lines of metrics are on the disk.

        Args:
            step: as given to `begin_checkpoint`.
            keep: how many checkpoints stay, the new one included; 0 for all.
            best: step of the one that stays besides, and that `best` is to point to; None for none.

        Returns:
            The checkpoint.
        """
        final = self.checkpoints / f"step_{step:06d}"
        write_manifest(self._aside(step), step)
        for lines in self.path.glob("*.jsonl"):
            sync(lines)
        _remove(final)
        self._aside(step).rename(final)
        self._point(self.latest, final)
        if best is not None:
            self.keep_best(best)
        if keep:
            for old in sorted(_checkpoints_in(self.checkpoints), key=_step_of)[:-keep]:
                if _step_of(old) != best:
                    _remove(old)
        sync(self.checkpoints)
        return final

    def keep_best(self, step: int) -> bool:
        """Point `best` to the checkpoint of a step; False if there is none."""
        checkpoint = self.checkpoints / f"step_{step:06d}"
        if there := checkpoint.exists():
            self._point(self.best, checkpoint)
        return there

    def damage(self, files: Iterable[JsonLines], *, saved: bool = False) -> str | None:
        """Return the damage done to the directory, as its name shows it; None if what was written is there.

        Args:
            files: open ones, to which lines are added.
            saved: a checkpoint was written.
        """
        expected = {self.path: "the directory of this run", self.checkpoints: "where its checkpoints are"}
        if saved:  # one that is being written may have made the directory anew, without those that were there
            expected[self.latest] = "its newest checkpoint"
        for path, what in expected.items():
            if not path.is_dir():
                return f"{path}, {what}, is gone: moved, removed or unmounted"
        return next(filter(None, (file.damage() for file in files)), None)

    def drop_checkpoint(self, step: int) -> None:
        """Remove what was begun for `step`."""
        shutil.rmtree(self._aside(step), ignore_errors=True)

    def withdraw(self, step: int) -> None:
        """Remove the checkpoint of a step, and point `latest` to the newest of the others."""
        _remove(self.checkpoints / f"step_{step:06d}")
        others = sorted(_checkpoints_in(self.checkpoints), key=_step_of)
        if others:
            self._point(self.latest, others[-1])
        else:
            _remove(self.latest)

    @property
    def latest(self) -> Path:
        """The link to the newest whole checkpoint."""
        return self.checkpoints / "latest"

    @property
    def best(self) -> Path:
        """The link to the checkpoint of the best evaluation."""
        return self.checkpoints / "best"

    def _aside(self, step: int) -> Path:
        return self.checkpoints / f".step_{step:06d}.partial"

    def _point(self, link: Path, checkpoint: Path) -> None:
        aside = link.with_name(f".{link.name}.partial")
        _remove(aside)
        os.symlink(checkpoint.name, aside)
        if not link.is_symlink():
            _remove(link)  # copied there by something that knows no links; a directory is not replaced
        aside.replace(link)
        sync(link.parent)


PASSED = ("model", "tokenizer")
"""Directories of a run in which it saves the model and the tokenizer that it was passed as objects."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint to go on from."""

    path: Path
    """Its directory."""
    queue: dict[str, object]
    """Contents of its queue.json."""
    passed_over: tuple[str, ...] = ()
    """Newer checkpoints that are damaged, and how, a line each."""

    @property
    def step(self) -> int:
        """Steps that were done."""
        return int(str(self.queue["step"]))

    @property
    def run(self) -> Path:
        """The directory of the run that made it."""
        return self.path.parent.parent


def find_checkpoint(path: Path) -> Checkpoint | None:
    """The newest whole checkpoint of a run directory, or the one that `path` is itself; None if there is none.

    All its files are read, and compared with its manifest.

    Raises:
        ValueError: there is one, but it cannot be gone on from, or, of a run, none can; the text says why.
    """
    try:
        if path.is_symlink() and not path.exists():
            raise ValueError(f"{path} leads to {os.readlink(path)}, which is not there")
        if not (path / "checkpoints").is_dir():
            itself = _STEP.fullmatch(path.resolve().name) or any((path / name).exists() for name in (QUEUE, MANIFEST))
            return _read(path.resolve()) if itself and path.exists() else None
        return _newest_whole(path / "checkpoints")
    except OSError as error:
        raise ValueError(f"{error.filename or path} cannot be read: {error.strerror or error}") from None


def _newest_whole(checkpoints: Path) -> Checkpoint | None:
    """The newest whole one of a directory of checkpoints; None if there is none at all.

    Raises:
        ValueError: all are damaged.
    """
    candidates = [entry for entry in checkpoints.iterdir() if _STEP.fullmatch(entry.name)]
    passed_over: list[str] = []
    for candidate in sorted(candidates, key=_step_of, reverse=True):
        try:
            return replace(_read(candidate.resolve()), passed_over=tuple(passed_over))
        except ValueError as error:
            passed_over.append(f"{candidate.name}: {str(error).removeprefix(f'{candidate.resolve()}: ')}")
    if passed_over:
        raise ValueError(f"no checkpoint in {checkpoints} is whole: " + "; ".join(passed_over))
    return None


@dataclass(frozen=True, slots=True)
class Change:
    """A key in which two configurations differ."""

    key: str
    """Dotted; of something in a mapping, its own."""
    was: Any
    """Its value in the saved configuration."""
    now: Any
    """In the other."""

    def __str__(self) -> str:
        """`optimizer.lr: 1e-06 -> 2e-06`."""
        return f"{self.key}: {self.was} -> {self.now}"


MISSING = "not there"
"""Value of a key that one of two configurations lacks."""


def changes(resolved: Path, text: str) -> list[Change]:
    """The keys in which a saved configuration and another one differ.

    Args:
        resolved: the saved one; where it is missing nothing is known to differ.
        text: the other, as YAML.

    Raises:
        ValueError: the saved one is no YAML.
    """
    if not resolved.exists():
        return []
    try:
        was, now = (dict(flat(parse_yaml(each) or {})) for each in (read_bytes(resolved).decode("utf-8"), text))
    except (ValueError, AttributeError):
        raise ValueError(f"{resolved} is damaged: remove it, and nothing is known to have changed") from None
    return [
        Change(key, was.get(key, MISSING), now.get(key, MISSING))
        for key in [*now, *(key for key in was if key not in now)]
        if was.get(key) != now.get(key)
    ]


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a tree by dotted key; an empty mapping is a value."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _read(path: Path) -> Checkpoint:
    """A checkpoint, once its files were found to be what was written.

    Raises:
        ValueError: they are not, or there is nothing to go on from; the text begins with the path.
    """
    try:
        queue = parse_json((path / QUEUE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: it has no {QUEUE}: there is nothing to go on from") from None
    except OSError as error:
        raise ValueError(f"{path}: {QUEUE} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {QUEUE} is not JSON: {error}") from None
    if not isinstance(queue, dict) or not isinstance(queue.get("step"), int):
        raise ValueError(f"{path}: {QUEUE} does not say after which step it was written")
    try:
        step = verify(path)
    except Damaged as damage:
        raise ValueError(f"{path}: {damage}") from None
    if queue.pop("manifest", None) is not None and step is None:
        raise ValueError(f"{path}: {MANIFEST} is missing")
    numbered = {_step_of(path), step, queue["step"]} - {None, -1}
    if len(numbered) > 1:
        raise ValueError(f"{path}: it is of step {queue['step']}, which is not what its name or {MANIFEST} says")
    return Checkpoint(path, queue)


def _checkpoints_in(directory: Path) -> Iterator[Path]:
    if directory.is_dir():
        yield from (entry for entry in directory.iterdir() if _STEP.fullmatch(entry.name) and entry.is_dir())


def _step_of(checkpoint: Path) -> int:
    match = _STEP.fullmatch(checkpoint.name)
    return int(match[1]) if match else -1


def _up_to(lines: Path, step: int) -> Iterator[str]:
    """The lines of a JSON-lines file that tell of steps up to `step`; what a crash cut short or damaged is dropped."""
    with lines.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError, AttributeError, TypeError):
                if parse_json(line).get("step", 0) <= step and line.endswith("\n"):
                    yield line


def _remove(path: Path) -> None:
    """Remove a directory, a file or a link, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def previous_runs(path: Path) -> list[Path]:
    """Earlier runs of a name, the oldest first."""
    name = re.compile(re.escape(path.name) + r"\.previous-(\d+)")
    matches = ((match, entry) for entry in path.parent.iterdir() if (match := name.fullmatch(entry.name)))
    return [entry for _, entry in sorted((int(match[1]), entry) for match, entry in matches)]


def previous_with_checkpoints(path: Path) -> Path | None:
    """The newest of the earlier runs of a name that has a checkpoint; None if none has."""
    if not path.parent.is_dir():
        return None
    saved = (run for run in reversed(previous_runs(path)) if any(_checkpoints_in(run / "checkpoints")))
    return next(saved, None)


def size_of(directory: Path) -> int:
    """Bytes of all files below a directory; links are not followed."""
    return sum(
        entry.stat(follow_symlinks=False).st_size
        for entry in directory.rglob("*")
        if entry.is_file() and not entry.is_symlink()
    )


def _came_to_nothing(path: Path) -> bool:
    """True if a run took no step, left no checkpoint, and did not come to its end, which writes a report."""
    directory = RunDirectory(path)
    if not directory.resolved.exists() or directory.report.exists() or any(_checkpoints_in(directory.checkpoints)):
        return False
    return all(row.get("step", 1) == 0 for row in read_lines(directory.metrics))


def _holds_results(path: Path, besides: Collection[str] = ()) -> bool:
    """True if more is there than what a run that failed at its start leaves: its configuration, and on what it ran.

    Args:
        path: of a run.
        besides: directories in it that count as nothing.
    """
    files = (file for file in path.rglob("*") if file.is_file() and file.name not in ("resolved.yaml", ENVIRONMENT))
    return any(file.stat().st_size > 0 for file in files if file.relative_to(path).parts[0] not in besides)
