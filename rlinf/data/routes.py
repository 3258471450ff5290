"""Routes: the experts that each token of a text went to, in every layer of a mixture.

In: what a model chose, answer by answer. Out: one compact array per sample, [tokens, layers, experts per token], from
the beginning of the text to its last token but one, which is the last that a model reads. A token of which nobody knows
has the largest number of the array's type everywhere: a trainer lets it go where it likes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Keys by which configurations of models tell how many experts a layer has."""


def experts_of(config: Any) -> int:
    """How many experts a layer has by the configuration of its text model; 0 for a dense one."""
    return int(next((count for key in _COUNTS if (count := getattr(config, key, None))), 0))


def compact_type(experts: int) -> type[np.unsignedinteger | np.signedinteger]:
    """The smallest type for the numbers of so many experts, and one number more for what is not known."""
    return np.uint8 if experts < 256 else np.int16


def unknown(dtype: np.dtype) -> int:
    """The number that stands for an expert that nobody knows."""
    return int(np.iinfo(dtype).max)


def fitted(routes: np.ndarray, tokens: int) -> np.ndarray:
    """Routes of exactly so many tokens: the first of those given, and unknown ones behind where they are too few."""
    if len(routes) >= tokens:
        return routes[:tokens]
    rest = np.full((tokens - len(routes), *routes.shape[1:]), unknown(routes.dtype), routes.dtype)
    return np.concatenate([routes, rest])


def joined(tokens: int, parts: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Merge the routes that several answers in one text tell of its tokens.

    Args:
        tokens: that are read of the text.
        parts: of each answer, in order, the routes of all that was read for it, from the beginning of the text; the
            first that knows a token counts, since its log-prob is of those experts. None: it does not tell.

    Returns:
        [tokens, layers, experts per token]; None if no part tells.
    """
    known_parts = [part for part in parts if part is not None]
    if not known_parts:
        return None
    whole = fitted(known_parts[0], tokens).copy()
    for part in known_parts[1:]:
        more, lacks = part[:tokens], unknown(whole.dtype)
        new = whole[: len(more), 0, 0] == lacks
        whole[: len(more)][new] = more[new]
    return whole


def load_of(parts: Sequence[np.ndarray], layers: Sequence[int], experts: int) -> np.ndarray | None:
    """The share of choices that each expert has, float32 [layers, experts].

    Args:
        parts: routes of all tokens of one optimizer step that predict learned ones, sample by sample.
        layers: those that have experts, where routes are of all layers of the model.
        experts: of a layer.

    Returns:
        Rows that add up to 1; None if not one token is known.
    """
    counts = np.zeros((len(layers), experts), np.int64)
    for part in parts:
        mine = part if part.shape[1] == len(layers) else part[:, list(layers)]
        for layer, of_layer in enumerate(counts):
            ids = mine[:, layer].ravel()
            of_layer += np.bincount(ids[ids < experts], minlength=experts)
    total = counts.sum(1, keepdims=True)
    return (counts / total).astype(np.float32) if total.all() else None


def side_by_side(parts: Sequence[np.ndarray | None], lengths: Sequence[int]) -> np.ndarray | None:
    """Routes of texts one behind another, [sum of lengths, layers, experts per token]; None if no text has any.

    Args:
        parts: of each text; None leaves its tokens unknown.
        lengths: tokens of each.

    Raises:
        ValueError: they are of different models.
    """
    like = next((part for part in parts if part is not None), None)
    if like is None:
        return None
    kinds = {(part.shape[1:], part.dtype.name) for part in parts if part is not None}
    if len(kinds) > 1:
        raise ValueError(f"routes of samples in one micro-batch are of different models: {sorted(kinds)}")
    none = like[:0]
    return np.concatenate(
        [fitted(none if part is None else part, int(n)) for part, n in zip(parts, lengths, strict=True)]
    )
