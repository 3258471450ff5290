"""GR00T's own transformers: a diffusion transformer (DiT) over state and action tokens, and self-attention over what
the vision-language model says. Names and shapes are those of the published tensors.

In: tokens, and the time as a bucket. Out: tokens. Blocks differ in their first norm alone: in the DiT its scale and
offset follow from the time, and it has no weights of its own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

_CHANNELS = 256
"""Sines and cosines of a time."""
_LONGEST = 10_000.0
"""What the frequencies of those go down to, 1 / 10,000."""


class Attention(nn.Module):
    """Attention with as many keys as queries have heads, onto itself or onto other tokens.

    Args:
        width: of the tokens that ask, and of the result.
        heads, head_dim: their product need not be `width`.
        context: width of the tokens that are attended to.
    """

    def __init__(self, width: int, heads: int, head_dim: int, context: int):
        super().__init__()
        inner = heads * head_dim
        self.heads = heads
        self.to_q = nn.Linear(width, inner)
        self.to_k = nn.Linear(context, inner)
        self.to_v = nn.Linear(context, inner)
        self.to_out = nn.ModuleList([nn.Linear(inner, width)])

    def forward(self, tokens: Tensor, context: Tensor) -> Tensor:
        """Tokens [N, S, width] after looking at context [N, L, context]."""
        q, k, v = self._by_head(self.to_q(tokens)), self._by_head(self.to_k(context)), self._by_head(self.to_v(context))
        found = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        out: Tensor = self.to_out[0](found)
        return out

    def _by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Gelu(nn.Module):
    """A linear layer and GELU, by its tanh approximation."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.proj = nn.Linear(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        """[N, S, inner] of [N, S, width]."""
        return functional.gelu(self.proj(x), approximate="tanh")


class FeedForward(nn.Module):
    """Two layers, the inner one four times as wide."""

    def __init__(self, width: int):
        super().__init__()
        # the authors' second entry is dropout, which has no tensors; policies that learn by acting have none
        self.net = nn.ModuleList([Gelu(width, 4 * width), nn.Identity(), nn.Linear(4 * width, width)])

    def forward(self, x: Tensor) -> Tensor:
        """[N, S, width] of the same."""
        out: Tensor = self.net[2](self.net[0](x))
        return out


class TimedNorm(nn.Module):
    """Layer norm whose scale and offset follow from the time: norm(x) (1 + scale) + offset."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """[N, S, width] of the same, and of an embedded time [N, width]."""
        scale, offset = self.linear(functional.silu(time))[:, None].chunk(2, -1)
        return functional.layer_norm(x, x.shape[-1:]) * (1 + scale) + offset


class Block(nn.Module):
    """Attention and two layers, each after a norm and beside a residual connection.

    Args:
        heads, head_dim: their product is the width.
        context: width of what is attended to; None for the tokens themselves.
        timed: the norms follow the time, or nothing (the second one); else both have weights.
    """

    def __init__(self, heads: int, head_dim: int, context: int | None, timed: bool):
        super().__init__()
        width = heads * head_dim
        self.norm1: nn.Module = TimedNorm(width) if timed else nn.LayerNorm(width)
        self.attn1 = Attention(width, heads, head_dim, context or width)
        self.norm3 = nn.LayerNorm(width, elementwise_affine=not timed)
        self.ff = FeedForward(width)

    def forward(self, tokens: Tensor, context: Tensor | None = None, time: Tensor | None = None) -> Tensor:
        """Tokens [N, S, width]; context [N, L, context] or None for themselves; embedded time [N, width]."""
        seen = self.norm1(tokens) if time is None else self.norm1(tokens, time)
        tokens = tokens + self.attn1(seen, seen if context is None else context)
        out: Tensor = tokens + self.ff(self.norm3(tokens))
        return out


class TimeEmbedder(nn.Module):
    """Two layers on sines and cosines of a time."""

    def __init__(self, width: int):
        super().__init__()
        self.linear_1 = nn.Linear(_CHANNELS, width)
        self.linear_2 = nn.Linear(width, width)

    def forward(self, waves: Tensor) -> Tensor:
        """[N, width] of [N, 256]."""
        out: Tensor = self.linear_2(functional.silu(self.linear_1(waves)))
        return out


class TimeEncoder(nn.Module):
    """The bucket of a time, embedded."""

    def __init__(self, width: int):
        super().__init__()
        self.timestep_embedder = TimeEmbedder(width)

    def forward(self, bucket: Tensor) -> Tensor:
        """[N, width] of int64 [N]: cos, then sin, of bucket / 10,000^(i / 127) for i from 0 to 127, in layers."""
        half = _CHANNELS // 2
        exponent = torch.arange(half, device=bucket.device, dtype=torch.float32) / (half - 1)
        angles = bucket.float()[:, None] * torch.exp(-math.log(_LONGEST) * exponent)
        waves = torch.cat([angles.cos(), angles.sin()], -1)
        out: Tensor = self.timestep_embedder(waves.to(self.timestep_embedder.linear_1.weight.dtype))
        return out


class DiffusionTransformer(nn.Module):
    """Blocks that look at the context and at their own tokens by turns, told the time.

    Args:
        layers: blocks; those with even numbers look at the context.
        heads, head_dim: their product is the width of the tokens.
        context: width of the context.
        outputs: width of the result.
    """

    def __init__(self, *, layers: int, heads: int, head_dim: int, context: int, outputs: int):
        super().__init__()
        width = heads * head_dim
        self.timestep_encoder = TimeEncoder(width)
        self.transformer_blocks = nn.ModuleList(
            [Block(heads, head_dim, context if number % 2 == 0 else None, timed=True) for number in range(layers)]
        )
        self.proj_out_1 = nn.Linear(width, 2 * width)
        self.proj_out_2 = nn.Linear(width, outputs)

    def forward(self, tokens: Tensor, context: Tensor, bucket: Tensor) -> Tensor:
        """[N, S, outputs] of tokens [N, S, width], context [N, L, context] and bucket int64 [N]."""
        time = self.timestep_encoder(bucket)
        for number, block in enumerate(self.transformer_blocks):
            tokens = block(tokens, context if number % 2 == 0 else None, time)
        offset, scale = self.proj_out_1(functional.silu(time))[:, None].chunk(2, -1)  # here the offset comes first
        normed = functional.layer_norm(tokens, tokens.shape[-1:], eps=1e-6)
        out: Tensor = self.proj_out_2(normed * (1 + scale) + offset)
        return out


class SelfAttention(nn.Module):
    """Blocks over the vision-language model's tokens.

    Args:
        layers, heads, head_dim: see `DiffusionTransformer`.
    """

    def __init__(self, *, layers: int, heads: int, head_dim: int):
        super().__init__()
        self.transformer_blocks = nn.ModuleList([Block(heads, head_dim, None, timed=False) for _ in range(layers)])

    def forward(self, tokens: Tensor) -> Tensor:
        """[N, L, width] of the same."""
        for block in self.transformer_blocks:
            tokens = block(tokens)
        return tokens
