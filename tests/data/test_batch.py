"""Laying out sequences as rectangles."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlinf.data.batch import cut, pad, policy_batch
from rlinf.data.sample import Prompt, Sample


def ids(*numbers):
    return np.array(numbers, dtype=np.int64)


def sample(prompt, response, temperature=1.0):
    return Sample(
        prompt=Prompt(0, ids(*prompt)),
        index=0,
        response_ids=ids(*response),
        logprobs=np.array([-0.1 * token for token in response], dtype=np.float32),
        versions=np.zeros(len(response), dtype=np.int32),
        text="",
        truncated=False,
        temperature=temperature,
    )


def test_the_mask_marks_where_response_tokens_are_predicted():
    tokens = pad([(ids(5, 6), ids(7, 8)), (ids(1, 2, 3), ids(4, 9, 9)), (ids(4), ids())])
    assert tokens.input_ids.tolist() == [[5, 6, 7, 8, 0, 0], [1, 2, 3, 4, 9, 9], [4, 0, 0, 0, 0, 0]]
    assert tokens.targets[tokens.mask].tolist() == [7, 8, 4, 9, 9]
    assert tokens.mask.int().tolist() == [[0, 1, 1, 0, 0], [0, 0, 1, 1, 1], [0] * 5]


def test_old_logprobs_lie_where_their_tokens_are_predicted():
    batch = policy_batch([sample([5, 6], [7, 8]), sample([1, 2, 3], [4, 9, 9], 0.5)], [1.0, -2.0])
    targets = batch.tokens.targets[batch.tokens.mask]
    np.testing.assert_allclose(batch.old_logprobs[batch.tokens.mask], -0.1 * targets.numpy(), rtol=1e-6)
    assert (batch.old_logprobs[~batch.tokens.mask] == 0).all()
    assert batch.advantages.tolist() == [1.0, -2.0]
    assert batch.temperature.tolist() == [1.0, 0.5]


def test_greedy_logprobs_are_at_temperature_one():
    assert policy_batch([sample([1], [2], 0.0)], [1.0]).temperature.tolist() == [1.0]


@given(st.lists(st.integers(0, 20)), st.integers(1, 30))
def test_cutting_keeps_order_and_budget(sizes, budget):
    pieces = list(cut(range(len(sizes)), sizes, budget))
    assert [item for piece in pieces for item in piece] == list(range(len(sizes)))
    for piece in pieces:
        assert piece
        assert len(piece) == 1 or sum(sizes[item] for item in piece) <= budget
    for one, following in itertools.pairwise(pieces):
        assert sum(sizes[item] for item in one) + sizes[following[0]] > budget  # no piece is smaller than need be
