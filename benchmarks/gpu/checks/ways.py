"""Are models of the shapes that people train decoded and trained in the fastest ways, in bfloat16?

Each with random weights, none of which is 0, through the guards that a run has: an engine that says how it decodes, and
the trainer's module, which says how it computes. Gemma is no Llama, and has to say that it is decoded by its own
forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import torch

from benchmarks.gpu.checks.decode import GRAPHS, RECORDED
from benchmarks.gpu.checks.device import emptied
from benchmarks.gpu.checks.judging import Bound, judge
from benchmarks.gpu.checks.parts import TOKENIZER
from benchmarks.gpu.checks.training import interpreted
from benchmarks.gpu.measuring.work import inline
from benchmarks.gpu.scale import Outcome, Scale
from rlinf.config.learning import LearningSettings
from rlinf.data.tokenizer import load_tokenizer
from rlinf.engines.transformers.engine import TransformersEngine
from rlinf.models.language.build import ModelSpec, build_model, build_module
from rlinf.models.language.policy_model import PolicyModel

KERNELS = "attention kernels for packed sequences"
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
SHAPES: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "qwen2": {
        "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True,
    },
    "smollm2": {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49_152, "tie_word_embeddings": True,
        "rope_theta": 100_000.0,
    },
    "llama3": {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256, "tie_word_embeddings": True,
        "rope_parameters": _LLAMA3,
    },
    "gemma": {
        "model_type": "gemma", "hidden_size": 2048, "intermediate_size": 16_384, "num_hidden_layers": 18,
        "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 256_000,
    },
})  # fmt: skip
"""Shapes of Qwen2.5-1.5B, SmolLM2-135M, Llama 3.2 1B and Gemma 2B, as their config.json on the hub says."""
COMPILED = "smollm2"
"""The shape whose blocks and head are compiled too; each takes 40 seconds."""
LEAN = tuple(name for name in SHAPES if name != "gemma")
WAYS = (
    *(Bound(f"{name}_lean", equals="yes") for name in LEAN),
    *(Bound(f"{name}_decoding", equals=RECORDED, needs=GRAPHS) for name in LEAN),
    *(Bound(f"{name}_packed", equals="yes") for name in SHAPES),
    *(Bound(f"{name}_by_a_kernel", equals="yes", needs=KERNELS) for name in SHAPES),
    Bound("gemma_names_itself", equals="yes"),
    Bound(f"{COMPILED}_compiled", equals="yes"),
)


def ways(scale: Scale) -> Outcome:
    """Try all shapes, one after the other; what is known so far is kept."""
    figures: dict[str, str] = {}
    for name, shape in SHAPES.items():
        config = {**shape, **scale.of({}, tiny(shape))}
        found = {**decoded(config, scale), **trained(config, scale, compiled=name == COMPILED)}
        figures |= {f"{name}_{key}": value for key, value in found.items()}
        scale.keep(figures)
    return judge(scale, figures, WAYS)


def tiny(shape: Mapping[str, Any]) -> dict[str, int]:
    """Sizes in a rehearsal; heads stay as many."""
    heads = shape["num_attention_heads"]
    sizes = {"hidden_size": 8 * heads, "intermediate_size": 16 * heads, "head_dim": 8}
    return {**sizes, "num_hidden_layers": 2, "vocab_size": 331}


def decoded(config: Mapping[str, Any], scale: Scale) -> dict[str, str]:
    """How an engine decodes such a model."""
    model = build_model(config, load_tokenizer(TOKENIZER), dtype=torch.bfloat16).to(scale.device)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # biases begin at 0, norms of one kind too
                parameter += 0.1 * torch.randn_like(parameter)
    engine = TransformersEngine(model.eval(), compute=inline, max_rows=8)
    words = engine.way.words
    del engine
    emptied(scale.device)
    return {
        "decodes": words,
        "decoding": words.removeprefix("decodes ").partition(", by the ")[0],
        "lean": "yes" if words.endswith("by the lean forward") else "no",
        "names_itself": "yes" if type(model).__name__.removesuffix("ForCausalLM") in words else "no",
    }


def trained(config: Mapping[str, Any], scale: Scale, *, compiled: bool) -> dict[str, str]:
    """How the trainer's module computes such a model."""
    compute = LearningSettings(dtype="bfloat16", compile=compiled, gradient_checkpointing=compiled)
    tokenizer = load_tokenizer(TOKENIZER)
    with interpreted() if compiled and scale.device.type == "cpu" else nullcontext():
        module: PolicyModel = build_module(ModelSpec(config, compute=compute), tokenizer, scale.device)
    found = {
        "trains": module.way.words,
        "packed": "yes" if module.packs else "no",
        "by_a_kernel": "yes" if module.kernel else "no",
        "compiled": "yes" if module.words.endswith("blocks and head compiled") else "no",
    }
    del module
    emptied(scale.device)
    return found
