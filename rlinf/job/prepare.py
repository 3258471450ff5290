"""What only importing can show to be wrong: the flow, the algorithm, the reward and the model of a configuration.

In: a configuration that is right by itself. Out: what it names, imported, and where roles run; or one `ConfigError`. No
process or device is touched."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from rlinf.agents.agent import Agent
from rlinf.algos.spec import AlgorithmSpec
from rlinf.config.common import TrackingConfig
from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.importing import resolve
from rlinf.config.loading import ConfigError, Problem
from rlinf.config.placement import Placing
from rlinf.config.supervised import SUPERVISED
from rlinf.config.text import RewardConfig, RunConfig
from rlinf.data.datasets.sources import Source
from rlinf.data.step import works_ahead
from rlinf.engines.make import lacking, unable
from rlinf.job.algorithm import (
    algorithm_of,
    flow_of,
    for_older_answers,
    mistakes_ahead,
    roles_of,
)
from rlinf.job.callbacks import Callbacks
from rlinf.job.checks.by_kind import device_kind, elsewhere
from rlinf.job.checks.fits import Fitted, fit
from rlinf.job.checks.model import other_models, policy_model, split_mistakes
from rlinf.job.checks.naming import RAISED, naming, problem
from rlinf.job.checks.whole import check_parts
from rlinf.job.roles.agents import configured_agent
from rlinf.job.roles.named import (
    collected,
    kinds_of,
    mistakes_in_flow,
    mistakes_in_models,
    mistakes_in_own,
    own_roles,
    with_teachers,
)
from rlinf.job.roles.running import ALWAYS, Role
from rlinf.metrics.machine import machine
from rlinf.metrics.tracking import chosen, missing
from rlinf.placement.auto.choose import Chosen, choose
from rlinf.placement.grammar import PlacementError
from rlinf.placement.profiling.profile import load
from rlinf.placement.seats import Placed, RoleKind, place, placed_by, split_complaint
from rlinf.rewards.base import Reward, RewardSource
from rlinf.runtime.gpu.own_device import own_device

Spec = TypeVar("Spec", bound=AlgorithmSpec | None)
Flow = Callable[..., Awaitable[Mapping[str, float]]]
"""One step; it takes what it names of `step` and the roles, and returns the step's metrics."""

_FILLED = 0.92
"""Share of a GPU's memory that roles may fill: the rest is for the contexts of CUDA and its libraries."""
OPTIONAL = ("reward_model", "critic", "reference", "teacher")
"""Roles that a run on text has where its algorithm needs them, or where one is named; a flow that takes one with a
default of None serves other runs too."""


@dataclass(frozen=True, slots=True)
class InMemory:
    """Python objects that stand in place of what a configuration would name."""

    flow: Flow | None = None
    """One step."""
    reward: RewardSource | None = None
    """What scores an answer: a function, or several by name."""
    train: Source | None = None
    """Problems to learn from."""
    evaluation: Source | None = None
    """Problems to evaluate on."""
    agent: Agent | None = None
    """What works on a task."""
    parts: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Functions in place of the algorithm's `advantage` or `loss`."""
    callbacks: tuple[Any, ...] = ()
    """What is told of the run besides the configuration's `callbacks`; see `job.callbacks`."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """The code that a configuration names, and where its roles run."""

    flow: Flow
    """One step."""
    path: str
    """Its dotted path."""
    algorithm: AlgorithmSpec | None
    """How samples become a gradient; None for soft actor-critic, which learns from single transitions, and for runs on
    given texts."""
    kinds: tuple[RoleKind, ...]
    """The roles that there are, in order of their work."""
    model: str
    """What a profile of this run is of: the model, and all else that changes what an item costs."""
    items: int
    """Of a step: prompts, or environments."""
    placed: Placed
    """Where each role runs."""
    chosen: Chosen | None
    """What the planner found, where there was a profile to plan from."""
    held: Mapping[str, tuple[int, int]]
    """By role: bytes on each of its devices while it is loaded, and while it is parked, by its model's shape. Empty for
    policies that act: how large they are only their simulator tells."""
    model_config: Any = None
    """Of a language model, from transformers."""
    objects: InMemory = InMemory()
    """What was passed instead of being named."""
    callbacks: Callbacks = field(default_factory=Callbacks)
    """Who is told what happens in the run."""
    staleness: int = 0
    """Steps that the flow begins work early."""
    became: tuple[str, ...] = ()
    """Lines about the values of what was left to the devices."""
    warnings: tuple[str, ...] = ()
    """Lines about roles that may run out of memory."""
    config: Any = None
    """What was prepared, with these values; None of a policy that acts, which leaves nothing to them."""

    @property
    def told(self) -> tuple[str, ...]:
        """What a run says at its beginning of its devices; that a CPU has the defaults of CPUs is no news."""
        cuda = self.config is not None and device_kind(self.config.placement) == "cuda"
        return (*(self.became if cuda else ()), *self.warnings)

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of the roles."""
        return tuple(kind.name for kind in self.kinds)

    def arguments(self, offered: Mapping[str, Any]) -> dict[str, Any]:
        """Those of `offered` that the flow takes."""
        parameters = inspect.signature(self.flow).parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return dict(offered)
        return {name: value for name, value in offered.items() if name in parameters}


