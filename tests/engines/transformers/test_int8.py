"""Weights of 8 bits: what their products are, how new ones arrive, and who has none."""

import numpy as np
import pytest
import torch

from rlinf.data.weights import Weights
from rlinf.engines.base import EngineSetup, Sampling, make
from rlinf.engines.transformers import int8
from rlinf.engines.transformers.engine import TransformersEngine
from rlinf.engines.transformers.int8 import Int8Weight, no_int8
from tests.engines.scripted import scripted
from tests.engines.transformers.test_engine import answers, packed, ragged, tiny

pytestmark = pytest.mark.skipif(no_int8(on_cpu=True) is not None, reason="this CPU has no products of 8 bits")


def by_hand(inputs, weight):
    """The product of whole numbers that both are rounded to, in numpy."""
    scales = np.abs(weight).max(1, keepdims=True).astype(np.float64) / 127
    largest = np.abs(inputs).max(1, keepdims=True).astype(np.float64)
    multiples = np.round(inputs / largest * 127).astype(np.int64)
    return multiples @ np.round(weight / scales).astype(np.int64).T * (largest / 127) * scales.T


def test_a_product_is_that_of_whole_numbers_whoever_shares_the_batch():
    torch.manual_seed(0)
    weight, inputs = torch.randn(40, 96), torch.randn(5, 96) * torch.tensor([1e-3, 1, 7, 300, 2])[:, None]
    rounded = Int8Weight.of("w", weight)
    outputs = rounded.product(inputs)
    expected = by_hand(inputs.numpy(), weight.numpy())
    assert np.abs(outputs.numpy() - expected).max(1) / np.abs(expected).max(1) == pytest.approx(0, abs=2e-3)
    for row in range(5):
        assert torch.equal(rounded.product(inputs[row : row + 1])[0], outputs[row])
    values, scales = rounded.unpacked()
    changed, before = rounded.squares
    off = values * scales[:, None] - weight
    assert float(off.abs().max()) <= float(scales.max()) * 0.501
    assert changed / before == pytest.approx(float(off.square().sum() / weight.square().sum()), rel=1e-3)


def test_nothing_gives_nothing_and_what_is_not_finite_stays_so():
    rounded = Int8Weight.of("w", torch.tensor([[1.0, -2.0], [0.0, 0.0]]))
    inputs = torch.tensor([[0.0, 0.0], [torch.nan, 1.0], [1.0, 1.0]])
    outputs = rounded.product(inputs, torch.tensor([3.0, 4.0]))
    assert outputs[0].tolist() == [3.0, 4.0]
    assert not outputs[1].isfinite().any()
    assert outputs[2].tolist() == pytest.approx([2.0, 4.0], abs=0.02)


@pytest.mark.parametrize(
    ("kind", "settings"), [("qwen2", {}), ("llama", {"tie_word_embeddings": True}), ("gpt_neox", {}), ("gemma", {})]
)
async def test_weights_that_arrive_are_rounded_like_those_that_it_began_with(kind, settings):
    asked, trained = ragged(4, Sampling(6)), tiny(kind, seed=1, **settings)
    engine, lent, fresh = (TransformersEngine(tiny(kind, seed, **settings), weights="int8") for seed in (0, 0, 1))
    before = await answers(engine, asked)
    await engine.load(packed(trained, 1))
    await lent.load(Weights.lent(trained.named_parameters(), lambda: 1))
    expected = await answers(fresh, asked)
    for ours in (await answers(engine, asked), await answers(lent, asked)):
        for number in range(4):
            assert ours[number].response_ids.tolist() == expected[number].response_ids.tolist()
            assert ours[number].logprobs.tolist() == expected[number].logprobs.tolist()
    assert any(before[number].logprobs.tolist() != expected[number].logprobs.tolist() for number in range(4))
    assert engine.rounding == pytest.approx(fresh.rounding, rel=1e-5)
    assert 1e-3 < engine.rounding["weights/int8_error"] < 2e-2
    assert "8 bits" in engine.way.words
    with pytest.raises(ValueError, match="do not fit"):
        await engine.load(Weights.pack([("a", torch.ones(1))], 2))


async def test_who_cannot_round_says_so_by_the_key(monkeypatch):
    monkeypatch.setattr(int8, "cpu_products", frozenset)
    with pytest.raises(ValueError, match=r"rollout\.weights=int8: .*avx512_vnni"):
        TransformersEngine(tiny(), weights="int8")
    assert "CPU" in no_int8(on_cpu=False)
    with pytest.raises(ValueError, match=r"rollout\.weights=int8"):
        await make(f"{__name__}.unrounded", EngineSetup("it", {}, None, weights="int8"))


def unrounded(setup):
    engine, _ = scripted()
    engine.rounds = False
    return engine
