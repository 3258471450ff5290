"""Going on with a run: what to type, and what becomes of keys that were changed since the checkpoint.

In: a run's directory, and how it was started. Out: the command that goes on, also for a run that could not say it
itself; of each key that was changed since the checkpoint, whether it is applied, ignored or refused: a checkpoint
brings weights, the optimizer's state and the position in the data, and all else follows the configuration of the run
that goes on.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from rlinf.config.common import CheckpointConfig
from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.load import ConfigError, InputError, Problem
from rlinf.config.text import RunConfig
from rlinf.runs.starting import ToldToEnd
from rlinf.storage.directory import RunDirectory, previous_with_checkpoints
from rlinf.storage.files import Damaged, verify_part


def command(resolved: Path) -> str:
    """The command that goes on with a run from its newest checkpoint, in as many processes as this one is of.

    Args:
        resolved: the run's configuration in full.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    machines = f"--nnodes {world // local} " if world > local else ""
    start = "rlinf train" if world == 1 else f"torchrun {machines}--nproc-per-node {local} -m rlinf train"
    return f"{start} --config {shlex.quote(from_here(resolved))} --resume auto"


def resume_hint(directory: RunDirectory, checkpoint: CheckpointConfig) -> str:
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
    """A line for `--resume auto` where there is no checkpoint: it starts at step 0, and where an earlier run is.

    Args:
        path: of the run directory.
    """
    line = f"--resume auto: no checkpoint in {from_here(path)}; beginning anew"
    if (previous := previous_with_checkpoints(path)) is None:
        return line
    where = from_here(previous)
    return f"{line}. A run with checkpoints is in {where}: --resume {shlex.quote(where)} goes on from it"


def from_here(path: Path) -> str:
    """A path as one types it in the working directory."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


@contextmanager
def with_resume_hint(directory: RunDirectory, checkpoint: CheckpointConfig) -> Iterator[None]:
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
            sys.stderr.write(f"rlinf: {resume_hint(directory, checkpoint)}{hint}\n")
        elif isinstance(error, SystemExit) and error.code != os.EX_TEMPFAIL:  # with that the run has spoken for itself
            how = resume_hint(directory, checkpoint)
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
    """True if torchrun starts the job once more when it fails."""
    allowed, restarts = (int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("MAX_RESTARTS", "RESTART_COUNT"))
    return restarts < allowed


def _report_what_is_there(directory: RunDirectory) -> None:
    """Write the report of a run that has failed, if anything was measured; an error in it must not hide the run's."""
    from rlinf.dashboard.report import write_report

    if directory.metrics.is_file() and directory.metrics.stat().st_size:
        try:
            write_report(directory.path)
        except Exception as error:
            sys.stderr.write(f"rlinf: {directory.report} cannot be written: {type(error).__name__}: {error}\n")


Effect = Literal["applied", "ignored", "refused"]
WEIGHTS = "the weights are the checkpoint's"
ORDER = "the checkpoint's position in the data would mean other problems"
OVER = "the warm-up is over"


@dataclass(frozen=True, slots=True)
class Resumed:
    """The fate of a changed key."""

    effect: Effect
    """It is used from here on; the checkpoint's value stays; the run does not start."""
    why: str = ""
    """Unless it is applied."""


