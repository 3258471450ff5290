"""Keys and values in pages of one pool, which stays where it is while rows come, grow and go.

Flows in: how many tokens each answer has, then keys and values. Flows out: where tokens lie. Plain code that wakes
nobody. An answer has pages for its own tokens and a few more, in any order; a row of the table names them. Page 0
belongs to nobody: rows that have ended write there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

PAGE = 64
"""Tokens of a page: as many as the attention kernel reads at once. Of an answer's memory, half a page is idle."""
_GROWTH = 2
"""The pool and the table grow by this factor: where they lie changes then, and all recordings are made anew."""


class PagedCache:
    """The pool, and which pages each answer has.

    Args:
        layers: of the model.
        heads: of keys and values, in each layer.
        size: of a head.
        slots: answers there may be; slot -1 is nobody's.
        dtype, device: of keys and values.
        page: tokens of a page.
        max_tokens: of all answers together, beyond which the pool grows only by what is needed; None for no bound.
    """

    def __init__(
        self,
        layers: int,
        heads: int,
        size: int,
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
        page: int = PAGE,
        max_tokens: int | None = None,
    ):
        self.page = page
        self.table = np.zeros((slots + 1, 1), dtype=np.int32)
        """Pages of each slot, in order, int32 [slots + 1, width]."""
        self.owned = np.zeros(slots + 1, dtype=np.int64)
        """How many of them it has, int64 [slots + 1]."""
        self.keys: list[Tensor] = []
        """Of each layer, [tokens of the pool, heads, size]."""
        self.values: list[Tensor] = []
        """Likewise."""
        self._shape = (heads, size)
        self._layers, self._dtype, self._device = layers, dtype, device
        self._pages = 0
        self._enough = math.inf if max_tokens is None else -(-max_tokens // page) + 2 * slots  # with begun pages
        self._free: list[int] = []

    @property
    def width(self) -> int:
        """Pages that a row of the table has room for."""
        return int(self.table.shape[1])

    def fits(self, tokens: np.ndarray, slots: np.ndarray) -> bool:
        """Whether these answers can have room for so many tokens each without moving anything, int64 [some] each."""
        needed = self._needed(tokens)
        return int(needed.max(initial=0)) <= self.width and self._missing(needed, slots) <= len(self._free)

    def extend(self, tokens: np.ndarray, slots: np.ndarray) -> bool:
        """Have room for so many tokens of these answers, int64 [some] each; whether the pool or the table has moved."""
        needed = self._needed(tokens)
        moved = False
        if (most := int(needed.max(initial=0))) > self.width:
            table = np.zeros((len(self.table), max(most, _GROWTH * self.width)), dtype=np.int32)
            table[:, : self.width] = self.table
            self.table, moved = table, True
        if (short := self._missing(needed, slots) - len(self._free)) > 0:
            ahead = int(min(_GROWTH * self._pages, self._enough))
            self._grow(max(self._pages + short, ahead, len(self.table)))
            moved = True
        for slot, pages in zip(slots.tolist(), needed.tolist(), strict=True):
            for number in range(int(self.owned[slot]), pages):
                self.table[slot, number] = self._free.pop()
            self.owned[slot] = max(pages, self.owned[slot])
        return moved

    def release(self, slots: np.ndarray) -> None:
        """These answers need their pages no more."""
        for slot in slots.tolist():
            self._free += self.table[slot, : self.owned[slot]].tolist()
            self.table[slot], self.owned[slot] = 0, 0

    def clear(self) -> None:
        """Nobody has any page."""
        self.release(np.flatnonzero(self.owned))

    def drop(self) -> None:
        """The same, and the pool's memory is given back."""
        self.clear()
        self.keys, self.values, self._pages, self._free = [], [], 0, []

    def places(self, slot: int, tokens: int) -> np.ndarray:
        """Where the first tokens of an answer lie in the pool, int64 [tokens]."""
        pages = self.table[slot, : -(-tokens // self.page)].astype(np.int64)
        return (pages[:, None] * self.page + np.arange(self.page)).reshape(-1)[:tokens]

    def copies(self, slot: int, tokens: int) -> Sequence[tuple[Tensor, Tensor]]:
        """Copies of an answer's first keys and values, each [heads, tokens, size], per layer."""
        where = torch.from_numpy(self.places(slot, tokens)).to(self._device)

        def copied(part: Tensor) -> Tensor:
            return part.index_select(0, where).transpose(0, 1).contiguous()

        return [(copied(keys), copied(values)) for keys, values in zip(self.keys, self.values, strict=True)]

    def _needed(self, tokens: np.ndarray) -> np.ndarray:
        return -(-tokens // self.page)

    def _missing(self, needed: np.ndarray, slots: np.ndarray) -> int:
        return int(np.maximum(needed - self.owned[slots], 0).sum())

    def _grow(self, pages: int) -> None:
        pages += 1 if not self._pages else 0  # nobody's
        for parts in (self.keys, self.values):
            for layer in range(self._layers):  # one at a time: there is never more than one layer twice
                fresh = torch.empty((pages * self.page, *self._shape), dtype=self._dtype, device=self._device)
                if self._pages:
                    fresh[: len(parts[layer])].copy_(parts[layer])
                    parts[layer] = fresh
                else:
                    parts.append(fresh)
        self._free += range(pages - 1, max(self._pages, 1) - 1, -1)
        self._pages = pages
