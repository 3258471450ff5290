"""Instructions as the tokens that OpenVLA was trained to read, by the tokenizer of a checkpoint.

In: texts. Out: rows of equal length, the first token in front, then padding, then the rest, so that pictures fit in
behind the first token and actions follow the last one. The last is always the lone space that Llama's tokenizer makes
of the one at the prompt's end (arXiv:2406.09246, released code).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from tokenizers import Tokenizer
from torch import Tensor

BOS, SPACE = 1, 29871
"""Llama's tokens that every prompt begins and ends with."""


class Prompts:
    """Instructions to tokens.

    Args:
        tokenizer: the contents of a checkpoint's tokenizer.json.
        template: text with {instruction}.
        length: tokens in a row, the first one included.
        pad: token of padding.
    """

    def __init__(self, tokenizer: bytes, template: str, length: int, pad: int):
        self._tokenizer = Tokenizer.from_buffer(tokenizer)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.template, self.length, self.pad = template, length, pad
        self._row = lru_cache(maxsize=4096)(self._encoded)  # environments say the same again at every step

    def encode(self, instructions: Sequence[str]) -> Tensor:
        """Tokens of instructions, int64 [N, length].

        Raises:
            ValueError: one is too long; the text says which.
        """
        rows = [self._row(text) for text in instructions]
        return torch.tensor(rows, dtype=torch.int64).view(len(rows), self.length)

    def _encoded(self, instruction: str) -> tuple[int, ...]:
        text = self.template.format(instruction=instruction.lower())
        tokens = self._tokenizer.encode(text, add_special_tokens=False).ids
        if tokens[-1:] != [SPACE]:  # of a tokenizer that drops spaces at the end
            tokens = [*tokens, SPACE]
        if len(tokens) >= self.length:
            raise ValueError(
                f"policy openvla: prompt_length={self.length} is too short for {text!r}, which needs {len(tokens) + 1}"
            )
        return (BOS, *[self.pad] * (self.length - 1 - len(tokens)), *tokens)
