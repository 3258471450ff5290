"""A process group as an asyncio citizen: operations that are awaited, have a deadline and name what went wrong.

Flows in: tensors. Flows out: the same tensors, on another host. Who wakes whom: a waiting thread hands an operation to
the backend, one at a time on each line and in the order of calling; a waiting thread posts its end to the loop; one
member's failure ends what waits on all members.

Posting and waiting are apart so that an operation under way holds up no other: a member may wait to receive while
another member needs it to take part in a broadcast first. What of a backend would hold up others all the same is kept
apart by its lines (`lines.py`).
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rlinf.runtime.base.errors import RuntimeFault, UserError
from rlinf.runtime.base.tensor_bytes import flat_bytes

from .lines import Line, Lines, Operation, Wait
from .waiting_threads import WaitingThreads

T = TypeVar("T")
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
        begun = time.monotonic()
        try:
            async with line.order:
                if self._broken is not None:
                    raise self._broken
                wait = await self._end_of(self._enter(post), operation, begun)
            await self._end_of(self._enter(wait), operation, begun)
        except (RuntimeError, ValueError, TimeoutError) as error:
            if isinstance(error, CollectiveError):
                raise
            if self._broken is not None:  # aborted, whatever the backend calls that
                raise CollectiveError(f"{operation}: {self._broken}") from error
            where = f"{operation} in {self}, on host {self._rank}"
            if time.monotonic() - begun >= self._deadline or "timed out" in str(error).lower():
                failure: CollectiveError = CollectiveTimeout(
                    f"{where}: not done after {self._deadline:g} s. Some member did not call it, called another "
                    f"operation before it, or is gone"
                )
            else:
                failure = CollectiveError(f"{where}: {error}")
            self._break(failure)
            self._tell(str(failure))
            raise failure from error

    async def _end_of(self, inside: asyncio.Future[T], operation: str, begun: float) -> T:
        """What a call of the backend comes to, unless the group or the time for the operation ends before it."""
        left = begun + self._deadline - time.monotonic()
        either: list[asyncio.Future[Any]] = [inside, self._over]
        await asyncio.wait(either, timeout=left, return_when=asyncio.FIRST_COMPLETED)
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
        if not operating.cancelled():
            operating.exception()  # seen: whoever waited for it may have been cancelled

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
