"""Gemma's layers and PaliGemma with its action expert, as pi0 and pi0.5 need them.

    prefix (pictures, words) ─▶ Gemma-2B  ─▶ keys and values of every layer ─┐
    suffix (state, actions)  ─▶ the expert, a smaller Gemma, whose attention reads both, layer by layer

The prefix never looks at the suffix, so its keys and values are computed once for all denoising steps: they are
returned instead of cached. Parts are those of transformers. In pi0.5 the expert's norms are conditioned on time.

Module names are those of openpi's checkpoints, so that their tensors are read as they are:

    paligemma_with_expert.paligemma.model.{vision_tower.vision_model, multi_modal_projector.linear, language_model}
    paligemma_with_expert.paligemma.lm_head       the words' embedding: checkpoints have it under this name alone
    paligemma_with_expert.gemma_expert.model
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GemmaConfig, SiglipVisionConfig, SiglipVisionModel
from transformers.models.gemma.modeling_gemma import GemmaMLP, GemmaRMSNorm, GemmaRotaryEmbedding, apply_rotary_pos_emb

from rlinf.models.policy.robots import HALF, normalised

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
        scales = self.dense(condition.to(self.dense.weight.dtype))[:, None]
        scale, shift, gate = scales.float().chunk(3, -1)
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
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.o_proj(attended.transpose(1, 2).flatten(2)), k, v


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
        normed, gate = _normed(self.input_layernorm, x, condition)
        output, k, v = self.self_attn(normed, cos, sin, mask, before)
        x = x + (output if gate is None else output * gate)
        normed, gate = _normed(self.post_attention_layernorm, x, condition)
        output = self.mlp(normed)
        return x + (output if gate is None else output * gate), k, v


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


VISION: Mapping[str, Any] = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 14,
}
"""SigLIP so400m/14."""
LANGUAGE: Mapping[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 18,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 257152,
}
"""Gemma-2B as PaliGemma has it."""
EXPERT: Mapping[str, Any] = {**LANGUAGE, "hidden_size": 1024, "intermediate_size": 4096}
"""Gemma-300M."""


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """Encoded pictures and words, for all denoising steps."""

    cache: Cache
    """Keys and values of its P places, layer by layer."""
    mask: Tensor
    """Which places are to be looked at, bool [N, P]; the others pad."""
    hidden: Tensor
    """Outputs of the language model, [N, P, width]."""


class PaliGemma(nn.Module):
    """Pictures and words in, keys and values out."""

    def __init__(self, vision: Mapping[str, Any], language: Mapping[str, Any]):
        super().__init__()
        sizes = SiglipVisionConfig(**{**VISION, **vision}, vision_use_head=False)
        words = GemmaConfig(**{**LANGUAGE, **language})
        self.model = nn.Module()
        self.model.vision_tower = nn.Module()
        sizes._attn_implementation = "sdpa"
        self.model.vision_tower.vision_model = SiglipVisionModel(sizes)
        self.model.multi_modal_projector = nn.Module()
        self.model.multi_modal_projector.linear = nn.Linear(sizes.hidden_size, words.hidden_size)
        self.model.language_model = Gemma(words)
        self.lm_head = nn.Linear(words.hidden_size, words.vocab_size, bias=False)
        nn.init.normal_(self.lm_head.weight, std=0.02)

    def forward(self, pictures: Tensor, text: Tensor) -> Prefix:
        """Encode pictures and text; all places see all places, as prefixes do (blocks of arXiv:2410.24164).

        Args:
            pictures: uint8 [N, k, 3, side, side], or floats on the encoder's scale; cameras that are missing are left
                out, which is the same as zeros that nobody looks at.
            text: tokens, int64 [N, L], padded with 0 on the right.
        """
        width = self.lm_head.weight.shape[1]
        pixels = pictures.flatten(0, 1)
        pixels = pixels if pixels.is_floating_point() else normalised(pixels, HALF, HALF)
        patches = self._patches(pixels).view(len(text), -1, width)
        words = self.embedded(text)  # pictures are not scaled
        real = functional.pad(text != 0, (patches.shape[1], 0), value=True)
        x = torch.cat([patches.to(words.dtype), words], 1)
        mask = real[:, None, :].expand(-1, x.shape[1], -1)
        hidden, cache = self.model.language_model(x, mask, real.long().cumsum(1) - 1)  # type: ignore[operator]
        return Prefix(cache, real, hidden)

    def embedded(self, tokens: Tensor) -> Tensor:
        """Tokens as the language model reads them, [..., width]."""
        words = functional.embedding(tokens, self.lm_head.weight)
        return words * words.shape[-1] ** 0.5

    def _patches(self, pixels: Tensor) -> Tensor:
        """Projected features of pictures, [M, patches, width]; embeddings may be in another dtype than layers."""
        parts: Any = self.model
        vision, linear = parts.vision_tower.vision_model, parts.multi_modal_projector.linear
        x = vision.embeddings(pixels).to(linear.weight.dtype)
        patches: Tensor = linear(vision.post_layernorm(vision.encoder(inputs_embeds=x).last_hidden_state))
        return patches


class Expert(nn.Module):
    """The stack that denoises; a module of its own for the names of checkpoints."""

    def __init__(self, expert: Mapping[str, Any], *, adaptive: bool):
        super().__init__()
        self.model = Gemma(GemmaConfig(**{**EXPERT, **expert}), adaptive=adaptive)

    def forward(self, x: Tensor, prefix: Prefix, mask: Tensor, condition: Tensor | None = None) -> Tensor:
        """Hidden states of a suffix, [N, S, width] in float32.

        Args:
            x: its embeddings, [N, S, width].
            prefix: what stands before it; all of the suffix looks at all of that.
            mask: which place of the suffix looks at which, bool [S, S].
            condition: of adaptive norms, [N, width].
        """
        rows, places = len(x), x.shape[1]
        before = prefix.mask[:, None, :].expand(-1, places, -1)
        whole = torch.cat([before, mask.expand(rows, -1, -1)], 2)
        positions = prefix.mask.sum(1, keepdim=True) + torch.arange(places, device=x.device)
        hidden, _ = self.model(x, whole, positions, prefix.cache, condition)
        output: Tensor = hidden.float()
        return output
