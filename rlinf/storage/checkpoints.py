"""Writes checkpoints while training goes on.

Consumes a call that fills a directory, begun when a step is over. Produces a whole checkpoint under its name, or none.
Who wakes whom: the end of the filling wakes the task that gives the name; at most one checkpoint is under way, and the
next one waits for it. A failure is raised in the run at its next step.

The best evaluation of a run so far, by one of its metrics: which checkpoint is kept, and when it is time to stop.

In: the metrics of each evaluation after a step. Out: whether it is the best one, and whether so many that followed were
no better that the run should end. A checkpoint keeps the state.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlinf.config.common import CheckpointConfig
from rlinf.config.load import InputError, RunFailure
from rlinf.runtime.base.progress import work
from rlinf.runtime.base.tasks import finish
from rlinf.storage.directory import QUEUE, RunDirectory
from rlinf.storage.files import MANIFEST


@dataclass(slots=True)
class Best:
    """The best evaluation so far. The one before the first step does not count: nothing is kept of it.

    Args:
        metric: which metric of evaluations is compared, such as `evaluation/accuracy`.
        mode: whether more of it is better, or less.
        patience: after so many evaluations that are no better the run should end; 0 for never.
        keep: whether a checkpoint of it is kept.
    """

    metric: str
    mode: Literal["max", "min"] = "max"
    patience: int = 0
    keep: bool = False
    step: int | None = None
    """After which it was; None: there is none yet."""
    value: float = math.nan
    """Of the metric, there."""
    since: int = 0
    """Evaluations after it."""

    @property
    def kept(self) -> int | None:
        """Step of the checkpoint that is kept of it, if one is."""
        return self.step if self.keep else None

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the evaluation after a step; that after step 0 shows whether there is such a metric.

        Raises:
            InputError: there is not.
        """
        if self.metric not in metrics:
            there = ", ".join(sorted(name for name in metrics if name.startswith("evaluation/"))) or "no metric"
            raise InputError(f"checkpoint.best = {self.metric}: evaluations have no such metric; they have {there}")
        if step == 0:
            return
        value = metrics[self.metric]
        better = value > self.value if self.mode == "max" else value < self.value
        if better or (math.isnan(self.value) and not math.isnan(value)):
            self.step, self.value, self.since = step, value, 0
        else:
            self.since += 1

    @property
    def exhausted(self) -> str | None:
        """Why the run should end, if it should."""
        if not self.patience or self.since < self.patience:
            return None
        best = "has never been a number" if self.step is None else f"was best after step {self.step}: {self.value:.4g}"
        return f"{self.metric} {best}; no better in {self.since} evaluations (patience {self.patience})"

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint keeps, as JSON."""
        value = {} if self.step is None else {"step": self.step, "value": self.value}
        return {"metric": self.metric, "mode": self.mode, "since": self.since, **value}

    def resume(self, state: Any, directory: RunDirectory) -> None:
        """Go on from a checkpoint. Begins anew where another metric was compared, or the best checkpoint is not here.

        Args:
            state: what `state_dict` said then, or None.
            directory: of the run; `checkpoints/best` leads to the best one again.
        """
        if not isinstance(state, Mapping) or (state.get("metric"), state.get("mode")) != (self.metric, self.mode):
            return
        step = state.get("step")
        if not self.keep or (step is not None and directory.keep_best(step)):
            self.step, self.value, self.since = step, state.get("value", math.nan), state["since"]

    def in_words(self) -> Iterator[str]:
        """A line on it, if there is one."""
        if self.step is not None:
            where = ", kept as checkpoints/best" if self.keep else ""
            yield f"best {self.metric}: {self.value:.4g}, after step {self.step}{where}"


def best_of(wanted: CheckpointConfig, headline: str, patience: int) -> Best | None:
    """Return the tracker of a run's best evaluation; None where its configuration does not ask for it.

    Args:
        wanted: the section `checkpoint`.
        headline: the metric where that names none.
        patience: see `Best`.
    """
    keep = wanted.best is not None
    return Best(wanted.best or headline, wanted.best_mode, patience, keep) if keep or patience else None


class Checkpoints:
    """The checkpoints of one run.

    Args:
        directory: of the run.
        keep: how many stay; 0 for all.
        written: called with the steps done and the path of every whole checkpoint, while the run goes on; the next
            checkpoint waits for it.
    """

    def __init__(
        self, directory: RunDirectory, keep: int, written: Callable[[int, Path], Awaitable[None]] | None = None
    ) -> None:
        self._directory, self._keep, self._written = directory, keep, written
        self._writing: asyncio.Task[None] | None = None
        self.newest: int | None = None
        """Steps done at the newest whole one that this process wrote."""
        self.seconds: float | None = None
        """How long that took."""
        self._failed: Callable[[RunFailure], None] | None = None

    @property
    def writing(self) -> bool:
        """One is under way."""
        return self._writing is not None and not self._writing.done()

    @contextlib.contextmanager
    def asked_for(self, failed: Callable[[RunFailure], None]) -> Iterator[None]:
        """A checkpoint that is begun in this block is one that the run can do without.

        Args:
            failed: told if it cannot be written, in place of the run.
        """
        self._failed = failed
        try:
            yield
        finally:
            self._failed = None

    async def begin(
        self, step: int, fill: Callable[[Path], Awaitable[Any]], queue: Mapping[str, Any], best: int | None = None
    ) -> None:
        """Begin a checkpoint; returns as soon as `fill` is called, which takes its snapshot while the run goes on.

        Args:
            step: steps done.
            fill: writes model and optimizer into a directory; called at once, awaited in the background.
            queue: the rest of what to go on from; contains no tensors.
            best: step of the best checkpoint, which is kept; it may be this one.

        Raises:
            RunFailure: the one before could not be written.
        """
        await self.finish()
        content = json.dumps({"step": step, "manifest": MANIFEST, **queue})  # who reads it knows what belongs to it
        try:
            aside = self._directory.begin_checkpoint(step)
        except OSError as error:
            raise self._not_written(step, error) from error
        filled = fill(aside)  # called here, so that no later call of the run can come before it
        writing = self._write(step, aside, filled, content, best)
        if self._failed is not None:
            writing = _told(writing, self._failed)
        self._writing = asyncio.create_task(writing, name=f"checkpoint {step}")

    def check(self) -> None:
        """Raise what went wrong with the checkpoint under way, if anything has.

        Raises:
            RunFailure: it could not be written, or the run directory is another run's by now.
        """
        self._check_lock()
        if self._writing is not None and self._writing.done():
            self._writing.result()

    async def finish(self) -> None:
        """Wait for the checkpoint under way.

        Raises:
            RunFailure: it could not be written.
        """
        if self._writing is not None:
            writing, self._writing = self._writing, None
            with work("waiting for the checkpoint to be written"):
                await writing

    async def abandon(self) -> None:
        """Give up what is under way; whole checkpoints stay."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    def _check_lock(self) -> None:
        lock = self._directory.lock
        if lock is not None and (why := lock.lost()) is not None:
            raise RunFailure(f"this run must not go on: {why}; nothing was written since")

    async def _write(self, step: int, aside: Path, filled: Awaitable[Any], content: str, best: int | None) -> None:
        began = time.perf_counter()
        try:
            await filled
            naming = asyncio.create_task(asyncio.to_thread(self._name, step, aside, content, best), name="naming")
            try:  # a cancelled run must not drop what a thread is about to give its name: it would lose a part of it
                await finish(naming)
            finally:
                error_of_naming = naming.exception()
            if error_of_naming is not None:
                raise error_of_naming
        except BaseException as error:
            await asyncio.to_thread(self._directory.drop_checkpoint, step)
            if not isinstance(error, OSError):
                raise
            raise self._not_written(step, error) from error
        self.newest, self.seconds = step, time.perf_counter() - began
        if self._written is not None:
            await self._written(step, naming.result())

    def _not_written(self, step: int, error: OSError) -> RunFailure:
        """Return the error that ends a run whose checkpoint cannot be written."""
        whole, place = self._directory.latest, self._directory.checkpoints
        if place.is_dir():
            last_whole = f"the last whole one is {whole.resolve()}" if whole.exists() else "there is no earlier one"
            why = f"{error}; {last_whole}. Make room, or set output_dir"
        else:  # in place of the error: which of its files was missed first is chance
            why = "it is gone: moved, removed or unmounted. Bring it back"
        return RunFailure(
            f"the checkpoint of step {step} cannot be written to {place}: {why}, and go on with --resume auto"
        )

    def _name(self, step: int, aside: Path, content: str, best: int | None) -> Path:
        self._check_lock()
        (aside / QUEUE).write_text(content, encoding="utf-8")
        return self._directory.finish_checkpoint(step, self._keep, best)


async def _told(writing: Coroutine[Any, Any, None], failed: Callable[[RunFailure], None]) -> None:
    """Have a failure told, and not raised."""
    try:
        await writing
    except RunFailure as error:
        failed(error)
