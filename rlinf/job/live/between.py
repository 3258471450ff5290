"""What a run does between two steps because somebody asked for it.

In: the run. Out: checkpoints, evaluations, an early end; each as the run makes them by itself, and told in a sentence.
Who wakes whom: the run waits while it is evaluated; a checkpoint is written while it goes on, and told of when whole.
What goes wrong with something that was only asked for is told, and ends no run.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf.config.loading import RunFailure

if TYPE_CHECKING:
    from rlinf.job.loop import TrainingLoop

Tell = Callable[[str, bool], None]
"""Takes a sentence, and whether all went well."""


class BetweenSteps:
    """The moments between the steps of one run.

    Args:
        run: whose.
    """

    def __init__(self, run: TrainingLoop[Any]) -> None:
        self._run = run
        self._written: dict[int, list[Tell]] = {}  # by steps done: who waits for that checkpoint

    @property
    def done(self) -> int:
        """Steps taken."""
        return self._run.done

    @property
    def over(self) -> bool:
        """There is no next step."""
        return self._run.over or self._run.leaving.asked

    def stop(self, why: str) -> None:
        """Let the step under way be the last one."""
        self._run.stop(why)

    async def told_to_end(self) -> None:
        """Wait until a signal tells the process to end; for ever, where none can."""
        await self._run.leaving.told_to_end.wait()

    @contextlib.contextmanager
    def resting(self, *, paused: bool = False) -> Iterator[None]:
        """What passes within counts to no step, and not as time of the run.

        Args:
            paused: nothing goes on, which is no stall.
        """
        run, clock = self._run, asyncio.get_running_loop().time
        began, run.system.paused = clock(), paused
        try:
            yield
        finally:
            run.system.paused = False
            run.recorder.rested(clock() - began)
            run.leaving.rested(clock() - began)

    async def save(self, tell: Tell) -> None:
        """Begin a checkpoint, unless there is one of this step.

        Args:
            tell: told when it is whole.
        """
        run, step = self._run, self._run.done
        run.checkpoints.check()
        if run.saved_at == step and not run.checkpoints.writing:
            tell(f"the checkpoint of step {step} is there already", True)
            return
        self._written.setdefault(step, []).append(tell)
        if run.saved_at == step:
            return
        before = run.saved_at

        def failed(error: RunFailure) -> None:
            if run.saved_at == step:
                run.saved_at = before
            run.report.line(f"warning: {error}; it was asked for on the live page, and the run goes on without")
            self._tell(step, f"not saved: {error}", False)

        try:
            with self.resting(), run.live.doing("saving"), run.checkpoints.asked_for(failed):
                await self._rest()
                await run.save()
        except (RunFailure, OSError) as error:
            failed(RunFailure(str(error)))

    def written(self, step: int, path: Path) -> None:
        """A checkpoint is whole."""
        if step in self._written:
            self._run.report.line(f"saved after step {step}, as it was asked to")
            self._tell(step, f"saved after step {step}: checkpoints/{path.name}", True)

    def _tell(self, step: int, said: str, well: bool) -> None:
        for tell in self._written.pop(step, []):
            tell(said, well)

    async def evaluate(self) -> tuple[str, bool]:
        """Evaluate, unless that was done after this step; it counts neither for the best checkpoint nor for patience.

        Returns:
            What came of it, and whether there is an evaluation.
        """
        run, step = self._run, self._run.done
        if run.evaluated_at == step and run.after is not None:
            return f"it was evaluated after step {step} already: {run.in_words(run.after)}", True
        try:
            with self.resting(), run.live.doing("evaluating"):
                await self._rest()
                found = await run.leaving.unless_given_up(run.evaluate())
        except run.failures as error:
            run.report.line(f"warning: the evaluation that was asked for failed: {error}; the run goes on")
            return f"the evaluation failed: {error}", False
        if found is None and run.leaving.asked:
            return "given up: the run was told to end", False
        if found is None:
            return "there is nothing to evaluate on", False
        run.after, run.evaluated_at = found, step
        run.recorder.samples(step, run.answers(found))
        run.recorder.write(step, {f"evaluation/{name}": value for name, value in run.numbers(found).items()})
        said = f"evaluation after step {step}: {run.in_words(found)}"
        run.report.line(said)
        return said, True

    async def stop_here(self) -> None:
        """End the run as after its last step: evaluated and saved."""
        run = self._run
        await run.in_flight.close()
        if run.evaluated_at != run.done and (metrics := await run.evaluate_and_tell()):
            run.recorder.write(run.done, metrics)
        if run.saved_at != run.done and not run.leaving.asked:
            await run.save()
        run.ends_here()

    async def _rest(self) -> None:
        """Have nothing acted for later steps meanwhile, where it is acted by the very roles that are asked now."""
        if self._run.in_flight.rules.between:
            await self._run.rest()
