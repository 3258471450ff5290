"""`rlinf train`, which launch.py is too: starts a training run, or prints one message that says what is wrong.

`torchrun --nproc-per-node N -m rlinf train --config FILE key=value` starts it in N processes, `rlinf train ...` in one.
Every process reads the configuration before torch is imported, so that help and mistakes are answered at once. Rank 0
speaks for all. Exit codes: 0 done, 1 a bug (with its traceback) or a run that cannot go on (without), 2 a mistake in
what was given (without), 130 interrupted, 141 when nobody reads the output, as in `rlinf train --help | head`.

A mistake in code of the user's own is printed on stderr from where that code begins, without the calls of ours that led
to it; of a mistake of ours nothing is left out.

`--dry-run` describes a run without starting it: where each role would run, whether it fits, and what the data are; on
request, the whole configuration as YAML that loads as the same, with the lines as comments below. Code that the
configuration names is imported; no process is started and no device is touched.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import gc
import json
import os
import resource
import select
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from rlinf.cli.keys import as_text
from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.importing import look_in_working_directory, shipped
from rlinf.config.load import InputError, RunFailure, dump
from rlinf.config.schema import leaves, nearest
from rlinf.config.text import RunConfig
from rlinf.metrics.progress import progress_bars
from rlinf.placement.plan import GB
from rlinf.placement.seats import INSIDE, TEXT, Placed
from rlinf.runs.rules import is_embodied, load_any
from rlinf.runs.start import check_output, leaving_gpus, train
from rlinf.runs.starting import Starting
from rlinf.runtime.base.errors import HostLost

if TYPE_CHECKING:
    from rlinf.runs.prepare import RunPlan

_OURS = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")})


def from_own_code(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that begins with the first code that rlinf called and that is neither ours nor a
    library's; None where there is no such code."""
    called = False
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file.startswith(_OURS):
            called = True
        elif called and Path(file).is_file() and not file.startswith(_LIBRARIES):
            return trace
        trace = trace.tb_next
    return None


def print_own_error(error: BaseException) -> bool:
    """Print an exception that went through code of the user's own, and say whether it did.

    Args:
        error: it, caught.
    """
    own_trace = from_own_code(error.__traceback__)
    if own_trace is None:
        return False
    left_out = len(traceback.extract_tb(error.__traceback__)) - len(traceback.extract_tb(own_trace))
    print(f"error: in code of your own; the {left_out} calls of rlinf that led there are left out", file=sys.stderr)
    traceback.print_exception(type(error), error, own_trace)
    return True


UNREAD = 141
"""128 + SIGPIPE: what a shell says of other programs that end so."""


def quiet_when_unread(main: Callable[..., int]) -> Callable[..., int]:
    """A main function that returns `UNREAD` once the pipe behind stdout is closed; any other is an error."""

    @functools.wraps(main)
    def wrapped(arguments: Sequence[str] | None = None, **more: Any) -> int:
        try:
            code = main(arguments, **more)
            sys.stdout.flush()  # here and not at the interpreter's end, where nobody could catch what it raises
            return code
        except BrokenPipeError:
            if not _is_unread():
                raise
            return UNREAD

    return wrapped


def _is_unread() -> bool:
    """True if the reader of stdout has left; if so, what is still to be written goes nowhere."""
    try:
        stdout = sys.stdout.fileno()
    except OSError:  # a stand-in for stdout, which is no file
        return False
    poll = select.poll()
    poll.register(stdout, 0)  # errors are reported unasked, and the end of a pipe's reader is one
    if not poll.poll(0):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stdout)
    os.close(nowhere)
    return True


_ON_CPU = "runs on the CPU, as placement.device_kind=cpu says; placement.device_kind=cuda would take GPUs"
_ALL_KEYS = "Configuration: --dry-run --verbose prints every key, as YAML that --config takes"


