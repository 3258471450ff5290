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
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
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
from rlinf.data.safetensors_io import shortage
from rlinf.data.step import AnyStep
from rlinf.metrics.alarms import Alarm
from rlinf.metrics.explain import Explainer, in_short
from rlinf.metrics.recorder import Recorder
from rlinf.metrics.report import Report, tracking_of
from rlinf.metrics.tracing import RunSpans, provider
from rlinf.placement.seats import Placed
from rlinf.runs.callbacks import Observer, Records, RunState, UserCallbacks
from rlinf.runs.live.controls import BetweenSteps
from rlinf.runs.live.status import Live
from rlinf.runs.placement_manager import PlacementManager
from rlinf.runs.prepare import RunPlan
from rlinf.runs.roles import Roles, save_roles
from rlinf.runs.saving import Leaving, Saver, due
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.base.progress import work
from rlinf.runtime.base.tasks import together
from rlinf.runtime.system.handles import ActorGroup
from rlinf.runtime.system.observer import Watch
from rlinf.runtime.system.system import ActorSystem
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
        config: its configuration with what only the data can say; None: that is nothing.
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

    def __init__(self, run: RunState, config: Any = None) -> None:
        self.run = run
        self.config: Any = run.config if config is None else config
        """Its configuration, with what only its data can say."""
        self.plan: RunPlan = run.plan
        self.in_flight = InFlight()
        """Work that flows have begun for steps to come."""
        self._explained_left_out: frozenset[str] = frozenset()  # kinds of left out rows of which a line was printed

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

    # For subclasses ---------------------------------------------------------------------------------------------

    def quiet_after(self, index: int) -> int:
        """The first step after this one before which nothing may be in flight: the model is evaluated or saved then, or
        the run is over."""
        every, steps = (self.evaluates_every, self.config.checkpoint.every), self.config.steps
        return next((done for done in range(index + 1, steps) if any(due(done, each) for each in every)), steps)

    def left_out(self, stream: Counted) -> dict[str, float]:
        """How many rows of each kind a stream has left out, cut or found unknown to its tokenizer so far, as metrics of
        the step that ends. The first of a kind is an alarm."""
        kinds = ("dropped", "truncated", "unusable", "unknown")
        counts = {f"data/{kind}": getattr(stream, kind) for kind in kinds}
        lines, step = left_out(stream), self.run.done + 1
        for kind in lines.keys() - self._explained_left_out:
            self.run.alarm(Alarm(f"step {step}", f"so far, {lines[kind]}"), step)
        self._explained_left_out |= lines.keys()
        return {name: float(count) for name, count in counts.items() if count}


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

    def __init__(
        self,
        system: ActorSystem,
        config: RunConfig | EmbodiedConfig,
        plan: RunPlan,
        directory: RunDirectory,
        workload: Callable[[RunState], Workload[Any]],
    ) -> None:
        self.state = state = RunState(system, config, plan, directory, config.steps)
        self._graphs: Mapping[str, float] = {}  # that were compiled, when roles last said how they compute
        self.workload = workload(state)
        state.config = config = self.workload.config
        state.steps = config.steps
        self.saver = Saver(state, self.workload, self._written)
        self.leaving = Leaving(state, self.workload, self.saver)
        self.placement = PlacementManager(config.placement, plan)
        between = BetweenSteps(self)
        self.live = Live(state, between)
        """Shows it to watchers, and takes their wishes."""
        self.observers: list[Observer] = [
            Records(state),
            between,
            *self.workload.observers,
            UserCallbacks(state, plan.callbacks),
        ]
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

        def failure(words: str | Exception) -> RunFailure:
            return RunFailure(f"step {self.state.done + 1}: {words}")

        try:
            async with self.started(checkpoint), self.leaving:
                await self._take_steps()
        except self.workload.failures as error:
            raise failure(error) from error
        except UserError as error:
            if not self.state.roles:  # nothing was started
                raise
            raise failure(error) from error
        except DataError as error:
            raise InputError(str(error)) from error
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise RunFailure(f"after step {self.state.done} {full_disk(error, self.state.directory.path)}") from error
        except Exception as error:
            if (words := out_of_memory(error)) is None:
                raise
            raise failure(words) from error

    async def _take_steps(self) -> None:
        while await self._goes_on():
            await self.leaving.step_begins()
            step = await self.workload.draw(self.state.done)
            self.step_begins()
            returned = await self.leaving.unless_given_up(self.workload.take(step))
            if returned is None:
                await self.leaving.save_beginning()
            else:
                await self.step_ended(returned)
        if self.leaving.asked and self.leaving.left_out is None and self.state.saved_at != self.state.done:
            await self.saver.save()

    async def _goes_on(self) -> bool:
        """True if there is a next step, once what was asked for between two is done."""
        if not (self.state.over or self.leaving.asked):
            await self.live.controls.between_steps()
        return not (self.state.over or self.leaving.asked)

    @asynccontextmanager
    async def started(self, checkpoint: Checkpoint | None = None) -> AsyncIterator[None]:
        """The roles are up, and what comes before the first step is done; the run's files are complete afterwards.

        Between, whoever drives the run calls `step_begins` and `step_ended` for each step.

        Args:
            checkpoint: go on from here; None starts anew.
        """
        state = self.state
        watch = await Watch.start(state.system)
        announced = (self.workload.headline,) if self.workload.evaluates_every else ()
        config, directory, hosts = state.config, state.directory, state.system.hosts
        state.report = Report(config, directory, hosts, steps=state.steps, announced=announced, watch=watch)
        async with self.workload.opened(), self.live.opened(watch), self._roles_up(checkpoint, watch):
            yield
        await self._conclude()

    @asynccontextmanager
    async def _roles_up(self, checkpoint: Checkpoint | None, watch: Watch) -> AsyncIterator[None]:
        state, plan, notes = self.state, self.state.plan, self.workload.notes
        state.set_roles(await self.workload.spawn(plan.placed))
        state.report.begins({role: group.hosts for role, group in state.roles.items()}, notes)
        recorder = Recorder(
            state.directory.path,
            watch,
            tracking_of(state.config, state.directory, checkpoint, state.report),
            state.system.hosts,
            self.placement.ledger,
            about={"data": list(notes), "steps": state.steps}
            | {f"{role} computes": way.words for role, way in state.ways.items()},
            explainer=Explainer(self.placement.changes(state.config), plan.staleness),
            spans=None if (traces := provider(state.config.tracing)) is None else RunSpans(traces, state.config.name),
        )
        async with state.report, recorder as state.recorder:
            state.alarm_of_slow_ways()
            try:
                await (self._begin() if checkpoint is None else self.saver.restore(checkpoint))
                yield
                state.set_status("saving")
                await self.saver.files.finish()
            except self.workload.failures:
                recorder.samples(state.done + 1, await self.workload.failed())
                raise
            finally:
                await self.workload.in_flight.close()
                await self.saver.files.abandon()
            if state.config.trace:
                await state.system.trace(state.directory.trace)

    async def _conclude(self) -> None:
        state, best = self.state, self.saver.best
        with work("writing the report"):
            await asyncio.to_thread(write_report, state.directory.path)
        if self.leaving.asked and not state.over:
            state.report.line(self.leaving.describe())
            return
        lines = [*self.workload.conclude(state.before, state.after), *(() if best is None else best.in_words())]
        state.report.ends(lines, await state.system.device_memory(), why=in_short(state.recorder.explained))

    # Steps -------------------------------------------------------------------------------------------------------

    async def _tell_ways(self, graphs: Mapping[str, float]) -> None:
        """Say how roles compute where that has changed, as it may with their compiled graphs."""
        if graphs != self._graphs:
            self._graphs = graphs
            for role, before in [*self.state.ways.items()]:
                way = await self.state.roles[role][0].computes()
                if way.words != before.words:
                    self.state.computes(role, way)

    def step_begins(self) -> None:
        """Count what follows, until `step_ended`, as one step."""
        self.state.set_status("running")
        self.saver.step_begins()
        self.state.recorder.step_begins()

    async def step_ended(self, returned: Mapping[str, float]) -> Mapping[str, float]:
        """Tell and record the step; evaluate, begin to save, and move roles if it is time to.

        Args:
            returned: what the step's flow returned.

        Returns:
            The same with what was measured besides: timing, bound, evaluation.
        """
        state, in_flight = self.state, self.workload.in_flight
        returned = await self.workload.finish(returned)
        state.done += 1
        in_flight.learned()
        metrics, samples = await together([state.recorder.step_ends(state.done, returned), self.workload.samples()])
        await self._tell_ways({name: value for name, value in metrics.items() if name.endswith("compile/graphs")})
        await self._tell("on_step", metrics=dict(metrics))
        await self._tell("on_samples", samples=samples)
        last = state.done == state.steps or state.stopped is not None
        if last:
            await in_flight.close()  # a run that is stopped had begun more
        if last or due(state.done, self.workload.evaluates_every):
            metrics |= await self.evaluate()
            last = last or state.stopped is not None
        await self._tell("on_record", metrics=metrics, last=last)
        await self.saver.check_directory((*state.recorder.files, *self.workload.files()))
        self.saver.files.check()
        if last or self.saver.due or self.leaving.asked:
            await self.saver.save()
        state.ended = last
        if not (last or self.leaving.asked):
            state.set_roles(await self.placement.after(metrics["timing/step"], state, self.workload, rest=self.rest))
        elif state.stopped is not None:
            state.report_stop()
        return metrics

    async def evaluate(self) -> dict[str, float]:
        """Evaluate, and tell; the metrics, none if there is nothing to evaluate on or no time for it."""
        with self.state.doing("evaluating"):
            evaluation = await self.leaving.unless_given_up(self.workload.evaluate())
        if evaluation is None:
            return {}
        return await self._evaluated(evaluation, self.workload.describe(evaluation))

    async def _begin(self) -> None:
        """Warm up and evaluate, before the first step of a new run."""
        state = self.state
        state.set_status("warming up")
        learned = await self.workload.warm_up()
        with state.doing("evaluating"):
            state.before = await self.workload.evaluate()
        if state.before is not None:
            described = self.workload.describe(state.before)
            metrics = await self._evaluated(state.before, described)
            state.report.evaluated(described.sentence, metrics)
            state.recorder.write(0, metrics)
        elif self.saver.best is not None:
            raise InputError("checkpoint.best, evaluation.patience: there are no problems to evaluate on")
        if learned and state.steps == 0:  # the warm-up was all, and what came of it is saved as after a last step
            await self.saver.save()

    async def _evaluated(self, evaluation: Any, described: Described) -> dict[str, float]:
        """Take the newest evaluation; its metrics.

        Raises:
            InputError: it lacks the metric by which the best one is found.
        """
        state, best = self.state, self.saver.best
        state.after, state.evaluated_at = evaluation, state.done
        state.recorder.samples(state.done, described.answers)
        metrics = {f"evaluation/{name}": value for name, value in described.metrics.items()}
        if best is not None:
            best.update(state.done, metrics)
            if (why := best.exhausted) is not None:
                state.stop(why)
        await self._tell("on_evaluate", evaluation=described.metrics)
        return metrics

    async def _tell(self, event: str, **details: Any) -> None:
        """Call this method of every observer, one after the other."""
        for observer in self.observers:
            await getattr(observer, event)(self.state.done, **details)

    async def _written(self, step: int, path: Path) -> None:
        for observer in self.observers:
            await observer.on_checkpoint(step, path)

    async def rest(self) -> None:
        """Have nothing under way: checkpoints are written, and what was begun for later steps is kept for them."""
        await self.saver.files.finish()
        await self.workload.in_flight.suspend()
        # what was to be loaded later is the old trainer's
        await self.workload.in_flight.publish(self.state.roles[self.workload.generates])


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
"""Errors of a disk that takes no more."""


def full_disk(error: OSError, directory: Path) -> str:
    """The end of a sentence on a file that cannot be written, and what to do.

    Args:
        error: with the file, if it is known.
        directory: of the run.
    """
    short = shortage(directory, error) if directory.is_dir() else None
    why = f"{error.strerror}: {short}" if short else error.strerror
    text = f"{error.filename or directory} cannot be written: {why}; what is there stays as it is"
    return f"{text}. Make room, or set output_dir, and go on with --resume auto"


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
