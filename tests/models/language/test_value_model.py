"""Values of packed sequences: where they are read, what learns from them, and how their model is made."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlinf import ActorSystem
from rlinf.config.learning import LearningSettings
from rlinf.data.packing import Row, pack
from rlinf.data.tokenizer import load_tokenizer
from rlinf.models.language.build import ModelSpec, build_module
from rlinf.models.language.fsdp import Layout
from rlinf.models.language.policy_model import ValueModel
from rlinf.models.offload import shard_of
from tests.actors.toys import ALPHABET, VOCABULARY, configuration, furthest, gradients, model

RNG = np.random.default_rng(3)
PROMPT = RNG.integers(2, VOCABULARY, 20)
ROWS = [
    Row(RNG.integers(2, VOCABULARY, prompt), RNG.integers(2, VOCABULARY, answer))
    for prompt, answer in [(2, 3), (5, 1), (1, 30), (3, 0), (1, 6)]
] + [Row(PROMPT, RNG.integers(2, VOCABULARY, answer)) for answer in (4, 2)]  # of one prompt, which is read once


@pytest.fixture
async def mesh():
    """A device mesh of this process alone."""
    async with ActorSystem.local() as system:
        yield await system.collectives.mesh("alone", [0], "cpu")


def build(source, mesh=None, dtype="float32"):
    spec = ModelSpec(source, "values", compute=LearningSettings(dtype=dtype, logprob_chunk=16))
    return build_module(spec, load_tokenizer(ALPHABET), layout=Layout(slices=mesh))


def with_opinions(values):
    """The model with a head that does not say 0."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in values.head.parameters():
            shard_of(parameter).copy_(torch.randn(parameter.shape, generator=generator))  # spread over one rank only
    return values


def one_by_one(net, head):
    """Each sequence alone, by the layers' own forward with plain attention; every token read before its value."""
    net.set_attn_implementation("eager")
    found = []
    for row in ROWS:
        for end in range(len(row.response_ids)):
            seen = torch.tensor([[*row.prompt_ids, *row.response_ids[:end]]])
            found.append(head(net.base_model(seen).last_hidden_state[0, -1]))
    return torch.cat(found)


@pytest.mark.parametrize(
    ("kind", "more", "packs"),
    [
        ("qwen2", {}, True),
        ("llama", {"tie_word_embeddings": False, "attention_bias": True}, True),
        ("gemma2", {"head_dim": 8}, True),
        ("cohere", {}, True),
        ("bloom", {"n_layer": 2, "n_head": 4}, False),
    ],
)
def test_a_value_is_what_a_plain_model_says_that_has_read_what_came_before_the_token(kind, more, packs):
    values = with_opinions(ValueModel(model(kind, **more)))
    values.settle()
    assert values.packs == packs
    weights = torch.randn(sum(len(row.response_ids) for row in ROWS), generator=torch.Generator().manual_seed(0))
    found, _ = values(pack(ROWS))
    (found * weights).sum().backward()
    mine = gradients(values)
    values.zero_grad()
    expected = one_by_one(values.model, values.head)
    (expected * weights).sum().backward()
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
    assert furthest(mine, gradients(values)) < 1e-5


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_the_output_embedding_is_given_up_and_nothing_else(kind):
    whole = {name: tensor.shape for name, tensor in model(kind).named_parameters()}
    kept = {name: tensor.shape for name, tensor in ValueModel(model(kind)).model.named_parameters()}
    assert whole.keys() - kept.keys() == ({"lm_head.weight"} if kind == "llama" else set())
    assert kept.keys() - whole.keys() == {"score.weight", "score.bias"}
    assert all(whole[name] == kept[name] for name in whole.keys() & kept.keys())


def test_before_it_has_learned_anything_every_value_is_zero():
    found, _ = build(configuration())(pack(ROWS))
    assert found.dtype == torch.float32
    assert found.tolist() == [0.0] * sum(len(row.response_ids) for row in ROWS)


@pytest.mark.parametrize("spread", [False, True])
async def test_a_saved_policy_gives_its_layers_and_is_never_whole_where_it_is_spread(
    mesh, tmp_path, monkeypatch, spread
):
    net = model("llama", seed=5, rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0})
    net.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    if spread:
        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)  # would load it whole
    values = with_opinions(build(str(tmp_path), mesh if spread else None))
    head = torch.nn.Linear(32, 1)
    with torch.no_grad():
        for mine, theirs in zip(head.parameters(), values.head.parameters(), strict=True):
            mine.copy_(theirs.full_tensor() if spread else theirs)
    found, _ = values(pack(ROWS))
    torch.testing.assert_close(found, one_by_one(plain, head), atol=2e-6, rtol=1e-5)


async def test_a_head_of_a_saved_model_that_is_spread_starts_at_zero(mesh, tmp_path):
    model("llama", seed=5).save_pretrained(tmp_path)
    found, _ = build(str(tmp_path), mesh)(pack(ROWS))
    assert not found.any()


async def test_in_bfloat16_values_are_near_and_their_head_stays_precise(mesh):
    exact = with_opinions(build(configuration(), mesh))(pack(ROWS))[0]
    rounded = with_opinions(build(configuration(), mesh, "bfloat16"))
    found, hidden = rounded(pack(ROWS))
    assert (hidden.dtype, found.dtype) == (torch.bfloat16, torch.float32)
    assert 1e-5 < float((found - exact).detach().abs().max()) < 0.2
    head = [parameter.full_tensor() for parameter in rounded.head.parameters()]
    torch.testing.assert_close(found, hidden.float() @ head[0][0] + head[1], atol=1e-5, rtol=1e-5)