def describe(config: RunConfig | EmbodiedConfig, hosts: int, *, whole: bool = False) -> str:
    """Describe the run that a job of `hosts` processes would make of a configuration.

    Args:
        config: it, resolved.
        hosts: processes of the job.
        whole: whether the configuration comes first, as YAML in which the rest are comments.

    Raises:
        ConfigError: it could not run; the text says what does not fit, and what would.
    """
    from rlinf.runs.data import look_at_data  # torch comes with these, which takes seconds
    from rlinf.runs.dry_run.transformer import device_kind, elsewhere
    from rlinf.runs.prepare import refuse_idle
    from rlinf.runs.start import prepare

    if not (isinstance(config, RunConfig) and elsewhere(config.placement)):
        check_output(config)
    prepared = prepare(config, hosts)
    refuse_idle(config.placement, prepared)
    placed = prepared.placed
    memory: Mapping[str, tuple[int, int]] = prepared.held
    lacking: Iterator[str] = iter(())
    if isinstance(config, EmbodiedConfig):
        from rlinf.runs.dry_run.embodied import held_by

        memory, lacking = held_by(config, placed), _to_be_named(config)
    lines = [
        *_roles(config, placed),
        *(f"Left to the devices: {line}" for line in prepared.became),
        *(f"Warning: {line}" for line in prepared.warnings),
        *lacking,
        *_memory(placed, memory, cuda=isinstance(config, RunConfig) and device_kind(config.placement) == "cuda"),
        *_prediction(prepared, config),
    ]
    if isinstance(config, RunConfig):
        lines += [f"Data: {line}" for line in look_at_data(config, prepared)]
    if whole:
        return "\n".join([dump(config), *(f"# {line}" for line in lines)])
    return "\n".join([*lines, _ALL_KEYS])


def _to_be_named(config: EmbodiedConfig) -> Iterator[str]:
    """Yield warnings of things that a run needs, though the configuration can be checked without."""
    from rlinf.runs.dry_run.embodied import expected_horizon_warning, without_path

    if (missing := without_path(config)) is not None:
        yield f"Warning: a run is refused as it is: {missing.key}: {missing.advice}"
    if (cut := expected_horizon_warning(config)) is not None:
        yield f"Warning: {cut}"


def _roles(config: RunConfig | EmbodiedConfig, placed: Placed) -> Iterator[str]:
    if placed.devices == 1:
        named = _named_devices(config)
        yield "Roles: one process, which all roles share" + (
            f"; torchrun --nproc-per-node {named} would place them" if named > 1 else ""
        )
    else:
        shared = ", taking turns" if placed.turns else ""
        each = f"on {placed.gpus} GPU{'s' if placed.gpus > 1 else ''}" if placed.first else "a device each"
        yield f"Roles: {placed.devices} processes, {each}; {placed.plan.mode}{shared}"
    width = max(10, *map(len, placed.seats))
    for role, seat in placed.seats.items():
        where = ("device" if any(seat.devices) else "host") + ("s" if len(set(seat.hosts)) > 1 else "")
        yield f"  {role:<{width}} {where} {listed(seat.hosts)}"


def _memory(placed: Placed, footprints: Mapping[str, tuple[int, int]], *, cuda: bool) -> Iterator[str]:
    """Describe the memory that each role takes on a device by its model's shape; what cannot fit was refused before."""
    if not footprints:
        return
    limit = f"of {placed.memory / GB:.3g}" if placed.memory is not None else "no limit"
    parts = ", ".join(f"{role} {_gigabytes(active)}" for role, (active, _) in footprints.items() if active)
    turns = "; roles of a device take turns, and are parked where they do not fit" if placed.turns else ""
    bound = "at the peak" if cuda else "at least"
    yield f"Memory of a device, GB, {bound}: {parts} ({limit}{turns})"
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if placed.memory is None and (most := max(active for active, _ in footprints.values())) > machine:
        yield f"  which is more than the {machine / GB:.3g} GB of this machine: {most / GB:.3g} GB will not fit here"


def _prediction(prepared: RunPlan, config: RunConfig | EmbodiedConfig) -> Iterator[str]:
    choice, placed = prepared.chosen, prepared.placed
    if choice is None and isinstance(config, RunConfig) and prepared.algorithm is not None and placed.fleet.hardware:
        from rlinf.runs.dry_run.estimate import step_lines  # a model of the hardware

        again, roles = prepared.algorithm.needs_recomputed_logprobs, prepared.roles
        yield from step_lines(prepared.config, prepared.model_config, placed, prepared.flow, roles, recomputes=again)
        return
    if choice is None and isinstance(config, EmbodiedConfig):
        from rlinf.runs.dry_run.embodied import seconds_of

        if lines := [*seconds_of(config, placed)]:
            yield from lines
            return
    if choice is None:
        modelled_by_card = isinstance(config, RunConfig) and config.placement.device_kind == "cuda"
        card = "; placement.devices={gpu: h100} has it modelled" if modelled_by_card else ""
        yield f"Time: not known without a profile; every run leaves a profile.json, for placement.profile{card}"
        return
    from rlinf.runs.dry_run.estimate import plans

    predicted = placed.plan.predicted
    assert predicted is not None  # of every plan that was chosen
    yield (
        f"Time, simulated from the profile: {predicted.step_seconds:.3g} s a step, {predicted.efficiency:.0%} of what "
        f"is possible ({choice.bound.in_words()})"
    )
    yield from plans(choice)


def _gigabytes(size: int) -> str:
    return f"{float(f'{size / GB:.2g}'):,g}" if size >= GB / 1000 else "0.001"


