"""Models that are written without transformers compute as its own: names, shapes and log-probs."""

import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlinf.engines.transformers.plain import PlainModel, outline

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 40,
}
CASES = {
    "llama": {},
    "llama with biases": {"attention_bias": True, "mlp_bias": True, "rope_parameters": {"rope_theta": 500.0}},
    "mistral with a window": {"sliding_window": 3, "head_dim": 16},
    "qwen2 with a tied head": {"tie_word_embeddings": True, "rms_norm_eps": 1e-3},
    "qwen2 with windows": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen3": {"head_dim": 8},
    "qwen3 with biases": {"attention_bias": True, "head_dim": 16},
}


@pytest.mark.parametrize("case", CASES)
def test_its_parameters_and_logprobs_are_those_of_transformers(case):
    torch.manual_seed(0)
    config = AutoConfig.for_model(case.split()[0], **SIZES, **CASES[case])
    theirs = AutoModelForCausalLM.from_config(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 0.5 if parameter.dim() == 1 else 0.0, 0.3)
    ours = PlainModel.on(torch.device("cpu"), torch.float32, outline(config))
    parameters = dict(ours.named_parameters())
    assert parameters.keys() == dict(theirs.named_parameters()).keys()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameters[name].copy_(parameter)
    ids = torch.arange(22).view(2, 11) * 7 % 40
    right = theirs.double()(input_ids=ids, use_cache=False).logits.log_softmax(-1)
    found = ours.double()(ids).logits.log_softmax(-1)
    assert (found - right).abs().max() < 1e-5  # norms and angles are float32 in both


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("gemma2", {}),
        ("qwen2", {"hidden_act": "gelu"}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
        ("llama", {"quantization_config": {"quant_method": "bitsandbytes"}}),
    ],
)
def test_other_models_have_no_outline(kind, more):
    assert outline(AutoConfig.for_model(kind, **SIZES, **more)) is None


def test_an_engine_of_an_outline_takes_no_transformers_to_import():
    program = "import sys, rlinf.engines.transformers.plain, rlinf.engines.transformers.engine; print(*sys.modules)"
    names = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "torch" in names
    assert not {"transformers", "torch.distributed.tensor", "torch._dynamo", "scipy"} & {*names}
    program = "import sys, rlinf.cli.join; print(*sys.modules)"
    names = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "torch" not in names
