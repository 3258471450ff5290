"""A GR00T N1.5 of a few thousand parameters, in the directory that its authors would publish."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers.pre_tokenizers import ByteLevel

from rlinf.data.safetensors_io import write_tensors
from rlinf.models.policy.vla.gr00t import BEGIN, EAGLE, END, PICTURE

HEAD: dict[str, Any] = {
    "action_dim": 8, "action_horizon": 6, "max_state_dim": 10, "hidden_size": 24, "input_embedding_dim": 32,
    "backbone_embedding_dim": 48, "num_inference_timesteps": 4, "num_target_vision_tokens": 3,
    "num_timestep_buckets": 1000, "max_num_embodiments": 32, "max_seq_len": 16,
    "diffusion_model_cfg": {
        "num_layers": 4, "num_attention_heads": 4, "attention_head_dim": 8, "output_dim": 24,
        "interleave_self_attention": True, "norm_type": "ada_norm", "positional_embeddings": None,
    },
    "vl_self_attention_cfg": {"num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 12},
}  # fmt: skip
MODEL = {"model_type": "gr00t_n1_5", "action_head_cfg": HEAD, "backbone_cfg": {"select_layer": 2}}
VISION = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 28,
    "patch_size": 14, "hidden_act": "gelu_pytorch_tanh", "vision_use_head": False,
}  # fmt: skip
WORDS = {
    "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "vocab_size": 300, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
}  # fmt: skip
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", BEGIN, END, PICTURE]
STATISTICS = {
    "state": {"eef": {"min": [-1.0, -2.0, 0.0], "max": [1.0, 2.0, 4.0]}, "fingers": {"min": [0.0], "max": [0.04]}},
    "action": {
        **{name: {"min": [-0.5], "max": [1.0]} for name in ("x", "y", "z", "roll", "pitch", "yaw")},
        "gripper": {"min": [0.0], "max": [1.0]},
    },
}
GIVEN = {
    "type": "gr00t", "action_size": 7, "chunk": 5, "image": [40, 40, 6], "state_size": 4, "prompt_length": 160,
    "embodiment": "libero",
}  # fmt: skip
"""What a run says of it; the rest is the directory's."""


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Random ones, by the authors' names: written out here, not asked of the code under test."""
    random = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {}

    def layer(name: str, outputs: int, inputs: int, bias: bool = True) -> None:
        shapes[f"{name}.weight"] = (outputs, inputs)
        if bias:
            shapes[f"{name}.bias"] = (outputs,)

    def norm(name: str, width: int, bias: bool = True) -> None:
        shapes[f"{name}.weight"] = (width,)
        if bias:
            shapes[f"{name}.bias"] = (width,)

    eagle = "backbone.eagle_model"
    vision = f"{eagle}.vision_model.vision_model"
    shapes[f"{vision}.embeddings.patch_embedding.weight"] = (32, 3, 14, 14)
    shapes[f"{vision}.embeddings.patch_embedding.bias"] = (32,)
    shapes[f"{vision}.embeddings.position_embedding.weight"] = (4, 32)
    for number in range(2):
        at = f"{vision}.encoder.layers.{number}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            layer(f"{at}.self_attn.{name}", 32, 32)
        layer(f"{at}.mlp.fc1", 40, 32)
        layer(f"{at}.mlp.fc2", 32, 40)
        norm(f"{at}.layer_norm1", 32)
        norm(f"{at}.layer_norm2", 32)
    norm(f"{vision}.post_layernorm", 32)
    layer(f"{eagle}.mlp1.0", 48, 32)
    words = f"{eagle}.language_model"
    shapes[f"{words}.model.embed_tokens.weight"] = shapes[f"{words}.lm_head.weight"] = (300, 48)
    for number in range(2):
        at = f"{words}.model.layers.{number}"
        layer(f"{at}.self_attn.q_proj", 48, 48, bias=False)
        layer(f"{at}.self_attn.k_proj", 24, 48, bias=False)
        layer(f"{at}.self_attn.v_proj", 24, 48, bias=False)
        layer(f"{at}.self_attn.o_proj", 48, 48, bias=False)
        norm(f"{at}.self_attn.q_norm", 12, bias=False)
        norm(f"{at}.self_attn.k_norm", 12, bias=False)
        layer(f"{at}.mlp.gate_proj", 64, 48, bias=False)
        layer(f"{at}.mlp.up_proj", 64, 48, bias=False)
        layer(f"{at}.mlp.down_proj", 48, 64, bias=False)
        norm(f"{at}.input_layernorm", 48, bias=False)
        norm(f"{at}.post_attention_layernorm", 48, bias=False)
    norm(f"{words}.model.norm", 48, bias=False)

    def attention(at: str, width: int, context: int) -> None:
        layer(f"{at}.to_q", width, width)
        layer(f"{at}.to_k", width, context)
        layer(f"{at}.to_v", width, context)
        layer(f"{at}.to_out.0", width, width)

    head = "action_head"
    layer(f"{head}.model.timestep_encoder.timestep_embedder.linear_1", 32, 256)
    layer(f"{head}.model.timestep_encoder.timestep_embedder.linear_2", 32, 32)
    for number in range(4):
        at = f"{head}.model.transformer_blocks.{number}"
        layer(f"{at}.norm1.linear", 64, 32)
        attention(f"{at}.attn1", 32, 48 if number % 2 == 0 else 32)
        layer(f"{at}.ff.net.0.proj", 128, 32)
        layer(f"{at}.ff.net.2", 32, 128)
    layer(f"{head}.model.proj_out_1", 64, 32)
    layer(f"{head}.model.proj_out_2", 24, 32)
    for name, inputs, outputs in (
        ("state_encoder.layer1", 10, 24), ("state_encoder.layer2", 24, 32), ("action_encoder.W1", 8, 32),
        ("action_encoder.W2", 64, 32), ("action_encoder.W3", 32, 32), ("action_decoder.layer1", 24, 24),
        ("action_decoder.layer2", 24, 8),
    ):  # fmt: skip
        shapes[f"{head}.{name}.W"], shapes[f"{head}.{name}.b"] = (32, inputs, outputs), (32, outputs)
    shapes[f"{head}.future_tokens.weight"], shapes[f"{head}.position_embedding.weight"] = (3, 32), (16, 32)
    norm(f"{head}.vlln", 48)
    for number in range(2):
        at = f"{head}.vl_self_attention.transformer_blocks.{number}"
        norm(f"{at}.norm1", 48)
        attention(f"{at}.attn1", 48, 48)
        norm(f"{at}.norm3", 48)
        layer(f"{at}.ff.net.0.proj", 192, 48)
        layer(f"{at}.ff.net.2", 48, 192)
    made = {name: 0.3 * torch.randn(shape, generator=random) for name, shape in shapes.items()}
    made[f"{words}.lm_head.weight"] = made[f"{words}.model.embed_tokens.weight"].clone()
    return made


