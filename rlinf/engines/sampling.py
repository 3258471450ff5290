"""Choosing tokens: logits in, tokens and their log-probs out.

Random choices come from a counter-based generator: the number for token t of a request is a function of (seed, t)
alone. So a request gives the same answer whatever shares its batch, and one number per row is enough.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf.data.seeds import GAMMA


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


_GAMMA = _signed(GAMMA)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def uniforms(seeds: Tensor, position: int) -> Tensor:
    """Random numbers in [0, 1), one per row.

    Output number `position` of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014, figure 19) started from each seed: its
    state only counts, so any output can be had without those before it.

    Args:
        seeds: int64 [rows].
        position: which output, from 0.

    Returns:
        float64 [rows], multiples of 2^-53.
    """
    z = seeds + _signed((GAMMA * (position + 1)) & ((1 << 64) - 1))
    z = (z ^ _shift(z, 30)) * _FIRST
    z = (z ^ _shift(z, 27)) * _SECOND
    z = z ^ _shift(z, 31)
    return _shift(z, 11).double() * 2.0**-53


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift: int64 shifts copy the sign bit in, so it is masked away."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def choose(logits: Tensor, temperatures: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token per row from softmax(logits / temperature), or take the likeliest where temperature is 0.

    Args:
        logits: [rows, vocabulary].
        temperatures: float32 [rows].
        uniform: random numbers in [0, 1), float64 [rows].

    Returns:
        Tokens, int64 [rows], and their log-probs, nats, float32 [rows]; at temperature 0 those of softmax(logits).
    """
    greedy = temperatures == 0
    logprobs = torch.log_softmax(logits.float() / torch.where(greedy, 1.0, temperatures)[:, None], dim=-1)
    # float64: in a float32 running sum, tokens below about 6e-8 vanish, and together they can be likely.
    cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    # right=True takes the first entry above the target, so never a token of probability 0; the product is below the
    # last entry except by rounding, where a token of the tail is as good as any.
    target = (uniform * cumulative[:, -1])[:, None]
    tokens = torch.searchsorted(cumulative, target, right=True).clamp(max=logits.shape[-1] - 1).squeeze(1)
    tokens = torch.where(greedy, logits.argmax(dim=-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1)
