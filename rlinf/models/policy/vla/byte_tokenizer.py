"""Instructions as tokens, without a tokenizer's files: one token per byte.

Enough for a small policy that tells a handful of tasks apart; a policy that starts from a language model brings that
model's tokenizer in this place.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

PAD, END = 0, 1
_FIRST_BYTE = 2


class ByteTexts:
    """Texts as rows of equal length, padded on the left, so that what follows stands next to the last word.

    Args:
        length: tokens in a row, the END token behind every text included.
    """

    size = _FIRST_BYTE + 256
    """Of this vocabulary."""

    def __init__(self, length: int):
        if length < 1:
            raise ValueError(f"policy vla: text_length={length} must be at least 1, for the token behind the text")
        self.length = length
        self._row = lru_cache(maxsize=4096)(self._encoded)  # environments say the same again at every step

    def encode(self, texts: Sequence[str]) -> Tensor:
        """Tokens of texts, int64 [N, length].

        Raises:
            ValueError: a text is too long; the text says which.
        """
        return torch.tensor([self._row(text) for text in texts], dtype=torch.int64).view(len(texts), self.length)

    def _encoded(self, text: str) -> tuple[int, ...]:
        tokens = [_FIRST_BYTE + byte for byte in text.encode()] + [END]
        if len(tokens) > self.length:
            raise ValueError(
                f"policy vla: text_length={self.length} is too short for {text!r}, which needs {len(tokens)}"
            )
        return (*[PAD] * (self.length - len(tokens)), *tokens)
