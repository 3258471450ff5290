"""Actions as words: each number of an action is one of the last tokens of the vocabulary.

As OpenVLA does it (arXiv:2406.09246, section 3.2, and its released tokenizer), so that weights made there keep their
meaning. With B bins, edges are B numbers spread evenly from -1 to 1; a number between edges d - 1 and d (from 0) is
token V - d of a vocabulary of V, so a larger number is an earlier token; and a token says the middle of its bin. Of the
B tokens the first stands for exactly 1, and says the same as the second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rlinf.models.policy.layers import Exact

if TYPE_CHECKING:
    from transformers import Cache


class ActionTokens(Exact):
    """Between numbers in [-1, 1] and tokens, in both directions.

    Args:
        vocabulary: V, tokens in all, the bins included.
        bins: B, at least 2.
    """

    edges: Tensor
    middles: Tensor

    def __init__(self, vocabulary: int, bins: int):
        super().__init__()
        if not 2 <= bins <= vocabulary:
            raise ValueError(f"policy vla: bins={bins} must be from 2 to the size of the vocabulary, {vocabulary}")
        self.vocabulary, self.bins = vocabulary, bins
        self.first = vocabulary - bins
        """The first token that is a bin."""
        edges = torch.linspace(-1.0, 1.0, bins, dtype=torch.float64)
        # Not saved: they follow from the configuration.
        self.register_buffer("edges", edges, persistent=False)
        self.register_buffer("middles", (edges[1:] + edges[:-1]) / 2, persistent=False)

    def encode(self, actions: Tensor) -> Tensor:
        """Tokens of numbers; what lies outside [-1, 1] is cut to it. int64 in the shape of `actions`."""
        return self.vocabulary - torch.bucketize(actions.double().clamp(-1.0, 1.0), self.edges, right=True)

    def decode(self, tokens: Tensor) -> Tensor:
        """The middles of tokens' bins, float32 in the shape of `tokens`."""
        return self.middles[(self.vocabulary - tokens - 1).clamp(0, self.bins - 2)].float()


def hidden_states(
    decoder: nn.Module, embedded: Tensor, seen: Tensor, *, mask: Tensor | None = None, cache: Cache | None = None
) -> Tensor:
    """What a decoder of transformers makes of the last places of a sequence, [N, T, width].

    Args:
        decoder: without output embedding.
        embedded: [N, T, width], the last T of all S places.
        seen: which of all places are read, bool or int64 [N, S]; positions count these alone.
        mask: of the attention, as the decoder takes it, where places read others than those before them.
        cache: keys and values of the places before.
    """
    found: Tensor = decoder(
        inputs_embeds=embedded,
        attention_mask=seen.long() if mask is None else mask,
        position_ids=(seen.cumsum(1) - 1).clamp(min=0)[:, -embedded.shape[1] :],
        past_key_values=cache,
        use_cache=cache is not None,
    ).last_hidden_state
    return found


def picked_by(logprobs: Tensor, noise: Tensor) -> Tensor:
    """One of the bins each, by inverting the distribution function: the first whose cumulated probability exceeds u.

    Args:
        logprobs: [..., bins].
        noise: u in [0, 1), float64 [...].

    Returns:
        int64 [...]; never a bin of probability 0, since that adds nothing to the sum.
    """
    cumulated = logprobs.double().exp().cumsum(-1)
    below = cumulated <= noise[..., None] * cumulated[..., -1:]
    return below.sum(-1).clamp(max=logprobs.shape[-1] - 1)
