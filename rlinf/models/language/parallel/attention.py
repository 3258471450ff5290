"""Attention of a rank that has some of the tokens, over keys and values of all.

In: queries of its share, keys and values of every share. Out: what attention gives for its share. Keys and values are
gathered whole: with grouped heads they are a small part of a layer's activations, and one collective for all of them
hides nothing less than a ring of many would (Llama 3, arXiv:2407.21783, section 3.3.2).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from rlinf.models.language.kernels.varlen import Kernel
from rlinf.models.language.parallel.collectives import gathered
from rlinf.models.language.parallel.tokens import Pieces


class Scores(Protocol):
    """What becomes of the products of queries and keys, see `packed_attention`."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None) -> Tensor: ...


class Rule(Protocol):
    """Who sees whom, see `packed_attention.Rule`."""

    def within(self, length: int, device: torch.device) -> Tensor | None: ...


def all_keys(key: Tensor, value: Tensor, pieces: Pieces) -> tuple[Tensor, Tensor]:
    """Keys and values of all shares one behind another, [all tokens, key heads, size] each; a collective."""
    if pieces.group is None:
        return key, value
    if key.shape == value.shape:
        both = gathered(torch.stack([key, value], dim=1), pieces.group)
        return both[:, 0], both[:, 1]
    return gathered(key, pieces.group), gathered(value, pieces.group)


def of_pieces(query: Tensor, key: Tensor, value: Tensor, pieces: Pieces, scores: Scores, rule: Rule) -> Tensor:
    """Attention of every piece, one after the other, [tokens of the share, heads, value size].

    Args:
        query: of the share, [tokens, heads, size].
        key, value: of all shares, see `all_keys`.
        pieces: who sees whom.
        scores, rule: as for all attention.
    """
    asked, seen = query.index_select(0, pieces.queries), [each.index_select(0, pieces.keys) for each in (key, value)]
    sizes, lengths = [size for size, _ in pieces.lengths], [end for _, end in pieces.lengths]
    done = []
    for part, keys, values in zip(asked.split(sizes), *(each.split(lengths) for each in seen), strict=True):
        size, end = len(part), len(keys)
        visible = rule.within(end, query.device)
        if visible is None:
            visible = torch.ones(size, end, dtype=torch.bool, device=query.device).tril(end - size)
        rows = [each.transpose(0, 1)[None] for each in (part, keys, values)]
        done.append(scores.attend(rows[0], rows[1], rows[2], visible[-size:])[0].transpose(0, 1))
    return _restored(done, query, key, value, pieces)


def by_kernel(
    kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, pieces: Pieces, scale: float, left: int
) -> Tensor:
    """The same by a kernel, which lets the last token of a piece see the last of its keys; arguments as there."""
    if not pieces.lengths:
        return _restored([], query, key, value, pieces)
    attended = kernel.attend(
        query.index_select(0, pieces.queries),
        key.index_select(0, pieces.keys),
        value.index_select(0, pieces.keys),
        (pieces.query_bounds, pieces.key_bounds),
        (max(size for size, _ in pieces.lengths), max(end for _, end in pieces.lengths)),
        scale,
        left,
    )
    return _restored([attended], query, key, value, pieces)


def _restored(done: list[Tensor], query: Tensor, key: Tensor, value: Tensor, pieces: Pieces) -> Tensor:
    """In the order of the share; padding gets 0. Of a share of padding alone, what it depends on still gets a gradient,
    for which other ranks wait."""
    nothing = query.new_zeros(1, query.shape[1], value.shape[2])
    if not done:
        nothing = nothing + 0.0 * (query[:1].sum() + key[:1].sum() + value[:1].sum())
    return torch.cat([*done, nothing]).index_select(0, pieces.restore)
