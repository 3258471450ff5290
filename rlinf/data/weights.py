"""A model's weights on their way from trainer to engines: few flat tensors, and a layout that says what lies where."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one named tensor lies."""

    name: str
    """As in `named_parameters()`."""
    shape: tuple[int, ...]
    """Its shape."""
    bucket: int
    """Which flat tensor holds it."""
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
    """Flat tensors, one per dtype, each [elements]."""

    @staticmethod
    def pack(named: Iterable[tuple[str, Tensor]], version: int) -> Weights:
        """Copy named tensors into flat ones, so that the originals may change afterwards.

        Args:
            named: names and tensors, as `named_parameters()` gives them.
            version: the version they are.
        """
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        sizes: dict[torch.dtype, int] = {}
        layout = []
        for name, tensor in named:
            dtype = tensor.dtype
            flat = by_dtype.setdefault(dtype, [])
            offset = sizes.get(dtype, 0)
            layout.append(Slot(name, tuple(tensor.shape), list(by_dtype).index(dtype), offset))
            flat.append(tensor.detach().reshape(-1))
            sizes[dtype] = offset + tensor.numel()
        return Weights(version, tuple(layout), tuple(torch.cat(tensors) for tensors in by_dtype.values()))

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors, as views into the buckets."""
        for slot in self.layout:
            flat = self.buckets[slot.bucket][slot.offset : slot.offset + prod(slot.shape)]
            yield slot.name, flat.view(slot.shape)
