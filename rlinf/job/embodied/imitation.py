"""Runs that learn from demonstrations alone, and what configurations say of demonstrations.

In: an `EmbodiedConfig` whose algorithm is imitation. Out: the run, by the training loop: optimizer steps, evaluations
by trials (where there is a simulator) and on held-out episodes, checkpoints.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.loading import InputError
from rlinf.data.step import AnyStep, ImitationStep
from rlinf.job.embodied.loop import EmbodiedLoop
from rlinf.job.embodied.roles import TRIALS, VIDEOS, learners_of, start_roles
from rlinf.job.prepare import Prepared
from rlinf.job.roles.running import Roles, only, spawn_roles
from rlinf.metrics.run_directory import RunDirectory
from rlinf.placement.seats import Placed
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.system.system import ActorSystem

_UNREADABLE = (ValueError, OSError, ImportError, UserError)
"""What demonstrations, and policies that do not fit them, are refused with."""


class ImitationLoop(EmbodiedLoop):
    """A run of imitation. Arguments are those of `TrainingLoop`."""

    config: EmbodiedConfig

    def __init__(
        self, system: ActorSystem, config: EmbodiedConfig, prepared: Prepared, directory: RunDirectory
    ) -> None:
        config = replace(config, env=replace(config.env, fresh=True))  # no episode goes on from step to step
        super().__init__(system, config, prepared, directory)
        if not config.trials.episodes:
            self.headline = "evaluation/held_out/loss"  # type: ignore[misc]

    @property
    def evaluates_every(self) -> int:
        return self.config.trials.every

    async def spawn(self, placed: Placed, names: Collection[str] | None = None) -> Roles:
        config, prepared = self.config, self.prepared
        if names is None and config.trials.episodes:
            return await start_roles(self.system, config, prepared, placed, self.directory.path / VIDEOS)
        try:
            learners = await learners_of(config, prepared, self.roles)
            return await spawn_roles(self.system, placed, only(learners, names))
        except _UNREADABLE as error:
            raise InputError(f"policy, imitation: {error}") from error

    async def warm_up(self) -> bool:
        """None: learning from demonstrations is the run itself."""
        return False

    async def draw(self, index: int) -> AnyStep:
        count = self.config.imitation.steps
        return ImitationStep(index, index * count, count)

    def offered(self, step: AnyStep) -> dict[str, Any]:
        return {"step": step, **{role: self.roles[role] for role in self.prepared.roles if role in self.roles}}

    async def call_flow(self, step: AnyStep) -> Mapping[str, float]:
        try:
            return await super().call_flow(step)
        except ValueError as error:
            raise InputError(f"imitation: {error}") from error

    def _counted(self, returned: Mapping[str, float]) -> dict[str, float]:
        return dict(returned)  # nobody acted

    async def evaluate(self) -> dict[str, float] | None:
        try:
            found: dict[str, float] = dict(await self.roles["trainer"].held_out())
        except ValueError as error:
            raise InputError(f"imitation: {error}") from error
        if TRIALS in self.roles:
            await self.roles["policy"].load(self.roles["trainer"].weights())
            found |= await super().evaluate() or {}
        return found or None

    def in_words(self, evaluation: dict[str, float]) -> str:
        lost = f"loss {evaluation['held_out/loss']:.3f}" if "held_out/loss" in evaluation else ""
        played = super().in_words(evaluation) if "episodes" in evaluation else ""
        return ", ".join(filter(None, (lost, played)))

    def compared(self, before: dict[str, float], after: dict[str, float]) -> Iterator[str]:
        if "held_out/loss" in before and "held_out/loss" in after:
            yield f"held-out loss {before['held_out/loss']:.3f} -> {after['held_out/loss']:.3f}"
        if "episodes" in after:
            yield from super().compared(before, after)
