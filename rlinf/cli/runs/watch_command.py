"""The page of runs, live or over.

    rlinf watch DIR [DIR ...] [--port N] [--host ADDRESS] [--open]

In: directories of runs, or of directories of runs. Out: the address of a page, which stays until Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rlinf.config.loading import InputError

_BEHIND = 10
"""By how much a page that a job started stands behind the job's own processes, in the kernel's counting."""


def main(arguments: Sequence[str]) -> int:
    """Show runs until Ctrl-C; returns the exit code.

    Args:
        arguments: what follows `watch` on the command line.

    Raises:
        SystemExit: the arguments are none of the command's.
    """
    options = _parser().parse_args(arguments)
    try:
        _watch(options)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before it listens for it
        pass
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlinf watch",
        description="A page of runs, live or over. Ctrl-C ends it; the runs go on.",
    )
    parser.add_argument(
        "directories", nargs="+", metavar="DIR", help="of a run, or of directories of runs, such as outputs"
    )
    parser.add_argument("--port", type=int, metavar="N", help="default: 8265, or any if that is taken; 0: any")
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="to listen at; default: this machine alone"
    )
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    parser.add_argument("--until-ended", action="store_true", help=argparse.SUPPRESS)  # below a job: metrics.web
    return parser


def _watch(options: argparse.Namespace) -> None:
    if options.port is not None and not 0 <= options.port < 1 << 16:
        raise InputError(f"--port {options.port}: ports are numbers up to {(1 << 16) - 1}")
    named = [Path(each) for each in options.directories]
    for directory in named:
        _check(directory, begins=options.until_ended)
    from rlinf.metrics.web.serve import CannotListen, Where, serve

    if options.until_ended:
        os.nice(_BEHIND)
    where = Where(options.host, options.port, options.open, options.until_ended)
    try:
        asyncio.run(serve(named, where, lambda line: print(line, flush=True)))
    except CannotListen as error:
        raise InputError(str(error)) from None


def _check(directory: Path, begins: bool) -> None:
    """Is there anything to show?

    Args:
        directory: as it was named.
        begins: its run is about to begin.

    Raises:
        InputError: no.
    """
    from rlinf.metrics.web.discovery import runs_in

    if not directory.is_dir():
        raise InputError(f"{directory}: there is no such directory")
    if not begins and not runs_in([directory]):
        raise InputError(f"{directory} is no run's directory and has none in it: there is no metrics.jsonl")
