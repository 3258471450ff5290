"""CUDA tensors between processes of one GPU: handles of their memory, and who still has one.

Flows in: tensors to hand out, handles to open or to refuse. Flows out: `IpcRef`s, tensors over the sender's memory.
Who wakes whom: the end of an opened tensor's memory calls `on_free`, as for shared memory; told of it, the sender has
torch free its own.

Torch counts the receivers of each handle in shared memory, and frees what the sender has let go of when the count is 0
and it comes to look. Only a receiver that has opened the handle, and lets go of the tensor, lowers the count. So a
handle that nobody opens, and one whose holder is killed, would keep the sender's memory for ever. Here every handle is
either opened or refused, which lowers the count without opening; the sender looks when it is told; and it lowers the
count itself for a host that is lost.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from rlinf.runtime.gpu.own_device import own_device

from .parts import IpcRef

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
            known = watches.get(watch.key)
            if known is not None and known is watch:  # after `close` there is none
                del watches[known.key]
                on_free(known.owner, known.number)

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
        held = self._out.get(host, {})
        if [number for number in numbers if held.pop(number, None) is not None]:
            torch.cuda.ipc_collect()

    def take_back(self, host: int, numbers: Iterable[int]) -> None:
        """These handles have not left, or their host is gone."""
        held = self._out.get(host, {})
        if counters := [counter for number in numbers if (counter := held.pop(number, None)) is not None]:
            for counter in counters:
                _lower(counter)
            torch.cuda.ipc_collect()

    # At the receiver ---------------------------------------------------------------------------------------------

    def open(self, ref: IpcRef) -> torch.Tensor:
        """The tensor, over the sender's memory."""
        here = own_device().index  # who sees other GPUs, or in another order, counts them otherwise
        tensor = ref.rebuild(*ref.args[:_DEVICE], here, *ref.args[_DEVICE + 1 :])
        storage = tensor.untyped_storage()
        if (known := self._open.get(storage._cdata)) is not None and known() is storage:
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
