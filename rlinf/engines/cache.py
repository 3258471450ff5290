"""The key-value cache of a batch: room for every token allocated at once, written in place, rows that can leave.

transformers' own caches either grow by concatenation (a copy per token) or hand attention their whole capacity; this
one writes into place and hands out only what is filled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class _Layer(CacheLayerMixin):
    """Keys and values of one attention layer, [rows, key-value heads, capacity, head size]."""

    def __init__(self) -> None:
        super().__init__()
        self.filled = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = key_states, value_states
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
            self.filled = key_states.shape[2]
            return key_states, value_states
        start, self.filled = self.filled, self.filled + key_states.shape[2]
        self.keys[:, :, start : self.filled] = key_states
        self.values[:, :, start : self.filled] = value_states
        return self.keys[:, :, : self.filled], self.values[:, :, : self.filled]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.filled + query_length, 0

    def get_seq_length(self) -> int:
        return self.filled

    def get_max_length(self) -> int:
        return -1 if self.keys is None else int(self.keys.shape[2])

    def take(self, rows: Tensor, capacity: int) -> None:
        assert self.keys is not None
        assert self.values is not None
        self.keys = _take(self.keys, rows, self.filled, capacity)
        self.values = _take(self.values, rows, self.filled, capacity)


class RowCache(Cache):
    """A cache for a batch of rows that all stand at the same column.

    The first forward (the prompts) is kept as it is; `take` then makes room for the answers.

    Args:
        layers: number of attention layers of the model.
    """

    def __init__(self, layers: int):
        self._rows = [_Layer() for _ in range(layers)]
        super().__init__(layers=list(self._rows))

    def take(self, rows: Tensor, capacity: int) -> None:
        """Keep `rows` (int64 [new rows], any order, repeats allowed), with room for `capacity` tokens in all."""
        for layer in self._rows:
            layer.take(rows, capacity)


def _take(old: Tensor, rows: Tensor, filled: int, capacity: int) -> Tensor:
    new = torch.empty((len(rows), old.shape[1], capacity, old.shape[3]), dtype=old.dtype, device=old.device)
    new[:, :, :filled] = old[:, :, :filled].index_select(0, rows)
    return new
