"""One run of a policy that acts, from a checked configuration to a trained policy: try it, take the flow's steps, try.

In: an `EmbodiedConfig`, and where to go on from if it was begun before. Out: the run directory and a few printed lines.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from rlinf.config.embodied import ROLES, EmbodiedConfig
from rlinf.config.loading import InputError, RunFailure
from rlinf.data.ahead import Ahead
from rlinf.data.step import EmbodiedStep
from rlinf.envs.episodes import Episode, NothingHappened
from rlinf.envs.worker_slice import EnvironmentLost
from rlinf.flows.imitate import imitate
from rlinf.flows.policy_evaluation import trials
from rlinf.job.checkpoints import Checkpoints
from rlinf.job.embodied_roles import NEW, TRIALS, Prepared, Roles, described, spawn_learners, spawn_roles
from rlinf.job.placement_manager import Settling
from rlinf.metrics.console.report import Report, tracking_of
from rlinf.metrics.html.report import write_report
from rlinf.metrics.recorder import Recorder
from rlinf.metrics.run_directory import Checkpoint, RunDirectory
from rlinf.placement.seats import CONTROL, Placed
from rlinf.runtime.system.handles import ActorGroup
from rlinf.runtime.system.observer import Watch
from rlinf.runtime.system.system import ActorSystem
from rlinf.training.embodied.trajectory_batch import summary

VIDEOS, SIMULATORS = "videos", "environments.pt"
MOST_SKIPPED = 3
"""Steps in a row that may be skipped because every episode was lost: a worker's crash may cost one, and simulators that
leave nothing of three steps, each with other starts, need a person."""


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
    roles = await spawn_roles(system, config, code, directory.path / VIDEOS)
    report.begins({role: group.hosts for role, group in roles.items()})
    tracking = tracking_of(config, directory, begun, report)
    settling = settling_of(config, code)
    async with report, Recorder(directory.path, watch, tracking, system.hosts, settling.ledger) as recorder:
        run = EmbodiedRun(system, config, code, directory, roles, settling, report, recorder)
        try:
            await (run.begin() if begun is None else run.go_on(begun))
            await run.steps()
        except (FloatingPointError, EnvironmentLost) as error:
            raise RunFailure(f"step {run.done + 1}: {error}") from error
        finally:
            await run.ahead.close()
            await run.checkpoints.abandon()
        if config.trace:
            await system.trace(directory.trace)
    await asyncio.to_thread(write_report, directory.path)
    report.ends(_compared(run.before, run.after), await system.device_memory())


def settling_of(config: EmbodiedConfig, code: Prepared) -> Settling:
    """Where roles are, and what a step is to the planner: environments that are acted in."""
    return Settling(
        config.placement,
        code.placed,
        CONTROL,
        flow=code.flow,
        path=code.path,
        model=described(config),
        items=config.env.num_envs,
        held={},
    )


class EmbodiedRun:
    """A run under way: what its steps share.

    Args:
        system, config, code, directory: as for `learn_by_acting`.
        roles: running.
        settling: where they are.
        report: told of every event.
        recorder: writes down every step.
    """

    def __init__(
        self,
        system: ActorSystem,
        config: EmbodiedConfig,
        code: Prepared,
        directory: RunDirectory,
        roles: Roles,
        settling: Settling,
        report: Report,
        recorder: Recorder,
    ) -> None:
        self.system, self.config, self.code, self.directory, self.roles = system, config, code, directory, roles
        self.settling, self.report, self.recorder = settling, report, recorder
        self.checkpoints = Checkpoints(directory, config.checkpoint.keep)
        self.ahead = Ahead(config.algorithm.staleness)
        """What a flow has begun for steps to come."""
        self.done = 0
        """Steps taken."""
        self.skipped = 0
        """Of those, how many in a row there was nothing to learn from, up to now."""
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
        while self.done < config.steps:
            self.recorder.step_begins()
            try:
                returned = await self._step()
                self.skipped = 0
            except NothingHappened as error:
                returned = await self._skip(error)
            self.done += 1
            metrics = await self.recorder.step_ends(self.done, returned)
            last = self.done == config.steps
            if last or self._tries(self.done):
                self.after = await self._try()
                metrics |= _named(self.after)
            self.recorder.write(self.done, metrics)
            self.report.stepped(self.done, metrics)
            self.checkpoints.check()
            if last or _due(self.done, config.checkpoint.every):
                told = {"before": self.before, "after": self.after}
                await self.checkpoints.begin(self.done, await self._filling(), told)
            if not last:
                await self._settle(metrics["timing/step"])
        await self.checkpoints.finish()

    async def _settle(self, seconds: float) -> None:
        """Move roles if it is time to."""

        async def save(roles: Mapping[str, ActorGroup], aside: Path) -> None:
            if "trainer" in roles:
                await roles["trainer"].save(str(aside))

        async def spawn(placed: Placed, moving: Collection[str]) -> Roles:
            simulators = {"env": self.roles["env"]}
            return await spawn_learners(self.system, self.config, self.code, placed, simulators, moving)

        async def restore(roles: Mapping[str, ActorGroup], moving: Collection[str], aside: Path) -> None:
            if "trainer" in moving:
                await roles["trainer"].restore(str(aside / "state"))
            await roles["policy"].load(roles["trainer"].weights())

        self.roles = await self.settling.after(
            seconds, self.system, self.roles, self.directory.path,
            say=self.report.line, rest=self.checkpoints.finish, save=save, spawn=spawn, restore=restore,
        )  # fmt: skip

    async def _step(self) -> Mapping[str, float]:
        """Call the flow for the next step."""
        config = self.config
        following = range(self.done + 1, config.steps)
        until = next((done for done in following if self._looked_at(done)), config.steps)
        step = EmbodiedStep(self.done, config.policy.horizon, config.env.slices, config.env.fresh, until, self.ahead)
        offered = {"step": step, **{role: self.roles[role] for role in ROLES}}
        flow = self.code.flow
        parameters = inspect.signature(flow).parameters
        returned = await flow(**{name: offered[name] for name in parameters if name in offered})
        if not isinstance(returned, Mapping):
            raise InputError(f"flow: {flow.__qualname__} returned {returned!r}; it must return the step's metrics")
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
        await self.ahead.publish(self.roles["policy"])
        return {"skipped": 1.0}

    def _looked_at(self, done: int) -> bool:
        """Whether somebody looks at the policy after so many steps, so that nothing may be under way then."""
        return self._tries(done) or _due(done, self.config.checkpoint.every)

    def _tries(self, done: int) -> bool:
        return TRIALS in self.roles and _due(done, self.config.trials.every)

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
    roles = await spawn_roles(system, config, None, videos)
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
