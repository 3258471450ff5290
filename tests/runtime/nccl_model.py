"""NCCL and CUDA's streams as far as their rules of waiting go, over tensors of this process.

A device has streams, each of which executes in order what was enqueued on it. An operation of NCCL is a kernel on a
stream of its communicator: it waits for the stream that is current when it is posted, and occupies its own until the
kernels of all members run. There are no tags: the n-th receive takes what the n-th send between the same two sent. The
first operation of a communicator blocks the thread that posts it until all members post theirs. `work.wait(limit)`
makes the current stream wait, and blocks the thread until the operation has ended, as torch 2.11 does.

`Machine.patched` puts it in the place of `torch.cuda`. Its devices are numbered like the hosts.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch


class Ticket:
    """A point in a stream that has been passed, or not yet."""

    def __init__(self) -> None:
        self.passed = False


class Kernel:
    """One operation of a communicator, of all its members."""

    def __init__(self, members: frozenset[int], run: Callable[[], None] | None = None):
        self.members = members
        self.tensors: dict[int, torch.Tensor] = {}
        self.running: set[int] = set()
        self.aborted: set[int] = set()
        self.run = run
        self.over = False


class Machine:
    """All devices.

    Args:
        pool: streams that a device can be asked for; further ones are those again.
    """

    def __init__(self, pool: int = 32):
        self.pool = pool
        self.changed = threading.Condition()
        self.queues: dict[tuple[int, int], deque[Any]] = defaultdict(deque)
        self.recorded: list[tuple[int, tuple[int, ...]]] = []
        self._dealt: dict[int, Iterator[int]] = defaultdict(lambda: itertools.cycle(range(1, pool + 1)))
        self._current = threading.local()

    # What torch.cuda has ----------------------------------------------------------------------------------------

    def stream(self, device: torch.device | int, priority: int = 0) -> Stream:
        index = device if isinstance(device, int) else device.index
        return Stream(self, index, next(self._dealt[index]))

    def event(self, **_: Any) -> Event:
        return Event(self)

    def current(self, device: int) -> Stream:
        streams = getattr(self._current, "streams", {})
        return streams.get(device, Stream(self, device, 0))

    @contextlib.contextmanager
    def under(self, stream: Stream) -> Iterator[None]:
        before = dict(getattr(self._current, "streams", {}))
        self._current.streams = before | {stream.device: stream}
        try:
            yield
        finally:
            self._current.streams = before

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """In the place of `torch.cuda`."""

        def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
            self.recorded.append((stream.device, tuple(tensor.shape)))

        with (
            mock.patch("torch.cuda.Stream", self.stream),
            mock.patch("torch.cuda.Event", self.event),
            mock.patch("torch.cuda.stream", self.under),
            mock.patch("torch.cuda.current_stream", lambda device: self.current(device.index)),
            mock.patch.object(torch.Tensor, "record_stream", record_stream),
        ):
            yield

    # How it executes --------------------------------------------------------------------------------------------

    def enqueue(self, stream: Stream, what: Any) -> None:
        with self.changed:
            self.queues[stream.device, stream.number].append(what)
            self.advance()

    def advance(self) -> None:
        """Execute all that can be."""
        moved = True
        while moved:
            moved = False
            for (device, _), queue in list(self.queues.items()):
                while queue and self._passes(queue[0], device):
                    queue.popleft()
                    moved = True
        self.changed.notify_all()

    def _passes(self, head: Any, device: int) -> bool:
        if isinstance(head, Kernel):
            head.running.add(device)
            if head.running == head.members and not head.over:
                if head.run is not None:
                    head.run()
                head.over = True
            return head.over or device in head.aborted
        kind, ticket = head
        if kind == "record":
            ticket.passed = True
        return bool(ticket.passed)


class Stream:
    def __init__(self, machine: Machine, device: int, number: int):
        self.machine, self.device, self.number = machine, device, number

    def wait_event(self, event: Event) -> None:
        if event.ticket is not None:
            self.machine.enqueue(self, ("wait", event.ticket))

    def wait_stream(self, other: Stream) -> None:
        event = Event(self.machine)
        event.record(other)
        self.wait_event(event)


class Event:
    def __init__(self, machine: Machine):
        self.machine = machine
        self.ticket: Ticket | None = None

    def record(self, stream: Stream) -> None:
        self.ticket = Ticket()
        self.machine.enqueue(stream, ("record", self.ticket))

    def synchronize(self) -> None:
        with self.machine.changed:
            self.machine.changed.wait_for(lambda: self.ticket is None or self.ticket.passed)


class Network:
    """What the communicators of one name share."""

    def __init__(self, machine: Machine, members: tuple[int, ...]):
        self.machine = machine
        self.members = members
        self.here: set[int] = set()
        self.kernels: dict[Any, deque[Kernel]] = defaultdict(deque)

    def kernel(self, kind: str, members: frozenset[int], device: int, source: int, tensor: torch.Tensor) -> Kernel:
        """The next of its kind that this device has not joined yet."""
        found = next((kernel for kernel in self.kernels[kind, members] if device not in kernel.tensors), None)
        if found is None:
            found = Kernel(members)
            self.kernels[kind, members].append(found)
            made = found

            def run() -> None:
                for member in members - {source}:
                    made.tensors[member].copy_(made.tensors[source])

            found.run = run
        found.tensors[device] = tensor
        return found


class Communicator:
    """One member's end: what `ProcessGroupNCCL` is to torch. Members are named by their position in `members`."""

    def __init__(self, network: Network, device: int):
        self.network, self.device = network, device
        self.machine = network.machine
        self.stream: Stream | None = None
        self.calls: list[str] = []
        self.aborted = False

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        other = self.network.members[peer]
        return self._post(f"{self.device} to {other}", frozenset({self.device, other}), self.device, tensors[0])

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        other = self.network.members[peer]
        return self._post(f"{other} to {self.device}", frozenset({self.device, other}), other, tensors[0])

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Work:
        root = self.network.members[options.rootRank]
        return self._post("broadcast", frozenset(self.network.members), root, tensors[0])

    def _post(self, kind: str, members: frozenset[int], source: int, tensor: torch.Tensor) -> Work:
        with self.machine.changed:
            self.network.here.add(self.device)
            self.machine.changed.notify_all()
            self.machine.changed.wait_for(lambda: self.network.here >= members or self.aborted)
            if self.aborted:
                raise RuntimeError("NCCL communicator was aborted")
        if self.stream is None:
            self.stream = self.machine.stream(self.device)
        with self.machine.changed:
            self.stream.wait_stream(self.machine.current(self.device))
            kernel = self.network.kernel(kind, members, self.device, source, tensor)
            self.machine.enqueue(self.stream, kernel)
            return Work(self, self.stream)

    def abort(self) -> None:
        """Ends what this member waits for; the others are not told."""
        self.calls.append("abort")
        with self.machine.changed:
            self.aborted = True
            for kernel in (kernel for kernels in self.network.kernels.values() for kernel in kernels):
                kernel.aborted.add(self.device)
            self.machine.advance()

    def shutdown(self) -> None:
        self.calls.append("shutdown")


class Work:
    def __init__(self, communicator: Communicator, stream: Stream):
        self.communicator = communicator
        self.end = Event(communicator.machine)
        self.end.record(stream)

    def synchronize(self) -> None:
        self.communicator.machine.current(self.communicator.device).wait_event(self.end)

    def wait(self, limit: Any = None) -> None:
        self.synchronize()
        self.end.synchronize()
        if self.communicator.aborted:
            raise RuntimeError("NCCL communicator was aborted")
