"""One run, from a checked configuration to a trained model: warm up, evaluate, take the flow's steps, evaluate, save.

In: a `RunConfig`, and where to go on from if it was begun before. Out: the run directory and a few printed lines. What
a step does is the flow's business; what surrounds the steps (which prompts, how long they took, when to evaluate and
to save) is here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Mapping
from pathlib import Path
from typing import Any

from rlinf.actors.judge import RewardError
from rlinf.config.loading import InputError, RunFailure
from rlinf.config.text import RunConfig
from rlinf.data.datasets.load import Data
from rlinf.data.datasets.rows import DataError
from rlinf.data.sample import Evaluation
from rlinf.data.step import Step
from rlinf.flows.evaluate import evaluate
from rlinf.flows.sft import sft
from rlinf.job.algorithm import flow_of
from rlinf.job.checkpoints import Checkpoints
from rlinf.job.memory import spread_of
from rlinf.job.placement_manager import Settling
from rlinf.job.prepare import Prepared, kinds_of
from rlinf.job.text_data import answers_of, evaluation_of, evaluation_settings, load_problems
from rlinf.job.text_roles import Roles, follow_warm_up, restore_roles, save_roles, spawn_roles
from rlinf.metrics.alarm import MismatchAlarm
from rlinf.metrics.console.answers import compared, in_words, rows
from rlinf.metrics.console.report import Report, tracking_of
from rlinf.metrics.html.report import write_report
from rlinf.metrics.recorder import Recorder
from rlinf.metrics.run_directory import Checkpoint, RunDirectory
from rlinf.placement.seats import Placed
from rlinf.runtime.streams.stream import Stream
from rlinf.runtime.system.handles import ActorGroup
from rlinf.runtime.system.observer import Watch
from rlinf.runtime.system.system import ActorSystem


async def learn(
    system: ActorSystem,
    config: RunConfig,
    prepared: Prepared,
    directory: RunDirectory,
    begun: Checkpoint | None = None,
) -> None:
    """Train as the configuration says, in a running system.

    Args:
        system: where.
        config: what.
        prepared: the code that the configuration names.
        directory: of the run.
        begun: go on from here; None starts anew.

    Raises:
        InputError: the flow returned no metrics.
        RunFailure: a checkpoint cannot be written, or the loss is no number.
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
        announced=("evaluation/accuracy",) if config.evaluation.every else (),
        watch=watch,
    )
    problems = load_problems(config)
    spread = spread_of(config, prepared.model_config, prepared.placed, prepared.roles)
    roles = await spawn_roles(
        system,
        config,
        problems,
        prepared.placed,
        algorithm=prepared.algorithm,
        beside=prepared.roles,
        rescue=str(directory.path),
        held=prepared.held,
        sharding=spread.sharding,
    )
    report.begins({role: group.hosts for role, group in roles.items()})
    if spread.words is not None:
        report.line(f"{config.name}: {spread.words}")
    tracking = tracking_of(config, directory, begun, report)
    settling = settling_of(config, prepared)
    async with report, Recorder(directory.path, watch, tracking, system.hosts, settling.ledger) as recorder:
        run = Run(system, config, prepared, directory, problems, roles, settling, report, recorder)
        try:
            await (run.begin() if begun is None else run.go_on(begun))
            await run.steps()
        except (FloatingPointError, RewardError) as error:
            raise RunFailure(f"step {run.done + 1}: {error}") from error
        except DataError as error:
            raise InputError(str(error)) from error
        finally:
            await run.checkpoints.abandon()
        if config.trace:
            await system.trace(directory.trace)
    await asyncio.to_thread(write_report, directory.path)
    before, after = run.before, run.after
    change = compared(before, after, config.evaluation.temperature) if before and after else ()
    report.ends(change, await system.device_memory())


def settling_of(config: RunConfig, prepared: Prepared) -> Settling:
    """Where roles are, and what a step is to the planner: a stream of prompts."""
    return Settling(
        config.placement,
        prepared.placed,
        kinds_of(prepared.roles),
        flow=prepared.flow,
        path=config.flow or flow_of(prepared.algorithm),
        model=prepared.model,
        items=config.algorithm.prompts_per_step,
        held=prepared.held,
    )


