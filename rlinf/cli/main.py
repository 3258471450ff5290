"""The command line of `launch.py`: starts a training run, or prints one message that says what is wrong.

`torchrun --nproc-per-node N launch.py --config FILE key=value` starts it in N processes, `python launch.py ...` in one.
Every process reads the configuration before torch is imported, so that help and mistakes are answered at once. Rank 0
speaks for all. Exit codes: 0 done, 1 a bug (with its traceback) or a run that cannot go on (without), 2 a mistake in
what was given (without), 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rlinf.cli.run_to_end import run_to_end
from rlinf.cli.validate import is_embodied, load_any
from rlinf.config.docs import as_text
from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.importing import look_in_working_directory
from rlinf.config.loading import InputError, RunFailure, dump
from rlinf.config.schema import leaves, nearest
from rlinf.config.text import RunConfig
from rlinf.metrics.run_directory import Checkpoint, RunDirectory, changes, find_checkpoint
from rlinf.runtime.base.errors import HostLost

if TYPE_CHECKING:
    from rlinf.placement.seats import Placed
    from rlinf.runtime.system.system import ActorSystem

Main = Callable[["ActorSystem", RunDirectory, Checkpoint | None], Awaitable[None]]
FAILED = 1
WRONG_INPUT = 2
INTERRUPTED = 130
_OPTIONS = ("--config", "--dry-run", "--help", "--resume")
_TURN_SECONDS = 10.0
"""How long a rank other than 0 leaves it to rank 0 to report a mistake in the input. Exiting at once would make
torchrun end rank 0 before it has printed; and it must end by itself if rank 0, on another machine, sees no mistake."""

_USAGE = """\
usage: torchrun --nproc-per-node N launch.py --config FILE [--resume HOW] [--dry-run] [key=value ...]
       python launch.py --config FILE [--resume HOW] [--dry-run] [key=value ...]

  --config FILE   what to run, as YAML; configs/quickstart.yaml is a commented start
  --resume HOW    auto: go on from the run's newest checkpoint, if there is one; PATH: from that run's or checkpoint's;
                  never: start anew, and move an earlier run of this name aside. Default: never, but auto when torchrun
                  restarts the job
  --dry-run       print the resolved configuration, where each role would run, and what fits; start nothing
  --help          this text
  key=value       set a key for this run, such as steps=20 or optimizer.lr=1e-4

Keys of the configuration, with type and default:
"""


@dataclass(frozen=True, slots=True)
class Request:
    """What a command line asks for."""

    config: str | None
    """Path of the YAML file."""
    overrides: tuple[str, ...]
    """The `key=value` arguments."""
    dry_run: bool
    """Print, start nothing."""
    help: bool
    """Print the keys, read nothing."""
    resume: str
    """`auto`, `never`, or a path."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line in this process, one of those that torchrun started or the only one; returns the exit code."""
    rank, hosts = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        return _serve(parse(sys.argv[1:] if arguments is None else arguments), rank, hosts)
    except (InputError, RunFailure) as error:
        return _report(error, rank)
    except HostLost:
        return _point_at_error(FAILED)  # it has been printed, before all that followed from it
    except KeyboardInterrupt:
        if rank == 0:
            print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED


