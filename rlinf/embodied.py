"""One run of a policy that acts, from a checked configuration to a trained policy: try it, take the flow's steps, try.

In: an `EmbodiedConfig`, and where to go on from if it was begun before. Out: the run directory and a few printed lines.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rlinf.actors.control_lesson import summary
from rlinf.actors.deciding import Decider
from rlinf.actors.experience import OffPolicyDecider
from rlinf.actors.imitating import ImitatingTrainer
from rlinf.actors.off_policy_trainer import OffPolicyTrainer
from rlinf.actors.simulation import Simulation
from rlinf.algorithm_choice import control_algorithm_of
from rlinf.algos.parts import GroupRelative
from rlinf.algos.spec import AlgorithmSpec
from rlinf.checkpointing import Checkpoints
from rlinf.config import ConfigError, InputError, Problem, RunFailure
from rlinf.config_embodied import ROLES, SAC, EmbodiedConfig
from rlinf.dotted import resolve
from rlinf.envs.base import CannotSimulate
from rlinf.envs.episodes import Episode
from rlinf.envs.seat import EnvironmentLost
from rlinf.envs.video import Recording
from rlinf.flows.embodied_step import EmbodiedStep
from rlinf.flows.imitate import imitate
from rlinf.flows.trials import trials
from rlinf.html_report import write_report
from rlinf.metrics.recorder import Recorder
from rlinf.metrics.tracking import Tracked, Tracking, chosen
from rlinf.models.building import fitted
from rlinf.report import Report
from rlinf.run_directory import Checkpoint, RunDirectory
from rlinf.runtime.child import ChildDied
from rlinf.runtime.errors import UserError
from rlinf.runtime.group import ActorGroup
from rlinf.runtime.observer import Watch
from rlinf.runtime.system import ActorSystem

Roles = dict[str, ActorGroup]
VIDEOS, TRIALS, SIMULATORS = "videos", "trials", "environments.pt"


async def learn_by_acting(
    system: ActorSystem,
    config: EmbodiedConfig,
    code: Prepared,
    directory: RunDirectory,
    begun: Checkpoint | None = None,
) -> None:
    """Train as the configuration says, in a running system.

    Args:
        system: where.
        config: what.
        code: of `prepared`.
        directory: of the run.
        begun: go on from here; None starts anew.

    Raises:
        InputError: the simulator cannot be made, or does not fit the policy.
        RunFailure: a checkpoint cannot be written, the loss is no number, or the simulators die again and again.
        Exception: whatever the flow or a role raised.
    """
    watch = await Watch.start(system)
    report = Report(
        config.name,
        directory,
        system.hosts,
        steps=config.steps,
        log_every=config.log_every,
        live=config.metrics.live,
        announced=("evaluation/success_once",) if config.trials.every else (),
        watch=watch,
    )
    roles = await _spawn(system, config, code, directory.path / VIDEOS)
    report.begins({role: group.hosts for role, group in roles.items()})
    wanted = chosen(tensorboard=config.metrics.tensorboard, wandb=config.metrics.wandb, swanlab=config.metrics.swanlab)
    about = Tracked(config.name, directory.path, asdict(config), None if begun is None else begun.step)
    tracking = Tracking(wanted, about, report.line)
    async with report, Recorder(directory.path, watch, tracking, system.hosts) as recorder:
        run = EmbodiedRun(config, code.flow, directory, roles, report, recorder)
        try:
            await (run.begin() if begun is None else run.go_on(begun))
            await run.steps()
        except (FloatingPointError, EnvironmentLost) as error:
            raise RunFailure(f"step {run.done + 1}: {error}") from error
        finally:
            await run.checkpoints.abandon()
        if config.trace:
            await system.trace(directory.trace)
    await asyncio.to_thread(write_report, directory.path)
    report.ends(_compared(run.before, run.after))


@dataclass(frozen=True, slots=True)
class Prepared:
    """The code that a configuration names."""

    flow: Callable[..., Awaitable[Mapping[str, float]]]
    """One step."""
    algorithm: AlgorithmSpec | None
    """How trajectories become a gradient; None for soft actor-critic, which learns from single transitions."""


def prepared(config: EmbodiedConfig) -> Prepared:
    """Import what a configuration names.

    Raises:
        ConfigError: an algorithm or a flow that cannot be had.
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
    return Prepared(flow, algorithm)


