"""Copies of big tensors, made by a few threads, and tensors that stay as they are until they have been copied.

Flows in: pairs of tensors, where to and where from. Flows out: the bytes. Who wakes whom: the end of a thread's piece
wakes whoever waits for the future of `start`; `copy` blocks its caller.

Copies release the GIL. One thread does not fill the memory bus of a machine with many cores, so a big copy is cut into
pieces for several.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from rlinf.runtime.base.tasks import cores
from rlinf.runtime.base.tensors import device_of_threads, flat_bytes, work_on

THREADS = 4
"""Of them a process has at most so many, and no more than cores: that many fill the memory bus of most machines."""
PIECE = 16 << 20
"""Bytes that a thread copies at a time: some milliseconds, so that copies of several messages share the threads."""

Copy = tuple[torch.Tensor, torch.Tensor]
"""Where to, and where from."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def snapshot(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor as it is now, whatever is written to it later; without a copy, unless something is.

    It shares the tensor's memory until somebody writes to either of them, and only then is copied, by the writer. None
    where torch cannot do that, because others write to the memory without its knowledge: numpy, another process.
    """
    try:
        return torch._lazy_clone(tensor)
    except RuntimeError:
        return None


def start(copies: Iterable[Copy]) -> list[Future[None]]:
    """Begin to copy in other threads; nothing may write to the sources until all is done (see `snapshot`).

    A source on a GPU is read once what its current stream has to do by now is done.
    """
    futures: list[Future[None]] = []
    batch: list[Copy] = []  # small ones go together
    size = 0
    for to, source in copies:
        if source.is_cuda:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(source.device))
            futures.append(_threads().submit(_run, [_from_device, to, source, event]))
            continue
        for piece in _pieces(to, source):
            batch.append(piece)
            size += piece[1].nbytes
            if size >= PIECE // 2:
                futures.append(_threads().submit(_run, [_copy_all, batch]))
                batch, size = [], 0
    if batch:
        futures.append(_threads().submit(_run, [_copy_all, batch]))
    return futures


def copy(copies: Sequence[Copy]) -> None:
    """Copy, in several threads if it is much, and return when it is done."""
    if sum(source.nbytes for _, source in copies) <= PIECE:
        for to, source in copies:
            for piece in _pieces(to, source):
                _copy(*piece)
        return
    for each in start(copies):
        each.result()


def start_onto_device(tensor: torch.Tensor) -> Future[torch.Tensor]:
    """Begin to copy a tensor onto this process's GPU."""
    return _threads().submit(_run, [_onto_device, tensor])


def _pieces(to: torch.Tensor, source: torch.Tensor) -> Iterator[Copy]:
    if source.is_cuda or source.is_conj() or source.is_neg() or source.dtype.itemsize not in _WORDS:
        yield to, source
        return
    if source.is_contiguous() and to.is_contiguous():
        to, source = flat_bytes(to), flat_bytes(source)
    else:  # as words of the same width: not every type can be copied as what it is
        words = _WORDS[source.dtype.itemsize]
        to, source = to.view(words), source.view(words)
    count = -(-source.nbytes // PIECE)
    yield from zip(to.chunk(count), source.chunk(count), strict=True) if source.dim() and count > 1 else [(to, source)]


def _run(work: list[Any]) -> Any:
    """In a thread: what is there to do, and nothing of it is held here any more when its future is done."""
    function, *args = work
    work.clear()
    try:
        return function(*args)
    finally:
        args.clear()


def _onto_device(tensor: torch.Tensor) -> torch.Tensor:
    copied = tensor.cuda()
    torch.cuda.current_stream().synchronize()
    return copied


def _copy_all(batch: list[Copy]) -> None:
    while batch:
        _copy(*batch.pop())


def _copy(to: torch.Tensor, source: torch.Tensor) -> None:
    to.copy_(source)


def _from_device(to: torch.Tensor, source: torch.Tensor, event: Any) -> None:
    with torch.cuda.device(source.device):
        stream = torch.cuda.Stream()
        stream.wait_event(event)
        with torch.cuda.stream(stream):
            to.copy_(source)
        stream.synchronize()


@functools.cache
def _threads() -> ThreadPoolExecutor:
    device = device_of_threads()
    return ThreadPoolExecutor(min(THREADS, cores()), "rlinf-copy", initializer=work_on, initargs=(device,))
