"""A model's weights on their way from trainer to engines: flat buckets, what lies where in them, and their checksums.

Flows in: named tensors of one version. Flows out: the same tensors as views into few large ones, which travel cheaply.
Nobody waits here. Buckets are bounded in size, so that packing needs little memory beyond them; where they are
allocated is the caller's choice, so that they can lie in memory that other processes map.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

BUCKET_BYTES = 256 << 20
"""Default size of a bucket: large enough that what each costs to send does not count, small beside a model."""
BLOCK = 128
"""Words of 8 bytes that are added up for a checksum: fewer cost speed (it is memory-bound from here on), more would let
larger pieces be swapped unnoticed."""

Allocator = Callable[[Sequence[int], torch.dtype], Tensor]
"""Makes an uninitialised, contiguous tensor of a shape and dtype, as `Actor.empty_shared` does."""


class WeightsDamaged(ValueError):
    """What arrived is not what was packed."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one named tensor lies. Its dtype is its bucket's."""

    name: str
    """As in `named_parameters()`."""
    shape: tuple[int, ...]
    """Its shape."""
    bucket: int
    """Which bucket holds it."""
    offset: int
    """Its first element there."""


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """One version of a model's weights; nobody changes it after it is made."""

    version: int
    """Counts the batches that the trainer has learned from, from 0 for the weights it began with."""
    layout: tuple[Slot, ...]
    """Every tensor, in the trainer's order."""
    buckets: tuple[Tensor, ...]
    """Flat tensors, each [elements] of one dtype."""
    checksums: tuple[int, ...]
    """Of each bucket; see `checksum`."""

    @staticmethod
    def pack(
        named: Iterable[tuple[str, Tensor]],
        version: int,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        dtype: torch.dtype | None = None,
        empty: Allocator | None = None,
    ) -> Weights:
        """Copy named tensors into buckets, so that the originals may change afterwards. Blocking.

        Tensors are taken from `named` one by one and let go as soon as their bucket is full: a generator that makes
        them on the way needs memory for one bucket's worth of them, not for all.

        Args:
            named: names and tensors, as `named_parameters()` gives them.
            version: the version they are.
            bucket_bytes: bound on a bucket; a tensor larger than that has one of its own.
            dtype: what floating-point tensors become, such as bfloat16; None keeps theirs.
            empty: allocates the buckets; None: on the device of the tensors.

        Raises:
            ValueError: a name twice, or `bucket_bytes` below 1.
        """
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
        packer = _Packer(bucket_bytes, dtype, empty)
        for name, tensor in named:
            packer.add(name, tensor.detach())
        return packer.done(version)

    @property
    def nbytes(self) -> int:
        """Bytes in all buckets."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def key(self) -> tuple[int, tuple[int, ...]]:
        """Equal for equal weights of one version."""
        return self.version, self.checksums

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors, as views into the buckets."""
        for slot in self.layout:
            flat = self.buckets[slot.bucket][slot.offset : slot.offset + prod(slot.shape)]
            yield slot.name, flat.view(slot.shape)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of each tensor by name."""
        return {slot.name: slot.shape for slot in self.layout}

    def verify(self) -> None:
        """See that the buckets hold what was packed. Blocking.

        Raises:
            WeightsDamaged: one does not; the text names bucket, version and the tensors in it.
        """
        for number, (bucket, expected) in enumerate(zip(self.buckets, self.checksums, strict=True)):
            found = checksum(bucket)
            if found != expected:
                inside = [slot.name for slot in self.layout if slot.bucket == number]
                raise WeightsDamaged(
                    f"bucket {number} of {len(self.buckets)} of the weights of version {self.version} ({inside[0]} to "
                    f"{inside[-1]}, {bucket.nbytes} bytes) has checksum {found:08x} instead of {expected:08x}: "
                    "somebody wrote to it after it was packed, or it was changed on the way"
                )


def misfits(own: Mapping[str, tuple[int, ...]], arrived: Mapping[str, tuple[int, ...]]) -> str:
    """How tensors that arrived differ from a model's own, by name and shape, in words; empty if they do not.

    Args:
        own: shape of each of the model's tensors.
        arrived: shape of each of the others.
    """
    problems = [
        *(f"missing {name}" for name in own.keys() - arrived.keys()),
        *(f"unknown {name}" for name in arrived.keys() - own.keys()),
        *(
            f"{name} is {list(arrived[name])} where the model has {list(own[name])}"
            for name in own.keys() & arrived.keys()
            if arrived[name] != own[name]
        ),
    ]
    more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
    return "; ".join(sorted(problems)[:5]) + more


def checksum(bucket: Tensor) -> int:
    """A 32-bit checksum of a contiguous tensor's bytes and length, at memory speed and on any device.

    Words of 8 bytes are added up in blocks of `BLOCK`, modulo 2^64, and the sums go into a CRC-32. One changed word
    is always found, as are lost, doubled, zeroed or moved blocks; words that change places within one block are not.
    """
    data = bucket.detach().reshape(-1).view(torch.uint8)
    blocks = data.numel() // (8 * BLOCK)
    whole, rest = data[: blocks * 8 * BLOCK], data[blocks * 8 * BLOCK :]
    if whole.storage_offset() % 8 or whole.data_ptr() % 8:
        whole = whole.clone()  # words must lie on words
    sums = whole.view(torch.int64).view(blocks, BLOCK).sum(dim=1).cpu()
    tail = zlib.crc32(rest.cpu().numpy().data, zlib.crc32(data.numel().to_bytes(8, "little")))
    return zlib.crc32(sums.numpy().data, tail)


class _Packer:
    """Collects tensors, and copies them into a bucket whenever enough of one dtype have come."""

    def __init__(self, bucket_bytes: int, dtype: torch.dtype | None, empty: Allocator | None):
        self._limit = bucket_bytes
        self._dtype = dtype
        self._empty = empty
        self._layout: dict[str, Slot] = {}
        self._open: dict[torch.dtype, _Open] = {}
        self._buckets: list[Tensor | None] = []

    def add(self, name: str, tensor: Tensor) -> None:
        if name in self._layout:
            raise ValueError(f"weights: the name {name} comes twice")
        dtype = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
        bucket = self._open.get(dtype)
        if bucket is not None and (bucket.elements + tensor.numel()) * dtype.itemsize > self._limit:
            self._close(dtype)
            bucket = None
        if bucket is None:
            bucket = self._open[dtype] = _Open(len(self._buckets), [], 0)
            self._buckets.append(None)
        self._layout[name] = Slot(name, tuple(tensor.shape), bucket.number, bucket.elements)
        bucket.tensors.append(tensor)
        bucket.elements += tensor.numel()

    def done(self, version: int) -> Weights:
        for dtype in list(self._open):
            self._close(dtype)
        buckets = tuple(bucket for bucket in self._buckets if bucket is not None)
        return Weights(version, tuple(self._layout.values()), buckets, tuple(map(checksum, buckets)))

    def _close(self, dtype: torch.dtype) -> None:
        ready = self._open.pop(dtype)
        shape = (ready.elements,)
        if self._empty is None:
            bucket = torch.empty(shape, dtype=dtype, device=ready.tensors[0].device)
        else:
            bucket = self._empty(shape, dtype)
        pieces = bucket.split([tensor.numel() for tensor in ready.tensors])
        for piece, tensor in zip(pieces, ready.tensors, strict=True):
            piece.view(tensor.shape).copy_(tensor)
        self._buckets[ready.number] = bucket


@dataclass(slots=True)
class _Open:
    """A bucket that takes more tensors."""

    number: int
    tensors: list[Tensor]
    elements: int
