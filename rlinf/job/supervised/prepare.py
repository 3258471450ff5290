"""What only importing can show to be wrong with a run on given texts; the counterpart of `job.prepare`.

In: a configuration that is right by itself, with `algorithm: sft`, `dpo` or `reward_model`. Out: its flow and where its
roles run, or everything that is wrong with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from rlinf.config.importing import resolve
from rlinf.config.loading import ConfigError, Problem
from rlinf.config.supervised import DPO, REWARD_MODEL, SFT
from rlinf.config.text import RunConfig
from rlinf.job.callbacks import Callbacks
from rlinf.job.prepare import InMemory, Prepared, _fitted, _flow_problems, _planned, _tracker_problems
from rlinf.placement.seats import TEXT
from rlinf.training.supervised.objectives import Likelihood, Objective, Preference, Scores

FLOWS = {
    SFT: "rlinf.flows.supervised.sft",
    DPO: "rlinf.flows.supervised.dpo",
    REWARD_MODEL: "rlinf.flows.supervised.reward_model",
}
"""Of each algorithm, where a configuration names none."""
TRAINER, REFERENCE = "trainer", "reference"
_UNREAD = ("reward", "sft", "rollout", "critic", "teacher", "task")
"""Sections that nothing reads in such a run; `task` where data are named."""
_READ_OF_EVALUATION = {"data", "split", "columns", "problems", "every"}
_READ_OF_ALGORITHM = {"name"}


def objective_of(config: RunConfig) -> Objective:
    """What is learned.

    Raises:
        ValueError: settings that do not go together.
    """
    settings = config.supervised
    if config.algorithm.name == DPO:
        return Preference(settings.dpo.loss, settings.dpo.beta, settings.dpo.label_smoothing)
    return Scores(settings.reward_model.center) if config.algorithm.name == REWARD_MODEL else Likelihood()


def needed_roles(config: RunConfig) -> list[str]:
    """The roles besides the trainer."""
    reference = config.reference
    return [REFERENCE] if config.algorithm.name == DPO and reference.kind == "frozen" and not reference.inside else []


def prepare_supervised(config: RunConfig, hosts: int, objects: InMemory) -> Prepared:
    """Import what a configuration names, and check what only that can show; see `job.prepare.prepare`.

    Raises:
        ConfigError: with every mistake.
    """
    path = config.flow or FLOWS[config.algorithm.name]
    flow = resolve(path) if objects.flow is None else objects.flow
    if objects.flow is not None:
        path = f"{flow.__module__}.{flow.__qualname__}"
    needed = needed_roles(config)
    problems = [
        *problems_of(config, own=config.data.train is not None or objects.train is not None),
        *_flow_problems(path, flow, (TRAINER,), needed, (REFERENCE,)),
        *_tracker_problems(config.metrics),
    ]
    callbacks = Callbacks.of((*config.callbacks, *objects.callbacks), problems)
    if problems:
        raise ConfigError(problems)
    kinds = tuple(kind for kind in TEXT if kind.name in (TRAINER, *needed))
    shape = config.model.path or " ".join(f"{key}={value}" for key, value in sorted(config.model.config.items()))
    model, items = f"{shape}, {config.algorithm.name}", config.supervised.batch_size
    placed, planned = _planned(config.placement, kinds, hosts, flow=flow, path=path, model=model, items=items)
    model_config, fitted, problems = _fitted(config, placed, needed)
    if problems:
        raise ConfigError(problems)
    return Prepared(
        flow, path, None, kinds, model, items, placed, planned, fitted.held, model_config, objects, callbacks,
        became=fitted.became, warnings=fitted.warnings, config=fitted.config,
    )  # fmt: skip


def problems_of(config: RunConfig, *, own: bool) -> Iterator[Problem]:
    """What keys may not be together in a run on given texts.

    Args:
        config: of it.
        own: it learns from data of the user's, and not from the generated task.
    """
    name = config.algorithm.name
    try:
        objective_of(config)
    except ValueError as error:
        yield _problem("supervised.dpo.label_smoothing", config.supervised.dpo.label_smoothing, str(error))
    blank = type(config)()
    for section in _UNREAD:
        if getattr(config, section) != getattr(blank, section) and (section != "task" or own):
            yield from _unread(section, getattr(config, section), getattr(blank, section), set(), name)
    yield from _unread("algorithm", config.algorithm, blank.algorithm, _READ_OF_ALGORITHM, name)
    yield from _unread("evaluation", config.evaluation, blank.evaluation, _READ_OF_EVALUATION, name)
    unread = {"template", "max_prompt_tokens"}
    yield from _unread("data", config.data, blank.data, {each.name for each in fields(config.data)} - unread, name)
    read = {"batch_size", "epochs", "max_tokens"} | ({"dpo"} if name == DPO else set())
    read |= {"reward_model"} if name == REWARD_MODEL else {"learn"}
    yield from _unread("supervised", config.supervised, blank.supervised, read, name)
    kind = config.reference.kind
    if name != DPO and config.reference != blank.reference:
        yield from _unread("reference", config.reference, blank.reference, set(), name)
    elif kind == "ema":
        yield _problem("reference.kind", kind, "dpo holds on to a policy that stays; take frozen, or adapters_off")
    elif kind == "precomputed" and not own:
        yield _problem("reference.kind", kind, "the generated task has no log-probs of a reference; take frozen")
    if config.placement.profile is not None or config.placement.mode == "auto":
        key = "profile" if config.placement.profile is not None else "mode"
        advice = "there is nothing to plan without generation: remove it"
        yield _problem(f"placement.{key}", getattr(config.placement, key), advice)


def _unread(section: str, given: Any, blank: Any, read: set[str], algorithm: str) -> Iterator[Problem]:
    """Keys of a section that were set, and that nothing reads."""
    for each in fields(given):
        value = getattr(given, each.name)
        if each.name not in read and value != getattr(blank, each.name):
            yield _problem(f"{section}.{each.name}", value, f"algorithm {algorithm} does not read it: remove it")


def _problem(key: str, value: Any, advice: str) -> Problem:
    return Problem("configuration", key, value, advice)