def parse(arguments: Sequence[str]) -> Request:
    """Read a command line; options and overrides may come in any order.

    Raises:
        InputError: an unknown option, or one without its value.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--help", "-h", action="store_true")
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    parser.add_argument("--resume", default="auto" if restarted else "never")
    parser.add_argument("overrides", nargs="*")
    known, unknown = parser.parse_known_intermixed_args(list(arguments))
    for option in unknown:
        name = option.partition("=")[0]
        near, key = nearest(name, _OPTIONS), name.lstrip("-")
        is_key = any(leaf.key == key for leaf in leaves(RunConfig))
        hint = (
            f"did you mean {near}?" if near and not is_key else f"write {key}=VALUE to set a key of the configuration"
        )
        raise InputError(f"{option}: unknown option; {hint}")
    if known.config is None and not known.help:
        raise InputError("no configuration: add --config configs/quickstart.yaml, or --help to see what there is")
    return Request(known.config, tuple(known.overrides), known.dry_run, known.help, known.resume)


def _serve(request: Request, rank: int, hosts: int) -> int:
    if request.help:
        return _say(_USAGE + "\n" + as_text(EmbodiedConfig if is_embodied(request.config) else RunConfig), rank)
    look_in_working_directory()
    config = load_any(request.config, request.overrides, hosts)
    if request.dry_run:
        if rank == 0:
            from rlinf.cli.dry_run import describe  # torch comes with it: it looks at the model and the algorithm

            print(describe(config, hosts))
        return 0
    train(config, rank, request.resume)
    return 0


def train(config: RunConfig | EmbodiedConfig, rank: int = 0, resume: str = "never") -> None:
    """Run a checked configuration in this process, one of those that torchrun started or the only one.

    Args:
        config: what to run.
        rank: of this process.
        resume: `auto`, `never`, or the path of a run or checkpoint to go on from.

    Raises:
        InputError: what the configuration names is not there or does not fit; nothing was started.
        RunFailure: the run cannot go on, for a reason outside the code.
    """
    path = Path(config.output_dir).expanduser() / config.name
    _say(f"{config.name}: starting; results go to {path}", rank)
    from transformers.utils import logging as transformers_logging  # torch comes with it, which takes seconds

    transformers_logging.disable_progress_bar()  # of loading and saving; they would tear our lines apart
    if rank != 0:
        run_to_end(_serve_only, config.system)
        return
    hosts = int(os.environ.get("WORLD_SIZE", "1"))
    placed, main = _main_of(config, hosts)
    begun = _begun(resume, path.absolute())
    directory = _make_directory(path.absolute(), config, begun)
    memory = None if placed.memory is None else dict.fromkeys(range(hosts), placed.memory)
    run_to_end(lambda system: main(system, directory, begun), config.system, memory)


def _main_of(config: RunConfig | EmbodiedConfig, hosts: int) -> tuple[Placed, Main]:
    """Where roles run, and what rank 0 runs, with everything imported that the configuration names.

    Raises:
        ConfigError: some of it is not there, or does not fit.
    """
    from rlinf.job.prepare import prepare

    prepared = prepare(config, hosts)
    if isinstance(config, RunConfig):
        from rlinf.job.text import TextLoop

        return prepared.placed, lambda system, directory, begun: TextLoop(system, config, prepared, directory).run(
            begun
        )
    from rlinf.job.embodied import EmbodiedLoop

    return prepared.placed, lambda system, directory, begun: EmbodiedLoop(system, config, prepared, directory).run(
        begun
    )


async def _serve_only(system: ActorSystem) -> None:
    """What ranks other than 0 would run: nothing, they serve the actors that rank 0 starts there."""


def _begun(resume: str, path: Path) -> Checkpoint | None:
    """Where to go on from."""
    if resume == "never":
        return None
    wanted = path if resume == "auto" else Path(resume).expanduser().absolute()
    try:
        found = find_checkpoint(wanted)
    except ValueError as error:
        raise InputError(f"--resume {resume}: {error}") from None
    if found is None and resume != "auto":
        advice = "name a run's directory or one of its checkpoints" if wanted.exists() else "there is no such directory"
        raise InputError(f"--resume {resume}: no checkpoint there; {advice}")
    return found


def _make_directory(path: Path, config: RunConfig | EmbodiedConfig, begun: Checkpoint | None) -> RunDirectory:
    """The run's directory: a new one, or that of the run that is gone on with."""
    text = dump(config)
    try:
        again = begun is not None and begun.run == path.resolve()
        directory = RunDirectory.reopen(path, begun.step) if begun and again else RunDirectory.create(path)
        if begun is not None:
            directory.changed = changes(begun.run / directory.resolved.name, text)
        directory.write_text(directory.resolved, text)
    except OSError as error:
        raise InputError(f"output_dir: the run directory {path} cannot be made: {error.strerror or error}") from error
    return directory


def _report(error: InputError | RunFailure, rank: int) -> int:
    """Print what went wrong once: rank 0 does, the others wait to be ended and speak only if that does not happen."""
    if rank != 0:
        threading.Event().wait(_TURN_SECONDS)
    print(f"error: {error}" if rank == 0 else f"error on rank {rank}: {error}", file=sys.stderr, flush=True)
    return _point_at_error(WRONG_INPUT if isinstance(error, InputError) else FAILED)


def _point_at_error(code: int) -> int:
    """Let torchrun's own report, if there is one, say where to look; returns the exit code."""
    if (report_of_torchrun := os.environ.get("TORCHELASTIC_ERROR_FILE")) is not None:
        pointer = {"message": "see `error:` further up", "timestamp": int(time.time())}
        Path(report_of_torchrun).write_text(json.dumps(pointer), encoding="utf-8")
    return code


def _say(text: str, rank: int) -> int:
    if rank == 0:
        print(text)
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see --help")