class EmbodiedRun:
    """A run under way: what its steps share.

    Args:
        config, directory: as for `learn_by_acting`.
        flow: one step.
        roles: running.
        report: told of every event.
        recorder: writes down every step.
    """

    def __init__(
        self,
        config: EmbodiedConfig,
        flow: Callable[..., Awaitable[Mapping[str, float]]],
        directory: RunDirectory,
        roles: Roles,
        report: Report,
        recorder: Recorder,
    ) -> None:
        self.config, self.flow, self.directory, self.roles = config, flow, directory, roles
        self.report, self.recorder = report, recorder
        self.checkpoints = Checkpoints(directory, config.checkpoint.keep)
        self.done = 0
        """Steps taken."""
        self.before: dict[str, float] = {}
        """How trials went before the first step; empty where there are none."""
        self.after: dict[str, float] = {}
        """How the newest ones went."""

    async def begin(self) -> None:
        """What comes before the first step of a new run."""
        warm_up = self.config.imitation
        if warm_up.path is not None:
            roles = (self.roles["policy"], self.roles["trainer"])
            try:
                found = await imitate(*roles, warm_up.path, steps=warm_up.steps, batch=warm_up.batch, lr=warm_up.lr)
            except (ValueError, FileNotFoundError) as error:
                raise InputError(f"imitation.path: {error}") from error
            self.report.line(
                f"imitated {found['imitation/decisions']:.0f} decisions: {warm_up.steps} steps, loss "
                f"{found['imitation/last']:.2f} nats per number"
            )
        self.before = self.after = await self._try()
        if self.before:
            self.report.evaluated(in_words(self.before))
            self.recorder.write(0, _named(self.before))

    async def go_on(self, begun: Checkpoint) -> None:
        """Be where a checkpoint was written."""
        try:
            await self.roles["trainer"].restore(str(begun.path / "state"))
            await self._restore_environments(begun.path / SIMULATORS)
        except (ValueError, FileNotFoundError) as error:
            raise InputError(f"{begun.path} cannot be gone on from: {error}") from error
        await self.roles["policy"].load(self.roles["trainer"].weights())
        queue: Any = begun.queue
        self.done, self.before, self.after = begun.step, queue["before"], queue["after"]
        self.report.resumed(self.done, begun.path)
        for change in self.directory.changed:
            self.report.line(f"changed since then: {change}")

    async def steps(self) -> None:
        """The steps that are left."""
        config = self.config
        parameters = inspect.signature(self.flow).parameters
        while self.done < config.steps:
            step = EmbodiedStep(self.done, config.policy.horizon, config.env.slices, config.env.fresh)
            offered = {"step": step, **{role: self.roles[role] for role in ROLES}}
            self.recorder.step_begins()
            returned = await self.flow(**{name: offered[name] for name in parameters if name in offered})
            if not isinstance(returned, Mapping):
                raise InputError(
                    f"flow: {self.flow.__qualname__} returned {returned!r}; it must return the step's metrics"
                )
            self.done += 1
            metrics = await self.recorder.step_ends(self.done, returned)
            last = self.done == config.steps
            if last or _due(self.done, config.trials.every):
                self.after = await self._try()
                metrics |= _named(self.after)
            self.recorder.write(self.done, metrics)
            self.report.stepped(self.done, metrics)
            self.checkpoints.check()
            if last or _due(self.done, config.checkpoint.every):
                told = {"before": self.before, "after": self.after}
                await self.checkpoints.begin(self.done, await self._filling(), told)
        await self.checkpoints.finish()

    async def _filling(self) -> Callable[[Path], Coroutine[Any, Any, None]]:
        """What writes a checkpoint of this moment into a directory."""
        environments: list[Any] = []
        if not self.config.env.fresh:
            environments = await asyncio.gather(*(env.state() for env in self.roles["env"]))

        def fill(directory: Path) -> Coroutine[Any, Any, None]:
            saved = self.roles["trainer"].save(str(directory))  # called at once: of this moment, whatever comes next

            async def written() -> None:
                await saved
                if environments:
                    await asyncio.to_thread(torch.save, environments, directory / SIMULATORS)

            return written()

        return fill

    async def _restore_environments(self, path: Path) -> None:
        """Where episodes go on over steps, they go on over a restart too."""
        if self.config.env.fresh:
            return
        # tensors and plain values only: a checkpoint is a thing that people download
        saved = await asyncio.to_thread(torch.load, path, weights_only=True)
        if len(saved) != len(self.roles["env"]):
            raise ValueError(f"{len(saved)} hosts simulated, and now {len(self.roles['env'])} do: resume with as many")
        await asyncio.gather(*(env.restore(state) for env, state in zip(self.roles["env"], saved, strict=True)))

    async def _try(self) -> dict[str, float]:
        """How trials go; their videos are kept under the number of the step."""
        if TRIALS not in self.roles:
            return {}
        found = await trials(self.roles[TRIALS], self.roles["policy"], self.config.trials.episodes)
        if self.config.trials.videos:
            await asyncio.to_thread(_keep_videos, self.directory.path / VIDEOS, self.done)
        return summary(found)