class Run:
    """A run under way: what its steps share.

    Args:
        system, config, prepared, directory: as for `learn`.
        problems: what is learned from.
        roles: running.
        settling: where they are.
        report: told of every event.
        recorder: writes down every step.
    """

    def __init__(
        self,
        system: ActorSystem,
        config: RunConfig,
        prepared: Prepared,
        directory: RunDirectory,
        problems: Data,
        roles: Roles,
        settling: Settling,
        report: Report,
        recorder: Recorder,
    ) -> None:
        self.system, self.config, self.prepared, self.directory = system, config, prepared, directory
        self.problems, self.roles, self.report, self.recorder = problems, roles, report, recorder
        self.settling = settling
        self.checkpoints = Checkpoints(directory, config.checkpoint.keep)
        self.alarm = MismatchAlarm(config.metrics.mismatch_mean, config.metrics.mismatch_max)
        self.done = 0
        """Steps taken."""
        self.before: Evaluation | None = None
        """Answers before the first step; None where there is nothing to evaluate on."""
        self.after: Evaluation | None = None
        """The newest ones."""

    async def begin(self) -> None:
        """What comes before the first step of a new run."""
        config = self.config
        if config.sft.steps:
            worked = Stream.of(self.problems.worked_batches(config.sft.steps, config.sft.batch_size))
            trained = await sft(worked, self.roles["rollout"], self.roles["trainer"], lr=config.sft.lr)
            self.report.warmed_up(trained, "worked problems")
            await follow_warm_up(config, self.roles, self.directory.path)
        self.before = self.after = await self._evaluate()
        if self.before is not None:
            self.report.evaluated(in_words(self.before, config.evaluation.temperature))
            self.recorder.write(0, _named(self.before))
            self.recorder.samples(0, rows(self.before))

    async def go_on(self, begun: Checkpoint) -> None:
        """Be where a checkpoint was written."""
        try:
            await restore_roles(self.roles, begun.path, begun.run, self.directory.path)
        except (ValueError, FileNotFoundError) as error:
            raise InputError(f"{begun.path} cannot be gone on from: {error}") from error
        await self.roles["rollout"].load(self.roles["trainer"].weights())
        queue: Any = begun.queue
        self.done = begun.step
        try:
            self.problems.load_state_dict(queue["problems"])
        except DataError as error:
            raise InputError(f"{begun.path} cannot be gone on from: {error}") from error
        self.before, self.after = evaluation_of(queue["before"]), evaluation_of(queue["after"])
        self.report.resumed(self.done, begun.path)
        for change in self.directory.changed:
            self.report.line(f"changed since then: {change}")

    async def steps(self) -> None:
        """The steps that are left."""
        config = self.config
        while self.done < config.steps:
            metrics = await self._step()
            self.done += 1
            self.recorder.samples(self.done, await self.roles["trainer"].samples(config.metrics.samples))
            last = self.done == config.steps
            if last or _due(self.done, config.evaluation.every):
                self.after = await self._evaluate()
                if self.after is not None:
                    metrics |= _named(self.after)
                    self.recorder.samples(self.done, rows(self.after))
            self.recorder.write(self.done, metrics)
            self.report.stepped(self.done, metrics)
            if (warning := self.alarm.heard(self.done, metrics)) is not None:
                self.report.line(warning)
            self.checkpoints.check()
            if last or _due(self.done, config.checkpoint.every):
                await self.checkpoints.begin(self.done, self._save, self._queue())
            if not last:
                await self._settle(metrics["timing/step"])
        await self.checkpoints.finish()

    async def _settle(self, seconds: float) -> None:
        """Move roles if it is time to."""
        config, run = self.config, self.directory.path

        def save(roles: Mapping[str, ActorGroup], aside: Path) -> Awaitable[Any]:
            return save_roles(roles, aside, config.reference.kind == "ema")

        async def spawn(placed: Placed, moving: Collection[str]) -> Roles:
            prepared = self.prepared
            spread = spread_of(config, prepared.model_config, placed, prepared.roles)
            return await spawn_roles(
                self.system, config, self.problems, placed,
                algorithm=prepared.algorithm, beside=prepared.roles, rescue=str(run), held=prepared.held,
                sharding=spread.sharding, only=moving,
            )  # fmt: skip

        async def restore(roles: Mapping[str, ActorGroup], moving: Collection[str], aside: Path) -> None:
            await restore_roles({role: roles[role] for role in moving}, aside, run)
            await roles["rollout"].load(roles["trainer"].weights())

        self.roles = await self.settling.after(
            seconds, self.system, self.roles, run,
            say=self.report.line, rest=self.checkpoints.finish, save=save, spawn=spawn, restore=restore,
        )  # fmt: skip

    async def _step(self) -> dict[str, float]:
        """Metrics of one step of the flow, with how long it took and how fast it was."""
        config, flow = self.config, self.prepared.flow
        count = config.algorithm.prompts_per_step
        step = Step(
            self.done,
            Stream.of(await self.problems.train.draw(count)),
            config.algorithm.group_size,
            prompts_per_step=count,
            sampling=self.prepared.algorithm.sampling,
            draw=self.problems.train.draw,
            critic_only="critic" in self.roles and self.done < config.critic.head_start,
            moving_reference="reference" in self.roles and config.reference.kind == "ema",
        )
        self.recorder.step_begins()
        returned = await flow(**self.prepared.arguments({"step": step, **self.roles}))
        if not isinstance(returned, Mapping):
            raise InputError(
                f"flow: {flow.__qualname__} returned {returned!r}; it must return the step's metrics, a dict of "
                "numbers by name, such as what trainer.train gives"
            )
        return await self.recorder.step_ends(self.done + 1, returned)

    async def _evaluate(self) -> Evaluation | None:
        if not self.problems.held_out:
            return None
        return await evaluate(
            Stream.of(self.problems.held_out),
            self.roles["rollout"],
            self.roles["judge"],
            **evaluation_settings(self.config),
        )

    def _save(self, directory: Path) -> Any:
        return save_roles(self.roles, directory, self.config.reference.kind == "ema")

    def _queue(self) -> dict[str, Any]:
        """What of this run is neither model nor optimizer."""
        return {
            "problems": self.problems.state_dict(),
            "before": answers_of(self.before),
            "after": answers_of(self.after),
        }


def _named(evaluation: Evaluation) -> dict[str, float]:
    return {f"evaluation/{name}": value for name, value in evaluation.metrics.items()}


def _due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0
