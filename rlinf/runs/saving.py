"""Checkpoints of a run: when they are due, what they hold, going on from one; and the end of a run that a signal ends.

In: a run under way, and its workload. Out: checkpoints that are written while steps go on; a run as it was when one was
written. A run that is told to end, as schedulers do before they take a machine away, ends after the step under way if
that comes in time; otherwise the step is given up, and the state in which it began is saved. Who wakes whom: the signal
wakes `_end_soon`, which cancels the task of the flow, or of an evaluation, when time is up; the run goes on to save.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from rlinf.config.load import InputError, RunFailure
from rlinf.data.datasets.source import DataError
from rlinf.data.in_flight.snapshot import read_kept, write_kept
from rlinf.runs.callbacks import RunState
from rlinf.runs.resume import resume_hint
from rlinf.runs.roles import restore_roles
from rlinf.runtime.base.tasks import cancel_all
from rlinf.runtime.system.ending import Preemption
from rlinf.storage.checkpoints import Checkpoints, best_of
from rlinf.storage.directory import Checkpoint
from rlinf.storage.files import JsonLines


class Saver:
    """Writes checkpoints of a run, and goes on from one.

    Args:
        state: of the run.
        workload: the kind of run that it is.
        written: see `Checkpoints`.
    """

    def __init__(self, state: RunState, workload: Any, written: Callable[[int, Path], Awaitable[None]]) -> None:
        self._state, self._workload, self._settings = state, workload, state.config.checkpoint
        self.files = Checkpoints(state.directory, self._settings.keep, written)
        self.best = best_of(self._settings, workload.headline, workload.patience)
        """The best evaluation after a step, where the configuration asks for it."""
        self._since: float | None = None  # when the newest was begun, by the event loop's clock, or the first step

    def step_begins(self) -> None:
        """Count `checkpoint.minutes` from the first step on."""
        if self._since is None:
            self._since = asyncio.get_running_loop().time()

    @property
    def due(self) -> bool:
        """It is time for a checkpoint: by steps, by minutes, or because the newest evaluation was the best."""
        done, seconds, since = self._state.done, 60 * self._settings.minutes, self._since
        waited = seconds > 0 and since is not None and asyncio.get_running_loop().time() - since >= seconds
        is_best = self.best is not None and self.best.kept == done
        return due(done, self._settings.every) or waited or is_best

    async def save(self, position: Mapping[str, Any] | None = None) -> None:
        """Begin to write a checkpoint of this moment.

        Args:
            position: in the data, where that is to be another than now.
        """
        state, workload = self._state, self._workload
        state.saved_at, self._since = state.done, asyncio.get_running_loop().time()
        best, best_step = (None, None) if self.best is None else (self.best.state_dict(), self.best.kept)
        save = await workload.writer()
        unfinished = await workload.in_flight.state()
        queue = {**workload.state(), **(position or {}), "best": best}  # of the same moment as what is in flight

        def fill(directory: Path) -> Coroutine[Any, Any, None]:
            saving = save(directory)  # called at once: of this moment, whatever comes next

            async def write() -> None:
                await saving
                if unfinished.entries and workload.kinds:  # otherwise it is begun anew
                    await asyncio.to_thread(write_kept, directory, unfinished, workload.kinds)

            return write()

        await self.files.begin(state.done, fill, queue, best_step)

    async def check_directory(self, files: Iterable[JsonLines]) -> None:
        """See that what the run writes is where its reader looks for it.

        Args:
            files: that lines are added to.

        Raises:
            RunFailure: somebody has moved or removed it; the state is saved, if there is still a place for it.
        """
        state, directory = self._state, self._state.directory
        damage = directory.damage(files, saved=self.files.newest is not None)
        if damage is None:
            return
        if not directory.path.is_dir():
            raise RunFailure(f"after step {state.done}: {damage}; nothing that this run writes would be found")
        await self.files.abandon()  # one under way may have been taken away, too
        directory.checkpoints.mkdir(exist_ok=True)
        await self.save()
        await self.files.finish()
        how = resume_hint(directory, self._settings)
        raise RunFailure(f"after step {state.done}: {damage}; the run ends, and its state is saved: {how}")

    async def restore(self, checkpoint: Checkpoint) -> None:
        """Go on where a checkpoint was written.

        Raises:
            InputError: it does not fit the run.
        """
        state, workload, directory = self._state, self._workload, self._state.directory
        try:
            await restore_roles(
                state.roles, checkpoint.path, checkpoint.run, into=directory.path, own=workload.own_roles
            )
            await workload.restore(checkpoint)
            unfinished = await asyncio.to_thread(read_kept, checkpoint.path, workload.kinds)
            if unfinished is not None:
                workload.in_flight.resume(unfinished)
        except (ValueError, LookupError, FileNotFoundError, DataError) as error:
            raise InputError(f"{checkpoint.path} cannot be gone on from: {error}") from error
        await workload.publish(state.roles)
        state.done = state.saved_at = checkpoint.step
        if self.best is not None:
            self.best.resume(checkpoint.queue.get("best"), directory)
            if (why := self.best.exhausted) is not None:
                state.ended = True
                state.report.line(f"nothing is left to do: {why}")
        for each in checkpoint.passed_over:
            state.report.line(f"passed over, as it is damaged: {each}")
        newest = state.before if state.after is None else state.after
        numbers = {} if newest is None else workload.describe(newest).metrics
        state.report.resumed(
            state.done, checkpoint.path, {f"evaluation/{name}": value for name, value in numbers.items()}
        )
        for change in directory.changed:
            state.report.line(f"changed since then: {change}")


def due(done: int, every: int) -> bool:
    """True if something that happens after `every` steps, 0 for never, happens after so many."""
    return every > 0 and done % every == 0


R = TypeVar("R")
LIKE_THE_LAST = 1.2
"""A step is expected to take as long as the last one, times this: answers differ in length."""
SAVING = 2.0
"""A checkpoint is given as long as the last one took, times this: others may be writing to the same disk now."""
UNKNOWN = 0.5
"""Share of the time for the checkpoint, where none was written yet."""


class Leaving:
    """The end of a run that is preempted; entered around its steps. Without it, or in a system without `Preemption`, a
    run is never told to end.

    Args:
        state: of the run.
        workload: the kind of run that it is.
        saver: writes its checkpoints.
    """

    def __init__(self, state: RunState, workload: Any, saver: Saver) -> None:
        self._state, self._workload, self._saver = state, workload, saver
        self._preemption: Preemption | None = None
        self._watch: asyncio.Task[None] | None = None
        self._work: asyncio.Task[Any] | None = None  # what may be given up, while it is under way
        self._given_up = False
        self._began = self._lasted = 0.0
        self._position: Mapping[str, Any] = {}
        self._steps: list[int] = []
        self.end_signal = asyncio.Event()
        """A signal has come."""
        self.left_out: str | None = None
        """A few words on what was given up."""

    async def __aenter__(self) -> Self:
        self._preemption = self._state.system.preemption
        if self._preemption is not None:
            self._watch = asyncio.create_task(self._end_soon(self._preemption), name="preemption")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watch is not None:
            await cancel_all([self._watch])
        if self._preemption is not None and self._state.over:
            self._preemption.complete = True

    @property
    def asked(self) -> bool:
        """A signal has come: the run ends as soon as it can."""
        return self.end_signal.is_set()

    def rested(self, seconds: float) -> None:
        """So long the run stood still between two steps because somebody wanted it to."""
        if self._began:
            self._began += seconds

    async def step_begins(self) -> None:
        """Note the state in which a step begins."""
        if self._preemption is not None:
            self._position = copy.deepcopy(self._workload.position())
            self._steps = await self._optimizer_steps()
            now = asyncio.get_running_loop().time()
            self._began, self._lasted = now, now - self._began if self._began else 0.0

    async def unless_given_up(self, work: Coroutine[Any, Any, R]) -> R | None:
        """The result of the flow or of an evaluation, as a task of its own, which alone ends if it is given up because
        there is no time for it: the result is None then."""
        if self._given_up:
            work.close()
            return None
        self._work = task = asyncio.create_task(work, name="step")
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if not self._given_up or current is None or current.cancelling():
                raise
            return None
        finally:
            self._work = None

    async def save_beginning(self) -> None:
        """Save the state in which the step that was given up began, if that can still be had.

        It cannot if an optimizer step was taken since, or if the step has moved something on that is not drawn again.
        """
        state, workload = self._state, self._workload
        self.left_out = f"step {state.done + 1} was given up"
        if not workload.restartable or await self._optimizer_steps() != self._steps:
            return
        await self._saver.save({} if workload.ahead else self._position)
        await self._saver.files.finish()
        if await self._optimizer_steps() != self._steps:  # one was being taken when the step was given up
            await asyncio.to_thread(state.directory.withdraw, state.done)

    def describe(self) -> str:
        """The last line of a preempted run."""
        assert self._preemption is not None
        state, what = self._state, f"; {self.left_out}" if self.left_out else ""
        line = f"told to end by {self._preemption.signal}: stopped after step {state.done}{what}"
        saved = "" if self._saver.files.newest == state.done else "its state is not saved; "
        return f"{line}; {saved}{resume_hint(state.directory, state.config.checkpoint)}"

    async def _end_soon(self, preemption: Preemption) -> None:
        """Once a signal has come: let the step end if it will in time, else give it up."""
        await preemption.asked.wait()
        self.end_signal.set()
        now = asyncio.get_running_loop().time
        remaining, duration = preemption.deadline - now(), self._saver.files.seconds
        last = preemption.deadline - (remaining * UNKNOWN if duration is None else min(duration * SAVING, remaining))
        in_time = self._began + self._lasted * LIKE_THE_LAST <= last
        if in_time or not self._workload.restartable or await self._optimizer_steps() != self._steps:
            await asyncio.sleep(max(0.0, last - now()))
        self._given_up = True
        if self._work is not None:
            self._work.cancel()

    async def _optimizer_steps(self) -> list[int]:
        """How many each role that learns has taken."""
        roles = self._state.roles.values()
        learning = [group[0] for group in roles if "optimizer_steps" in group.endpoints]
        return list(await asyncio.gather(*(ref.optimizer_steps() for ref in learning)))