def prepare(config: RunConfig | EmbodiedConfig, hosts: int = 1, objects: InMemory | None = None) -> Prepared:
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
        from rlinf.job.embodied.prepare import prepare_embodied  # it builds on what is here

        return prepare_embodied(config, hosts)
    if config.algorithm.name in SUPERVISED:
        from rlinf.job.supervised.prepare import prepare_supervised  # it builds on what is here

        return prepare_supervised(config, hosts, InMemory() if objects is None else objects)
    return _prepare_text(config, hosts, InMemory() if objects is None else objects)


def _prepare_text(config: RunConfig, hosts: int, objects: InMemory) -> Prepared:
    algorithm = _algorithm(config.algorithm.name, lambda: algorithm_of(config, objects.parts))
    path = config.flow or flow_of(algorithm, with_agent=bool(config.agent.function or objects.agent))
    if objects.flow is not None:
        path = f"{objects.flow.__module__}.{objects.flow.__qualname__}"
    needed = roles_of(config, algorithm)
    kinds = kinds_of(config, needed)
    flow = _imported(path) if objects.flow is None else objects.flow
    algorithm = for_older_answers(algorithm, config) if works_ahead(flow) else algorithm
    model, items = _described_text(config, algorithm), config.algorithm.prompts_per_step
    mistaken = (*mistakes_in_models(config), *mistakes_in_own(config, flow), *mistakes_ahead(config, flow))
    beside = [_problem(*each) for each in mistaken]
    own = own_roles(config) if not beside else {}
    flow, asked = with_teachers(flow, config.named_teachers), flow
    staleness = config.staleness.max if works_ahead(asked) else 0
    said: dict[str, Any] = {"flow": flow, "path": path, "model": model, "items": items, "staleness": staleness}
    placed, planned = _planned(config.placement, kinds, hosts, own=own, **said)
    model_config, fitted, problems = _fitted(config, placed, needed, beside)
    config = fitted.config
    problems = [
        *_flow_problems(path, asked, (*ALWAYS, "session", *config.roles), collected(needed), OPTIONAL),
        *_algorithm_problems(config, algorithm),
        *_reward_problems(config.reward, objects.reward),
        *problems,
        *_tracker_problems(config.metrics),
    ]
    lacks = lacking(config.rollout.engine, config.rollout.engine_args)
    if lacks is not None and not elsewhere(config.placement):  # which this machine will not run anyway
        problems.append(_problem("rollout.engine", config.rollout.engine, lacks))
    if (other := unable(config.rollout.engine, config.staleness.kv)) is not None:
        problems.append(_problem("staleness.kv", config.staleness.kv, other))
    agent, mistakes = configured_agent(config, asked, objects.agent)
    problems += [_problem(*each) for each in mistakes]
    callbacks = Callbacks.of((*config.callbacks, *objects.callbacks), problems)
    if problems:
        raise ConfigError(problems)
    objects = objects if agent is None else replace(objects, agent=agent)
    return Prepared(
        flow, path, algorithm, kinds, model, items, placed, planned, fitted.held, model_config, objects, callbacks,
        staleness, fitted.became, fitted.warnings, config,
    )  # fmt: skip


