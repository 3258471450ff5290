"""Tensors of which each rank has some rectangles, in whatever shapes a back end splits them: to read, and to gather.

Flows in: rectangles, and where in the whole they lie. Flows out: `Part`, by which torch's checkpoints read what belongs
to a rank; and `Scattered`, which the first rank of a mesh gathers piece by piece, each piece from the rank that has it
to where it belongs, so that nobody else receives anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rlinf.weights.clock import Clock


class Part(Tensor):
    """A rectangle of a tensor that is nowhere whole, to be filled from a checkpoint. It has the shape of the whole, and
    computes nothing."""

    local: Tensor
    offset: tuple[int, ...]

    @staticmethod
    def of(local: Tensor, shape: Sequence[int], offset: Sequence[int]) -> Part:
        """What lies at `offset` in a tensor of this shape."""
        made: Any = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            Part, tuple(shape), dtype=local.dtype, device=local.device
        )
        made.local, made.offset = local, tuple(offset)
        part: Part = made
        return part

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise TypeError(f"{func}: of this tensor there is a part only")

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(self.offset), self.local.shape)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.local


@dataclass(frozen=True, slots=True)
class Held:
    """A rectangle that some rank has."""

    rank: int
    """Its position in the mesh."""
    offset: tuple[int, ...]
    """Where in the whole it begins."""
    shape: tuple[int, ...]
    """Its own."""


@dataclass(frozen=True, slots=True, eq=False)
class Scattered:
    """A tensor whose rectangles lie on the ranks of a mesh, each on one."""

    shape: tuple[int, ...]
    """Of the whole."""
    held: Sequence[Held]
    """Who has which, in an order that is the same on all ranks."""
    write: Callable[[Held, int, Tensor], None]
    """Copies rows of a rectangle that this rank has, from one of them on, into a tensor that takes so many, and casts
    them to its dtype."""
    mesh: DeviceMesh | None
    """The ranks; None for one."""

    def numel(self) -> int:
        """Elements of the whole."""
        return prod(self.shape)

    @property
    def device(self) -> torch.device:
        """Where rectangles are sent from."""
        return torch.device(self.mesh.device_type if self.mesh is not None else "cpu")

    @torch.no_grad()
    def gather_into(self, place: Tensor | None, dtype: torch.dtype, piece_bytes: int, clock: Clock) -> None:
        """Write the whole into its place; every rank of the mesh calls it, in the same order of tensors.

        Args:
            place: flat [elements], of `dtype`; on the first rank, where it may be None to keep nothing. Others have
                none.
            dtype: in which pieces are sent.
            piece_bytes: bound on what is sent at once, unless a single row is more.
            clock: is told how long the phases took.
        """
        me = 0 if self.mesh is None else self.mesh.get_local_rank()
        whole = None if place is None else place.view(self.shape)
        for held in self.held:
            if me not in (0, held.rank):
                continue
            row = prod(held.shape[1:]) * dtype.itemsize
            step = max(1, piece_bytes // max(1, row))
            for start in range(0, held.shape[0], step):
                count = min(step, held.shape[0] - start)
                place_of = None if whole is None else whole[_rows(held, start, count)]
                if held.rank:
                    self._moved(place_of, held, start, count, dtype, clock)
                elif place_of is not None:
                    with clock.phase("copy", place_of):
                        self.write(held, start, place_of)

    def _moved(
        self, place: Tensor | None, held: Held, start: int, count: int, dtype: torch.dtype, clock: Clock
    ) -> None:
        """Some rows of a rectangle of another rank: it sends them, and the first one puts them into their place."""
        assert self.mesh is not None
        group = self.mesh.get_group()
        piece = torch.empty((count, *held.shape[1:]), dtype=dtype, device=self.device)
        if self.mesh.get_local_rank():
            with clock.phase("cast", piece):
                self.write(held, start, piece)
            with clock.phase("gather", piece):
                dist.send(piece, group=group, group_dst=0)
            return
        with clock.phase("gather", piece):
            dist.recv(piece, group=group, group_src=held.rank)
        if place is not None:
            with clock.phase("copy", piece):
                place.copy_(piece)

    def whole(self, dtype: torch.dtype, piece_bytes: int) -> Tensor:
        """The tensor itself on the first rank; on others one of its shape without memory."""
        leads = self.mesh is None or self.mesh.get_local_rank() == 0
        found = torch.empty(self.shape, dtype=dtype, device=self.device if leads else "meta")
        self.gather_into(found.view(-1) if leads else None, dtype, piece_bytes, Clock())
        return found


def _rows(held: Held, start: int, count: int) -> tuple[slice, ...]:
    """Where some rows of a rectangle are in the whole."""
    first, *others = (slice(begun, begun + size) for begun, size in zip(held.offset, held.shape, strict=True))
    return slice(first.start + start, first.start + start + count), *others


def scattered(tensor: DTensor, ranks: DeviceMesh) -> Scattered:
    """A tensor that is split over the second dimension of a mesh, and each part by rows over the first.

    Args:
        tensor: of FSDP2, such as one that `fully_shard` found split already.
        ranks: those of its mesh in one dimension, row by row.
    """
    rows, parts = tensor.device_mesh.shape
    split: int = tensor.placements[1].dim  # type: ignore[attr-defined]
    held = []
    for rank in range(rows * parts):
        row, part = divmod(rank, parts)
        shape, offset = [*tensor.shape], [0] * tensor.dim()
        shape[split] //= parts
        offset[split] = part * shape[split]
        slice_rows = -(-shape[0] // rows)
        begun = min(row * slice_rows, shape[0])
        shape[0] = min(slice_rows, shape[0] - begun)
        offset[0] += begun
        if prod(shape):
            held.append(Held(rank, tuple(offset), tuple(shape)))

    def write(_: Held, start: int, into: Tensor) -> None:
        into.copy_(tensor.to_local().narrow(0, start, len(into)))

    return Scattered(tuple(tensor.shape), held, write, ranks)
