"""Operations and bytes from a configuration are those that torch counts in the model itself, within a few percent."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from rlinf.models.language.cost import ModelCost

TOKENS = 48
PLAIN = {
    "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 320, "max_position_embeddings": 64,
}  # fmt: skip
OLD = {name: PLAIN[name] for name in PLAIN if name != "num_key_value_heads"}
EXPERTS = {**PLAIN, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT = {
    "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "num_key_value_heads": 8, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 20,
}  # fmt: skip
MODELS = {
    "llama": PLAIN,
    "qwen2": {**PLAIN, "tie_word_embeddings": True},
    "qwen3": {**PLAIN, "head_dim": 24},
    "gemma2": {**PLAIN, "head_dim": 32, "sliding_window": 16},
    "gpt2": {"vocab_size": 512, "n_embd": 128, "n_layer": 3, "n_head": 8, "n_positions": 64},
    "gpt_neox": OLD,
    "opt": {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 8, "ffn_dim": 320,
            "max_position_embeddings": 64, "word_embed_proj_dim": 128},
    "mixtral": {**PLAIN, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 96, "mlp_only_layers": [0]},
    "qwen3_moe": {**EXPERTS, "num_experts": 8, "head_dim": 16, "decoder_sparse_step": 2},
    "deepseek_v3": {**EXPERTS, **LATENT, "q_lora_rank": 40},
    "deepseek_v2": {**EXPERTS, **LATENT, "q_lora_rank": None},
}  # fmt: skip


def made(kind):
    config = AutoConfig.for_model(kind, **MODELS[kind])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    return ModelCost.of(config), model


def counted(model, *, backward, **inputs):
    with FlopCounterMode(display=False) as counter:
        logits = model(**inputs, use_cache=False).logits
        if backward:
            logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("kind", MODELS)
def test_a_pass_takes_what_torch_counts(kind):
    """A plain product with a mask behind it computes all pairs, so none are left out here."""
    cost, model = made(kind)
    ids = torch.randint(512, (1, TOKENS))
    own = cost.forward_flops([TOKENS], TOKENS, causal=False)
    assert own == pytest.approx(counted(model, backward=False, input_ids=ids), rel=0.03)
    assert 3 * own == pytest.approx(counted(model, backward=True, input_ids=ids), rel=0.03)


@pytest.mark.parametrize("kind", MODELS)
def test_all_matrices_are_counted_as_weights(kind):
    cost, model = made(kind)
    embeddings = {"wpe", "embed_positions"}
    sizes = [
        one.numel() for name, one in model.named_parameters() if one.dim() > 1 and not embeddings & {*name.split(".")}
    ]
    assert cost.weights == pytest.approx(sum(sizes), rel=0.01)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_frozen_weights_have_no_gradient_of_their_own(kind):
    cost, model = made(kind)
    model.requires_grad_(False)
    embedded = torch.randn(1, TOKENS, 128, requires_grad=True)
    whole = cost.training_flops([TOKENS], TOKENS, frozen=True)
    masked = cost.pair * 3 * (cost.pairs_flops(TOKENS**2) // cost.pair - cost.pairs(TOKENS))  # computed all the same
    assert whole + masked == pytest.approx(counted(model, backward=True, inputs_embeds=embedded), rel=0.03)


def test_a_window_limits_what_a_token_sees_and_a_shared_beginning_is_read_once():
    cost, _ = made("gemma2")
    assert cost.attention == {16: 2, None: 1}
    seen = sum(2 * min(place + 1, 16) + place + 1 for place in range(10, TOKENS))
    assert cost.pairs(TOKENS, 10) == seen
    lengths, saved = [40, 48], 30
    whole = cost.forward_flops(lengths, 20)
    assert whole - cost.forward_flops(lengths, 20, tokens=sum(lengths) - saved) == 2 * cost.block_weights * saved


def test_a_decode_step_reads_every_matrix_once_and_of_experts_those_that_a_row_chose():
    cost, model = made("mixtral")
    experts = sum(one.numel() for name, one in model.named_parameters() if ".experts." in name)
    dense = cost.weights - 512 * 128 - experts  # a row of the input embedding is looked up
    assert cost.weight_bytes(1, 2) == pytest.approx(2 * (dense + experts / 2), rel=0.01)
    assert cost.weight_bytes(2, 2) == pytest.approx(2 * (dense + experts * 3 / 4), rel=0.01)
    assert cost.cache_bytes(10, 2) == 10 * 3 * 2 * 2 * 16 * 2
    assert cost.decode_bytes(2, 5.0, 2) == cost.weight_bytes(2, 2) + cost.cache_bytes(10, 2)