def refuse_idle(placement: Placing, prepared: Prepared) -> None:
    """See that every process of a job has a role, unless idle ones are meant or a planner left them out.

    Args:
        placement: the section.
        prepared: with where roles run.

    Raises:
        ConfigError: some have none.
    """
    idle, count = prepared.placed.idle, prepared.placed.devices
    if not idle or placement.idle_processes or prepared.chosen is not None:
        return
    shown = ", ".join(map(str, idle[:8])) + (", …" if len(idle) > 8 else "")
    started = f"start {idle[0]}" if idle == [*range(idle[0], count)] else "start fewer"
    advice = (
        f"{len(idle)} of {count} processes have no role ({shown}) and would idle: {started}, give a role more "
        "in `placement` (mode=collocated: trainer and rollout get all), or set this to true"
    )
    raise ConfigError([_problem("placement.idle_processes", False, advice)])


def _algorithm(name: str, make: Callable[[], Spec]) -> Spec:
    try:
        return make()
    except ValueError as error:
        raise ConfigError([_problem("algorithm", name, str(error))]) from error


def _imported(path: str) -> Any:
    with naming("flow", path, "importing it"):
        return resolve(path)


def _problem(key: str, value: Any, advice: str) -> Problem:
    return Problem("configuration", key, value, advice)


def _described_text(config: RunConfig, algorithm: AlgorithmSpec) -> str:
    shape = config.model.path or " ".join(f"{key}={value}" for key, value in sorted(config.model.config.items()))
    scored = "" if config.reward_model.path is None else f", scored by {config.reward_model.path}"
    answers = f"{config.algorithm.group_size} answers of {config.rollout.max_new_tokens} tokens"
    return f"{shape}, {answers}, {algorithm.name}{scored}"


# Placement -----------------------------------------------------------------------------------------------------------


def _planned(
    wanted: Placing,
    kinds: Sequence[RoleKind],
    hosts: int,
    *,
    flow: Any,
    path: str,
    model: str,
    items: int,
    own: Mapping[str, Role] = MappingProxyType({}),
    staleness: int = 0,
) -> tuple[Placed, Chosen | None]:
    """Where roles run, and what the planner found where there is a profile to plan from.

    Args:
        wanted: the section `placement`.
        kinds, path, model, items, staleness: see `Prepared`.
        hosts: number of processes of the job.
        flow: one step, which is rehearsed; there must not be a running event loop.
        own: roles of the user's own.

    Raises:
        ConfigError: with every reason why they cannot.
    """
    placed = _placed(wanted, kinds, hosts)
    if wanted.profile is None or wanted.plan is not None or hosts == 1:
        return placed, None
    try:
        profile = load(Path(wanted.profile).expanduser())
        if problems := profile.mismatch(model, machine(), path):
            raise PlacementError(problems)
        actors = {name: role.actor for name, role in own.items()}
        chosen = choose(
            profile, placed.fleet.counts, placed.memory_by_kind, flow, items, extrapolate=wanted.extrapolate,
            actors=actors, staleness=staleness, hardware=placed.fleet.hardware,
        ).numbered(placed.fleet)  # fmt: skip
    except OSError as error:
        advice = f"it cannot be read: {error.strerror or error}; a run leaves one in its directory"
        raise ConfigError([_problem("placement.profile", wanted.profile, advice)]) from None
    except PlacementError as error:
        said = (each.replace("allow extrapolation", "set placement.extrapolate=true") for each in error.complaints)
        raise ConfigError([_problem("placement.profile", wanted.profile, each) for each in said]) from None
    except ValueError as error:
        raise ConfigError([_problem("placement.profile", wanted.profile, str(error))]) from None
    free = wanted.mode in (None, "auto")
    rows = [row for row in chosen.best_of_modes if free or row.mode == wanted.mode]
    if not rows:
        there = ", ".join(f"{row.mode} ({row.seconds:.3g} s)" for row in chosen.best_of_modes)
        advice = f"by {wanted.profile} there is no such plan that fits {hosts} devices; there is {there}: take that"
        if not wanted.extrapolate:
            advice += ", or set placement.extrapolate=true, to guess sizes that were not profiled"
        raise ConfigError([_problem("placement.mode", wanted.mode, advice)])
    return placed_by(rows[0].plan, placed, kinds), chosen


