"""Plans and builds the roles of a run of a policy that acts: simulators, the policy that fits them, and its trainer.

In: an `EmbodiedConfig`. Out: the run's `RunPlan`, or every mistake that only importing shows; and running roles.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch

from rlinf.actors.env import EnvActor, WorldActor
from rlinf.actors.off_policy_trainer import DaggerTrainer, SacTrainer
from rlinf.actors.policy import DaggerPolicy, PolicyActor
from rlinf.actors.policy_trainer import ImitationTrainer, PolicyTrainer
from rlinf.actors.world_trainer import WorldTrainer
from rlinf.algos import recipes
from rlinf.algos.algorithms import AlgorithmSpec, Gae, GroupRelative
from rlinf.config.embodied import DAGGER, IMITATION, OFF_POLICY, EmbodiedConfig, EnvConfig, EvalSuite
from rlinf.config.importing import resolve
from rlinf.config.load import ConfigError, InputError
from rlinf.data.step import works_ahead
from rlinf.envs.base import CannotSimulate
from rlinf.envs.interventions import Overridable, mistake_in_intervener
from rlinf.envs.learned import ENSEMBLE, fitted_world, make_world
from rlinf.envs.video import Recording
from rlinf.envs.workers import EnvironmentLost
from rlinf.envs.wrappers import Mixture, Scored
from rlinf.models.policy.build import build_policy_model, configured, fitted
from rlinf.models.policy.sac import CHOICES
from rlinf.placement.seats import CONTROL, INSIDE, Placed
from rlinf.runs import prepare
from rlinf.runs.callbacks import Callbacks
from rlinf.runs.dry_run.embodied import (
    check_memory,
    horizon_mistake,
    horizon_warning,
    shapes_of,
    shown_of,
    statistics_settings,
    unusable,
)
from rlinf.runs.dry_run.footprint import control_footprints
from rlinf.runs.prepare import RunPlan
from rlinf.runs.roles import Role, Roles, spawn_roles
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.processes.supervisor import ChildDied
from rlinf.runtime.system.system import ActorSystem
from rlinf.training.embodied.ppo import Preparation

logger = logging.getLogger(__name__)
TRIALS = "trials"
VIDEOS = "videos"
NEW = ".new"
"""Where videos are written until their trials are over."""
_UNUSABLE = (CannotSimulate, ChildDied, EnvironmentLost, OSError, ImportError, TypeError, UserError, ValueError)
"""Errors of simulators and policies that cannot be made, or do not fit together."""
_ERROR = re.compile(r"[\w.]*(?:Error|Missing\w+|CannotSimulate): (.+)")
"""The last line of a traceback."""


def acting_flow_of(config: EmbodiedConfig) -> str:
    """Dotted path of the flow of a run in which a policy acts: the one it names, or its algorithm's."""
    usual = {**dict.fromkeys(OFF_POLICY, "rlinf.flows.sac"), IMITATION: "rlinf.flows.imitate.imitation"}
    if config.world.model is not None:
        return config.flow or "rlinf.flows.embodied.model_based"
    return config.flow or usual.get(config.algorithm.name, "rlinf.flows.embodied")


def control_algorithm_of(config: EmbodiedConfig) -> AlgorithmSpec | None:
    """The algorithm of a run in which a policy acts; None if it learns from single transitions or from an expert.

    Raises:
        ValueError: no recipe, part or key of that name (the text gives the nearest), or a bad value.
    """
    algorithm = config.algorithm
    if algorithm.name in (*OFF_POLICY, DAGGER, IMITATION):
        return None
    places = ("advantage", "loss", "aggregation", "entropy_bonus", "critic")
    values = {place: getattr(algorithm, place) for place in places}
    changes = {place: value for place, value in values.items() if value != prepare.AS_IN_THE_RECIPE.get(place, {})}
    return recipes.get(algorithm.name, changes, resolve=prepare.imported_part, acting=True)