def _named_devices(config: RunConfig | EmbodiedConfig) -> int:
    """How many devices the placement counts on, as far as plain numbers tell."""
    roles = [kind.name for kind in (*TEXT, *INSIDE)]
    values = (value for name, value in vars(config.placement).items() if name in roles)
    texts = [str(value) for value in values if isinstance(value, str | int)]
    numbers = [int(part) for text in texts for part in text.replace("-", ",").split(",") if part.isdigit()]
    return 1 + max(numbers, default=0)


def listed(numbers: tuple[int, ...]) -> str:
    """Numbers as people write them: `0-3, 6`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


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
    """Parsed command line of `rlinf train`."""

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

    def run() -> int:
        with starting or Starting() as answering:
            return _serve(parse(sys.argv[1:] if arguments is None else arguments), answering)

    return exit_code(run)


def exit_code(run: Callable[[], int | None]) -> int:
    """Run a command and give its exit code; what ends it is printed once, by one rank."""
    rank = int(os.environ.get("RANK", "0"))
    try:
        with progress_bars():
            return run() or 0
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
        elif not print_own_error(error):
            raise
        return _have_torchrun_say(FURTHER_UP, FAILED)


def _descriptors_used_up(error: BaseException | None) -> bool:
    """True if an error is, or comes from, a file that could not be opened because too many are open."""
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
    options, unknown = parser.parse_known_intermixed_args(list(arguments))
    for option in unknown:
        name = option.partition("=")[0]
        near, key = nearest(name, _OPTIONS), name.lstrip("-")
        is_key = any(leaf.key == key for leaf in leaves(RunConfig))
        hint = (
            f"did you mean {near}?" if near and not is_key else f"write {key}=VALUE to set a key of the configuration"
        )
        raise InputError(f"{option}: unknown option; {hint}")
    if options.config is None and not options.help:
        raise InputError("no configuration: add --config configs/quickstart.yaml, or --help to see what there is")
    if options.verbose and not options.dry_run:
        raise InputError("--verbose: goes with --dry-run; a run writes its configuration to resolved.yaml")
    config = None if options.config is None else shipped(options.config)
    return Request(config, tuple(options.overrides), options.dry_run, options.verbose, options.help, options.resume)


def _serve(request: Request, starting: Starting) -> int:
    rank, hosts = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if request.help:
        return _say(_USAGE + "\n" + as_text(EmbodiedConfig if is_embodied(request.config) else RunConfig), rank)
    look_in_working_directory()
    config = load_any(request.config, request.overrides, hosts)
    if request.dry_run:
        if rank == 0:
            with leaving_gpus(config):
                print(describe(config, hosts, whole=request.verbose))
        return 0
    _say(f"{config.name}: results go to {Path(config.output_dir).expanduser() / config.name}", rank)
    if isinstance(config, RunConfig) and config.placement.device_kind == "cpu":
        _say(f"{config.name}: {_ON_CPU}", rank)
    train(config, rank, request.resume, starting)
    return 0


def _report(error: InputError | RunFailure, rank: int) -> int:
    """Print what went wrong once: rank 0 does, the others wait to be ended and speak only if that does not happen."""
    if rank != 0:
        threading.Event().wait(_TURN_SECONDS)
    line = f"error: {error}" if rank == 0 else f"error on rank {rank}: {error}"
    print(line, file=sys.stderr, flush=True)
    return _have_torchrun_say(line, WRONG_INPUT if isinstance(error, InputError) else FAILED)


def output_file(path: str) -> Path:
    """The file of `--output`.

    Raises:
        InputError: its directory is not there.
    """
    target = Path(path)
    if not target.absolute().parent.is_dir():
        raise InputError(f"--output {target}: there is no directory {target.absolute().parent}")
    return target


@contextlib.contextmanager
def as_input(*kinds: type[Exception]) -> Iterator[None]:
    """Take errors of these kinds for mistakes in what was given."""
    try:
        yield
    except kinds as error:
        raise InputError(str(error)) from error


def _have_torchrun_say(text: str, code: int) -> int:
    """Let torchrun's own report, whose end is the last that is printed, end with this; returns the exit code.

    A rank that has failed makes torchrun fail with a traceback of its own, whatever the rank leaves behind.
    """
    if report_of_torchrun := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        gc.freeze()  # torchrun speaks when this process has ended, which looks for garbage for seconds otherwise
        message = {"message": text, "extraInfo": {"timestamp": int(time.time())}}
        Path(report_of_torchrun).write_text(json.dumps({"message": message}), encoding="utf-8")
    return code


def _say(text: str, rank: int) -> int:
    if rank == 0:
        print(text)
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see --help")
