"""How a run that ended early is gone on with: its newest checkpoint, and what to type.

In: the run's directory, and how it was started. Out: words for whoever ended it.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rlinf.config.loading import InputError
from rlinf.metrics.run_directory import RunDirectory

if TYPE_CHECKING:
    from rlinf.config.common import CheckpointConfig


class Starting:
    """The time before a run begins, entered around it: told to end in it, the process does, as nothing is to be saved.

    Once `begins` was called signals are the run's own, and when it is over they change nothing any more.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._told: int | None = None
        self._begun = False

    def __enter__(self) -> Self:
        with suppress(ValueError):  # not the main thread
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
                if (was := signal.getsignal(number)) == signal.SIG_DFL:
                    signal.signal(number, self._end)
                    self._before[number] = was
        return self

    def __exit__(self, *error: object) -> None:
        for number, was in self._before.items():
            signal.signal(number, was)
        if self._told is not None and not self._begun:
            raise SystemExit(os.EX_TEMPFAIL)  # whatever was made of the first one: a check may take it for a mistake

    def begins(self) -> None:
        """From here on the run does what signals want.

        Raises:
            SystemExit: one came that did not get through: what a signal raises inside a finalizer is dropped.
        """
        if self._told is not None:
            raise SystemExit(os.EX_TEMPFAIL)
        self._begun = True

    def _end(self, number: int, _: object) -> None:
        if not self._begun:
            if self._told is None and os.environ.get("RANK", "0") == "0":
                name = signal.Signals(number).name
                sys.stderr.write(f"told to end by {name} while starting: no step was begun; start it again as before\n")
            self._told = number
            raise SystemExit(os.EX_TEMPFAIL)


def command(resolved: Path) -> str:
    """What goes on with a run of `rlinf train` from its newest checkpoint, in as many processes as this one is of.

    Args:
        resolved: the run's configuration in full.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    machines = f"--nnodes {world // local} " if world > local else ""
    start = "rlinf train" if world == 1 else f"torchrun {machines}--nproc-per-node {local} -m rlinf train"
    return f"{start} --config {shlex.quote(from_here(resolved))} --resume auto"


def going_on(directory: RunDirectory, every: int) -> str:
    """The newest checkpoint and what goes on from it; where there is none, what would have written one.

    Args:
        directory: of the run.
        every: its `checkpoint.every`, in steps.
    """
    if directory.latest.exists():
        newest = from_here(directory.latest.resolve())
        return f"the newest checkpoint is {newest}; to go on: {directory.resumed_by}"
    if every:
        return f"no checkpoint is there to go on from: the first comes after step {every} (checkpoint.every={every})"
    return "no checkpoint is there to go on from: checkpoint.every=N writes one after every N steps"


def from_here(path: Path) -> str:
    """A path as one types it in the working directory."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


@contextmanager
def saying_how_to_go_on(directory: RunDirectory, checkpoint: CheckpointConfig) -> Iterator[None]:
    """A run that ends before it could speak for itself: its report is written; and if a signal ended it at once, stderr
    says how it is gone on with.

    Args:
        directory: of the run.
        checkpoint: when it writes checkpoints.
    """
    from rlinf.runtime.system.ending import Stopped  # torch comes with it, which takes seconds

    try:
        yield
    except InputError:
        raise  # nothing was run that a report could tell of
    except BaseException as error:
        if isinstance(error, Stopped):
            sys.stderr.write(f"rlinf: {going_on(directory, checkpoint.every)}\n")
        elif isinstance(error, SystemExit) and error.code != os.EX_TEMPFAIL:  # with that the run has spoken for itself
            how = going_on(directory, checkpoint.every)
            sys.stderr.write(f"rlinf: ended by sys.exit({error.code!r}) in code of the run; {how}\n")
        _report_what_is_there(directory)
        raise


def _report_what_is_there(directory: RunDirectory) -> None:
    """Write the report of a run that has failed, if anything was measured; an error in it must not hide the run's."""
    from rlinf.metrics.html.report import write_report

    if directory.metrics.is_file() and directory.metrics.stat().st_size:
        try:
            write_report(directory.path)
        except Exception as error:
            sys.stderr.write(f"rlinf: {directory.report} cannot be written: {type(error).__name__}: {error}\n")
