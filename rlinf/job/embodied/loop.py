"""Runs of a policy that acts: it is tried in environments, learns from acting in them, and is tried again.

In: an `EmbodiedConfig` and the code that it names. Out: the run, by the training loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch

from rlinf.config.embodied import DAGGER, OFF_POLICY, EmbodiedConfig
from rlinf.config.loading import InputError, RunFailure
from rlinf.data.in_flight import InFlight, Rules
from rlinf.data.step import AnyStep, EmbodiedStep, works_ahead
from rlinf.envs.episodes import NothingHappened
from rlinf.envs.worker_slice import EnvironmentLost
from rlinf.flows.imitate import imitate
from rlinf.flows.off_policy.offline import offline
from rlinf.job.embodied.curriculum import Curriculum
from rlinf.job.embodied.roles import VIDEOS, learners_of, start_roles
from rlinf.job.embodied.shown import shown_of
from rlinf.job.embodied.suites import suites_of
from rlinf.job.embodied.trials import in_words, measured, try_suites
from rlinf.job.loop import TrainingLoop
from rlinf.job.prepare import Prepared
from rlinf.job.roles.running import Roles, only, spawn_roles
from rlinf.metrics.alarm import NothingLearnedAlarm, StalenessAlarm
from rlinf.metrics.console.success import success_table
from rlinf.metrics.run_directory import Checkpoint, RunDirectory
from rlinf.placement.seats import Placed
from rlinf.runtime.system.handles import ActorGroup
from rlinf.runtime.system.system import ActorSystem

SIMULATORS = "environments.pt"
MOST_SKIPPED = 3
"""Steps in a row that may be skipped because every episode was lost: a worker's crash may cost one, and simulators that
leave nothing of three steps, each with other starts, need a person."""


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
        self._alarms = (StalenessAlarm(config.algorithm.staleness, "algorithm.staleness"), NothingLearnedAlarm())
        self.skipped = 0
        """Steps in a row, up to now, that left nothing to learn from."""
        self.env_steps = 0.0
        """Steps that were done in environments to learn from, in all steps of the flow."""
        follows = config.env.tasks and config.env.curriculum.floor < 1
        self.curriculum = Curriculum(config.env) if follows else None
        if follows and works_ahead(prepared.flow):
            raise InputError(
                "env.curriculum.floor: episodes that are begun early would be drawn by weights of any step"
            )

    @property
    def evaluates_every(self) -> int:
        return self.config.trials.every if suites_of(self.config) else 0

    @property
    def patience(self) -> int:
        return self.config.trials.patience

    @property
    def restartable(self) -> bool:
        """Episodes that begin with a step follow from its number, so it can be acted in again."""
        remembers = self.config.algorithm.name in (*OFF_POLICY, DAGGER)
        return self.config.env.fresh and not remembers and not works_ahead(self.prepared.flow)

    async def spawn(self, placed: Placed, names: Collection[str] | None = None) -> Roles:
        if names is None:
            return await start_roles(self.system, self.config, self.prepared, placed, self.directory.path / VIDEOS)
        learners = await learners_of(self.config, self.prepared, self.roles)
        return await spawn_roles(self.system, placed, only(learners, names))  # simulators stay where they are

    async def warm_up(self) -> bool:
        settings = self.config.imitation
        if (shown := shown_of(settings)) is None:
            return False
        roles = (self.roles["policy"], self.roles["trainer"])
        try:
            found = await imitate(*roles, shown, steps=settings.steps, batch=settings.batch, lr=settings.lr)
        except (ValueError, FileNotFoundError, ImportError) as error:
            raise InputError(f"imitation.path: {error}") from error
        self.report.line(
            f"imitated {found['imitation/decisions']:.0f} decisions: {settings.steps} steps, loss "
            f"{found['imitation/last']:.2f} nats per number"
        )
        return True

    async def draw(self, index: int) -> AnyStep:
        config = self.config
        until = self.quiet_after(index)
        return EmbodiedStep(index, config.policy.horizon, config.env.slices, config.env.fresh, until, self.in_flight)

    async def call_flow(self, step: AnyStep) -> Mapping[str, float]:
        if step.index < self.config.off_policy.offline_steps:
            return await offline(self.roles["policy"], self.roles["trainer"])
        try:
            returned = await super().call_flow(step)
        except NothingHappened as error:
            return await self._skip(error)
        self.skipped = 0
        if self.curriculum is not None:
            self.curriculum.heard(returned)
            returned = {**returned, **self.curriculum.told()}
            await self._weigh(self.curriculum)
        return self._counted(returned)

    async def _weigh(self, curriculum: Curriculum) -> None:
        await asyncio.gather(*(env.weigh(curriculum.weights) for env in self.roles["env"]))

    def _counted(self, returned: Mapping[str, float]) -> dict[str, float]:
        """A step's metrics, with the environment steps of all steps."""
        self.env_steps += returned.get("env_steps", 0.0)
        return {**returned, "env_steps/total": self.env_steps}

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
        advice = f"Raise env.step_timeout={self.config.env.step_timeout:g} s if its simulators are slow"
        self.recorder.alarm(self.done + 1, f"the step is skipped: {error}", advice)
        await self.in_flight.publish(self.roles["policy"])
        return self._counted({"skipped": 1.0})

    async def evaluate(self) -> dict[str, float] | None:
        if not suites_of(self.config):
            return None
        return measured(await try_suites(self.roles, self.config, self.directory.path / VIDEOS, self.done))

    def numbers(self, evaluation: dict[str, float]) -> dict[str, float]:
        return {name.removeprefix("episodes/"): value for name, value in evaluation.items()}

    def stepped(self, metrics: Mapping[str, float]) -> None:
        for alarm in self._alarms:
            if (warning := alarm.heard(self.done, metrics)) is not None:
                self.alarm(warning)

    def in_words(self, evaluation: dict[str, float]) -> str:
        return in_words(evaluation)

    def compared(self, before: dict[str, float], after: dict[str, float]) -> Iterator[str]:
        kind = "the likeliest" if self.config.trials.greedy else "drawn"
        yield f"{after['episodes']:.0f} trials by {kind} actions, before and after:"
        for name in ("success_once", "success_at_end", "reward/mean", "episodes/length"):
            if name in before and name in after:
                style = ".1%" if name.startswith("success") else ".2f"
                yield f"  {name:<16} {before[name]:>8{style}} -> {after[name]:{style}}"
        yield from success_table(before, after)

    async def _publish(self, roles: Mapping[str, ActorGroup]) -> None:
        """To a policy that may be new: what never changes, too, may be another's than that which it was made with."""
        if self.generates in roles:
            await roles[self.generates].load(roles["trainer"].weights(whole=True))

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

    def queue(self) -> dict[str, Any]:
        rates = None if self.curriculum is None else self.curriculum.rates
        return {**super().queue(), "env_steps": self.env_steps, "curriculum": rates}

    async def restore(self, begun: Checkpoint) -> None:
        await super().restore(begun)
        self.env_steps = float(cast("float", begun.queue.get("env_steps", 0.0)))
        if self.curriculum is not None:
            self.curriculum.resume(begun.queue.get("curriculum"))
            await self._weigh(self.curriculum)
        if self.config.env.fresh:
            return
        # Episodes go on over a restart, too. Tensors and plain values only: checkpoints are things that people download
        saved = await asyncio.to_thread(torch.load, begun.path / SIMULATORS, weights_only=True)
        if len(saved) != len(self.roles["env"]):
            raise ValueError(f"{len(saved)} hosts simulated, and now {len(self.roles['env'])} do: resume with as many")
        await asyncio.gather(*(env.restore(state) for env, state in zip(self.roles["env"], saved, strict=True)))
