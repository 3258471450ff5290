"""What can be found wrong only by importing: the flow, the reward function and the model of a configuration.

In: a `RunConfig` that is right by itself. Out: what it names, imported; or one `ConfigError` with everything that is
wrong. No process or device is touched.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig

from rlinf.algos.parts import GroupRelative, LeaveOneOut
from rlinf.algos.spec import AlgorithmSpec
from rlinf.config.importing import resolve
from rlinf.config.loading import ConfigError, Problem
from rlinf.config.placement import Placing
from rlinf.config.schema import nearest
from rlinf.config.text import MetricsConfig, RewardConfig, RunConfig
from rlinf.data.datasets.toy_tasks import make_task
from rlinf.data.tokenizer import load_tokenizer
from rlinf.job.algorithm import algorithm_of, flow_of, roles_of
from rlinf.job.memory import Spread, complaints, footprints, spread_of
from rlinf.metrics.machine import machine
from rlinf.metrics.tracking import chosen, missing
from rlinf.placement.auto.choose import Chosen, choose
from rlinf.placement.grammar import PlacementError
from rlinf.placement.profiling.profile import load
from rlinf.placement.seats import KIND, TEXT, Placed, RoleKind, place, placed_by, split_complaint
from rlinf.rewards.base import Reward

Flow = Callable[..., Awaitable[Mapping[str, float]]]
"""One step; it takes what it names of `step` and the roles, and returns the step's metrics."""

_FILLED = 0.92
"""Share of a GPU's memory that roles may fill: the rest is for the contexts of CUDA and its libraries."""
OFFERED = ("step", "rollout", "judge", "trainer")
"""What every flow may take, by name."""
OPTIONAL = ("critic", "reference", "teacher")
"""What it may take where the algorithm has it; with a default of None, where it has it not, too."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """The code that a configuration names."""

    flow: Flow
    """One step."""
    algorithm: AlgorithmSpec
    """How answers become a gradient."""
    roles: tuple[str, ...]
    """Which of `OPTIONAL` the algorithm needs."""
    placed: Placed
    """Where each role runs."""
    model: str
    """What a profile of this run is of: the model, and all else that changes what an item costs."""
    model_config: Any
    """Of the policy's model, from transformers."""
    chosen: Chosen | None
    """What the planner found, where there was a profile to plan from."""
    held: Mapping[str, tuple[int, int]]
    """By role: bytes on each of its devices while it is loaded, and while it is parked; by its model's shape."""

    def arguments(self, offered: Mapping[str, Any]) -> dict[str, Any]:
        """Those of `offered` that the flow takes."""
        parameters = inspect.signature(self.flow).parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return dict(offered)
        return {name: value for name, value in offered.items() if name in parameters}


def prepare(config: RunConfig, hosts: int = 1) -> Prepared:
    """Import what a configuration names, and check what only that can show.

    Args:
        config: that is right by itself.
        hosts: number of processes of the job.

    Raises:
        ConfigError: with every mistake.
        Exception: what the imported code itself raised, with its traceback.
    """
    try:
        algorithm = algorithm_of(config)
    except ValueError as error:
        raise ConfigError([Problem("configuration", "algorithm", config.algorithm.name, str(error))]) from error
    path = config.flow or flow_of(algorithm)
    roles = tuple(roles_of(config, algorithm))
    flow, model = resolve(path), described(config, algorithm)
    kinds = kinds_of(roles)
    placed, chosen = planned_or_refused(
        config.placement, kinds, hosts, flow=flow, path=path, model=model, items=config.algorithm.prompts_per_step
    )
    model_config, problems = _model(config)
    held: dict[str, tuple[int, int]] = {}
    if not problems:
        seats = {role: seat.devices for role, seat in placed.seats.items()}
        spread, problems = _spread(config, model_config, placed, roles)
        slices = {} if spread is None else spread.slices
        found = footprints(config, model_config, seats, roles, slices)
        held = {role: (each.active_bytes, each.parked_bytes) for role, each in found.items()}
        problems += _memory_problems(config, model_config, placed, roles, slices)
    prepared = Prepared(flow, algorithm, roles, placed, model, model_config, chosen, held)
    problems = [
        *_flow_problems(path, prepared.flow, prepared.roles),
        *_algorithm_problems(config, algorithm),
        *_reward_problems(config.reward),
        *problems,
        *_tracker_problems(config.metrics),
    ]
    if problems:
        raise ConfigError(problems)
    return prepared


def kinds_of(roles: Sequence[str]) -> list[RoleKind]:
    """The roles of a run that are to be placed: those of every run, and those of `OPTIONAL` that it has."""
    return [kind for kind in TEXT if kind.name in (*OFFERED, *roles)]


