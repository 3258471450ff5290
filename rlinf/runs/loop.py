"""The training loop: everything around the steps of a run, whether it learns from text or by acting.

In: a checked configuration, the code that it names, and where to go on from if the run was begun before. Out: the run
directory and a few printed lines. The loop has a `Workload`, which is one kind of run: its roles, what a step is given,
how the model is evaluated, what a checkpoint keeps besides weights. It tells `Observer`s what happens: the recorder,
the report, alarms, the live page, the user's callbacks. A step itself is the flow's. Who wakes whom: each step begins
when the one before has ended; checkpoints are written meanwhile.
"""

from __future__ import annotations

import asyncio
import errno
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.load import InputError, RunFailure
from rlinf.config.text import RunConfig
from rlinf.dashboard.report import write_report
from rlinf.data.datasets.source import DataError
from rlinf.data.datasets.stream import Counted, left_out
from rlinf.data.in_flight import InFlight
from rlinf.data.in_flight.snapshot import read_kept, write_kept
from rlinf.data.safetensors_io import shortage
from rlinf.data.step import AnyStep
from rlinf.metrics.alarms import Alarm
from rlinf.metrics.explain import Explainer, in_short
from rlinf.metrics.recorder import Recorder
from rlinf.metrics.report import Report, report_of, tracking_of
from rlinf.placement.seats import Placed
from rlinf.runs.callbacks import Observer, Records, RunUnderWay, UserCallbacks
from rlinf.runs.live.status import Live
from rlinf.runs.placement_manager import Changes, PlacementManager
from rlinf.runs.prepare import RunPlan
from rlinf.runs.resume import Leaving, resume_hint
from rlinf.runs.roles import Roles, restore_roles, save_roles
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.base.progress import work
from rlinf.runtime.system.handles import ActorGroup
from rlinf.runtime.system.observer import Watch
from rlinf.runtime.system.system import ActorSystem
from rlinf.storage.checkpoints import Checkpoints, best_of
from rlinf.storage.directory import Checkpoint, RunDirectory
from rlinf.storage.files import JsonLines


def metrics_of(flow: Callable[..., Any], returned: Any) -> dict[str, float]:
    """A step's metrics.

    Args:
        flow: that returned them, for errors.
        returned: numbers by name, or what becomes numbers, such as tensors of one element.

    Raises:
        InputError: it is nothing of the kind.
    """
    if not isinstance(returned, Mapping):
        raise InputError(
            f"flow: {flow.__qualname__} returned {returned!r}; it must return the step's metrics, a dict of "
            "numbers by name, such as what trainer.train gives"
        )
    return {name: _number(flow, name, value) for name, value in returned.items()}


def _number(flow: Callable[..., Any], name: Any, value: Any) -> float:
    if isinstance(name, str) and isinstance(value, int | float):
        return value
    try:
        if isinstance(name, str) and not isinstance(value, str | bytes):
            return float(value)
    except (TypeError, ValueError, RuntimeError):  # the last is torch's, of a tensor with several elements
        pass
    raise InputError(
        f"flow: {flow.__qualname__} returned the metric {name!r} = {value!r:.100}; names are texts and values single "
        "numbers"
    )


E = TypeVar("E")
"""The outcome of an evaluation."""


@dataclass(frozen=True, slots=True)
class Described:
    """An evaluation as people and files have it."""

    metrics: dict[str, float]
    """By name."""
    sentence: str
    """Half of one."""
    answers: list[dict[str, Any]] = field(default_factory=list)
    """Rows of samples.jsonl."""


