"""Makes the `RunPlan` of a configuration: imports what it names, and checks everything that only importing can show.

In: a configuration that is right by itself. Out: a `RunPlan`, with the flow, the algorithm, the rewards and where roles
run; or one `ConfigError` with every mistake. No process or device is touched. Each kind of run has its builder:
`prepare_text` and `prepare_supervised` here, `prepare_embodied` beside the roles that it plans (`embodied_roles`);
`start.prepare` chooses. An algorithm is its recipe, with the parts that were changed and the limits of this run. What
only text needs is imported where it is used: runs that act plan here too.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from rlinf.algos import algorithms, recipes
from rlinf.algos.algorithms import (
    AlgorithmSpec,
    Clipped,
    Correction,
    Decoupled,
    Distillation,
    Divergence,
    Rejection,
)
from rlinf.config.common import Placing, TrackingConfig
from rlinf.config.importing import RAISED, mistake_in, resolve
from rlinf.config.learning import DPO, REWARD_MODEL, SFT, NamedTeacher, TeacherConfig
from rlinf.config.load import ConfigError, InputError, Problem
from rlinf.config.text import RewardConfig, RunConfig
from rlinf.data.step import works_ahead
from rlinf.metrics.machine import machine
from rlinf.metrics.trackers import missing, wanted_trackers
from rlinf.placement.grammar import PlacementError, TooFewGpus
from rlinf.placement.profile import load
from rlinf.placement.seats import TEXT, Placed, RoleKind, place, placed_by, split_complaint
from rlinf.runs.callbacks import Callbacks
from rlinf.runs.dry_run.transformer import device_kind, elsewhere, splits_whole
from rlinf.runs.roles import (
    ALWAYS,
    Role,
    collected,
    kinds_of,
    mistakes_in_flow,
    mistakes_in_models,
    mistakes_in_own,
    naming,
    own_roles,
    problem,
    with_teachers,
)
from rlinf.runtime.base.tensors import own_device

if TYPE_CHECKING:
    from rlinf.agents.agent import Agent
    from rlinf.agents.player import Player
    from rlinf.data.datasets.source import Source
    from rlinf.placement.auto import Choice
    from rlinf.rewards.base import RewardSource
    from rlinf.runs.dry_run.footprint import Fitted
    from rlinf.training.supervised import Objective

PLACES = tuple(place.name for place in fields(AlgorithmSpec) if place.name != "name")
"""Keys of `algorithm` that change a part of the recipe."""
AS_IN_THE_RECIPE: dict[str, Any] = {"entropy_bonus": None, "max_drift": None, "truncated": None}
"""Values that change nothing, where it is not an empty mapping."""

CORRECTION, REJECTION = Correction(cap=5.0), Rejection(floor=0.7, cap=1.43)
"""How asynchronous flows correct for older answers, measured in docs/async.md. The cap is high because what must be
taken back has large weights: tokens that have become likely since they were drawn and turned out bad."""
ROUNDED = Correction(cap=2.0)
"""How answers of rounded weights are corrected for: truncated importance sampling, as by the recipe grpo_tis."""
CORRECTED_FROM = 2
"""Least `staleness.max` with which they do: what is one version old is learned from as well without, or better."""


def algorithm_of(config: RunConfig, parts: Mapping[str, Any] = MappingProxyType({})) -> AlgorithmSpec:
    """The algorithm of a run.

    What a recipe cannot know is filled in unless it was set: the length limit of `shaping` and the constant length of
    `seq-mean-token-sum-norm` are the longest answer of this run, `rollout.max_new_tokens`; the penalty of `shaping`
    begins as far before its limit as in the recipe, relative to it.

    Args:
        config: of the run.
        parts: functions in memory in place of `advantage` or `loss`.

    Raises:
        ValueError: no recipe, part or key of that name (the text gives the nearest), or a bad value.
    """
    algorithm, longest = config.algorithm, config.rollout.max_new_tokens
    values = {place: getattr(algorithm, place) for place in PLACES}
    changes = {place: value for place, value in values.items() if value != AS_IN_THE_RECIPE.get(place, {})}
    changes.update(parts)
    spec = recipes.get(algorithm.name, _whole(algorithm.name, changes, longest), resolve=imported_part)
    if spec.shaping is not None and not _sets(changes, "shaping", "longest"):
        cache = spec.shaping.cache
        if not _sets(changes, "shaping", "cache"):
            cache = max(1, round(longest * spec.shaping.cache / spec.shaping.longest))
        spec = algorithms.override(spec, {"shaping": {"longest": longest, "cache": min(cache, longest)}})
    return spec


def for_older_answers(algorithm: AlgorithmSpec, config: RunConfig) -> AlgorithmSpec:
    """The algorithm as it learns from answers of older weights: with `CORRECTION` and `REJECTION` where answers may be
    more than one version old, and neither the recipe nor the configuration says a word of correction or rejection.
    Losses that weigh by the ratio to what drew the tokens need nothing beside.

    Args:
        algorithm: of the run.
        config: of the run.
    """
    settled = (config.algorithm.correction, config.algorithm.rejection) != ({}, {})
    if settled or config.staleness.max < CORRECTED_FROM or not isinstance(algorithm.loss, Clipped):
        return algorithm
    if algorithm.correction is not None or algorithm.rejection is not None:
        return algorithm
    return replace(algorithm, correction=CORRECTION, rejection=REJECTION)


def for_rounded_answers(algorithm: AlgorithmSpec, config: RunConfig) -> AlgorithmSpec:
    """The algorithm as it learns from answers of weights that were rounded, see `rounding_of`: with `ROUNDED` where
    nothing corrects for what draws the tokens, and the configuration does not say that nothing should.

    Args:
        algorithm: of the run.
        config: of the run.
    """
    settled = config.algorithm.correction != {} or algorithm.correction is not None
    if rounding_of(config) is None or settled or isinstance(algorithm.loss, Decoupled):
        return algorithm
    return replace(algorithm, correction=ROUNDED)


def rounding_of(config: RunConfig) -> str | None:
    """The key by which answers are those of rounded weights, ours or a server's, and its value; None: they are not."""
    rollout = config.rollout
    if rollout.weights != "full":
        return f"rollout.weights={rollout.weights}"
    args, kind = rollout.engine_args.get("args"), None
    if isinstance(args, dict):  # vLLM's
        kind = args.get("quantization")
    elif isinstance(args, list):  # SGLang's, words of a command line
        words = " ".join(map(str, args)).replace("=", " ").split()
        kind = dict(itertools.pairwise(words)).get("--quantization")
    return None if kind is None else f"rollout.engine_args.args.quantization={kind}"


