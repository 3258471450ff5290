"""Tensors leave their device for a while, and come back as the same tensors.

Their bytes, of plain tensors and of sharded ones, move to host memory and back. What moves are storages, not tensors:
parameters, views, optimizer state, and whoever else holds them stay as they are, and only lose what they point to in
between. Nothing communicates: of a sharded tensor each rank moves its own slice. On a CPU host the same happens, from
memory to memory, so that it can be tested there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, UntypedStorage

from rlinf.runtime.base.tensors import PinnedSlab, copies_on, shard_of

ALIGNMENT = 512
"""Bytes: every storage begins at a multiple of so many in the slab, as allocations on a GPU do."""

P = ParamSpec("P")
R = TypeVar("R")


class Parking:
    """A place in host memory for the storages of some tensors. All its methods block.

    A move that failed half way (no memory, say) is gone on with by calling `park` or `unpark` again, whichever of the
    two is wanted now. What comes from a GPU goes into one page-locked slab, which is as large as the most that was ever
    parked and is kept from one `park` to the next, since to lock memory costs more than to copy to it: so keep the
    parking, too.

    Args:
        tensors: what moves; or a function that says so at each `park`, where tensors come and go, as the state of an
            optimizer does.

    A storage that cannot be given back (a mapped file, shared memory) is first exchanged for a copy in all tensors that
    are named here; views of it that are not named keep the old one.
    """

    def __init__(self, tensors: Iterable[Tensor] | Callable[[], Iterable[Tensor]]):
        self._tensors = tensors if callable(tensors) else tuple(tensors)
        self._parked: dict[int, _Away] = {}
        """By address of the storage."""
        self._slab = PinnedSlab()
        self._places: dict[int, tuple[int, int]] = {}
        """By address of a storage, where in the slab its bytes were at last, and how many."""

    @property
    def bytes(self) -> int:
        """Bytes that the tensors take on their device while they are there."""
        away = sum(each.size for each in self._parked.values() if not each.storage.nbytes())
        return bytes_of(self._there()) + away

    @property
    def parked(self) -> int:
        """Bytes in host memory now; 0 when all is on the device."""
        return sum(each.size for each in self._parked.values())

    @property
    def pinned(self) -> int:
        """Bytes of page-locked host memory that it keeps, parked or not."""
        return self._slab.pinned

    @torch.no_grad()
    def park(self) -> None:
        """Move to host memory whatever is on the device; nothing if nothing is.

        Until `unpark`, nobody may read or write the tensors.

        Raises:
            RuntimeError: host memory is not enough. What has moved by then stays parked, the rest is where it was.
        """
        tensors = tuple(self._there())
        _own(tensors)
        storages = _storages(tensors)
        # one that has bytes although it is parked was on its way back when that failed: the host's are the whole
        self._copy({key: each for key, each in storages.items() if key not in self._parked and _on_gpu(each)})
        for key, storage in storages.items():
            if key not in self._parked:
                self._parked[key] = _Away(storage, storage.nbytes(), storage.clone())
            storage.resize_(0)
        for device in _devices(storages.values()):
            with torch.cuda.device(device):  # in another one it would open a context there, with its own memory
                torch.cuda.empty_cache()  # to the device, which other processes share

    def _copy(self, storages: Mapping[int, UntypedStorage]) -> None:
        """Copy storages from GPUs into the slab."""
        if not self._parked:
            self._places.clear()
        end = max((start + _aligned(size) for start, size in self._places.values()), default=0)
        for key, storage in storages.items():
            size = storage.nbytes()
            if self._places.get(key, (0, 0))[1] != size:
                self._places[key] = end, size
                end += _aligned(size)
        self._slab.grow(end)
        away = {key: _Away(each, each.nbytes(), self._slab.part(*self._places[key])) for key, each in storages.items()}
        for device in _devices(storages.values()):
            with copies_on(device):
                for each in away.values():
                    if each.storage.device == device:
                        each.copy_there()
        self._parked |= away

    @torch.no_grad()
    def unpark(self, *, without: Iterable[Tensor] = ()) -> None:
        """Bring back what is parked; nothing if nothing is.

        Args:
            without: tensors that are about to be overwritten as a whole: their storages come back with whatever the
                memory held, and all tensors that share these with them.

        Raises:
            RuntimeError: the device has not enough room. What has not come back by then stays parked.
        """
        anew = {shard_of(tensor).untyped_storage()._cdata for tensor in without}
        back: list[int] = []
        full: RuntimeError | None = None
        for key, away in self._parked.items():
            try:
                away.storage.resize_(away.size)
            except RuntimeError as error:
                full = error
                break
            back.append(key)
        copied = [self._parked[key] for key in back if key not in anew]
        for away in copied:
            if not _on_gpu(away.storage):
                away.copy_back()
        for device in _devices(away.storage for away in copied):
            with copies_on(device):
                for away in copied:
                    if away.storage.device == device:
                        away.copy_back()
        for key in back:
            del self._parked[key]
        if full is not None:
            raise full

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
    storages: dict[int, UntypedStorage] = {}
    for tensor in tensors:
        if not tensor.is_meta:
            storage = shard_of(tensor).untyped_storage()
            if storage.nbytes():
                storages[storage._cdata] = storage
    return storages


@dataclass(frozen=True, slots=True, eq=False)
class _Away:
    """A storage, which is empty meanwhile, and its bytes in host memory."""

    storage: UntypedStorage
    size: int
    """Bytes that it has on its device."""
    host: UntypedStorage | list[Tensor]
    """For a storage on the CPU, a copy of it; else parts of the slab, one after the other, uint8."""

    def copy_there(self) -> None:
        """Begin to copy from the GPU."""
        for part, host in self._parts():
            host.copy_(part, non_blocking=True)

    def copy_back(self) -> None:
        """Copy back what was parked; to a GPU, begin to."""
        if isinstance(self.host, UntypedStorage):
            self.storage.copy_(self.host)
        for part, host in self._parts():
            part.copy_(host, non_blocking=True)

    def _parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Bytes of the storage, and where they are in the slab."""
        if not isinstance(self.host, UntypedStorage):
            whole = torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)
            yield from zip(whole.split([len(part) for part in self.host]), self.host, strict=True)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _on_gpu(storage: UntypedStorage) -> bool:
    return storage.device.type == "cuda"


def _devices(storages: Iterable[UntypedStorage]) -> dict[torch.device, None]:
    """The GPUs that storages lie on."""
    return dict.fromkeys(storage.device for storage in storages if _on_gpu(storage))


def _resizable(storage: UntypedStorage) -> bool:
    """True if the storage's memory can be given back; torch says so of mapped memory too, and dies when that is
    resized."""
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
