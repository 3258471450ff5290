"""A process group as an asyncio citizen: collectives that are awaited, have a deadline and name what went wrong.

Flows in: tensors. Flows out: the same tensors, combined or copied. Who wakes whom: the group's own thread hands each
operation to the backend, in the order of calling; a waiting thread per operation posts its end to the loop.

Posting and waiting are apart so that an operation under way holds up no other: a member may wait to receive while
another member needs it to take part in a broadcast first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from rlinf.runtime.base.compute_thread import ComputeThread
from rlinf.runtime.base.errors import RuntimeFault, UserError
from rlinf.runtime.base.tasks import in_thread, settle
from rlinf.runtime.base.tensor_bytes import flat_bytes

T = TypeVar("T")
_LEAVE_SECONDS = 5.0
"""For a group's own threads to end: milliseconds, unless an operation is under way."""


class CollectiveError(RuntimeFault):
    """An operation of a group failed, or the group could not be made."""


class CollectiveTimeout(CollectiveError, TimeoutError):
    """Some member of a group did not join in before the deadline; the text names group, operation and hosts."""


class Group:
    """Collectives over a fixed set of hosts. Made by `Collectives.group`.

    All members call the same operations in the same order. A cancelled operation is not undone: the backend goes on
    with it, and uses its tensor, until the others join in or the deadline passes. After a failure in a group of more
    than one host, members disagree on what was done, so every later call raises that failure again.

    Attributes:
        name: its name, the same on every member.
        ranks: hosts that are members; the order is that of `all_gather`.
    """

    def __init__(self, name: str, ranks: tuple[int, ...], rank: int, backend: Any, deadline: float):
        self.name = name
        self.ranks = ranks
        self._rank = rank
        self._backend = backend  # ProcessGroupGloo or ProcessGroupNCCL; None in a group of one
        self._deadline = deadline
        self._limit = timedelta(seconds=deadline)
        self._thread = ComputeThread(f"group {name}", asyncio.get_running_loop())
        self._waiting: dict[asyncio.Future[Any], str] = {}
        self._inside: set[asyncio.Future[Any]] = set()
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

    async def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """Combine `tensor` of all members, in place on every member, and return it.

        Args:
            tensor: any shape, the same on every member; a dtype that the backend can compute with.
            op: `torch.distributed.ReduceOp`; gloo has no AVG.

        Raises:
            CollectiveTimeout, CollectiveError: see `broadcast`.
        """
        data = tensor.detach().contiguous()

        def post(backend: Any) -> Any:
            options = dist.AllreduceOptions()
            options.reduceOp = op
            options.timeout = self._limit
            return backend.allreduce([data], options)

        await self._run("all_reduce", post)
        return _into(tensor, data)

    async def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors of all members, `[members, *tensor.shape]`, in the order of `ranks`.

        Args:
            tensor: any shape and dtype, the same on every member.

        Raises:
            CollectiveTimeout, CollectiveError: see `broadcast`.
        """
        gathered = torch.empty((len(self.ranks), *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        data = flat_bytes(tensor)
        if self._backend is None:
            gathered[0].copy_(tensor.detach())

        def post(backend: Any) -> Any:
            options = AllgatherOptions()
            options.timeout = self._limit
            return backend._allgather_base(flat_bytes(gathered), data, options)

        await self._run("all_gather", post)
        return gathered

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

    async def barrier(self) -> None:
        """Wait until every member has called it. Raises as `broadcast` does."""
        on_cuda = self._backend is not None and self._backend.name() == "nccl"
        device = f"cuda:{torch.cuda.current_device()}" if on_cuda else "cpu"  # the group's thread has no device set

        def post(backend: Any) -> Any:
            options = dist.AllreduceOptions()
            options.timeout = self._limit
            return backend.allreduce([torch.zeros(1, device=device)], options)

        await self._run("barrier", post)

    async def close(self) -> None:
        """Leave the group. Operations under way here raise `CollectiveError`; the name stays taken."""
        self._broken = CollectiveError(f"{self} is closed")
        for future, operation in self._waiting.items():
            if not future.done():
                future.set_exception(CollectiveError(f"{operation}: {self} was closed meanwhile"))
        self._waiting.clear()
        self._thread.close()
        if self._backend is not None:
            release = [self._backend]
            self._backend = None
            # Threads that are inside the backend when the interpreter ends would abort the process. They leave as soon
            # as the other members have left too; but an operation may hang, so they are not waited for for ever.
            await asyncio.wait([in_thread(release.clear), *self._inside], timeout=_LEAVE_SECONDS)

    def __repr__(self) -> str:
        return f"group {self.name!r} of hosts {list(self.ranks)}"

    async def _run(self, operation: str, post: Callable[[Any], Any]) -> None:
        """Post one operation in the group's thread, then wait for its end in one of its own."""
        if self._broken is not None:
            raise self._broken
        if self._backend is None:
            return
        begun = time.monotonic()
        try:
            work = await self._thread.run(post, self._backend)
            inside = in_thread(lambda: work.wait(self._limit))
            self._inside.add(inside)
            inside.add_done_callback(self._inside.discard)
            done = _following(inside)
            self._waiting[done] = operation
            try:
                await done
            finally:
                self._waiting.pop(done, None)
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


def _following(future: asyncio.Future[T]) -> asyncio.Future[T]:
    """A future that ends as another does, unless it was ended before."""
    follower: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def ended(_: asyncio.Future[T]) -> None:
        error = future.exception()
        settle(follower, None if error is not None else future.result(), error)

    future.add_done_callback(ended)
    return follower
