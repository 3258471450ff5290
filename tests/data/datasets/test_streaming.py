"""Prompts from rows that only come one after the other."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.data.datasets.prompts import PromptMaker, PromptOptions
from rlinf.data.datasets.source import Columns, DataError, open_rows
from rlinf.data.datasets.stream import IteratedStream, ShuffleBuffer
from rlinf.data.tokenizer import character_tokenizer

TOKENIZER = character_tokenizer("0123456789x")
ROWS = [{"prompt": str(index)} for index in range(12)]


def maker(first):
    columns = Columns.find(first, {}, where="data")
    return PromptMaker(TOKENIZER, columns, PromptOptions(max_prompt_tokens=10))


def generate():
    yield from ROWS


async def generate_async():
    for row in ROWS:
        yield row


def stream(source=generate, **more):
    return IteratedStream(open_rows(source), maker, **{"seed": 3, "buffer": 5, **more})


def seen(prompts):
    return [(prompt.id, prompt.text) for prompt in prompts]


@given(st.lists(st.integers()), st.integers(0, 20), st.integers(0, 5))
def test_a_buffer_loses_and_repeats_nothing(items, size, key):
    buffer = ShuffleBuffer(size, key)
    out = [row for index, item in enumerate(items) if (row := buffer.push((index, item))) is not None]
    assert len(out) == max(0, len(items) - size)
    while (row := buffer.pop()) is not None:
        out.append(row)
    assert sorted(out) == list(enumerate(items))
    if size == 0:
        assert out == list(enumerate(items))


def test_each_pass_shows_every_row_once_in_another_order():
    source = stream()
    first, second = source.take(12), source.take(12)
    for prompts in (first, second):
        assert sorted(int(prompt.text) for prompt in prompts) == list(range(12))
    orders = [[prompt.text for prompt in prompts] for prompts in (first, second)]
    assert orders[0] != orders[1]
    assert orders[0] != [row["prompt"] for row in ROWS]
    assert [prompt.id for prompt in first + second] == list(range(24))


def test_without_a_buffer_the_order_is_kept():
    assert [prompt.text for prompt in stream(buffer=0).take(12)] == [row["prompt"] for row in ROWS]


async def test_async_iterables_give_the_same():
    source = stream(generate_async)
    assert seen([*await source.draw(5), *await source.draw(10)]) == seen(stream().take(15))
    assert seen(await stream().draw(15)) == seen(stream().take(15))
    with pytest.raises(DataError, match="await `draw`"):
        source.take(1)


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(0, 30), st.integers(0, 20))
def test_a_saved_stream_goes_on_where_it_was(before, after, buffer):
    source = stream(buffer=buffer)
    for count in before:
        source.take(count)
    state = json.loads(json.dumps(source.state_dict()))
    expected = seen(source.take(after))
    resumed = stream(buffer=buffer)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state  # saved again before anything was drawn
    assert seen(resumed.take(after)) == expected
    assert resumed.state_dict() == source.state_dict()


async def test_a_saved_async_stream_goes_on_where_it_was():
    source = stream(generate_async)
    await source.draw(17)
    resumed = stream(generate_async)
    resumed.load_state_dict(source.state_dict())
    assert seen(await resumed.draw(10)) == seen(await source.draw(10))


@pytest.mark.parametrize("change", [lambda rows: rows[:3], lambda rows: [{"prompt": "99"}, *rows[1:]]])
def test_other_rows_than_before_are_noticed(change):
    source = stream()
    source.take(6)
    resumed = stream(lambda: iter(change(ROWS)))
    resumed.load_state_dict(source.state_dict())
    with pytest.raises(DataError, match=r"checkpoint.*others"):
        resumed.take(1)


def test_another_seed_is_noticed():
    with pytest.raises(DataError, match=r"seed.*3.*4"):
        stream(seed=4).load_state_dict(stream().state_dict())


async def test_an_iterator_that_has_ended_begins_again_with_the_rows_that_were_kept():
    as_often, once = stream(), stream(generate())
    assert seen(once.take(30)) == seen(as_often.take(30))
    assert seen(await stream(generate_async()).draw(30)) == seen(stream().take(30))


def test_an_iterator_goes_on_in_its_third_pass_after_a_resume():
    source = stream(generate())
    source.take(28)
    resumed = stream(generate())
    resumed.load_state_dict(source.state_dict())
    assert seen(resumed.take(14)) == seen(source.take(14))


def test_of_a_long_iterator_no_rows_are_kept(monkeypatch):
    monkeypatch.setattr("rlinf.data.datasets.source._REMEMBERED", 11)
    source = stream(generate())
    source.take(12)
    with pytest.raises(DataError, match=r"generate.*11.*function"):
        source.take(1)


def test_long_prompts_are_left_out_and_counted(monkeypatch):
    rows = [{"prompt": "x" * 20}, {"prompt": "1"}]
    source = stream(lambda: iter(rows), buffer=0)
    assert seen(source.take(2)) == [(1, "1"), (3, "1")]
    assert source.dropped == 2
    monkeypatch.setattr("rlinf.data.datasets.stream._MOST_FRUITLESS", 10)
    with pytest.raises(DataError, match=r"prompt.*longer"):
        stream(lambda: iter(rows[:1])).take(1)


@pytest.mark.parametrize(
    ("rows", "text"),
    [([], r"gave.*row"), ([{"text": "a"}], r"column.*prompt"), (["a"], r"row 1.*str")],
)
def test_what_cannot_be_used_is_said(rows, text):
    with pytest.raises(DataError, match=text):
        stream(lambda: iter(rows)).take(1)


def test_nothing_is_known_about_columns_before_the_first_row():
    with pytest.raises(DataError, match=r"row.*read"):
        _ = stream().maker


def test_rows_that_cannot_be_used_are_left_out_and_a_saved_stream_goes_on_behind_them():
    given = [{"prompt": "\ud800"} if index in (2, 5) else {"prompt": str(index)} for index in range(8)]
    source = stream(lambda: iter(given), buffer=3)
    source.take(2)
    state = json.loads(json.dumps(source.state_dict()))
    after = seen(source.take(20))
    assert {text for _, text in after} == {"0", "1", "3", "4", "6", "7"}
    assert source.unusable >= 4
    assert "row" in source.remark
    again = stream(lambda: iter(given), buffer=3)
    again.load_state_dict(state)
    assert seen(again.take(20)) == after
    assert again.state_dict() == source.state_dict()


def test_rows_without_end_of_which_none_fits_are_refused():
    def endless():
        while True:
            yield {"prompt": "\ud800"}

    with pytest.raises(DataError, match=r"first: .*row.*ud800"):
        stream(endless).take(4)
