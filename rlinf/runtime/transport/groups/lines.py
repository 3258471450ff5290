"""The lines that a group's operations take: one for all over gloo; over NCCL one per direction between two hosts, and
one for what all members do together.

Flows in: a tensor, and what is to be done with it. Flows out: a function that waits for its end. Who wakes whom: both
run in waiting threads, one operation of a line being posted at a time; a stream's event ends the wait.

NCCL has no tags: the n-th receive takes what the n-th send of the same communicator sent, and its kernels occupy their
stream until the other side's kernel runs. So each direction has a communicator of its own, and each line a stream of
its own: on the default stream, a receive that is posted early would stop all computing, the sends that the other side
waits for included. What a tensor needs of the default stream is waited for by an event recorded at the call; the
default stream itself waits for nothing.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch

Operation = Callable[[Any, torch.Tensor], Any]
"""Posts an operation on a tensor to a backend, and returns torch's `Work`."""
Wait = Callable[[], None]


class Line(Protocol):
    """Operations that follow each other."""

    order: asyncio.Lock
    """First come, first served: what is posted next."""

    def mark(self) -> Any:
        """What has been enqueued on the device until now; called on the loop when the operation is."""

    def post(self, tensor: torch.Tensor, operation: Operation, writes: bool, after: Any) -> Wait:
        """Begin an operation; what waits for its end. Both may block, and raise what the backend raises.

        Args:
            writes: the operation overwrites the tensor, and does not read it.
            after: the mark of its call.
        """

    def abort(self) -> None:
        """Have what is under way end at once, as far as the backend can. May block."""

    def leave(self) -> None:
        """Give up the connections, when nothing is under way. May block."""


class Lines(Protocol):
    """The lines of one group on one host."""

    def target(self, position: int) -> tuple[Line, int]:
        """For what is sent to a member: the line, and the member's number there."""

    def source(self, position: int) -> tuple[Line, int]:
        """For what a member sends here: the line, and the member's number there."""

    def together(self) -> Line:
        """For what all members do; their positions in the group are their numbers there."""

    def made(self) -> list[Line]:
        """All that are in use."""


class GlooLines:
    """Those of a group over gloo: one line.

    Args:
        backend: a `ProcessGroupGloo`.
        limit: seconds for each operation.
    """

    def __init__(self, backend: Any, limit: float):
        self._line = GlooLine(backend, limit)

    def target(self, position: int) -> tuple[Line, int]:
        return self._line, position

    def source(self, position: int) -> tuple[Line, int]:
        return self._line, position

    def together(self) -> Line:
        return self._line

    def made(self) -> list[Line]:
        return [self._line]


class NcclLines:
    """Those of a group over NCCL, each made when it is first used.

    Args:
        connect: makes a communicator: its name within the group, and the positions of its members in their order there.
        position: of this host in the group.
        size: of the group.
        device: where the tensors are.
        limit: seconds for each operation.
    """

    def __init__(
        self,
        connect: Callable[[str, tuple[int, ...]], Any],
        position: int,
        size: int,
        device: torch.device,
        limit: float,
    ):
        self._connect = connect
        self._position = position
        self._all = tuple(range(size))
        self._device = device
        self._limit = limit
        self._lines: dict[tuple[str, tuple[int, ...]], Line] = {}

    def target(self, position: int) -> tuple[Line, int]:
        return self._line("way", (self._position, position)), 1

    def source(self, position: int) -> tuple[Line, int]:
        return self._line("way", (position, self._position)), 0

    def together(self) -> Line:
        return self._line("all", self._all)

    def made(self) -> list[Line]:
        return list(self._lines.values())

    def _line(self, kind: str, members: tuple[int, ...]) -> Line:
        line = self._lines.get((kind, members))
        if line is None:
            connect = functools.partial(self._connect, kind, members)
            line = self._lines[kind, members] = NcclLine(connect, self._device, self._limit)
        return line


class GlooLine:
    """All operations over gloo, which tells them apart by tags and works on host memory.

    Two hosts on one GPU, which NCCL refuses, send CUDA tensors through it: these are copied to host memory and back.

    Args:
        backend: a `ProcessGroupGloo`.
        limit: seconds for each operation.
    """

    def __init__(self, backend: Any, limit: float):
        self.order = asyncio.Lock()
        self._backend: Any = backend
        self._limit = timedelta(seconds=limit)

    def mark(self) -> None:
        return None

    def post(self, tensor: torch.Tensor, operation: Operation, writes: bool, after: Any) -> Wait:
        data = tensor
        if not _in_host_memory(tensor):  # of one that is only written to, nothing is copied there
            data = torch.empty_like(tensor, device="cpu") if writes else tensor.to("cpu", copy=True)
        work = operation(self._backend, data)

        def wait() -> None:
            work.wait(self._limit)
            if writes and data is not tensor:
                tensor.copy_(data)

        return wait

    def abort(self) -> None:
        """What is under way in gloo cannot be ended; it fails when the connections go."""
        self.leave()

    def leave(self) -> None:
        self._backend = None


def _in_host_memory(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


class NcclLine:
    """Operations of one communicator, on a stream of its own.

    Args:
        connect: makes the communicator, at the first operation.
        device: where the tensors are.
        limit: seconds for each operation. Whoever waits keeps to it, and calls `abort`: a stream's end has no deadline.
    """

    def __init__(self, connect: Callable[[], Any], device: torch.device, limit: float):
        self.order = asyncio.Lock()
        self._connect = connect
        self._device = device
        self._limit = timedelta(seconds=limit)
        self._backend: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._ended = False

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def post(self, tensor: torch.Tensor, operation: Operation, writes: bool, after: torch.cuda.Event) -> Wait:
        if self._ended:
            raise RuntimeError("the communicator was aborted")
        if self._backend is None:
            self._backend = self._connect()
            self._stream = torch.cuda.Stream(self._device, priority=-1)  # as NCCL's own (`nccl.py`)
        stream = self._stream
        assert stream is not None
        with torch.cuda.stream(stream):
            stream.wait_event(after)
            work = operation(self._backend, tensor)
            work.synchronize()  # `stream` waits for NCCL's own, and this thread for nothing
            end = torch.cuda.Event(blocking=True)
            end.record(stream)
        tensor.record_stream(stream)
        return functools.partial(self._wait, end, work, tensor)

    def _wait(self, end: torch.cuda.Event, work: Any, tensor: torch.Tensor) -> None:
        """`tensor` is held until the end, whoever else has let go of it."""
        end.synchronize()
        work.wait(self._limit)  # over by now: raises what broke it

    def abort(self) -> None:
        self._ended = True
        if self._backend is not None:
            self._backend.abort()

    def leave(self) -> None:
        self._ended = True
        if self._backend is not None:
            self._backend.shutdown()
            self._backend = None