def mistakes_acting(config: EmbodiedConfig, algorithm: AlgorithmSpec | None) -> Iterator[tuple[str, Any, str]]:
    """(key, value, advice) for what the algorithm of a run that acts cannot do, or makes nothing of.

    Args:
        config: of the run.
        algorithm: None for sac and its like, dagger and imitation.
    """
    wanted = config.algorithm
    if algorithm is not None and isinstance(algorithm.advantage, GroupRelative) and not config.env.fresh:
        advice = f"{algorithm.name} compares episodes that begin alike with the step: set env.fresh=true"
        yield "env.fresh", "false", advice
    if algorithm is None:
        return  # `embodied.keys` says which keys its like reads
    if wanted.reward_scaling and not isinstance(algorithm.advantage, Gae):
        yield "algorithm.reward_scaling", True, f"{wanted.name} has no values whose scale would matter: remove it"
    for name in ("filter_returns", "filter_success"):
        if (bounds := getattr(wanted, name)) is None:
            continue
        if not isinstance(algorithm.advantage, GroupRelative):
            yield f"algorithm.{name}", bounds, f"{wanted.name} has no groups to choose from: take grpo, or remove it"
        elif bounds[0] > bounds[1]:
            yield f"algorithm.{name}", bounds, "the first bound is the lower one"
    if wanted.entropy_schedule != "constant" and not algorithm.entropy_bonus:
        advice = "there is no entropy bonus that could fall: set algorithm.entropy_bonus, or remove it"
        yield "algorithm.entropy_schedule", wanted.entropy_schedule, advice


def prepare_embodied(config: EmbodiedConfig, hosts: int) -> RunPlan:
    """Import what a configuration names, and check what only that can show; see `start.prepare`.

    Raises:
        ConfigError: with every mistake.
    """
    from rlinf.flows.sac import sac

    algorithm = prepare.algorithm_from(config.algorithm.name, lambda: control_algorithm_of(config))
    path = acting_flow_of(config)
    flow, model, items = prepare.imported(path), _described(config), config.env.num_envs
    kinds = CONTROL if config.world.model is None else INSIDE
    inside = [kind.name for kind in INSIDE if kind not in CONTROL]
    needed = () if kinds is CONTROL else inside
    in_flow = prepare.flow_problems(path, flow, tuple(kind.name for kind in CONTROL), needed, inside)
    problems = [*in_flow, *unusable(config), *prepare.tracker_problems(config.metrics)]
    problems += [prepare.key_problem(*each) for each in mistakes_acting(config, algorithm)]
    if config.placement.mode == "auto" and flow is sac and algorithm is None:
        advice = "roles cannot move while something for the next step is under way: name a mode, or take another flow"
        problems.append(prepare.key_problem("placement.mode", "auto", advice))
    callbacks = Callbacks.of(config.callbacks, problems)
    if problems:
        raise ConfigError(problems)
    staleness = config.algorithm.staleness if works_ahead(flow) else 0
    step = prepare.ProfiledStep(flow=flow, path=path, model=model, items=items, staleness=staleness)
    placed, choice = prepare.planned(config.placement, kinds, hosts, step)
    check_memory(config, placed)
    return RunPlan(
        **vars(step), algorithm=algorithm, kinds=kinds, placed=placed, chosen=choice, held={}, callbacks=callbacks
    )


def _described(config: EmbodiedConfig) -> str:
    env, policy = config.env, config.policy
    settings = " ".join(f"{key}={value}" for key, value in sorted({**env.options, **policy.settings}.items()))
    world = config.world
    learned = "" if world.model is None else f", {world.steps} x {world.horizon} decisions in {world.model}"
    return f"{policy.type} in {env.simulator} {settings}, {policy.horizon} decisions in {env.slices} slices{learned}"


