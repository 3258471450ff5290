"""Bins of actions, against numpy's, which the original uses."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf.models.policy.vla.tokens import END, PAD, ActionTokens, ByteTexts

numbers = st.lists(st.floats(-1.5, 1.5), min_size=1, max_size=20)


@given(numbers, st.integers(2, 300))
def test_tokens_are_those_of_the_original(actions, bins):
    vocabulary = 1000
    edges = np.linspace(-1.0, 1.0, bins)
    clipped = np.clip(actions, -1.0, 1.0)
    # Where a number lies on an edge up to rounding, either side is right.
    near = np.abs(clipped[:, None] - edges).min(1) < 1e-9
    expected = vocabulary - np.digitize(clipped, edges)
    tokens = ActionTokens(vocabulary, bins)
    found = tokens.encode(torch.tensor(actions, dtype=torch.float64)).numpy()
    assert (np.abs(found - expected) <= near).all()
    assert found.min() >= vocabulary - bins
    assert found.max() < vocabulary

    middles = (edges[:-1] + edges[1:]) / 2
    words = middles[np.clip(vocabulary - found - 1, 0, len(middles) - 1)]
    np.testing.assert_allclose(tokens.decode(torch.from_numpy(found)).numpy(), words, atol=1e-6)


@given(numbers, st.integers(2, 300))
def test_a_number_comes_back_within_half_a_bin(actions, bins):
    tokens = ActionTokens(500, bins)
    there = torch.tensor(actions, dtype=torch.float64).clamp(-1, 1)
    assert ((tokens.decode(tokens.encode(there)) - there).abs() <= 1 / (bins - 1) + 1e-6).all()


def test_every_token_but_the_first_is_the_token_of_what_it_says():
    tokens = ActionTokens(40, 16)
    words = torch.arange(24, 40)
    assert tokens.encode(tokens.decode(words)).tolist() == [25, *range(25, 40)]
    assert tokens.encode(torch.tensor([1.0])).tolist() == [24]


def test_more_bins_than_words_are_refused():
    with pytest.raises(ValueError, match=r"bins=50.*2.*size.*vocabulary, 40"):
        ActionTokens(40, 50)


@given(st.lists(st.text(max_size=5), min_size=1, max_size=4))
def test_texts_come_back_from_their_tokens(texts):
    rows = ByteTexts(24).encode(texts)
    assert rows.shape == (len(texts), 24)
    for row, text in zip(rows.tolist(), texts, strict=True):
        assert row[-1] == END
        assert bytes(token - 2 for token in row if token not in (PAD, END)).decode() == text
        assert row == sorted(row, key=lambda token: token != PAD)  # padding stands before everything


def test_a_text_that_is_too_long_is_named():
    with pytest.raises(ValueError, match=r"text_length=4.*short.*'push'.*5"):
        ByteTexts(4).encode(["push"])
