"""Process groups of torch for asyncio: awaited operations with deadlines, and the threads that wait for them.

Collectives of torch that have had two names, under one.

In: tensors of one shape on all ranks of a group. Out: what they make of each other, in a tensor that the caller gives.

Threads that wait inside torch's backends, whose waits block: one for each operation under way, used again and again.

Who wakes whom: the queue wakes a thread that is free, which posts the result to the loop.

The lines that a group's operations take: one for all over gloo; over NCCL one per direction between two hosts, and
one for what all members do together.

NCCL has no tags: the n-th receive takes what the n-th send of the same communicator sent, and its kernels occupy their
stream until the other side's kernel runs. So each direction has a communicator of its own, and each line a stream of
its own: on the default stream, a receive that is posted early would stop all computing, the sends that the other side
waits for included. What a tensor needs of the default stream is waited for by an event recorded at the call; the
default stream itself waits for nothing.

NCCL's communicators: how they are made, and what of torch's own handling of failures is left on.

Torch watches over NCCL with threads of its own, which by default end the process: at an operation's timeout, and when
they are stuck themselves. A process that is ended so says nothing of the actor, call or host that failed. So the
runtime's deadline comes first, and the settings here leave torch what is needed beyond it.

The default process group of torch.distributed, reduced to what a device mesh needs it for: this process's rank.

A process can have one default group but may be a member of several meshes (an actor and a critic on the same devices),
so no mesh can be the default group, and a real one over all hosts would let roles that share a process mix up their
collectives. `DeviceMesh` and `get_rank()` only ask it who this process is.

A process group as an asyncio citizen: operations that are awaited, have a deadline and name what went wrong.

Operations of a line reach the backend one at a time, in the order of calling; one member's failure ends what waits on
all members. Posting and waiting are apart so that an operation under way holds up no other: a member may wait to
receive while another member needs it to take part in a broadcast first. What of a backend would hold up others all the
same is kept apart by its lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import queue
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from rlinf.runtime.base.errors import RuntimeFault, UserError
from rlinf.runtime.base.tasks import mark_seen, settle, start_thread
from rlinf.runtime.base.tensors import flat_bytes

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Has every rank's part follow the other's in one tensor; torch 2.13 renamed it."""
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Adds up tensors of all ranks, of which each gets a part of the rows; torch 2.13 renamed it."""


T = TypeVar("T")
_Work = tuple[Callable[[], Any], asyncio.Future[Any], asyncio.AbstractEventLoop]

SPARE = 4
"""Free threads that are kept: enough for what is under way time and again, few enough to be left lying about."""


class WaitingThreads:
    """A pool of as many threads as there are functions under way, so that none waits for another one's end.

    Used from one event loop's thread at a time, which does all the counting.

    Args:
        name: what the threads are called.
    """

    def __init__(self, name: str):
        self._name = name
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._busy = 0
        self._closed = False
        self.threads = 0
        """How many there are."""

    def run(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Begin a blocking function at once; nobody need look at the error that it may end with."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._busy += 1
        if self._busy > self.threads:
            self.threads += 1
            start_thread(self._serve, self._name)
        self._queue.put((function, future, loop))
        return future

    def close(self) -> None:
        """Let the threads end, each after what it does."""
        self._closed = True
        self._dismiss(0)

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            function, future, loop = work
            result, error = None, None
            try:
                result = function()
            except Exception as caught:
                error = caught
            del work, function  # a thread that is free must hold on to no backend
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._ended, future, result, error)
            del future, result, error

    def _ended(self, future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        self._busy -= 1
        self._dismiss(0 if self._closed else SPARE)
        settle(future, result, error)

    def _dismiss(self, spare: int) -> None:
        while self.threads - self._busy > spare:
            self.threads -= 1
            self._queue.put(None)


Operation = Callable[[Any, torch.Tensor], Any]
"""Posts an operation on a tensor to a backend, and returns torch's `Work`."""
Wait = Callable[[], None]


class Line(Protocol):
    """Operations that follow each other."""

    order: asyncio.Lock
    """First come, first served: what is posted next."""

    def mark(self) -> Any:
        """Mark what has been enqueued on the device until now; called on the loop when the operation is."""

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
        """Leave the group: what is under way in gloo cannot be ended; it fails when the connections go."""
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
            self._stream = torch.cuda.Stream(self._device, priority=-1)  # as NCCL's own
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


