"""Paged KV cache: keys and values in pages of one pool, and attention over them.

The pool stays where it is while rows come, grow and go. An answer has pages for its own tokens and a few more, in any
order; a row of the table names them. Page 0 belongs to nobody: rows that have ended write there. Plain code that wakes
nobody.

Attention, of a decode step over pages and of prompts that lie one behind another, is operations that torch knows. On a
GPU, kernels do it (`paged_kernels`, and torch's variable-length attention); elsewhere the same is written out, as what
they are compared with. Being operations of torch's, they can be recorded, faked and counted like any other.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
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
        """Keys of each layer, [tokens of the pool, heads, size]."""
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
        """True if these answers can have room for so many tokens each without moving anything, int64 [some] each."""
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
        """Take all pages from the answers, and give the pool's memory back."""
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


def _by_triton(name: str) -> Callable[..., Tensor]:
    """The kernel of this name, which is imported when it is first called: it needs Triton."""

    def launch(*args: Any) -> Tensor:
        from rlinf.engines.transformers import paged_kernels

        return cast(Tensor, getattr(paged_kernels, name)(*args))

    return launch


@torch.library.custom_op("rlinf::paged_attention", mutates_args=())
def paged_attention(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, page: int, window: int, scale: float
) -> Tensor:
    """One query per row over the tokens of that row.

    Args:
        query: [rows, heads, size].
        keys, values: the pool, [tokens of the pool, key-value heads, size].
        table: pages of each row in order, int32 [rows, width]; entries beyond the row's length are never followed.
        lengths: tokens of each row, int64 [rows]; 0 gives zeros.
        page: tokens of a page.
        window: tokens that a row sees at most, its last; 0 for all.
        scale: of the scores.

    Returns:
        [rows, heads, size]
    """
    rows, heads, size = query.shape
    columns = torch.arange(table.shape[1] * page, device=query.device)
    mask = columns < lengths[:, None]
    if window:
        mask &= columns >= lengths[:, None] - window
    pages = table.long()[:, :, None] * page + columns[:page]
    places = torch.where(mask, pages.flatten(1), 0)
    there = mask[:, :, None, None]  # elsewhere lies whatever was left there, which may not be finite
    key, value = (part[places].masked_fill(~there, 0).transpose(1, 2) for part in (keys, values))
    grouped = query.view(rows, keys.shape[1], -1, size)
    attended = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask[:, None, None], scale=scale)
    return attended.masked_fill((lengths == 0)[:, None, None, None], 0).reshape(rows, heads, size)


paged_attention.register_kernel("cuda")(_by_triton("paged_attention"))
paged_attention.register_fake(lambda query, *_: torch.empty_like(query))


@torch.library.custom_op("rlinf::turn_and_keep", mutates_args=("keys", "values"))
def turn_and_keep(
    turning: Tensor, fresh: Tensor, cos: Tensor, sin: Tensor, place: Tensor, keys: Tensor, values: Tensor, queries: int
) -> Tensor:
    """Rotate the queries and keys of one token per row, and put keys and values where they belong in the pool.

    Args:
        turning: queries, then keys, [rows, heads + key-value heads, size].
        fresh: values, [rows, key-value heads, size].
        cos, sin: of each row's position, [rows, 1, size]; the sines of the first half carry a minus sign.
        place: where each row's token goes, int64 [rows].
        keys, values: the pool, [tokens of the pool, key-value heads, size], which is written.
        queries: heads of them.

    Returns:
        The queries, [rows, heads, size].
    """
    turned = torch.addcmul(turning * cos, turning.roll(turning.shape[-1] // 2, dims=-1), sin)
    keys.index_copy_(0, place, turned[:, queries:])
    values.index_copy_(0, place, fresh)
    return turned[:, :queries].contiguous()


turn_and_keep.register_kernel("cuda")(_by_triton("turn_and_keep"))
turn_and_keep.register_fake(
    lambda turning, fresh, cos, sin, place, keys, values, queries: turning.new_empty(
        (len(turning), queries, turning.shape[-1])
    )
)


@torch.library.custom_op("rlinf::prompt_attention", mutates_args=())
def prompt_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    query_bounds: Tensor,
    key_bounds: Tensor,
    longest: Sequence[int],
    window: int,
    scale: float,
) -> Tensor:
    """Causal attention within each of the texts that lie one behind another, aligned at their ends.

    Args:
        query: [tokens, heads, size].
        keys, values: [tokens with those read before, key-value heads, size].
        asked, given: where each text begins in `query` and in `keys`, and the end of the last, int32 [texts + 1].
        longest: tokens of the longest text in `query` and in `keys`.
        window: tokens that a token sees at most, itself included; 0 for all.
        scale: of the scores.

    Returns:
        [tokens, heads, size]
    """
    attended = torch.empty_like(query)
    repeats = query.shape[1] // keys.shape[1]
    ends = zip(query_bounds[1:].tolist(), key_bounds[1:].tolist(), strict=True)
    first = before = 0
    for last, end in ends:
        columns = torch.arange(end - before, device=query.device)
        looking = columns[columns.numel() - (last - first) :, None]
        mask = columns <= looking
        if window:
            mask &= columns > looking - window
        own = query[first:last].transpose(0, 1)
        key, value = (part[before:end].repeat_interleave(repeats, dim=1).transpose(0, 1) for part in (keys, values))
        output = F.scaled_dot_product_attention(own, key, value, attn_mask=mask, scale=scale)
        attended[first:last] = output.transpose(0, 1)
        first, before = last, end
    return attended


_by_text = prompt_attention._init_fn


@prompt_attention.register_kernel("cuda")
def _prompts_on_cuda(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    query_bounds: Tensor,
    key_bounds: Tensor,
    longest: Sequence[int],
    window: int,
    scale: float,
) -> Tensor:
    if query.dtype not in (torch.float16, torch.bfloat16) or query.shape[-1] % 8 or query.shape[-1] > 256:
        output: Tensor = _by_text(query, keys, values, query_bounds, key_bounds, longest, window, scale)
        return output
    from torch.nn.attention.varlen import varlen_attn  # needs a CUDA build

    # torch 2.11 takes fewer heads of keys without being told; later ones want to be told.
    more: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    limits = (window - 1 if 0 < window < longest[1] else -1, 0)
    bounds = (query_bounds, key_bounds, longest[0], longest[1])
    attended = varlen_attn(query, keys, values, *bounds, scale=scale, window_size=limits, **more)
    assert isinstance(attended, Tensor)  # without the extras that were not asked for
    return attended


prompt_attention.register_fake(lambda query, *_: torch.empty_like(query))
