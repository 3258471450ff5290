"""Opens a run from a program: settings and objects in memory become a checked configuration and a run directory.

In: what a program passed, sorted by `Objects`. Out: the configuration, with what it names imported, and the run's
directory, in which models and tokenizers that were objects are saved once, to be used by path. Nothing of an earlier
run is moved aside before everything was checked.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from rlinf.config.load import ConfigError, InputError, Problem
from rlinf.config.text import RunConfig
from rlinf.runs.dry_run.transformer import refuse_other_kind
from rlinf.runs.library.objects import Objects, configured
from rlinf.runs.prepare import InMemory, RunPlan
from rlinf.runs.resume import beginning_anew, keeping_earlier_run
from rlinf.runs.start import checkpoint_to_resume, leaving_gpus, open_run_directory, prepare
from rlinf.storage.directory import Checkpoint, Lock, RunDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Arguments of `train` and of `Session.local`, which says what they are."""

    model: Any = None
    rewards: Any = None
    data: Any = None
    algorithm: Any = "grpo"
    tokenizer: Any = None
    evaluation: Any = None
    run_dir: str | Path | None = None
    resume: str = "never"
    settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, **arguments: Any) -> Call:
        """Keyword arguments; those that are none of the fields are settings."""
        own = {each.name: arguments.pop(each.name) for each in fields(cls)[:-1] if each.name in arguments}
        return cls(**own, settings=arguments)


@dataclass(frozen=True, slots=True)
class Arguments:
    """Arguments of a program, sorted."""

    objects: Objects
    """Models, data and rewards, by name or as objects."""
    settings: Mapping[str, Any]
    """For `configured`; they win over those of `objects`."""
    run_dir: Path
    """The directory of the run, absolute."""
    resume: str
    """`auto`, `never`, or the path of a run or checkpoint to go on from."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A checked run that may begin."""

    config: RunConfig
    """The run's configuration."""
    plan: RunPlan
    """The code that it names, and where roles run."""
    directory: RunDirectory
    """The run's."""
    checkpoint: Checkpoint | None
    """Where to go on from."""
    memory: dict[int, int] | None
    """Bytes per device, if they are limited."""


def arguments_of(objects: Objects, settings: Mapping[str, Any], run_dir: Any, resume: Any) -> Arguments:
    """Take what a program passed, with its paths read.

    Args:
        objects, settings: see `Arguments`.
        run_dir: a path; None takes outputs/run.
        resume: see `Arguments`.

    Raises:
        ConfigError: one of the latter is no path.
    """
    run_dir = "outputs/run" if run_dir is None else run_dir
    paths = {"run_dir": (run_dir, "give a path"), "resume": (resume, "give 'auto', 'never', or the path of a run")}
    wrong = {name: each for name, each in paths.items() if not isinstance(each[0], str | os.PathLike)}
    if wrong:
        raise ConfigError([Problem(objects.who, name, *each) for name, each in wrong.items()])
    return Arguments(objects, settings, Path(run_dir).expanduser().absolute(), os.fspath(resume))


def opened(what: Arguments, hosts: int, lock: Lock | None, during: ExitStack | AsyncExitStack) -> Opened:
    """Check everything, then open the run's directory; blocking.

    Args:
        what: was passed.
        hosts: processes of the job.
        lock: this program's hold of the run directory.
        during: gets what holds as long as the run does: GPUs that are left alone, an earlier run that is moved back if
            this one fails before anything was measured.

    Raises:
        InputError: with every mistake; nothing was made.
    """
    objects, path = what.objects, what.run_dir
    try:
        checkpoint = checkpoint_to_resume(what.resume, path)
    except InputError as error:
        raise InputError(f"{objects.who}: {str(error).replace('--resume ', 'resume=')}") from None
    again = checkpoint is not None and checkpoint.run == path.resolve()
    aside = path.with_name(f".{path.name}.objects")
    saved = {name for name in objects.to_save if again and (path / name).is_dir()}
    try:
        objects.sketch(aside)
        settings = {**objects.settings, **objects.models_in(aside), **what.settings}
        config = configured(path, settings, objects.who)
        during.enter_context(leaving_gpus(config))
        _check(config, objects.passed, objects.who)
        refuse_other_kind(config.placement)
        plan = prepare(config, hosts, objects.passed)
        for name in ("path", "tokenizer"):
            place = getattr(config.model, name)
            setattr(config.model, name, place and place.replace(str(aside), str(path)))
        objects.save(aside, objects.to_save.keys() - saved)
        if checkpoint is None and what.resume == "auto":
            sys.stdout.write(f"{beginning_anew(path).replace('--resume ', 'resume=')}\n")
        directory = open_run_directory(path, config, checkpoint, lock, plan.notes)
        during.enter_context(keeping_earlier_run(directory))
        for name in objects.to_save.keys() - saved:
            (aside / name).replace(path / name)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    plan = replace(plan, model=plan.model.replace(str(aside), str(path)))
    return Opened(plan.config, plan, directory, checkpoint, plan.placed.memory_of(hosts))


def _check(config: RunConfig, passed: InMemory, who: str) -> None:
    """Check what validation cannot see, because objects stand in place of names."""
    own = passed.train is not None or config.data.train is not None
    problems = []
    if config.evaluation.every and own and passed.evaluation is None and config.evaluation.data is None:
        advice = "there is nothing to evaluate on: pass evaluation too"
        problems.append(Problem(who, "evaluation.every", config.evaluation.every, advice))
    if own and config.model.path is None and config.model.tokenizer is None:
        text = "a new model needs one: a directory, or {'characters': '0123456789'}"
        problems.append(Problem(who, "tokenizer", None, text))
    if problems:
        raise ConfigError(problems)
