"""GR00T's vision-language model, Eagle 2.5: SigLIP, one projection, and the first layers of Qwen3.

In: pictures and tokens in which some stand for a picture's patches. Out: hidden states of all tokens. Names below
`eagle_model` are those of the published tensors, but that transformers has no inner `vision_model` any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM, SiglipVisionConfig, SiglipVisionModel

_GIVEN = ("_attn_implementation", "attn_implementation", "model_type", "architectures", "torch_dtype", "dtype")


class Eagle(nn.Module):
    """Reads pictures and words.

    Args:
        config: the authors' configuration of Eagle: `vision_config`, `text_config`, `image_token_index`.
        layers: of the language model that are kept.
    """

    def __init__(self, config: Mapping[str, Any], layers: int):
        super().__init__()
        vision = {key: value for key, value in config["vision_config"].items() if key not in _GIVEN}
        words = {key: value for key, value in config["text_config"].items() if key not in _GIVEN}
        kinds = words.pop("layer_types", None)
        words["num_hidden_layers"] = layers
        if kinds:
            words["layer_types"] = kinds[:layers]
        chosen: dict[str, Any] = {"attn_implementation": "sdpa"}
        self.vision_model = SiglipVisionModel(SiglipVisionConfig(**vision, **chosen))
        self.language_model = Qwen3ForCausalLM(Qwen3Config(**words, **chosen))
        self.mlp1 = nn.Sequential(nn.Linear(vision["hidden_size"], words["hidden_size"]))
        self.picture = int(config["image_token_index"])
        """The token that stands for a patch."""
        self.side = int(vision["image_size"])
        """Pixels of a picture's height and width."""
        self.patches = (self.side // int(vision["patch_size"])) ** 2
        """Tokens of one picture."""

    def forward(self, pixels: Tensor, tokens: Tensor, seen: Tensor) -> Tensor:
        """Hidden states after the last norm, [N, L, width].

        Args:
            pixels: k pictures of each row, float [N, k, 3, H, W], on SigLIP's scale.
            tokens: int64 [N, L], k x `patches` of them `picture`.
            seen: which tokens are text and no padding, bool [N, L].
        """
        patches = self.vision_model(pixel_values=pixels.flatten(0, 1)).last_hidden_state
        embedded = self.language_model.get_input_embeddings()(tokens)
        here = tokens == self.picture
        embedded = embedded.masked_scatter(here[..., None], self.mlp1(patches).to(embedded.dtype))
        length = tokens.shape[1]
        earlier = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        # Padding sees nothing: its attention is 0, as where it is cut out. Other tokens do not look at it, but the
        # action head does, so what it becomes matters.
        mask = (earlier & seen[:, None, :] & seen[:, :, None])[:, None]
        found: Tensor = self.language_model.model(
            inputs_embeds=embedded, attention_mask=mask, position_ids=torch.arange(length, device=tokens.device)[None]
        ).last_hidden_state
        return found
