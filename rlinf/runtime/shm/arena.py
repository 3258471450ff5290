"""A host's shared-memory arena: tensors go between processes of one machine with one copy, or none.

Flows in: tensors that a host hands to others (`Arena.export`), and word that they are done (`release`, `forget`). Flows
out: a `SlotRef` of a few dozen bytes per tensor, which the receiver's `ArenaReader.open` turns into a view of the very
same memory. Who wakes whom: when the last tensor, view or numpy array over an opened slot is collected, the reader
calls `on_free(owner, slot)`; whoever owns the reader sends that to the owner, whose `release` makes the memory free.

The memory of a host is one sparse memfd, mapped whole. It has no name, so nothing is left behind however a process
ends, and it ignores the size of /dev/shm. Peers open it once, through the owner's entry in /proc. Address space costs
nothing and pages do, so the mapping is larger than the limit (holes between slots can then never make an allocation
fail that the limit allows), free pages stay warm for the next tensor, and `trim` returns them to the kernel in place:
peers' mappings stay valid, and nothing is ever mapped again.

Exported memory is shared, not sent. A sender must not write to a tensor from `Arena.empty` while a holder has it, and
a receiver that writes to what it opened writes to what every other holder sees.
"""

from __future__ import annotations

import functools
import itertools
import math
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from rlinf.runtime.base.errors import RuntimeFault

from .free_list import PAGE, Holes
from .views import ArenaReader, Segment, SlotRef, Watch, contiguous_strides, inside, view

__all__ = ["Arena", "ArenaFull", "ArenaReader", "ArenaStatistics", "SlotRef"]

ALIGN = 64
"""A cache line, and the widest vector register: no kernel asks for more."""
LARGE = 256 << 10
"""From this size on slots begin and end on pages (waste below 1.6 %) and live apart from small ones, so that a small
long-lived tensor never splits the hole that a large one would fit again."""


class ArenaFull(RuntimeFault):
    """The arena's limit would be exceeded; the text says who holds how much."""


@dataclass(frozen=True, slots=True)
class ArenaStatistics:
    """One look at an arena. All sizes are bytes."""

    mapped: int
    """Memory that the kernel has given: live slots and warm free pages."""
    in_use: int
    """Live slots, rounding included."""
    peak: int
    """The largest `in_use` so far."""
    limit: int
    segments: int
    """0 before the first allocation, then 1."""
    slots: int
    """How many are live."""
    local: int
    """Used by tensors of `Arena.empty` in this process."""
    held: dict[int, int]
    """Held by each host; a slot with several holders counts for each."""
    allocations: int
    reused: int
    """Allocations served from pages that were warm."""


@dataclass(slots=True, eq=False)
class _Slot:
    id: int
    start: int
    size: int
    local: int = 1
    """Tensors of this process over it."""
    holders: dict[int, int] = field(default_factory=dict)
    """Per host, how many exports it has not released."""


