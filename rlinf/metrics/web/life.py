"""Whether a run lives: what its live.json says of the job, and whether that process is there.

In: a run directory. Out: the job that writes to it, if one does, and a word for pages.
"""

from __future__ import annotations

import os
import shlex
import socket
from dataclasses import dataclass
from pathlib import Path

from rlinf.config.reading import parse_json, read_bytes

LIVE = "live.json"
"""A job's word that it lives, in its run directory; removed at its end unless it is killed."""
FORWARDED = 8266
"""Port for a watcher on another machine, seen from here: not that of `rlinf watch`, which may be taken by this one."""
_LATE = 5.0
"""Seconds by which a file system's clock may differ from the kernel's: a process that began later than this after
live.json was written is not the one that wrote it."""


@dataclass(frozen=True, slots=True)
class Job:
    """Who writes to a run directory."""

    pid: int
    """Its process."""
    machine: str
    """Name of its machine."""
    socket: str
    """Path of its feed's Unix socket."""
    written: float
    """When live.json was, seconds since 1970."""

    @property
    def near(self) -> bool:
        """It runs on this machine."""
        return self.machine == socket.gethostname()

    @property
    def lives(self) -> bool:
        """Its process is there; of one on another machine this is believed."""
        if not self.near:
            return True
        began = _began(self.pid)
        return _exists(self.pid) if began is None else 0 < began < self.written + _LATE


def job_of(directory: Path) -> Job | None:
    """The job that says that it writes to a run directory; None if none does, or it cannot be understood."""
    path = directory / LIVE
    try:
        said, written = parse_json(read_bytes(path, links=False)), path.stat().st_mtime
        return Job(int(said["pid"]), str(said["machine"]), str(said["socket"]), written)
    except (OSError, ValueError, TypeError, LookupError):
        return None


def elsewhere(job: Job | None, directory: Path) -> dict[str, str] | None:
    """How to see a job live that is on another machine: `machine`, and the `command` for a reader's own; else None."""
    if job is None or job.near:
        return None
    there = shlex.quote(shlex.join(["rlinf", "watch", str(directory), "--port", str(FORWARDED)]))
    machine = shlex.quote(job.machine)
    return {
        "machine": job.machine,
        "command": f"ssh -t -L {FORWARDED}:127.0.0.1:{FORWARDED} -- {machine} {there}",
    }


def status(job: Job | None, step: int, steps: int | None) -> str:
    """How a run stands, in a word or four.

    Args:
        job: that writes to it; None if none does.
        step: the last that is over.
        steps: that there are to be; None if nobody said.
    """
    if job is None:
        return "finished" if step >= (1 if steps is None else steps) else "ended"
    if not job.near:
        return f"running on {job.machine}"
    return "running" if job.lives else "ended without saying so"


def _began(pid: int) -> float | None:
    """When a process began, seconds since 1970; 0 if it is dead; None where this cannot be told."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        booted = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
    except FileNotFoundError:
        return 0.0 if Path("/proc/self/stat").exists() else None
    except (OSError, StopIteration):
        return None
    return 0.0 if after_name[0] in "ZX" else int(booted.split()[1]) + int(after_name[19]) / os.sysconf("SC_CLK_TCK")


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