_COMMON = (
    *("name", "output_dir", "steps", "log_every", "trace", "tracing", "flow", "system", "callbacks", "keep_previous"),
    *("optimizer", "checkpoint", "metrics", "placement", "algorithm", "weights"),
)
TEXT: Mapping[str, Resumed] = {
    **dict.fromkeys(_COMMON, Resumed("applied")),
    **dict.fromkeys(
        (
            "agent",
            "staleness",
            "data",
            "reward",
            "reward_model",
            "rollout",
            "trainer",
            "evaluation",
            "critic",
            "supervised",
            "serve",
        ),
        Resumed("applied"),
    ),
    **dict.fromkeys(
        ("reference", "teacher", "teachers", "roles", "model.tokenizer", "model.lora.alpha"), Resumed("applied")
    ),
    "seed": Resumed("refused", ORDER),
    "data.shuffle": Resumed("refused", ORDER),
    "task": Resumed("refused", ORDER),
    "model.path": Resumed("ignored", WEIGHTS),
    "model.config": Resumed("refused", WEIGHTS),
    "model.freeze": Resumed("refused", "the optimizer's state is that of the weights that learned"),
    "model.lora.r": Resumed("refused", WEIGHTS),
    "model.lora.target_modules": Resumed("refused", WEIGHTS),
    "model.lora.path": Resumed("ignored", WEIGHTS),
    "model.lora.base": Resumed("refused", WEIGHTS),
    "agent.own_weights": Resumed("refused", WEIGHTS),
    "agent.past.size": Resumed("refused", WEIGHTS),
    "agent.past.every": Resumed("refused", "by it the checkpoint's earlier versions have their places"),
    "critic.model": Resumed("ignored", WEIGHTS),
    "reference.adapter": Resumed("ignored", WEIGHTS),
    "teacher.adapter": Resumed("ignored", WEIGHTS),
    "reference.model": Resumed("ignored", "the run's reference stays; start a new run for another"),
    "sft": Resumed("ignored", OVER),
}
"""Keys of runs on text. The longest one that a key is, or lies below, holds."""
EMBODIED: Mapping[str, Resumed] = {
    **dict.fromkeys(_COMMON, Resumed("applied")),
    **dict.fromkeys(("seed", "env", "policy.horizon", "off_policy", "dagger", "world", "trials"), Resumed("applied")),
    **dict.fromkeys(("policy.gradient_checkpointing", "policy.sharding", "policy.lora.alpha"), Resumed("applied")),
    "policy.dtype": Resumed("refused", "the checkpoint's parameters and their optimizer are grouped by it"),
    "policy.train": Resumed("refused", "the optimizer's state is of other parameters"),
    "policy.lora.r": Resumed("refused", WEIGHTS),
    "policy.lora.target_modules": Resumed("refused", WEIGHTS),
    "policy.lora.path": Resumed("ignored", WEIGHTS),
    "policy.lora.base": Resumed("refused", WEIGHTS),
    "policy.type": Resumed("refused", WEIGHTS),
    "policy.settings": Resumed("refused", WEIGHTS),
    "policy.path": Resumed("ignored", WEIGHTS),
    "off_policy.alpha": Resumed("ignored", "the temperature is the checkpoint's"),
    "imitation.statistics": Resumed("refused", WEIGHTS),
    "world.model": Resumed("refused", WEIGHTS),
    "world.settings": Resumed("refused", WEIGHTS),
    "world.demonstrations": Resumed("ignored", "the checkpoint has the transitions that were recorded"),
    "imitation": Resumed("applied"),  # by runs of imitation; a warm-up that is over is not done again
}
"""Keys of embodied runs, likewise."""


def on_resume(schema: type[RunConfig | EmbodiedConfig], key: str, *, kept_reference: bool = True) -> Resumed:
    """The fate of a key that was changed since the checkpoint was written.

    Args:
        schema: `RunConfig` or `EmbodiedConfig`.
        key: such as `optimizer.lr`, or `model.config.hidden_size`, which lies in a mapping.
        kept_reference: checkpoint or run hold the reference policy, as they do after a warm-up.
    """
    if key == "reference.model" and not kept_reference:
        return Resumed("applied")
    entry = entry_of(schema, key)
    return Resumed("applied") if entry is None else _table(schema)[entry]


def entry_of(schema: type[RunConfig | EmbodiedConfig], key: str) -> str | None:
    """The entry that holds for a key; None if there is none."""
    parts, table = key.split("."), _table(schema)
    above = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((name for name in above if name in table), None)


def _table(schema: type[RunConfig | EmbodiedConfig]) -> Mapping[str, Resumed]:
    return TEXT if schema is RunConfig else EMBODIED


def check_parts(config: Any) -> None:
    """See that what a configuration names of checkpoints with a manifest is whole.

    Raises:
        ConfigError: something is not; the text names the key and the file.
    """
    problems = []
    for key, path in _paths(config):
        try:
            verify_part(Path(path))
        except Damaged as damage:
            problems.append(Problem("configuration", key, path, str(damage)))
        except (OSError, ValueError, RuntimeError):
            pass  # no path at all: what reads it says so
    if problems:
        raise ConfigError(problems)


def _paths(tree: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Keys called `path` or `tokenizer` whose values are texts."""
    if is_dataclass(tree):
        children: Mapping[str, Any] = {field.name: getattr(tree, field.name) for field in fields(tree)}
    elif isinstance(tree, Mapping):
        children = tree
    else:
        return
    for name, value in children.items():
        if name in ("path", "tokenizer") and isinstance(value, str):
            yield f"{prefix}{name}", value
        else:
            yield from _paths(value, f"{prefix}{name}.")
