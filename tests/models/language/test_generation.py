"""What a model's configuration says about generating with it."""

import pytest
from transformers import AutoConfig, GenerationConfig

from rlinf.models.language.sources import Limits, context_length, limits

LENGTHS = {
    "a table of positions": ("gpt2", {"n_positions": 256}, 256),
    "rotary angles": ("qwen2", {"max_position_embeddings": 256}, 256),
    "a sliding window": ("mistral", {"max_position_embeddings": 256, "sliding_window": 32}, 256),
    "angles per kind of layer": ("gemma3_text", {"max_position_embeddings": 256}, 256),
    "linear scaling": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}, 8192),
    "yarn, told before scaling": (
        "qwen2",
        {
            "max_position_embeddings": 1000,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 1000,
            },
        },
        4000,
    ),
    "yarn, told after scaling": ("gpt_oss", {}, 131072),
    "a model with a part for pictures": ("qwen2_5_vl", {"text_config": {"max_position_embeddings": 300}}, 300),
    "positions that begin behind padding": ("roberta", {"max_position_embeddings": 514, "pad_token_id": 1}, 512),
    "alibi by name": ("falcon", {"alibi": True}, None),
    "no positions at all": ("bloom", {}, None),
    "no attention": ("mamba", {}, None),
}


@pytest.mark.parametrize("case", LENGTHS)
def test_the_context_length_is_what_the_positions_reach(case):
    kind, settings, expected = LENGTHS[case]
    assert context_length(AutoConfig.for_model(kind, **settings)) == expected


@pytest.mark.parametrize(
    ("own", "generation", "expected"),
    [(5, [6, 7], {5, 6, 7}), ([5, 8], 6, {5, 6, 8}), (5, None, {5}), (None, 6, {6}), (None, "no file", set())],
)
def test_end_tokens_are_those_of_the_model_and_of_its_generation(tmp_path, own, generation, expected):
    AutoConfig.for_model("qwen2", max_position_embeddings=128, eos_token_id=own).save_pretrained(tmp_path)
    if generation != "no file":
        GenerationConfig(eos_token_id=generation).save_pretrained(tmp_path)
    assert limits(str(tmp_path)) == Limits(128, frozenset(expected), 151936)  # rows of Qwen2's embedding


def test_a_new_model_ends_by_what_its_configuration_names_and_an_unreadable_one_says_nothing(tmp_path):
    assert limits({"model_type": "llama", "max_position_embeddings": 64}) == Limits(64, frozenset())
    assert limits({"model_type": "gpt2", "n_positions": 32, "eos_token_id": 3}) == Limits(32, frozenset({3}))
    assert limits({"hidden_size": 3}) == limits(str(tmp_path)) == Limits()
