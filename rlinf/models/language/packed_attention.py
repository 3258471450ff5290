"""Attention over sequences that lie one behind another: no token sees another sequence, and no padding is computed.

In: the layout of a packed micro-batch, once per micro-batch, and query, key and value of every layer. Out: what
attention gives for each sequence alone. Everything else in a model works token by token and needs no layout.

On CUDA the variable-length kernel of torch does it, in half precision. Elsewhere there is none, and a mask over
[tokens, tokens] costs ten times what it saves: sequences of about equal length are gathered into a few rectangles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "rlinf_packed"
"""Under which transformers knows it: `model.set_attn_implementation(NAME)`."""
ARGUMENT = "packed_layout"
"""The keyword by which a `Layout` travels through a model's `forward` to its attention."""

_GROWTH, _SLACK = 1.1, 8
"""A rectangle holds lengths up to 1.1 x its shortest + 8 tokens. One more call of attention, forward and backward,
costs about what 8 columns more cost for short rows; long ones pay for padding with the square."""


@dataclass(frozen=True, slots=True, eq=False)
class Rectangle:
    """Sequences of about equal length as rows."""

    rows: int
    """How many."""
    length: int
    """Of the longest."""
    index: Tensor | None
    """Which token stands at each place, int64 [rows x length]; None if it is all tokens in order."""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where the sequences of a packed micro-batch lie."""

    longest: int
    """Tokens of the longest sequence."""
    bounds: Tensor
    """Where each sequence begins, and the end of the last, int32 [sequences + 1]."""
    rectangles: tuple[Rectangle, ...]
    """All sequences, for attention without a variable-length kernel; empty where there is one."""
    places: Tensor | None
    """Which token stands at each place of the sequences laid end to end, int64; None for the same one."""
    restore: Tensor | None
    """Place of each token in what attention gives: in the rectangles laid end to end or, where there are none, in the
    sequences, int64 [tokens]; None for the same place. A token that sequences share has the same value in each."""

    @staticmethod
    def of(
        lengths: Sequence[int],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        places: Tensor | None = None,
    ) -> Layout:
        """The layout of sequences.

        Args:
            lengths: tokens of each, at least one sequence and none empty.
            device, dtype: on which and in which attention is computed.
            places: which token stands at each place of the sequences laid end to end; None if they share none.
        """
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        on_device = torch.from_numpy(bounds.astype(np.int32)).to(device)
        shared = None if places is None else places.cpu().numpy()
        if device.type == "cuda" and dtype != torch.float32:
            back = None if shared is None else torch.from_numpy(_first_place(shared)).to(device)
            return Layout(max(lengths), on_device, (), places, back)
        rectangles, restore = _rectangles(np.asarray(lengths), bounds, shared, device)
        return Layout(max(lengths), on_device, rectangles, places, restore)


def _first_place(places: np.ndarray) -> np.ndarray:
    """The first place at which each token stands."""
    first = np.empty(places.max() + 1, dtype=np.int64)
    first[places[::-1]] = np.arange(len(places))[::-1]
    return first


def _rectangles(
    lengths: np.ndarray, bounds: np.ndarray, places: np.ndarray | None, device: torch.device
) -> tuple[tuple[Rectangle, ...], Tensor | None]:
    if (lengths == lengths[0]).all():
        index = None if places is None else torch.from_numpy(places).to(device)
        box = Rectangle(len(lengths), int(lengths[0]), index)
        return (box,), None if places is None else torch.from_numpy(_first_place(places)).to(device)
    restore = np.empty(bounds[-1], dtype=np.int64)
    made, used = [], 0
    for members in _alike(lengths):
        longest = int(lengths[members].max())
        columns = np.arange(longest)
        # behind its end a row repeats its last token, which nobody looks at
        index = bounds[members, None] + np.minimum(columns, lengths[members, None] - 1)
        real = columns < lengths[members, None]
        restore[index[real]] = (used + np.arange(index.size)).reshape(index.shape)[real]
        chosen = index.reshape(-1) if places is None else places[index.reshape(-1)]
        made.append(Rectangle(len(members), longest, torch.from_numpy(chosen).to(device)))
        used += index.size
    if places is not None:
        restore = restore[_first_place(places)]
    return tuple(made), torch.from_numpy(restore).to(device)


def _alike(lengths: np.ndarray) -> list[np.ndarray]:
    """Positions of sequences, in sets of about equal length."""
    order = np.argsort(lengths, kind="stable")
    sets, start = [], 0
    for end in range(1, len(order) + 1):
        if end == len(order) or lengths[order[end]] > lengths[order[start]] * _GROWTH + _SLACK:
            sets.append(order[start:end])
            start = end
    return sets


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence, in the shape that transformers asks of its attention functions.

    Args:
        module: the layer that asks.
        query: [1, heads, tokens, head_dim]
        key, value: [1, key heads, tokens, head_dim]
        attention_mask: ignored, there is none.
        scaling: of the scores; None for 1 / sqrt(head_dim).
        dropout: must be 0.
        sliding_window: how many tokens, itself included, a token sees at most; None for all.
        more: holds the `Layout` under `ARGUMENT`; what else changes the result is refused.

    Returns:
        [1, tokens, heads, head_dim], and no attention weights.

    Raises:
        ValueError: no layout came, or the layer wants what this cannot do.
    """
    layout: Layout | None = more.get(ARGUMENT)
    if layout is None:
        raise ValueError(f"{type(module).__name__} does not hand {ARGUMENT} on to its attention")
    odd = [name for name in ("softcap", "s_aux", "position_bias", "head_mask") if more.get(name) is not None]
    if odd or dropout or not getattr(module, "is_causal", True):
        raise ValueError(f"{type(module).__name__} wants {odd or 'dropout or no causality'} of its attention")
    window = sliding_window if sliding_window is not None and sliding_window < layout.longest else None
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))  # [tokens, heads, head_dim]
    attend = _by_rectangles if layout.rectangles else _by_kernel
    return attend(query, key, value, layout, scaling, window)[None], None


def _by_rectangles(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scaling: float | None, window: int | None
) -> Tensor:
    done = []
    for box in layout.rectangles:
        parts = []
        for part in (query, key, value):
            chosen = part if box.index is None else part.index_select(0, box.index)
            parts.append(chosen.unflatten(0, (box.rows, box.length)).transpose(1, 2))
        attended = F.scaled_dot_product_attention(
            parts[0],
            parts[1],
            parts[2],
            attn_mask=None if window is None else _band(box.length, window, query.device),
            is_causal=window is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        done.append(attended.transpose(1, 2).flatten(0, 1))
    if layout.restore is None:
        return done[0]
    return torch.cat(done).index_select(0, layout.restore)


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """Who sees whom within a window, bool [length, length]."""
    everything = torch.ones(length, length, dtype=torch.bool, device=device)
    return everything.tril() & everything.triu(1 - window)


def _by_kernel(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scaling: float | None, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # needs a CUDA build

    if layout.places is not None:
        query, key, value = (part.index_select(0, layout.places) for part in (query, key, value))
    attended = varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        layout.bounds,
        layout.bounds,
        layout.longest,
        layout.longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(attended, Tensor)  # without the extras that were not asked for
    return attended if layout.restore is None else attended.index_select(0, layout.restore)


AttentionInterface.register(NAME, packed_attention)
