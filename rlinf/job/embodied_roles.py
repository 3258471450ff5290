"""The code that an embodied configuration names, and the roles that run it.

In: an `EmbodiedConfig`. Out: flow and algorithm; a handle per role, under the name by which a flow takes it.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rlinf.actors.env import EnvActor
from rlinf.actors.policy import PolicyActor
from rlinf.actors.policy_trainer import PolicyTrainer
from rlinf.actors.sac_trainer import SacTrainer
from rlinf.algos.parts import GroupRelative
from rlinf.algos.spec import AlgorithmSpec
from rlinf.config.embodied import ROLES, SAC, EmbodiedConfig
from rlinf.config.importing import resolve
from rlinf.config.loading import ConfigError, InputError, Problem
from rlinf.envs.base import CannotSimulate
from rlinf.envs.video import Recording
from rlinf.flows.embodied_async import embodied_async
from rlinf.flows.sac import sac
from rlinf.job.algorithm import control_algorithm_of
from rlinf.job.memory import control_footprints
from rlinf.job.prepare import planned_or_refused
from rlinf.models.policy.build import build_policy_model, fitted
from rlinf.placement.auto.choose import Chosen
from rlinf.placement.seats import CONTROL, Placed, place
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.processes.supervisor import ChildDied
from rlinf.runtime.system.handles import ActorGroup
from rlinf.runtime.system.system import ActorSystem

Roles = dict[str, ActorGroup]
"""`env`, `policy`, `trainer`, and `trials` where there are any."""
TRIALS = "trials"
NEW = ".new"
"""Where videos are written until their trials are over."""
_ERROR = re.compile(r"[\w.]*(?:Error|Missing\w+|CannotSimulate): (.+)")
"""The last line of a traceback."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """The code that a configuration names."""

    flow: Callable[..., Awaitable[Mapping[str, float]]]
    """One step."""
    path: str
    """Its dotted path."""
    algorithm: AlgorithmSpec | None
    """How trajectories become a gradient; None for soft actor-critic, which learns from single transitions."""
    placed: Placed
    """Where each role runs."""
    chosen: Chosen | None
    """What the planner found, where there was a profile to plan from."""


def prepared(config: EmbodiedConfig, hosts: int = 1) -> Prepared:
    """Import what a configuration names.

    Args:
        config: that is right by itself.
        hosts: number of processes of the job.

    Raises:
        ConfigError: an algorithm or a flow that cannot be had, or a placement that cannot be.
    """
    algorithm = None
    if config.algorithm.name != SAC:
        try:
            algorithm = control_algorithm_of(config)
        except ValueError as error:
            raise ConfigError([Problem("configuration", "algorithm", config.algorithm.name, str(error))]) from error
        if isinstance(algorithm.advantage, GroupRelative) and not config.env.fresh:
            advice = f"{algorithm.name} compares episodes that begin alike with the step: set env.fresh=true"
            raise ConfigError([Problem("configuration", "env.fresh", "false", advice)])
    path = config.flow or ("rlinf.flows.embodied" if algorithm is not None else "rlinf.flows.sac")
    flow = resolve(path)
    for name, parameter in inspect.signature(flow).parameters.items():
        if name not in ("step", *ROLES) and parameter.default is parameter.empty:
            advice = f"it takes {name}, which there is not; a flow may take step, {', '.join(ROLES)}"
            raise ConfigError([Problem("configuration", "flow", path, advice)])
    if config.placement.mode == "auto" and (algorithm is None or config.algorithm.staleness) and _crosses(flow):
        advice = "roles cannot move while something for the next step is under way: name a mode, or take another flow"
        raise ConfigError([Problem("configuration", "placement.mode", "auto", advice)])
    placed, chosen = planned_or_refused(
        config.placement, CONTROL, hosts, flow=flow, path=path, model=described(config), items=config.env.num_envs
    )
    return Prepared(flow, path, algorithm, placed, chosen)


def described(config: EmbodiedConfig) -> str:
    """What a profile of this run is of: the simulator, the policy, and all else that changes what an item costs."""
    env, policy = config.env, config.policy
    settings = " ".join(f"{key}={value}" for key, value in sorted({**env.options, **policy.settings}.items()))
    return f"{policy.type} in {env.simulator} {settings}, {policy.horizon} decisions in {env.slices} slices"


def _crosses(flow: Callable[..., Any]) -> bool:
    """Whether a flow of ours has something under way between two steps."""
    return flow in (embodied_async, sac)


async def spawn_roles(system: ActorSystem, config: EmbodiedConfig, code: Prepared | None, videos: Path | None) -> Roles:
    """Start the simulators, then the policy that fits them.

    Args:
        system: where.
        config: what.
        code: of `prepared`; None starts only what trials need.
        videos: directory in which those of trials are kept; None for none.

    Raises:
        InputError: the simulator or the policy cannot be made, or they do not fit.
    """
    if code is not None:
        placed = code.placed
    else:  # a mode or a plan is for training: in trials nobody else is on a device
        placed = place(replace(config.placement, mode=None, plan=None), CONTROL[:2], system.hosts)
    env = config.env
    shared: dict[str, Any] = {
        "simulator": env.simulator,
        "options": env.options,
        "max_steps": env.max_steps,
        "ignore_terminations": env.ignore_terminations,
        "step_timeout": env.step_timeout,
        "start_timeout": env.start_timeout,
    }
    spawning = {}
    if code is not None:
        own = {name: getattr(env, name) for name in ("num_envs", "workers", "slices", "group_size")}
        own["chunks"] = config.policy.horizon if env.fresh else None
        spawning["env"] = system.spawn(
            EnvActor, name="env", seed=config.seed, **placed.spawning("env"), **shared, **own
        )
    if config.trials.episodes:
        spawning[TRIALS] = system.spawn(
            EnvActor, hosts=placed.seats["env"].hosts[:1], name=TRIALS, **{**shared, **_trials(config, videos)}
        )
    try:
        roles = await _together(spawning)
        learners = await spawn_learners(system, config, code, placed, roles)
        # one decision: a policy that looks at what there is not says so here
        await learners["policy"][0].act((0, 0), await next(iter(roles.values()))[0].reset(0, 0), keep=False)
        return {**roles, **learners}
    except (CannotSimulate, ChildDied, FileNotFoundError, ImportError, TypeError, UserError, ValueError) as error:
        raise InputError(f"env, policy: {_cause(error)}") from error


async def spawn_learners(
    system: ActorSystem,
    config: EmbodiedConfig,
    code: Prepared | None,
    placed: Placed,
    simulators: Roles,
    only: Collection[str] = ("policy", "trainer"),
) -> Roles:
    """Start what has a policy: who acts, and who trains.

    Args:
        system, config, code: see `spawn_roles`.
        placed: where.
        simulators: running; the policy is fitted to what they show.
        only: the roles to start.
    """
    shapes = await next(iter(simulators.values()))[0].shapes()
    off_policy = config.algorithm.name == SAC
    kind = config.policy.type or ("soft" if off_policy else "mlp")
    policy = fitted({"type": kind, **config.policy.settings}, shapes["shapes"], shapes["action_size"])
    made: dict[str, Any] = {"policy": {"seed": config.seed, **policy}, "path": config.policy.path}
    with torch.device("meta"):
        held = control_footprints(build_policy_model(made["policy"]), targets=off_policy)
    where = {
        role: placed.spawning(role, held[role].active_bytes, held[role].parked_bytes) for role in only if role in held
    }
    learning = {}
    if "policy" in only:
        following = off_policy and code is not None
        learning["policy"] = system.spawn(
            PolicyActor, name="policy", keep_following=following, **where["policy"], **made
        )
    if "trainer" in only and code is not None:
        training = SacTrainer if off_policy else PolicyTrainer
        settings = _off_policy(config) if code.algorithm is None else _trainer(config, code.algorithm)
        learning["trainer"] = system.spawn(
            training, name="trainer", seed=config.seed, **where["trainer"], **made, **settings
        )
    return await _together(learning)


async def _together(spawning: Mapping[str, Coroutine[Any, Any, ActorGroup]]) -> Roles:
    """All at once; when one cannot be started, the others are given up before its error goes on."""
    tasks = [asyncio.create_task(coroutine, name=f"spawn {role}") for role, coroutine in spawning.items()]
    try:
        return dict(zip(spawning, await asyncio.gather(*tasks), strict=True))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _cause(error: Exception) -> str:
    """What to tell of a simulator or a policy that cannot be made: of a worker's last words the error itself."""
    words = error.output if isinstance(error, ChildDied) else ()
    told = [found[1] for line in words if (found := _ERROR.match(line.strip()))]
    return told[-1] if told else str(error)