def default_correction(config: RunConfig, algorithm: AlgorithmSpec | None) -> str | None:
    """That `for_older_answers` or `for_rounded_answers` had something to add, for people; None if they had not."""
    if algorithm is not None and algorithm.correction is ROUNDED:
        return (
            f"answers are those of rounded weights ({rounding_of(config)}), which is "
            f"corrected for: algorithm.correction={{cap: {ROUNDED.cap:g}}}; algorithm.correction=null leaves it out"
        )
    if algorithm is None or algorithm.correction is not CORRECTION:
        return None
    return (
        f"answers may be {config.staleness.max} versions old, which is corrected for: "
        f"algorithm.correction={{cap: {CORRECTION.cap:g}}} "
        f"algorithm.rejection={{floor: {REJECTION.floor:g}, cap: {REJECTION.cap:g}}}; "
        "algorithm.correction=null leaves both out"
    )


def filled_in_limit(config: RunConfig, algorithm: AlgorithmSpec | None) -> str | None:
    """The penalty for length of a run whose limit nobody has set, for people; None without one."""
    if (
        algorithm is None
        or algorithm.shaping is None
        or _sets({"shaping": config.algorithm.shaping}, "shaping", "longest")
    ):
        return None
    part = algorithm.shaping
    return (
        f"answers of more than {part.longest - part.cache:,} tokens lose reward, up to {part.penalty:g} at "
        f"{part.longest:,}: algorithm.shaping.longest is rollout.max_new_tokens unless it is set. Where right answers "
        "need so many, raise rollout.max_new_tokens"
    )


def roles_of(config: RunConfig, algorithm: AlgorithmSpec) -> list[str]:
    """The roles that a run needs besides rollout, judge and trainer."""
    wanted = {
        "reward_model": config.reward_model.path is not None,
        "critic": algorithm.critic is not None,
        "reference": algorithm.needs_reference and config.reference.inside is None,
        "teacher": algorithm.needs_teacher and config.teacher.adapter is None and not config.teachers,
        **dict.fromkeys(config.named_teachers, algorithm.needs_teacher),
    }
    return [role for role, needed in wanted.items() if needed]


