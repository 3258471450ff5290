"""Routes as arrays: put together from answers, laid side by side, and carried by samples."""

import pickle

import numpy as np
import pytest

from rlinf.data.packing import Row, pack
from rlinf.data.routes import compact_type, fitted, joined, side_by_side
from rlinf.data.sample import Group, Prompt, Sample, Segment

RNG = np.random.default_rng(5)


def routes(tokens, layers=2, top=2):
    return RNG.integers(0, 8, (tokens, layers, top)).astype(np.uint8)


def test_a_type_is_as_small_as_its_experts_allow():
    assert [compact_type(count) for count in (8, 255, 256)] == [np.uint8, np.uint8, np.int16]


def test_the_first_answer_that_knows_a_token_counts():
    first, second = routes(3), routes(6)
    second[:2] = 255
    whole = joined(7, [None, first, second])
    np.testing.assert_array_equal(whole[:3], first)
    np.testing.assert_array_equal(whole[3:6], second[3:])
    assert (whole[6:] == 255).all()
    hole = fitted(first, 5)
    np.testing.assert_array_equal(joined(5, [hole, second])[3:], second[3:5])
    assert joined(3, [None]) is None


def test_routes_of_two_models_do_not_share_a_micro_batch():
    with pytest.raises(ValueError, match="different models"):
        side_by_side([routes(2), routes(2, layers=3)], [2, 2])


def test_a_conversation_has_the_routes_of_all_its_answers():
    prompt = Prompt(0, np.arange(2, 6))  # 4 tokens
    first, second = routes(4 + 3 - 1), routes(4 + 3 + 2 + 2 - 1)
    second[:6] = 255
    said = [
        Segment(np.arange(3), np.zeros(3, np.float32), np.zeros(3, np.int32), first),
        Segment(np.arange(2)),
        Segment(np.arange(2), np.zeros(2, np.float32), np.zeros(2, np.int32), second),
    ]
    sample = Sample.of_segments(prompt, 0, said, text="", truncated=False)
    np.testing.assert_array_equal(sample.routes, np.concatenate([first, second[6:]]))


def test_a_sample_keeps_them_wherever_it_goes():
    prompt = Prompt(0, np.arange(2, 6))
    arrays = np.arange(3), np.zeros(3, np.float32), np.zeros(3, np.int32)
    samples = [Sample(prompt, index, *arrays, "", False, routes=routes(6)) for index in range(2)]
    judged = Group(prompt, tuple(sample.judged(1.0, "ok", scores={}) for sample in samples)).with_column(
        "ref_logprobs", [np.zeros(3)] * 2
    )
    there = pickle.loads(pickle.dumps(judged))
    for sample, found in zip(samples, there.samples, strict=True):
        np.testing.assert_array_equal(found.routes, sample.routes)


@pytest.mark.parametrize("alike", [True, False])
def test_packed_tokens_lie_beside_their_routes(alike):
    prompts = [np.arange(2, 8)] * 3 if alike else [np.arange(2, 8) + n for n in range(3)]
    rows = [Row(ids, np.arange(4) + 10 * n, routes=None if n == 1 else routes(9)) for n, ids in enumerate(prompts)]
    batch = pack(rows)
    assert (batch.places is not None) == alike
    assert len(batch.routes) == len(batch.ids)
    stands = np.arange(sum(batch.lengths)) if batch.places is None else batch.places.numpy()
    for n, start in enumerate(np.cumsum(batch.lengths) - batch.lengths):
        mine = batch.routes.numpy()[stands[start : start + 9]]
        if rows[n].routes is None:
            assert (mine[6:] == 255).all()
        else:
            np.testing.assert_array_equal(mine[6:], rows[n].routes[6:])
    assert pack([Row(np.arange(2), np.arange(2))]).routes is None