def described(config: RunConfig, algorithm: AlgorithmSpec) -> str:
    """What changes the cost of an item of a step: the model, answers to a prompt, their longest length, the recipe."""
    shape = config.model.path or " ".join(f"{key}={value}" for key, value in sorted(config.model.config.items()))
    return f"{shape}, {config.algorithm.group_size} answers of {config.rollout.max_new_tokens} tokens, {algorithm.name}"


def planned_or_refused(
    wanted: Placing, kinds: Sequence[RoleKind], hosts: int, *, flow: Any, path: str, model: str, items: int
) -> tuple[Placed, Chosen | None]:
    """Where roles run, and what the planner found if there is a profile to plan from.

    Args:
        wanted: the section `placement`.
        kinds: the roles that there are.
        hosts: number of processes of the job.
        flow: one step, which is rehearsed; there must not be a running event loop.
        path: its dotted path.
        model: see `Prepared.model`.
        items: of a step.

    Raises:
        ConfigError: with every reason why they cannot.
    """
    placed = _placed_or_refused(wanted, kinds, hosts)
    if wanted.profile is None or wanted.plan is not None or hosts == 1:
        return placed, None
    try:
        profile = load(Path(wanted.profile).expanduser())
        if problems := profile.mismatch(model, machine(), path):
            raise PlacementError(problems)
        memory = None if placed.memory is None else {KIND: placed.memory}
        chosen = choose(profile, {KIND: hosts}, memory, flow, items, extrapolate=wanted.extrapolate)
    except OSError as error:
        advice = f"it cannot be read: {error.strerror or error}; a run leaves one in its directory"
        raise ConfigError([Problem("configuration", "placement.profile", wanted.profile, advice)]) from None
    except PlacementError as error:
        said = [
            complaint.replace("allow extrapolation", "set placement.extrapolate=true") for complaint in error.complaints
        ]
        raise ConfigError(
            [Problem("configuration", "placement.profile", wanted.profile, each) for each in said]
        ) from None
    except ValueError as error:
        raise ConfigError([Problem("configuration", "placement.profile", wanted.profile, str(error))]) from None
    free = wanted.mode in (None, "auto")
    rows = [row for row in chosen.best_of_modes if free or row.mode == wanted.mode]
    if not rows:
        there = ", ".join(f"{row.mode} ({row.seconds:.3g} s)" for row in chosen.best_of_modes)
        advice = f"by {wanted.profile} there is no such plan that fits {hosts} devices; there is {there}: take that"
        if not wanted.extrapolate:
            advice += ", or set placement.extrapolate=true, to guess sizes that were not profiled"
        raise ConfigError([Problem("configuration", "placement.mode", wanted.mode, advice)])
    return placed_by(rows[0].plan, placed, kinds), chosen


def _placed_or_refused(wanted: Placing, kinds: Sequence[RoleKind], hosts: int) -> Placed:
    """Where roles run without a profile."""
    gpu_memory = None
    if torch.cuda.is_available():
        gpu_memory = int(_FILLED * torch.cuda.get_device_properties(0).total_memory)
    try:
        return place(wanted, kinds, hosts, gpu_memory=gpu_memory)
    except PlacementError as error:
        found = (split_complaint(complaint) for complaint in error.complaints)
        problems = [
            Problem("configuration", key, getattr(wanted, key.rpartition(".")[2], MISSING), advice)
            for key, advice in found
        ]
        raise ConfigError(problems) from None


def _flow_problems(path: str, flow: Any, roles: Sequence[str]) -> Iterator[Problem]:
    if not inspect.iscoroutinefunction(flow):
        yield Problem("configuration", "flow", path, "this is no `async def` function")
        return
    parameters = inspect.signature(flow).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name, parameter in parameters.items():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            yield Problem("configuration", "flow", path, f"it takes {name} by position only; remove the `/`")
        elif parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) or name in (*OFFERED, *roles):
            continue
        elif parameter.default is parameter.empty and name in OPTIONAL:
            yield Problem("configuration", "flow", path, f"it takes {name}, which this algorithm has not")
        elif parameter.default is parameter.empty:
            advice = f"it takes {name}, which there is not; a flow may take {', '.join((*OFFERED, *OPTIONAL))}"
            yield Problem("configuration", "flow", path, advice)
    for role in roles:
        if role not in parameters and not takes_all:
            advice = f"this algorithm needs a {role}, which the flow does not take; leave `flow` out, or take `{role}`"
            yield Problem("configuration", "flow", path, advice)


