"""Runs of a policy that acts: it is tried in environments, learns from acting in them, and is tried again.

In: an `EmbodiedConfig` and the code that it names. Out: the run, by the training loop; and for whoever only evaluates,
the episodes of trials.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from rlinf.actors.embodied.env import EnvActor
from rlinf.actors.embodied.policy import PolicyActor
from rlinf.actors.embodied.policy_trainer import PolicyTrainer
from rlinf.actors.embodied.sac_trainer import SacTrainer
from rlinf.algos.spec import AlgorithmSpec
from rlinf.config.embodied import SAC, EmbodiedConfig
from rlinf.config.loading import InputError, RunFailure
from rlinf.data.in_flight import InFlight, Rules
from rlinf.data.step import AnyStep, EmbodiedStep
from rlinf.envs.base import CannotSimulate
from rlinf.envs.episodes import Episode, NothingHappened
from rlinf.envs.video import Recording
from rlinf.envs.worker_slice import EnvironmentLost
from rlinf.flows.evaluation.trials import trials
from rlinf.flows.imitate import imitate
from rlinf.job.checks.footprint import control_footprints
from rlinf.job.loop import TrainingLoop
from rlinf.job.prepare import Prepared
from rlinf.job.roles.running import Role, Roles, only, spawn_roles
from rlinf.metrics.alarm import StalenessAlarm
from rlinf.metrics.run_directory import Checkpoint, RunDirectory
from rlinf.models.policy.build import build_policy_model, fitted
from rlinf.placement.seats import CONTROL, Placed, place
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.processes.supervisor import ChildDied
from rlinf.runtime.system.system import ActorSystem
from rlinf.training.embodied.trajectory_batch import summary

TRIALS = "trials"
VIDEOS, SIMULATORS = "videos", "environments.pt"
NEW = ".new"
"""Where videos are written until their trials are over."""
MOST_SKIPPED = 3
"""Steps in a row that may be skipped because every episode was lost: a worker's crash may cost one, and simulators that
leave nothing of three steps, each with other starts, need a person."""
_ERROR = re.compile(r"[\w.]*(?:Error|Missing\w+|CannotSimulate): (.+)")
"""The last line of a traceback."""


class EmbodiedLoop(TrainingLoop[dict[str, float]]):
    """A run of a policy that acts. Arguments are those of `TrainingLoop`."""

    generates = "policy"
    headline = "evaluation/success_once"
    failures = (FloatingPointError, EnvironmentLost)
    config: EmbodiedConfig

    def __init__(
        self, system: ActorSystem, config: EmbodiedConfig, prepared: Prepared, directory: RunDirectory
    ) -> None:
        super().__init__(system, config, prepared, directory)
        self.in_flight = InFlight(Rules(config.algorithm.staleness, between=True))
        self._too_old = StalenessAlarm(config.algorithm.staleness, "algorithm.staleness")
        self.skipped = 0
        """Steps in a row, up to now, that left nothing to learn from."""

    @property
    def evaluates_every(self) -> int:
        return self.config.trials.every if self.config.trials.episodes else 0

    @property
    def patience(self) -> int:
        return self.config.trials.patience

    async def spawn(self, placed: Placed, names: Collection[str] | None = None) -> Roles:
        if names is None:
            return await start_roles(self.system, self.config, self.prepared, placed, self.directory.path / VIDEOS)
        learners = await learners_of(self.config, self.prepared, self.roles)
        return await spawn_roles(self.system, placed, only(learners, names))  # simulators stay where they are

    async def warm_up(self) -> None:
        settings = self.config.imitation
        if settings.path is None:
            return
        roles = (self.roles["policy"], self.roles["trainer"])
        try:
            found = await imitate(*roles, settings.path, steps=settings.steps, batch=settings.batch, lr=settings.lr)
        except (ValueError, FileNotFoundError) as error:
            raise InputError(f"imitation.path: {error}") from error
        self.report.line(
            f"imitated {found['imitation/decisions']:.0f} decisions: {settings.steps} steps, loss "
            f"{found['imitation/last']:.2f} nats per number"
        )

    async def draw(self, index: int) -> EmbodiedStep:
        config = self.config
        until = self.quiet_after(index)
        return EmbodiedStep(index, config.policy.horizon, config.env.slices, config.env.fresh, until, self.in_flight)

    async def call_flow(self, step: AnyStep) -> Mapping[str, float]:
        try:
            returned = await super().call_flow(step)
        except NothingHappened as error:
            return await self._skip(error)
        self.skipped = 0
        return returned

    async def _skip(self, error: NothingHappened) -> dict[str, float]:
        """Count a step that left nothing to learn from as one that changed nothing."""
        self.skipped += 1
        if self.skipped > MOST_SKIPPED:
            raise RunFailure(
                f"step {self.done + 1}: {error}, as in the {MOST_SKIPPED} steps before it: the simulators die or hang "
                f"all the time. The warnings above say of what; or raise "
                f"env.step_timeout={self.config.env.step_timeout:g} s"
            ) from error
        self.report.line(f"step {self.done + 1} is skipped: {error}")
        await self.in_flight.publish(self.roles["policy"])
        return {"skipped": 1.0}

    async def evaluate(self) -> dict[str, float] | None:
        if TRIALS not in self.roles:
            return None
        found = await trials(self.roles[TRIALS], self.roles["policy"], self.config.trials.episodes)
        if self.config.trials.videos:
            await asyncio.to_thread(_keep_videos, self.directory.path / VIDEOS, self.done)
        return summary(found)

    def numbers(self, evaluation: dict[str, float]) -> dict[str, float]:
        return {name.removeprefix("episodes/"): value for name, value in evaluation.items()}

    def stepped(self, metrics: Mapping[str, float]) -> None:
        if (warning := self._too_old.heard(self.done, metrics)) is not None:
            self.report.line(warning)

    def in_words(self, evaluation: dict[str, float]) -> str:
        return in_words(evaluation)

    def compared(self, before: dict[str, float], after: dict[str, float]) -> Iterator[str]:
        yield f"{after['episodes']:.0f} trials by the likeliest actions, before and after:"
        for name in ("success_once", "success_at_end", "reward/mean", "episodes/length"):
            if name in before and name in after:
                style = ".1%" if name.startswith("success") else ".2f"
                yield f"  {name:<16} {before[name]:>8{style}} -> {after[name]:{style}}"

    async def saving(self) -> Callable[[Path], Coroutine[Any, Any, None]]:
        environments: list[Any] = []
        if not self.config.env.fresh:
            environments = await asyncio.gather(*(env.state() for env in self.roles["env"]))
        save = await super().saving()

        def fill(directory: Path) -> Coroutine[Any, Any, None]:
            saved = save(directory)  # called at once: of this moment, whatever comes next

            async def written() -> None:
                await saved
                if environments:
                    await asyncio.to_thread(torch.save, environments, directory / SIMULATORS)

            return written()

        return fill

    async def restore(self, begun: Checkpoint) -> None:
        await super().restore(begun)
        if self.config.env.fresh:
            return
        # Episodes go on over a restart, too. Tensors and plain values only: checkpoints are things that people download
        saved = await asyncio.to_thread(torch.load, begun.path / SIMULATORS, weights_only=True)
        if len(saved) != len(self.roles["env"]):
            raise ValueError(f"{len(saved)} hosts simulated, and now {len(self.roles['env'])} do: resume with as many")
        await asyncio.gather(*(env.restore(state) for env, state in zip(self.roles["env"], saved, strict=True)))


# Trials without training ---------------------------------------------------------------------------------------------


async def try_policy(system: ActorSystem, config: EmbodiedConfig, videos: Path | None = None) -> tuple[Episode, ...]:
    """Trials of the policy that a configuration names, without training.

    Args:
        system: where.
        config: what; `policy.path` is the policy.
        videos: directory for `trials.videos` of them; None records none.

    Raises:
        InputError: the simulator or the policy cannot be made, or they do not fit.
    """
    # a mode or a plan is for training: in trials nobody else is on a device
    placed = place(replace(config.placement, mode=None, plan=None), CONTROL[:2], system.hosts)
    roles = await start_roles(system, config, None, placed, videos)
    found = await trials(roles[TRIALS], roles["policy"], config.trials.episodes)
    if videos is not None and config.trials.videos:
        await asyncio.to_thread(_keep_videos, videos, 0)
    return found


def _keep_videos(directory: Path, step: int) -> None:
    for video in sorted((directory / NEW).glob("epoch0000-*")):
        kept = directory / f"step_{step:06d}"
        kept.mkdir(exist_ok=True)
        video.replace(kept / video.name.removeprefix("epoch0000-"))
    for rest in (directory / NEW).glob("*"):
        rest.unlink()


def in_words(found: Mapping[str, float]) -> str:
    """How trials went, as half a sentence."""
    count = f"{found['episodes']:.0f} episodes"
    if "success_once" in found:
        return f"{found['success_once']:.1%} of {count} solved, mean return {found['reward/mean']:.2f}"
    return f"mean return {found['reward/mean']:.2f} over {count}"


# Roles ---------------------------------------------------------------------------------------------------------------


async def start_roles(
    system: ActorSystem, config: EmbodiedConfig, prepared: Prepared | None, placed: Placed, videos: Path | None
) -> Roles:
    """Start the simulators, then the policy that fits them.

    Args:
        system: where.
        config: what.
        prepared: the code that the configuration names; None starts only what trials need.
        placed: on which hosts and devices.
        videos: directory in which those of trials are kept; None for none.

    Raises:
        InputError: the simulator or the policy cannot be made, or they do not fit.
    """
    simulators = {}
    if prepared is not None:
        simulators["env"] = Role(EnvActor, {**_simulation(config), **_env(config)})
    if config.trials.episodes:
        hosts = placed.seats["env"].hosts[:1]
        simulators[TRIALS] = Role(EnvActor, {**_simulation(config), **_trials(config, videos)}, hosts=hosts)
    try:
        roles = await spawn_roles(system, placed, simulators)
        roles |= await spawn_roles(system, placed, await learners_of(config, prepared, roles))
        # one decision: a policy that looks at what there is not says so here
        await roles["policy"][0].act((0, 0), await next(iter(roles.values()))[0].reset(0, 0), keep=False)
        return roles
    except (CannotSimulate, ChildDied, FileNotFoundError, ImportError, TypeError, UserError, ValueError) as error:
        raise InputError(f"env, policy: {_cause(error)}") from error


async def learners_of(config: EmbodiedConfig, prepared: Prepared | None, simulators: Roles) -> dict[str, Role]:
    """The roles that have a policy, ready to be started: who acts, and who trains.

    Args:
        config, prepared: as for `start_roles`.
        simulators: running; the policy is fitted to what they show.
    """
    shapes = await next(iter(simulators.values()))[0].shapes()
    off_policy = config.algorithm.name == SAC
    kind = config.policy.type or ("soft" if off_policy else "mlp")
    policy = fitted({"type": kind, **config.policy.settings}, shapes["shapes"], shapes["action_size"])
    made: dict[str, Any] = {"policy": {"seed": config.seed, **policy}, "path": config.policy.path}
    with torch.device("meta"):
        footprints = control_footprints(build_policy_model(made["policy"]), targets=off_policy)
    held = {role: (each.active_bytes, each.parked_bytes) for role, each in footprints.items()}
    if prepared is None:
        return {"policy": Role(PolicyActor, made, held["policy"])}
    settings = _off_policy(config) if prepared.algorithm is None else _trainer(config, prepared.algorithm)
    trainer = SacTrainer if off_policy else PolicyTrainer
    return {
        "policy": Role(PolicyActor, {**made, "keep_following": off_policy}, held["policy"]),
        "trainer": Role(trainer, {"seed": config.seed, **made, **settings}, held["trainer"]),
    }


def _cause(error: Exception) -> str:
    """What to tell of a simulator or a policy that cannot be made: of a worker's last words the error itself."""
    words = error.output if isinstance(error, ChildDied) else ()
    told = [found[1] for line in words if (found := _ERROR.match(line.strip()))]
    return told[-1] if told else str(error)


def _simulation(config: EmbodiedConfig) -> dict[str, Any]:
    """What simulators for training and for trials have in common."""
    names = ("simulator", "options", "max_steps", "ignore_terminations", "step_timeout", "start_timeout")
    return {name: getattr(config.env, name) for name in names}


def _env(config: EmbodiedConfig) -> dict[str, Any]:
    env = config.env
    own = {name: getattr(env, name) for name in ("num_envs", "workers", "slices", "group_size")}
    return {**own, "chunks": config.policy.horizon if env.fresh else None, "seed": config.seed}


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
