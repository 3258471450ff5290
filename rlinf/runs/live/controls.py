"""Controls of the live page: save, evaluate, pause, go on or stop a run, each between two of its steps.

In: wishes, at any time. Out: checkpoints, evaluations, an early end, as the run makes them by itself, and a sentence to
whoever asked. Who wakes whom: a wish wakes a run that is paused; otherwise the run looks for wishes between two steps.
It waits while it is evaluated; a checkpoint is written while it goes on. Something that was only asked for and fails is
told, and ends no run. Nothing of it is kept: a run that goes on after it was killed is not paused.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from rlinf.config.load import RunFailure
from rlinf.dashboard.events import CONTROLS
from rlinf.runs.callbacks import Observer, RunState
from rlinf.runs.saving import Leaving, Saver
from rlinf.runtime.base.tasks import cancel_all

Tell = Callable[[str, bool], None]
"""Takes a sentence, and whether all went well."""


class Loop(Protocol):
    """A training loop, as far as its pauses are concerned."""

    state: RunState
    workload: Any
    saver: Saver
    leaving: Leaving

    async def evaluate(self) -> dict[str, float]:
        """Evaluate, and tell; the metrics."""

    async def rest(self) -> None:
        """Have nothing under way."""


class BetweenSteps(Observer):
    """The moments between the steps of one run.

    Args:
        loop: takes the steps.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop, self._state = loop, loop.state
        self._written: dict[int, list[Tell]] = {}  # by steps done: who waits for that checkpoint

    @property
    def done(self) -> int:
        """Steps taken."""
        return self._state.done

    @property
    def over(self) -> bool:
        """There is no next step."""
        return self._state.over or self._loop.leaving.asked

    def stop(self, why: str) -> None:
        """Let the step under way be the last one."""
        self._state.stop(why)

    async def end_signal(self) -> None:
        """Wait until a signal tells the process to end; for ever, where none can."""
        await self._loop.leaving.end_signal.wait()

    @contextlib.contextmanager
    def resting(self, *, paused: bool = False) -> Iterator[None]:
        """Count what passes within to no step, and not as time of the run.

        Args:
            paused: nothing goes on, which is no stall.
        """
        state, clock = self._state, asyncio.get_running_loop().time
        began, state.system.paused = clock(), paused
        try:
            yield
        finally:
            state.system.paused = False
            state.recorder.rested(clock() - began)
            self._loop.leaving.rested(clock() - began)

    async def save(self, tell: Tell) -> None:
        """Begin a checkpoint, unless there is one of this step.

        Args:
            tell: told when it is whole.
        """
        state, saver, step, before = self._state, self._loop.saver, self._state.done, self._state.saved_at
        saver.files.check()
        if before == step and not saver.files.writing:
            tell(f"the checkpoint of step {step} is there already", True)
            return
        self._written.setdefault(step, []).append(tell)
        if before == step:
            return

        def failed(error: RunFailure) -> None:
            if state.saved_at == step:
                state.saved_at = before
            state.report.line(f"warning: {error}; it was asked for on the live page, and the run goes on without")
            self._tell(step, f"not saved: {error}", False)

        try:
            with self.resting(), state.doing("saving"), saver.files.asked_for(failed):
                await self._rest()
                await saver.save()
        except (RunFailure, OSError) as error:
            failed(RunFailure(str(error)))

    async def on_checkpoint(self, step: int, path: Path) -> None:
        """Tell those who asked for this checkpoint."""
        if step in self._written:
            self._state.report.line(f"saved after step {step}, as it was asked to")
            self._tell(step, f"saved after step {step}: checkpoints/{path.name}", True)

    def _tell(self, step: int, sentence: str, well: bool) -> None:
        for tell in self._written.pop(step, []):
            tell(sentence, well)

    async def evaluate(self) -> tuple[str, bool]:
        """Evaluate, unless that was done after this step; it counts neither for the best checkpoint nor for patience.

        Returns:
            What came of it, and whether there is an evaluation.
        """
        state, workload, leaving, step = self._state, self._loop.workload, self._loop.leaving, self._state.done
        if state.evaluated_at == step and state.after is not None:
            return f"it was evaluated after step {step} already: {workload.describe(state.after).sentence}", True
        try:
            with self.resting(), state.doing("evaluating"):
                await self._rest()
                evaluation = await leaving.unless_given_up(workload.evaluate())
        except workload.failures as error:
            state.report.line(f"warning: the evaluation that was asked for failed: {error}; the run goes on")
            return f"the evaluation failed: {error}", False
        if evaluation is None:
            return "given up: the run was told to end" if leaving.asked else "there is nothing to evaluate on", False
        state.after, state.evaluated_at = evaluation, step
        described = workload.describe(evaluation)
        state.recorder.samples(step, described.answers)
        state.recorder.write(step, {f"evaluation/{name}": value for name, value in described.metrics.items()})
        sentence = f"evaluation after step {step}: {described.sentence}"
        state.report.line(sentence)
        return sentence, True

    async def stop_here(self) -> None:
        """End the run as after its last step: evaluated and saved."""
        loop, state = self._loop, self._state
        await loop.workload.in_flight.close()
        if state.evaluated_at != state.done and (metrics := await loop.evaluate()):
            state.recorder.write(state.done, metrics)
        if state.saved_at != state.done and not loop.leaving.asked:
            await loop.saver.save()
        state.ended = True
        state.report_stop()

    async def _rest(self) -> None:
        """Have nothing acted for later steps meanwhile, where it is acted by the very roles that are asked now."""
        if self._loop.workload.in_flight.rules.between:
            await self._loop.rest()