async def start_roles(
    system: ActorSystem, config: EmbodiedConfig, plan: RunPlan | None, placed: Placed, videos: Path | None
) -> Roles:
    """Start the simulators, then the policy that fits them.

    Args:
        system: where.
        config: what.
        plan: the code that the configuration names; None starts only what trials need.
        placed: on which hosts and devices.
        videos: directory in which those of trials are kept; None for none.

    Raises:
        InputError: the simulator or the policy cannot be made, or they do not fit.
    """
    simulators = {}
    if plan is not None and config.algorithm.name != IMITATION:
        simulation = _overridable(config.env, _simulation(config, config.env.options))
        simulators["env"] = Role(EnvActor, {**simulation, **_env(config)})
    hosts = placed.seats["env"].hosts[:1]
    keys = ["env.simulator", "env.options", *(["env.intervener"] if config.env.intervener is not None else [])]
    for name, suite in config.eval_suites.items():
        settings = {**_simulation(config, suite.options), **_trials(config, name, suite, videos)}
        simulators[role_of(name)] = Role(EnvActor, settings, hosts=hosts)
        key = f"trials.suites.{name}" if name else "trials.options"
        keys += [key] if name or config.trials.options else []
    with _input_errors(", ".join(keys)):
        roles = await spawn_roles(system, placed, simulators)
        await _check_alike(roles)
        first = await next(iter(roles.values()))[0].reset(0, 0)
    with _input_errors("policy" if config.policy.path is None else "policy.path, policy"):
        roles |= await spawn_roles(system, placed, await learners_of(config, plan, roles))
        # one decision: a policy that looks at what there is not says so here
        await roles["policy"][0].act((0, 0), first, keep=False)
    if plan is not None and config.algorithm.name == DAGGER and config.dagger.expert is not None:
        with _input_errors("dagger.expert"):
            await roles["policy"][0].ask(first)
    return roles


def role_of(suite: str) -> str:
    """Name of the role that has a suite's simulators."""
    return f"{TRIALS}_{suite}" if suite else TRIALS


async def _check_alike(simulators: Roles) -> None:
    """Refuse suites that one policy could not be tried in.

    Raises:
        ValueError: they do not show the same, or do not take the same actions.
    """
    by_role = {role: await group[0].shapes() for role, group in simulators.items()}
    (first, wanted), *others = by_role.items()
    for role, shapes in others:
        for what in ("shapes", "action_size"):
            if shapes[what] != wanted[what]:
                raise ValueError(f"{role} has {what} {shapes[what]}, and {first} has {wanted[what]}: one policy acts")


@contextmanager
def _input_errors(keys: str) -> Iterator[None]:
    """Turns the error of something that cannot be made into an `InputError` that names these keys."""
    try:
        yield
    except _UNUSABLE as error:
        raise InputError(f"{keys}: {_cause(error)}") from error


