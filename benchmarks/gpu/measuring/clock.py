"""How long work takes on a device, how evenly, and with how much memory; and a measure's time, shared by its parts."""

from __future__ import annotations

import gc
import itertools
import resource
import statistics
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.gpu.measuring.bars import judged
from benchmarks.gpu.scale import NotRun, Outcome, Scale

Figures = dict[str, float | int | str]
_SHARE = 0.9
"""Share of a measure's limit that its parts may use: some take longer than expected."""


def settled(device: torch.device) -> None:
    """Wait until the device has done what it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall_seconds(work: Callable[[], Any], device: torch.device, rounds: int, *, warm: int = 1) -> list[float]:
    """Seconds of each round by the host's clock, from idle device to idle device: for work that the host leads."""
    found = []
    for number in range(warm + rounds):
        settled(device)
        began = time.perf_counter()
        work()
        settled(device)
        if number >= warm:
            found.append(time.perf_counter() - began)
    return found


def device_seconds(work: Callable[[], Any], device: torch.device, rounds: int, *, warm: int = 2) -> list[float]:
    """Seconds of each round by the device's clock: for kernels. All rounds are queued before the first is waited for,
    so that what the host needs to launch them shows only where the device would wait for it."""
    if device.type != "cuda":
        return wall_seconds(work, device, rounds, warm=warm)
    for _ in range(warm):
        work()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    torch.cuda.synchronize(device)
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize(device)
    return [one.elapsed_time(other) / 1e3 for one, other in itertools.pairwise(marks)]


def told(name: str, values: Sequence[float]) -> Figures:
    """The median under a name, and beside it how far the rounds lie apart, in percent of it."""
    middle = statistics.median(values)
    apart = 100.0 * (max(values) - min(values)) / middle if middle else 0.0
    return {name: middle, f"{name}_spread_percent": round(apart, 1)}


def freed(device: torch.device) -> None:
    """Give back what nobody holds any more, and begin the peak of memory anew."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_gb(device: torch.device) -> float:
    """Most memory that tensors had since `freed`; on a CPU the process's, since it began."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


class Parts:
    """The parts of one measure, the most valuable first: each is made while there is time, and one that
    fails or runs out of memory leaves the others what they are."""

    def __init__(self, measure: str, scale: Scale) -> None:
        self.figures: Figures = {}
        self._measure, self._scale = measure, scale
        self._notes: list[str] = []
        self._peak, self._broken = 0.0, False
        self._until = time.monotonic() + scale.limit * _SHARE

    @property
    def left(self) -> float:
        """Seconds for what is still to be made."""
        return self._until - time.monotonic()

    def make(self, name: str, part: Callable[[], Mapping[str, Any]], *, expected: float = 0.0) -> bool:
        """Make a part, unless there is no time for it; returns whether its figures came.

        Args:
            name: begins the names of its figures; empty for none.
            part: measures, and returns its figures.
            expected: seconds that it will take, by experience.

        Raises:
            Exception: what failed, in a rehearsal; on a card it is noted, and the other parts are made.
        """
        if not self._begun(name, expected):
            return False
        with self._watched(name):
            self._take(name, part())
            return True
        return False

    async def make_async(
        self, name: str, part: Callable[[], Awaitable[Mapping[str, Any]]], *, expected: float = 0.0
    ) -> bool:
        """Do as `make` does, for a part that is awaited."""
        if not self._begun(name, expected):
            return False
        with self._watched(name):
            self._take(name, await part())
            return True
        return False

    def _begun(self, name: str, expected: float) -> bool:
        if self.left < (0.0 if self._scale.rehearse else expected):
            self.note(f"{name} was not reached")
            return False
        freed(self._scale.device)
        return True

    def _take(self, name: str, found: Mapping[str, Any]) -> None:
        lead = f"{name}_" if name else ""
        self.figures |= {f"{lead}{key}": value for key, value in found.items()}
        if name:
            self.figures.setdefault(f"{lead}peak_gb", peak_gb(self._scale.device))
        self._scale.keep(self.figures)

    @contextmanager
    def _watched(self, name: str) -> Iterator[None]:
        try:
            yield
        except NotRun as missing:
            self.note(f"{name}: {missing}".removeprefix(": "))
        except ModuleNotFoundError as missing:
            if (missing.name or "rlinf").split(".")[0] in ("rlinf", "benchmarks"):
                raise
            self.note(f"{name}: {missing.name} is not installed".removeprefix(": "))
        except Exception as error:
            first = (str(error).splitlines() or [""])[0][:160]
            if not isinstance(error, torch.OutOfMemoryError) and "out of memory" not in str(error):
                if self._scale.rehearse:
                    raise
                traceback.print_exc()
                self._broken = True
            self.note(f"{name}: {type(error).__name__}: {first}".removeprefix(": "))
        finally:
            self._peak = max(self._peak, peak_gb(self._scale.device))

    def note(self, text: str) -> None:
        """Something that the figures do not say."""
        self._notes.append(text)

    def outcome(self) -> Outcome:
        """All figures with what the bars say of them.

        Raises:
            NotRun: there are none, and nothing failed.
        """
        if not (self.figures or self._broken):
            raise NotRun("; ".join(self._notes))
        self.figures["peak_gb"] = self._peak
        passed, verdicts = judged(self._measure, self.figures)
        passed = False if self._broken else passed
        if self._scale.rehearse:
            passed, verdicts = None, "rehearsed: tiny shapes on the CPU, nothing to compare with"
        return Outcome(passed, self.figures, "; ".join([verdicts, *self._notes]))
