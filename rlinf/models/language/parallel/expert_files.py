"""Experts as files have them, each matrix by itself, read as models have them: stacked, gate and up joined.

In: the files of a saved model. Out: what can be sliced like a slice of a file, so that a rank reads its own experts and
no others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

_JOINED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Stacked tensors of a module of experts, and the matrices of an expert that are in them, one below the other."""


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """One stacked tensor, [experts, rows, columns]."""

    members: tuple[tuple[str, ...], ...]
    """Of each expert, its matrices in the files."""
    files: Mapping[str, Path]
    """The safetensors file of each tensor."""

    @staticmethod
    def of(name: str, files: Mapping[str, Path]) -> StackedExperts | None:
        """What a model calls `name`, if it is stacked from tensors of the files; else None."""
        module, _, own = name.rpartition(".")
        members: list[tuple[str, ...]] = []
        while own in _JOINED and module.endswith(".experts"):
            names = tuple(f"{module}.{len(members)}.{matrix}.weight" for matrix in _JOINED[own])
            if not all(each in files for each in names):
                break
            members.append(names)
        return StackedExperts(tuple(members), files) if members else None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""
        shapes = [self._look(name, lambda file, name: file.get_slice(name).get_shape()) for name in self.members[0]]
        return len(self.members), sum(rows for rows, _ in shapes), shapes[0][1]

    def __getitem__(self, part: Any) -> Tensor:
        """Some experts, of them some rows, of these some columns: three slices; `...` for all."""
        which, rows, columns = (slice(None),) * 3 if part is ... else part
        chosen = range(len(self.members))[which]
        return torch.stack([self._expert(number)[rows, columns] for number in chosen])

    def _expert(self, number: int) -> Tensor:
        return torch.cat([self._look(name, lambda file, name: file.get_tensor(name)) for name in self.members[number]])

    def _look(self, name: str, read: Callable[[Any, str], Any]) -> Any:
        with safe_open(self.files[name], framework="pt") as file:
            return read(file, name)
