"""Many token sequences as the few rectangular tensors that a model reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from rlinf.data.sample import Sample

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Prompts with their responses, padded on the right: what is real never sees the padding behind it."""

    input_ids: Tensor
    """int64 [rows, tokens]"""
    mask: Tensor
    """Whether the token after this one belongs to the response, bool [rows, tokens - 1]."""

    @property
    def targets(self) -> Tensor:
        """The token after each, int64 [rows, tokens - 1]."""
        return self.input_ids[:, 1:]


@dataclass(frozen=True, slots=True, eq=False)
class PolicyBatch:
    """Samples to learn from; everything per token lies where the token is predicted."""

    tokens: Tokens
    """Prompts and responses."""
    old_logprobs: Tensor
    """Of the policy that sampled, nats, float32 [rows, tokens - 1]; 0 outside the mask."""
    advantages: Tensor
    """Of each sample, float32 [rows]."""
    temperature: Tensor
    """At which each was sampled, float32 [rows]."""


def pad(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> Tokens:
    """Lay out (prompt ids, response ids) pairs, at least one, as one rectangle."""
    longest = max(len(prompt) + len(response) for prompt, response in pairs)
    ids = np.zeros((len(pairs), longest), dtype=np.int64)
    mask = np.zeros((len(pairs), longest - 1), dtype=bool)
    for row, (prompt, response) in enumerate(pairs):
        start, end = len(prompt), len(prompt) + len(response)
        ids[row, :start] = prompt
        ids[row, start:end] = response
        mask[row, start - 1 : end - 1] = True
    return Tokens(torch.from_numpy(ids), torch.from_numpy(mask))


def policy_batch(samples: Sequence[Sample], advantages: Sequence[float]) -> PolicyBatch:
    """Samples, at least one, with the advantage of each.

    Greedy samples count as drawn at temperature 1, which is what their log-probs say.
    """
    tokens = pad([(sample.prompt.token_ids, sample.response_ids) for sample in samples])
    old = np.zeros(tuple(tokens.mask.shape), dtype=np.float32)
    for row, sample in enumerate(samples):
        start = len(sample.prompt.token_ids) - 1
        old[row, start : start + len(sample.logprobs)] = sample.logprobs
    temperature = torch.tensor([sample.temperature or 1.0 for sample in samples])
    return PolicyBatch(tokens, torch.from_numpy(old), torch.tensor(advantages, dtype=torch.float32), temperature)


def cut(items: Sequence[T], sizes: Sequence[int], budget: int) -> Iterator[list[T]]:
    """Cut a sequence, in order, into pieces of at most `budget` in size; a larger item stands alone.

    Args:
        items: what to cut.
        sizes: size of each, in tokens.
        budget: of a piece, in tokens.
    """
    piece: list[T] = []
    held = 0
    for item, size in zip(items, sizes, strict=True):
        if piece and held + size > budget:
            yield piece
            piece, held = [], 0
        piece.append(item)
        held += size
    if piece:
        yield piece