class Workload(ABC, Generic[E]):
    """One kind of run. `TrainingLoop` has one, and asks it for all that is particular to the kind.

    Args:
        run: whose; it has no roles, report and recorder yet.
    """

    generates: ClassVar[str]
    """The role that acts by the weights that the trainer publishes."""
    failures: ClassVar[tuple[type[Exception], ...]] = (FloatingPointError,)
    """Errors that end a run without being a mistake in the code: told with their step, without a traceback."""
    headline: str
    """The metric of evaluations that has a column in the printed table."""
    evaluates_every: int = 0
    """Steps between evaluations; 0 evaluates only before and after."""
    patience: int = 0
    """Evaluations that are no better than the best one after which the run ends; 0 for never."""
    notes: Sequence[str] = ()
    """Lines on the data, for the beginning."""
    moving_reference: bool = False
    """The reference policy changes from step to step, so that checkpoints keep it."""
    kinds: Sequence[type[Any]] = ()
    """Dataclasses of half made work, as checkpoints keep it."""
    ahead: bool = False
    """The flow takes what is in flight: what was drawn is kept there, until it is learned from."""
    own_roles: Collection[str] = ()
    """Names of the user's own roles."""
    observers: Sequence[Observer] = ()
    """Alarms and the like, of this kind of run."""

    def __init__(self, run: RunUnderWay, config: Any = None) -> None:
        self.run = run
        self.config: Any = run.config if config is None else config
        """Its configuration, with what only its data can say."""
        self.plan: RunPlan = run.plan
        self.in_flight = InFlight()
        """Work that flows have begun for steps to come."""

    # What each kind says ----------------------------------------------------------------------------------------

    @abstractmethod
    async def spawn(self, placed: Placed, names: Collection[str] | None = None) -> Roles:
        """Start roles.

        Args:
            placed: where.
            names: which, of those that can move; None for all.
        """

    @abstractmethod
    async def draw(self, index: int) -> AnyStep:
        """The next step as the flow is given it; called once for each, in order."""

    @abstractmethod
    async def evaluate(self) -> E | None:
        """How good the model is now; None where there is nothing to evaluate on."""

    @abstractmethod
    def describe(self, evaluation: E) -> Described:
        """An evaluation in numbers and words."""

    @abstractmethod
    def conclude(self, before: E | None, after: E | None) -> Iterable[str]:
        """Lines on what came of the run, and on what was not as it should be."""

    @property
    def restartable(self) -> bool:
        """A step that was given up before the first optimizer step can be taken again from `position`: none of the
        roles has moved on."""
        return False

    # What most kinds have alike ---------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All that a checkpoint keeps besides models and optimizers, as JSON."""
        return {**self.position(), "before": self.run.before, "after": self.run.after}

    def position(self) -> dict[str, Any]:
        """The part of `state` that drawing moves on."""
        return {}

    async def restore(self, checkpoint: Checkpoint) -> None:
        """Take over what a checkpoint has besides the roles' own state: `state`, and what `writer` added.

        Raises:
            ValueError, FileNotFoundError, DataError: it does not fit.
        """
        queue: Any = checkpoint.queue
        self.run.before, self.run.after = queue["before"] or None, queue["after"] or None

    async def writer(self) -> Callable[[Path], Awaitable[Any]]:
        """A function that writes a checkpoint of this moment into a directory: the snapshot is complete once it was
        called."""
        return lambda directory: save_roles(self.run.roles, directory, self.moving_reference, self.own_roles)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Holds what lasts as long as the run, around all else."""
        yield

    def files(self) -> Iterable[JsonLines]:
        """Files of the run directory to which lines are added, besides the recorder's."""
        return ()

    async def warm_up(self) -> bool:
        """Supervised training before the first step; False if there is none."""
        return False

    async def take(self, step: AnyStep) -> Mapping[str, float]:
        """Have the flow take a step; its metrics.

        Raises:
            InputError: the flow returned none, or one that is no number.
        """
        flow = self.plan.flow
        return metrics_of(flow, await flow(**self.plan.arguments(self.offered(step))))

    def offered(self, step: AnyStep) -> dict[str, Any]:
        """Arguments that a flow may take, by name."""
        roles = self.run.roles
        return {"step": step, **{role: roles[role] for role in self.plan.roles if role in roles}}

    async def finish(self, returned: Mapping[str, float]) -> Mapping[str, float]:
        """Metrics of a step that the flow has taken, with what this kind of run measures besides."""
        return returned

    async def samples(self) -> Sequence[Mapping[str, Any]]:
        """Rows of samples.jsonl that show the step that has just ended."""
        return []

    async def failed(self) -> Sequence[Mapping[str, Any]]:
        """Rows of samples.jsonl that show the step that one of `failures` ended."""
        return []

    async def publish(self, roles: Mapping[str, ActorGroup]) -> None:
        """Let a role that generates, and may be new, have the trainer's weights."""
        await roles[self.generates].load(roles["trainer"].weights())


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
"""Errors of a disk that takes no more."""