PATIENCE = 60.0
"""Seconds after the runtime's deadline until torch's watchdog aborts what is still under way: by then the runtime has
raised its own error, and told all members to abort."""
DUMP_SECONDS = 0.5
"""Torch waits four times as long before it cleans up after a failure, for dumps that nobody asked for; else 15."""


def settings(deadline: float) -> dict[str, str]:
    """The environment that torch reads when it makes a communicator.

    Args:
        deadline: seconds of the longest operation.
    """
    return {
        # 2 is to abort the communicators. 3, the default, is to throw in a thread of torch's, which ends the process.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
        # With it no watchdog would run, and `synchronize` would block the thread that posts.
        "TORCH_NCCL_BLOCKING_WAIT": "0",
        # Kills the process when the watchdog itself is stuck, in a driver that does not answer: the last resort.
        "TORCH_NCCL_ENABLE_MONITORING": "1",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(int(2 * (deadline + PATIENCE))),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": str(int(1000 * DUMP_SECONDS)),
    }


def prepare(deadline: float) -> None:
    """Set what torch is to read, unless the user has set it; before a communicator is made."""
    for name, value in settings(deadline).items():
        os.environ.setdefault(name, value)


def communicator(store: Any, position: int, size: int, deadline: float) -> Any:
    """A `ProcessGroupNCCL` that torch knows nothing of. NCCL itself connects the members at the first operation, which
    blocks until all of them have posted it.

    Args:
        store: of this communicator alone; a connection of its own, since it blocks.
        position: of this host among the members.
        size: how many members there are.
        deadline: seconds that the runtime gives an operation.
    """
    prepare(deadline)
    store.set_timeout(timedelta(seconds=deadline))  # of the exchange by which members find each other
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=deadline + PATIENCE)
    # Streams come from a pool of 32 that are dealt out in turn, one pool per priority: not the one of the compute.
    options.is_high_priority_stream = True
    return dist.ProcessGroupNCCL(store, position, size, options)


_BACKEND = "rlinf_world"
"""Name under which torch knows the backend that cannot communicate."""


class _World(dist.ProcessGroup):
    """A default group that knows its rank and size and nothing else."""

    users = 0  # meshes' owners; the last one that leaves takes it down

    def __init__(self, rank: int, size: int):
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stubs of torch know the other constructor only


def _refuse(self: _World, *_: object, **__: object) -> Any:
    raise UserError(
        "a collective was called without a group. Roles that share this process must not share a default group: pass "
        "group=mesh.get_group() (process_group=… for checkpoints), or use a Group of "
        "rlinf.runtime.transport.collectives"
    )


