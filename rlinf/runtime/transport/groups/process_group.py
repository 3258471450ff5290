"""A process group as an asyncio citizen: operations that are awaited, have a deadline and name what went wrong.

Flows in: tensors. Flows out: the same tensors, on another host. Who wakes whom: a waiting thread hands an operation to
the backend, one at a time and in the order of calling; a waiting thread posts its end to the loop.

Posting and waiting are apart so that an operation under way holds up no other: a member may wait to receive while
another member needs it to take part in a broadcast first.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rlinf.runtime.base.errors import RuntimeFault, UserError
from rlinf.runtime.base.tasks import finish
from rlinf.runtime.base.tensor_bytes import flat_bytes

from .waiting_threads import WaitingThreads

LEAVE_SECONDS = 1.0
"""For threads inside a backend to leave it: milliseconds, unless an operation hangs."""


class CollectiveError(RuntimeFault):
    """An operation of a group failed, or the group could not be made."""


class CollectiveTimeout(CollectiveError, TimeoutError):
    """Some member of a group did not join in before the deadline; the text names group, operation and hosts."""


class Group:
    """Operations over a fixed set of hosts. Made by `Collectives.group`.

    All members call the same operations in the same order. A cancelled operation is not undone: the backend goes on
    with it, and uses its tensor, until the others join in or the deadline passes. After a failure in a group of more
    than one host, members disagree on what was done, so every later call raises that failure again.

    Attributes:
        name: its name, the same on every member.
        ranks: hosts that are members.
    """

    def __init__(
        self, name: str, ranks: tuple[int, ...], rank: int, backend: Any, deadline: float, threads: WaitingThreads
    ):
        self.name = name
        self.ranks = ranks
        self._rank = rank
        self._backend = backend  # ProcessGroupGloo or ProcessGroupNCCL; None in a group of one
        self._deadline = deadline
        self._limit = timedelta(seconds=deadline)
        self._threads = threads
        self._order = asyncio.Lock()  # first come, first served: what is posted next
        self._inside: set[asyncio.Future[Any]] = set()
        self._closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
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

        def post(backend: Any) -> Any:
            options = dist.BroadcastOptions()
            options.rootRank = root
            options.rootTensor = 0
            options.timeout = self._limit
            return backend.broadcast([data], options)

        await self._run(f"broadcast from host {src}", post)
        return _into(tensor, data)

    async def send(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> None:
        """Send `tensor` to host `dst`, which receives it with the same tag; returns when it may be changed again.

        Raises:
            CollectiveTimeout, CollectiveError: see `broadcast`.
        """
        peer = self._peer(dst)
        data = flat_bytes(tensor)
        await self._run(f"send to host {dst} with tag {tag}", lambda backend: backend.send([data], peer, tag))

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
        await self._run(f"recv from host {src} with tag {tag}", lambda backend: backend.recv([data], peer, tag))
        return _into(tensor, data)

    async def close(self) -> None:
        """Leave the group. Operations under way here raise `CollectiveError`; the name stays taken."""
        self._broken = CollectiveError(f"{self} is closed")
        if not self._closing.done():
            self._closing.set_result(None)
        if self._backend is not None:
            release = [self._backend]
            self._backend = None
            # Threads that are inside the backend when the interpreter ends would abort the process. They leave as soon
            # as the other members have left too; but an operation may hang, so they are not waited for for ever.
            await asyncio.wait([self._threads.run(release.clear), *self._inside], timeout=LEAVE_SECONDS)

    def __repr__(self) -> str:
        return f"group {self.name!r} of hosts {list(self.ranks)}"

    async def _run(self, operation: str, post: Callable[[Any], Any]) -> None:
        """Post one operation when it is its turn, then wait for its end beside all others."""
        begun = time.monotonic()
        try:
            async with self._order:
                if self._broken is not None:
                    raise self._broken
                if self._backend is None:
                    return
                posting = self._enter(functools.partial(post, self._backend))
                await finish(posting)  # even if cancelled, or the next one might overtake it
                work = posting.result()
            done = self._enter(lambda: work.wait(self._limit))
            await asyncio.wait([done, self._closing], return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                raise CollectiveError(f"{operation}: {self} was closed meanwhile")
            done.result()
        except (RuntimeError, ValueError) as error:
            where = f"{operation} in {self}, on host {self._rank}"
            if time.monotonic() - begun >= self._deadline or "timed out" in str(error).lower():
                failure: CollectiveError = CollectiveTimeout(
                    f"{where}: not done after {self._deadline:g} s. Some member did not call it, called another "
                    f"operation before it, or is gone"
                )
            else:
                failure = CollectiveError(f"{where}: {error}")
            self._broken = self._broken or failure
            raise failure from error

    def _enter(self, function: Callable[[], Any]) -> asyncio.Future[Any]:
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