class TrainingLoop:
    """One run: warm up, evaluate, take the flow's steps, evaluate, save.

    Args:
        system: where.
        config: what.
        plan: the code that the configuration names.
        directory: of the run.
        workload: makes the kind of run that it is.
    """

    report: Report
    """Tells people of it."""
    recorder: Recorder
    """Writes it down."""

    def __init__(
        self,
        system: ActorSystem,
        config: RunConfig | EmbodiedConfig,
        plan: RunPlan,
        directory: RunDirectory,
        workload: Callable[[TrainingLoop], Workload[Any]],
    ) -> None:
        self.system, self.config, self.plan, self.directory = system, config, plan, directory
        self.roles: Roles = {}
        """The running ones, by name."""
        self.done = 0
        """Steps taken."""
        self.before: Any = None
        """The evaluation before the first step; None where there is nothing to evaluate on."""
        self.after: Any = None
        """The newest one."""
        self.stopped: str | None = None
        """Why the step under way, or the last one, is the last one, if it is not the last of all."""
        self.workload = workload(self)
        self.config = config = self.workload.config
        self.steps: int | None = config.steps
        """How many there will be; None: whoever drives the run decides."""
        self.in_flight = self.workload.in_flight
        self.placement = PlacementManager(config.placement, plan)
        self.checkpoints = Checkpoints(directory, config.checkpoint.keep, self._written)
        self.best = best_of(config.checkpoint, self.workload.headline, self.workload.patience)
        """The best one after a step, where the configuration asks for it."""
        self._over = False  # the last step was taken
        self._explained_left_out: frozenset[str] = frozenset()  # kinds of left out rows of which a line was printed
        self.saved_at: int | None = None
        """Steps done when a checkpoint was begun last."""
        self._saved_when: float | None = None  # seconds of the event loop's clock; of the first step where none was
        self.evaluated_at: int | None = None
        """Steps done when it was evaluated last."""
        self.leaving = Leaving(None)
        """How the run ends if it is told to before its last step."""
        self.live = Live(self, directory.path, config.placement.mode or "by hand", web=config.metrics.web)
        """Shows it to watchers, and takes their wishes."""
        self.observers: list[Observer] = [
            Records(self), self.live.between, *self.workload.observers, UserCallbacks(self, plan.callbacks)
        ]  # fmt: skip
        """Told what happens, in this order."""

    # The run -----------------------------------------------------------------------------------------------------

    async def run(self, checkpoint: Checkpoint | None = None) -> None:
        """Train from the first step to the last.

        Args:
            checkpoint: go on from here; None starts anew.

        Raises:
            InputError: something that the configuration names cannot be used, or the flow returned no metrics.
            RunFailure: a file cannot be written, the loss is no number, no episode went well, or one of `failures`.
            Exception: whatever the flow or a role raised.
        """
        try:
            async with self.started(checkpoint), Leaving(self) as self.leaving:
                await self._take_steps()
        except self.workload.failures as error:
            raise RunFailure(f"step {self.done + 1}: {error}") from error
        except UserError as error:
            if not self.roles:  # nothing was started
                raise
            raise RunFailure(f"step {self.done + 1}: {error}") from error
        except DataError as error:
            raise InputError(str(error)) from error
        except OSError as error:
            if error.errno not in FULL:
                raise
            which = error.filename or self.directory.path
            short = shortage(self.directory.path, error) if self.directory.path.is_dir() else None
            why = f"{error.strerror}: {short}" if short else error.strerror
            text = f"after step {self.done} {which} cannot be written: {why}; what is there stays as it is"
            raise RunFailure(f"{text}. Make room, or set output_dir, and go on with --resume auto") from error
        except Exception as error:
            if (words := out_of_memory(error)) is None:
                raise
            raise RunFailure(f"step {self.done + 1}: {words}") from error

    async def _take_steps(self) -> None:
        while await self._goes_on():
            await self.leaving.step_begins()
            step = await self.workload.draw(self.done)
            self.step_begins()
            returned = await self.leaving.unless_given_up(self.workload.take(step))
            if returned is None:
                await self.leaving.save_beginning()
            else:
                await self.step_ended(returned)
        if self.leaving.asked and self.leaving.left_out is None and self.saved_at != self.done:
            await self.save()

    async def _goes_on(self) -> bool:
        """True if there is a next step, once what was asked for between two is done."""
        if not (self.over or self.leaving.asked):
            await self.live.controls.between_steps()
        return not (self.over or self.leaving.asked)

    @asynccontextmanager
    async def started(self, checkpoint: Checkpoint | None = None) -> AsyncIterator[None]:
        """The roles are up, and what comes before the first step is done; the run's files are complete afterwards.

        Between, whoever drives the run calls `step_begins` and `step_ended` for each step.

        Args:
            checkpoint: go on from here; None starts anew.
        """
        watch = await Watch.start(self.system)
        announced = (self.workload.headline,) if self.workload.evaluates_every else ()
        self.report = report_of(self.config, self.directory, self.system.hosts, self.steps, announced, watch)
        async with self.workload.opened(), self.live.opened(watch, self.report), self._roles_up(checkpoint, watch):
            yield
        await self._conclude()

    @asynccontextmanager
    async def _roles_up(self, checkpoint: Checkpoint | None, watch: Watch) -> AsyncIterator[None]:
        config, directory = self.config, self.directory
        notes = self.workload.notes
        self.roles = await self.workload.spawn(self.plan.placed)
        self._show_roles()
        self.report.begins({role: group.hosts for role, group in self.roles.items()}, notes)
        tracking = tracking_of(config, directory, checkpoint, self.report)
        recorder = Recorder(
            directory.path,
            watch,
            tracking,
            self.system.hosts,
            self.placement.ledger,
            about={"data": list(notes), "steps": self.steps},
            explainer=Explainer(self._changes(), self.plan.staleness),
        )
        async with self.report, recorder as self.recorder:
            try:
                await (self._begin() if checkpoint is None else self._resume(checkpoint))
                yield
                self.live.status("saving")
                await self.checkpoints.finish()
            except self.workload.failures:
                self.recorder.samples(self.done + 1, await self.workload.failed())
                raise
            finally:
                await self.in_flight.close()
                await self.checkpoints.abandon()
            if config.trace:
                await self.system.trace(directory.trace)

    async def _conclude(self) -> None:
        with work("writing the report"):
            await asyncio.to_thread(write_report, self.directory.path)
        if self.leaving.asked and not self.over:
            self.report.line(self.leaving.told())
            return
        best = () if self.best is None else self.best.in_words()
        lines = [*self.workload.conclude(self.before, self.after), *best]
        self.report.ends(lines, await self.system.device_memory(), why=in_short(self.recorder.explained))

    def _changes(self) -> Changes:
        placement, plan = self.placement, self.plan
        return Changes(
            self.config, lambda: placement.ledger.profile, lambda: placement.placed, plan.staleness, plan.path
        )

    def step_begins(self) -> None:
        """Count what follows, until `step_ended`, as one step."""
        self.live.status("running")
        if self._saved_when is None:
            self._saved_when = asyncio.get_running_loop().time()
        self.recorder.step_begins()

    async def step_ended(self, returned: Mapping[str, float]) -> Mapping[str, float]:
        """Tell and record the step; evaluate, begin to save, and move roles if it is time to.

        Args:
            returned: what the step's flow returned.

        Returns:
            The same with what was found beside: timing, bound, evaluation.
        """
        returned = await self.workload.finish(returned)
        self.done += 1
        self.in_flight.learned()
        metrics = await self.recorder.step_ends(self.done, returned)
        samples = await self.workload.samples()
        await self._tell("on_step", metrics=dict(metrics))
        await self._tell("on_samples", samples=samples)
        last = self.done == self.steps or self.stopped is not None
        if last:
            await self.in_flight.close()  # a run that is stopped had begun more
        if last or due(self.done, self.workload.evaluates_every):
            metrics |= await self.evaluate_and_tell()
            last = last or self.stopped is not None
        await self._tell("on_record", metrics=metrics, last=last)
        await self._check_directory()
        self.checkpoints.check()
        if last or self._saves_now():
            await self.save()
        self._over = last
        if not (last or self.leaving.asked):
            await self._move(metrics["timing/step"])
        elif self.stopped is not None:
            self.report.line(f"stopped after step {self.done}: {self.stopped}")
        return metrics

    def _saves_now(self) -> bool:
        is_best = self.best is not None and self.best.kept == self.done
        is_due = due(self.done, self.config.checkpoint.every) or self._long_unsaved()
        return is_due or is_best or self.leaving.asked

    async def _check_directory(self) -> None:
        """See that what the run writes is where its reader looks for it.

        Raises:
            RunFailure: somebody has moved or removed it; the state is saved, if there is still a place for it.
        """
        files = (*self.recorder.files, *self.workload.files())
        damage = self.directory.damage(files, saved=self.checkpoints.newest is not None)
        if damage is None:
            return
        if not self.directory.path.is_dir():
            raise RunFailure(f"after step {self.done}: {damage}; nothing that this run writes would be found")
        await self.checkpoints.abandon()  # one under way may have been taken away, too
        self.directory.checkpoints.mkdir(exist_ok=True)
        await self.save()
        await self.checkpoints.finish()
        how = resume_hint(self.directory, self.config.checkpoint)
        raise RunFailure(f"after step {self.done}: {damage}; the run ends, and its state is saved: {how}")

    def _long_unsaved(self) -> bool:
        """`checkpoint.minutes` have gone since the newest checkpoint was begun."""
        seconds = 60 * self.config.checkpoint.minutes
        since = self._saved_when
        return seconds > 0 and since is not None and asyncio.get_running_loop().time() - since >= seconds

    async def evaluate_and_tell(self) -> dict[str, float]:
        """Evaluate, and tell; the metrics, none if there is nothing to evaluate on or no time for it."""
        with self.live.doing("evaluating"):
            evaluation = await self.leaving.unless_given_up(self.workload.evaluate())
        if evaluation is None:
            return {}
        return await self._evaluated(evaluation, self.workload.describe(evaluation))

    def ends_here(self) -> None:
        """There will be no further step."""
        self._over = True
        self.report.line(f"stopped after step {self.done}: {self.stopped}")

    async def save(self, position: Mapping[str, Any] | None = None) -> None:
        """Begin to write a checkpoint of this moment.

        Args:
            position: in the data, where that is to be another than now.
        """
        self.saved_at, self._saved_when = self.done, asyncio.get_running_loop().time()
        best, best_step = (None, None) if self.best is None else (self.best.state_dict(), self.best.kept)
        save = await self.workload.writer()
        unfinished = await self.in_flight.state()
        queue = {**self.workload.state(), **(position or {}), "best": best}  # of the same moment as what is in flight

        kinds = self.workload.kinds

        def fill(directory: Path) -> Coroutine[Any, Any, None]:
            saved = save(directory)  # called at once: of this moment, whatever comes next

            async def written() -> None:
                await saved
                if unfinished.entries and kinds:  # otherwise it is begun anew
                    await asyncio.to_thread(write_kept, directory, unfinished, kinds)

            return written()

        await self.checkpoints.begin(self.done, fill, queue, best_step)

    def stop(self, why: str) -> None:
        """Let the step under way be the last one: it is evaluated and saved like the last step of a run.

        Args:
            why: half a sentence for people.
        """
        self.stopped = self.stopped or why

    @property
    def over(self) -> bool:
        """There are no more steps to take."""
        return self._over or (self.steps is not None and self.done >= self.steps)

    async def _begin(self) -> None:
        """Warm up and evaluate, before the first step of a new run."""
        self.live.status("warming up")
        learned = await self.workload.warm_up()
        with self.live.doing("evaluating"):
            self.before = await self.workload.evaluate()
        if self.before is not None:
            described = self.workload.describe(self.before)
            metrics = await self._evaluated(self.before, described)
            self.report.evaluated(described.sentence, metrics)
            self.recorder.write(0, metrics)
        elif self.best is not None:
            raise InputError("checkpoint.best, evaluation.patience: there are no problems to evaluate on")
        if learned and self.steps == 0:  # the warm-up was all, and what came of it is saved as after a last step
            await self.save()

    async def _resume(self, checkpoint: Checkpoint) -> None:
        """Go on where a checkpoint was written."""
        try:
            own_roles, kinds = self.workload.own_roles, self.workload.kinds
            await restore_roles(self.roles, checkpoint.path, checkpoint.run, self.directory.path, own_roles)
            await self.workload.restore(checkpoint)
            if (unfinished := await asyncio.to_thread(read_kept, checkpoint.path, kinds)) is not None:
                self.in_flight.resume(unfinished)
        except (ValueError, LookupError, FileNotFoundError, DataError) as error:
            raise InputError(f"{checkpoint.path} cannot be gone on from: {error}") from error
        await self.workload.publish(self.roles)
        self.done = self.saved_at = checkpoint.step
        if self.best is not None:
            self.best.resume(checkpoint.queue.get("best"), self.directory)
            if (why := self.best.exhausted) is not None:
                self._over = True
                self.report.line(f"nothing is left to do: {why}")
        for each in checkpoint.passed_over:
            self.report.line(f"passed over, as it is damaged: {each}")
        newest = self.before if self.after is None else self.after
        numbers = {} if newest is None else self.workload.describe(newest).metrics
        self.report.resumed(
            self.done, checkpoint.path, {f"evaluation/{name}": value for name, value in numbers.items()}
        )
        for change in self.directory.changed:
            self.report.line(f"changed since then: {change}")

    def quiet_after(self, index: int) -> int:
        """The first step after this one before which nothing may be in flight: the model is evaluated or saved then, or
        the run is over."""
        every = (self.workload.evaluates_every, self.config.checkpoint.every)
        following = range(index + 1, self.config.steps)
        return next((done for done in following if any(due(done, each) for each in every)), self.config.steps)

    async def _evaluated(self, evaluation: Any, described: Described) -> dict[str, float]:
        """Take the newest evaluation; its metrics.

        Raises:
            InputError: it lacks the metric by which the best one is found.
        """
        self.after, self.evaluated_at = evaluation, self.done
        self.recorder.samples(self.done, described.answers)
        metrics = {f"evaluation/{name}": value for name, value in described.metrics.items()}
        if self.best is not None:
            self.best.heard(self.done, metrics)
            if (why := self.best.exhausted) is not None:
                self.stop(why)
        await self._tell("on_evaluate", evaluation=described.metrics)
        return metrics

    def alarm(self, warning: Alarm, step: int | None = None) -> None:
        """Tell people what they should know, now and on the live page.

        Args:
            warning: what.
            step: of which step; default: of the one that is over.
        """
        self.report.line(warning)
        self.recorder.alarm(self.done if step is None else step, warning.text, warning.do)

    def left_out(self, stream: Counted) -> dict[str, float]:
        """How many rows of each kind a stream has left out, cut or found unknown to its tokenizer so far, as metrics of
        the step that ends. The first of a kind is an alarm."""
        kinds = ("dropped", "truncated", "unusable", "unknown")
        counts = {f"data/{kind}": getattr(stream, kind) for kind in kinds}
        lines = left_out(stream)
        for kind in lines.keys() - self._explained_left_out:
            self.alarm(Alarm(f"step {self.done + 1}", f"so far, {lines[kind]}"), self.done + 1)
        self._explained_left_out |= lines.keys()
        return {name: float(count) for name, count in counts.items() if count}

    async def _tell(self, event: str, **details: Any) -> None:
        """Call this method of every observer, one after the other."""
        for observer in self.observers:
            await getattr(observer, event)(self.done, **details)

    async def _written(self, step: int, path: Path) -> None:
        for observer in self.observers:
            await observer.on_checkpoint(step, path)

    async def rest(self) -> None:
        """Have nothing under way: checkpoints are written, and what was begun for later steps is kept for them."""
        await self.checkpoints.finish()
        await self.in_flight.suspend()
        # what was to be loaded later is the old trainer's
        await self.in_flight.publish(self.roles[self.workload.generates])

    async def _move(self, seconds: float) -> None:
        """Move roles, if it is time to."""
        self.roles = await self.placement.after(
            seconds, self.system, self.roles, self.directory.path,
            say=self.report.line, rest=self.rest, spawn=self.workload.spawn, publish=self.workload.publish,
        )  # fmt: skip
        self._show_roles()

    def _show_roles(self) -> None:
        self.live.roles({role: group.hosts for role, group in self.roles.items()})