class Arena:
    """The memory that one host lends to others.

    Every method may be called from any thread, but only `release` from a finalizer: the others take a lock, inside of
    which a garbage collection may happen to run it.

    Args:
        owner: rank of this host; travels in every `SlotRef`.
        limit_bytes: the most that live slots may take together, rounding included. Default: this process's share of
            half of what memory the machine (or container) has. Pages are taken when first written, not before.
    """

    def __init__(self, owner: int, limit_bytes: int | None = None):
        self.owner = owner
        sharers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # processes of the job on this machine, says torchrun
        self.limit = _physical_memory() // 2 // sharers if limit_bytes is None else limit_bytes
        # Local tensors that are gone, and (holder, slots) released. A garbage collection may append at any point, also
        # within the lock, so this is the one thing that changes without it.
        self._done: deque[Watch | tuple[int, tuple[int, ...]]] = deque()
        self._lock = threading.Lock()
        self._segment: Segment | None = None
        self._closed = False
        self._slots: dict[int, _Slot] = {}
        self._at: dict[int, _Slot] = {}  # by start
        self._watches: dict[int, Watch] = {}  # of local tensors, by slot
        self._ids = itertools.count()
        self._used = self._peak = self._allocations = self._reused = 0

    @staticmethod
    @functools.cache
    def available() -> bool:
        """Whether this platform has what the arena needs (Linux, memfd, a readable /proc)."""
        try:
            fd = os.memfd_create("rlinf-probe")
            try:
                os.close(os.open(f"/proc/{os.getpid()}/fd/{fd}", os.O_RDWR))
            finally:
                os.close(fd)
        except (AttributeError, OSError):
            return False
        return True

    @staticmethod
    @functools.cache
    def domain() -> str:
        """Equal for processes that can open each other's memory: same boot, same process namespace, same user."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An uninitialised, contiguous CPU tensor in the arena, which `export` hands over without a copy.

        It is an ordinary tensor; its memory comes back once nothing in this process and no holder uses it.

        Raises:
            ArenaFull: it does not fit in the limit.
        """
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = max(math.prod(shape), 1) * dtype.itemsize
        with self._lock:
            slot = self._allocate(nbytes)
            try:
                ref = SlotRef(self._here, slot.id, slot.start, nbytes, dtype, shape, contiguous_strides(shape))
                tensor, self._watches[slot.id] = view(self._memory, ref, self._done.append)  # type: ignore[arg-type]
            except BaseException:
                self._watches.pop(slot.id, None)
                self._unuse(slot)
                raise
        return tensor

    def export(self, tensor: torch.Tensor, holder: int) -> SlotRef:
        """Let host `holder` hold the tensor's memory, or else that of a copy, and return what it opens.

        Blocks while it copies: whoever must not makes the copy itself, from `lend` and `empty`.

        Raises:
            ArenaFull: the copy does not fit in the limit.
            TypeError: not a dense tensor in CPU memory.
        """
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_quantized:
            raise TypeError(
                f"the arena takes dense, unquantized CPU tensors, not {tensor.dtype} {tensor.layout} on {tensor.device}"
            )
        tensor = tensor.detach()
        ref = self.lend(tensor, holder)
        if ref is not None:
            return ref
        fresh = self.empty(tensor.shape, tensor.dtype)
        ref = self.lend(fresh, holder)
        assert ref is not None
        try:
            fresh.copy_(tensor)
        except BaseException:
            self.release(holder, (ref.slot,))
            raise
        return ref

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's memory is this arena's."""
        return self._segment is not None and not self._closed and inside(tensor, self._base, self._segment.size)

    def lend(self, tensor: torch.Tensor, holder: int) -> SlotRef | None:
        """Let host `holder` hold the memory that a tensor of this arena (a view, slice or stride of one) lies in.

        Every ref is matched by one slot id in `release`, or by `forget(holder)`. None if it lies elsewhere.
        """
        if not self.holds(tensor):
            return None
        if tensor.is_conj() or tensor.is_neg():  # bits outside memory, which only a copy makes real
            return None
        with self._lock:
            if self._segment is None or self._closed:
                return None
            start = tensor.untyped_storage().data_ptr() - self._base
            slot = self._at.get(start)
            if slot is None:  # the storage was made over a numpy slice, and begins inside
                slot = next(slot for slot in self._slots.values() if slot.start <= start < slot.start + slot.size)
            slot.holders[holder] = slot.holders.get(holder, 0) + 1
            here = self._segment
        shape, stride, itemsize = tuple(tensor.shape), tensor.stride(), tensor.dtype.itemsize
        if not tensor.numel():
            return SlotRef(here, slot.id, slot.start, itemsize, tensor.dtype, shape, stride)
        elements = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        offset = start + int(tensor.storage_offset()) * itemsize
        return SlotRef(here, slot.id, offset, elements * itemsize, tensor.dtype, shape, stride)

    def release(self, holder: int, slot_ids: Iterable[int]) -> None:
        """Host `holder` is done with one export of each slot named. What it no longer holds is passed over, because
        word from a host may arrive after `forget`.

        Takes no lock, so that a finalizer or `ArenaReader`'s `on_free` may call it: the next method to need memory, or
        to look at it, does the work.
        """
        self._done.append((holder, tuple(slot_ids)))

    def forget(self, holder: int) -> None:
        """Host `holder` died: all that it held comes back. It must be gone, for its memory is used again."""
        with self._lock:
            self._drain()
            for slot in [slot for slot in self._slots.values() if holder in slot.holders]:
                del slot.holders[holder]
                self._free_unused(slot)

    def trim(self, keep_bytes: int = 0) -> int:
        """Return free pages to the kernel until at most `keep_bytes` of them stay warm; return how many bytes went.

        Whole holes go, large ones first. An allocation does this by itself when fresh pages would take the arena past
        its limit, and never else: a host that changes phase calls it to make room for something other than tensors.
        """
        with self._lock:
            self._drain()
            return self._trim(self._used + keep_bytes)

    def close(self) -> None:
        """Give up the arena. Tensors and views that exist stay readable; refs that nobody has opened do not."""
        with self._lock:
            if self._segment is not None and not self._closed:
                os.close(self._segment.fd)
                del self._memory
            self._closed = True
            self._slots.clear()
            self._at.clear()
            self._watches.clear()
            self._used = 0

    def statistics(self) -> ArenaStatistics:
        """How much is mapped and used, by whom, and how well pages are reused."""
        with self._lock:
            self._drain()
            return ArenaStatistics(
                mapped=self._backed(),
                in_use=self._used,
                peak=self._peak,
                limit=self.limit,
                segments=int(self._segment is not None and not self._closed),
                slots=len(self._slots),
                local=sum(slot.size for slot in self._slots.values() if slot.local),
                held=self._held(),
                allocations=self._allocations,
                reused=self._reused,
            )

    # What follows runs with the lock held --------------------------------------------------------------------------

    def _allocate(self, nbytes: int) -> _Slot:
        self._drain()
        if self._closed:
            raise RuntimeFault(f"the arena of host {self.owner} is closed")
        if self._segment is None:
            self._open()
        unit = ALIGN if nbytes < LARGE else PAGE
        size = -(-nbytes // unit) * unit
        if os.getpid() != self._here.pid:
            raise RuntimeFault("a forked child must not allocate from its parent's arena")
        pool = self._small if nbytes < LARGE else self._large
        place = pool.take(size) if self._used + size <= self.limit else None
        if place is None:
            raise ArenaFull(self._full(size))
        start, warm = place
        tight = not warm and self._small.touched + self._large.touched > self.limit
        if tight and self._backed() + size > self.limit:  # give back a bit more, so that this is rare
            self._trim(self.limit - size - self.limit // 16)
        slot = _Slot(next(self._ids), start, size)
        self._slots[slot.id] = self._at[start] = slot
        self._used += size
        if self._used > self._peak:
            self._peak = self._used
        self._allocations += 1
        self._reused += warm
        return slot

    def _open(self) -> None:
        span = -(-self.limit // PAGE) * PAGE
        fd = os.memfd_create(f"rlinf-arena-{self.owner}")
        try:
            os.ftruncate(fd, 3 * span)
            self._memory = mmap.mmap(fd, 3 * span)
        except BaseException:
            os.close(fd)
            raise
        self._base = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        self._small, self._large = Holes(0, span), Holes(span, 3 * span)
        self._here = self._segment = Segment(self.owner, os.getpid(), fd, os.fstat(fd).st_ino, 3 * span)

    def _drain(self) -> None:
        while self._done:
            done = self._done.popleft()
            if isinstance(done, Watch):
                if self._watches.pop(done.slot, None) is not None:
                    self._unuse(self._slots[done.slot])
                continue
            holder, slot_ids = done
            for slot_id in slot_ids:
                slot = self._slots.get(slot_id)
                if slot is None or holder not in slot.holders:
                    continue
                slot.holders[holder] -= 1
                if not slot.holders[holder]:
                    del slot.holders[holder]
                    self._free_unused(slot)

    def _unuse(self, slot: _Slot) -> None:
        slot.local -= 1
        self._free_unused(slot)

    def _free_unused(self, slot: _Slot) -> None:
        if slot.local or slot.holders or self._slots.pop(slot.id, None) is None:
            return
        del self._at[slot.start]
        self._used -= slot.size
        (self._small if slot.start < self._large.start else self._large).give(slot.start, slot.size)

    def _backed(self) -> int:
        return 0 if self._segment is None or self._closed else os.fstat(self._segment.fd).st_blocks * 512

    def _trim(self, target: int) -> int:
        """Punch out whole holes until the kernel backs no more than `target` bytes; return what that freed."""
        before = backed = self._backed()
        for pool in (self._large, self._small) if before else ():
            for _, negative_size, hole, first in pool.free_pages():
                if backed <= target:
                    break
                self._memory.madvise(mmap.MADV_REMOVE, first, -negative_size)
                pool.cool(hole)
                backed = self._backed()
        return before - backed

    def _held(self) -> dict[int, int]:
        held: dict[int, int] = {}
        for slot in self._slots.values():
            for holder in slot.holders:
                held[holder] = held.get(holder, 0) + slot.size
        return held

    def _full(self, size: int) -> str:
        by_size = sorted(self._held().items(), key=lambda item: -item[1])
        holders = [f"host {holder} {held / 1e6:.1f} MB" for holder, held in by_size]
        local = sum(slot.size for slot in self._slots.values() if slot.local)
        return (
            f"the shared-memory arena of host {self.owner} is full: {size / 1e6:.1f} MB asked, "
            f"{self._used / 1e6:.1f} of {self.limit / 1e6:.1f} MB used by {len(self._slots)} tensors. "
            f"Held by {', '.join(holders) or 'no host'}; by tensors of this process {local / 1e6:.1f} MB. "
            "Let receivers drop tensors sooner, bound the queues between them, or raise the arena's limit."
        )


def _physical_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or what the container allows."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            memory = min(memory, int(Path(path).read_text()))
        except (OSError, ValueError):  # no such limit, or "max"
            continue
    return memory
