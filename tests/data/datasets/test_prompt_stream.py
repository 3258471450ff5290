"""The endless supply of prompts."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.data.datasets.prompts import PromptMaker, PromptOptions
from rlinf.data.datasets.source import Columns, DataError, ListRows
from rlinf.data.datasets.stream import PromptStream, left_out
from rlinf.data.tokenizer import character_tokenizer

TOKENIZER = character_tokenizer("0123456789x")


def rows(count, long=()):
    return [{"prompt": str(index) + "x" * 20 * (index in long)} for index in range(count)]


def stream(count=20, long=(), *, given=None, **more):
    how = PromptOptions(max_prompt_tokens=10, overlong=more.pop("overlong", "drop"))
    maker = PromptMaker(TOKENIZER, Columns("prompt", None, None, None), how)
    return PromptStream(ListRows("data", rows(count, long) if given is None else given), maker, **more)


def seen(prompts):
    return [(prompt.id, prompt.text) for prompt in prompts]


@given(st.integers(1, 30), st.integers(0, 100), st.booleans())
def test_each_pass_shows_every_row_once(count, seed, shuffle):
    source = stream(count, seed=seed, shuffle=shuffle)
    for which in range(3):
        prompts = source.take(count)
        assert sorted(int(prompt.text) for prompt in prompts) == list(range(count))
        assert [prompt.id for prompt in prompts] == list(range(which * count, (which + 1) * count))
        if not shuffle:
            assert [int(prompt.text) for prompt in prompts] == list(range(count))


def test_orders_differ_by_seed_and_by_pass():
    one, other = stream(seed=1), stream(seed=2)
    orders = [tuple(prompt.text for prompt in source.take(20)) for source in (one, one, other)]
    assert len(set(orders)) == 3


@settings(max_examples=40)
@given(st.lists(st.integers(0, 12), max_size=8), st.lists(st.integers(0, 12), max_size=8), st.sets(st.integers(0, 9)))
def test_a_saved_stream_goes_on_where_it_was(before, after, long):
    long = long - {0}
    source = stream(10, long, seed=3)
    for count in before:
        source.take(count)
    state = json.loads(json.dumps(source.state_dict()))
    expected = seen(source.take(sum(after)))
    resumed = stream(10, long, seed=3)
    resumed.load_state_dict(state)
    found = [pair for count in after for pair in seen(resumed.take(count))]
    assert found == expected
    assert (resumed.position, resumed.dropped) == (source.position, source.dropped)


def test_long_prompts_are_left_out_and_counted_and_keep_their_ids():
    source = stream(6, {1, 4}, shuffle=False)
    assert seen(source.take(5)) == [(0, "0"), (2, "2"), (3, "3"), (5, "5"), (6, "0")]
    assert (source.position, source.dropped, source.truncated) == (7, 2, 0)


def test_long_prompts_that_are_cut_are_counted():
    source = stream(6, {1, 4}, shuffle=False, overlong="truncate")
    source.take(6)
    assert (source.dropped, source.truncated) == (0, 2)


def test_a_data_set_of_long_prompts_alone_is_refused():
    with pytest.raises(DataError, match=r"prompt.*longer.*data.max_prompt_tokens=10"):
        stream(5, range(5)).take(3)


BROKEN = {"prompt": "\ud800"}


def test_rows_that_cannot_be_used_are_left_out_and_counted_apart_and_a_saved_stream_goes_on_behind_them():
    given = [BROKEN if index in (2, 5) else {"prompt": "x" * 20 * (index == 3) + str(index)} for index in range(8)]
    source = stream(given=given, seed=4)
    before = seen(source.take(3))
    state = json.loads(json.dumps(source.state_dict()))
    after = seen(source.take(20))
    assert {text for _, text in before + after} == {"0", "1", "4", "6", "7"}
    drawn = stream(given=rows(8), seed=4).take(source.position)
    assert source.unusable == sum(prompt.text in "25" for prompt in drawn)
    assert source.dropped == sum(prompt.text == "3" for prompt in drawn)
    assert "data, row" in source.remark
    assert "ud800" in source.remark
    again = stream(given=given, seed=4)
    again.load_state_dict(state)
    assert seen(again.take(20)) == after
    assert again.state_dict() == source.state_dict()
    del state["unusable"], state["unknown"]  # as checkpoints of before are
    again.load_state_dict(state)


def test_what_was_left_out_is_told_by_kind_with_the_limit_and_the_first_row():
    source = stream(given=[{"prompt": "1"}, BROKEN, {"prompt": "x" * 11}], shuffle=False)
    assert left_out(source) == {}
    source.take(2)
    told = left_out(source)
    assert told["data/dropped"].startswith("1 prompt longer than data.max_prompt_tokens=10")
    assert "data, row 2" in told["data/unusable"]
    assert set(told) == {"data/dropped", "data/unusable"}


def test_rows_that_the_tokenizer_does_not_know_are_counted_whenever_they_are_drawn_and_told():
    source = stream(given=[{"prompt": "1"}, {"prompt": "你"}], shuffle=False)
    source.take(4)
    assert source.unknown == 2
    assert "data, row 2" in left_out(source)["data/unknown"]
    again = stream(given=[{"prompt": "1"}, {"prompt": "你"}], shuffle=False)
    again.load_state_dict(source.state_dict())
    assert again.unknown == 2


@pytest.mark.parametrize("count", [1, 3, 1000])
def test_rows_of_which_none_fits_are_refused_by_the_first(count):
    source = stream(given=[BROKEN] * count, shuffle=False)
    with pytest.raises(DataError, match=r"first: data.*1: .*ud800"):
        source.take(4)
    assert source.position <= 200, "soon: so many one after the other are no accident"


def test_one_short_prompt_among_long_ones_is_enough():
    assert [prompt.text for prompt in stream(200, range(1, 200)).take(3)] == ["0"] * 3


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"count": 19}, "rows was 20"),
        ({"given": [{"prompt": "7"}] * 20}, "fingerprint was"),
        ({"seed": 1}, "seed was 0"),
        ({"shuffle": False}, "shuffle was True"),
    ],
)
def test_a_state_of_other_data_is_refused(other, text):
    state = stream().state_dict()
    with pytest.raises(DataError, match=f"data.*checkpoint .*{text}"):
        stream(**other).load_state_dict(state)


def test_a_stream_of_nothing_is_refused():
    with pytest.raises(DataError, match=r"row.*draw"):
        stream(0)


async def test_prompts_can_be_drawn_beside_the_loop():
    assert seen(await stream(seed=4).draw(7)) == seen(stream(seed=4).take(7))


def test_what_is_kept_changes_nothing(monkeypatch):
    expected = stream(20, {3, 4}, seed=2)
    found = stream(20, {3, 4}, seed=2)
    texts = [seen(expected.take(7)) for _ in range(20)]
    monkeypatch.setattr("rlinf.data.datasets.stream._KEPT", 5)
    assert [seen(found.take(7)) for _ in range(20)] == texts
    assert found.dropped == expected.dropped > 10


def test_a_row_that_is_drawn_several_times_at_once_is_encoded_once(monkeypatch):
    made, encode = [], PromptMaker._encode
    monkeypatch.setattr(PromptMaker, "_encode", lambda self, texts: (made.extend(texts), encode(self, texts))[1])
    assert [prompt.id for prompt in stream(2).take(9)] == list(range(9))
    assert len(made) == 2


def test_rows_that_come_round_again_are_not_encoded_again(monkeypatch):
    source = stream(6)
    source.take(6)
    monkeypatch.setattr(PromptMaker, "_encode", lambda self, texts: [[] for _ in texts])
    assert len(source.take(12)) == 12