async def learners_of(config: EmbodiedConfig, plan: RunPlan | None, simulators: Roles) -> dict[str, Role]:
    """The roles that have a policy, ready to be started: who acts, and who trains.

    Args:
        config, plan: as for `start_roles`.
        simulators: running; the policy is fitted to what they show.
    """
    alone = config.algorithm.name == IMITATION
    if alone and not config.trials.episodes:
        shapes = await asyncio.to_thread(shapes_of, config.imitation)
    else:
        shapes = await next(iter(simulators.values()))[0].shapes()
        _check_limit(config, shapes["max_steps"])
    options = config.policy_settings
    sizes = (shapes[name] for name in ("shapes", "action_size", "choices", "bounds"))
    policy = await asyncio.to_thread(fitted, options, *sizes)
    if policy.get("gripper"):
        _check_gripper(shapes["choices"], shapes["bounds"])
    if plan is not None and config.imitation.statistics is not None:
        with _input_errors("imitation"):
            policy |= await asyncio.to_thread(
                statistics_settings, config.imitation, config.seed, policy, config.policy.path
            )
    model: dict[str, Any] = {"policy": {"seed": config.seed, **policy}, "path": config.policy.path}
    acting = {**model, "dtype": config.policy.dtype, "adapters": config.policy.lora.path}
    ranks = 1 if plan is None else len(plan.placed.seats["trainer"].hosts)
    chunk, memory = await asyncio.to_thread(_sized, config, model, ranks)  # it may import what takes seconds
    if plan is not None and not alone:
        _check_horizon(config, shapes["max_steps"], chunk)
    if plan is None:
        return {"policy": Role(PolicyActor, acting, memory["policy"])}
    worlds: dict[str, Role] = {}
    if config.world.model is not None:
        with _input_errors("world.model, world.settings, world.demonstrations"):
            worlds = await asyncio.to_thread(_worlds, config, shapes)
    if config.algorithm.name in (*OFF_POLICY, DAGGER):
        return _remembering(config, model, memory, optimizer(config)) | worlds
    if alone:
        names = ("lr", "betas", "weight_decay", "grad_clip", "schedule", "warmup_steps", "min_lr_ratio")
        settings = {name: value for name, value in optimizer(config).items() if name in names}
        settings |= {
            **config.policy.preparation,
            "total_steps": max(1, config.steps),
            "demonstrations": shown_of(config.imitation),
        }
        settings |= {"micro_batch": config.algorithm.micro_batch, "batch": config.imitation.batch}
        settings["delta"] = config.weights.delta
        trainer = Role(ImitationTrainer, {"seed": config.seed, **model, **settings}, memory["trainer"])
        acts = {"policy": Role(PolicyActor, acting, memory["policy"])} if config.trials.episodes else {}
        return {**acts, "trainer": trainer}
    settings = _trainer(config, cast(AlgorithmSpec, plan.algorithm))
    return {
        "policy": Role(PolicyActor, {**acting, "keep_following": bool(worlds)}, memory["policy"]),
        "trainer": Role(PolicyTrainer, {"seed": config.seed, **model, **settings}, memory["trainer"]),
        **worlds,
    }


def _check_gripper(choices: tuple[int, ...] | None, bounds: tuple[Sequence[float], Sequence[float]]) -> None:
    """Refuse a gripper that cannot be told to close, to stay and to open.

    Args:
        choices, bounds: of an action's numbers, as `EnvActor.shapes` has them.

    Raises:
        InputError: it cannot.
    """
    low, high = (bound[-1] for bound in bounds)
    if choices is not None and choices[-1] != CHOICES:
        fault = f"which is one of {choices[-1]} choices"
    elif choices is None and not (math.isfinite(low) and math.isfinite(high)):
        fault = f"which goes from {low:g} to {high:g}"
    else:
        return
    raise InputError(
        f"policy.settings.gripper: a gripper closes at the least, stays in the middle and opens at the greatest of the "
        f"last number of an action, {fault}: remove it"
    )


def _worlds(config: EmbodiedConfig, shapes: Mapping[str, Any]) -> dict[str, Role]:
    """The environments inside a world model, and who teaches it.

    Args:
        config: of the run, with a world model.
        shapes: of the environments, as `EnvActor.shapes` has them.

    Raises:
        ValueError: the model cannot be made, or cannot show what they show.
    """
    wanted = config.world
    path, settings = fitted_world(wanted.model, wanted.settings, shapes["shapes"], shapes["action_size"])
    settings = {"seed": config.seed, **settings} if path == ENSEMBLE else settings
    with torch.device("meta"):
        weights = sum(tensor.nbytes for tensor in make_world(path, settings).state_dict().values())
    model: dict[str, Any] = {"model": path, "world": settings}
    inside = {
        **model,
        "choices": shapes["choices"],
        "num_envs": wanted.num_envs,
        "group_size": config.env.group_size,
        "max_steps": wanted.horizon,
        "chunks": wanted.horizon,
        "seed": config.seed + (2 << 32),  # other draws than outside
    }
    fitting = {name: getattr(wanted, name) for name in ("updates", "batch", "lr", "demonstrations")}
    return {
        "world_trainer": Role(WorldTrainer, {**model, "seed": config.seed, **fitting}, (4 * weights, 0)),  # as by AdamW
        "world": Role(WorldActor, inside, (weights, 0)),
    }