def _trials(config: EmbodiedConfig, directory: Path | None) -> dict[str, Any]:
    workers = max(1, min(config.env.workers, config.trials.episodes))
    count = max(1, min(config.trials.episodes, config.env.num_envs) // workers) * workers
    videos = tuple(range(min(config.trials.videos, count)))
    kept = Recording(str(directory / NEW), envs=videos) if videos and directory is not None else None
    seed = config.seed + (1 << 32)  # other starts than in training
    return {
        "options": {**config.env.options, **config.trials.options},
        "num_envs": count,
        "workers": workers if config.env.workers else 0,
        "auto_reset": False,
        "seed": seed,
        "recording": kept,
    }


def _trainer(config: EmbodiedConfig, algorithm: AlgorithmSpec) -> dict[str, Any]:
    chosen_of_it = config.algorithm
    return {
        **_optimizer(config),
        "algorithm": algorithm,
        "epochs": chosen_of_it.epochs,
        "minibatch": chosen_of_it.minibatch,
        "kl_stop": chosen_of_it.kl_stop,
        "value_coef": chosen_of_it.value_coef,
        "group_size": config.env.group_size,
    }


def _off_policy(config: EmbodiedConfig) -> dict[str, Any]:
    settings = _optimizer(config)
    settings.pop("weight_decay")  # it has none
    return {**settings, **asdict(config.off_policy)}


def _optimizer(config: EmbodiedConfig) -> dict[str, Any]:
    """Settings of the optimizer; those that are not set are the trainer's own."""
    return {name: value for name, value in asdict(config.optimizer).items() if value is not None}
