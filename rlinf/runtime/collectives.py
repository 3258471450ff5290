"""Process groups over any set of hosts, each under an explicit name, and device meshes for FSDP2.

Flows in: a name, a list of hosts, tensors. Flows out: a `Group` with asynchronous collectives, or a `DeviceMesh`.
Who wakes whom: hosts that make a group wait for each other in the store; an operation is handed to the backend by the
group's own thread, in the order of calling, and a waiting thread posts its end to the loop.

Why names. `torch.distributed.new_group(use_local_synchronization=True)` derives a group's name from how many groups a
process has made so far, and hangs as soon as two members have made different numbers of them. Here a name is the whole
identity: it is a prefix of one store, on which the members also agree that they mean the same hosts. So groups may
overlap and may be made in any order. Each use of the store has its own connection (`Store.clone`): a connection is
locked while it waits, and two groups that are made at once would otherwise wait for each other.

Why meshes are registered groups. A process can have one default group, but may be a member of several meshes (an actor
and a critic on the same devices), so a mesh cannot be the default group. `DeviceMesh` needs a default group all the
same, though only to ask for its own rank. It gets one that knows ranks and cannot communicate: a collective that was
not told its group raises at once, instead of mixing with another role's or waiting for hosts that never join in.

Hosts are named everywhere by their rank in the job, never by their position in a group.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from .compute import ComputeThread
from .errors import RuntimeFault, UserError

T = TypeVar("T")

_WORLD = "rlinf_world"
"""Name of the backend of the default group that cannot communicate."""


class CollectiveError(RuntimeFault):
    """An operation of a group failed, or the group could not be made."""


class CollectiveTimeout(CollectiveError, TimeoutError):
    """Some member of a group did not join in before the deadline; the text names group, operation and hosts."""


def backend_for(device_type: str) -> str:
    """The backend that serves tensors on a device type: NCCL on CUDA, gloo elsewhere."""
    return "nccl" if device_type == "cuda" else "gloo"


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
        data = _bytes(tensor)

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
        data = _bytes(tensor)
        if self._backend is None:
            gathered[0].copy_(tensor.detach())

        def post(backend: Any) -> Any:
            options = c10d.AllgatherOptions()
            options.timeout = self._limit
            return backend._allgather_base(_bytes(gathered), data, options)

        await self._run("all_gather", post)
        return gathered

    async def send(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> None:
        """Send `tensor` to host `dst`, which receives it with the same tag; returns when it may be changed again.

        Raises:
            CollectiveTimeout, CollectiveError: see `broadcast`.
        """
        peer = self._peer(dst)
        data = _bytes(tensor)
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
        data = _bytes(tensor)
        await self._run(f"recv from host {src} with tag {tag}", lambda backend: backend.recv([data], peer, tag))
        return _into(tensor, data)

    async def barrier(self) -> None:
        """Wait until every member has called it. Raises as `broadcast` does."""

        def post(backend: Any) -> Any:
            device = "cuda" if backend.name() == "nccl" else "cpu"
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
            _in_thread(release.clear)  # the destructor waits for operations under way, perhaps until their deadline

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
            done = _in_thread(lambda: work.wait(self._limit))
            self._waiting[done] = operation
            try:
                await asyncio.shield(done)  # a cancelled waiter must not hide the end from `close`
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


class Collectives:
    """Makes the groups and meshes of one host.

    Args:
        store: store that all hosts share, such as a `TCPStore`; None if all hosts live in one process.
        rank: this host.
        world_size: number of hosts.
        backend_for: backend for a device type, for meshes.
        deadline: seconds until a group must be complete and each of its operations done.
    """

    def __init__(
        self,
        store: dist.Store | None,
        rank: int,
        world_size: int,
        *,
        backend_for: Callable[[str], str] = backend_for,
        deadline: float = 300.0,
    ):
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._backend_for = backend_for
        self._deadline = deadline
        self._made: dict[str, tuple[str, asyncio.Task[Any]]] = {}
        self._registered: list[Any] = []
        self._in_world = False

    async def group(
        self, name: str, ranks: Sequence[int], backend: str = "gloo", *, deadline: float | None = None
    ) -> Group:
        """The group of this name; made once, and complete when all its members have called this.

        Args:
            name: the same on every member; never used for anything else, not even after the group was closed.
            ranks: its hosts, in the same order on every member. One host alone needs no store and no network.
            backend: "gloo", or "nccl" for CUDA tensors.
            deadline: seconds for its completion and for each operation; None for the default.

        Raises:
            UserError: the name stands for other hosts already; this host is no member; there is no store.
            CollectiveTimeout: members are missing at the deadline; the text names them.
            CollectiveError: the members cannot reach each other or the store.
        """
        members = self._members(name, ranks)
        limit = self._deadline if deadline is None else deadline

        async def make() -> Group:
            pg = None
            if len(members) > 1:
                pg = await _in_thread(lambda: self._connect(f"group {name!r}", name, members, backend, limit))
            return Group(name, members, self.rank, pg, limit)

        return await self._once(name, f"hosts {list(members)} over {backend}", make)

    async def mesh(
        self,
        name: str,
        ranks: Sequence[int],
        device_type: str = "cpu",
        *,
        shape: Sequence[int] | None = None,
        dims: Sequence[str] = ("shard",),
    ) -> DeviceMesh:
        """A device mesh over any hosts, one device each, for `fully_shard(module, mesh=mesh)`.

        Give its group where torch wants one (`process_group=mesh.get_group()` for checkpoints): there is no default
        group to fall back on. What makes groups of its own (an int for `reshard_after_forward`, flattening a mesh)
        does not work on it.

        Args:
            name: the same on every member, never used for anything else.
            ranks: its hosts, in the same order on every member.
            device_type: "cpu" or "cuda"; a CUDA mesh can communicate CPU tensors as well.
            shape: lengths of its dimensions, row by row over `ranks`; None for one dimension.
            dims: names of the dimensions. In the mesh they read "name.dim": torch takes meshes with equal hosts and
                names for equal, and caches by that, so that one role's operations could use another role's group.

        Raises:
            UserError, CollectiveTimeout, CollectiveError: see `group`; or another default group exists.
        """
        members = self._members(name, ranks)
        lengths = tuple(shape) if shape is not None else (len(members),)
        grid = torch.tensor(members).reshape(lengths)
        if grid.dim() != len(dims):
            raise UserError(
                f"mesh {name!r} of shape {lengths} needs {grid.dim()} names of dimensions, not {list(dims)}"
            )
        if self._store is None:
            grid = torch.zeros_like(grid)  # hosts that share a process are one rank for torch

        async def make() -> DeviceMesh:
            self._enter_world()
            groups = await _in_thread(lambda: self._register_lines(name, grid, dims, device_type))
            return DeviceMesh.from_group(
                groups if len(groups) > 1 else groups[0],
                device_type,
                mesh=grid if len(groups) > 1 else None,
                mesh_dim_names=tuple(f"{name}.{dim}" for dim in dims),
            )

        return await self._once(name, f"a {device_type} mesh {lengths} of hosts {list(members)}", make)

    async def close(self) -> None:
        """Close all groups and meshes of this host; who waits for one to be made is cancelled."""
        for _, task in self._made.values():
            if not task.done():
                task.cancel()
            elif task.exception() is None and isinstance(made := task.result(), Group):
                await made.close()
        for pg in self._registered:
            dist.destroy_process_group(pg)
        self._registered.clear()
        if self._in_world:
            self._in_world = False
            _leave_world()

    # Making ------------------------------------------------------------------------------------------------------

    async def _once(self, name: str, what: str, make: Callable[[], Any]) -> Any:
        """What was made under this name; a failure stays too, since the store holds what is left of the attempt."""
        if name not in self._made:
            self._made[name] = what, asyncio.create_task(make(), name=f"make {name}")
        before, task = self._made[name]
        if before != what:
            raise UserError(
                f"{name!r} is {before} on host {self.rank} already and cannot be {what} too; take a new name"
            )
        return await asyncio.shield(task)

    def _members(self, name: str, ranks: Sequence[int]) -> tuple[int, ...]:
        members = tuple(ranks)
        if self.rank not in members:
            raise UserError(f"host {self.rank} is no member of group {name!r} of hosts {list(members)}")
        if len(set(members)) < len(members) or not all(0 <= rank < self.world_size for rank in members):
            raise UserError(
                f"group {name!r} needs different hosts from 0 to {self.world_size - 1}, not {list(members)}"
            )
        if self._store is None and len(members) > 1:
            raise UserError(
                f"group {name!r} of hosts {list(members)} needs one process per host: all hosts of this job share a "
                f"process, so pass tensors by reference, or start the job with torchrun"
            )
        return members

    def _meet(self, what: str, store: dist.Store, members: tuple[int, ...], kind: str, limit: float) -> None:
        """In a thread: wait until all members have come and mean the same. The backends' own waits name nobody."""
        mine = f"hosts {list(members)} over {kind}"
        try:
            theirs = store.compare_set("members", "", mine).decode()
            if theirs != mine:
                raise UserError(f"{what} is {mine} on host {self.rank} but {theirs} on another; take different names")
            store.set(f"here/{self.rank}", "")
            keys = {rank: f"here/{rank}" for rank in members}
            try:
                store.wait(list(keys.values()), timedelta(seconds=limit))
            except dist.DistStoreError:
                missing = [rank for rank, key in keys.items() if not store.check([key])]
                raise CollectiveTimeout(
                    f"{what} of {mine} was not complete {limit:g} s after host {self.rank} came: "
                    f"hosts {missing} did not make it"
                ) from None
        except RuntimeError as error:
            raise CollectiveError(f"{what} of {mine} lost the store, which lives on another host: {error}") from error

    def _connect(self, what: str, name: str, members: tuple[int, ...], backend: str, limit: float) -> Any:
        """In a thread: a group that torch knows nothing of."""
        store = dist.PrefixStore(f"group/{name}", self._own_store())
        self._meet(what, store, members, backend, limit)
        position = members.index(self.rank)
        try:
            if backend == "gloo":
                return dist.ProcessGroupGloo(store, position, len(members), timedelta(seconds=limit))
            if backend == "nccl":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timedelta(seconds=limit)
                return dist.ProcessGroupNCCL(store, position, len(members), options)
        except (RuntimeError, AttributeError) as error:
            raise CollectiveError(f"{what} of hosts {list(members)} over {backend} cannot be made: {error}") from error
        raise UserError(f"{what}: there is no backend {backend!r}; take 'gloo' or 'nccl'")

    def _register_lines(self, name: str, grid: torch.Tensor, dims: Sequence[str], device_type: str) -> list[Any]:
        """In a thread: one registered group per dimension of `grid`, of the hosts in line with this one."""
        rank = self.rank if self._store is not None else 0
        here = (grid == rank).nonzero()[0]
        groups = []
        for axis, dim in enumerate(dims):
            index: list[Any] = here.tolist()
            index[axis] = slice(None)
            line = grid[tuple(index)].tolist()
            groups.append(self._register(f"{name}.{dim}", line, rank, device_type))
        return groups

    def _register(self, name: str, line: list[int], rank: int, device_type: str) -> Any:
        """In a thread: a group that torch can find, made as `new_group` does, less its naming by counters.

        Its members are part of its name, because the lines of a dimension share all the rest.
        """
        full = f"mesh/{name}/{'-'.join(map(str, line))}"
        if len(line) == 1:
            full += f"/{self.rank}"  # hosts that share a process each have theirs
        store = dist.PrefixStore(full, self._own_store())
        if len(line) > 1:
            self._meet(f"mesh {name!r}", store, tuple(line), device_type, self._deadline)
        backend = self._backend_for(device_type)
        if device_type != "cpu":
            backend = f"cpu:{self._backend_for('cpu')},{device_type}:{backend}"
        pg, _ = c10d._new_process_group_helper(
            len(line),
            line.index(rank),
            line,
            backend,
            store,
            group_name=c10d.GroupName(full),
            timeout=timedelta(seconds=self._deadline),
        )
        c10d._world.pg_group_ranks[pg] = {host: position for position, host in enumerate(line)}
        self._registered.append(pg)
        return pg

    def _own_store(self) -> dist.Store:
        return self._store.clone() if self._store is not None else dist.HashStore()

    def _enter_world(self) -> None:
        if not self._in_world:
            rank, size = (self.rank, self.world_size) if self._store is not None else (0, 1)
            _enter_world(rank, size)
            self._in_world = True