def _remembering(
    config: EmbodiedConfig,
    policy: Mapping[str, Any],
    memory: Mapping[str, tuple[int, int]],
    optimizer: Mapping[str, Any],
) -> dict[str, Role]:
    """The policy that acts, and the trainer of a run that learns from a replay buffer or from an expert.

    Args:
        config: of the run.
        policy: what both are made with: the policy's configuration and path.
        memory: bytes that each role holds, active and parked.
        optimizer: settings of the optimizer.
    """
    name = config.algorithm.name
    settings = {key: value for key, value in asdict(config.off_policy).items() if config.reads("off_policy", key)}
    settings.pop("offline_steps", None)  # the loop's
    rates = {key: value for key, value in optimizer.items() if config.reads("optimizer", key)}
    common = {"seed": config.seed, "delta": config.weights.delta, **policy, **rates, **settings}
    if name == DAGGER:
        expert = asdict(config.dagger)
        common |= {"updates": expert.pop("updates"), "corrections": config.dagger.expert is None}
        return {
            "policy": Role(DaggerPolicy, {**policy, **expert}, memory["policy"]),
            "trainer": Role(DaggerTrainer, common, memory["trainer"]),
        }
    return {
        "policy": Role(PolicyActor, {**policy, "keep_following": True}, memory["policy"]),
        "trainer": Role(SacTrainer, {**common, "algorithm": name}, memory["trainer"]),
    }


def _sized(config: EmbodiedConfig, policy: Mapping[str, Any], ranks: int) -> tuple[int, dict[str, tuple[int, int]]]:
    """Actions of the policy's chunk, and the bytes that each role holds, active and parked. Blocking.

    Args:
        config: of the run.
        policy: the policy's configuration and path.
        ranks: of the trainer.
    """
    path, options = policy["path"], policy["policy"]
    with torch.device("meta"):
        model = build_policy_model(options if path is None else configured(options, Path(path).expanduser()))
    targets = config.has_targets
    footprints = control_footprints(model, Preparation(**config.policy.preparation), ranks=ranks, targets=targets)
    memory = {role: (each.active_bytes, each.parked_bytes) for role, each in footprints.items()}
    return model.config.chunk, memory


def _check_limit(config: EmbodiedConfig, limit: int | None) -> None:
    """Warn if trials, which are played to the end, may never end.

    Args:
        config: of the run.
        limit: steps of an episode at most; None for no limit.
    """
    if config.trials.episodes and limit is None:
        logger.warning(
            "env.max_steps: %s has no limit of its own and none is set, so an episode that does not end by itself is "
            "tried for ever; set env.max_steps to the most steps that an episode may take",
            config.env.options.get("id", config.env.simulator),
        )


def _check_horizon(config: EmbodiedConfig, limit: int | None, chunk: int) -> None:
    """Warn if episodes may last longer than a step of the flow, and begin anew with the next: those do not count.

    Args:
        config: of the run.
        limit: steps of an episode at most; None for no limit.
        chunk: actions of each decision.

    Raises:
        InputError: no episode could ever end.
    """
    if (advice := horizon_mistake(config, limit, chunk)) is not None:
        raise InputError(f"policy.horizon = {config.policy.horizon}: {advice}")
    if (warning := horizon_warning(config, limit, chunk)) is not None:
        logger.warning(warning)


def _cause(error: Exception) -> str:
    """The cause for which a simulator or a policy cannot be made: in a worker's last words, the error itself."""
    words = error.output if isinstance(error, ChildDied) else ()
    messages = [match[1] for line in words if (match := _ERROR.match(line.strip()))]
    return messages[-1] if messages else str(error)


