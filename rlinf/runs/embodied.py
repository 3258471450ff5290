"""Runs of a policy that acts: tried in environments, it learns from acting or from demonstrations, and is tried again.

In: an `EmbodiedConfig` and the code that it names. Out: workloads for the training loop: of learning by acting, and of
learning from demonstrations alone, where trials need a simulator and held-out episodes do not; and for whoever only
evaluates, trials of a policy.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import torch

from rlinf.actors.policy_trainer import POLICY
from rlinf.algos.evaluation import wilson_interval
from rlinf.config.embodied import DAGGER, OFF_POLICY, EmbodiedConfig, EnvConfig, task_names
from rlinf.config.load import InputError, RunFailure
from rlinf.data.in_flight import InFlight, Rules
from rlinf.data.step import AnyStep, EmbodiedStep, ImitationStep, works_ahead
from rlinf.envs.environment import Episode, NothingHappened
from rlinf.envs.workers import EnvironmentLost
from rlinf.flows.evaluate import trials
from rlinf.flows.imitate import imitate
from rlinf.flows.offline import offline
from rlinf.metrics.alarms import NothingLearnedAlarm, StalenessAlarm
from rlinf.metrics.tables import success_rows, success_table
from rlinf.models.policy.build import CONFIG
from rlinf.placement.seats import CONTROL, Placed, place
from rlinf.runs.callbacks import Alarms, RunState
from rlinf.runs.dry_run.embodied import shown_of
from rlinf.runs.embodied_roles import NEW, TRIALS, VIDEOS, learners_of, role_of, start_roles
from rlinf.runs.loop import Described, Workload
from rlinf.runs.roles import Roles, only, spawn_roles
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.system.handles import ActorGroup
from rlinf.runtime.system.system import ActorSystem
from rlinf.storage.directory import Checkpoint
from rlinf.training.embodied.trajectories import by_task, summary


class Curriculum:
    """The weights of a mixture's tasks.

        rate = memory rate + (1 - memory) success in the step        after each step that finished episodes of the task
        weight = the task's own,  times `floor` where the rate lies outside of `low` and `high`

    Args:
        env: with `tasks` and `curriculum`.
    """

    def __init__(self, env: EnvConfig):
        self._settings = env.curriculum
        self._own = {
            name: float(task.get("weight", 1.0)) for name, task in zip(task_names(env.tasks), env.tasks, strict=True)
        }
        self.rates: dict[str, float] = {}
        """Success rate of each task that was played."""

    def heard(self, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step, `tasks/NAME/success_once`."""
        for name in self._own:
            if (share := metrics.get(f"tasks/{name}/success_once")) is not None:
                memory = self._settings.memory
                self.rates[name] = memory * self.rates[name] + (1 - memory) * share if name in self.rates else share

    @property
    def weights(self) -> list[float]:
        """Weights of the tasks, in their order."""
        low, high, floor = self._settings.low, self._settings.high, self._settings.floor
        inside = {name: low <= self.rates.get(name, low) <= high for name in self._own}
        return [weight * (1.0 if inside[name] else floor) for name, weight in self._own.items()]

    def told(self) -> dict[str, float]:
        """The weights as metrics, `tasks/NAME/weight`, as shares."""
        total = sum(self.weights)
        return {f"tasks/{name}/weight": weight / total for name, weight in zip(self._own, self.weights, strict=True)}

    def resume(self, state: Any) -> None:
        """Go on with the rates of a checkpoint; tasks that are no more are left out."""
        if isinstance(state, Mapping):
            self.rates = {name: float(rate) for name, rate in state.items() if name in self._own}


Tried = dict[str, tuple[Episode, ...]]
"""The episodes that were played, by suite; those in the environments of training are of the suite ""."""


async def try_policy(system: ActorSystem, config: EmbodiedConfig, videos: Path | None = None) -> Tried:
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
    return await try_suites(roles, config, videos, 0)


