"""`rlinf train`, which launch.py is too: starts a training run, or prints one message that says what is wrong.

`torchrun --nproc-per-node N -m rlinf train --config FILE key=value` starts it in N processes, `rlinf train ...` in one.
Every process reads the configuration before torch is imported, so that help and mistakes are answered at once. Rank 0
speaks for all. Exit codes: 0 done, 1 a bug (with its traceback) or a run that cannot go on (without), 2 a mistake in
what was given (without), 130 interrupted, 141 when nobody reads the output.
"""

from __future__ import annotations

import argparse
import errno
import gc
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from rlinf.cli.key_docs import as_text
from rlinf.cli.own_code import told
from rlinf.cli.unread import quiet_when_unread
from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.importing import look_in_working_directory, shipped
from rlinf.config.loading import InputError, RunFailure
from rlinf.config.schema import leaves, nearest
from rlinf.config.text import RunConfig
from rlinf.job.ending.starting import Starting
from rlinf.job.start import leaving_gpus, train
from rlinf.job.validate import is_embodied, load_any
from rlinf.metrics.console.progress import shown
from rlinf.runtime.base.errors import HostLost

FAILED = 1
WRONG_INPUT = 2
INTERRUPTED = 130
FURTHER_UP = "see `error:` further up"
_OPTIONS = ("--config", "--dry-run", "--help", "--resume", "--verbose")
_TURN_SECONDS = 10.0
"""How long a rank other than 0 leaves it to rank 0 to report a mistake in the input. Exiting at once would make
torchrun end rank 0 before it has printed; and it must end by itself if rank 0, on another machine, sees no mistake."""

_USAGE = """\
usage: rlinf train --config FILE [--resume HOW] [--dry-run [--verbose]] [key=value ...]
       torchrun --nproc-per-node N -m rlinf train --config FILE [--resume HOW] [--dry-run [--verbose]] [key=value ...]

In a checkout, `python launch.py` is the same as `rlinf train`, and `launch.py` as `-m rlinf train`.

  --config FILE   what to run, as YAML; configs/quickstart.yaml is a commented start, which `quickstart` names anywhere
  --resume HOW    auto: go on from the run's newest checkpoint, if there is one; PATH: from that run's or checkpoint's;
                  never: start anew, and move an earlier run of this name aside. Default: never, but auto when torchrun
                  restarts the job
  --dry-run       print where each role would run, and what fits; try out the model, data and rewards that it names;
                  start nothing. With --verbose: every key of the resolved configuration, too
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
    verbose: bool
    """Print the resolved configuration, too."""
    help: bool
    """Print the keys, read nothing."""
    resume: str
    """`auto`, `never`, or a path."""


@quiet_when_unread
def main(arguments: Sequence[str] | None = None, starting: Starting | None = None) -> int:
    """Run a command line in this process, one of those that torchrun started or the only one; returns the exit code.

    Args:
        arguments: of the command line; default: those of the process.
        starting: answers signals already; default: from here on, and as before afterwards.
    """
    rank, hosts = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        with shown(), starting or Starting() as starting:
            return _serve(parse(sys.argv[1:] if arguments is None else arguments), rank, hosts, starting)
    except (InputError, RunFailure) as error:
        return _report(error, rank)
    except HostLost:
        return _have_torchrun_say(FURTHER_UP, FAILED)  # it has been printed, before all that followed from it
    except KeyboardInterrupt:
        if rank == 0:
            print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if _descriptors_used_up(error):
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            print(f"error: too many open files: this process may have {limit} (ulimit -n); allow more", file=sys.stderr)
        elif not told(error):
            raise
        return _have_torchrun_say(FURTHER_UP, FAILED)


def _descriptors_used_up(error: BaseException | None) -> bool:
    """Whether an error is, or comes from, a file that could not be opened because too many are open."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return True
        error = error.__cause__ or error.__context__
    return False


def parse(arguments: Sequence[str]) -> Request:
    """Read a command line; options and overrides may come in any order.

    Raises:
        InputError: an unknown option, or one without its value.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--verbose", action="store_true")
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
    if known.verbose and not known.dry_run:
        raise InputError("--verbose: goes with --dry-run; a run writes its configuration to resolved.yaml")
    config = None if known.config is None else shipped(known.config)
    return Request(config, tuple(known.overrides), known.dry_run, known.verbose, known.help, known.resume)


def _serve(request: Request, rank: int, hosts: int, starting: Starting) -> int:
    if request.help:
        return _say(_USAGE + "\n" + as_text(EmbodiedConfig if is_embodied(request.config) else RunConfig), rank)
    look_in_working_directory()
    config = load_any(request.config, request.overrides, hosts)
    if request.dry_run:
        if rank == 0:
            from rlinf.cli.dry_run import describe  # torch comes with it: it looks at the model and the algorithm

            with leaving_gpus(config):
                print(describe(config, hosts, whole=request.verbose))
        return 0
    _say(f"{config.name}: results go to {Path(config.output_dir).expanduser() / config.name}", rank)
    train(config, rank, request.resume, starting)
    return 0


def _report(error: InputError | RunFailure, rank: int) -> int:
    """Print what went wrong once: rank 0 does, the others wait to be ended and speak only if that does not happen."""
    if rank != 0:
        threading.Event().wait(_TURN_SECONDS)
    told = f"error: {error}" if rank == 0 else f"error on rank {rank}: {error}"
    print(told, file=sys.stderr, flush=True)
    return _have_torchrun_say(told, WRONG_INPUT if isinstance(error, InputError) else FAILED)


def _have_torchrun_say(told: str, code: int) -> int:
    """Let torchrun's own report, whose end is the last that is printed, end with this; returns the exit code.

    A rank that has failed makes torchrun fail with a traceback of its own, whatever the rank leaves behind.
    """
    if report_of_torchrun := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        gc.freeze()  # torchrun speaks when this process has ended, which looks for garbage for seconds otherwise
        message = {"message": told, "extraInfo": {"timestamp": int(time.time())}}
        Path(report_of_torchrun).write_text(json.dumps({"message": message}), encoding="utf-8")
    return code


def _say(text: str, rank: int) -> int:
    if rank == 0:
        print(text)
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see --help")
