"""PaliGemma and the action expert, with the module names of openpi's checkpoints, so that its tensors are read as is.

paligemma_with_expert.paligemma.model.{vision_tower.vision_model, multi_modal_projector.linear, language_model}
paligemma_with_expert.paligemma.lm_head       the words' embedding: checkpoints have it under this name alone
paligemma_with_expert.gemma_expert.model
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GemmaConfig, SiglipVisionConfig, SiglipVisionModel

from rlinf.models.policy.vla.embodiment.images import HALF, normalised
from rlinf.models.policy.vla.flow.gemma import Cache, Gemma

VISION: Mapping[str, Any] = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
    "image_size": 224, "patch_size": 14,
}  # fmt: skip
"""SigLIP so400m/14."""
LANGUAGE: Mapping[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18, "num_attention_heads": 8,
    "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 257152,
}  # fmt: skip
"""Gemma-2B as PaliGemma has it."""
EXPERT: Mapping[str, Any] = {**LANGUAGE, "hidden_size": 1024, "intermediate_size": 4096}
"""Gemma-300M."""


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """What was seen and read, for all denoising steps."""

    cache: Cache
    """Keys and values of its P places, layer by layer."""
    read: Tensor
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
        """What is looked at and read; all of it sees all of it, as prefixes do (blocks of arXiv:2410.24164).

        Args:
            pictures: uint8 [N, k, 3, side, side]; cameras that are missing are left out, which is the same as zeros
                that nobody looks at.
            text: tokens, int64 [N, L], padded with 0 on the right.
        """
        width = self.lm_head.weight.shape[1]
        patches = self._patches(normalised(pictures.flatten(0, 1), HALF, HALF)).view(len(text), -1, width)
        words = functional.embedding(text, self.lm_head.weight) * width**0.5  # pictures are not scaled
        read = functional.pad(text != 0, (patches.shape[1], 0), value=True)
        x = torch.cat([patches.to(words.dtype), words], 1)
        mask = read[:, None, :].expand(-1, x.shape[1], -1)
        hidden, cache = self.model.language_model(x, mask, read.long().cumsum(1) - 1)  # type: ignore[operator]
        return Prefix(cache, read, hidden)

    def _patches(self, pixels: Tensor) -> Tensor:
        """Projected features of pictures, [M, patches, width]; embeddings may be in another dtype than layers."""
        parts: Any = self.model
        vision, linear = parts.vision_tower.vision_model, parts.multi_modal_projector.linear
        x = vision.embeddings(pixels).to(linear.weight.dtype)
        found: Tensor = linear(vision.post_layernorm(vision.encoder(inputs_embeds=x).last_hidden_state))
        return found


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
        before = prefix.read[:, None, :].expand(-1, places, -1)
        whole = torch.cat([before, mask.expand(rows, -1, -1)], 2)
        positions = prefix.read.sum(1, keepdim=True) + torch.arange(places, device=x.device)
        hidden, _ = self.model(x, whole, positions, prefix.cache, condition)
        found: Tensor = hidden.float()
        return found
