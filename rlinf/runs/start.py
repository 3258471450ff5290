"""Starts a checked configuration in this process, which is one of torchrun's or the only one.

In: a configuration, and where to go on from. Out: the run's directory, and errors that are shown as they are: what is
not a bug ends the job with one message. The runtime finds lost and stuck processes. Imports torch only once something
is started, so that help and mistakes are answered at once.
"""

from __future__ import annotations

import errno
import gc
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlinf.config.common import SystemConfig
from rlinf.config.embodied import IMITATION, EmbodiedConfig
from rlinf.config.learning import SUPERVISED
from rlinf.config.load import ConfigError, InputError, Problem, RunFailure, dump
from rlinf.config.text import RunConfig
from rlinf.runs.resume import (
    beginning_anew,
    check_parts,
    command,
    entry_of,
    keeping_earlier_run,
    on_resume,
    with_resume_hint,
)
from rlinf.runs.starting import Starting
from rlinf.runtime.base.errors import StallError, TraceError, UserError
from rlinf.storage.directory import MISSING, Checkpoint, Held, Lock, RunDirectory, changes, find_checkpoint, held

if TYPE_CHECKING:
    from rlinf.runs.callbacks import RunState
    from rlinf.runs.loop import TrainingLoop, Workload
    from rlinf.runs.prepare import InMemory, RunPlan
    from rlinf.runtime.system.system import ActorSystem

T = TypeVar("T")
REFERENCE = "reference"
"""Directory of a run or a checkpoint that holds the reference policy, where that is not as it was loaded."""


@contextmanager
def leaving_gpus(config: RunConfig | EmbodiedConfig) -> Iterator[None]:
    """This process and its children see no GPU meanwhile, if the configuration wants that; before torch looks for any.

    Afterwards they see what they saw: whoever starts a run in a process of their own may go on to use its GPUs.
    """
    if not isinstance(config, RunConfig) or config.placement.device_kind != "cpu":
        yield
        return
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def train(
    config: RunConfig | EmbodiedConfig, rank: int = 0, resume: str = "never", starting: Starting | None = None
) -> None:
    """Run a checked configuration in this process, one of those that torchrun started or the only one.

    Args:
        config: what to run.
        rank: of this process.
        resume: `auto`, `never`, or the path of a run or checkpoint to go on from.
        starting: told when the run begins, which signals concern from then on.

    Raises:
        InputError: what the configuration names is not there or does not fit; nothing was started.
        RunFailure: the run cannot go on, for a reason outside the code.
        SystemExit: the process was told to end; with code 75 if the run is to be started again.
    """
    with leaving_gpus(config):
        _train(config, rank, resume, starting)


def _train(config: RunConfig | EmbodiedConfig, rank: int, resume: str, starting: Starting | None) -> None:
    import torch  # which takes seconds

    torch.manual_seed(config.seed)  # for code of the user's own: ours has generators of its own
    path = Path(config.output_dir).expanduser() / config.name
    hosts = int(os.environ.get("WORLD_SIZE", "1"))
    if rank != 0:
        first_here, here = os.environ.get("LOCAL_RANK") == "0", int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if first_here and 0 < torch.cuda.device_count() < here:  # while rank 0 takes all machines to be like its own
            prepare(config, hosts)
        run_to_end(_serve_only, config.system, grace=config.checkpoint.grace)
        if starting is not None:
            starting.begins()  # and it is over
        return
    from rlinf.runs.dry_run.transformer import refuse_other_kind  # torch comes with them, which takes seconds
    from rlinf.runs.prepare import refuse_idle

    plan = prepare(config, hosts)
    refuse_idle(config.placement, plan)
    if isinstance(config, RunConfig):
        refuse_other_kind(config.placement)
    else:
        from rlinf.runs.dry_run.embodied import without_path

        if (missing := without_path(config)) is not None:
            raise ConfigError([missing])
    with locked(path.absolute()) as lock:
        checkpoint = checkpoint_to_resume(resume, path.absolute())
        if checkpoint is None and resume == "auto":
            sys.stdout.write(f"{beginning_anew(path.absolute())}\n")
        directory = open_run_directory(path.absolute(), config, checkpoint, lock, plan.notes)
        directory.resumed_by = command(directory.resolved)

        async def program(system: ActorSystem) -> None:
            if starting is not None:
                starting.begins()
            await loop_of(system, plan.config or config, plan, directory).run(checkpoint)

        with keeping_earlier_run(directory), with_resume_hint(directory, config.checkpoint):
            run_to_end(
                program,
                config.system,
                plan.placed.memory_of(hosts),
                config.checkpoint.grace,
            )


