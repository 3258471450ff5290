"""Gemma's layers as pi0 and pi0.5 need them: keys and values are returned instead of cached, norms may be conditioned.

    prefix (pictures, words) ─▶ Gemma-2B  ─▶ keys and values of every layer ─┐
    suffix (state, actions)  ─▶ the expert, a smaller Gemma, whose attention reads both, layer by layer

The prefix never looks at the suffix, so its keys and values are computed once for all denoising steps. Parts are those
of transformers, and module names those of openpi's checkpoints. In pi0.5 the expert's norms are conditioned on time.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GemmaConfig
from transformers.models.gemma.modeling_gemma import (
    GemmaMLP,
    GemmaRMSNorm,
    GemmaRotaryEmbedding,
    apply_rotary_pos_emb,
)

Cache: TypeAlias = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, [N, kv heads, places, head_dim] each."""


class AdaptiveNorm(nn.Module):
    """RMS norm whose scale and shift, and a gate for what follows, are made of a condition.

        y = x / rms(x) (1 + scale) + shift        scale, shift, gate = dense(condition)

    With a condition that dense maps to 0 it is the ordinary norm, with a gate of 0 (arXiv:2504.16054, section IV-E;
    after adaptive norms of arXiv:2212.09748).
    """

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.dense = nn.Linear(width, 3 * width)
        nn.init.zeros_(self.dense.weight)
        nn.init.zeros_(self.dense.bias)
        self.eps = eps

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """The normed [N, S, width] in the dtype of `x`, and the gate [N, 1, width]; condition [N, width]."""
        made = self.dense(condition.to(self.dense.weight.dtype))[:, None]
        scale, shift, gate = made.float().chunk(3, -1)
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + scale) + shift).to(x.dtype), gate.to(x.dtype)


class Attention(nn.Module):
    """Attention over given places and the layer's own."""

    def __init__(self, config: GemmaConfig):
        super().__init__()
        width, self.head_dim = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(width, heads, bias=False)
        self.k_proj = nn.Linear(width, kv_heads, bias=False)
        self.v_proj = nn.Linear(width, kv_heads, bias=False)
        self.o_proj = nn.Linear(heads, width, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, before: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Layer`; the result is before the residual."""
        q, k, v = (
            each(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        if before is not None:
            k, v = torch.cat([before[0], k], 2), torch.cat([before[1], v], 2)
        found = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.o_proj(found.transpose(1, 2).flatten(2)), k, v


class Layer(nn.Module):
    """One layer, ordinary or conditioned."""

    def __init__(self, config: GemmaConfig, adaptive: bool):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = GemmaMLP(config)
        self.input_layernorm = _norm(config, adaptive)
        self.post_attention_layernorm = _norm(config, adaptive)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor,
        keys: Tensor | None = None,
        values: Tensor | None = None,
        condition: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states, and keys and values of all places, those given first.

        Args:
            x: [N, S, width].
            cos, sin: of the places' positions, [N, S, head_dim].
            mask: which place looks at which, bool [N, 1, S, P + S].
            keys, values: of P places before, [N, kv heads, P, head_dim]; None for none.
            condition: of adaptive norms, [N, width].
        """
        # looked up here, since FSDP2 has parameters in what is computed in within a layer's own call only
        dtype = next(self.mlp.parameters()).dtype
        x, cos, sin = x.to(dtype), cos.to(dtype), sin.to(dtype)
        before = None if keys is None or values is None else (keys, values)
        seen, gate = _normed(self.input_layernorm, x, condition)
        found, k, v = self.self_attn(seen, cos, sin, mask, before)
        x = x + (found if gate is None else found * gate)
        seen, gate = _normed(self.post_attention_layernorm, x, condition)
        found = self.mlp(seen)
        return x + (found if gate is None else found * gate), k, v


class Gemma(nn.Module):
    """A stack of layers without words: embeddings in, hidden states out.

    Args:
        config: sizes.
        adaptive: norms are conditioned.
    """

    def __init__(self, config: GemmaConfig, *, adaptive: bool = False):
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Layer(config, adaptive) for _ in range(config.num_hidden_layers))
        self.norm = _norm(config, adaptive)
        self.rotary_emb = GemmaRotaryEmbedding(config)

    def forward(
        self,
        x: Tensor,
        mask: Tensor,
        positions: Tensor,
        before: Cache | None = None,
        condition: Tensor | None = None,
    ) -> tuple[Tensor, Cache]:
        """Hidden states after the last norm, and keys and values of this stack's own and all given places.

        Args:
            x: embeddings, [N, S, width], in any float dtype; computed in that of the weights.
            mask: which place looks at which, bool [N, S, P + S]; each looks at one at least.
            positions: int64 [N, S].
            before: keys and values of P places before; None for none.
            condition: of adaptive norms, [N, width].
        """
        cos, sin = self.rotary_emb(x, positions)
        cache: Cache = []
        for number, layer in enumerate(self.layers):
            keys, values = (None, None) if before is None else before[number]
            x, keys, values = layer(x, cos, sin, mask[:, None], keys, values, condition)
            cache.append((keys, values))
        return _normed(self.norm, x, condition)[0], cache


def _norm(config: GemmaConfig, adaptive: bool) -> nn.Module:
    width, eps = config.hidden_size, config.rms_norm_eps
    return AdaptiveNorm(width, eps) if adaptive else GemmaRMSNorm(width, eps)


def _normed(norm: nn.Module, x: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if isinstance(norm, AdaptiveNorm):
        y, gate = norm(x, condition)
        return y, gate
    return norm(x), None