def flow_of(algorithm: AlgorithmSpec, *, with_agent: bool) -> str:
    """The flow of an algorithm, where a configuration names none; that of agents where one works on the tasks."""
    if with_agent:
        return "rlinf.flows.agentic"
    return "rlinf.flows.grpo" if algorithm.critic is None else "rlinf.flows.ppo"


def _whole(name: str, changes: Mapping[str, Any], longest: int) -> dict[str, Any]:
    """The changes, with the constant length that an aggregation needs at once."""
    whole = dict(changes)
    recipe = recipes.RECIPES.get(name)
    aggregation = whole.get("aggregation", {})
    how = aggregation.get("how", recipe.aggregation.how if recipe is not None else None)
    if how == "seq-mean-token-sum-norm" and "norm_length" not in aggregation:
        whole["aggregation"] = {**aggregation, "norm_length": longest}
    elif recipe is not None and recipe.aggregation.norm_length is not None and how != recipe.aggregation.how:
        whole["aggregation"] = {"norm_length": None, **aggregation}
    return whole


def _sets(changes: Mapping[str, Any], place: str, key: str) -> bool:
    value = changes.get(place)
    return isinstance(value, Mapping) and key in value


def imported_part(path: str) -> Any:
    if (mistake := mistake_in(path)) is not None:
        raise ValueError(f"{path}: {mistake}")
    return resolve(path)


def mistakes_ahead(config: RunConfig, flow: Any) -> Iterator[tuple[str, Any, str]]:
    """(key, value, advice) for what a flow that works ahead, or one that does not, makes nothing of.

    Args:
        config: right by itself.
        flow: one step.
    """
    stale, rollout, plain = config.staleness, config.rollout, RunConfig()
    if works_ahead(flow):
        most = stale.max * config.algorithm.prompts_per_step
        if rollout.extra is not None and rollout.extra > most:
            yield "rollout.extra", rollout.extra, f"more than staleness.max batches, {most}, never helps: at most that"
        return
    of_staleness = {
        f"staleness.{key}": (getattr(stale, key), getattr(plain.staleness, key)) for key in ("max", "mode", "kv")
    }
    own = {
        f"rollout.{key}": (getattr(rollout, key), getattr(plain.rollout, key)) for key in ("carry", "extra", "groups")
    }
    for key, (value, default) in {**of_staleness, **own}.items():
        if value != default:
            name = getattr(flow, "__qualname__", flow)
            advice = f"the flow {name} begins nothing early: take rlinf.flows.grpo_async or its like, or leave it out"
            yield key, value, advice


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
    """Scores an answer: a function, or several by name."""
    train: Source | None = None
    """Problems to learn from."""
    evaluation: Source | None = None
    """Problems to evaluate on."""
    agent: Agent | None = None
    """Works on a task."""
    player: Player | None = None
    """Answers in the model's place in the warm-up's episodes."""
    parts: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Functions in place of the algorithm's `advantage` or `loss`."""
    callbacks: tuple[Any, ...] = ()
    """Callbacks besides those of the configuration; see `runs.callbacks`."""


@dataclass(frozen=True, kw_only=True)
class ProfiledStep:
    """A step as profiles know it."""

    flow: Flow
    """One step."""
    path: str
    """Its dotted path."""
    model: str
    """Subject of this run's profile: the model, and all else that changes what an item costs."""
    items: int
    """Prompts, or environments, of a step."""
    staleness: int = 0
    """Steps that the flow begins work early."""


@dataclass(frozen=True, kw_only=True)
class RunPlan(ProfiledStep):
    """The code that a configuration names, and where its roles run."""

    algorithm: AlgorithmSpec | None
    """How samples become a gradient; None for soft actor-critic, which learns from single transitions, and for runs on
    given texts."""
    kinds: tuple[RoleKind, ...]
    """The roles that there are, in order of their work."""
    placed: Placed
    """Where each role runs."""
    chosen: Choice | None
    """The planner's choice, where there was a profile to plan from."""
    held: Mapping[str, tuple[int, int]]
    """By role: bytes on each of its devices while it is loaded, and while it is parked, by its model's shape. Empty for
    policies that act: how large they are only their simulator tells."""
    model_config: Any = None
    """A language model's, from transformers."""
    objects: InMemory = InMemory()
    """Objects that were passed instead of being named."""
    callbacks: Callbacks = field(default_factory=Callbacks)
    """The user's, called as the run goes on."""
    became: tuple[str, ...] = ()
    """Lines about the values of what was left to the devices."""
    warnings: tuple[str, ...] = ()
    """Lines about roles that may run out of memory, and about a CPU's precision."""
    config: Any = None
    """The configuration with these values; None of a policy that acts, which leaves nothing to them."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines on devices, for the beginning of a run; that a CPU has the defaults of CPUs is no news."""
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


