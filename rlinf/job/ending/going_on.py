"""How a run that ended early is gone on with: its newest checkpoint, and what to type.

In: the run's directory, and how it was started. Out: words for whoever ended it.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rlinf.config.loading import InputError
from rlinf.job.ending.starting import ToldToEnd
from rlinf.metrics.run_directory import RunDirectory, previous_with_checkpoints

if TYPE_CHECKING:
    from rlinf.config.common import CheckpointConfig


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


def going_on(directory: RunDirectory, checkpoint: CheckpointConfig) -> str:
    """The newest checkpoint and what goes on from it; where there is none, what would have written one.

    Args:
        directory: of the run.
        checkpoint: when it writes checkpoints.
    """
    if directory.latest.exists():
        newest = from_here(directory.latest.resolve())
        return f"the newest checkpoint is {newest}; to go on: {directory.resumed_by}"
    every, minutes = checkpoint.every, checkpoint.minutes
    by_step = f"after step {every} (checkpoint.every={every})" if every else ""
    by_time = f"after {minutes:g} minutes of steps (checkpoint.minutes={minutes:g})" if minutes else ""
    first = " or ".join(filter(None, (by_step, by_time))) or "after the last step"
    more = "" if every else "; checkpoint.every=N writes one after every N steps"
    return f"no checkpoint is there to go on from: the first comes {first}{more}"


def beginning_anew(path: Path) -> str:
    """What `--resume auto` says where it finds no checkpoint: that it starts at step 0, and where an earlier run is.

    Args:
        path: of the run directory.
    """
    told = f"--resume auto: no checkpoint in {from_here(path)}; beginning anew"
    if (previous := previous_with_checkpoints(path)) is None:
        return told
    where = from_here(previous)
    return f"{told}. A run with checkpoints is in {where}: --resume {shlex.quote(where)} goes on from it"


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
    from rlinf.runtime.system.ending import AT_ONCE, Stopped  # torch comes with it, which takes seconds

    try:
        yield
    except (InputError, ToldToEnd):
        raise  # nothing was run that a report could tell of
    except BaseException as error:
        if isinstance(error, Stopped):
            at_once = error.number in AT_ONCE and checkpoint.grace > 0 and not directory.latest.exists()
            hint = f". {error.name} saves nothing; SIGTERM (`kill`) writes a checkpoint first" if at_once else ""
            sys.stderr.write(f"rlinf: {going_on(directory, checkpoint)}{hint}\n")
        elif isinstance(error, SystemExit) and error.code != os.EX_TEMPFAIL:  # with that the run has spoken for itself
            how = going_on(directory, checkpoint)
            sys.stderr.write(f"rlinf: ended by sys.exit({error.code!r}) in code of the run; {how}\n")
        _report_what_is_there(directory)
        raise


@contextmanager
def keeping_earlier_run(directory: RunDirectory) -> Iterator[None]:
    """A start that fails before anything was measured leaves an earlier run of the name where it was.

    A start that a signal ended is taken up again with `--resume auto`, and so is one that torchrun restarts: they must
    not go on with the earlier run, which stays aside then.

    Args:
        directory: of the run.
    """
    try:
        yield
    except Exception:
        with suppress(OSError):  # it stays aside, then, and --resume auto says where
            if not _is_restarted() and directory.give_back():
                sys.stderr.write(
                    f"rlinf: nothing was measured; the earlier run is as it was, in {from_here(directory.path)}\n"
                )
        raise


def _is_restarted() -> bool:
    """Whether torchrun starts the job once more when it fails."""
    allowed, taken = (int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("MAX_RESTARTS", "RESTART_COUNT"))
    return taken < allowed


def _report_what_is_there(directory: RunDirectory) -> None:
    """Write the report of a run that has failed, if anything was measured; an error in it must not hide the run's."""
    from rlinf.metrics.html.report import write_report

    if directory.metrics.is_file() and directory.metrics.stat().st_size:
        try:
            write_report(directory.path)
        except Exception as error:
            sys.stderr.write(f"rlinf: {directory.report} cannot be written: {type(error).__name__}: {error}\n")