def _simulation(config: EmbodiedConfig, options: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that simulators for training and for trials have in common.

    Args:
        config: of the run.
        options: of the simulator.
    """
    env = config.env
    simulator, arguments = env.simulator, dict(options)
    if env.tasks:
        arguments = {"simulator": simulator, "options": arguments, "tasks": env.tasks}
        simulator = f"{Mixture.__module__}.{Mixture.__qualname__}"
    if env.reward is not None or env.success is not None or env.reward_scale != 1:
        functions = {"reward": env.reward, "success": env.success, "arguments": env.reward_args}
        how = {"scale": env.reward_scale, "ends": env.end_solved}
        arguments = {"simulator": simulator, "options": arguments, **functions, **how}
        simulator = f"{Scored.__module__}.{Scored.__qualname__}"
    names = ("max_steps", "ignore_terminations", "frame_stack", "step_timeout", "start_timeout")
    return {"simulator": simulator, "options": arguments, **{name: getattr(env, name) for name in names}}


def _overridable(env: EnvConfig, simulation: dict[str, Any]) -> dict[str, Any]:
    """Settings of simulators in which somebody can intervene, where one is named.

    Raises:
        InputError: nobody could.
    """
    if env.intervener is None:
        return simulation
    with _input_errors("env.intervener"):
        mistake = mistake_in_intervener(resolve(env.intervener), env.intervener_args, env.num_envs)
    if mistake is not None:
        raise InputError(f"env.intervener = {env.intervener}: {mistake}")
    arguments = {name: simulation[name] for name in ("simulator", "options")}
    arguments |= {"intervener": env.intervener, "arguments": env.intervener_args}
    return {**simulation, "simulator": f"{Overridable.__module__}.{Overridable.__qualname__}", "options": arguments}


def _env(config: EmbodiedConfig) -> dict[str, Any]:
    env = config.env
    own = {name: getattr(env, name) for name in ("num_envs", "workers", "slices", "group_size")}
    return {**own, "chunks": config.policy.horizon if env.fresh else None, "seed": config.seed}


def _trials(config: EmbodiedConfig, name: str, suite: EvalSuite, directory: Path | None) -> dict[str, Any]:
    workers = max(1, min(config.env.workers, suite.episodes))
    count = max(1, min(suite.episodes, config.env.num_envs) // workers) * workers
    records = config.trials.videos and directory is not None
    seed = config.seed if config.trials.seed is None else config.trials.seed
    return {
        "max_steps": suite.max_steps,
        "num_envs": count,
        "workers": workers if config.env.workers else 0,
        "auto_reset": False,
        "held_out": True,
        "seed": seed + (1 << 32),  # what policies draw differs from training, too
        "recording": Recording(str(Path(directory, NEW, name)), envs=()) if records and directory else None,
    }


def _trainer(config: EmbodiedConfig, algorithm: AlgorithmSpec) -> dict[str, Any]:
    chosen_of_it = config.algorithm
    return {
        **optimizer(config),
        **config.policy.preparation,
        "delta": config.weights.delta,
        "algorithm": algorithm,
        "epochs": chosen_of_it.epochs,
        "minibatch": chosen_of_it.minibatch,
        "micro_batch": chosen_of_it.micro_batch,
        "critic_warmup": chosen_of_it.critic_warmup,
        "kl_stop": chosen_of_it.kl_stop,
        "value_coef": chosen_of_it.value_coef,
        "entropy_schedule": chosen_of_it.entropy_schedule,
        "reward_scaling": chosen_of_it.reward_scaling,
        "filter_returns": chosen_of_it.filter_returns,
        "filter_success": chosen_of_it.filter_success,
        "total_steps": max(1, config.steps),
        "fresh": config.env.fresh,
        "group_size": config.env.group_size,
    }


def optimizer(config: EmbodiedConfig) -> dict[str, Any]:
    """Settings of the optimizer; those that are not set are the trainer's own."""
    return {name: value for name, value in asdict(config.optimizer).items() if value is not None}
