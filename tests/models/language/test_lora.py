"""Adapters: which layers get them, in every architecture; saved, loaded, and several on one base."""

import json

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

from rlinf.models.language.lora import (
    POLICY,
    adapter_values,
    add_adapters,
    lora_targets,
    merged_named_parameters,
    using,
)
from rlinf.training.export import copy_adapter

SIZES = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 32, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1,
}  # fmt: skip
EXPERTS = {
    "num_experts": 2,
    "num_experts_per_tok": 2,
    "num_local_experts": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}
FAMILIES = {
    "qwen2": ("k_proj o_proj q_proj v_proj", "down_proj gate_proj up_proj"),
    "gpt2": ("c_attn c_proj", "c_fc"),
    "gpt_neox": ("dense query_key_value", "dense_4h_to_h dense_h_to_4h"),
    "phi3": ("o_proj qkv_proj", "down_proj gate_up_proj"),
    "opt": ("k_proj out_proj q_proj v_proj", "fc1 fc2"),
    "qwen2_moe": ("k_proj o_proj q_proj v_proj", "down_proj gate_proj up_proj"),
    "mixtral": ("k_proj o_proj q_proj v_proj", ""),
    "mamba": ("in_proj x_proj", ""),
}
"""Last parts of the names of the layers in attention, and of further linear ones."""


def model(kind="qwen2", seed=0):
    torch.manual_seed(seed)
    extra = EXPERTS if kind in ("qwen2_moe", "mixtral") else {}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **extra)).eval()


def start(net, saved=None, seed=0):
    """Give adapters values that have an effect."""
    generator = torch.Generator().manual_seed(seed)
    for parameter, value in adapter_values(net, seed, saved or {}):
        drawn = torch.randn(value.shape, generator=generator) * 0.3
        parameter.data.copy_(value if saved else drawn)


def last_parts(names):
    return {name.rpartition(".")[2] for name in names}


@pytest.mark.parametrize("kind", FAMILIES)
def test_auto_is_attention_and_all_linear_is_everything_but_head_and_routers(kind):
    attention, more = (set(names.split()) for names in FAMILIES[kind])
    net = model(kind)
    assert last_parts(lora_targets(net, "auto")) == attention
    assert last_parts(lora_targets(net, ["all-linear"])) == attention | more


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("layers.1.self_attn.q_proj", ["model.layers.1.self_attn.q_proj"]),
        (["unembed", "layers.0.mlp.up_proj"], ["model.layers.0.mlp.up_proj", "lm_head"]),
        ([r"model\.layers\.0\..*(up|down)_proj"], ["model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"]),
    ],
)
def test_layers_are_named_by_the_end_of_their_names_or_by_a_pattern(wanted, found):
    assert lora_targets(model(), wanted) == found


@pytest.mark.parametrize(
    ("kind", "wanted", "text"),
    [
        (
            "qwen2",
            ["q_proj", "no_such"],
            r"'no_such'.*linear layers.*down_pr",
        ),
        ("gpt2", ["q_proj"], r"c_attn, c_fc, c_proj.*take auto"),
        ("mixtral", ["experts"], r"'experts'.*weights"),
        ("qwen2", ["embed_tokens"], r"input embedding"),
        ("qwen2", ["lm_head"], r"output embedding"),
        ("qwen2", [r"proj.*x"], r"linear layers"),
    ],
)
def test_layers_that_are_not_there_are_told_with_those_that_are(kind, wanted, text):
    with pytest.raises(ValueError, match=text):
        lora_targets(model(kind), wanted)