async def try_suites(roles: Roles, config: EmbodiedConfig, videos: Path | None, step: int) -> Tried:
    """Play the trials of all suites, one after the other.

    Args:
        roles: the policy, and the simulators of each suite.
        config: of the run.
        videos: directory for `trials.videos` of each suite; None records none.
        step: after which this is, for the names of videos.
    """
    wanted, episodes = config.trials, {}
    recorded = 0 if videos is None else wanted.videos
    for name, suite in config.eval_suites.items():
        episodes[name] = await trials(
            roles[role_of(name)], roles["policy"], suite.episodes, greedy=wanted.greedy, videos=recorded
        )
    if videos is not None and recorded:
        await asyncio.to_thread(keep_videos, videos, step)
    return episodes


def measured(tried: Tried) -> dict[str, float]:
    """How trials went: `episodes`, means of return and length, and where the simulator says the share of success with
    the interval in which it lies (`success_once/low` and `/high`, 95 %); the same of each suite as `suites/NAME/…`, and
    of each task, where there are several, as `tasks/NAME/…`. Where training's environments are not tried, the first are
    of all suites together.

    Args:
        tried: at least one suite.
    """
    first = tried.get("", tuple(episode for episodes in tried.values() for episode in episodes))
    parts = {"": first, **{f"tasks/{task}/": part for task, part in by_task(tried.get("", ())).items()}}
    for name, episodes in tried.items():
        if name:
            parts[f"suites/{name}/"] = episodes
            parts |= {f"suites/{name}/tasks/{task}/": part for task, part in by_task(episodes).items()}
    metrics: dict[str, float] = {}
    for prefix, episodes in parts.items():
        numbers = summary(episodes)
        if "success_once" in numbers:
            solved = sum(bool(episode.success_once) for episode in episodes)
            numbers["success_once/low"], numbers["success_once/high"] = wilson_interval(solved, len(episodes))
        metrics |= {f"{prefix}{name.removeprefix('episodes/') if prefix else name}": numbers[name] for name in numbers}
    return metrics


def written(tried: Tried, **about: Any) -> str:
    """Trials as JSON: what they are of, a row per suite and task, and every episode.

    Args:
        tried: at least one suite.
        about: further entries at its beginning.
    """
    rows = [asdict(row) for row in success_rows(measured(tried))]
    episodes = [{"suite": name, **asdict(episode)} for name, episodes in tried.items() for episode in episodes]
    return json.dumps({**about, "rows": rows, "episodes": episodes}, indent=1) + "\n"


def saved_policy(path: Path) -> Path:
    """The directory of a saved policy that a path leads to: itself, that of a checkpoint, or of a run's newest one."""
    ways = ("", POLICY, f"checkpoints/latest/{POLICY}")
    return next((path / way for way in ways if (path / way / CONFIG).is_file()), path)


def acting(model: str | None, overrides: Sequence[str]) -> list[str]:
    """Overrides by which a configuration acts and learns nothing: no demonstrations need be there.

    The policy that a path leads to acts with the adapters of `policy.lora.path` where it is its authors'; one that
    was saved here has those that it learned with in its weights.

    Args:
        model: the path; None for what the configuration says.
        overrides: the user's, which go before as far as adapters are concerned.
    """
    overrides = [*overrides, "imitation.path=null", "imitation.mixture={}", "imitation.statistics=null"]
    if model is None:
        return overrides
    path = saved_policy(Path(model).expanduser())
    plain = ["policy.lora.path=null"] if (path / CONFIG).is_file() else []
    return [*plain, *overrides, f"policy.path={path}"]


def keep_videos(directory: Path, step: int) -> None:
    """Keep the videos of the trials that were just played as those of a step, by suite.

    Args:
        directory: of all videos of a run.
        step: after which they were played.
    """
    new = directory / NEW
    for video in sorted(path for path in new.rglob("*") if path.is_file()):
        target = directory / f"step_{step:06d}" / video.parent.relative_to(new)
        target.mkdir(parents=True, exist_ok=True)
        video.replace(target / video.name.removeprefix("epoch0000-"))
    shutil.rmtree(new, ignore_errors=True)