def prepare(config: RunConfig | EmbodiedConfig, hosts: int = 1, objects: InMemory | None = None) -> RunPlan:
    """Import what a configuration names, and check what only that can show.

    Args:
        config: that is right by itself.
        hosts: number of processes of the job.
        objects: that stand in place of what the configuration would name, in runs on text.

    Raises:
        ConfigError: with every mistake.
        Exception: what the imported code itself raised, with its traceback.
    """
    check_parts(config)
    if isinstance(config, EmbodiedConfig):
        from rlinf.runs.embodied_roles import prepare_embodied

        return prepare_embodied(config, hosts)
    from rlinf.runs.prepare import InMemory, prepare_supervised, prepare_text

    if config.algorithm.name in SUPERVISED:
        return prepare_supervised(config, hosts, InMemory() if objects is None else objects)
    return prepare_text(config, hosts, InMemory() if objects is None else objects)


def check_output(config: RunConfig | EmbodiedConfig) -> None:
    """See that the run directory can be made, without making it.

    Raises:
        ConfigError: it cannot.
    """
    path = Path(config.output_dir).expanduser().absolute() / config.name
    try:
        there = next(each for each in (path, *path.parents) if os.path.lexists(each))
        longest = os.pathconf(there, "PC_NAME_MAX")
        if any(len(os.fsencode(part)) > longest for part in path.relative_to(there).parts):
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        os.rmdir(tempfile.mkdtemp(prefix=".rlinf-", dir=there))
    except OSError as error:
        advice = f"the run directory {path} cannot be made: {error.strerror or error}"
        raise ConfigError([Problem("configuration", "output_dir", config.output_dir, advice)]) from None


@contextmanager
def locked(path: Path, who: str = "output_dir") -> Iterator[Lock]:
    """Holds a run directory for this process, against all others of this machine and of those that share its disk.

    Args:
        path: absolute.
        who: what errors begin with.

    Raises:
        InputError: a live run has it, or it cannot be made.
    """
    try:
        with ExitStack() as stack:
            try:
                lock = stack.enter_context(held(path))
            except OSError as error:
                raise InputError(f"{who}: {path} cannot be made: {error.strerror or error}") from None
            yield lock
    except Held as error:
        raise InputError(
            f"{who}: {path} is the run directory of another session or run that is under way: {error}"
        ) from None


def loop_of(
    system: ActorSystem, config: RunConfig | EmbodiedConfig, plan: RunPlan, directory: RunDirectory
) -> TrainingLoop:
    """The training loop of a run, with the workload that its configuration describes: acting, given texts, or generated
    text.

    Args:
        system, config, plan, directory: see `TrainingLoop`.
    """
    from rlinf.runs.loop import TrainingLoop  # torch comes with it, which takes seconds

    workload: Callable[[RunState], Workload[Any]]
    if isinstance(config, EmbodiedConfig) and config.algorithm.name == IMITATION:
        from rlinf.runs.embodied import ImitationWorkload as workload
    elif isinstance(config, EmbodiedConfig):
        from rlinf.runs.embodied import EmbodiedWorkload as workload
    elif config.algorithm.name in SUPERVISED:
        from rlinf.runs.supervised import SupervisedWorkload as workload
    else:
        from rlinf.runs.text import TextWorkload as workload
    return TrainingLoop(system, config, plan, directory, workload)


async def _serve_only(system: ActorSystem) -> None:
    """Main function of ranks other than 0. It does nothing: they serve the actors that rank 0 starts there."""


def checkpoint_to_resume(resume: str, path: Path) -> Checkpoint | None:
    """Where to go on from."""
    if resume == "never":
        return None
    wanted = path if resume == "auto" else Path(resume).expanduser().absolute()
    try:
        checkpoint = find_checkpoint(wanted)
    except ValueError as error:
        advice = "; --resume never starts anew, and keeps what is there" if resume == "auto" else ""
        raise InputError(f"--resume {resume}: {error}{advice}") from None
    if checkpoint is None and resume != "auto":
        advice = "name a run's directory or one of its checkpoints" if wanted.exists() else "there is no such directory"
        raise InputError(f"--resume {resume}: no checkpoint there; {advice}")
    return checkpoint


