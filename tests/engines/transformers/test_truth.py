"""The lean forward is taken where it is right, also where it rounds, and refused where it is not, in every dtype."""

import copy
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from rlinf.engines.transformers import model as forwards
from rlinf.engines.transformers.engine import TransformersEngine, _way
from rlinf.engines.transformers.int8 import Int8Weight, no_int8, round_layers
from rlinf.engines.transformers.model import LeanForward, ModelForward, fastest

INT8 = pytest.param("int8", marks=pytest.mark.skipif(no_int8(on_cpu=True) is not None, reason="the CPU lacks it"))
DTYPES = [torch.bfloat16, torch.float32, INT8]
SHAPES = {
    "qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "llama": {
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 2.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 1024,
        },
    },
    "smollm2": {"model_type": "llama", "num_hidden_layers": 30, "num_attention_heads": 3, "hidden_size": 48,
                "num_key_value_heads": 1, "tie_word_embeddings": True, "rope_theta": 100_000.0},
    "gemma": {"num_key_value_heads": 1, "head_dim": 32},
    "windowed": {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 12},
}  # fmt: skip


def made(kind, dtype, seed=0, **more):
    """A model with random weights of which none is 0, as those of a trained one are not."""
    settings = {
        "model_type": kind, "vocab_size": 331, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "intermediate_size": 160, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": 1e-6,
        **SHAPES[kind], **more,
    }  # fmt: skip
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter * 3 if parameter.ndim > 1 else parameter + 0.3 * torch.randn_like(parameter))
    if dtype == "int8":
        round_layers(model)
        return model
    return model.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", SHAPES)
def test_a_right_model_decodes_by_the_lean_forward_where_it_has_one(kind, dtype):
    for seed in range(1 if kind == "smollm2" else 2):
        forward = fastest(made(kind, dtype, seed), 0)
        assert forward.continues
        if kind == "gemma":
            assert "Gemma" in forward.slower
            assert "Gemma" in TransformersEngine(forward._model).way.words
        else:
            assert (type(forward), forward.slower) == (LeanForward, None)


@pytest.mark.parametrize("layers", [1, pytest.param(28, marks=pytest.mark.repeated)])
def test_a_model_of_the_width_of_1_5_billion_weights_does_in_bfloat16(layers):
    shape = {
        "hidden_size": 1536,
        "intermediate_size": 4480 if layers == 1 else 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    }
    settings = {**shape, "num_hidden_layers": layers, "vocab_size": 1000, "tie_word_embeddings": True}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **settings), dtype=torch.bfloat16).eval()
    assert type(fastest(model, 0)) is LeanForward


def turned_by_another_base(lean):
    lean._rotary = copy.deepcopy(lean._rotary)
    lean._rotary.inv_freq = lean._rotary.inv_freq**1.1


def a_position_late(lean):
    step = lean.step
    lean.step = lambda ids, positions, bands: step(ids, positions + 1, bands)


def padding_is_seen(lean):
    biases = lean._biases
    lean._biases = lambda ids, real: biases(ids, None if real is None else torch.ones_like(real))


def heads_change_places(lean):
    for block in lean.blocks[1:2]:
        heads = block.heads

        def swapped(*args, heads=heads):
            turned, values = heads(*args)
            return turned, values.flip(-2)

        block.heads = swapped


def a_bias_is_missing(lean):
    lean.blocks[1].qkv = (lean.blocks[1].qkv[0], None)


def another_epsilon(lean):
    for block in lean.blocks:
        block.norms = [copy.deepcopy(norm) for norm in block.norms]
        for norm in block.norms:
            norm.variance_epsilon = 1e-3


def another_scale(lean):
    for block in lean.blocks:
        block.scale *= 1.2


def the_head_is_the_embedding(lean):
    lean._head = nn.Linear(1, 1, bias=False)
    lean._head.weight = nn.Parameter(lean.embedding)


def no_window(lean):
    for block in lean.blocks:
        block.window = None
    lean.windows = {None}


def a_cap_too_many(lean):
    logits = lean.logits
    lean.logits = lambda hidden: 3 * torch.tanh(logits(hidden) / 3)


def half_a_layer_is_skipped(lean):
    block = lean.blocks[2]
    block.finish = lambda hidden, attended: forwards._product(attended, block.output.weight, None, hidden)


def weights_of_the_step_before(lean):
    weight, bias = lean.blocks[1].gate_up
    rounded = isinstance(weight, Int8Weight)
    whole = torch.mul(*(part.reshape(len(part), -1) for part in weight.unpacked())) if rounded else weight
    before = whole + 0.03 * whole.std() * torch.randn_like(whole)
    if rounded:
        before = Int8Weight.of("before", before)
        before.exact = weight.exact
    lean.blocks[1].gate_up = (before, bias)


FAULTS = {
    turned_by_another_base: "qwen2", a_position_late: "qwen2", padding_is_seen: "qwen2", heads_change_places: "llama",
    a_bias_is_missing: "qwen2", another_epsilon: "qwen2", another_scale: "qwen2", the_head_is_the_embedding: "llama",
    no_window: "windowed", a_cap_too_many: "qwen2", half_a_layer_is_skipped: "smollm2",
    weights_of_the_step_before: "llama",
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("fault", "kind"), FAULTS.items(), ids=lambda value: getattr(value, "__name__", value))
def test_a_fault_is_refused_and_how_far_it_is_off_is_told(fault, kind, dtype):
    class Faulty(LeanForward):
        def _join(self):
            super()._join()
            fault(self)

    with mock.patch.object(forwards, "LeanForward", Faulty):
        forward = fastest(made(kind, dtype), 0)
    assert type(forward) is ModelForward
    assert "off by" in forward.slower


@pytest.mark.parametrize(
    ("kind", "device", "graphs", "usual", "slow"),
    [
        ("qwen2", "cpu", "auto", True, False),
        ("gemma", "cpu", "auto", False, False),
        ("qwen2", "cuda", "auto", False, True),
        ("qwen2", "cuda", "off", False, False),
    ],
)
def test_how_an_engine_decodes_is_told_and_that_a_gpu_goes_step_by_step(kind, device, graphs, usual, slow):
    forward = fastest(made(kind, torch.float32, num_hidden_layers=1), 0)
    forward.device = torch.device(device)
    way = _way("step by step: of a reason", forward, graphs)
    assert (way.usual, bool(way.slow)) == (usual, slow)
    assert "of a reason" in way.words