def _placing(config: RunConfig) -> Placing:
    """The section `placement`; without engines of its own the rollout only shares work out, on the first host."""
    return config.placement if config.rollout.own_engine else replace(config.placement, rollout=None)


def prepare_text(config: RunConfig, hosts: int, objects: InMemory) -> RunPlan:
    from rlinf.agents.configuration import configured_agent, configured_player

    algorithm = algorithm_from(config.algorithm.name, lambda: algorithm_of(config, objects.parts))
    path = config.flow or flow_of(algorithm, with_agent=bool(config.agent.function or objects.agent))
    if objects.flow is not None:
        path = f"{objects.flow.__module__}.{objects.flow.__qualname__}"
    needed = roles_of(config, algorithm)
    kinds = kinds_of(config, needed)
    flow = imported(path) if objects.flow is None else objects.flow
    algorithm = for_older_answers(algorithm, config) if works_ahead(flow) else algorithm
    algorithm = for_rounded_answers(algorithm, config)
    model, items = _described_text(config, algorithm), config.algorithm.prompts_per_step
    mistaken = (*mistakes_in_models(config), *mistakes_in_own(config, flow), *mistakes_ahead(config, flow))
    problems_so_far = [key_problem(*each) for each in mistaken]
    own = own_roles(config) if not problems_so_far else {}
    flow, own_flow = with_teachers(flow, config.named_teachers), flow
    staleness = config.staleness.max if works_ahead(own_flow) else 0
    step = ProfiledStep(flow=flow, path=path, model=model, items=items, staleness=staleness)
    placed, choice = planned(_placing(config), kinds, hosts, step, own)
    model_config, fitted, problems = _fitted(config, placed, needed, own_flow, problems_so_far)
    config = fitted.config
    problems = [
        *flow_problems(path, own_flow, (*ALWAYS, "session", *config.roles), collected(needed), OPTIONAL),
        *_algorithm_problems(config, algorithm),
        *_reward_problems(config.reward, objects.reward),
        *problems,
        *tracker_problems(config.metrics),
    ]
    problems += _engine_problems(config)
    agent, mistakes = configured_agent(config, own_flow, objects.agent)
    player, unplayed = configured_player(config, agent, objects.player)
    problems += [key_problem(*each) for each in (*mistakes, *unplayed)]
    callbacks = Callbacks.of((*config.callbacks, *objects.callbacks), problems)
    if problems:
        raise ConfigError(problems)
    objects = objects if agent is None else with_tasks(replace(objects, agent=agent, player=player), config)
    return RunPlan(
        **vars(step),
        algorithm=algorithm,
        kinds=kinds,
        placed=placed,
        chosen=choice,
        held=fitted.memory_by_role,
        model_config=model_config,
        objects=objects,
        callbacks=callbacks,
        became=fitted.became,
        warnings=fitted.warnings,
        config=config,
    )


def with_tasks(objects: InMemory, config: RunConfig) -> InMemory:
    """Rows that the agent brings, where the configuration names none.

    Args:
        objects: with the agent.
        config: of the run.
    """
    from rlinf.agents.configuration import brings_tasks, source_of
    from rlinf.data.datasets.source import ListRows

    agent = source_of(objects.agent)
    if not brings_tasks(agent) or objects.train is not None or config.data.train is not None:
        return objects
    key, value = ("agent", agent) if config.agent.function is None else ("agent.function", config.agent.function)
    named = objects.evaluation is not None or config.evaluation.data is not None
    with naming(key, value, "listing its tasks"):
        name = type(agent).__name__
        train = ListRows(f"tasks of {name}", agent.tasks())
        if named or not config.evaluation.problems:
            return replace(objects, train=train)
        held_out = agent.held_out()
        evaluated = ListRows(f"held-out tasks of {name}", held_out) if held_out else None
        return replace(objects, train=train, evaluation=evaluated)