def open_run_directory(
    path: Path,
    config: RunConfig | EmbodiedConfig,
    checkpoint: Checkpoint | None,
    lock: Lock | None = None,
    comments: Sequence[str] = (),
) -> RunDirectory:
    """The run's directory: a new one, or that of the run that is gone on with.

    Args:
        path: of it, absolute.
        config: the run's.
        checkpoint: where to go on from.
        lock: of the directory, which no checkpoint is written without; None where nobody else can come.
        comments: lines that stand as comments below the configuration there.

    Raises:
        InputError: it cannot be made, or a key was changed since the checkpoint that cannot be; nothing was touched.
    """
    text = dump(config)
    changed = [] if checkpoint is None else _changed(config, checkpoint, text)
    try:
        again = checkpoint is not None and checkpoint.run == path.resolve()
        directory = (
            RunDirectory.reopen(path, checkpoint.step)
            if checkpoint and again
            else RunDirectory.create(path, config.keep_previous)
        )
        directory.changed, directory.lock = changed, lock
        directory.write_text(directory.resolved, "\n".join([text, *(f"# {line}" for line in comments)]))
    except OSError as error:
        which = f" ({error.filename})" if error.filename not in (None, str(path)) else ""
        why = f"{error.strerror or error}{which}"
        raise InputError(f"output_dir: the run directory {path} cannot be made: {why}") from error
    return directory


def _changed(config: RunConfig | EmbodiedConfig, checkpoint: Checkpoint, text: str) -> list[str]:
    """List in lines the keys that were changed since a checkpoint, and whether each change is applied, ignored or
    refused.

    Raises:
        InputError: something that a checkpoint cannot be gone on from with.
    """
    lines, refused = [], []
    has_reference = any((place / REFERENCE).exists() for place in (checkpoint.path, checkpoint.run))
    try:
        found_changes = changes(checkpoint.run / "resolved.yaml", text)
    except ValueError as error:
        raise InputError(str(error)) from None
    for change in found_changes:
        fate, entry = (
            on_resume(type(config), change.key, kept_reference=has_reference),
            entry_of(type(config), change.key),
        )
        newly_known = change.was == MISSING and entry == change.key  # the checkpoint is of an earlier version of ours
        if fate.effect == "refused" and not newly_known:
            refused.append(f"{change}: {fate.why}")
        elif fate.effect == "applied" or newly_known:
            lines.append(f"{change} (applied from here on)")
        else:
            lines.append(f"{change} (ignored: {fate.why})")
    if refused:
        listed = "".join(f"\n  {each}" for each in refused)
        raise InputError(
            f"{checkpoint.path} cannot be gone on from with what was changed since then:{listed}\n"
            "Set it back, or start a new run (--resume never), from the checkpoint's hf/ if you like (model.path)"
        )
    return lines


def run_to_end(
    main: Callable[[ActorSystem], Awaitable[T]],
    limits: SystemConfig,
    memory: Mapping[int, int] | None = None,
    grace: float = 0.0,
) -> T | None:
    """Run a program on the processes that torchrun started, or in this one; its value, on rank 0.

    Args:
        main: what rank 0 runs.
        limits: how long to wait for hosts, and for something to move.
        memory: bytes per device; None lets any number of roles fit.
        grace: see `rlinf.run`.

    Raises:
        InputError: the job cannot run as it was started, for instance because its processes do not meet.
        RunFailure: nothing moved any more, or the trace could not be written.
        HostLost: a process died or fell silent, and that has been printed.
        Exception: whatever `main` raised.
    """
    from rlinf.runtime.system.torchrun import run  # torch comes with it, which takes seconds

    gc.enable()  # `rlinf train` turns it off while it imports
    with runtime_errors_explained():
        # Always traced: where a step's time went is told from it; the key `trace` only decides about the file.
        return run(
            main,
            hosts=1,
            trace=True,
            device_memory=memory,
            stall_after=limits.stall_after,
            host_timeout=limits.host_timeout,
            grace=grace,
        )


@contextmanager
def runtime_errors_explained() -> Iterator[None]:
    """Errors of the runtime that are no bugs become those that are shown without a traceback.

    Raises:
        InputError: the job cannot run as it was started.
        RunFailure: nothing moved any more, or the trace could not be written.
    """
    try:
        yield
    except UserError as error:
        raise InputError(str(error)) from error
    except (StallError, TraceError) as error:
        raise RunFailure(str(error)) from error