@pytest.mark.parametrize("kind", FAMILIES)
def test_merged_weights_and_pefts_own_model_compute_what_the_adapted_one_does(kind, tmp_path):
    model(kind).save_pretrained(tmp_path / "base")
    net = model(kind)
    add_adapters(net, {"r": 2, "alpha": 4, "target_modules": "all-linear"})
    start(net)
    ids = torch.arange(2, 12)[None]
    with torch.no_grad():
        adapted = net(ids, use_cache=False).logits
        with using(net, None):
            plain = net(ids, use_cache=False).logits
        merged = model(kind, seed=1)
        merged.load_state_dict(dict(merged_named_parameters(net)), strict=False)
        copy = copy_adapter(net, str(tmp_path / "base"), lead=True)
        copy.write(tmp_path / "adapter")
        theirs = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter"
        )
        assert (adapted - plain).abs().max() > 1e-3
        torch.testing.assert_close(merged(ids, use_cache=False).logits, adapted, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(theirs.eval()(ids, use_cache=False).logits, adapted, atol=2e-5, rtol=1e-4)
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 2


def saved_adapter(directory, targets, seed, r=2):
    net = model()
    add_adapters(net, {"r": r, "alpha": 4, "target_modules": targets})
    start(net, seed=seed)
    copy_adapter(net, None, lead=True).write(directory)
    return net


def test_several_adapters_share_a_base_and_only_the_policys_learn(tmp_path):
    ids = torch.arange(2, 12)[None]
    other, third = saved_adapter(tmp_path / "a", ["q_proj"], 1), saved_adapter(tmp_path / "b", "all-linear", 2, r=3)
    net = model()
    add_adapters(net, {"r": 4, "alpha": 8, "target_modules": ["v_proj", "down_proj"]})
    saved = {"ref_logprobs": str(tmp_path / "a"), "teacher_logprobs": str(tmp_path / "b")}
    for name, directory in saved.items():
        add_adapters(net, {"path": directory}, name)
    for parameter, value in adapter_values(net, 0, saved):
        parameter.data.copy_(value)
    plain = model()(ids).logits
    torch.testing.assert_close(net(ids).logits, plain)  # the policy's own are new
    for name, expected in (("ref_logprobs", other), ("teacher_logprobs", third)):
        with torch.no_grad(), using(net, name):
            torch.testing.assert_close(net(ids).logits, expected(ids).logits)
    net(ids).logits.sum().backward()
    learning = {name for name, parameter in net.named_parameters() if parameter.requires_grad}
    assert learning == {name for name, parameter in net.named_parameters() if f".{POLICY}." in name}
    assert {name for name, parameter in net.named_parameters() if parameter.grad is not None} == learning
    assert set(dict(merged_named_parameters(net))) == set(dict(model().named_parameters()))


def test_saved_adapters_go_on_learning_where_they_were(tmp_path):
    ids = torch.arange(2, 12)[None]
    saved = saved_adapter(tmp_path / "a", ["q_proj", "up_proj"], 5)
    net = model()
    add_adapters(net, {"r": 0, "alpha": 1.0, "target_modules": ["auto"], "path": str(tmp_path / "a")})
    start(net, {POLICY: str(tmp_path / "a")})
    torch.testing.assert_close(net(ids).logits, saved(ids).logits)
    assert all(parameter.requires_grad == (".lora_" in name) for name, parameter in net.named_parameters())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"peft_type": "IA3"}, "are IA3, not LoRA"),
        ({"use_dora": True}, "have use_dora, which"),
        ({"bias": "all"}, "have biases"),
        ({"r": 5}, r"another model"),
        ({"target_modules": ["no_such"]}, "no_such|not found"),
    ],
)
def test_saved_adapters_that_cannot_be_used_say_why(tmp_path, change, text):
    saved_adapter(tmp_path / "a", ["q_proj"], 1)
    about = tmp_path / "a" / "adapter_config.json"
    about.write_text(json.dumps({**json.loads(about.read_text()), **change}))
    with pytest.raises(ValueError, match=text):
        add_adapters(model(), {"path": str(tmp_path / "a")}, POLICY)


def test_a_directory_without_adapters_says_what_is_missing(tmp_path):
    with pytest.raises(ValueError, match=r"adapter_config\.json.*adapter_model"):
        add_adapters(model(), {"path": str(tmp_path)})