def _algorithm_problems(config: RunConfig, algorithm: AlgorithmSpec) -> Iterator[Problem]:
    size = config.algorithm.group_size
    if isinstance(algorithm.advantage, GroupRelative | LeaveOneOut) and size < 2:
        advice = f"{algorithm.name} compares answers to one prompt with each other, so it needs at least 2"
        yield Problem("configuration", "algorithm.group_size", size, advice)
    inside = config.reference.kind == "adapters_off"
    if inside and not algorithm.needs_reference:
        yield Problem("configuration", "reference.kind", "adapters_off", f"{algorithm.name} holds on to no reference")
    if inside and algorithm.critic is not None and algorithm.kl is not None and algorithm.kl.place == "reward":
        advice = (
            "the critic needs the penalty too, and the trainer alone has the adapters; take frozen, or kl.place=loss"
        )
        yield Problem("configuration", "reference.kind", "adapters_off", advice)
    if algorithm.needs_teacher and config.teacher.model is None:
        advice = f"{algorithm.name} learns from a teacher; name a saved model"
        yield Problem("configuration", "teacher.model", None, advice)
    for key, model in (
        ("critic.model", config.critic.model),
        ("reference.model", config.reference.model),
        ("teacher.model", config.teacher.model),
    ):
        role = key.partition(".")[0]
        if model is not None and role not in roles_of(config, algorithm):
            yield Problem("configuration", key, model, f"{algorithm.name} has no {role}; remove it")


def _reward_problems(reward: RewardConfig) -> Iterator[Problem]:
    try:
        Reward.of(reward.parts or reward.function, reward.args, make=False)
    except ValueError as error:
        key = "reward.parts" if reward.parts else "reward.function"
        yield Problem("configuration", key, reward.parts or reward.function, str(error))


def _tracker_problems(metrics: MetricsConfig) -> Iterator[Problem]:
    wanted = chosen(tensorboard=metrics.tensorboard, wandb=metrics.wandb, swanlab=metrics.swanlab)
    for key, advice in missing(wanted):
        yield Problem("configuration", key, getattr(metrics, key.partition(".")[2]), advice)


def _model(config: RunConfig) -> tuple[Any, list[Problem]]:
    """The transformers config of the model, with the vocabulary that it will have; or what is wrong with it."""
    model = config.model
    try:
        if model.path is not None:
            return AutoConfig.from_pretrained(model.path), []
        if problems := list(_new_model_problems(model.config)):
            return None, problems
        source = model.tokenizer or make_task(config.task.name, digits=1).tokenizer
        return AutoConfig.for_model(**{"vocab_size": len(load_tokenizer(source)), **model.config}), []
    except (OSError, ValueError) as error:
        key, value = ("model.path", model.path) if model.path is not None else ("model.tokenizer", model.tokenizer)
        reason = str(error).strip().splitlines()[0]
        return None, [Problem("configuration", key, value, f"transformers cannot load it: {reason}")]


def _spread(
    config: RunConfig, model_config: Any, placed: Placed, roles: Sequence[str]
) -> tuple[Spread | None, list[Problem]]:
    """How the models that learn lie on their processes, or why they cannot."""
    try:
        return spread_of(config, model_config, placed, roles), []
    except ValueError as error:
        return None, [Problem("configuration", "trainer.sharding", config.trainer.sharding, str(error))]


def _memory_problems(
    config: RunConfig, model_config: Any, placed: Placed, roles: Sequence[str], slices: Mapping[str, int]
) -> Iterator[Problem]:
    for complaint in complaints(config, model_config, placed, roles, slices):
        limit = config.placement.device_memory_gb
        yield Problem("configuration", "placement.device_memory_gb", limit, complaint)


def _new_model_problems(settings: Mapping[str, Any]) -> Iterator[Problem]:
    kind = settings["model_type"]
    if kind not in CONFIG_MAPPING:
        near = nearest(str(kind), CONFIG_MAPPING.keys())
        advice = "transformers has no such model type" + (f"; did you mean {near}?" if near else "")
        yield Problem("configuration", "model.config.model_type", kind, advice)
        return
    known = _keys_of(CONFIG_MAPPING[kind])
    for key, value in settings.items():
        if key not in known:
            near = nearest(key, known)
            advice = f"{kind} has no such key" + (f"; did you mean {near}?" if near else "")
            yield Problem("configuration", f"model.config.{key}", value, advice)


def _keys_of(kind: type) -> set[str]:
    """The keys that a transformers configuration takes; it would silently keep any other."""
    return {*kind().to_dict(), *kind.attribute_map, *inspect.signature(kind).parameters} - {"kwargs"}  # type: ignore[attr-defined]
