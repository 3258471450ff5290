"""Texts of uneven length as few rectangles with little padding, for reading them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

_TOKENS = 8192
"""Tokens read at once, padding included: bounds the memory it takes."""
_PADDING = 256
"""Padded tokens that cost less than reading some texts apart from the others."""

Reader = TypeVar("Reader", bound=tuple[np.ndarray, Any])


def rectangles(texts: Sequence[Reader]) -> Iterator[list[Reader]]:
    """Cut texts, longest first, into runs to be read together.

    Args:
        texts: tuples that begin with token ids, int64 [tokens].

    Yields:
        Runs with at most an eighth of padding, or so little that it does not matter, and at most `_TOKENS` tokens
        unless a single text has more.
    """
    run: list[Reader] = []
    padding = 0
    for text in texts:
        if run:
            longest, own = len(run[0][0]), len(text[0])
            area = longest * (len(run) + 1)
            wasted = padding + longest - own
            if area > _TOKENS or wasted > max(_PADDING, area // 8):
                yield run
                run, padding = [], 0
            else:
                padding = wasted
        run.append(text)
    if run:
        yield run


def pad_left(texts: Sequence[np.ndarray], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Token ids of texts, longest first, int64 [rows, longest], and which of them are real; None if all are."""
    longest = len(texts[0])
    ids = np.zeros((len(texts), longest), dtype=np.int64)
    for row, text in enumerate(texts):
        ids[row, longest - len(text) :] = text
    starts = longest - np.array([len(text) for text in texts])
    real = torch.from_numpy(np.arange(longest) >= starts[:, None]).to(device) if starts.any() else None
    return torch.from_numpy(ids).to(device), real