def refuse_idle(placement: Placing, plan: RunPlan) -> None:
    """See that every process of a job has a role, unless idle ones are meant or a planner left them out.

    Args:
        placement: the section.
        plan: with where roles run.

    Raises:
        ConfigError: some have none.
    """
    idle, count = plan.placed.idle, plan.placed.devices
    if not idle or placement.idle_processes or plan.chosen is not None:
        return
    ranks = ", ".join(map(str, idle[:8])) + (", …" if len(idle) > 8 else "")
    started = f"start {idle[0]}" if idle == [*range(idle[0], count)] else "start fewer"
    advice = (
        f"{len(idle)} of {count} processes have no role ({ranks}) and would idle: {started}, give a role more "
        "in `placement` (mode=collocated: trainer and rollout get all), or set this to true"
    )
    raise ConfigError([key_problem("placement.idle_processes", False, advice)])


def algorithm_from(name: str, make: Callable[[], Spec]) -> Spec:
    try:
        return make()
    except ValueError as error:
        raise ConfigError([key_problem("algorithm", name, str(error))]) from error


def imported(path: str) -> Any:
    with naming("flow", path, "importing it"):
        return resolve(path)


def key_problem(key: str, value: Any, advice: str) -> Problem:
    return Problem("configuration", key, value, advice)


def _described_text(config: RunConfig, algorithm: AlgorithmSpec) -> str:
    shape = config.model.path or " ".join(f"{key}={value}" for key, value in sorted(config.model.config.items()))
    scored = "" if config.reward_model.path is None else f", scored by {config.reward_model.path}"
    answers = f"{config.algorithm.group_size} answers of {config.rollout.max_new_tokens} tokens"
    return f"{shape}, {answers}, {algorithm.name}{scored}"


# Placement -----------------------------------------------------------------------------------------------------------


def planned(
    wanted: Placing,
    kinds: Sequence[RoleKind],
    hosts: int,
    step: ProfiledStep,
    own: Mapping[str, Role] = MappingProxyType({}),
) -> tuple[Placed, Choice | None]:
    """Where roles run, and what the planner found where there is a profile to plan from.

    Args:
        wanted: the section `placement`.
        kinds: see `RunPlan`.
        hosts: number of processes of the job.
        step: what is rehearsed; there must not be a running event loop.
        own: roles of the user's own.

    Raises:
        ConfigError: with every reason why they cannot.
    """
    placed = _placed(wanted, kinds, hosts)
    if wanted.profile is None or wanted.plan is not None or hosts == 1:
        return placed, None
    from rlinf.placement.auto import choose  # the planner comes with it

    try:
        profile = load(Path(wanted.profile).expanduser())
        if problems := profile.mismatch(step.model, machine(), step.path):
            raise PlacementError(problems)
        choice = choose(
            profile,
            placed.fleet.by_kind(placed.memory_by_kind),
            step.flow,
            step.items,
            extrapolate=wanted.extrapolate,
            actors={name: role.actor for name, role in own.items()},
            staleness=step.staleness,
        ).numbered(placed.fleet)
    except OSError as error:
        advice = f"it cannot be read: {error.strerror or error}; a run leaves one in its directory"
        raise ConfigError([key_problem("placement.profile", wanted.profile, advice)]) from None
    except PlacementError as error:
        advices = (each.replace("allow extrapolation", "set placement.extrapolate=true") for each in error.complaints)
        raise ConfigError([key_problem("placement.profile", wanted.profile, each) for each in advices]) from None
    except ValueError as error:
        raise ConfigError([key_problem("placement.profile", wanted.profile, str(error))]) from None
    free = wanted.mode in (None, "auto")
    rows = [row for row in choice.best_of_modes if free or row.mode == wanted.mode]
    if not rows:
        there = ", ".join(f"{row.mode} ({row.seconds:.3g} s)" for row in choice.best_of_modes)
        advice = f"by {wanted.profile} there is no such plan that fits {hosts} devices; there is {there}: take that"
        if not wanted.extrapolate:
            advice += ", or set placement.extrapolate=true, to guess sizes that were not profiled"
        raise ConfigError([key_problem("placement.mode", wanted.mode, advice)])
    return placed_by(rows[0].plan, placed, kinds), choice


