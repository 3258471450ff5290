"""Work that is recorded once and done again by one call, as CUDA graphs do; and copies between host and device.

Flows in: functions on tensors that stay where they are. Flows out: recordings. Plain blocking code that wakes nobody.
A recording reads and writes the addresses that it saw, and Python is not asked again: what differs between two steps
lies in tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


class Recording(Protocol):
    """Work that can be done again."""

    @property
    def output(self) -> Tensor:
        """What the work returned; it holds what the newest replay computed until anything else is replayed."""
        ...

    def replay(self) -> None:
        """Do it again, on what its tensors hold now."""
        ...


class Recorder(Protocol):
    """Makes recordings, of which no two run at the same time."""

    def record(self, name: Hashable, work: Callable[[], Tensor]) -> Recording:
        """Record some work.

        Args:
            name: of the kind of work.
            work: runs no operation that waits for the device, and returns a tensor. It is done once before, so its own
                effects must not matter.
        """
        ...

    def clear(self) -> None:
        """Give back the memory of all recordings, which are not used again."""
        ...


class _CudaRecording:
    """A CUDA graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor):
        self.output = output
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()


_ONE_AT_A_TIME = threading.Lock()
"""Torch records one graph at a time in a process: it waits for the device before, which a recording cannot bear."""


@contextmanager
def _own_stream(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """The thread's stream, on which it is again afterwards: where a recording fails, torch stays on that one's."""
    current = torch.cuda.current_stream(device)
    with torch.cuda.stream(current):
        yield current


class CudaRecorder:
    """Records CUDA graphs that share one pool of memory, all on one stream: the allocator gives what one recording no
    longer uses to another of the same stream alone, and cuBLAS keeps a workspace for each stream.

    Args:
        device: on which.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def record(self, name: Hashable, work: Callable[[], Tensor]) -> Recording:
        with _ONE_AT_A_TIME, torch.cuda.device(self._device), _own_stream(self._device) as current:
            stream = self._stream = self._stream or torch.cuda.Stream(self._device)
            stream.wait_stream(current)
            # Compiles kernels, and makes this thread's cuBLAS handle and its workspace, which must not happen in a
            # recording. Before each: another thread has another handle, and other numbers have other kernels.
            with torch.cuda.stream(stream):
                work()
            stream.synchronize()
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            # thread_local: what other threads of this process do meanwhile, such as a trainer, is none of its business
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                output = work()
            current.wait_stream(stream)
        return _CudaRecording(graph, output)

    def clear(self) -> None:
        self._pool = None


class ReadBack:
    """A copy of a tensor that is on its way to the host.

    Args:
        source: copied as it is once all work asked for so far is done.
    """

    def __init__(self, source: Tensor):
        self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
        self._host.copy_(source, non_blocking=True)
        self._event: torch.cuda.Event | None = None
        if source.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(source.device))

    def wait(self) -> np.ndarray:
        """Wait for it; returns the copy."""
        if self._event is not None:
            self._event.synchronize()
        found: np.ndarray = self._host.numpy()
        return found


def upload(target: Tensor, values: np.ndarray) -> None:
    """Copy an array into a tensor that stays where it is, without waiting for the device."""
    host = torch.from_numpy(np.ascontiguousarray(values))
    if target.is_cuda:  # page-locked memory of torch's own store, which keeps it until it has been read
        host = torch.empty(host.shape, dtype=host.dtype, pin_memory=True).copy_(host)
    target.copy_(host, non_blocking=True)
