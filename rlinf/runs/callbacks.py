"""Observers of a run, which record it, warn of it and show it, and the user's callbacks, which may also end it.

In: a run under way. Out: calls of `Observer`'s methods, one after the other. A user's callback is an object with any of
the methods of `EVENTS`, or a function, which is called after each step; plain or async, it gets the arguments that it
names. Who wakes whom: the run waits until each has returned, so a plain one that takes long holds up everything;
`on_checkpoint` is called beside the steps.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rlinf.config.common import CommonConfig
from rlinf.config.importing import RAISED, resolve
from rlinf.config.load import Problem, RunFailure
from rlinf.config.schema import nearest
from rlinf.runs.roles import problem

if TYPE_CHECKING:
    from rlinf.metrics.alarms import Alarm
    from rlinf.metrics.recorder import Recorder
    from rlinf.metrics.report import Report
    from rlinf.models.language.truth import Way
    from rlinf.runtime.system.system import ActorSystem
    from rlinf.storage.directory import RunDirectory

EVENTS: Mapping[str, tuple[str, ...]] = {
    "on_step": ("step", "metrics", "run"),
    "on_samples": ("step", "samples", "run"),
    "on_evaluate": ("step", "evaluation", "run"),
    "on_checkpoint": ("step", "path", "run"),
}
"""The methods that a callback may have, in the order in which a step calls them, and what each may take: `step`, the
steps done; `metrics`, of the step, by name; `samples`, rows as in samples.jsonl; `evaluation`, its metrics by name;
`path`, of a whole checkpoint; `run`, the `Run`."""


_RECORDED = (
    "The GPU waits for Python in every step, where recorded ones (CUDA graphs) do not: take a model that is decoded "
    "so, or let SGLang or vLLM decode this one (rollout.engine)"
)
"""Advice to those whose GPU decodes step by step."""
Status = Literal["starting", "warming up", "running", "evaluating", "saving", "paused", "stopping", "ended"]


@dataclass(eq=False)
class RunState:
    """A run under way: what its loop, its workload, observers and the live page share."""

    system: ActorSystem
    """Where it runs."""
    config: Any
    """Its configuration, with what only its data can say."""
    plan: Any
    """Its `RunPlan`: the code that the configuration names."""
    directory: RunDirectory
    """Where its files are."""
    steps: int | None
    """How many there will be; None: whoever drives the run decides."""
    report: Report = field(init=False)
    """Tells people of it, once it has started."""
    recorder: Recorder = field(init=False)
    """Writes it down, once its roles are up."""
    roles: dict[str, Any] = field(default_factory=dict)
    """The running ones, by name."""
    done: int = 0
    """Steps taken."""
    before: Any = None
    """The evaluation before the first step; None where there is nothing to evaluate on."""
    after: Any = None
    """The newest one."""
    evaluated_at: int | None = None
    """Steps done when it was evaluated last."""
    saved_at: int | None = None
    """Steps done when a checkpoint was begun last."""
    stopped: str | None = None
    """Why the step under way, or the last one, is the last one, if it is not the last of all."""
    ended: bool = False
    """The last step was taken, before there were as many as planned."""
    status: Status = "starting"
    """Where the run is in its life."""
    ways: dict[str, Way] = field(default_factory=dict)
    """How roles compute that say it."""
    on_change: list[Callable[[], None]] = field(default_factory=list)
    """Called when its status or its roles have changed."""

    @property
    def over(self) -> bool:
        """There are no more steps to take."""
        return self.ended or (self.steps is not None and self.done >= self.steps)

    def stop(self, why: str) -> None:
        """Let the step under way be the last one: it is evaluated and saved like the last step of a run.

        Args:
            why: half a sentence for people.
        """
        self.stopped = self.stopped or why

    def report_stop(self) -> None:
        """Say why there is no further step."""
        self.report.line(f"stopped after step {self.done}: {self.stopped}")

    def alarm(self, warning: Alarm, step: int | None = None) -> None:
        """Tell people what they should know, now and on the live page.

        Args:
            warning: what.
            step: of which step; default: of the one that is over.
        """
        self.report.line(warning)
        self.recorder.alarm(self.done if step is None else step, warning.text, warning.do)

    def computes(self, role: str, way: Way) -> None:
        """Tell people how a role computes, where that is unusual."""
        if way.words:
            self.ways[role] = way
        if not way.usual:
            self.report.line(f"{self.config.name}: {role}: {way.words}")

    def alarm_of_slow_ways(self) -> None:
        """Warn of GPUs that a role does not put to use."""
        from rlinf.metrics.alarms import Alarm

        for role, way in self.ways.items():
            if way.slow:
                self.alarm(Alarm("start", f"{role} decodes {way.slow}", _RECORDED), 0)

    def set_roles(self, roles: Mapping[str, Any]) -> None:
        """Go on with these roles."""
        self.roles = dict(roles)
        self.changed()

    def set_status(self, status: Status) -> None:
        """Be in another part of its life."""
        self.status = status
        self.changed()

    @contextmanager
    def doing(self, status: Status) -> Iterator[None]:
        """Have this status for as long as the block lasts."""
        before = self.status
        self.set_status(status)
        try:
            yield
        finally:
            self.set_status(before)

    def changed(self) -> None:
        """Tell those who watch."""
        for notify in self.on_change:
            notify()


class Observer:
    """Sees a run: each method is called when what it names has happened, and the run waits until it has returned.

    A subclass has those that it needs. A metric that warns is one with `on_record`, see `Alarms`.
    """

    async def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step was taken; it may still be evaluated."""

    async def on_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Some answers or episodes of the step, as rows of samples.jsonl."""

    async def on_evaluate(self, step: int, evaluation: Mapping[str, float]) -> None:
        """The model was evaluated."""

    async def on_record(self, step: int, metrics: Mapping[str, float], last: bool) -> None:
        """All numbers of the step are there, those of its evaluation too; `last`: there is no further step."""

    async def on_checkpoint(self, step: int, path: Path) -> None:
        """A checkpoint of these steps is whole; called beside the steps."""


class Records(Observer):
    """Has the recorder write, and the report print, what there is of each step."""

    def __init__(self, run: RunState) -> None:
        self._run = run

    async def on_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        self._run.recorder.samples(step, samples)

    async def on_record(self, step: int, metrics: Mapping[str, float], last: bool) -> None:
        self._run.recorder.write(step, metrics)
        self._run.report.stepped(step, metrics, last)


class AlarmRule(Protocol):
    """Something that warns of the numbers of a step."""

    def check(self, step: int, metrics: Mapping[str, float]) -> Alarm | None:
        """A warning, if there is one."""


class Alarms(Observer):
    """Warns of the numbers of steps.

    Args:
        run: whose people are told.
        alarms: say what of; each is asked after every step.
    """

    def __init__(self, run: RunState, alarms: Sequence[AlarmRule]) -> None:
        self._run, self._alarms = run, alarms

    async def on_record(self, step: int, metrics: Mapping[str, float], last: bool) -> None:
        for alarm in self._alarms:
            if (warning := alarm.check(step, metrics)) is not None:
                self._run.alarm(warning)


@dataclass(frozen=True, slots=True)
class Run:
    """The run, as callbacks are given it."""

    _state: RunState

    @property
    def step(self) -> int:
        """Steps done."""
        return self._state.done

    @property
    def steps(self) -> int:
        """Steps that there are to be."""
        return int(self._state.config.steps)

    @property
    def config(self) -> CommonConfig:
        """The configuration, with every key."""
        return self._state.config

    @property
    def directory(self) -> Path:
        """Where its files are."""
        return self._state.directory.path

    @property
    def roles(self) -> Mapping[str, Any]:
        """The handles of its roles by name, such as `rollout` and `trainer`."""
        return self._state.roles

    def stop(self, why: str = "a callback said so") -> None:
        """End the run in order once the step under way is over: it is evaluated and saved as after the last step.

        Args:
            why: half a sentence that is printed.
        """
        self._state.stop(why)


@dataclass(frozen=True, slots=True)
class _Listener:
    """One method, or one function."""

    name: str
    """For messages."""
    call: Callable[..., Any]
    """The function."""
    takes: tuple[str, ...]
    """Names of its arguments."""


@dataclass(frozen=True, slots=True)
class Callbacks:
    """The callbacks of one run."""

    listeners: Mapping[str, Sequence[_Listener]] = field(default_factory=dict)
    """By event."""

    @staticmethod
    def of(sources: Sequence[Any], problems: list[Problem]) -> Callbacks:
        """Read what each one listens to.

        Args:
            sources: objects, classes, which are made without arguments, functions, and dotted paths of those.
            problems: takes what is wrong with them.
        """
        listeners: dict[str, list[_Listener]] = {event: [] for event in EVENTS}
        for source in sources:
            try:
                for event, listener in _listeners(source):
                    listeners[event].append(listener)
            except RAISED as error:
                problems.append(problem("callbacks", _name(source), error))
        return Callbacks(listeners)

    async def tell(self, event: str, state: RunState, **offered: Any) -> None:
        """Call everyone who listens to an event, one after the other.

        Args:
            event: of `EVENTS`.
            state: the run.
            offered: the arguments that there are, besides `run`.

        Raises:
            RunFailure: one raised; the text names it.
        """
        for listener in self.listeners.get(event, ()):
            arguments = {**offered, "run": Run(state)}
            try:
                returned = listener.call(**{name: arguments[name] for name in listener.takes})
                if inspect.isawaitable(returned):
                    await returned
            except Exception as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{last.filename}:{last.lineno}"
                text = f"callback {listener.name} raised {type(error).__name__}: {error} ({where})"
                raise RunFailure(f"{text}, after step {state.done}") from error


class UserCallbacks(Observer):
    """Calls the user's callbacks.

    Args:
        run: of which they are told.
        callbacks: theirs.
    """

    def __init__(self, run: RunState, callbacks: Callbacks) -> None:
        self._run, self._callbacks = run, callbacks

    async def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        await self._callbacks.tell("on_step", self._run, step=step, metrics=metrics)

    async def on_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        await self._callbacks.tell("on_samples", self._run, step=step, samples=samples)

    async def on_evaluate(self, step: int, evaluation: Mapping[str, float]) -> None:
        await self._callbacks.tell("on_evaluate", self._run, step=step, evaluation=evaluation)

    async def on_checkpoint(self, step: int, path: Path) -> None:
        await self._callbacks.tell("on_checkpoint", self._run, step=step, path=path)


def _listeners(source: Any) -> Iterator[tuple[str, _Listener]]:
    callback = resolve(source) if isinstance(source, str) else source
    if inspect.isclass(callback):
        try:
            callback = callback()
        except TypeError as error:
            raise ValueError(f"it cannot be made without arguments ({error}); pass an object of it") from error
    name = _name(callback)
    methods = [event for event in EVENTS if callable(getattr(callback, event, None))]
    for method in dir(callback):
        if method.startswith("on_") and method not in EVENTS:
            near = nearest(method, EVENTS) or f"there are {', '.join(EVENTS)}"
            raise ValueError(f"it has {method}, which nothing calls; did you mean {near}?")
    if methods:
        yield from ((event, _listener(f"{name}.{event}", getattr(callback, event), EVENTS[event])) for event in methods)
    elif callable(callback):
        yield "on_step", _listener(name, callback, EVENTS["on_step"])
    else:
        raise ValueError(f"a callback is a function, or an object with any of {', '.join(EVENTS)}")


def _listener(name: str, call: Callable[..., Any], offered: tuple[str, ...]) -> _Listener:
    parameters = inspect.signature(call).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return _Listener(name, call, offered)
    required = [each.name for each in parameters if each.default is each.empty and each.kind is not each.VAR_POSITIONAL]
    if unknown := [each for each in required if each not in offered]:
        raise ValueError(f"{name} takes {', '.join(unknown)}; it may take {', '.join(offered)}")
    if by_position := [each.name for each in parameters if each.kind is each.POSITIONAL_ONLY]:
        raise ValueError(f"{name} takes {', '.join(by_position)} by position only; remove the `/`")
    return _Listener(name, call, tuple(each.name for each in parameters if each.name in offered))


def _name(source: Any) -> str:
    return source if isinstance(source, str) else str(getattr(source, "__qualname__", type(source).__qualname__))