CHECKPOINT, EVALUATE, PAUSE, GO_ON, STOP = CONTROLS
MOST_WAITING = 256
"""Most that wait for word of one wish: pressing a button without end must not fill memory."""

Answer = Callable[[str, bool], None]
"""Told what was done, in a sentence, and whether it is as it was wished."""


class Steered(Protocol):
    """A run as its controls see it: `BetweenSteps`."""

    @property
    def done(self) -> int:
        """Steps taken."""

    @property
    def over(self) -> bool:
        """There is no next step."""

    def stop(self, why: str) -> None:
        """Let the step under way be the last one."""

    async def end_signal(self) -> None:
        """Wait until a signal tells the process to end."""

    async def save(self, tell: Answer) -> None:
        """Begin a checkpoint; `tell` is told when it is whole."""

    async def evaluate(self) -> tuple[str, bool]:
        """Evaluate: what came of it, and whether all went well."""

    async def stop_here(self) -> None:
        """End the run as after its last step."""

    def resting(self, *, paused: bool) -> AbstractContextManager[None]:
        """Count what passes within as no time of the run."""


class Controls:
    """The wishes of one run.

    Args:
        run: does them.
        changed: told whenever a wish came, or was done.
    """

    def __init__(self, run: Steered, changed: Callable[[], None]) -> None:
        self._run, self._changed = run, changed
        self._asked: dict[str, list[Answer]] = {}  # in order; with those who wait for word of it
        self._saving: list[list[Answer]] = []  # who waits for a checkpoint that is being written
        self._stirred = asyncio.Event()
        self._over = False
        self.paused = False
        """The run waits between two steps."""

    @property
    def asked(self) -> tuple[str, ...]:
        """Wishes that are still to be done, in order."""
        return (*((CHECKPOINT,) if self._saving else ()), *self._asked)

    def ask(self, what: str, answer: Answer) -> None:
        """Somebody wishes something; asked for again before it is done, it is done once.

        Args:
            what: one of `CONTROLS`.
            answer: told once, now or later.
        """
        after = f"after step {self._run.done}"
        if what not in CONTROLS:
            answer(f"{what!r:.40} is nothing that a run can do; there are {', '.join(CONTROLS)}", False)
        elif self._over:
            answer("the run is over", False)
        elif what == GO_ON:
            self._go_on(answer, after)
        elif what == PAUSE and self.paused:
            answer(f"it is paused already, {after}", True)
        elif len(waiting := self._asked.setdefault(what, [])) >= MOST_WAITING:
            answer(f"{what} was asked for {MOST_WAITING} times, and is not done yet", False)
        else:
            waiting.append(answer)
            if what == STOP:
                self._run.stop("asked to on its live page")
            self._stirred.set()
            self._changed()

    def _go_on(self, answer: Answer, after: str) -> None:
        taken_back = self._asked.pop(PAUSE, [])
        for each in taken_back:
            each("taken back before it came to that", False)
        if self.paused:
            self.paused = False
            answer(f"goes on {after}", True)
        elif taken_back:
            answer("goes on: it had not come to the pause", True)
        else:
            answer("it is not paused", True)
        self._stirred.set()
        self._changed()

    async def between_steps(self) -> None:
        """Do what was asked for; called by the run when no step is under way. Returns when the next one may begin."""
        run = self._run
        while True:
            self._stirred.clear()
            while self._asked and not run.over:
                await self._do(next(iter(self._asked)))
            if run.over or not self.paused:
                self.paused = False
                return
            await self._wait()

    async def _do(self, what: str) -> None:
        run = self._run
        if what == STOP:  # word of it is given by `close`, when all of it is on the disk
            await run.stop_here()
            return
        if what == EVALUATE:
            sentence, well = await run.evaluate()
            self._done(self._asked.pop(what, []), sentence, well)
            return
        answers = self._asked.pop(what, [])
        if what == PAUSE:
            self.paused = True
            self._done(answers, f"paused after step {run.done}", True)
            return
        self._saving.append(answers)

        def on_saved(sentence: str, well: bool) -> None:
            self._saving.remove(answers)
            self._done(answers, sentence, well)

        await run.save(on_saved)

    def _done(self, answers: Sequence[Answer], sentence: str, well: bool) -> None:
        for answer in answers:
            answer(sentence, well)
        self._changed()

    async def _wait(self) -> None:
        """Until something is asked for, or a signal tells the process to end."""
        waits = [asyncio.create_task(self._stirred.wait()), asyncio.create_task(self._run.end_signal())]
        with self._run.resting(paused=True):
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await cancel_all(waits)

    def close(self, *, well: bool) -> None:
        """The run is over.

        Args:
            well: in order, with all that it has to write.
        """
        self._over = True
        done, requests = self._run.done, [*self._asked.items(), *((CHECKPOINT, answers) for answers in self._saving)]
        self._asked, self._saving = {}, []
        for what, answers in requests:
            if what == STOP and well:
                sentence, did = f"stopped after step {done}, evaluated and saved as after the last one", True
            elif what == CHECKPOINT and well:
                sentence, did = f"the run is over: the checkpoint of step {done} is its last", True
            else:
                sentence, did = f"the run ended after step {done}, before it came to that", False
            for answer in answers:
                answer(sentence, did)
