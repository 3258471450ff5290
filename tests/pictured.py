"""Tiny models that read pictures, of three families, and pictures to show them."""

import numpy as np
from PIL import Image

from rlinf.data.images import image_refs
from rlinf.data.tokenizer import load_tokenizer
from rlinf.models.language.build import pictures_of

TOKENIZER = "characters+pictures:0123456789abc:?<>imge "
_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_SEES = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "temporal_patch_size": 1,
    "out_hidden_size": 32,
}


def _rope(*section):
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(section)}


MODELS = {
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl",
        "text_config": {**_TEXT, "rope_parameters": _rope(1, 1, 2)},
        "vision_config": {**_SEES, "window_size": 16, "fullatt_block_indexes": [1]},
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl",
        "text_config": {**_TEXT, "head_dim": 8, "rope_parameters": _rope(2, 1, 1)},
        "vision_config": {**_SEES, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    },
    "internvl": {
        "model_type": "internvl",
        "text_config": {"model_type": "qwen2", **_TEXT},
        "image_seq_length": 4,
        "vision_config": {
            "num_hidden_layers": 2,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_attention_heads": 2,
            "patch_size": [4, 4],
            "image_size": [16, 16],
        },
    },
}


def pictures(*sizes, seed=0):
    """Pictures of noise, of these heights and widths."""
    rng = np.random.default_rng(seed)
    drawn = [Image.fromarray(rng.integers(0, 255, (*size, 3), dtype=np.uint8)) for size in sizes]
    return image_refs(drawn, "here")


def asked(kind, images, text="a?"):
    """Token ids of a question about pictures, as a data set's would be, int64 [prompt]."""
    tokenizer = load_tokenizer(TOKENIZER)
    shows = pictures_of(MODELS[kind], tokenizer)
    ids = tokenizer("".join(f"b{shows.text}" for _ in images) + text)["input_ids"]
    return np.array(shows.expand(ids, images))
