"""A host's shared-memory arena: tensors go between processes of one machine with one copy, or none.

Flows in: tensors that a host hands to others (`Arena.lend`), and word that they are done (`release`, `forget`). Flows
out: a `SlotRef` of a few dozen bytes per tensor, which the receiver's `ArenaReader.open` turns into a view of the very
same memory. Who wakes whom: when the last tensor, view or numpy array over an opened slot is collected, the reader
calls `on_free(owner, slot)`; whoever owns the reader sends that to the owner, whose `release` makes the memory free.

The memory of a host is one sparse memfd, mapped whole. It has no name, so nothing is left behind however a process
ends, and it ignores the size of /dev/shm. Peers open it once, through the owner's entry in /proc. Address space costs
nothing and pages do, so the mapping is larger than the limit (holes between slots can then never make an allocation
fail that the limit allows), free pages stay warm for the next tensor, and an allocation that would take the arena past
its limit returns some to the kernel in place: peers' mappings stay valid, and nothing is ever mapped again.

Lent memory is shared, not sent. A sender must not write to a tensor from `Arena.empty` while a holder has it, and
a receiver that writes to what it opened writes to what every other holder sees.

Places of tensors in an address range: best fit, with neighbouring holes merged. Not thread-safe.

Tensors in another process's memory: what travels, and what the receiver makes of it.
"""

from __future__ import annotations

import functools
import itertools
import math
import mmap
import os
import threading
import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlinf.runtime.base.errors import RuntimeFault

PAGE = mmap.PAGESIZE
"""Bytes; the unit in which the kernel gives and takes memory."""


class Holes:
    """Address range with holes: best fit, lowest address first, neighbours merged. The untouched end is one more hole,
    and being the largest it is taken last."""

    def __init__(self, start: int, end: int):
        self.start = start
        self.warm = start
        """No page from here on was ever touched."""
        self._end = end
        self._cold: set[int] = set()  # starts of holes below `warm` that may have lost pages
        self._ends = {start: end}
        self._starts = {end: start}
        self._sizes = [(end - start, start)]

    @property
    def touched(self) -> int:
        """Bytes that may ever have been backed."""
        return self.warm - self.start

    def take(self, size: int) -> tuple[int, bool] | None:
        """Where `size` bytes are from now on, and whether their pages are warm; None if no hole is large enough."""
        index = bisect_left(self._sizes, (size, 0))
        if index == len(self._sizes):
            return None
        hole, start = self._sizes.pop(index)
        end = self._ends.pop(start)
        del self._starts[end]
        warm = start + size <= self.warm and start not in self._cold
        if hole > size:
            self._add(start + size, end, start in self._cold)
        self._cold.discard(start)
        if start + size > self.warm:
            self.warm = start + size
        return start, warm

    def give(self, start: int, size: int) -> None:
        """Take back what `take` gave."""
        end, cold = start + size, False
        if start in self._starts:
            start, cold = self._remove(self._starts[start])
        if end in self._ends:
            after = self._ends[end]
            cold |= self._remove(end)[1]
            end = after
        self._add(start, end, cold)

    def free_pages(self) -> list[tuple[bool, int, int, int]]:
        """(cold, -bytes, hole, first page) of all whole free pages below `warm`, in the order to give them back."""
        pages = []
        for start, end in self._ends.items():
            first, last = -(-start // PAGE) * PAGE, min(end, -(-self.warm // PAGE) * PAGE) // PAGE * PAGE
            if first < last:
                pages.append((start in self._cold, first - last, start, first))
        return sorted(pages)

    def cool(self, hole: int) -> None:
        """The pages of the hole that starts at `hole` went back to the kernel."""
        if self._ends[hole] == self._end:
            self.warm = hole
        else:
            self._cold.add(hole)

    def _add(self, start: int, end: int, cold: bool) -> None:
        self._ends[start] = end
        self._starts[end] = start
        insort(self._sizes, (end - start, start))
        if cold and start < self.warm:
            self._cold.add(start)

    def _remove(self, start: int) -> tuple[int, bool]:
        end = self._ends.pop(start)
        del self._starts[end]
        del self._sizes[bisect_left(self._sizes, (end - start, start))]
        cold = start in self._cold
        self._cold.discard(start)
        return start, cold


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
    """True if a tensor's memory begins in the `size` bytes from address `base`, which are shared memory."""
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
    memory: mmap.mmap, ref: SlotRef, on_free: Callable[[weakref.ref[np.ndarray[Any, Any]]], None]
) -> tuple[torch.Tensor, Watch]:
    """A tensor over `ref`, and what calls `on_free` when its storage is freed."""
    array: np.ndarray[Any, Any] = np.ndarray((ref.nbytes,), np.uint8, memory, ref.offset)
    watch = Watch(array, on_free)
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
    """The memory that one host has mapped of others' arenas. Every method may be called from any thread.

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
        """True if the tensor lies in memory that is mapped here."""
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
    slots: int
    """How many are live."""
    local: int
    """Used by tensors of `Arena.empty` in this process."""
    holders: dict[int, int]
    """Bytes that each host holds; a slot with several holders counts for each."""


@dataclass(slots=True, eq=False)
class _Slot:
    id: int
    start: int
    size: int
    local: int = 1
    """Tensors of this process over it."""
    holders: dict[int, int] = field(default_factory=dict)
    """Per host, how many loans it has not released."""


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
        self._used = 0

    @staticmethod
    @functools.cache
    def available() -> bool:
        """True if this platform has what the arena needs (Linux, memfd, a readable /proc)."""
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
        """An uninitialised, contiguous CPU tensor in the arena, which `lend` hands over without a copy.

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

    def holds(self, tensor: torch.Tensor) -> bool:
        """True if the tensor's memory is this arena's."""
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
        """Host `holder` is done with one loan of each slot named. What it no longer holds is passed over, because
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
        """How much is mapped and used, and by whom."""
        with self._lock:
            self._drain()
            return ArenaStatistics(
                mapped=self._backed(),
                in_use=self._used,
                slots=len(self._slots),
                local=sum(slot.size for slot in self._slots.values() if slot.local),
                holders=self._holders(),
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

    def _trim(self, target: int) -> None:
        """Punch out whole holes, large ones first, until the kernel backs no more than `target` bytes."""
        backed = self._backed()
        for pool in (self._large, self._small):
            for _, negative_size, hole, first in pool.free_pages():
                if backed <= target:
                    break
                self._memory.madvise(mmap.MADV_REMOVE, first, -negative_size)
                pool.cool(hole)
                backed = self._backed()

    def _holders(self) -> dict[int, int]:
        by_host: dict[int, int] = {}
        for slot in self._slots.values():
            for holder in slot.holders:
                by_host[holder] = by_host.get(holder, 0) + slot.size
        return by_host

    def _full(self, size: int) -> str:
        by_size = sorted(self._holders().items(), key=lambda item: -item[1])
        holders = [f"host {holder} {nbytes / 1e6:.1f} MB" for holder, nbytes in by_size]
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
