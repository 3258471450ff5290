"""Which tokens belong to one sequence: rows of a rectangle, or ids beside packed tokens.

A sequence lies whole in one micro-batch, so sums over sequences add over micro-batches and ranks like sums over tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from rlinf.algos.tensor.masks import Kept
from rlinf.algos.validation import same_shape

_COUNTED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Of ids on accelerators, how many sequences they tell apart; beside the tensor, which losses of any origin hand on."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """Sums within sequences, and back."""

    ids: Tensor | None
    """Sequence of each token, int64, in the tokens' shape; None: each row is one."""
    number: int
    """How many sequences there are, those without a token that counts included."""

    def sum(self, x: Tensor) -> Tensor:
        """Sum of `x`, [rows, tokens] or the shape of `ids`, within each sequence, [sequences]."""
        if self.ids is None:
            return x.sum(1)
        # float64, since a sum of thousands one after the other would lose digits, other ones for other packings
        gathered = torch.zeros(self.number, dtype=torch.float64, device=x.device)
        return gathered.index_add_(0, self.ids.flatten(), x.flatten().double()).to(x.dtype)

    def lengths(self, kept: Kept) -> Tensor:
        """Tokens that count in each sequence, [sequences]."""
        if kept.number is not None:
            return self.sum(kept.number)
        if self.ids is not None:
            return torch.bincount(self.ids.flatten(), minlength=self.number).to(kept.dtype)
        return torch.full((self.number,), kept.mask.shape[1], dtype=kept.dtype, device=kept.mask.device)

    def spread(self, x: Tensor) -> Tensor:
        """`x`, [sequences], for each token: broadcastable to the tokens' shape."""
        return x[:, None] if self.ids is None else x.index_select(0, self.ids.flatten()).view(self.ids.shape)


def counted(ids: Tensor, number: int) -> Tensor:
    """The ids, of which it is known that they are from 0 to below `number`, so that no device is asked for the largest.

    Args:
        ids: int64.
        number: how many sequences there are.
    """
    if ids.device.type != "cpu":
        _COUNTED[ids] = number
    return ids


def sequences_in(where: str, like: Tensor, ids: Tensor | None) -> Sequences:
    """The sequences of tokens laid out as `like`.

    Args:
        where: function to name in errors.
        like: [rows, tokens], or packed [tokens].
        ids: in the shape of `like`, whole numbers from 0; None: each row is a sequence.

    Raises:
        ValueError: packed tokens without ids, or ids that are not whole numbers from 0 in that shape.
    """
    if ids is None:
        if like.ndim != 2:
            raise ValueError(
                f"{where}: tokens {list(like.shape)} are packed, so `sequences` must say which sequence each belongs "
                "to: whole numbers in the same shape (sequences.ids_of_lengths makes them)"
            )
        return Sequences(None, like.shape[0])
    same_shape(where, "the tokens", like, sequences=ids)
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"{where}: sequences must be whole numbers from 0, not {ids.dtype}")
    if ids.device.type != "cpu" and (known := _COUNTED.get(ids)) is not None:
        return Sequences(ids, known)
    if ids.numel() == 0:
        return Sequences(ids.long(), 0)
    lowest, highest = ids.aminmax()
    if int(lowest) < 0:
        raise ValueError(f"{where}: sequences must be whole numbers from 0, found {int(lowest)}")
    return Sequences(ids.long(), int(highest) + 1)


def ids_of_lengths(lengths: Sequence[int] | Tensor) -> Tensor:
    """The sequence of each token when sequences of these lengths lie one after the other, int64 [tokens]."""
    lengths = torch.as_tensor(lengths)
    return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
