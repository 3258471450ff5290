"""Process groups over any set of hosts, each under an explicit name, and device meshes for FSDP2.

Flows in: a name, a list of hosts, tensors. Flows out: a `Group` with asynchronous collectives, or a `DeviceMesh`.
Who wakes whom: hosts that make a group wait for each other in the store; `process_groups.py` has the operations.

Why names. `torch.distributed.new_group(use_local_synchronization=True)` derives a group's name from how many groups a
process has made so far, and hangs as soon as two members have made different numbers of them. Here a name is the whole
identity: it is a prefix of one store, on which the members also agree that they mean the same hosts. So groups may
overlap and may be made in any order. Each use of the store has its own connection (`Store.clone`): a connection is
locked while it waits, and two groups that are made at once would otherwise wait for each other.

Why meshes are registered groups. The other working design, one default group per worker group, allows a process one
membership only, and an actor and a critic on the same devices need two. So a mesh is made of explicitly named groups
that torch can find, and the default group merely knows ranks (`process_groups.py`).

Hosts are named everywhere by their rank in the job, never by their position in a group.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from rlinf.runtime.base.calls import current_scope
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.base.tasks import in_thread
from rlinf.runtime.transport import process_groups
from rlinf.runtime.transport.process_groups import (
    LEAVE_SECONDS,
    CollectiveError,
    CollectiveTimeout,
    GlooLines,
    Group,
    Lines,
    NcclLines,
    WaitingThreads,
    abort,
    destroy,
    enter_world,
    leave_world,
)

__all__ = ["CollectiveError", "CollectiveTimeout", "Collectives", "Group", "backend_for"]

_lone = itertools.count()
"""Numbers the registered groups of one host, which no other host has to find."""


def backend_for(device_type: str) -> str:
    """The backend that serves tensors on a device type: NCCL on CUDA, gloo elsewhere."""
    return "nccl" if device_type == "cuda" else "gloo"


class Collectives:
    """Makes the groups and meshes of one host.

    Args:
        store: store that all hosts share, such as a `TCPStore`; None if all hosts live in one process.
        rank: this host.
        world_size: number of hosts.
        backend_for: backend for a device type, for meshes.
        deadline: seconds until a group must be complete and each of its operations done.
        gpu: the unique id of a host's GPU, or "cpu".
        tell: calls `failed` of another host with the name of a group or mesh, and why it cannot go on.
    """

    def __init__(
        self,
        store: Store | None,
        rank: int,
        world_size: int,
        *,
        backend_for: Callable[[str], str] = backend_for,
        deadline: float = 300.0,
        gpu: Callable[[int], str] = lambda rank: "cpu",
        tell: Callable[[int, str, str], None] = lambda rank, name, why: None,
    ):
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._backend_for = backend_for
        self._deadline = deadline
        self._gpu = gpu
        self._tell = tell
        self._made: dict[str, tuple[str, asyncio.Task[Any] | None]] = {}
        """By name, words for what it stands for, and its making; None once it was released."""
        self._lines: dict[str, list[Any]] = {}
        """By mesh, the groups that torch knows for it."""
        self._leaving: set[asyncio.Future[None]] = set()
        self._threads = WaitingThreads(f"group operations of host {rank}")
        self._in_world = False

    def backend(self, device_type: str, ranks: Sequence[int]) -> str:
        """The backend for tensors on this type of device between these hosts; the same on all of them.

        NCCL refuses two members on one GPU. Gloo takes their tensors through host memory.
        """
        gpus = [gpu for gpu in map(self._gpu, ranks) if gpu != "cpu"]
        return self._backend_for("cpu" if len(set(gpus)) < len(gpus) else device_type)

    async def group(
        self, name: str, ranks: Sequence[int], backend: str = "gloo", *, deadline: float | None = None
    ) -> Group:
        """The group of this name; made once, and complete when all its members have called this.

        Args:
            name: the same on every member; never used for anything else, not even after the group was closed.
            ranks: its hosts, in the same order on every member. One host alone needs no store and no network.
            backend: "gloo", or "nccl" for CUDA tensors; `backend` chooses.
            deadline: seconds for its completion and for each operation; None for the default.

        Raises:
            UserError: the name stands for other hosts already; this host is no member; there is no store.
            CollectiveTimeout: members are missing at the deadline; the text names them.
            CollectiveError: the members cannot reach each other or the store.
        """
        members = self._members(name, ranks)
        limit = self._deadline if deadline is None else deadline

        async def make() -> Group:
            lines = None
            if len(members) > 1:
                lines = await in_thread(lambda: self._connect(f"group {name!r}", name, members, backend, limit))
            tell = functools.partial(self._tell_others, name, members)
            return Group(name, members, self.rank, lines, limit, self._threads, tell)

        result: Group = await self._once(name, f"hosts {list(members)} over {backend}", make)
        return result

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

        It belongs to the scope in which it is made, such as an actor's, and is released when that ends.

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
            making = in_thread(lambda: self._register_lines(name, grid, dims, device_type))
            try:
                groups = await asyncio.shield(making)
            except asyncio.CancelledError:
                making.add_done_callback(lambda _: self._leave(name))  # a thread cannot be interrupted
                raise
            return DeviceMesh.from_group(
                groups if len(groups) > 1 else groups[0],
                device_type,
                mesh=grid if len(groups) > 1 else None,
                mesh_dim_names=tuple(f"{name}.{dim}" for dim in dims),
            )

        if name not in self._made and (scope := current_scope.get()) is not None:
            scope.add(_Held(self, name))
        result: DeviceMesh = await self._once(name, f"a {device_type} mesh {lengths} of hosts {list(members)}", make)
        return result

    async def release(self, name: str) -> None:
        """Leave the group or mesh of this name, on this host; nothing if there is none. The name stays taken.

        The connections and threads of a mesh go with the last module that was spread over it.
        """
        what, task = self._made.get(name, ("", None))
        if task is None:
            return
        self._made[name] = what, None
        task.cancel()
        thing = task.result() if task.done() and not task.cancelled() and task.exception() is None else None
        if isinstance(thing, Group):
            await thing.close()
        elif thing is not None:
            thing._pg_registry.clear()  # torch's caches may hold the mesh for ever
        self._leave(name)

    def failed(self, name: str, why: str, *, tell: bool = True) -> None:
        """The group or mesh of this name cannot go on: end what its members wait for in it, on all their hosts.

        Args:
            why: the first cause, as its members are to see it.
            tell: the other members do not know yet.
        """
        _, task = self._made.get(name, ("", None))
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return
        member = task.result()
        if tell:
            self._tell_others(name, member.ranks if isinstance(member, Group) else member.mesh.flatten().tolist(), why)
        if isinstance(member, Group):
            member.fail(why)
        else:
            groups = list(self._lines.get(name, ()))
            self._take_leave(lambda: abort(groups))

    def _tell_others(self, name: str, ranks: Sequence[int], why: str) -> None:
        for rank in ranks:
            if rank != self.rank:
                self._tell(rank, name, why)

    def _leave(self, mesh: str) -> None:
        """Have torch forget the groups of a mesh. What runs in one, in any thread, has it until it fails or ends."""
        if groups := self._lines.pop(mesh, None):
            self._take_leave(lambda: destroy(groups))

    def _take_leave(self, how: Callable[[], None]) -> asyncio.Future[None]:
        leaving = in_thread(how)
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)
        return leaving

    async def close(self) -> None:
        """Release all groups and meshes of this host; who waits for one to be made is cancelled."""
        meshes = [group for groups in self._lines.values() for group in groups]
        await asyncio.gather(*(self.release(name) for name in self._made))
        if self._leaving:
            late = (await asyncio.wait(self._leaving, timeout=LEAVE_SECONDS))[1]
            if late:  # a member is gone, and NCCL waits for it to leave in order
                await asyncio.wait({*late, self._take_leave(lambda: abort(meshes))}, timeout=LEAVE_SECONDS)
        meshes.clear()
        self._threads.close()
        if self._in_world:
            self._in_world = False
            leave_world()

    # Making ------------------------------------------------------------------------------------------------------

    async def _once(self, name: str, what: str, make: Callable[[], Any]) -> Any:
        """Make a thing once per name, and return it; a failure stays too, since the store holds what is left of the
        attempt."""
        if name not in self._made:
            self._made[name] = what, asyncio.create_task(make(), name=f"make {name}")
        before, task = self._made[name]
        if task is None:
            raise UserError(f"{name!r} was {before} on host {self.rank} and is closed; take a new name")
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

    def _meet(self, what: str, store: Store, members: tuple[int, ...], kind: str, limit: float) -> None:
        """In a thread: wait until all members have come and mean the same. The backends' own waits name nobody."""
        mine = f"hosts {list(members)} over {kind}"
        try:
            theirs = store.compare_set("members", "", mine).decode()
            if theirs != mine:
                quarrel = f"{what} is {mine} on host {self.rank} but {theirs} on another; take different names"
                store.set("outcome", quarrel)  # wakes the others, who could only wait for the deadline
                raise UserError(quarrel)
            store.set(f"here/{self.rank}", "")
            if store.add("count", 1) == len(members):
                store.set("outcome", "complete")
            try:
                store.wait(["outcome"], timedelta(seconds=limit))
            except dist.DistStoreError:
                missing = [rank for rank in members if not store.check([f"here/{rank}"])]
                raise CollectiveTimeout(
                    f"{what} of {mine} was not complete {limit:g} s after host {self.rank} came: "
                    f"hosts {missing} did not make it"
                ) from None
            outcome = store.get("outcome").decode()
        except RuntimeError as error:
            raise CollectiveError(f"{what} of {mine} lost the store, which lives on another host: {error}") from error
        if outcome != "complete":
            raise UserError(outcome)

    def _connect(self, what: str, name: str, members: tuple[int, ...], backend: str, limit: float) -> Lines:
        """In a thread: a group that torch knows nothing of."""
        full = f"group/{name}"
        store = PrefixStore(full, self._own_store())
        self._meet(what, store, members, backend, limit)
        position = members.index(self.rank)
        try:
            if backend == "gloo":
                pg = dist.ProcessGroupGloo(store, position, len(members), timedelta(seconds=limit))
                return GlooLines(pg, limit)
            if backend == "nccl":
                return self._nccl_lines(full, position, len(members), limit)
        except (RuntimeError, AttributeError) as error:
            raise CollectiveError(f"{what} of hosts {list(members)} over {backend} cannot be made: {error}") from error
        raise UserError(f"{what}: there is no backend {backend!r}; take 'gloo' or 'nccl'")

    def _nccl_lines(self, full: str, position: int, size: int, limit: float) -> Lines:
        """In a thread on this host's device."""
        device = torch.device("cuda", torch.cuda.current_device())

        def connect(kind: str, positions: tuple[int, ...]) -> Any:
            store = PrefixStore(f"{full}/{kind}/{'-'.join(map(str, positions))}", self._own_store())
            return process_groups.communicator(store, positions.index(position), len(positions), limit)

        return NcclLines(connect, position, size, device, limit)

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
            self._lines.setdefault(name, []).append(groups[-1])
        return groups

    def _register(self, name: str, line: list[int], rank: int, device_type: str) -> Any:
        """In a thread: a group that torch can find, made as `new_group` does, less its naming by counters.

        Its members are part of its name, because the lines of a dimension share all the rest.
        """
        full = f"mesh/{name}/{'-'.join(map(str, line))}"
        if len(line) == 1:
            full += f"/{next(_lone)}"  # hosts that share a process each have theirs
        store = PrefixStore(full, self._own_store())
        if len(line) > 1:
            self._meet(f"mesh {name!r}", store, tuple(line), device_type, self._deadline)
        backend = self.backend(device_type, line)
        if backend == "nccl":
            process_groups.prepare(self._deadline)
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
        return pg

    def _own_store(self) -> Store:
        if self._store is None:
            return HashStore()
        own: Store = self._store.clone()  # type: ignore[attr-defined]  # the stubs of torch do not list it
        return own

    def _enter_world(self) -> None:
        if not self._in_world:
            rank, size = (self.rank, self.world_size) if self._store is not None else (0, 1)
            enter_world(rank, size)
            self._in_world = True


class _Held:
    """A mesh among the things that a scope ends."""

    def __init__(self, collectives: Collectives, name: str):
        self._collectives = collectives
        self._name = name

    async def close(self) -> None:
        await self._collectives.release(self._name)
