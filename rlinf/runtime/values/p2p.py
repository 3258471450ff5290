"""Big tensors between devices or machines: by a process group, beside the messages that announce them.

Flows in: tensors found while a payload is encoded, and their `GroupRef`s where it is decoded. Flows out: the tensors,
at the other end. Who wakes whom: the sending task runs until the receiver has posted its receive; the received tensor
wakes the decoding call.

Each direction of a pair of hosts has a group of its own, so that two hosts that send to each other never wait for each
other; within it both ends follow the order of the messages, which NCCL, having no tags, needs.

NCCL's kernels occupy a GPU, and the stream that they are on, until the other end's kernel runs; and a GPU has few
streams and room for few such kernels. So a GPU takes part in one transfer at a time. The lower of the two hosts takes
its GPU first, posts its end and tells the other one, which then does the same: whoever waits for a GPU holds none of a
higher host, so that no ring of waits can close, however many transfers there are between however many hosts.

CUDA tensors between processes of one GPU: handles of their memory, and who still has one.

Torch counts the receivers of each handle in shared memory, and frees what the sender has let go of when the count is 0
and it comes to look. Only a receiver that has opened the handle, and lets go of the tensor, lowers the count. So a
handle that nobody opens, and one whose holder is killed, would keep the sender's memory for ever. Here every handle is
either opened or refused, which lowers the count without opening; the sender looks when it is told; and it lowers the
count itself for a host that is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import weakref
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from rlinf.runtime.base.calls import SERVICE
from rlinf.runtime.base.tensors import own_device
from rlinf.runtime.transport.arena import ArenaFull
from rlinf.runtime.transport.collectives import Collectives
from rlinf.runtime.transport.process_groups import Group
from rlinf.runtime.values.pickler import GroupRef, IpcRef

if TYPE_CHECKING:
    from rlinf.runtime.base.calls import Host

T = TypeVar("T")


class GroupBulk:
    """The process-group route of one host.

    Args:
        host: owns the sending tasks; its loss or close ends them.
        collectives: makes the groups, one per direction and device type, at first use.
    """

    def __init__(self, host: Host, collectives: Collectives):
        self._host = host
        self._collectives = collectives
        self._tags = itertools.count()
        self._turns: dict[tuple[int, int, str], asyncio.Lock] = {}
        self._gpu = asyncio.Lock()  # fair
        self._begun: dict[tuple[int, int], asyncio.Future[None]] = {}
        """By source and tag of a transfer: whether the other host has its GPU."""

    def announce(self, tensor: torch.Tensor) -> GroupRef:
        """Return a reference with what the receiver needs to know of a tensor that will be sent."""
        return GroupRef(self._host.rank, next(self._tags), tensor.device.type, tensor.dtype, tuple(tensor.shape))

    def send(self, tensor: torch.Tensor, ref: GroupRef, host: int, after: asyncio.Future[None] | None) -> None:
        """Send it, behind all that was sent to this host before, and not before `after` is done."""
        self._host.own(self._send(tensor, ref, host, after))

    async def _send(self, tensor: torch.Tensor, ref: GroupRef, host: int, after: asyncio.Future[None] | None) -> None:
        version = _version(tensor)

        def post(group: Group) -> Coroutine[Any, Any, None]:
            return group.send(tensor, host, ref.tag)

        await (await self._in_turn(ref, host, post, after))
        if _version(tensor) != version:
            self._host.complain(
                f"a {ref.device} tensor of shape {list(ref.shape)} was written to while it was sent to host {host}, so "
                "what arrived there may be neither the old nor the new: write to a copy, or await the call first"
            )

    def receive(self, ref: GroupRef) -> asyncio.Future[torch.Tensor]:
        """Receive the tensor that a reference announces, on this host's device of the same type, behind all that this
        was called for before."""
        return self._host.own(self._receive(ref))

    async def _receive(self, ref: GroupRef) -> torch.Tensor:
        async def post(group: Group) -> torch.Tensor:
            try:
                tensor = self._empty(ref)  # not before its turn: what waits takes no memory
            except RuntimeError as error:  # without a receive, all that follows it would be taken for something else
                why = f"host {self._host.rank} has no room for a tensor of shape {list(ref.shape)}: {error}"
                self._collectives.failed(group.name, why)
                raise
            return await group.recv(tensor, ref.source, ref.tag)

        return await (await self._in_turn(ref, self._host.rank, post, None))

    def _empty(self, ref: GroupRef) -> torch.Tensor:
        """Room for a tensor; in shared memory if that has room, for other hosts of this machine may want it too."""
        arena = self._host.values.arena
        if ref.device == "cpu" and arena is not None:
            with contextlib.suppress(ArenaFull):
                room: torch.Tensor = arena.empty(ref.shape, ref.dtype)
                return room
        return torch.empty(ref.shape, dtype=ref.dtype, device=ref.device)

    async def _in_turn(
        self,
        ref: GroupRef,
        target: int,
        post: Callable[[Group], Coroutine[Any, Any, T]],
        after: asyncio.Future[None] | None,
    ) -> asyncio.Task[T]:
        """Begin an operation when all before it, in the same direction, have begun; its end."""
        way = (ref.source, target, ref.device)
        async with self._turns.setdefault(way, asyncio.Lock()):  # which is fair
            if after is not None:
                await asyncio.shield(after)
            name = f"bulk {ref.device} {ref.source} to {target}"
            backend = self._collectives.backend(ref.device, [ref.source, target])
            group = await self._collectives.group(name, [ref.source, target], backend)
            if ref.device == "cpu":
                return self._host.own(post(group))
            return await self._with_gpu(ref, target, lambda: post(group))

    async def _with_gpu(
        self, ref: GroupRef, target: int, post: Callable[[], Coroutine[Any, Any, T]]
    ) -> asyncio.Task[T]:
        """Begin an operation when this host's GPU, and if it is the higher one the other's, is free for it."""
        here = self._host.rank
        there = target if here == ref.source else ref.source
        if here > there:
            await self._other_begun(ref.source, ref.tag)
            del self._begun[ref.source, ref.tag]
        await self._gpu.acquire()
        operating = self._host.own(post())
        operating.add_done_callback(lambda _: self._gpu.release())
        if here < there:
            self._host.cast(there, SERVICE, "bulk_begun", ref.source, ref.tag)
        return operating

    def begun(self, source: int, tag: int) -> None:
        """The other host of this transfer has taken its GPU and posted its end."""
        self._other_begun(source, tag).set_result(None)

    def _other_begun(self, source: int, tag: int) -> asyncio.Future[None]:
        if (source, tag) not in self._begun:
            self._begun[source, tag] = self._host.loop.create_future()
        return self._begun[source, tag]


def _version(tensor: torch.Tensor) -> int | None:
    """How often it was written to, as far as torch counts."""
    return None if tensor.is_inference() else tensor._version


_DEVICE, _COUNTER = 6, slice(11, 13)
"""Where the number of the GPU, by the sender's count, and a handle's counter are among what
`torch.multiprocessing.reductions.reduce_tensor` returns for a CUDA tensor."""


def unshareable(environment: dict[str, str] | None = None) -> str | None:
    """The setting of torch's allocator that keeps memory of this process from being shared; None if there is none."""
    environment = dict(os.environ) if environment is None else environment
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        for entry in environment.get(variable, "").replace(" ", "").split(","):
            if entry.lower() in ("expandable_segments:true", "backend:cudamallocasync"):
                return f"{variable}={entry}"
    return None