def _placed(wanted: Placing, kinds: Sequence[RoleKind], hosts: int) -> Placed:
    """Where roles run without a profile."""
    gpus, own = torch.cuda.device_count(), own_device().index
    gpu_memory = None if own is None else int(_FILLED * torch.cuda.get_device_properties(own).total_memory)
    try:
        return place(wanted, kinds, hosts, gpu_memory=gpu_memory, gpus=gpus)
    except TooFewGpus as error:
        raise InputError(str(error)) from None
    except PlacementError as error:
        complaints = (split_complaint(complaint) for complaint in error.complaints)
        values = ((key, getattr(wanted, key.rpartition(".")[2], MISSING), advice) for key, advice in complaints)
        raise ConfigError([key_problem(*each) for each in values]) from None


def flow_problems(path: str, flow: Any, *roles: Sequence[str]) -> Iterator[Problem]:
    return (key_problem("flow", path, advice) for advice in mistakes_in_flow(flow, *roles))


# What does not go together -------------------------------------------------------------------------------------------


def _engine_problems(config: RunConfig) -> Iterator[Problem]:
    """Keys of the rollout that its engine cannot do."""
    from rlinf.engines import base as engines

    rollout, on_cpu = config.rollout, device_kind(config.placement) == "cpu"
    lacks = engines.lacking(rollout.engine, rollout.engine_args)
    if lacks is not None and rollout.own_engine and not elsewhere(config.placement):  # else it is not made here
        yield key_problem("rollout.engine", rollout.engine, lacks)
    unrounded = engines.no_rounding(rollout.engine, rollout.weights, on_cpu)
    if rollout.weights != "full" and unrounded is not None:
        yield key_problem("rollout.weights", rollout.weights, unrounded)
    if rollout.drafts and (why := engines.no_drafts(rollout.engine)) is not None:
        yield key_problem("rollout.drafts", rollout.drafts, why)
    if (other := engines.unable(rollout.engine, config.staleness.kv)) is not None:
        yield key_problem("staleness.kv", config.staleness.kv, other)


def _algorithm_problems(config: RunConfig, algorithm: AlgorithmSpec) -> Iterator[Problem]:
    size = config.algorithm.group_size
    if algorithm.compares_within_groups and size < 2:
        advice = f"{algorithm.name} compares answers to one prompt with each other, so it needs at least 2"
        yield key_problem("algorithm.group_size", size, advice)
    inside = config.reference.inside
    key = "reference.kind" if config.reference.adapter is None else "reference.adapter"
    if inside and not algorithm.needs_reference:
        yield key_problem(key, inside, f"{algorithm.name} holds on to no reference")
    if inside and algorithm.critic is not None and algorithm.kl is not None and algorithm.kl.place == "reward":
        advice = (
            "the critic needs the penalty too, and the trainer alone has the adapters; take frozen, or kl.place=loss"
        )
        yield key_problem(key, inside, advice)
    yield from _teacher_problems(config, algorithm)
    for key, model in (
        ("critic.model", config.critic.model),
        ("reference.model", config.reference.model),
        ("teacher.model", config.teacher.model),
        ("teacher.server.url", config.teacher.server.url),
    ):
        role = key.partition(".")[0]
        if model is not None and role not in roles_of(config, algorithm):
            yield key_problem(key, model, f"{algorithm.name} has no {role}; remove it")