def _placed(wanted: Placing, kinds: Sequence[RoleKind], hosts: int) -> Placed:
    """Where roles run without a profile."""
    gpus, own = torch.cuda.device_count(), own_device().index
    gpu_memory = None if own is None else int(_FILLED * torch.cuda.get_device_properties(own).total_memory)
    try:
        return place(wanted, kinds, hosts, gpu_memory=gpu_memory, gpus=gpus)
    except PlacementError as error:
        found = (split_complaint(complaint) for complaint in error.complaints)
        values = ((key, getattr(wanted, key.rpartition(".")[2], MISSING), advice) for key, advice in found)
        raise ConfigError([_problem(*each) for each in values]) from None


def _flow_problems(path: str, flow: Any, *roles: Sequence[str]) -> Iterator[Problem]:
    return (_problem("flow", path, advice) for advice in mistakes_in_flow(flow, *roles))


# What does not go together -------------------------------------------------------------------------------------------


def _algorithm_problems(config: RunConfig, algorithm: AlgorithmSpec) -> Iterator[Problem]:
    size = config.algorithm.group_size
    if algorithm.compares_within_groups and size < 2:
        advice = f"{algorithm.name} compares answers to one prompt with each other, so it needs at least 2"
        yield _problem("algorithm.group_size", size, advice)
    inside = config.reference.inside
    key = "reference.kind" if config.reference.adapter is None else "reference.adapter"
    if inside and not algorithm.needs_reference:
        yield _problem(key, inside, f"{algorithm.name} holds on to no reference")
    if inside and algorithm.critic is not None and algorithm.kl is not None and algorithm.kl.place == "reward":
        advice = (
            "the critic needs the penalty too, and the trainer alone has the adapters; take frozen, or kl.place=loss"
        )
        yield _problem(key, inside, advice)
    if config.teachers and not algorithm.needs_teacher:
        yield _problem("teachers", ", ".join(config.teachers), f"{algorithm.name} has no teacher; remove them")
    taught = config.teacher.model is not None or config.teacher.adapter is not None or config.teachers
    if algorithm.needs_teacher and not taught:
        advice = f"{algorithm.name} learns from a teacher; name a saved model"
        yield _problem("teacher.model", None, advice)
    for key, model in (
        ("critic.model", config.critic.model),
        ("reference.model", config.reference.model),
        ("teacher.model", config.teacher.model),
    ):
        role = key.partition(".")[0]
        if model is not None and role not in roles_of(config, algorithm):
            yield _problem(key, model, f"{algorithm.name} has no {role}; remove it")


def _reward_problems(reward: RewardConfig, passed: RewardSource | None) -> Iterator[Problem]:
    try:
        Reward.of(passed or reward.source, reward.args, make=False).ready()
    except RAISED as error:
        key = "reward.parts" if reward.parts else "reward.function"
        yield problem(key, reward.parts or reward.function, error)


def _tracker_problems(metrics: TrackingConfig) -> Iterator[Problem]:
    wanted = chosen(tensorboard=metrics.tensorboard, wandb=metrics.wandb, swanlab=metrics.swanlab)
    for key, advice in missing(wanted):
        yield _problem(key, getattr(metrics, key.partition(".")[2]), advice)


def _fitted(
    config: RunConfig, placed: Placed, roles: Sequence[str], found_so_far: Sequence[Problem] = ()
) -> tuple[Any, Fitted, list[Problem]]:
    """The transformers config of the model, what follows from the devices' memory, and what is wrong with either."""
    model_config, problems = policy_model(config)
    problems += [*other_models(config, roles), *found_so_far]
    if not problems:
        learning = [role for role in ("trainer", "critic") if role == "trainer" or role in roles]
        problems += split_mistakes(config, model_config, {role: len(placed.seats[role].hosts) for role in learning})
    if problems:
        return model_config, Fitted(config), problems
    with naming("model", config.model.path or config.model.config, "estimating its memory"):
        fitted, problems = fit(config, model_config, placed, roles)
    return model_config, fitted, problems
