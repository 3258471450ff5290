"""Attention of ranks that have some of the tokens each: together it is that of every sequence by itself."""

from dataclasses import dataclass
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.masking_utils import sliding_window_causal_mask_function

from rlinf.data.packing import Row, pack
from rlinf.data.prefix_tree import begins_of
from rlinf.models.language import attention, tensor_parallel
from rlinf.models.language.attention import _CAUSAL, Rule, Scores, by_kernel, of_pieces
from rlinf.models.language.kernels import Kernel, kernel_of
from rlinf.models.language.tensor_parallel import Division, whole_runs, zigzag

HEADS, KEYS, SIZE = 4, 2, 16


@dataclass
class Together:
    """Some ranks, of which this is one, that send each other nothing."""

    ranks: int
    me: int

    def size(self):
        return self.ranks

    def get_local_rank(self):
        return self.me

    def get_group(self):
        return None


def batch():
    """Two answers that share a long prompt, and two other sequences."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 9, size) for size in (19, 2, 7)]
    return pack([Row(prompts[which], rng.integers(0, 9, size)) for which, size in ((0, 6), (0, 30), (1, 1), (2, 11))])


def seen_by_all(size, end, left):
    """Who sees whom where the last of `size` queries is the last of `end` keys."""
    at = torch.arange(end)[end - size :, None] - torch.arange(end)
    return (at >= 0) & ((at <= left) | (left < 0))


def stand_in(query, key, value, bounds, longest, scale, left):
    """What a kernel for sequences of several lengths does, one sequence after the other."""
    assert [int(each.diff().max()) for each in bounds] == list(longest)
    found = []
    for part in range(len(bounds[0]) - 1):
        of = [slice(int(each[part]), int(each[part + 1])) for each in bounds]
        q, k, v = (each.transpose(0, 1)[None] for each in (query[of[0]], key[of[1]], value[of[1]]))
        mask = seen_by_all(q.shape[2], k.shape[2], left)
        attended = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
        found.append(attended[0].transpose(0, 1))
    return torch.cat(found)


def by_itself(given, packed, left):
    """Attention of each sequence alone, at the first place of each token, [tokens, heads, size]."""
    found, start = torch.zeros_like(given[0]), 0
    stands = packed.stands if packed.stands is not None else np.arange(sum(packed.lengths))
    for length in packed.lengths:
        of = torch.from_numpy(stands[start : start + length])
        start += length
        q, k, v = (each[of].transpose(0, 1)[None] for each in given)
        mask = seen_by_all(length, length, left).to(q.device)
        found[of] = F.scaled_dot_product_attention(q, k, v, mask, scale=0.3, enable_gqa=True)[0].transpose(0, 1)
    return found


WAYS = ["rectangles", "a stand-in", pytest.param("varlen", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_ranks_together_give_the_attention_of_each_sequence_by_itself(way, ranks, window):
    if way == "varlen" and not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    device = torch.device("cuda" if way == "varlen" else "cpu")
    dtype = torch.bfloat16 if way == "varlen" else torch.float32
    packed = batch()
    tokens, left = len(packed.ids), -1 if window is None else window - 1
    torch.manual_seed(0)
    given = [torch.randn(tokens, heads, SIZE).to(device, dtype) for heads in (HEADS, KEYS, KEYS)]
    expected = by_itself([each.float() for each in given], packed, left)
    order = torch.from_numpy(np.minimum(zigzag(tokens, ranks, 1), tokens - 1)).to(device)
    everywhere = [each[order.reshape(-1)] for each in given]
    scores, rule = Scores(0.3, None, None), _CAUSAL if window is None else Rule(sliding_window_causal_mask_function(5))
    compared = 0
    for me in range(ranks):
        share = Division(Together(ranks, me)).share(packed)
        pieces = type(share.pieces)(
            None, share.pieces.lengths, *(getattr(share.pieces, name).to(device) for name in PIECES)
        )
        query = given[0][order[me]]
        if way == "rectangles":
            found = of_pieces(query, *everywhere[1:], pieces, scores, rule)
        else:
            kernel = kernel_of("varlen", device) if way == "varlen" else Kernel(way, stand_in)
            found = by_kernel(kernel, query, *everywhere[1:], pieces, 0.3, left)
        real = torch.from_numpy(zigzag(tokens, ranks, 1)[me] < tokens).to(device)
        assert torch.allclose(found[real].float(), expected[order[me]][real], atol=0.02 if way == "varlen" else 1e-5)
        assert not found[~real].any()
        compared += int(real.sum())
    assert compared == tokens


PIECES = ("queries", "keys", "restore", "query_bounds", "key_bounds")


FORKS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12), st.integers(1, 9)), min_size=2, max_size=14)


@settings(max_examples=30)
@given(FORKS, st.integers(2, 3), st.integers(1, 2))
def test_sequences_that_stay_whole_lie_with_all_their_tokens_on_one_share(forks, shares, parts):
    texts = [[1, 2]]
    for number, (other, kept, more) in enumerate(forks):
        texts.append([*texts[other % len(texts)][: 1 + kept], *range(100 * number, 100 * number + more)])
    packed = pack([Row(np.array(text[:1]), np.array(text[1:])) for text in texts])
    with mock.patch.object(tensor_parallel, "_EVEN", 99.0):
        ranks = [
            Division(Together(shares * parts, me), None, Together(parts, me % parts) if parts > 1 else None, 999).share(
                packed
            )
            for me in range(shares * parts)
        ]
    assert all(rank.pieces is None for rank in ranks)
    assert sorted(torch.cat([rank.own_rows for rank in ranks]).tolist()) == [*range(len(packed.targets))]
    whole = [tuple(ids.tolist()) for ids in read(packed, packed.ids)]
    seen = []
    for first in range(0, len(ranks), parts):
        mine = ranks[first : first + parts]
        ids, own = torch.cat([rank.batch.ids for rank in mine]), mine[0].texts
        for text, at in zip(read(own, ids), read(own, mine[0].positions), strict=True):
            if tuple(text.tolist()) in whole or at.tolist() == [*range(len(at))]:  # and no padding
                seen.append(tuple(text.tolist()))
                assert at.tolist() == [*range(len(at))]
        if own.stands is not None:  # what a sequence has alone lies behind what those before it have
            assert (np.array(own.lengths) - begins_of(own.lengths, own.stands)).sum() == len(ids)
    assert not set(whole) - set(seen)
    for rank in ranks:
        for values in ("ids", "positions"):
            theirs = getattr(packed, values)[packed.predicting()][rank.own_rows]
            assert torch.equal(getattr(rank.batch, values)[rank.batch.predictors], theirs)
        assert torch.equal(rank.batch.targets, packed.targets[rank.own_rows])


def read(packed, values):
    """Values of tokens, by sequence."""
    stands = packed.stands if packed.stands is not None else np.arange(sum(packed.lengths))
    return values[torch.from_numpy(stands)].split(packed.lengths)


def test_sequences_are_cut_where_one_has_no_room_or_they_would_lie_unevenly():
    assert whole_runs([5, 5, 4, 6], np.arange(20), 2, 10).tolist() == [0, 0, 1, 1]
    assert whole_runs([5, 5, 4, 6], np.arange(20), 2, 9) is None
    assert whole_runs([9, 1, 1, 1], np.arange(12), 2, 99) is None
    shared = np.array([0, 1, 2, 3, 0, 1, 2, 4, 5, 6, 7, 8, 9, 10])  # the second shares three with the first
    assert whole_runs([4, 4, 6], shared, 2, 99).tolist() == [0, 0, 1]
    assert whole_runs([4, 4, 6], shared, 2, 5) is None


@pytest.mark.parametrize("window", [None, 70])
def test_long_pieces_are_computed_in_blocks_with_the_same_gradient(window, monkeypatch):
    packed, gradients = batch(), []
    scores, rule = Scores(0.3, None, None), _CAUSAL if window is None else Rule(sliding_window_causal_mask_function(9))
    for block in (None, 4):
        if block:
            monkeypatch.setattr(attention, "_LONG", 100)
            monkeypatch.setattr(attention, "_BLOCK", block)
        torch.manual_seed(0)
        order = torch.from_numpy(np.minimum(zigzag(len(packed.ids), 2, 1), len(packed.ids) - 1))
        sizes = ((len(order[1]), HEADS), (order.numel(), KEYS), (order.numel(), KEYS))
        given = [torch.randn(*size, SIZE, dtype=torch.float64, requires_grad=True) for size in sizes]
        out = of_pieces(*given, Division(Together(2, 1)).share(packed).pieces, scores, rule)
        out.square().sum().backward()
        gradients.append([out, *(each.grad for each in given)])
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)
