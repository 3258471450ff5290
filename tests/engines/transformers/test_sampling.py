"""Choosing tokens."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from rlinf.engines.transformers import sampling
from rlinf.engines.transformers.sampling import DRAWS, Rules, choose, uniforms

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


def drawn(logits, seeds, position=0, temperature=1.0, **limits):
    """Tokens and log-probs of rows that draw alike, or each by its own list of settings."""
    draws = np.zeros(len(logits), dtype=DRAWS)
    draws["top_p"] = 1
    draws["seed"], draws["temperature"] = seeds, temperature
    for name, value in limits.items():
        draws[name] = value
    return choose(logits, Rules.of(draws, torch.device("cpu")), torch.full((len(logits),), position))


@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 50)), min_size=1, max_size=5))
def test_the_numbers_are_split_mix(rows):
    seeds, positions = torch.tensor(rows).T
    assert uniforms(seeds, positions).tolist() == [split_mix(seed, position) for seed, position in rows]


def test_the_published_first_output_of_seed_zero():
    assert split_mix(0, 0) == (0xE220A8397B1DCDAF >> 11) / 2**53


def test_tokens_come_as_often_as_their_probability_says():
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, -math.inf])
    count = 20_000
    tokens, logprobs = drawn(logits.expand(count, 5), np.arange(count) * 7919, 3, 1.5)
    expected = torch.softmax(logits / 1.5, dim=-1)
    seen = torch.bincount(tokens, minlength=5) / count
    assert seen[4] == 0
    torch.testing.assert_close(seen, expected, atol=4 * (0.25 / count) ** 0.5, rtol=0)
    torch.testing.assert_close(logprobs, expected.log()[tokens])


@given(st.integers(0, 2**62), st.integers(1, 40))
def test_no_number_draws_an_impossible_token(seed, size):
    logits = torch.full((2, size), -math.inf)
    possible = size // 2
    logits[:, possible] = 3.0
    tokens, logprobs = drawn(logits, [seed, seed + 1])
    assert tokens.tolist() == [possible] * 2
    assert logprobs.tolist() == [0.0] * 2


def seed_above(least):
    return next(seed for seed in range(10**6) if split_mix(seed, 0) > least)


def test_unlikely_tokens_can_be_drawn_however_many_there_are():
    logits = torch.full((1, 200_000), math.log(2e-8))  # each below float32's resolution next to 1; together 0.4 %
    logits[0, 0] = 0.0
    tokens, _ = drawn(logits, [seed_above(0.9999)])
    assert int(tokens) > 190_000


def test_rows_have_their_own_temperature():
    logits = torch.tensor([[0.0, 1.0, 3.0]]).repeat(3, 1)
    seed = next(seed for seed in range(10**6) if split_mix(seed, 0) < 0.02)
    tokens, logprobs = drawn(logits, [seed] * 3, temperature=[0.0, 1.0, 100.0])
    assert tokens.tolist() == [2, 0, 0]
    assert logprobs[0] == pytest.approx(float(torch.log_softmax(logits[0], -1)[2]))  # greedy: at temperature 1
    assert logprobs[2] == pytest.approx(math.log(1 / 3), abs=0.02)


def test_bf16_logits_are_read_in_float32():
    _, logprobs = drawn(torch.randn(2, 9).bfloat16(), [0, 1])
    assert logprobs.dtype == torch.float32


def allowed(logits, temperature, top_k, top_p, min_p):
    """The tokens that may be drawn, by transformers' own processors, one after the other."""
    scores = logits[None] / temperature
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p:
        scores = MinPLogitsWarper(min_p)(None, scores)
    return set(torch.isfinite(scores[0]).nonzero()[:, 0].tolist())


