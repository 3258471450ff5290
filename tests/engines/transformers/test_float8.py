"""Weights of float8: how a block is rounded, which matrices are, and how new ones arrive."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.data.weights import Weights
from rlinf.engines.base import Sampling, no_rounding
from rlinf.engines.transformers import float8
from rlinf.engines.transformers.engine import TransformersEngine
from rlinf.engines.transformers.float8 import Float8Weights, names_of, round_matrix, unrounded
from rlinf.metrics.alarms import RoundingAlarm
from tests.engines.transformers.test_engine import answers, packed, ragged, tiny
from tests.engines.transformers.test_routes import mixture

_NORMAL = {(8 + mantissa) * 2.0 ** (exponent - 3) for exponent in range(-6, 9) for mantissa in range(8)}
E4M3 = np.array(sorted({mantissa * 2.0**-9 for mantissa in range(8)} | _NORMAL - {480.0}))
"""Its numbers from 0 up, by the format's definition (Micikevicius et al., arXiv:2209.05433): three bits of mantissa, a
bias of 7, and in the place of 480 what is no number."""


def by_hand(matrix):
    """The nearest float8 of each block, of two that are as near the even one, in float64."""
    rounded = np.empty(matrix.shape)
    for top in range(0, matrix.shape[0], 128):
        for left in range(0, matrix.shape[1], 128):
            where = np.s_[top : top + 128, left : left + 128]
            block = matrix[where].astype(np.float64)
            scale = 2.0 ** np.ceil(np.log2(max(np.abs(block).max(), 2.0**-117) / 448))
            above = np.searchsorted(E4M3, np.abs(block) / scale).clip(1, len(E4M3) - 1)
            low, high, value = E4M3[above - 1], E4M3[above], np.abs(block) / scale
            up = (value - low > high - value) | ((value - low == high - value) & (above % 2 == 0))
            rounded[where] = np.sign(block) * np.where(up, high, low) * scale
    return rounded


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 260), st.integers(1, 260), st.integers(-30, 30), st.integers(0, 99))
def test_a_block_has_the_nearest_numbers_of_its_own_power_of_two(rows, columns, power, seed):
    random = np.random.default_rng(seed)
    matrix = random.standard_normal((rows, columns)) * 10.0 ** random.integers(-3, 3, (rows, 1)) * 2.0**power
    matrix = matrix.astype(np.float32)
    values, scales = round_matrix(torch.from_numpy(matrix))
    assert values.dtype == torch.float8_e4m3fn
    assert scales.shape == (-(-rows // 128), -(-columns // 128))
    assert (torch.frexp(scales)[0] == 0.5).all()
    assert unrounded(values, scales).numpy().astype(np.float64).tolist() == by_hand(matrix).tolist()
    assert torch.equal(unrounded(values, scales).bfloat16().float(), unrounded(values, scales)), "exact in bfloat16"


@pytest.mark.parametrize("shape", [(256, 384), (200, 300)])
def test_torchao_rounds_to_the_same_bytes_by_the_same_scales_and_its_products_are_ours(shape):
    theirs = pytest.importorskip(
        "torchao.quantization.quant_primitives", reason="torchao is no dependency: pip install torchao"
    )
    random = torch.Generator().manual_seed(0)
    matrix = torch.randn(shape, generator=random) * torch.rand(shape[0], 1, generator=random)
    values, scales = round_matrix(matrix)
    padded = torch.nn.functional.pad(matrix, (0, -shape[1] % 128, 0, -shape[0] % 128))
    rounded = theirs._quantize_affine_float8(padded, scales, torch.float8_e4m3fn)
    weights = theirs._dequantize_affine_float8(rounded, scales, torch.float32)[: shape[0], : shape[1]]
    inputs = torch.randn(5, shape[1], generator=random)
    assert torch.equal(rounded[: shape[0], : shape[1]].view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(inputs @ weights.T, inputs @ unrounded(values, scales).T)


def test_what_is_not_finite_stays_so_in_its_own_block_and_nothing_stays_nothing():
    matrix = torch.ones(200, 300)
    matrix[5, 7], matrix[150, 299], matrix[130:, :128] = torch.inf, torch.nan, 0.0
    rounded = unrounded(*round_matrix(matrix))
    assert not rounded[5, 7].isfinite()
    assert not rounded[150, 299].isfinite()
    assert torch.equal(rounded[130:, :128], matrix[130:, :128])
    assert torch.equal(rounded[:128, 128:], matrix[:128, 128:])


def test_embeddings_head_norms_and_routers_are_left():
    plain, experts = tiny("qwen2"), mixture()
    for model in (plain, experts):
        rounded = names_of(model)
        left = {name for name, _ in model.named_parameters()} - rounded
        assert any("q_proj.weight" in name for name in rounded)
        assert all("norm" in n or "bias" in n or "embed" in n or "lm_head" in n or ".gate." in n for n in left)
    assert any("gate.weight" in name for name in left)
    assert any("experts" in name for name in rounded)


@pytest.mark.parametrize("kind", ["qwen2", "gpt_neox"])
async def test_weights_that_arrive_are_rounded_like_those_that_it_began_with(kind):
    asked, trained, theirs = ragged(4, Sampling(6)), tiny(kind, seed=1), tiny(kind, seed=1)
    before = {name: parameter.detach().clone() for name, parameter in trained.named_parameters()}
    names = names_of(theirs)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name in names:
                parameter.copy_(torch.from_numpy(by_hand(parameter.numpy())))
    engine, lent = (TransformersEngine(tiny(kind), weights="float8") for _ in range(2))
    expected = await answers(TransformersEngine(theirs), asked)
    await engine.load(packed(trained, 1))
    for _ in range(2):  # its own tensors are shared the first time
        await lent.load(Weights.lent(trained.named_parameters(), lambda: 1))
    for ours in (await answers(engine, asked), await answers(lent, asked)):
        for number in range(4):
            assert ours[number].response_ids.tolist() == expected[number].response_ids.tolist()
            assert ours[number].logprobs.tolist() == pytest.approx(expected[number].logprobs.tolist(), abs=1e-5)
    for name, parameter in trained.named_parameters():
        assert torch.equal(parameter, before[name]), "the trainer's own weights are not rounded"
    size, off = (
        np.concatenate([make(before[n].numpy().astype(np.float64)).ravel() for n in names])
        for make in (np.array, lambda weight: by_hand(weight) - weight)
    )
    assert engine.rounding == lent.rounding
    assert engine.rounding["weights/float8_error"] == pytest.approx(
        np.linalg.norm(off) / np.linalg.norm(size), rel=1e-4
    )
    assert 0.02 < engine.rounding["weights/float8_block_error"] < 0.04
    assert "float8" in engine.way.words


@pytest.mark.parametrize("factor", [1.0, 1.1, 2.0])
def test_a_wrong_scale_of_one_block_is_seen_in_that_block_and_a_right_one_never_rings(factor, monkeypatch):
    def planted(values, scales):
        if tuple(scales.shape) == (3, 4):
            scales[1, 2] *= factor
        return unrounded(values, scales)

    monkeypatch.setattr(float8, "unrounded", planted)
    rounded, weight = Float8Weights(tiny()), torch.randn(300, 400)
    rounded.put("weight", weight, weight)
    rang = RoundingAlarm().check(1, rounded.metrics)
    assert (rang is not None) == (factor != 1.0)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.01, 30.0))
def test_no_weights_are_so_odd_that_rounding_them_rings(seed, tails):
    random = np.random.default_rng(seed)
    matrix = np.exp(tails * random.standard_normal((150, 40))).clip(1e-12, 1e12).astype(np.float32)
    matrix[:20] = np.float32(1.0625 * 2.0 ** random.integers(-3, 3))  # halfway between two numbers of float8
    rounded, weight = Float8Weights(tiny("qwen2")), torch.from_numpy(matrix)
    rounded.put("weight", weight, weight)
    assert RoundingAlarm().check(1, rounded.metrics) is None


def test_a_gpu_has_them_too_and_a_server_says_that_it_has_not():
    assert no_rounding("transformers", "float8", on_cpu=False) is None
    assert no_rounding("transformers", "int8", on_cpu=False) is not None
    assert "transformers" in no_rounding("vllm", "float8", on_cpu=True)
