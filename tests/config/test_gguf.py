"""A GGUF file is read as the Hugging Face directory that it becomes once, with the weights and words that it holds."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rlinf.config.load import ConfigError
from rlinf.runs.rules import load_config

gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install 'rlinf[gguf]'")

HEADS, KV_HEADS = 4, 2
TOKENS = ["<end>", *sorted(ByteLevel.alphabet()), "12", "ab"]
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "model.layers": "blk",
}  # fmt: skip


def in_halves(weight, heads):
    """Rows of a head in the order of llama.cpp, which turns neighbours where transformers turns halves."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write(file, model, rule="smollm", kind=0):
    """A model as llama.cpp's own converter writes it."""
    writer, config = gguf.GGUFWriter(str(file), "llama"), model.config
    writer.add_file_type(kind)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, *(1 for _ in TOKENS[1:])])
    writer.add_token_merges(["1 2", "a b"])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id, writer.add_unk_token_id):
        add(0)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}<end>{% endfor %}")
    for name, values in model.state_dict().items():
        weight = values.float().numpy()
        if "q_proj" in name or "k_proj" in name:
            weight = in_halves(weight, HEADS if "q_proj" in name else KV_HEADS)
        for ours, its in NAMES.items():
            name = name.replace(ours, its)
        if name != "lm_head.weight":
            writer.add_tensor(name, np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(TOKENS), tie_word_embeddings=True, **sizes, **heads)).eval()


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def path_of(file):
    return load_config(None, [f"model.path={file}"]).model.path


def test_what_the_directory_holds_computes_as_the_model_that_was_written(model, tmp_path):
    write(tmp_path / "tiny.gguf", model)
    directory = path_of("~/tiny.gguf")
    again = AutoModelForCausalLM.from_pretrained(directory)
    ids = torch.randint(len(TOKENS), (3, 17))
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    assert load_config(None, [f"model.path={directory}"]).model.path == directory


def test_text_is_split_by_the_rule_of_the_file(model, tmp_path):
    for rule, words in {"smollm": ["1", "2", "Ġ", "ab"], "gpt-2": ["12", "Ġ", "ab"]}.items():
        write(tmp_path / f"{rule}.gguf", model, rule)
        tokenizer = AutoTokenizer.from_pretrained(path_of(tmp_path / f"{rule}.gguf"))
        assert tokenizer.tokenize("12 ab") == words
        assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "a<end>"


def test_a_rule_that_nobody_knows_is_warned_of(model, tmp_path):
    write(tmp_path / "tiny.gguf", model, "its-own")
    with pytest.warns(UserWarning, match=r"tiny\.gguf.*its-own.*model\.tokenizer"):
        path_of(tmp_path / "tiny.gguf")


def test_it_is_written_once_and_again_when_the_file_is_another(model, tmp_path):
    file = tmp_path / "tiny.gguf"
    write(file, model)
    first = path_of(file)
    (tmp_path / first / "model.safetensors").unlink()
    assert path_of(file) == first
    assert not (tmp_path / first / "model.safetensors").exists()
    write(file, model, "gpt-2", kind=1)
    second = path_of(file)
    assert second != first
    records = [json.loads((tmp_path / each / "gguf.json").read_text()) for each in (first, second)]
    assert [record["dtype"] for record in records] == ["torch.float32", "torch.float16"]
    assert records[0]["sha256"] != records[1]["sha256"]


def test_a_teacher_may_be_a_file_too(model, tmp_path):
    write(tmp_path / "tiny.gguf", model)
    config = load_config(None, [f"teachers={{a: {{model: {tmp_path}/tiny.gguf}}}}"])
    assert config.named_teachers["teacher_a"].model == path_of(tmp_path / "tiny.gguf")


@pytest.mark.parametrize(
    ("key", "told"), [("model.path",) * 2, ("model.tokenizer",) * 2, ("teachers.a.model", "teachers.a")]
)
def test_a_file_that_cannot_be_read_is_told_by_its_key(key, told, tmp_path):
    (tmp_path / "broken.gguf").write_bytes(b"GGUF, it says")
    for name, reason in {"absent": "No such file", "broken": "GGUF"}.items():
        with pytest.raises(ConfigError) as error:
            load_config(None, [f"{key}={tmp_path}/{name}.gguf"])
        assert [each.key for each in error.value.problems] == [told]
        assert reason in error.value.problems[0].advice
