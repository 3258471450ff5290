"""Tensors in files: safetensors, written so that other threads go on and a full disk is a clear error.

Flows in: host tensors and a path. Flows out: a file that is safely on the disk. Nobody waits here; all of it blocks.
A `LateCopy` stands for a tensor that may change while it is being written: it is copied only if it does.
The safetensors library holds the interpreter's lock while it writes, which would stop the event loop and training for
seconds; the format is a JSON header and plain bytes, so writing it ourselves is short. Reading stays with the library.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import threading
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rlinf.runtime.base.progress import work

CHUNK = 4 << 20
"""Bytes per write: between two a stop takes effect. A processor's cache has what was copied for it."""

_SIZES = {"float": (64, 32, 16), "int": (64, 32, 16, 8), "uint": (64, 32, 16, 8)}
DTYPES = {
    **{getattr(torch, f"{kind}{bits}"): f"{kind[0].upper()}{bits}" for kind, sizes in _SIZES.items() for bits in sizes},
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.bfloat16: "BF16",
    torch.bool: "BOOL",
}
"""Names of dtypes in the format's header."""


class WritingStopped(Exception):
    """Writing was given up because nobody wants the files any more."""


class LateCopy:
    """A tensor in host memory as it is now, which is copied only if it is about to change before it was written.

    Whoever changes tensors otherwise than by an optimizer of torch, which tells of its steps, calls `settle` first.

    Args:
        tensor: contiguous, in host memory.
        dtype: in which it is written; None: its own.
    """

    def __init__(self, tensor: Tensor, dtype: torch.dtype | None = None) -> None:
        self.shape, self.dtype = tensor.shape, dtype or tensor.dtype
        self.nbytes = tensor.numel() * self.dtype.itemsize
        self.files = 1
        """Files that it is still to be written into."""
        self._flat, self._own = tensor.detach().view(-1), False
        self._changing = threading.Lock()
        _copies[id(self)] = self

    def settle(self) -> None:
        """Copy it unless it is written: from now on the tensor may change."""
        with self._changing:
            if self.files and not self._own:
                self._flat, self._own = self._flat.to(self.dtype, copy=True), True

    def whole(self) -> Tensor:
        """The tensor, copied."""
        self.settle()
        return self._flat.view(self.shape)

    def pieces(self, through: Tensor) -> Iterator[memoryview]:
        """Its bytes, to be written into one of the files.

        Args:
            through: memory that they pass through, uint8; each piece is read before the next is asked for.

        Raises:
            RuntimeError: they were written into all.
        """
        if not self.files:
            raise RuntimeError(f"a tensor of shape {tuple(self.shape)} is not kept any more: it was written before")
        room = through.view(self.dtype)
        for start in range(0, len(self._flat), len(room)):
            with self._changing:
                piece = self._flat[start : start + len(room)]
                room[: len(piece)] = piece
            yield through[: len(piece) * self.dtype.itemsize].numpy().data
        with self._changing:
            self.files -= 1
            if not self.files:
                self._flat = torch.empty(0)


_copies: weakref.WeakValueDictionary[int, LateCopy] = weakref.WeakValueDictionary()
"""Late copies of this process, by their ids."""


def settle() -> None:
    """Make every copy that has not been made and is still to be written: tensors are about to change, or to leave their
    memory."""
    for reference in _copies.valuerefs():
        if (copy := reference()) is not None:
            copy.settle()


register_optimizer_step_pre_hook(lambda *_: settle())


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor | LateCopy],
    metadata: Mapping[str, str] | None = None,
    stop: threading.Event | None = None,
) -> None:
    """Write a safetensors file and wait until the disk has it.

    Args:
        path: the file; what was there is replaced.
        tensors: in CPU memory, by name.
        metadata: strings for the header.
        stop: when it is set, writing ends with `WritingStopped`.

    Raises:
        OSError: it cannot be written; the text names the file, its size and the space left.
        ValueError: a dtype that the format does not have.
    """
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)  # so that each lies aligned
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    size = 0
    for name, tensor in ordered:
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{path}: safetensors has no {tensor.dtype}, the dtype of {name}")
        offsets = [size, size + tensor.nbytes]
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        size = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    through = torch.empty(CHUNK, dtype=torch.uint8)
    progress = work(f"writing {path.parent.name}/{path.name}", size, "bytes")
    with explained(path, size), path.open("wb") as file, progress as writing:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            late = tensor if isinstance(tensor, LateCopy) else LateCopy(tensor.contiguous())
            for piece in late.pieces(through):
                if stop is not None and stop.is_set():
                    raise WritingStopped(f"{path} was not finished")
                writing.advance(file.write(piece))
        file.flush()
        os.fsync(file.fileno())


def write_text(path: Path, text: str) -> None:
    """Write a text file and wait until the disk has it.

    Raises:
        OSError: see `write_tensors`.
    """
    with explained(path, len(text)), path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def make_room(directory: Path, nbytes: int) -> None:
    """Make a directory for files of `nbytes` bytes together.

    Raises:
        OSError: it cannot be made, or the disk has not that much space left.
    """
    with explained(directory, nbytes):
        directory.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(directory).free < nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def sync_directory(directory: Path) -> None:
    """Wait until the disk has every file of a directory, and its own entries."""
    for path in (*directory.iterdir(), directory):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextlib.contextmanager
def explained(path: Path, nbytes: int) -> Iterator[None]:
    """Errors of the operating system, with what was being written and how much of it there is."""
    try:
        yield
    except OSError as error:
        parent = next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
        room = shortage(parent, error) or f"{shutil.disk_usage(parent).free:,} are free there"
        raise OSError(
            error.errno,
            f"{error.strerror}: cannot write {path}, which needs {nbytes:,} bytes; {room}. What is there of it is "
            "incomplete; earlier checkpoints are as they were",
        ) from error


def shortage(directory: Path, error: OSError) -> str | None:
    """Words for a disk that takes no more though bytes are free: its quota or its inodes are used up; else None.

    Args:
        directory: on the disk.
        error: its answer.
    """
    if error.errno == errno.EDQUOT:
        return "the quota of this user is used up there (quota -s)"
    disk = os.statvfs(directory)
    if error.errno == errno.ENOSPC and disk.f_files and not disk.f_favail:
        return "no inodes are left there: the disk has as many files as it can (df -i)"
    return None
