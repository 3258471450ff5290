"""The truth about a model of half precision is found without a copy of it, and a trainer's ways are held to it."""

import copy

import pytest
import torch

from rlinf.models.language import truth
from rlinf.models.language.attention import checkpoint_blocks
from rlinf.models.language.policy_model import PolicyModel
from rlinf.models.language.truth import Results, Truth, blocks, sampled_gradient, wide
from tests.actors import toys

KINDS = {
    "qwen2": {},
    "llama": {},
    "gemma2": {"head_dim": 8},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8},
    "qwen3_next": {},
}


def log_probs(model):
    ids = (torch.arange(48).view(2, 24) * 7919) % toys.VOCABULARY
    return model(ids, use_cache=False).logits.float().log_softmax(-1)


def gradient(model):
    log_probs(model)[..., 3].square().sum().backward()
    return sampled_gradient(model)


@pytest.mark.parametrize(("kind", "checkpointed"), [*((kind, False) for kind in KINDS), ("qwen2", True)])
def test_computing_widely_gives_what_a_copy_in_float32_gives(kind, checkpointed, monkeypatch):
    monkeypatch.setattr(truth, "_PIECE", 300)
    model = toys.model(kind, **KINDS[kind]).eval().to(torch.bfloat16)
    copied = copy.deepcopy(model).float()
    if checkpointed:
        checkpoint_blocks(blocks(model))
    before = log_probs(model)
    with wide(model, blocks(model)):
        torch.testing.assert_close(log_probs(model), log_probs(copied), atol=1e-6, rtol=1e-6)
        found = gradient(model)
    expected = gradient(copied)
    assert float(torch.cosine_similarity(found, expected, dim=0)) > 1 - 1e-5
    assert torch.equal(log_probs(model), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "qwen3_next"])
def test_right_models_are_packed_in_either_dtype(kind, dtype):
    policy = PolicyModel(toys.model(kind, **KINDS[kind]).to(dtype))
    policy.computes_in = dtype
    policy.settle()
    assert (policy.packs, policy.refused) == (True, ())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_packed_attention_of_another_scale_is_refused_with_its_error(dtype, monkeypatch):
    from rlinf.models.language import attention

    inner = attention._by_rectangles

    def scaled(query, *rest):
        return inner(1.3 * query, *rest)

    monkeypatch.setattr(attention, "_by_rectangles", scaled)
    model = toys.model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5 if parameter.ndim > 1 else 1)
    policy = PolicyModel(model.to(dtype))
    policy.computes_in = dtype
    policy.settle()
    assert not policy.packs
    assert "off by" in policy.refused[0]


def test_a_gradient_that_points_elsewhere_is_refused_and_a_rounded_one_is_not():
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(5000, generator=generator)
    noise = torch.randn(3, 5000, generator=generator) * 0.03
    numbers = torch.zeros(7)
    held = Truth(Results(numbers, exact), Results(numbers, exact + noise[0]))
    assert held.refuses(Results(numbers, exact + noise[1])) is None
    assert "cosine" in held.refuses(Results(numbers, exact + 1.4 * noise[2]))
    assert "cosine" in held.refuses(Results(numbers, -exact))


def test_where_rounding_chose_other_experts_in_one_text_most_texts_decide():
    exact = torch.randn(60, generator=torch.Generator().manual_seed(0))
    texts = torch.arange(60) // 20
    one, two = exact.clone(), exact.clone()
    one[:20] += 1
    two[:40] += 1
    held = Truth(Results(exact), Results(exact))
    assert held.refuses(Results(one), texts) is None
    assert held.refuses(Results(two), texts) is not None
    assert held.refuses(Results(one)) is not None