def due(done: int, every: int) -> bool:
    """True if something that happens after `every` steps, 0 for never, happens after so many."""
    return every > 0 and done % every == 0


_FULL_MEMORY = (
    "CUDA out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)
"""Beginnings of what torch says where there is no memory left; the CPU's allocator has no exception of its own."""
_SMALLER = {
    "trainer": "lower trainer.micro_batch_tokens (activations), set trainer.gradient_checkpointing=true or "
    "trainer.sharding=shard",
    "rollout": "lower rollout.max_rows or rollout.max_tokens (keys and values)",
}
"""Settings that make a role smaller, by its name."""


def out_of_memory(error: BaseException) -> str | None:
    """A sentence on an error that says that memory is used up, and what to do; None of any other.

    Args:
        error: with notes on the call in which it was raised, as the runtime adds them.
    """
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(out_of_memory, error.exceptions)), None)
    text = str(error)
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if not (kinds & {"MemoryError", "OutOfMemoryError"} or any(words in text for words in _FULL_MEMORY)):
        return None
    where = next((note for note in getattr(error, "__notes__", ()) if note.startswith("in ")), "")
    role = where.removeprefix("in ").partition("[")[0].partition(".")[0]
    first = text.strip().partition("\n")[0]
    smaller = _SMALLER.get(role, "; ".join(_SMALLER.values()))
    sentence = f"out of memory{f' {where}' if where else ''}{f': {first}' if first else ''}"
    return f"{sentence}. What helps: {smaller}; `--dry-run` adds up what each role holds"
