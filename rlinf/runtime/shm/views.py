"""Tensors in another process's memory: what travels, and what the receiver makes of it.

Flows in: `SlotRef`s, a few dozen bytes each, made by the owner's `Arena`. Flows out: tensors over the owner's memory.
Who wakes whom: the last tensor, view or numpy array over an opened slot, when it is collected, calls `on_free`.
"""

from __future__ import annotations

import itertools
import mmap
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlinf.runtime.base.errors import RuntimeFault


@dataclass(frozen=True, slots=True)
class Segment:
    """The memory of one host, and where to open it."""

    owner: int
    """Rank of the host whose memory it is."""
    pid: int
    fd: int
    inode: int
    """Tells the memory from whatever else that pid and descriptor may mean, later or in another container."""
    size: int
    """Bytes of address space; most have no pages behind them."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Segment, (self.owner, self.pid, self.fd, self.inode, self.size)


@dataclass(frozen=True, slots=True)
class SlotRef:
    """A tensor in a host's arena, for one holder: open it once, and the owner hears of its end once."""

    segment: Segment
    slot: int
    """Unique over the owner's life, so that word about a slot can arrive late without harm."""
    offset: int
    """Bytes from the start of the segment to the tensor's first element."""
    nbytes: int
    """Bytes from the first to past the last element; at least one element."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return SlotRef, (self.segment, self.slot, self.offset, self.nbytes, self.dtype, self.shape, self.stride)

    @property
    def owner(self) -> int:
        """Rank of the host whose memory it is."""
        return self.segment.owner


def inside(tensor: torch.Tensor, base: int, size: int) -> bool:
    """Whether a tensor's memory begins in the `size` bytes from address `base`, which are shared memory."""
    if tensor.device.type != "cpu" or torch._C._is_cow_tensor(tensor):  # type: ignore[attr-defined]
        return False  # to ask for the address would copy it; and what torch shares so is its own memory
    return 0 <= tensor.untyped_storage().data_ptr() - base < size


class Watch(weakref.ref[np.ndarray[Any, Any]]):
    """Knows which slot's memory is no longer referenced once its array is gone."""

    __slots__ = ("key", "owner", "slot")
    key: int
    owner: int
    slot: int


def view(
    memory: mmap.mmap, ref: SlotRef, gone: Callable[[weakref.ref[np.ndarray[Any, Any]]], None]
) -> tuple[torch.Tensor, Watch]:
    """A tensor over `ref`, and what calls `gone` when its storage is freed."""
    array: np.ndarray[Any, Any] = np.ndarray((ref.nbytes,), np.uint8, memory, ref.offset)
    watch = Watch(array, gone)
    watch.owner, watch.slot = ref.segment.owner, ref.slot
    # `frombuffer` makes the storage own this very array, and so do all views, of torch and numpy, through the storage.
    return torch.frombuffer(array, dtype=ref.dtype).as_strided(ref.shape, ref.stride), watch


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a row-major tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size or 1
    return tuple(reversed(strides))


class ArenaReader:
    """What one host has mapped of others' arenas. Every method may be called from any thread.

    Args:
        on_free: called with (owner, slot) once per `open`, when nothing refers to that tensor's storage any more. It
            runs wherever the last reference went, perhaps within a garbage collection on any thread, which perhaps
            holds any lock: so it takes none and only notes the fact (`deque.append`, `loop.call_soon_threadsafe`, or
            `Arena.release` if the arena is at hand).
    """

    def __init__(self, on_free: Callable[[int, int], None]):
        self._maps: dict[tuple[int, int], mmap.mmap] = {}  # by owner and inode
        self._ranges: dict[tuple[int, int], tuple[int, int]] = {}  # address and bytes of each
        self._watches: dict[int, Watch] = {}  # by order of opening; weak references count only while they are kept
        self._opened = itertools.count()
        watches = self._watches

        def gone(watch: Any) -> None:
            if watches.pop(watch.key, None) is not None:
                on_free(watch.owner, watch.slot)

        self._gone = gone

    def open(self, ref: SlotRef) -> torch.Tensor:
        """A tensor over the owner's memory, without a copy; the first of an owner maps all it has.

        Raises:
            RuntimeFault: the owner's memory cannot be mapped: it died before anything of it was opened, or is out of
                reach (`Arena.domain` differs).
        """
        segment = ref.segment
        memory = self._maps.get((segment.owner, segment.inode))
        if memory is None:
            memory = self._maps.setdefault((segment.owner, segment.inode), _map(segment))
            base = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
            self._ranges[segment.owner, segment.inode] = (base, segment.size)
        tensor, watch = view(memory, ref, self._gone)
        watch.key = next(self._opened)
        self._watches[watch.key] = watch
        return tensor

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in memory that is mapped here."""
        return any(inside(tensor, base, size) for base, size in self._ranges.values())

    def forget(self, owner: int) -> None:
        """Host `owner` died: unmap its memory, as soon as no tensor lies in it. Tensors that are open stay readable,
        and `on_free` is still called for them."""
        for key in [key for key in self._maps if key[0] == owner]:
            self._maps.pop(key, None)
            self._ranges.pop(key, None)

    def close(self) -> None:
        """Forget every owner, and call `on_free` no more."""
        self._watches.clear()
        self._maps.clear()
        self._ranges.clear()


def _map(segment: Segment) -> mmap.mmap:
    try:
        fd = os.open(f"/proc/{segment.pid}/fd/{segment.fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise RuntimeFault(
            f"the memory of host {segment.owner} (pid {segment.pid}) cannot be opened: {error}. Either that process "
            "ended, or it runs in another container or as another user, which payload routes must not treat as one"
            " machine."
        ) from error
    try:
        if os.fstat(fd).st_ino != segment.inode:
            raise RuntimeFault(
                f"pid {segment.pid} is no longer host {segment.owner}, or not in this container: it has other memory"
            )
        return mmap.mmap(fd, segment.size)
    finally:
        os.close(fd)