class _Watch(weakref.ref[torch.UntypedStorage]):
    """Knows which handle's memory is no longer referenced once its storage is gone."""

    __slots__ = ("key", "number", "owner")
    key: int
    owner: int
    number: int


class Handles:
    """One host's part: the handles that others have of its memory, and those that it has of others'.

    `open` may be called from any thread, the rest is the loop's.

    Args:
        owner: this host.
        on_free: called with (owner, number) once per handle of another host, when it is needed no more; wherever the
            last reference went, so it only notes the fact.
    """

    def __init__(self, owner: int, on_free: Callable[[int, int], None]):
        self._owner = owner
        self._numbers = itertools.count(-1, -1)  # below 0, where no slot of the arena is
        self._out: dict[int, dict[int, tuple[Any, ...]]] = {}
        """By host, the counters of the handles that it has."""
        self._on_free = on_free
        self._open: dict[int, _Watch] = {}
        """By storage."""
        watches = self._open

        def gone(watch: Any) -> None:
            current = watches.get(watch.key)
            if current is not None and current is watch:  # after `close` there is none
                del watches[current.key]
                on_free(current.owner, current.number)

        self._gone = gone

    # At the sender -----------------------------------------------------------------------------------------------

    @property
    def out(self) -> int:
        """Handles of this host's memory that others have."""
        return sum(map(len, self._out.values()))

    def export(self, tensor: torch.Tensor, host: int) -> IpcRef:
        """A handle for a host, which must open or refuse it once."""
        from torch.multiprocessing.reductions import reduce_tensor

        if tensor.untyped_storage()._cdata in self._open:
            tensor = tensor.clone()  # CUDA does not hand on what came by a handle
        rebuild, args = reduce_tensor(tensor)
        number = next(self._numbers)
        self._out.setdefault(host, {})[number] = args[_COUNTER]
        return IpcRef(self._owner, number, rebuild, args)

    def returned(self, host: int, numbers: Iterable[int]) -> None:
        """A host is done with these handles."""
        counters = self._out.get(host, {})
        if [number for number in numbers if counters.pop(number, None) is not None]:
            torch.cuda.ipc_collect()

    def take_back(self, host: int, numbers: Iterable[int]) -> None:
        """These handles have not left, or their host is gone."""
        handles = self._out.get(host, {})
        if counters := [counter for number in numbers if (counter := handles.pop(number, None)) is not None]:
            for counter in counters:
                _lower(counter)
            torch.cuda.ipc_collect()

    # At the receiver ---------------------------------------------------------------------------------------------

    def open(self, ref: IpcRef) -> torch.Tensor:
        """The tensor, over the sender's memory."""
        here = own_device().index  # who sees other GPUs, or in another order, counts them otherwise
        tensor = ref.rebuild(*ref.args[:_DEVICE], here, *ref.args[_DEVICE + 1 :])
        storage = tensor.untyped_storage()
        if (existing := self._open.get(storage._cdata)) is not None and existing() is storage:
            self._on_free(ref.owner, ref.number)  # torch has this memory open, and lowered the count of this handle
            return tensor
        watch = _Watch(storage, self._gone)
        watch.key, watch.owner, watch.number = storage._cdata, ref.owner, ref.number
        self._open[watch.key] = watch
        return tensor

    def refuse(self, ref: IpcRef) -> None:
        """Nobody wants the tensor."""
        _lower(ref.args[_COUNTER])
        self._on_free(ref.owner, ref.number)

    # Both --------------------------------------------------------------------------------------------------------

    def forget(self, host: int) -> None:
        """A host is lost. What it had opened is not used any more; its own memory stays here as long as it is used."""
        self.take_back(host, list(self._out.get(host, ())))
        self._out.pop(host, None)

    def close(self) -> None:
        """Call `on_free` no more."""
        self._open.clear()


def _lower(counter: tuple[Any, ...]) -> None:
    """Lower a handle's count of receivers by one."""
    torch.UntypedStorage._release_ipc_counter(*counter)