def in_words(metrics: Mapping[str, float]) -> str:
    """How trials went, as half a sentence."""
    count = f"{metrics['episodes']:.0f} episodes"
    if "success_once" in metrics:
        low, high = metrics["success_once/low"], metrics["success_once/high"]
        share = f"{metrics['success_once']:.1%} ({low:.1%} to {high:.1%})"
        return f"{share} of {count} solved, mean return {metrics['reward/mean']:.2f}"
    return f"mean return {metrics['reward/mean']:.2f} over {count}"


SIMULATORS = "environments.pt"
MOST_SKIPPED = 3
"""Steps in a row that may be skipped because every episode was lost: a worker's crash may cost one, and simulators that
leave nothing of three steps, each with other starts, need a person."""


class EmbodiedWorkload(Workload[dict[str, float]]):
    """Learning by acting in environments."""

    generates = "policy"
    headline = "evaluation/success_once"
    failures = (FloatingPointError, EnvironmentLost)
    config: EmbodiedConfig

    def __init__(self, run: RunState, config: EmbodiedConfig | None = None) -> None:
        super().__init__(run, config)
        config = self.config
        self.in_flight = InFlight(Rules(config.algorithm.staleness, between=True))
        self.evaluates_every = config.trials.every if config.eval_suites else 0
        self.patience = config.trials.patience
        too_old = StalenessAlarm(config.algorithm.staleness, "algorithm.staleness")
        self.observers = [Alarms(run, [too_old, NothingLearnedAlarm()])]
        self.skipped = 0
        """Steps in a row, up to now, that left nothing to learn from."""
        self.env_steps = 0.0
        """Steps that were done in environments to learn from, in all steps of the flow."""
        follows = config.env.tasks and config.env.curriculum.floor < 1
        self.curriculum = Curriculum(config.env) if follows else None
        if follows and works_ahead(self.plan.flow):
            raise InputError(
                "env.curriculum.floor: episodes that are begun early would be drawn by weights of any step"
            )

    @property
    def restartable(self) -> bool:
        # episodes that begin with a step follow from its number, so it can be acted in again
        remembers = self.config.algorithm.name in (*OFF_POLICY, DAGGER)
        return self.config.env.fresh and not remembers and not works_ahead(self.plan.flow)

    async def spawn(self, placed: Placed, names: Collection[str] | None = None) -> Roles:
        run = self.run
        if names is None:
            return await start_roles(run.system, self.config, self.plan, placed, run.directory.path / VIDEOS)
        learners = await learners_of(self.config, self.plan, run.roles)
        return await spawn_roles(run.system, placed, only(learners, names))  # simulators stay where they are

    async def warm_up(self) -> bool:
        settings = self.config.imitation
        if (demonstrations := shown_of(settings)) is None:
            return False
        roles = (self.run.roles["policy"], self.run.roles["trainer"])
        try:
            metrics = await imitate(*roles, demonstrations, steps=settings.steps, batch=settings.batch, lr=settings.lr)
        except (ValueError, FileNotFoundError, ImportError) as error:
            raise InputError(f"imitation.path: {error}") from error
        self.run.report.line(
            f"imitated {metrics['imitation/decisions']:.0f} decisions: {settings.steps} steps, loss "
            f"{metrics['imitation/last']:.2f} nats per number"
        )
        return True

    async def draw(self, index: int) -> AnyStep:
        config = self.config
        until = self.quiet_after(index)
        inside: Sequence[EmbodiedStep] = ()
        if (world := config.world).model is not None:
            first, last = index * world.steps, (index + 1) * world.steps
            inside = [EmbodiedStep(each, world.horizon, until=last) for each in range(first, last)]
        how = config.env.slices, config.env.fresh, until, self.in_flight, inside
        return EmbodiedStep(index, config.policy.horizon, *how)

    async def take(self, step: AnyStep) -> Mapping[str, float]:
        if step.index < self.config.off_policy.offline_steps:
            return await offline(self.run.roles["policy"], self.run.roles["trainer"])
        try:
            returned = await super().take(step)
        except NothingHappened as error:
            return await self._skip(error)
        self.skipped = 0
        if self.curriculum is not None:
            self.curriculum.heard(returned)
            returned = {**returned, **self.curriculum.told()}
            await self._weigh(self.curriculum)
        return self._counted(returned)

    async def _weigh(self, curriculum: Curriculum) -> None:
        await asyncio.gather(*(env.weigh(curriculum.weights) for env in self.run.roles["env"]))

    def _counted(self, returned: Mapping[str, float]) -> dict[str, float]:
        """A step's metrics, with the environment steps of all steps."""
        self.env_steps += returned.get("env_steps", 0.0)
        return {**returned, "env_steps/total": self.env_steps}

    async def _skip(self, error: NothingHappened) -> dict[str, float]:
        """Count a step that left nothing to learn from as one that changed nothing."""
        self.skipped += 1
        step = self.run.done + 1
        if self.skipped > MOST_SKIPPED:
            raise RunFailure(
                f"step {step}: {error}, as in the {MOST_SKIPPED} steps before it: the simulators die or hang "
                f"all the time. The warnings above say of what; or raise "
                f"env.step_timeout={self.config.env.step_timeout:g} s"
            ) from error
        self.run.report.line(f"step {step} is skipped: {error}")
        advice = f"Raise env.step_timeout={self.config.env.step_timeout:g} s if its simulators are slow"
        self.run.recorder.alarm(step, f"the step is skipped: {error}", advice)
        await self.in_flight.publish(self.run.roles["policy"])
        return self._counted({"skipped": 1.0})

    async def evaluate(self) -> dict[str, float] | None:
        if not self.config.eval_suites:
            return None
        return measured(await try_suites(self.run.roles, self.config, self.run.directory.path / VIDEOS, self.run.done))

    def describe(self, evaluation: dict[str, float]) -> Described:
        metrics = {name.removeprefix("episodes/"): value for name, value in evaluation.items()}
        return Described(metrics, self._sentence(evaluation))

    def _sentence(self, evaluation: dict[str, float]) -> str:
        return in_words(evaluation)

    def conclude(self, before: dict[str, float] | None, after: dict[str, float] | None) -> Iterator[str]:
        if not (before and after):
            return
        kinds = {True: "the likeliest actions", False: "drawn actions", "from_noise": "the ODE from random starts"}
        kind = kinds[self.config.trials.greedy]
        yield f"{after['episodes']:.0f} trials by {kind}, before and after:"
        for name in ("success_once", "success_at_end", "reward/mean", "episodes/length"):
            if name in before and name in after:
                style = ".1%" if name.startswith("success") else ".2f"
                yield f"  {name:<16} {before[name]:>8{style}} -> {after[name]:{style}}"
        yield from success_table(before, after)

    async def publish(self, roles: Mapping[str, ActorGroup]) -> None:
        """To a policy that may be new: what never changes, too, may be another's than that which it was made with."""
        if self.generates in roles:
            await roles[self.generates].load(roles["trainer"].weights(whole=True))

    async def writer(self) -> Callable[[Path], Coroutine[Any, Any, None]]:
        environments: list[Any] = []
        if not self.config.env.fresh:
            environments = await asyncio.gather(*(env.state() for env in self.run.roles["env"]))
        save = await super().writer()

        def fill(directory: Path) -> Coroutine[Any, Any, None]:
            saved = save(directory)  # called at once: of this moment, whatever comes next

            async def written() -> None:
                await saved
                if environments:
                    await asyncio.to_thread(torch.save, environments, directory / SIMULATORS)

            return written()

        return fill

    def state(self) -> dict[str, Any]:
        rates = None if self.curriculum is None else self.curriculum.rates
        return {**super().state(), "env_steps": self.env_steps, "curriculum": rates}

    async def restore(self, checkpoint: Checkpoint) -> None:
        await super().restore(checkpoint)
        self.env_steps = float(cast("float", checkpoint.queue.get("env_steps", 0.0)))
        if self.curriculum is not None:
            self.curriculum.resume(checkpoint.queue.get("curriculum"))
            await self._weigh(self.curriculum)
        if self.config.env.fresh:
            return
        # Episodes go on over a restart, too. Tensors and plain values only: checkpoints are things that people download
        saved = await asyncio.to_thread(torch.load, checkpoint.path / SIMULATORS, weights_only=True)
        env = self.run.roles["env"]
        if len(saved) != len(env):
            raise ValueError(f"{len(saved)} hosts simulated, and now {len(env)} do: resume with as many")
        await asyncio.gather(*(host.restore(state) for host, state in zip(env, saved, strict=True)))


