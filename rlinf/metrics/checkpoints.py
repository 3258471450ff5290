"""Writes checkpoints while training goes on.

Consumes a call that fills a directory, begun when a step is over. Produces a whole checkpoint under its name, or none.
Who wakes whom: the end of the filling wakes the task that gives the name; at most one checkpoint is under way, and the
next one waits for it. A failure is raised in the run at its next step.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlinf.config.loading import RunFailure
from rlinf.metrics.durable.manifest import MANIFEST
from rlinf.metrics.run_directory import QUEUE, RunDirectory
from rlinf.runtime.base.progress import work
from rlinf.runtime.base.tasks import finish


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
        """What ends a run whose checkpoint cannot be written."""
        whole, place = self._directory.latest, self._directory.checkpoints
        if place.is_dir():
            kept = f"the last whole one is {whole.resolve()}" if whole.exists() else "there is no earlier one"
            why = f"{error}; {kept}. Make room, or set output_dir"
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