def _teacher_problems(config: RunConfig, algorithm: AlgorithmSpec) -> Iterator[Problem]:
    """Problems of a teacher, or of several."""
    teacher, named = config.teacher, {f"teachers.{name}": each for name, each in config.teachers.items()}
    if named and not algorithm.needs_teacher:
        yield key_problem("teachers", ", ".join(config.teachers), f"{algorithm.name} has no teacher; remove them")
    taught = teacher.model is not None or teacher.adapter is not None or teacher.server.url is not None or named
    if algorithm.needs_teacher and not taught:
        advice = f"{algorithm.name} learns from a teacher; name a saved model"
        yield key_problem("teacher.model", None, advice)
    part = algorithm.loss
    if not isinstance(part, Divergence):
        return
    if not isinstance(algorithm.advantage, Distillation):
        advice = "the loss `divergence` learns from no advantage: take algorithm=opd, whose advantage is `distillation`"
        yield key_problem("algorithm.advantage", config.algorithm.advantage, advice)
    if teacher.adapter is not None:
        advice = "adapters tell log-probs of sampled tokens alone: take the loss of opd, or a teacher.model"
        yield key_problem("teacher.adapter", teacher.adapter, advice)
    if len(named) > 1 and teacher.route is None:
        advice = "distributions of several teachers are not mixed: name the column that says whose prompt it is"
        yield key_problem("teacher.route", None, advice)
    everyone: list[TeacherConfig | NamedTeacher] = [teacher, *config.named_teachers.values()]
    for key, each in zip(("teacher", *named), everyone, strict=True):
        if each.tokenizer is not None:
            advice = "other tokens have no distributions that could be compared: take the loss of opd"
            yield key_problem(f"{key}.tokenizer", each.tokenizer, advice)
        if each.server.url is not None and (part.top_k is None or each.server.dialect == "echo"):
            advice = (
                "a server tells no more than the likeliest tokens: set algorithm.loss.top_k, and dialect vllm or sglang"
            )
            yield key_problem(f"{key}.server.url", each.server.url, advice)
    if config.trainer.backend != "fsdp" or splits_whole(config.trainer):
        advice = f"{algorithm.name} needs trainer.backend=fsdp and a model that is not split over processes"
        yield key_problem("trainer.backend", config.trainer.backend, advice)


def _reward_problems(reward: RewardConfig, passed: RewardSource | None) -> Iterator[Problem]:
    from rlinf.rewards.base import Reward
    from rlinf.rewards.pool import NO_CHILDREN, runs_in_children

    source = passed or reward.source
    try:
        Reward.of(source, reward.args, make=False).ready()
    except RAISED as error:
        key = "reward.parts" if reward.parts else "reward.function"
        yield problem(key, reward.parts or reward.function, error)
        return
    if reward.join is not None and not runs_in_children(source, reward):
        yield key_problem("reward.join", reward.join, NO_CHILDREN)


def tracker_problems(metrics: TrackingConfig) -> Iterator[Problem]:
    wanted = wanted_trackers(tensorboard=metrics.tensorboard, wandb=metrics.wandb, swanlab=metrics.swanlab)
    for key, advice in missing(wanted):
        yield key_problem(key, getattr(metrics, key.partition(".")[2]), advice)


def _fitted(
    config: RunConfig, placed: Placed, roles: Sequence[str], flow: Any, found_so_far: Sequence[Problem] = ()
) -> tuple[Any, Fitted, list[Problem]]:
    """The transformers config of the model, what follows from the devices' memory, and what is wrong with either."""
    from rlinf.runs.dry_run.footprint import Fitted, fit
    from rlinf.runs.dry_run.models import other_models, policy_model, split_mistakes

    model_config, problems = policy_model(config)
    problems += [*other_models(config, roles), *found_so_far]
    if not problems:
        learning = [role for role in ("trainer", "critic") if role == "trainer" or role in roles]
        sizes = {role: len(placed.seats[role].hosts) for role in learning}
        problems += split_mistakes(config, model_config, sizes)
        if config.trainer.join is not None and (config.trainer.order == "free") != (sizes["trainer"] > 1):
            advice = (
                f"replicas that join (trainer.join) need free with a trainer of several processes, and any other with "
                f"one; it has {sizes['trainer']}"
            )
            problems.append(key_problem("trainer.order", config.trainer.order, advice))
    if problems:
        return model_config, Fitted(config), problems
    with naming("model", config.model.path or config.model.config, "estimating its memory"):
        fitted, problems = fit(config, model_config, placed, roles, flow)
    return model_config, fitted, problems


FLOWS = {
    SFT: "rlinf.flows.sft",
    DPO: "rlinf.flows.dpo",
    REWARD_MODEL: "rlinf.flows.reward_model",
}
"""The flow of each algorithm, where a configuration names none."""
TRAINER, REFERENCE = "trainer", "reference"
_UNREAD = ("reward", "sft", "rollout", "critic", "teacher", "task")
"""Sections that nothing reads in such a run; `task` where data are named."""
_READ_OF_EVALUATION = {"data", "split", "columns", "problems", "every"}
_READ_OF_ALGORITHM = {"name"}


