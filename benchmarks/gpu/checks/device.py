"""The device of a check: waiting for it, its memory and the process's, the names of what it computes."""

from __future__ import annotations

import gc
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import torch

COUNTS = "an allocator that counts"
"""Needs that a CPU does not meet: see `judging.Bound.needs`."""
SHARED = "a GPU that two processes share"
CLOCK = "a GPU's clock"
NAMES = "the names of kernels"


def synchronize(device: torch.device) -> None:
    """Wait for what the device was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def emptied(device: torch.device) -> None:
    """Give back what nobody holds, here and in other processes."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


def held_bytes(device: torch.device) -> int:
    """Bytes of tensors on the device; on a CPU, of which nobody keeps a count, 0."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def whole_bytes(device: torch.device) -> float:
    """Bytes that the device has; a CPU has no end."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else float("inf")


def peak_begun(device: torch.device) -> None:
    """Forget the peak so far."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """The most bytes of tensors at a time since `peak_begun`; on a CPU, what the process has now."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else resident_bytes()


@contextmanager
def short_of_memory(device: torch.device) -> Iterator[None]:
    """Inside, this process gets no more than 2 GB of the device besides what it has; on a CPU, 64 MB of addresses."""
    if device.type == "cuda":
        share = (torch.cuda.memory_reserved(device) + 2e9) / whole_bytes(device)
        torch.cuda.set_per_process_memory_fraction(share, device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        return
    with open("/proc/self/statm", encoding="ascii") as file:
        taken = int(file.read().split()[0]) * 4096
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + (64 << 20), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def resident_bytes() -> int:
    """Bytes of this process in the machine's memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


@contextmanager
def kernels(device: torch.device) -> Iterator[dict[str, int]]:
    """Counts by name what the device (or torch, on a CPU) was asked to run inside; filled at the end."""
    from torch.profiler import ProfilerActivity, profile

    found: dict[str, int] = {}
    on_cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU], acc_events=True) as profiler:
        yield found
        synchronize(device)
    for event in profiler.events():
        found[event.name] = found.get(event.name, 0) + 1


def cudnn_attention(found: dict[str, int]) -> int:
    """How many of these kernels are attention by cuDNN, which plans anew for every shape."""
    marks = ("sdp", "mha", "flash", "attention")
    return sum(n for name, n in found.items() if "cudnn" in name.lower() and any(m in name.lower() for m in marks))
