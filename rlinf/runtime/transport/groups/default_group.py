"""The default process group of torch.distributed, reduced to what a device mesh needs it for: this process's rank.

Flows in: rank and size of the job. Flows out: errors, for whoever wants to communicate over it. Nobody waits here.

A process can have one default group but may be a member of several meshes (an actor and a critic on the same devices),
so no mesh can be the default group, and a real one over all hosts would let roles that share a process mix up their
collectives. `DeviceMesh` and `get_rank()` only ask it who this process is.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from rlinf.runtime.base.errors import UserError

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
        "group=mesh.get_group() (process_group=… for checkpoints), or use a Group of rlinf.runtime.collectives"
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
