"""Page-locked host memory, to and from which a GPU copies at the speed of its bus: one slab, in pieces.

In: how many bytes are needed. Out: tensors of bytes in host memory. Nobody waits here but the caller, for the pages:
the first time they are needed, they are made and locked by several threads at once. A slab keeps them until it is
dropped: to lock memory costs more than to copy to it.

torch's own page-locked tensors are rounded up to powers of two, each, and are kept by an allocator for ever.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from .own_device import device_of_threads, work_on

logger = logging.getLogger(__name__)

PIECE = 1 << 30
"""Bytes that a thread makes and locks at a time: some tenths of a second, so that threads share the work evenly."""
THREADS = 8
"""That make and lock pieces: the kernel clears pages at the speed of one core, 2 to 10 GB/s."""
PORTABLE = 1
"""`cudaHostRegisterPortable`: the memory counts as page-locked for all GPUs."""


class PinnedSlab:
    """Page-locked host memory that grows as it is needed."""

    def __init__(self) -> None:
        self._pieces: list[_Piece] = []
        self._warned = False

    @property
    def bytes(self) -> int:
        """Bytes that it has."""
        return sum(piece.size for piece in self._pieces)

    @property
    def pinned(self) -> int:
        """Bytes of it that are page-locked: all, unless the driver refused."""
        return sum(piece.size for piece in self._pieces if piece.locked)

    def grow(self, size: int) -> None:
        """Have `size` bytes at least; what was there stays as it is.

        Raises:
            RuntimeError: host memory is not enough.
        """
        if (missing := size - self.bytes) <= 0:
            return
        try:
            new = [_Piece(min(PIECE, missing - start)) for start in range(0, missing, PIECE)]
        except OSError as error:
            raise RuntimeError(f"{missing} bytes of host memory cannot be had: {error.strerror or error}") from error
        device = device_of_threads()
        threads = min(THREADS, len(new), os.cpu_count() or 1)
        with ThreadPoolExecutor(threads, "rlinf-pin", initializer=work_on, initargs=(device,)) as pool:
            codes = list(pool.map(_Piece.lock, new))
        self._pieces += new
        if (refused := next(filter(None, codes), 0)) and not self._warned:
            self._warned = True
            _collect_error()
            logger.warning(
                "%d bytes of host memory could not be page-locked (CUDA error %d), so what is parked there is copied "
                "several times as slowly: see the limit on locked memory (ulimit -l), and what is free",
                missing,
                refused,
            )

    def part(self, start: int, size: int) -> list[Tensor]:
        """The bytes from `start` on, uint8, as one tensor for each piece that they lie in."""
        found: list[Tensor] = []
        for piece in self._pieces:
            if size > 0 and start < piece.size:
                found.append(piece.bytes[start : start + size])
                size -= len(found[-1])
                start = piece.size
            start -= piece.size
        return found


class _Piece:
    """Memory in one stretch, given back when it is dropped."""

    def __init__(self, size: int) -> None:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # fewer pages; and a fork would copy those that are locked
            with contextlib.suppress(AttributeError, OSError):
                memory.madvise(getattr(mmap, advice))
        self.size = size
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self.locked = False
        self._memory = memory

    def lock(self) -> int:
        """Make its pages, and have the driver lock them; returns CUDA's error, 0 for none."""
        self.bytes[:: mmap.PAGESIZE].zero_()  # beside other threads, as the driver's own walk through them is not
        address, driver = self.bytes.data_ptr(), torch.cuda.cudart()
        code = int(driver.cudaHostRegister(address, self.size, PORTABLE))
        self.locked = code == 0
        if self.locked:
            unlocked = weakref.finalize(self, _unlock, driver, address, self._memory)
            unlocked.atexit = False  # it ends with the process, and the driver may have ended before
        return code


def _unlock(driver: Any, address: int, memory: mmap.mmap) -> None:
    """The memory is an argument so that it is still there."""
    driver.cudaHostUnregister(address)


def _collect_error() -> None:
    """Take the error that CUDA keeps for whoever launches a kernel next, which has nothing to do with it."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


@contextlib.contextmanager
def copies_on(device: torch.device) -> Iterator[None]:
    """Copies that are begun in it between a GPU and page-locked memory run by themselves, on a stream of their own,
    after all that the current one has to do by now; they have ended when it is left."""
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(side):
                yield
        finally:
            side.synchronize()
