"""Choosing tokens."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf.engines.sampling import choose, uniforms

WORD = (1 << 64) - 1


def split_mix(seed, position):
    """SplitMix64 as published, run from the start."""
    state = seed & WORD
    for _ in range(position + 1):
        state = (state + 0x9E3779B97F4A7C15) & WORD
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
        z ^= z >> 31
    return (z >> 11) / 2**53


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5), st.integers(0, 50))
def test_the_numbers_are_split_mix(seeds, position):
    assert uniforms(torch.tensor(seeds), position).tolist() == [split_mix(seed, position) for seed in seeds]


def test_the_published_first_output_of_seed_zero():
    assert split_mix(0, 0) == (0xE220A8397B1DCDAF >> 11) / 2**53


def test_tokens_come_as_often_as_their_probability_says():
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, -math.inf])
    count = 20_000
    drawn, logprobs = choose(
        logits.expand(count, 5), torch.full((count,), 1.5), uniforms(torch.arange(count) * 7919, 3)
    )
    expected = torch.softmax(logits / 1.5, dim=-1)
    seen = torch.bincount(drawn, minlength=5) / count
    assert seen[4] == 0
    torch.testing.assert_close(seen, expected, atol=4 * (0.25 / count) ** 0.5, rtol=0)
    torch.testing.assert_close(logprobs, expected.log()[drawn])


@given(st.sampled_from([0.0, 0.5, 1 - 2**-53]), st.integers(1, 40))
def test_no_number_draws_an_impossible_token(uniform, size):
    logits = torch.full((2, size), -math.inf)
    possible = size // 2
    logits[:, possible] = 3.0
    tokens, logprobs = choose(logits, torch.ones(2), torch.full((2,), uniform, dtype=torch.float64))
    assert tokens.tolist() == [possible] * 2
    assert logprobs.tolist() == [0.0] * 2


def test_unlikely_tokens_can_be_drawn_however_many_there_are():
    logits = torch.full((1, 200_000), math.log(2e-8))  # each below float32's resolution next to 1; together 0.4 %
    logits[0, 0] = 0.0
    tokens, _ = choose(logits, torch.ones(1), torch.tensor([0.9999], dtype=torch.float64))
    assert int(tokens) > 190_000


def test_rows_have_their_own_temperature():
    logits = torch.tensor([[0.0, 1.0, 3.0]]).repeat(3, 1)
    uniform = torch.full((3,), 0.01, dtype=torch.float64)
    tokens, logprobs = choose(logits, torch.tensor([0.0, 1.0, 100.0]), uniform)
    assert tokens.tolist() == [2, 0, 0]
    assert logprobs[0] == pytest.approx(float(torch.log_softmax(logits[0], -1)[2]))  # greedy: at temperature 1
    assert logprobs[2] == pytest.approx(math.log(1 / 3), abs=0.02)


def test_bf16_logits_are_read_in_float32():
    _, logprobs = choose(torch.randn(2, 9).bfloat16(), torch.ones(2), torch.zeros(2, dtype=torch.float64))
    assert logprobs.dtype == torch.float32
