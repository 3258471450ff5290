"""Tensors as bytes, the device of this process, and page-locked host memory.

In: `LOCAL_RANK`, or the device of whoever asks first. Out: a `torch.device`, chosen once; CUDA's current device of the
calling thread. That belongs to a thread, and every new thread begins on device 0, whatever its process works on. So
whatever starts threads that compute has them call `work_on` first, as `start_thread` in `base/tasks.py` does.

Page-locked memory, to and from which a GPU copies at the speed of its bus, comes in one slab, in pieces, which several
threads make and lock at once when they are first needed; to lock memory costs more than to copy to it, so a slab keeps
it until it is dropped. (torch's own page-locked tensors are rounded up to powers of two, each, and are kept for ever.)
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import torch
from torch import Tensor


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as bytes, uint8 [bytes], on its device; a view of its memory where that is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    # a single element counts as contiguous whatever its stride (such as 0, after `expand`), and `view` refuses that
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def shard_of(tensor: Tensor) -> Tensor:
    """The shard of a tensor that this rank has; the tensor itself where it is whole."""
    local = getattr(tensor, "to_local", None)  # as a `DTensor` has, whose class takes long to import
    return tensor if local is None else cast(Tensor, local())


def give_back_freed() -> None:
    """Give the memory of freed CPU tensors back to the machine: glibc keeps it, torn by what lies between, so that
    tensors of other sizes take more. Elsewhere nothing happens."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Options of glibc's `mallopt`."""
_KEPT_BLOCK = 1 << 30
"""Bytes of a freed block up to which `keep_freed` keeps it."""


def keep_freed() -> None:
    """Have glibc keep the memory of freed CPU tensors for the next ones. It would give large blocks back at once, and
    the kernel would clear their pages anew for each gradient and activation: a tenth of a step of SmolLM2. Threads
    have part in it where they share a heap, see `rlinf.__main__`. `give_back_freed` gives the memory back all the same.
    Elsewhere nothing happens."""
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_MMAP_THRESHOLD, _KEPT_BLOCK)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)


CPU = torch.device("cpu")
VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The variable that says which GPUs a process sees, and in which order it numbers them."""

_index: int | None = None
"""Number of this process's GPU once it is chosen."""


def choose_device(index: int | None) -> None:
    """Take this GPU from now on, without touching it yet: a child process is told so by whoever started it.

    Args:
        index: its number among those that this process sees; None leaves the choice to `own_device`.
    """
    global _index
    _index = index


def own_device() -> torch.device:
    """The device of this process: the GPU that `enter_device` or `choose_device` chose, or would; without any, the CPU.

    Under torchrun that is GPU `LOCAL_RANK`, counted round where there are fewer GPUs than processes; otherwise the
    calling thread's current one. It starts nothing on the GPU.
    """
    if not (torch.cuda.is_available() or torch.cuda.is_initialized()):
        return CPU
    if _index is not None:
        return torch.device("cuda", _index)
    if (rank := os.environ.get("LOCAL_RANK")) is not None and (count := torch.cuda.device_count()):
        return torch.device("cuda", int(rank) % count)
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_initialized() else 0)


def enter_device() -> torch.device:
    """Make this process's device ready, have the calling thread work on it from now on, and return it.

    Every way into a process's work passes here: `rlinf.run`, `ActorSystem.local` (so sessions and `rlinf.train`), the
    threads of actors, simulators. Called again it changes nothing.

    cuDNN's attention is off: torch 2.11 prefers it on Hopper, and it makes a plan for every new shape, 0.4 s each,
    where a decoded token makes a shape.
    """
    device = own_device()
    if device.type == "cuda":
        choose_device(device.index)
        torch.cuda.set_device(device.index)
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def device_of_threads() -> torch.device | None:
    """The GPU on which threads started now shall work: this process's, if it is chosen or CUDA is in use; else none,
    and CUDA is left alone, which takes memory as soon as it is asked for anything."""
    if _index is None and not torch.cuda.is_initialized():
        return None
    device = own_device()
    return device if device.type == "cuda" else None


def work_on(device: torch.device | None) -> None:
    """Have the calling thread, which has just begun, work on what `device_of_threads` said where it was started."""
    if device is not None:
        with contextlib.suppress(RuntimeError):  # of a broken device: what is run on it says so itself
            torch.cuda.set_device(device.index)


def device_id() -> str:
    """Return an id that no other GPU has: the UUID of this process's GPU; "cpu" where it has none."""
    device = own_device()
    return "cpu" if device.type == "cpu" else str(torch.cuda.get_device_properties(device.index).uuid)


def seen_by_children(count: int = 1) -> dict[str, str]:
    """Variables of the environment of a program that works on the first GPUs that it sees, whatever it is told.

    Args:
        count: of GPUs that it is to see: this process's and those after it.
    """
    device = own_device()
    if device.type == "cpu":
        return {}
    ours = [name for name in os.environ.get(VISIBLE, "").split(",") if name]
    names = ours or [str(number) for number in range(torch.cuda.device_count())]
    return {VISIBLE: ",".join(names[device.index : device.index + count])}


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
        tensors: list[Tensor] = []
        for piece in self._pieces:
            if size > 0 and start < piece.size:
                tensors.append(piece.bytes[start : start + size])
                size -= len(tensors[-1])
                start = piece.size
            start -= piece.size
        return tensors


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