@given(
    st.integers(0, 1000), st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([0, 1, 3, 100]),
    st.sampled_from([0.05, 0.5, 0.9, 1.0]), st.sampled_from([0.0, 0.1, 0.6]),
)  # fmt: skip
@settings(max_examples=40)
def test_limits_leave_out_what_transformers_leaves_out(seed, temperature, top_k, top_p, min_p):
    logits = torch.randn(12, generator=torch.Generator().manual_seed(seed)) * 2
    count = 1500
    tokens, logprobs = drawn(
        logits.expand(count, 12), np.arange(count), 0, temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    kept = allowed(logits, temperature, min(top_k, 12), top_p, min_p)
    whole = torch.softmax(logits / temperature, dim=-1)
    assert set(tokens.tolist()) <= kept
    share = whole[list(kept)] / whole[list(kept)].sum()
    seen = torch.bincount(tokens, minlength=12)[list(kept)] / count
    torch.testing.assert_close(seen, share, atol=5 * (0.25 / count) ** 0.5, rtol=0)
    torch.testing.assert_close(logprobs, whole.log()[tokens])  # of the whole softmax, whatever was left out


def test_limits_of_a_row_do_not_change_what_another_draws():
    logits = torch.randn(30, 50)
    alone, _ = drawn(logits, np.arange(30))
    together, _ = drawn(logits, np.arange(30), top_k=[0, 3] * 15)
    assert torch.equal(alone[::2], together[::2])
    assert not torch.equal(alone[1::2], together[1::2])


@pytest.mark.parametrize("vocabulary", [5, 128, 300, 1280])
@given(st.integers(0, 2**31), st.sampled_from([1.0, 12.0, 60.0]), st.booleans())
@settings(max_examples=25)
def test_looking_among_blocks_first_gives_the_same_tokens(vocabulary, seed, spread, limited):
    torch.manual_seed(seed)
    logits = torch.randn(40, vocabulary) * spread
    logits[:, torch.rand(vocabulary) < 0.3] = -math.inf
    logits[:, seed % vocabulary] = 0.0  # of every row something is left
    draws = np.zeros(40, dtype=DRAWS)
    draws["seed"], draws["temperature"], draws["top_p"] = np.arange(40) + seed, 1, 0.9 if limited else 1
    draws["temperature"][:4] = 0
    rules, positions = Rules.of(draws, torch.device("cpu")), torch.arange(40)
    tokens, logprobs = choose(logits, rules, positions)
    among, told = choose(logits, rules, positions, blocks=True)
    assert among.tolist() == tokens.tolist()
    torch.testing.assert_close(told, logprobs)
    assert torch.isfinite(told).all()


def test_among_blocks_a_token_without_weight_is_never_taken():
    weights = torch.zeros(300, 1024)
    kept = torch.randint(0, 1024, (300, 3), generator=torch.Generator().manual_seed(1))
    weights.scatter_(1, kept, torch.tensor([1.0, 1e-7, 3e-20]).expand(300, 3).contiguous())
    largest = torch.full((300, 1), 1 - 2.0**-53, dtype=torch.float64)
    for uniform in (largest, torch.zeros_like(largest)):
        tokens = sampling._Blocks(weights).draw(uniform)
        assert (weights.gather(1, tokens[:, None]) > 0).all()


def test_tokens_drawn_from_what_is_not_finite_are_tokens():
    tokens, logprobs = choose(
        torch.full((3, 300), math.nan), Rules.of(np.zeros(3, dtype=DRAWS), torch.device("cpu")), torch.zeros(3).long(),
        blocks=True,
    )  # fmt: skip
    assert ((tokens >= 0) & (tokens < 300)).all()
    assert torch.isnan(logprobs).all()


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(
    "how", [{}, {"temperature": 0.0}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.01}]
)
def test_ids_that_the_tokenizer_has_not_are_never_drawn_and_the_others_as_often_as_among_themselves(how, blocks):
    vocabulary, rows = 12, 4000
    padding = torch.tensor([3, 10, 11])
    logits = torch.linspace(-1, 3, vocabulary).expand(rows, -1).clone()  # the padding is among the likeliest
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **how}
    draws = np.zeros(rows, DRAWS)
    draws["seed"] = np.arange(rows)
    for name, value in settings.items():
        draws[name] = value
    rules, first = Rules.of(draws, logits.device), torch.zeros(rows, dtype=torch.int64)
    tokens, logprobs = choose(logits, rules, first, blocks=blocks, padding=padding)
    assert not set(tokens.tolist()) & {3, 10, 11}
    whole = torch.log_softmax(logits / (settings["temperature"] or 1.0), -1)
    torch.testing.assert_close(logprobs, whole.gather(1, tokens[:, None])[:, 0], atol=1e-5, rtol=0)
    masked = logits.index_fill(1, padding, -100.0)  # what transformers would be given
    expected, _ = choose(masked, rules, first, blocks=blocks)
    assert torch.equal(tokens, expected)