def publish(directory: Path, seed: int = 0) -> dict[str, torch.Tensor]:
    """Write the directory; the tensors."""
    made = tensors(seed)
    (directory / EAGLE).mkdir(parents=True)
    (directory / "experiment_cfg").mkdir()
    (directory / "config.json").write_text(json.dumps(MODEL))
    about = {"libero_franka": {"statistics": STATISTICS, "embodiment_tag": "libero_franka"}}
    (directory / "experiment_cfg" / "metadata.json").write_text(json.dumps(about))
    letters = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
    eagle = {"vision_config": VISION, "text_config": WORDS, "image_token_index": len(letters) + 5}
    (directory / EAGLE / "config.json").write_text(json.dumps(eagle))
    (directory / EAGLE / "vocab.json").write_text(json.dumps(letters))
    (directory / EAGLE / "merges.txt").write_text("#version: 0.2\n")
    added = {
        str(len(letters) + number): {"content": token, "special": True, "lstrip": False, "rstrip": False,
                                     "normalized": False, "single_word": False}
        for number, token in enumerate(SPECIAL)
    }  # fmt: skip
    about = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": added, "pad_token": SPECIAL[0]}
    (directory / EAGLE / "tokenizer_config.json").write_text(json.dumps(about))
    write_tensors(directory / "model.safetensors", made)
    return made


def as_lerobot(directory: Path, path: Path, **packing: Any) -> dict[str, torch.Tensor]:
    """The directory as lerobot saves such a policy, by its `GrootPolicy` and its processors; their numbers."""
    path.mkdir()
    tensors = load_file(directory / "model.safetensors")
    tied = "backbone.eagle_model.language_model.lm_head.weight"
    save_file(
        {f"_groot_model.{name}": each for name, each in tensors.items() if name != tied}, path / "model.safetensors"
    )
    (path / "config.json").write_text(json.dumps({"type": "groot", "chunk_size": 50, "max_state_dim": 64}))
    (path / "eagle").symlink_to(directory / "eagle")
    numbers = {"observation.state": 4, "action": 7}
    rows = {f"{name}.{end}": torch.rand(size) + by for name, size in numbers.items()
            for end, by in (("min", -2.0), ("max", 1.0))}  # fmt: skip
    packing = {"embodiment_tag": "so100", "embodiment_mapping": {"new_embodiment": 31, "so100": 2}, **packing}
    for begin, step in (("policy_preprocessor", "groot_pack_inputs_v3"), ("policy_postprocessor", "groot_action_un")):
        file = f"{begin}_step_2_{step}.safetensors"
        save_file(rows, path / file)
        steps = [{"registry_name": step, "config": packing, "state_file": file}]
        (path / f"{begin}.json").write_text(json.dumps({"name": begin, "steps": steps}))
    return rows
