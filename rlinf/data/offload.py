"""Tensors leave their device for a while, and come back as the same tensors.

Flows in: tensors that lie on a device, plain ones and sharded ones. Flows out: nothing; their bytes move to host memory
and back. What moves are storages, not tensors: parameters, views, optimizer state, and whoever else holds them stay as
they are, and only lose what they point to in between. Nobody waits here, and nothing communicates: of a sharded tensor
each rank moves its own slice. On a CPU host the same happens, from memory to memory, so that it can be tested there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

P = ParamSpec("P")
R = TypeVar("R")


class Parking:
    """A place in host memory for the storages of some tensors. All its methods block.

    Moves one storage after the other, so a move that failed half way (no memory, say) is gone on with by calling `park`
    or `unpark` again, whichever of the two is wanted now.

    Args:
        tensors: what moves; or a function that says so at each `park`, where tensors come and go, as the state of an
            optimizer does.

    A storage that cannot be given back (a mapped file, shared memory) is first exchanged for a copy in all tensors that
    are named here; views of it that are not named keep the old one.
    """

    def __init__(self, tensors: Iterable[Tensor] | Callable[[], Iterable[Tensor]]):
        self._tensors = tensors if callable(tensors) else tuple(tensors)
        self._parked: dict[int, tuple[UntypedStorage, UntypedStorage]] = {}
        """By address of the storage: it, empty, and its bytes in host memory."""

    @property
    def bytes(self) -> int:
        """Bytes that the tensors take on their device while they are there."""
        away = sum(host.nbytes() for storage, host in self._parked.values() if not storage.nbytes())
        return bytes_of(self._there()) + away

    @property
    def parked(self) -> int:
        """Bytes in host memory now; 0 when all is on the device."""
        return sum(host.nbytes() for _, host in self._parked.values())

    @torch.no_grad()
    def park(self) -> None:
        """Move to host memory whatever is on the device; nothing if nothing is.

        Until `unpark`, nobody may read or write the tensors.

        Raises:
            RuntimeError: host memory is not enough. What has moved by then stays parked, the rest is where it was.
        """
        tensors = tuple(self._there())
        _own(tensors)
        found = _storages(tensors)
        for key, storage in found.items():
            # one that has bytes although it is parked was on its way back when that failed: the host's are the whole
            if key not in self._parked:
                self._parked[key] = storage, _host_copy(storage)
            storage.resize_(0)
        for device in {storage.device for storage in found.values() if storage.is_cuda}:
            with _on(device):
                torch.cuda.empty_cache()  # to the device, which other processes share

    @torch.no_grad()
    def unpark(self) -> None:
        """Bring back what is parked; nothing if nothing is.

        Raises:
            RuntimeError: the device has not enough room. What has not come back by then stays parked.
        """
        for key, (storage, host) in list(self._parked.items()):
            storage.resize_(host.nbytes())
            storage.copy_(host)
            del self._parked[key]

    def needed(self, fn: Callable[P, R]) -> Callable[P, R]:
        """`fn`, which reads or writes the tensors; it refuses to while they are parked, where torch would crash.

        Raises:
            RuntimeError: when called while some are parked.
        """

        @wraps(fn)
        def present(*args: P.args, **kwargs: P.kwargs) -> R:
            if self._parked:
                raise RuntimeError(
                    f"{getattr(fn, '__name__', fn)} needs tensors that are parked: it was called without a lease on "
                    "their device. Mark the endpoint that calls it device=True"
                )
            return fn(*args, **kwargs)

        return present

    def _there(self) -> Iterable[Tensor]:
        return self._tensors() if callable(self._tensors) else self._tensors


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes that the storages of tensors take now, each counted once; 0 for parked ones."""
    return sum(storage.nbytes() for storage in _storages(tensors).values())


def _storages(tensors: Iterable[Tensor]) -> dict[int, UntypedStorage]:
    """The storages that hold something, by address."""
    found: dict[int, UntypedStorage] = {}
    for tensor in tensors:
        if not tensor.is_meta:
            storage = shard_of(tensor).untyped_storage()
            if storage.nbytes():
                found[storage._cdata] = storage
    return found


def shard_of(tensor: Tensor) -> Tensor:
    """The shard of a tensor that this rank has; the tensor itself where it is whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _host_copy(storage: UntypedStorage) -> UntypedStorage:
    """A copy in host memory, page-locked if it comes from a GPU: those are copied at the speed of the bus."""
    with _on(storage.device):
        host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.is_cuda).untyped_storage()
        host.copy_(storage)
    return host


def _on(device: torch.device) -> AbstractContextManager[object]:
    """In it CUDA works on this device: what is done for another would open a context there, with its own memory."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _resizable(storage: UntypedStorage) -> bool:
    """Whether it can be given back; torch says so of mapped memory too, and dies when that is resized."""
    return storage.resizable() and not (storage.device.type == "cpu" and storage.is_shared())


def _own(tensors: Iterable[Tensor]) -> None:
    """Give tensors whose storage cannot be resized one that can, shared among them as the old one was."""
    copies: dict[int, tuple[UntypedStorage, UntypedStorage]] = {}
    for tensor in tensors:
        local = shard_of(tensor)
        if local.is_meta or _resizable(old := local.untyped_storage()):
            continue
        _, new = copies.setdefault(old._cdata, (old, old.clone()))
        local.data = local.detach().new_empty(0).set_(new, local.storage_offset(), local.shape, local.stride())
