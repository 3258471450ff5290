"""Rows become groups: prompts shared by pairs, limits counted, and a stream that goes on where it was."""

import numpy as np
import pytest

from rlinf.data.datasets.load import ConversationOptions, load_conversations
from rlinf.data.datasets.prompts import Room
from rlinf.data.datasets.source import DataError
from rlinf.data.tokenizer import character_tokenizer

TOKENIZER = character_tokenizer("abcdefgh")
ROWS = [{"prompt": "ab", "completion": "c" * length} for length in (1, 3, 6)]


def load(rows, **options):
    return load_conversations(TOKENIZER, train=rows, shuffle=False, options=ConversationOptions(**options))


def test_too_long_ones_are_left_out_and_counted():
    data = load(ROWS, max_tokens=6)
    assert [len(group.samples[0].response_ids) for group in data.train.take(4)] == [2, 4, 2, 4]
    assert data.train.dropped == 1


def test_too_long_ones_are_cut_at_their_end_and_counted():
    data = load(ROWS, max_tokens=6, overlong="truncate")
    assert [len(group.samples[0].response_ids) for group in data.train.take(3)] == [2, 4, 4]
    assert (data.train.truncated, data.train.dropped) == (1, 0)
    nothing = load([*ROWS, {"prompt": "a" * 9, "completion": "b"}], max_tokens=6, overlong="truncate")
    nothing.train.take(4)
    assert nothing.train.dropped == 1, "of the last nothing is left to learn"


def test_too_long_ones_are_refused_with_their_place():
    with pytest.raises(DataError, match=r"3:.*conversation.*9 tokens.*supervised.max_tokens=6"):
        load(ROWS, max_tokens=6, overlong="error").train.take(3)
    with pytest.raises(DataError, match=r"nothing.*longer.*supervised.max_tokens=2"):
        load(ROWS, max_tokens=2).train.take(1)


def test_the_positions_of_the_model_are_a_limit_too():
    data = load(ROWS, room=Room(6, "positions"))
    assert [len(group.samples[0].response_ids) for group in data.train.take(2)] == [2, 4]
    data.train.take(1)
    assert data.train.dropped == 1


def test_rows_that_cannot_be_used_are_left_out_counted_and_told():
    chats = [
        [{"role": role, "content": text} for role, text in turns]
        for turns in (
            [("user", "a"), ("assistant", "b")],
            [("nobody", "a"), ("assistant", "c")],
            [("user", "a"), ("assistant", "d")],
        )
    ]
    template = "{% for m in messages %}{{ {'user': 'e', 'assistant': 'f'}[m.role] + m.content }}{% endfor %}"
    rows = [{"messages": chat} for chat in chats]
    data = load(rows, chat_template=template + "{% if add_generation_prompt %}f{% endif %}")
    groups = data.train.take(4)
    assert [TOKENIZER.decode(group.samples[0].response_ids) for group in groups] == ["b", "d", "b", "d"]
    assert data.train.unusable == 1 or data.train.unusable == 2
    assert "row 2" in data.train.remark
    with pytest.raises(DataError, match=r"row 2: .*template"):
        load(rows, chat_template=template, unusable="error").train.take(3)
    with pytest.raises(DataError, match=r"row 2: .*\\ud83d"):
        load([ROWS[0], {"prompt": "a", "completion": "b\ud83d"}])  # at the start, since reading shows it


def test_texts_that_the_tokenizer_does_not_know_are_counted_and_told():
    rows = [ROWS[0], {"prompt": "abcdef", "completion": "好"}, {"prompt": "你", "completion": "a"}]
    data = load(rows)
    assert len(data.train.take(3)) == 3
    assert data.train.unknown == 1
    assert "row 2" in data.train.unknown_remark
    assert "好" in data.train.unknown_remark


def test_a_pair_shares_its_prompt_and_has_its_margin():
    rows = [{"chosen": "abcd", "rejected": "abdd", "margin": 2}]
    (group,) = load(rows, kind="pairs").train.take(1)
    assert TOKENIZER.decode(group.prompt.token_ids) == "ab"
    assert [TOKENIZER.decode(sample.response_ids) for sample in group.samples] == ["cd<eos>", "dd<eos>"]
    assert group.prompt.row == {"margin": 2.0}


def test_a_scored_pair_learns_one_token_behind_its_last_that_is_no_padding():
    rows = [{"prompt": "ab", "chosen": "cd<pad>", "rejected": "d"}]
    (group,) = load(rows, kind="pairs", scored=True).train.take(1)
    for sample, text in zip(group.samples, ("cd<pad><eos>", "d<eos>"), strict=True):
        assert TOKENIZER.decode(sample.response_ids[:-1]) == text
        assert np.flatnonzero(sample.loss_mask).tolist() == [len(sample.response_ids) - 1]


def test_log_probs_of_a_reference_in_the_data_sum_to_what_they_were():
    rows = [{"prompt": "ab", "chosen": "cd", "rejected": "d", "ref_chosen_logps": -3.5, "ref_rejected_logps": -1}]
    (group,) = load(rows, kind="pairs").train.take(1)
    assert [float(sample.column("ref_logprobs").sum()) for sample in group.samples] == [-3.5, -1.0]


def test_every_wrong_row_is_gathered():
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a"}, {"prompt": "a", "completion": ["b"]}]
    with pytest.raises(DataError, match=r"2 of 3.*\n.* 2: .*'completion'.*\n.* 3"):
        load(rows)


def test_a_stream_goes_on_where_it_was_and_not_on_other_data():
    first = load_conversations(TOKENIZER, train=ROWS, seed=3)
    first.train.take(4)
    state, expected = first.train.state_dict(), [group.prompt.token_ids.tolist() for group in first.train.take(5)]
    again = load_conversations(TOKENIZER, train=ROWS, seed=3)
    again.train.load_state_dict(state)
    assert [group.prompt.token_ids.tolist() for group in again.train.take(5)] == expected
    with pytest.raises(DataError, match=r"data.*checkpoint"):
        load_conversations(TOKENIZER, train=ROWS[:2], seed=3).train.load_state_dict(state)


def test_a_generator_is_read_as_it_comes():
    data = load_conversations(TOKENIZER, train=lambda: iter(ROWS), shuffle=False)
    assert [group.id for group in data.train.take(4)] == [0, 1, 2, 3]
    assert data.rows is None


def test_a_generated_task_has_pairs_whose_rejected_answer_is_wrong():
    data = load_conversations(options=ConversationOptions(kind="pairs"))
    for group in data.held_out[:50]:
        chosen, rejected = (data.tokenizer.decode(sample.response_ids[:-1]) for sample in group.samples)
        assert chosen == "".join(sorted(rejected)) != rejected
