"""How long the phases of publishing and loading took, and how many bytes they moved, for the trace and the metrics.

Flows in: phases, of which each may come many times. Flows out: one span per phase. Nobody waits, but for the end of
what a GPU still does when the times are read.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from rlinf.runtime.actor.actor import Actor

_Mark = float | torch.cuda.Event


class Clock:
    """Adds up the seconds of phases, on the device that works."""

    def __init__(self) -> None:
        self._phases: list[tuple[str, _Mark, _Mark]] = []

    @contextmanager
    def phase(self, what: str, on: Tensor | Sequence[Tensor] = ()) -> Iterator[None]:
        """What is done in it is of this phase.

        Args:
            what: its name, one word.
            on: a tensor, or several, on the device that does it; without any the time is that of the wall.
        """
        like = on if isinstance(on, Tensor) else next(iter(on), None)
        begun = _mark(like)
        yield
        self._phases.append((what, begun, _mark(like)))

    def seconds(self) -> dict[str, float]:
        """Of each phase; blocking, on a GPU until the last has ended."""
        found: dict[str, float] = {}
        for what, begun, ended in self._phases:
            found[what] = found.get(what, 0.0) + _between(begun, ended)
        return found

    def tell(self, actor: Actor) -> None:
        """Have the trace of an actor's host know of the phases, one after the other up to now."""
        for what, seconds in self.seconds().items():
            actor.note(f"weights/{what}_seconds", seconds)


def tell_bytes(actor: Actor, tensors: Iterable[Tensor], *, through_host: bool = False) -> None:
    """Have the trace know of bytes that were written to buckets, or read from them.

    Args:
        actor: who wrote or read.
        tensors: the buckets.
        through_host: they went through host memory wherever they lie, as to an inference server.
    """
    sizes = {"host": 0, "device": 0}
    for tensor in tensors:
        sizes["host" if through_host or tensor.device.type == "cpu" else "device"] += tensor.nbytes
    for where, size in sizes.items():
        actor.note(f"weights/{where}_bytes", 0.0, size)


def _mark(on: Tensor | None) -> _Mark:
    if on is not None and on.is_cuda and torch.cuda.is_available():  # a fake tensor may say so without a GPU
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(on.device))
        return event
    return time.perf_counter()


def _between(begun: _Mark, ended: _Mark) -> float:
    if isinstance(begun, float) or isinstance(ended, float):
        return float(ended) - float(begun)  # type: ignore[arg-type]  # both are of one kind
    ended.synchronize()
    return begun.elapsed_time(ended) / 1e3