_UNREADABLE = (ValueError, OSError, ImportError, UserError)
"""Errors by which demonstrations, and policies that do not fit them, are refused."""


class ImitationWorkload(EmbodiedWorkload):
    """Learning from demonstrations alone."""

    config: EmbodiedConfig

    def __init__(self, run: RunState) -> None:
        config = run.config
        # no episode goes on from step to step
        super().__init__(run, replace(config, env=replace(config.env, fresh=True)))
        self.evaluates_every = config.trials.every
        if not config.trials.episodes:
            self.headline = "evaluation/held_out/loss"

    async def spawn(self, placed: Placed, names: Collection[str] | None = None) -> Roles:
        run, config, plan = self.run, self.config, self.plan
        if names is None and config.trials.episodes:
            return await start_roles(run.system, config, plan, placed, run.directory.path / VIDEOS)
        try:
            learners = await learners_of(config, plan, run.roles)
            return await spawn_roles(run.system, placed, only(learners, names))
        except _UNREADABLE as error:
            raise InputError(f"policy, imitation: {error}") from error

    async def warm_up(self) -> bool:
        """None: learning from demonstrations is the run itself."""
        return False

    async def draw(self, index: int) -> AnyStep:
        count = self.config.imitation.steps
        return ImitationStep(index, index * count, count)

    async def take(self, step: AnyStep) -> Mapping[str, float]:
        try:
            return await super().take(step)
        except ValueError as error:
            raise InputError(f"imitation: {error}") from error

    def _counted(self, returned: Mapping[str, float]) -> dict[str, float]:
        return dict(returned)  # nobody acted

    async def evaluate(self) -> dict[str, float] | None:
        roles = self.run.roles
        try:
            metrics: dict[str, float] = dict(await roles["trainer"].held_out())
        except ValueError as error:
            raise InputError(f"imitation: {error}") from error
        if TRIALS in roles:
            await roles["policy"].load(roles["trainer"].weights())
            metrics |= await super().evaluate() or {}
        return metrics or None

    def _sentence(self, evaluation: dict[str, float]) -> str:
        lost = f"loss {evaluation['held_out/loss']:.3f}" if "held_out/loss" in evaluation else ""
        played = super()._sentence(evaluation) if "episodes" in evaluation else ""
        return ", ".join(filter(None, (lost, played)))

    def conclude(self, before: dict[str, float] | None, after: dict[str, float] | None) -> Iterator[str]:
        if not (before and after):
            return
        if "held_out/loss" in before and "held_out/loss" in after:
            yield f"held-out loss {before['held_out/loss']:.3f} -> {after['held_out/loss']:.3f}"
        if "episodes" in after:
            yield from super().conclude(before, after)