async def try_policy(system: ActorSystem, config: EmbodiedConfig, videos: Path | None = None) -> tuple[Episode, ...]:
    """Trials of the policy that a configuration names, without training.

    Args:
        system: where.
        config: what; `policy.path` is the policy.
        videos: directory for `trials.videos` of them; None records none.

    Raises:
        InputError: the simulator or the policy cannot be made, or they do not fit.
    """
    roles = await _spawn(system, config, None, videos)
    found = await trials(roles[TRIALS], roles["policy"], config.trials.episodes)
    if videos is not None and config.trials.videos:
        await asyncio.to_thread(_keep_videos, videos, 0)
    return found


async def _spawn(system: ActorSystem, config: EmbodiedConfig, code: Prepared | None, videos: Path | None) -> Roles:
    """Start the simulators, then the policy that fits them; without code to run, only what trials need."""
    hosts = {role: getattr(config.placement, role) if system.hosts > 1 else [0] for role in ROLES}
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
        spawning["env"] = system.spawn(Simulation, hosts=hosts["env"], name="env", seed=config.seed, **shared, **own)
    if config.trials.episodes:
        spawning[TRIALS] = system.spawn(
            Simulation, hosts=hosts["env"][:1], name=TRIALS, **{**shared, **_trials(config, videos)}
        )
    try:
        roles = await _together(spawning)
        shapes = await next(iter(roles.values()))[0].shapes()
        off_policy = config.algorithm.name == SAC
        kind = config.policy.type or ("soft" if off_policy else "mlp")
        policy = fitted({"type": kind, **config.policy.settings}, shapes["shapes"], shapes["action_size"])
        made: dict[str, Any] = {"policy": {"seed": config.seed, **policy}, "path": config.policy.path}
        acting = OffPolicyDecider if off_policy and code is not None else Decider
        learning = {"policy": system.spawn(acting, hosts=hosts["policy"], name="policy", **made)}
        if code is not None:
            training = OffPolicyTrainer if off_policy else ImitatingTrainer
            settings = _off_policy(config) if code.algorithm is None else _trainer(config, code.algorithm)
            learning["trainer"] = system.spawn(
                training, hosts=hosts["trainer"], name="trainer", seed=config.seed, **made, **settings
            )
        learners = await _together(learning)
        # one decision: a policy that looks at what there is not says so here
        await learners["policy"][0].act((0, 0), await next(iter(roles.values()))[0].reset(0, 0), keep=False)
        return {**roles, **learners}
    except (CannotSimulate, ChildDied, FileNotFoundError, ImportError, TypeError, UserError, ValueError) as error:
        raise InputError(f"env, policy: {_cause(error)}") from error


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
    kept = Recording(str(directory / _NEW), envs=videos) if videos and directory is not None else None
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


_ERROR = re.compile(r"[\w.]*(?:Error|Missing\w+|CannotSimulate): (.+)")
"""The last line of a traceback."""
_NEW = ".new"
"""Where videos are written until their trials are over."""


def _keep_videos(directory: Path, step: int) -> None:
    for video in sorted((directory / _NEW).glob("epoch0000-*")):
        kept = directory / f"step_{step:06d}"
        kept.mkdir(exist_ok=True)
        video.replace(kept / video.name.removeprefix("epoch0000-"))
    for rest in (directory / _NEW).glob("*"):
        rest.unlink()


def in_words(found: Mapping[str, float]) -> str:
    count = f"{found['episodes']:.0f} episodes"
    if "success_once" in found:
        return f"{found['success_once']:.1%} of {count} solved, mean return {found['reward/mean']:.2f}"
    return f"mean return {found['reward/mean']:.2f} over {count}"


def _compared(before: Mapping[str, float], after: Mapping[str, float]) -> Iterator[str]:
    """What came of a run, in a table of two columns."""
    if not before or not after:
        return
    yield f"{after['episodes']:.0f} trials by the likeliest actions, before and after:"
    for name in ("success_once", "success_at_end", "reward/mean", "episodes/length"):
        if name in before and name in after:
            style = ".1%" if name.startswith("success") else ".2f"
            yield f"  {name:<16} {before[name]:>8{style}} -> {after[name]:{style}}"


def _named(found: Mapping[str, float]) -> dict[str, float]:
    return {f"evaluation/{name.removeprefix('episodes/')}": value for name, value in found.items()}


def _due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0
