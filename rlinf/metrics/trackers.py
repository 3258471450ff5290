"""Trackers (TensorBoard, wandb, SwanLab): sends a run's metrics to them without the run ever waiting.

In: metrics and samples of steps, from the event loop. Out: calls to a tracker's package. Who wakes whom: each tracker
has a thread of its own with a queue in front, so a slow disk or network blocks nobody; an error in it is reported once
and training goes on. Closing flushes what is queued, by a deadline.
"""

from __future__ import annotations

import asyncio
import importlib.util
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rlinf.config.importing import resolve

Rows = Sequence[Mapping[str, Any]]
"""Sampled answers, as `SamplesFile` writes them."""

FLUSH_SECONDS = 30.0
"""Until a tracker that is still sending when the run is over is left behind: an upload of some minutes' numbers takes
a few seconds."""
HASTY_SECONDS = 1.0
"""Seconds until it is left behind when the run has failed or was interrupted, which promises to end within five
seconds."""
QUEUED = 10_000
"""Steps that wait for a tracker that hangs, at most; later ones are dropped, so that memory does not grow for ever."""


class Sink(Protocol):
    """One open tracker. Its methods may block: they run in its own thread. Any of them may raise."""

    where: str
    """Where a person finds the numbers: a directory, an address."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take a step's numbers; all are finite."""

    def samples(self, step: int, rows: Rows) -> None:
        """Take some of a step's samples."""

    def close(self) -> None:
        """Send what is left."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """Facts about a run with which a tracker is opened."""

    name: str
    """Name of the run."""
    directory: Path
    """The run's directory; a tracker keeps its files there, in a directory of its own name."""
    config: Mapping[str, Any]
    """The resolved configuration."""
    resumed: int | None = None
    """Last step that an earlier process of this run has done, if this one goes on from there."""


@dataclass(frozen=True, slots=True)
class _Kind:
    package: str
    """Name of the package that has to be installed."""
    extra: str
    """The extra of ours that installs it."""
    opener: str
    """Dotted path of its class, which is made with what is tracked and the project."""


KINDS = {
    "tensorboard": _Kind("tensorboard", "tracking", "rlinf.metrics.sinks.TensorBoardSink"),
    "wandb": _Kind("wandb", "tracking", "rlinf.metrics.sinks.WandbSink"),
    "swanlab": _Kind("swanlab", "swanlab", "rlinf.metrics.sinks.SwanLabSink"),
}
"""The trackers there are, by the key that switches them on: `metrics.<name>`."""


def wanted_trackers(
    *, tensorboard: bool = False, wandb: str | None = None, swanlab: str | None = None
) -> dict[str, str]:
    """The trackers that a configuration switches on, each with its project; TensorBoard knows no projects."""
    named = {"tensorboard": "" if tensorboard else None, "wandb": wandb, "swanlab": swanlab}
    return {name: project for name, project in named.items() if project is not None}


def missing(wanted: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(key, advice) for each wanted tracker whose package is not installed; imports none of them."""
    for name in wanted:
        kind = KINDS[name]
        if importlib.util.find_spec(kind.package) is None:
            yield f"metrics.{name}", f"the package {kind.package} is not installed: pip install 'rlinf[{kind.extra}]'"


class Tracking:
    """All trackers of a run.

    Args:
        wanted: trackers by the names of `KINDS`, each with the project under which it compares runs.
        about: the run.
        say: prints a line for people.

    Use it as `async with Tracking(...) as tracking:`; leaving sends what is queued.
    """

    def __init__(self, wanted: Mapping[str, str], about: TrackedRun, say: Callable[[str], None]) -> None:
        self._trackers = [
            _Tracker(name, partial(_open, KINDS[name].opener, about, project), say) for name, project in wanted.items()
        ]

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand over a step's numbers; returns at once. Those that are not finite stay out."""
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        for tracker in self._trackers:
            tracker.put(lambda sink: sink.write(step, finite))

    def samples(self, step: int, rows: Rows) -> None:
        """Hand over some of a step's samples; returns at once."""
        for tracker in self._trackers:
            tracker.put(lambda sink: sink.samples(step, rows))

    async def close(self, seconds: float = FLUSH_SECONDS) -> None:
        """Send what is queued, within so many seconds; what is still not sent then is reported and left behind."""
        until = time.monotonic() + seconds
        for tracker in self._trackers:
            tracker.end()
        for tracker in self._trackers:
            await asyncio.to_thread(tracker.join, until)

    async def __aenter__(self) -> Tracking:
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        await self.close(FLUSH_SECONDS if error is None else HASTY_SECONDS)


def _open(opener: str, about: TrackedRun, project: str) -> Sink:
    sink: Sink = resolve(opener)(about, project)
    return sink


Job = Callable[[Sink], None]


class _Tracker:
    """One tracker's thread. Consumes jobs; unblocked by them; ends after the last one."""

    def __init__(self, name: str, opening: Callable[[], Sink], say: Callable[[str], None]) -> None:
        self._name, self._opening, self._say = name, opening, say
        self._jobs: queue.Queue[Job | None] = queue.Queue(QUEUED)
        self._ending = threading.Event()
        self._warned = False
        # A daemon, so that a tracker that hangs cannot keep the process from ending.
        self._thread = threading.Thread(target=self._serve, name=f"tracking by {name}", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            self._warn(f"it is {QUEUED} messages behind; later ones are dropped")

    def end(self) -> None:
        self._ending.set()
        try:
            self._jobs.put_nowait(None)
        except queue.Full:
            pass  # there are jobs enough to wake it, and after the last one it sees that this is the end

    def join(self, until: float) -> None:
        """Wait until it has sent everything, or until a time of `time.monotonic`."""
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._warn("it had not taken everything when the run ended, and was left behind")

    def _serve(self) -> None:
        try:
            sink = self._opening()
        except Exception as error:  # whatever a tracker raises, training goes on without it
            self._warn(f"it cannot be opened: {_first_line(error)}")
            return
        self._say(f"{self._name}: {sink.where}")
        while (job := self._jobs.get()) is not None:
            self._try(job, sink)
            if self._ending.is_set() and self._jobs.empty():
                break
        self._try(lambda sink: sink.close(), sink)

    def _try(self, job: Job, sink: Sink) -> None:
        try:
            job(sink)
        except Exception as error:  # it may work again for the next step
            self._warn(_first_line(error))

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            self._say(f"warning: {self._name}: {text.rstrip('.')}. metrics.jsonl has everything")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
