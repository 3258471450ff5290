"""Tiny random instances of the kinds of causal language model that transformers has.

In: a `model_type`. Out: a model of some ten thousand weights whose answers differ, with windows shorter than the texts
that it reads, so that whoever overlooks them is found out.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rlinf.data.tokenizer import load_tokenizer

TOKENIZER = {"characters": "0123456789abcdefghijklmnopqr>"}
WINDOW = 6
"""Tokens that a layer with a window sees."""
_LAYERS, _WIDTH, _HEADS, _SIZE = 4, 32, 4, 8
_USUAL: dict[str, Any] = {
    "vocab_size": len(load_tokenizer(TOKENIZER)),
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "hidden_size": _WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": 2,
    "head_dim": _SIZE,
    "max_position_embeddings": 128,
    # windows and chunks
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # latent attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": _SIZE,
    "qk_rope_head_dim": _SIZE,
    "v_head_dim": _SIZE,
    # states of fixed size
    "state_size": _SIZE,
    "ssm_state_size": _SIZE,
    "time_step_rank": 4,
    "chunk_size": 4,
    "lru_width": _WIDTH,
    "mamba_n_heads": 8,
    "mamba_d_head": _SIZE,
    "mamba_d_state": _SIZE,
    "mamba_d_ssm": 64,
    "mamba_num_heads": 8,
    "mamba_head_dim": _SIZE,
    "mamba_headdim": 16,
    "n_mamba_heads": _HEADS,
    "mamba_expand": 2,
    "mamba_chunk_size": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": _SIZE,
    "linear_value_head_dim": _SIZE,
    # older names
    "n_embd": _WIDTH,
    "n_layer": _LAYERS,
    "n_head": _HEADS,
    "n_positions": 128,
    "n_inner": 48,
    "d_model": _WIDTH,
    "n_layers": _LAYERS,
    "n_heads": _HEADS,
    "num_heads": _HEADS,
    "max_seq_len": 128,
    "rotary_dim": 4,
    "decoder_layers": _LAYERS,
    "decoder_attention_heads": _HEADS,
    "ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "ffn_hidden_size": 48,
    "word_embed_proj_dim": _WIDTH,
    "embed_dim": _WIDTH,
    "is_decoder": True,
}
"""Settings, each given to the configurations that have it."""

_LATENT = {"num_key_value_heads": _HEADS, "head_dim": _SIZE}
_ODD: dict[str, dict[str, Any]] = {
    "axk1": _LATENT,
    "axk2": _LATENT,
    "bailing_hybrid": {**_LATENT, "layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "glm4_moe_lite": _LATENT,
    "gpt_neo": {"num_layers": _LAYERS, "attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "kimi_linear": _LATENT,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": _LATENT,
    "mamba2": {"num_heads": 8, "head_dim": _SIZE, "n_groups": 2},
    "minicpm3": _LATENT,
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2},
    "youtu": _LATENT,
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
"""Settings that a kind needs besides, or instead; None takes a usual setting away."""


UNTRIED = (
    *("blt", "cohere_compass_text", "dots3_note", "dots3_note_text", "emu3", "fuyu", "gemma3", "gemma3n"),
    *("gemma3n_text", "gemma4", "gemma4_assistant", "gemma4_unified", "gemma4_unified_assistant", "git", "got_ocr2"),
    *("llama4", "mllama", "moshi", "moss_transcribe_diarize", "musicgen", "musicgen_melody", "phi4_multimodal"),
    *(
        "qwen3_5",
        "qwen3_5_moe",
        "qwen4_exp",
        "qwen4_exp_text",
        "roc_bert",
        "xlm",
        "xmod",
        "reformer",
        "zamba",
        "dbrx",
        "dots1",
    ),
)
"""Kinds that this module makes no tiny instance of: they are made of several models, or need settings of their own."""


def tiny(kind: str, seed: int = 0) -> PreTrainedModel:
    """A model of this kind, in evaluation mode, float32.

    Args:
        kind: `model_type`.
        seed: of its weights.
    """
    made = CONFIG_MAPPING[kind]
    known = {name for cls in made.__mro__ for name in getattr(cls, "__annotations__", {})}
    other: dict[str, str] = getattr(made, "attribute_map", None) or {}
    settings = {name: value for name, value in _USUAL.items() if name in known or name in other}
    for name, meant in other.items():
        if meant in settings:
            settings.pop(name, None)
    settings |= {name: _USUAL[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    settings |= _ODD.get(kind, {})
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        made(**{name: value for name, value in settings.items() if value is not None}), dtype=torch.float32
    )
    with torch.no_grad():  # the usual initialisation is nearly uniform over tokens; this one has opinions
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    return model.eval()
