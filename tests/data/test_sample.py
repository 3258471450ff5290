"""Groups of samples: which of them count, and how they travel."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.data.packing import Row
from rlinf.data.sample import Example, Group, Prompt, Sample, Segment


def group(lengths, *, prompt=None, outcomes=("ok", "truncated", "timeout")):
    asked = Prompt(7, np.arange(3), "text", "answer", {"level": 2})
    samples = [
        Sample(
            prompt or asked, i, np.arange(n), np.arange(n, dtype=np.float32) / 7, np.full(n, i, np.int32), f"text {i}",
            i % 2 == 0, 0.5, None if i % 3 == 2 else 0.25 * i, outcomes[i % 3], {"part": 0.5 * i}, f"x{i}", f"note {i}",
            {"values": np.arange(n, dtype=np.float32) - i}, np.arange(n) % 2 == 0 if i % 2 else None,
        )
        for i, n in enumerate(lengths)
    ]  # fmt: skip
    return Group(asked, tuple(samples))


def fields(sample):
    def plain(value):
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        return value.tolist() if isinstance(value, np.ndarray) else value

    return [plain(getattr(sample, name)) for name in Sample.__slots__ if name != "prompt"]


@given(st.lists(st.integers(0, 6), max_size=6), st.booleans())
def test_a_group_arrives_as_it_left(lengths, foreign):
    sent = group(lengths, prompt=Prompt(8, np.arange(1)) if foreign else None)
    arrived = pickle.loads(pickle.dumps(sent))
    assert [fields(sample) for sample in arrived.samples] == [fields(sample) for sample in sent.samples]
    for sample in arrived.samples:
        assert sample.response_ids.dtype == np.int64
        assert sample.logprobs.dtype == np.float32
        assert sample.versions.dtype == np.int32
        assert (sample.prompt is arrived.prompt) == (not foreign), "a shared prompt stays shared"
    assert arrived.prompt.row == {"level": 2}


def test_arrays_that_do_not_fit_together_arrive_too():
    sent = group([2, 3])
    odd = Sample(sent.prompt, 0, np.arange(4), np.zeros(2, np.float32), np.zeros(1, np.int32), "", False)
    arrived = pickle.loads(pickle.dumps(Group(sent.prompt, (odd, sent.samples[1]))))
    assert [len(arrived.samples[0].response_ids), len(arrived.samples[0].logprobs)] == [4, 2]


def test_only_samples_with_a_reward_are_scored_and_an_unjudged_group_says_so():
    judged = group([1, 1, 1, 1])
    assert [sample.index for sample in judged.scored] == [0, 1, 3]
    assert judged.rewards == [0.0, 0.25, 0.75]
    unjudged = Sample(judged.prompt, 0, np.arange(1), np.zeros(1, np.float32), np.zeros(1, np.int32), "", False)
    with pytest.raises(ValueError, match=r"judge\.score between"):
        _ = Group(judged.prompt, (unjudged,)).scored


def test_what_is_said_of_tokens_is_added_to_what_was_said_before():
    told = group([2, 0]).with_column("ref_logprobs", [np.array([-1.0, -2.0]), np.array([])])
    assert {name: array.tolist() for name, array in told.samples[0].per_token.items()} == {
        "values": [0.0, 1.0],
        "ref_logprobs": [-1.0, -2.0],
    }
    assert told.samples[1].per_token["ref_logprobs"].dtype == np.float32
    with pytest.raises(ValueError, match=r"ref_logprobs \[3\].*number.*response, \[2\]"):
        group([2]).with_column("ref_logprobs", [np.zeros(3)])


def conversation():
    spoken = Segment(np.array([5, 6]), np.array([-0.5, -1.0], np.float32), np.array([3, 4], np.int32))
    tool, last = Segment(np.array([7, 8, 9])), Segment(np.array([1]), np.array([-2.0]), np.array([4]))
    return Sample.of_segments(Prompt(7, np.arange(3)), 2, [spoken, tool, last], text="so", truncated=False, reward=1.0)


def test_segments_make_a_conversation_of_which_only_what_was_generated_is_learned():
    made = conversation()
    assert made.response_ids.tolist() == [5, 6, 7, 8, 9, 1]
    assert made.loss_mask.tolist() == [True, True, False, False, False, True]
    assert made.learned_tokens == 3
    assert made.column("logprobs").tolist() == [-0.5, -1.0, -2.0]
    assert made.column("versions").tolist() == [3, 4, 4]
    assert (made.response_ids.dtype, made.logprobs.dtype, made.versions.dtype) == (np.int64, np.float32, np.int32)
    assert (made.index, made.text, made.reward) == (2, "so", 1.0)
    assert made.judged(0.5, "ok", scores={}).loss_mask is made.loss_mask
    empty = Sample.of_segments(Prompt(7, np.arange(3)), 0, [], text="", truncated=True)
    assert (len(empty.response_ids), empty.learned_tokens) == (0, 0)


def test_what_is_said_of_learned_tokens_alone_stands_at_them():
    made = conversation()
    (told,) = Group(made.prompt, (made,)).with_column("values", [np.array([0.1, 0.2, 0.3])]).samples
    np.testing.assert_allclose(told.per_token["values"], [0.1, 0.2, np.nan, np.nan, np.nan, 0.3], rtol=1e-6)
    np.testing.assert_allclose(told.column("values"), [0.1, 0.2, 0.3], rtol=1e-6)
    with pytest.raises(ValueError, match=r"values \[4\].*response, \[6\]"):
        Group(made.prompt, (made,)).with_column("values", [np.zeros(4)])


@pytest.mark.parametrize(
    ("logprobs", "versions"), [(np.zeros(2), None), (None, np.zeros(2)), (np.zeros(1), np.zeros(2))]
)
def test_a_segment_known_in_part_is_refused(logprobs, versions):
    with pytest.raises(ValueError, match=r"segment.*2 tokens"):
        Sample.of_segments(Prompt(0, np.arange(3)), 0, [Segment(np.arange(2), logprobs, versions)], text="")


@pytest.mark.parametrize("mask", [np.array([1, 0]), np.array([True]), np.array([[True, False]])])
def test_a_mask_that_is_none_is_refused(mask):
    with pytest.raises(ValueError, match=r"loss_mask.*token.*response \[2\]"):
        Sample(Prompt(0, np.arange(3)), 0, np.arange(2), np.zeros(2), np.zeros(2), "", False, loss_mask=mask)
    with pytest.raises(ValueError, match="an example: loss_mask"):
        Example(np.arange(3), np.arange(2), mask)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_a_sample_that_counts_as_less_than_nothing_is_refused(weight):
    with pytest.raises(ValueError, match=r"weight=.*more.*0"):
        Sample(Prompt(0, np.arange(3)), 0, np.arange(1), np.zeros(1), np.zeros(1), "", False, weight=weight)


def test_log_probs_of_what_a_schema_kept_are_learned_under_the_whole_softmax():
    free = Segment(np.array([5, 6]), np.array([-0.5, -1.0], np.float32), np.array([3, 4], np.int32))
    mass = np.array([-2.0, 0.0], np.float32)
    kept = Segment(np.array([1, 2]), np.array([-2.0, -0.5], np.float32), np.array([4, 4]), log_mass=mass)
    segments = [free, Segment(np.array([7])), kept]
    made = Sample.of_segments(Prompt(7, np.arange(3)), 0, segments, text="", truncated=False, reward=1.0)
    assert made.log_mass.tolist() == [0, 0, 0, -2, 0]
    assert made.column("logprobs").tolist() == [-0.5, -1.0, -4.0, -0.5]
    assert Row.of(made).old_logprobs.tolist() == [-0.5, -1.0, -4.0, -0.5]
    (came,) = pickle.loads(pickle.dumps(Group(made.prompt, (made,)))).samples
    assert came.log_mass.tolist() == made.log_mass.tolist()
    assert conversation().log_mass is None