for _operation in (
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced"),
    *("allreduce", "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "monitored_barrier"),
    *("broadcast", "gather", "recv", "recv_anysource", "reduce", "reduce_scatter", "_reduce_scatter_base"),
    *("reduce_scatter_tensor_coalesced", "scatter", "send", "all_gather_single", "all_gather_single_coalesced"),
    *("all_to_all_single", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
):
    setattr(_World, _operation, _refuse)


def _make(store: Any, rank: int, size: int, timeout: Any) -> _World:
    return _World(rank, size)


def enter_world(rank: int, size: int) -> None:
    """Have torch know this process as rank `rank` of `size`, unless it does already.

    Raises:
        UserError: other code made a default group of another rank or size.
    """
    if not dist.is_initialized():
        dist.Backend.register_backend(_BACKEND, _make, devices=["cpu"])
        dist.init_process_group(_BACKEND, store=HashStore(), rank=rank, world_size=size)
    if (dist.get_rank(), dist.get_world_size()) != (rank, size):
        raise UserError(
            f"this process is rank {dist.get_rank()} of {dist.get_world_size()} in a default group that other code "
            f"made, and a mesh needs it to be rank {rank} of {size}: do not call init_process_group"
        )
    _World.users += 1


def leave_world() -> None:
    """Undo one `enter_world`; the last takes the default group down, and with it torch's record of all groups."""
    _World.users -= 1
    if _World.users == 0 and isinstance(dist.group.WORLD, _World):
        dist.destroy_process_group()


def destroy(groups: list[Any]) -> None:
    """In a thread: have torch forget groups that it knows; the last reference to one waits for its operations."""
    while groups:
        dist.destroy_process_group(groups.pop())


def abort(groups: list[Any]) -> None:
    """In a thread: have what is under way in groups that torch knows end at once. Gloo's goes on to its deadline."""
    for group in groups:
        with contextlib.suppress(RuntimeError):  # of a backend that cannot, or was told before
            group.abort()


Posting = tuple[Line, Operation]

LEAVE_SECONDS = 1.0
"""For threads inside a backend to leave it: milliseconds, unless an operation hangs."""


class CollectiveError(RuntimeFault):
    """An operation of a group failed, or the group could not be made."""


class CollectiveTimeout(CollectiveError, TimeoutError):
    """Some member of a group did not join in before the deadline; the text names group, operation and hosts."""


class Group:
    """Operations over a fixed set of hosts. Made by `Collectives.group`.

    All members call the same operations in the same order. A cancelled operation is not undone: the group goes on with
    it, and uses its tensor, until the others join in or the deadline passes. After a failure in a group of more than
    one host, members disagree on what was done: all of them are told, what is under way ends, and every later call
    raises that failure again.

    A CUDA tensor is sent as it is when the current stream comes to the moment of the call. One that was received can
    be read on any stream.

    Attributes:
        name: its name, the same on every member.
        ranks: hosts that are members.
    """

    def __init__(
        self,
        name: str,
        ranks: tuple[int, ...],
        rank: int,
        lines: Lines | None,
        deadline: float,
        threads: WaitingThreads,
        tell: Callable[[str], None] = lambda _: None,
    ):
        self.name = name
        self.ranks = ranks
        self._rank = rank
        self._lines = lines  # None in a group of one
        self._deadline = deadline
        self._threads = threads
        self._tell = tell  # tells the other members why this one has failed
        self._under_way: set[asyncio.Task[None]] = set()
        self._inside: set[asyncio.Future[Any]] = set()
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._broken: CollectiveError | None = None

    async def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        """Copy `tensor` of host `src` into `tensor` of every other member, in place, and return it.

        Args:
            tensor: any shape and dtype, the same on every member.
            src: host that has the value.

        Raises:
            CollectiveTimeout: not all members joined in before the deadline.
            CollectiveError: the connection to a member broke, or the group is broken or closed.
        """
        root = self._position(src)
        data = flat_bytes(tensor)

        def post(lines: Lines) -> Posting:
            options = dist.BroadcastOptions()
            options.rootRank = root
            options.rootTensor = 0
            options.timeout = timedelta(seconds=self._deadline)
            return lines.together(), lambda backend, data: backend.broadcast([data], options)

        await self._run(f"broadcast from host {src}", post, data, writes=src != self._rank)
        return _into(tensor, data)

    async def send(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> None:
        """Send `tensor` to host `dst`, which receives it with the same tag; returns when it may be changed again.

        Raises:
            CollectiveTimeout, CollectiveError: see `broadcast`.
        """
        peer = self._peer(dst)

        def post(lines: Lines) -> Posting:
            line, there = lines.target(peer)
            return line, lambda backend, data: backend.send([data], there, tag)

        await self._run(f"send to host {dst} with tag {tag}", post, flat_bytes(tensor), writes=False)

    async def recv(self, tensor: torch.Tensor, src: int, tag: int = 0) -> torch.Tensor:
        """Receive what host `src` sends with this tag into `tensor`, in place, and return it.

        Args:
            tensor: of the shape and dtype that is sent.
            src: host that sends.
            tag: tells apart what is under way between two hosts at once; NCCL ignores it and keeps the order.

        Raises:
            CollectiveTimeout, CollectiveError: see `broadcast`.
        """
        peer = self._peer(src)
        data = flat_bytes(tensor)

        def post(lines: Lines) -> Posting:
            line, there = lines.source(peer)
            return line, lambda backend, data: backend.recv([data], there, tag)

        await self._run(f"recv from host {src} with tag {tag}", post, data, writes=True)
        return _into(tensor, data)

    async def close(self) -> None:
        """Leave the group. Operations under way here raise `CollectiveError`; the name stays taken."""
        broken = bool(self._inside) or self._broken is not None
        self._broken = CollectiveError(f"{self} was closed")
        if not self._over.done():
            self._over.set_result(None)
        if self._lines is not None:
            lines, self._lines = self._lines.made(), None
            # Threads that are inside the backend when the interpreter ends would abort the process. They leave as soon
            # as the other members have left too; but an operation may hang, so they are not waited for for ever.
            leaving = [self._threads.run(line.abort if broken else line.leave) for line in lines]
            late = await _late([*leaving, *self._inside])
            if late and not broken:  # some member is gone, and would be waited for
                await _late([*(self._threads.run(line.abort) for line in lines), *late])

    def fail(self, why: str) -> None:
        """Another member has failed: nobody will join in here any more, so what is under way ends with this reason."""
        if self._broken is None:
            self._break(CollectiveError(f"{self} was given up: {why}"))

    def __repr__(self) -> str:
        return f"group {self.name!r} of hosts {list(self.ranks)}"

    async def _run(
        self, operation: str, post: Callable[[Lines], Posting], tensor: torch.Tensor, *, writes: bool
    ) -> None:
        """Begin an operation and wait for its end; whoever is cancelled meanwhile leaves it to the group."""
        if self._broken is not None:
            raise self._broken
        if self._lines is None:
            return
        line, begin = post(self._lines)
        posting = functools.partial(line.post, tensor, begin, writes, line.mark())
        operating = asyncio.create_task(self._operate(operation, line, posting), name=f"{operation} in {self}")
        self._under_way.add(operating)
        operating.add_done_callback(self._ended)
        await asyncio.shield(operating)

    async def _operate(self, operation: str, line: Line, post: Callable[[], Wait]) -> None:
        """Post one operation when it is its turn, then wait for its end beside all others."""
        start = time.monotonic()
        try:
            async with line.order:
                if self._broken is not None:
                    raise self._broken
                wait = await self._end_of(self._enter(post), operation, start)
            await self._end_of(self._enter(wait), operation, start)
        except (RuntimeError, ValueError, TimeoutError) as error:
            if isinstance(error, CollectiveError):
                raise
            if self._broken is not None:  # aborted, whatever the backend calls that
                raise CollectiveError(f"{operation}: {self._broken}") from error
            where = f"{operation} in {self}, on host {self._rank}"
            if time.monotonic() - start >= self._deadline or "timed out" in str(error).lower():
                failure: CollectiveError = CollectiveTimeout(
                    f"{where}: not done after {self._deadline:g} s. Some member did not call it, called another "
                    f"operation before it, or is gone"
                )
            else:
                failure = CollectiveError(f"{where}: {error}")
            self._break(failure)
            self._tell(str(failure))
            raise failure from error

    async def _end_of(self, inside: asyncio.Future[T], operation: str, start: float) -> T:
        """Return the result of a call of the backend, unless the group or the time for the operation ends before it."""
        seconds = start + self._deadline - time.monotonic()
        either: list[asyncio.Future[Any]] = [inside, self._over]
        await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if inside.done():
            return inside.result()
        if self._over.done():
            raise CollectiveError(f"{operation}: {self._broken}")
        raise TimeoutError

    def _break(self, failure: CollectiveError) -> None:
        """End what is under way, and let nothing follow."""
        self._broken = failure
        self._over.set_result(None)
        for line in self._lines.made() if self._lines is not None else ():
            self._enter(line.abort)

    def _ended(self, operating: asyncio.Task[None]) -> None:
        self._under_way.discard(operating)
        mark_seen(operating)  # whoever waited for it may have been cancelled

    def _enter(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Begin a call of the backend, whose thread `close` gives time to leave it."""
        inside = self._threads.run(function)
        self._inside.add(inside)
        inside.add_done_callback(self._inside.discard)
        return inside

    def _position(self, rank: int) -> int:
        if rank not in self.ranks:
            raise UserError(f"host {rank} is no member of {self}")
        return self.ranks.index(rank)

    def _peer(self, rank: int) -> int:
        if rank == self._rank:
            raise UserError(f"host {rank} cannot send to itself in {self}")
        return self._position(rank)


def _into(tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Copy what arrived in `data` into `tensor`, unless they share memory."""
    if data.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(data.view(tensor.dtype).reshape(tensor.shape))
    return tensor


async def _late(futures: list[asyncio.Future[Any]]) -> set[asyncio.Future[Any]]:
    """Wait a moment; those that have not ended by then."""
    return (await asyncio.wait(futures, timeout=LEAVE_SECONDS))[1] if futures else set()
