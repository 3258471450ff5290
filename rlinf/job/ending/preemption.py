"""A run that is told to end soon, as schedulers do before they take a machine away, saves what it has first.

In: the system's `Preemption`, which a signal sets off, and the run. Out: the run ends after the step under way if that
comes in time; otherwise the step is given up, and what is saved is the state in which it began. Who wakes whom: the
signal wakes `_end_soon`, which cancels the flow, or an evaluation, when time is up; the run goes on to save.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from rlinf.job.ending.going_on import going_on
from rlinf.runtime.base.tasks import cancel_all

if TYPE_CHECKING:
    from rlinf.job.loop import TrainingLoop

R = TypeVar("R")
LIKE_THE_LAST = 1.2
"""A step is expected to take as long as the last one, times this: answers differ in length."""
SAVING = 2.0
"""A checkpoint is given as long as the last one took, times this: others may be writing to the same disk now."""
UNKNOWN = 0.5
"""Share of the time for the checkpoint, where none was written yet."""


class Leaving:
    """How a run ends when it is preempted; entered around its steps.

    Args:
        run: whose steps; None, or a system without `Preemption`: it is never asked to end.
    """

    def __init__(self, run: TrainingLoop[Any] | None) -> None:
        self._run = run
        self._preemption = None if run is None else run.system.preemption
        self._watch: asyncio.Task[None] | None = None
        self._gives_way: asyncio.Task[Any] | None = None  # what may be given up, while it is under way
        self._given_up = False
        self._began = self._lasted = 0.0
        self._position: Mapping[str, Any] = {}
        self._steps: list[int] = []
        self.told_to_end = asyncio.Event()
        """A signal has come."""
        self.left_out: str | None = None
        """What was given up, in words."""

    async def __aenter__(self) -> Self:
        if self._preemption is not None:
            self._watch = asyncio.create_task(self._end_soon(), name="preemption")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watch is not None:
            await cancel_all([self._watch])
        if self._preemption is not None and self._run is not None and self._run.over:
            self._preemption.complete = True

    @property
    def asked(self) -> bool:
        """A signal has come: the run ends as soon as it can."""
        return self.told_to_end.is_set()

    def rested(self, seconds: float) -> None:
        """So long the run stood still between two steps because somebody wanted it to."""
        if self._began:
            self._began += seconds

    async def step_begins(self) -> None:
        """Note the state in which a step begins."""
        if (run := self._run) is not None and self._preemption is not None:
            self._position = copy.deepcopy(run.position())
            self._steps = await self._optimizer_steps()
            now = asyncio.get_running_loop().time()
            self._began, self._lasted = now, now - self._began if self._began else 0.0

    async def unless_given_up(self, work: Awaitable[R]) -> R | None:
        """What the flow or an evaluation comes to; None if it is given up, because there is no time for it."""
        if self._given_up:
            if asyncio.iscoroutine(work):
                work.close()
            return None
        self._gives_way = task = asyncio.current_task()
        try:
            return await work
        except asyncio.CancelledError:
            if not self._given_up or task is None:
                raise
            task.uncancel()
            return None
        finally:
            self._gives_way = None

    async def save_beginning(self) -> None:
        """Save the state in which the step that was given up began, if that can still be had.

        It cannot if an optimizer step was taken since, or if the step has moved something on that is not drawn again.
        """
        run = self._run
        assert run is not None  # a step of it was given up
        self.left_out = f"step {run.done + 1} was given up"
        if not run.restartable or await self._optimizer_steps() != self._steps:
            return
        await run.save({} if run.ahead else self._position)
        await run.checkpoints.finish()
        if await self._optimizer_steps() != self._steps:  # one was being taken when the step was given up
            await asyncio.to_thread(run.directory.withdraw, run.done)

    def told(self) -> str:
        """What a preempted run says at its end."""
        assert self._run is not None
        assert self._preemption is not None
        run, what = self._run, f"; {self.left_out}" if self.left_out else ""
        told = f"told to end by {self._preemption.signal}: stopped after step {run.done}{what}"
        saved = "" if run.checkpoints.newest == run.done else "its state is not saved; "
        return f"{told}; {saved}{going_on(run.directory, run.config.checkpoint)}"

    async def _end_soon(self) -> None:
        """Once a signal has come: let the step end if it will in time, else give it up."""
        preemption, run = self._preemption, self._run
        assert preemption is not None
        assert run is not None
        await preemption.asked.wait()
        self.told_to_end.set()
        now = asyncio.get_running_loop().time
        left = preemption.deadline - now()
        taken = run.checkpoints.seconds
        last = preemption.deadline - (left * UNKNOWN if taken is None else min(taken * SAVING, left))
        in_time = self._began + self._lasted * LIKE_THE_LAST <= last
        if in_time or not run.restartable or await self._optimizer_steps() != self._steps:
            await asyncio.sleep(max(0.0, last - now()))
        self._given_up = True
        if self._gives_way is not None:
            self._gives_way.cancel()

    async def _optimizer_steps(self) -> list[int]:
        """How many each role that learns has taken."""
        assert self._run is not None
        roles = self._run.roles.values()
        learning = [group[0] for group in roles if "optimizer_steps" in group.endpoints]
        return list(await asyncio.gather(*(ref.optimizer_steps() for ref in learning)))