def objective_of(config: RunConfig) -> Objective:
    """The loss that is learned by.

    Raises:
        ValueError: settings that do not go together.
    """
    from rlinf.training.supervised import Likelihood, Preference, Scores

    settings = config.supervised
    if config.algorithm.name == DPO:
        return Preference(settings.dpo.loss, settings.dpo.beta, settings.dpo.label_smoothing)
    return Scores(settings.reward_model.center) if config.algorithm.name == REWARD_MODEL else Likelihood()


def needed_roles(config: RunConfig) -> list[str]:
    """The roles besides the trainer."""
    reference = config.reference
    return [REFERENCE] if config.algorithm.name == DPO and reference.kind == "frozen" and not reference.inside else []


def prepare_supervised(config: RunConfig, hosts: int, objects: InMemory) -> RunPlan:
    """Import what a configuration names, and check what only that can show; see `start.prepare`.

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
        *flow_problems(path, flow, (TRAINER,), needed, (REFERENCE,)),
        *tracker_problems(config.metrics),
    ]
    callbacks = Callbacks.of((*config.callbacks, *objects.callbacks), problems)
    if problems:
        raise ConfigError(problems)
    kinds = tuple(kind for kind in TEXT if kind.name in (TRAINER, *needed))
    shape = config.model.path or " ".join(f"{key}={value}" for key, value in sorted(config.model.config.items()))
    model, items = f"{shape}, {config.algorithm.name}", config.supervised.batch_size
    step = ProfiledStep(flow=flow, path=path, model=model, items=items)
    placed, choice = planned(config.placement, kinds, hosts, step)
    model_config, fitted, problems = _fitted(config, placed, needed, flow)
    if problems:
        raise ConfigError(problems)
    return RunPlan(
        **vars(step),
        algorithm=None,
        kinds=kinds,
        placed=placed,
        chosen=choice,
        held=fitted.memory_by_role,
        model_config=model_config,
        objects=objects,
        callbacks=callbacks,
        became=fitted.became,
        warnings=fitted.warnings,
        config=fitted.config,
    )


def problems_of(config: RunConfig, *, own: bool) -> Iterator[Problem]:
    """Keys that may not be together in a run on given texts.

    Args:
        config: of it.
        own: it learns from data of the user's, and not from the generated task.
    """
    name = config.algorithm.name
    try:
        objective_of(config)
    except ValueError as error:
        yield key_problem("supervised.dpo.label_smoothing", config.supervised.dpo.label_smoothing, str(error))
    blank = type(config)()
    for section in _UNREAD:
        if getattr(config, section) != getattr(blank, section) and (section != "task" or own):
            yield from _unread(section, getattr(config, section), getattr(blank, section), set(), name)
    yield from _unread("algorithm", config.algorithm, blank.algorithm, _READ_OF_ALGORITHM, name)
    yield from _unread("evaluation", config.evaluation, blank.evaluation, _READ_OF_EVALUATION, name)
    unread = {"template", "max_prompt_tokens"}
    yield from _unread("data", config.data, blank.data, {each.name for each in fields(config.data)} - unread, name)
    keys = {"batch_size", "epochs", "max_tokens"} | ({"dpo"} if name == DPO else set())
    keys |= {"reward_model"} if name == REWARD_MODEL else {"learn"}
    yield from _unread("supervised", config.supervised, blank.supervised, keys, name)
    kind = config.reference.kind
    if name != DPO and config.reference != blank.reference:
        yield from _unread("reference", config.reference, blank.reference, set(), name)
    elif kind == "ema":
        yield key_problem("reference.kind", kind, "dpo holds on to a policy that stays; take frozen, or adapters_off")
    elif kind == "precomputed" and not own:
        yield key_problem("reference.kind", kind, "the generated task has no log-probs of a reference; take frozen")
    if config.placement.profile is not None or config.placement.mode == "auto":
        key = "profile" if config.placement.profile is not None else "mode"
        advice = "there is nothing to plan without generation: remove it"
        yield key_problem(f"placement.{key}", getattr(config.placement, key), advice)


def _unread(section: str, values: Any, blank: Any, read_keys: set[str], algorithm: str) -> Iterator[Problem]:
    """Keys of a section that were set, and that nothing reads."""
    for each in fields(values):
        value = getattr(values, each.name)
        if each.name not in read_keys and value != getattr(blank, each.name):
            yield key_problem(f"{section}.{each.name}", value, f"algorithm {algorithm} does not read it: remove it")