# The default group -----------------------------------------------------------------------------------------------


class _World(dist.ProcessGroup):
    """A default group that knows its rank and size and nothing else."""

    users = 0


def _refuse(self: _World, *_: object, **__: object) -> Any:
    raise UserError(
        "a collective was called without a group. Roles that share this process must not share a default group: pass "
        "group=mesh.get_group() (process_group=… for checkpoints), or use a Group of rlinf.runtime.collectives"
    )


for _operation in (
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced"),
    *("allreduce", "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "monitored_barrier"),
    *("broadcast", "gather", "recv", "recv_anysource", "reduce", "reduce_scatter", "_reduce_scatter_base"),
    *("reduce_scatter_tensor_coalesced", "scatter", "send"),
):
    setattr(_World, _operation, _refuse)


def _enter_world(rank: int, size: int) -> None:
    """Have torch know this process as rank `rank` of `size`, unless it does already."""
    if not dist.is_initialized():
        dist.Backend.register_backend(_WORLD, lambda store, rank, size, timeout: _World(rank, size), devices=["cpu"])
        dist.init_process_group(_WORLD, store=dist.HashStore(), rank=rank, world_size=size)
    if (dist.get_rank(), dist.get_world_size()) != (rank, size):
        raise UserError(
            f"this process is rank {dist.get_rank()} of {dist.get_world_size()} in a default group that other code "
            f"made, and a mesh needs it to be rank {rank} of {size}: do not call init_process_group"
        )
    _World.users += 1


def _leave_world() -> None:
    _World.users -= 1
    if _World.users == 0 and isinstance(dist.group.WORLD, _World):
        dist.destroy_process_group()


# Helpers ---------------------------------------------------------------------------------------------------------


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as bytes, or a copy if it is not contiguous: backends move bytes of every dtype."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _into(tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Copy what arrived in `data` into `tensor`, unless they share memory."""
    if data.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(data.view(tensor.dtype).reshape(tensor.shape))
    return tensor


def _in_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """Run a function in a daemon thread of its own: however long it blocks, it keeps nobody else waiting.

    Not the loop's executor: that has few threads, and the interpreter would wait for them when it exits.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            result: Any = function()
            error = None
        except Exception as caught:
            result, error = None, caught
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_settle, future, result, error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
        future.exception()  # marks it as seen: the one who waited may have been cancelled
