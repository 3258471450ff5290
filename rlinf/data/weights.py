"""A model's weights on their way from trainer to engines: flat buckets, their layout, and their checksums.

Flows in: named tensors of one version. Flows out: the same tensors as views into few large ones, which travel cheaply.
Nobody waits here. Buckets are bounded in size, so that packing needs little memory beyond them; where they are
allocated is the caller's choice, so that they can lie in memory that other processes map.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

BUCKET_BYTES = 256 << 20
"""Default size of a bucket: large enough that what each costs to send does not count, small beside a model."""
BLOCK = 128
"""Words of 8 bytes that are added up for a checksum: fewer cost speed (it is memory-bound from here on), more would let
larger pieces be swapped unnoticed."""

_STEP, _ODD = -0x61C8864680B583EB, -0x40A7B892E31B1A47
"""Increment and multiplier of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014,
figure 16), as signed numbers: both odd, so that neither loses a bit modulo 2^64."""
_PIECE = 1 << 13
"""Block sums that are hashed together in host memory, 64 KB."""
_PLACES = np.arange(1, _PIECE + 1, dtype=np.uint64) * np.uint64(_STEP % (1 << 64))
_FACTOR = np.array(_ODD % (1 << 64), dtype=np.uint64)
_SHIFTS = np.array(32, dtype=np.uint64), np.array(29, dtype=np.uint64)
_FEW_BLOCKS = 32
"""Up to so many blocks numpy, whose calls cost less, adds up as fast as torch does, which uses wider instructions."""

Allocator = Callable[[Sequence[int], torch.dtype], Tensor]
"""Makes an uninitialised, contiguous tensor of a shape and dtype, as `Actor.empty_shared` does."""
Fill = Callable[[Tensor | None, Tensor, torch.dtype], None]
"""Writes a tensor into its place in a bucket, flat [elements], of that dtype; with None for the place it only takes
part in what the ranks must do together."""


class WeightsDamaged(ValueError):
    """Raised where the weights that arrived are not those that were packed."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one named tensor lies. Its dtype is its bucket's."""

    name: str
    """Name as in `named_parameters()`."""
    shape: tuple[int, ...]
    """Its shape."""
    bucket: int
    """Which bucket holds it."""
    offset: int
    """Its first element there."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Weights:
    """One version of a model's weights; nobody changes it after it is made."""

    version: int
    """Counts the batches that the trainer has learned from, from 0 for the weights it began with."""
    layout: tuple[Slot, ...]
    """Every tensor, in the trainer's order."""
    buckets: tuple[Tensor, ...]
    """Flat tensors, each [elements] of one dtype."""
    checksums: tuple[int, ...]
    """Checksum of each bucket; see `checksum`."""
    left_out: tuple[str, ...] = ()
    """Names of the tensors that nothing changes and that are not here, for a receiver that has them already."""
    origin: str = ""
    """Says which values the tensors that nothing changes have: those of two models of equal origins are equal."""
    version_now: Callable[[], int] | None = None
    """The version that the buckets have by now, where they are the trainer's own tensors, for receivers in its process;
    they have no checksums."""
    lineage: Any = None
    """`differences.Lineage`, for machines that need only what has changed since a version; None: they get the whole."""
    adapter: str | None = None
    """Name of the adapters that these are, scaled, for an engine that holds them beside its model's weights; None: they
    are a model's."""
    adapters: tuple[Weights, ...] = ()
    """Adapters, each with its name, that fit these weights and no others: they are taken in the same switch."""

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
        packer = Packer(bucket_bytes, dtype, empty)
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
        return self.version, sum((each.checksums for each in self.adapters), self.checksums)

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors, as views into the buckets."""
        for slot in self.layout:
            flat = self.buckets[slot.bucket].narrow(0, slot.offset, prod(slot.shape))
            yield slot.name, flat.view(slot.shape)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor, by name."""
        return {slot.name: slot.shape for slot in self.layout}

    @staticmethod
    def lent(named: Iterable[tuple[str, Tensor]], version_now: Callable[[], int]) -> Weights:
        """A trainer's own contiguous tensors, which it goes on changing.

        Args:
            named: names and tensors.
            version_now: says which version they have.
        """
        tensors = dict(named)
        layout = tuple(Slot(name, tuple(each.shape), number, 0) for number, (name, each) in enumerate(tensors.items()))
        buckets = tuple(each.detach().view(-1) for each in tensors.values())
        return Weights(version_now(), layout, buckets, (), version_now=version_now)

    def taken_apart(self) -> tuple[Weights, tuple[Tensor, ...]]:
        """These without bytes, and these bytes: what goes over a connection one after the other. Adapters stay."""
        return replace(self, buckets=(), version_now=None, adapters=()), self.buckets

    def put_together(self, tensors: Sequence[Tensor]) -> Weights:
        """These with the bytes that `taken_apart` parted from them."""
        return replace(self, buckets=tuple(tensors))

    def made_of(self, base: Weights | None) -> Weights:
        """These, whatever a receiver has already; see `Difference.made_of`."""
        return self

    def in_host_memory(self) -> Weights:
        """Copy with all buckets in host memory; itself if they are there. Blocking."""
        if all(bucket.device.type == "cpu" for bucket in self.buckets):
            return self
        return replace(self, buckets=tuple(bucket.cpu() for bucket in self.buckets))

    def verify(self) -> None:
        """See that the buckets hold what was packed. Blocking.

        Raises:
            WeightsDamaged: one does not; the text names bucket, version and the tensors in it.
        """
        for each in self.adapters:
            each.verify()
        if self.version_now is not None:
            return
        pairs = zip(self.buckets, self.checksums, checksums(self.buckets), strict=True)
        for number, (bucket, expected, actual) in enumerate(pairs):
            if actual != expected:
                inside = [slot.name for slot in self.layout if slot.bucket == number]
                raise WeightsDamaged(
                    f"bucket {number} of {len(self.buckets)} of the weights of version {self.version} ({inside[0]} to "
                    f"{inside[-1]}, {bucket.nbytes} bytes) has checksum {actual:016x} instead of {expected:016x}: "
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
    """A 64-bit checksum of a contiguous tensor's bytes and length, at memory speed, and the same on any device."""
    return checksums([bucket])[0]


def checksums(buckets: Iterable[Tensor]) -> tuple[int, ...]:
    """The `checksum` of each, computed where they lie; one number per bucket is read from a device, all at once.

    Words of 8 bytes are added up in blocks of `BLOCK`, modulo 2^64; each sum and its place are hashed (SplitMix64), and
    the hashes are added up. One changed word is always found; lost, doubled, zeroed or moved blocks are, but for a
    chance of 2^-64; words that change places within one block are not.
    """
    hashes = [_hash(bucket.detach()) for bucket in buckets]
    by_device: dict[torch.device, list[int]] = {}
    for number, each in enumerate(hashes):
        if isinstance(each, Tensor):
            by_device.setdefault(each.device, []).append(number)
    for numbers in by_device.values():
        values = _read(torch.stack([hashes[number] for number in numbers]))  # type: ignore[misc]  # tensors, all of them
        for number, value in zip(numbers, values, strict=True):
            hashes[number] = value
    return tuple([int(each) % (1 << 64) for each in hashes])


def _read(numbers: Tensor) -> list[int]:
    """Numbers from wherever they are; of a GPU this waits for all that was begun there."""
    return numbers.tolist()  # type: ignore[no-any-return]


def _hash(bucket: Tensor) -> Tensor | int:
    """The checksum of a tensor's bytes, modulo 2^64; not yet read from a device."""
    data = (bucket if bucket.dim() == 1 else bucket.reshape(-1)).view(torch.uint8)
    here = type(data) is Tensor and data.device.type == "cpu"  # a fake tensor has no memory
    return _hashed_here(data) if here else _hashed(data)


def _hashed(data: Tensor) -> Tensor:
    """The checksum of bytes, uint8 [bytes], as a signed number, int64 []."""
    size = 8 * BLOCK
    blocks = data.numel() // size
    whole, rest = data.split([blocks * size, data.numel() - blocks * size])
    if whole.storage_offset() % 8:
        whole = whole.clone()  # words must lie on words
    last = torch.zeros(size, dtype=torch.uint8, device=data.device)
    last.narrow(0, 0, rest.numel()).copy_(rest)
    sums = torch.cat([part.view(torch.int64).view(-1, BLOCK).sum(dim=1) for part in (whole, last)])
    sums += torch.arange(1, len(sums) + 1, device=data.device).mul_(_STEP)
    for shift in (32, 29):
        shifted = (sums >> shift).bitwise_and_((1 << (64 - shift)) - 1)  # `>>` brings the sign along
        sums.bitwise_xor_(shifted).mul_(_ODD)
    return sums.sum() + (data.numel() * _STEP) % (1 << 62)


def _hashed_here(data: Tensor) -> int:
    """The checksum of bytes in host memory: hashed piece by piece in a processor's cache, by calls that cost little
    each, since simulated policies publish some kilobytes many times a second."""
    size, octets = 8 * BLOCK, data.numpy()
    blocks, rest = divmod(len(octets), size)
    sums = np.zeros(blocks + 1, dtype=np.uint64)
    if blocks > _FEW_BLOCKS:
        if data.data_ptr() % 8:
            octets = octets.copy()  # words must lie on words
        whole = torch.from_numpy(octets[: blocks * size].view(np.int64)).view(-1, BLOCK)
        torch.sum(whole, dim=1, out=torch.from_numpy(sums[:blocks].view(np.int64)))
    elif blocks:
        np.add.reduce(octets[: blocks * size].view(np.uint64).reshape(blocks, BLOCK), axis=1, out=sums[:blocks])
    if rest:
        last = np.zeros(BLOCK, dtype=np.uint64)
        last.view(np.uint8)[:rest] = octets[-rest:]
        sums[blocks] = np.add.reduce(last)
    total = (len(octets) * _STEP) % (1 << 62)
    for first in range(0, len(sums), _PIECE):
        piece = sums[first : first + _PIECE]
        np.add(piece, _PLACES[: len(piece)], piece)
        if first:
            np.add(piece, np.uint64(first * _STEP % (1 << 64)), piece)
        for shift in _SHIFTS:
            np.bitwise_xor(piece, piece >> shift, piece)
            np.multiply(piece, _FACTOR, piece)
        total += int(np.add.reduce(piece))
    return total


@dataclass(frozen=True, slots=True, eq=False)
class Export:
    """A tensor that is made when its bucket is filled, and let go after that."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: torch.dtype
    """In which it is published."""
    make: Callable[[], Tensor]
    """Makes it, in any dtype."""

    def numel(self) -> int:
        """Elements of the whole tensor."""
        return prod(self.shape)


class Packer:
    """Collects tensors, and writes them into a bucket whenever enough of one dtype have come.

    Every rank that has a part of the tensors packs all of them, in the same order, so that each bucket's are gathered
    at the same time; the one that keeps the buckets gets the weights. If it has no room for a bucket, it goes on taking
    part for the sake of the others.

    Args:
        bucket_bytes: bound on a bucket; a tensor larger than that has one of its own.
        dtype: what floating-point tensors become; None keeps theirs. An `Export` says itself.
        empty: allocates the buckets; None: on the device of the tensors.
        fill: writes a tensor into its place.
        keeps: this rank gets the weights.

    Raises:
        ValueError: `bucket_bytes` below 1.
    """

    def __init__(
        self,
        bucket_bytes: int = BUCKET_BYTES,
        dtype: torch.dtype | None = None,
        empty: Allocator | None = None,
        fill: Fill | None = None,
        *,
        keeps: bool = True,
    ):
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
        self._limit = bucket_bytes
        self._dtype = dtype
        self._empty = empty
        self._fill = fill or _copied
        self._keeps = keeps
        self._failed: Exception | None = None
        self._layout: dict[str, Slot] = {}
        self._open: dict[torch.dtype, _Open] = {}
        self._buckets: dict[int, Tensor] = {}
        self._numbers = 0

    def add(self, name: str, tensor: Tensor | Export) -> None:
        """The next tensor.

        Raises:
            ValueError: the name has come before.
        """
        if name in self._layout:
            raise ValueError(f"weights: the name {name} comes twice")
        dtype = tensor.dtype
        if isinstance(tensor, Tensor) and self._dtype is not None and tensor.is_floating_point():
            dtype = self._dtype
        bucket = self._open.get(dtype)
        if bucket is not None and (bucket.elements + tensor.numel()) * dtype.itemsize > self._limit:
            self._close(dtype)
            bucket = None
        if bucket is None:
            bucket = self._open[dtype] = _Open(self._numbers, deque(), 0)
            self._numbers += 1
        self._layout[name] = Slot(name, tuple(tensor.shape), bucket.number, bucket.elements)
        bucket.tensors.append(tensor)
        bucket.elements += tensor.numel()

    def done(self, version: int) -> Weights:
        """Return the packed weights; without buckets on a rank that does not keep them.

        Raises:
            Exception: what the allocator raised.
        """
        self.close()
        if self._failed is not None:
            raise self._failed
        return Weights(version, tuple(self._layout.values()), self.buckets, checksums(self.buckets))

    def close(self) -> None:
        """Fill the buckets that are still open."""
        for dtype in list(self._open):
            self._close(dtype)

    @property
    def buckets(self) -> tuple[Tensor, ...]:
        """Those that this rank keeps, in order, as far as they are filled."""
        return tuple(bucket for _, bucket in sorted(self._buckets.items()))

    def _close(self, dtype: torch.dtype) -> None:
        ready, start = self._open.pop(dtype), 0
        while ready.tensors:
            each = ready.tensors.popleft()
            tensor = each.make() if isinstance(each, Export) else each
            if self._keeps and self._failed is None and ready.number not in self._buckets:
                self._allocate(ready, dtype, tensor.device)
            bucket = self._buckets.get(ready.number)
            self._fill(None if bucket is None else bucket.narrow(0, start, tensor.numel()), tensor, dtype)
            start += tensor.numel()
            del each, tensor  # before the next one is made

    def _allocate(self, ready: _Open, dtype: torch.dtype, device: torch.device) -> None:
        shape = (ready.elements,)
        try:
            self._buckets[ready.number] = (
                torch.empty(shape, dtype=dtype, device=device) if self._empty is None else self._empty(shape, dtype)
            )
        except Exception as error:
            self._failed = error
            self._buckets.clear()


@dataclass(slots=True)
class _Open:
    """A bucket that takes more tensors."""

    number: int
    tensors: deque[Tensor | Export]
    elements: int


def _copied(place: Tensor | None, tensor: Tensor, dtype: torch.dtype) -> None:
    if place is not None:
        place.view(tensor.shape).copy_(tensor)
