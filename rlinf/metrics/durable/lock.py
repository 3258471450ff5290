"""The lock of a run directory: one live run at a time goes by its name, on this machine and on others.

In: the path of a run directory. Out: it is held until the `with` block ends, or an error that says by whom it is held.
Who wakes whom: nobody. A thread gives a sign of life every `HEARTBEAT` seconds; it ends when the lock is given back.

The lock is a file beside the directory, `.<name>.lock`, since a new run moves the directory of an earlier one. It names
its owner. On one machine the kernel decides (`flock`): what a dead process held is free. An owner on another machine,
whose kernel cannot be asked, is believed to live until it has been silent for `SILENT_AFTER`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rlinf.config.reading import parse_json

HEARTBEAT = 10.0
"""Seconds between two signs of life: rare beside any file system's work, and often enough for `SILENT_AFTER`."""
SILENT_AFTER = 6 * HEARTBEAT
"""Seconds of silence after which the owner on another machine counts as dead: as `system.host_timeout`'s default."""
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""What file systems say that know no `flock`."""
ATTEMPTS = 5
"""How often to begin anew when the file changes hands meanwhile; each time somebody else has got on."""


class Held(Exception):
    """Somebody else has the run directory; the text says who."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Who holds a lock."""

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
            held = free is False or (free is None and age < HEARTBEAT)
        elif owner.dead:
            held = False
        elif owner.near:
            held = free is not True
        else:
            held = free is False or age < SILENT_AFTER
        if held:
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
        """Whether the name still leads to an open file."""
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
    """Whether the kernel gives us the lock of a file; None where the file system has no locks."""
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
    """Who has signed a lock; None if nobody has, or nobody can read it."""
    try:
        said = parse_json(path.read_bytes())
        return Owner(int(said.pop("pid")), **{str(name): str(value) for name, value in said.items()})
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
