"""Models of the configurations for many devices, as their config.json files say."""

from __future__ import annotations

from transformers import AutoConfig

_QWEN2 = {"model_type": "qwen2", "num_key_value_heads": 8, "vocab_size": 152064, "tie_word_embeddings": False}
SHAPES = {
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936, "tie_word_embeddings": False,
        "max_position_embeddings": 40960,
    },
    "qwen2.5-7b": {
        **_QWEN2, "num_key_value_heads": 4, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28,
    },
    "qwen2.5-32b": {
        **_QWEN2, "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
    },
    "qwen2.5-72b": {
        **_QWEN2, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80, "num_attention_heads": 64,
    },
}  # fmt: skip


def model(name: str, layers: int | None = None):
    """The transformers config of one, with fewer layers where a number is given."""
    shape = dict(SHAPES[name])
    return AutoConfig.for_model(**shape | ({} if layers is None else {"num_hidden_layers": layers}))
