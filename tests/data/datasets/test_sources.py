"""What users give as a source of rows."""

import json

import datasets
import numpy
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlinf.data.datasets.source import DataError, Iterated, open_rows, without_arrays

ROWS = [{"question": f"{i}?", "answer": str(i)} for i in range(6)]


def all_of(rows):
    return [rows[index] for index in range(len(rows))]


def write(path, rows=ROWS):
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_file_by_its_suffix(tmp_path):
    assert all_of(open_rows(write(tmp_path / "a.jsonl"))) == ROWS
    assert all_of(open_rows(str(write(tmp_path / "a.parquet")))) == ROWS


def test_several_files_by_a_pattern(tmp_path):
    write(tmp_path / "a-0.jsonl", ROWS[:2])
    write(tmp_path / "a-1.parquet", ROWS[2:])
    assert all_of(open_rows(str(tmp_path / "a-*"))) == ROWS


@pytest.mark.parametrize("folder", ["", "data"])
def test_a_directory_has_files_named_by_their_split(tmp_path, folder):
    write(tmp_path / folder / "train-00000-of-00002.parquet", ROWS[:4])
    write(tmp_path / folder / "train-00001-of-00002.parquet", ROWS[4:])
    write(tmp_path / folder / "test.jsonl", ROWS[:1])
    assert all_of(open_rows(tmp_path)) == ROWS
    assert all_of(open_rows(tmp_path, split="test")) == ROWS[:1]
    with pytest.raises(DataError, match=r"file.*test\.jsonl"):
        open_rows(tmp_path, split="validation")


def test_a_directory_that_datasets_saved(tmp_path):
    saved = datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=saved, test=saved.select([0])).save_to_disk(tmp_path / "two")
    rows = open_rows(tmp_path / "one")
    assert all_of(rows) == ROWS
    assert list(rows.scan(["answer"])) == [{"answer": row["answer"]} for row in ROWS]
    assert all_of(open_rows(tmp_path / "two", split="test")) == ROWS[:1]
    with pytest.raises(DataError, match=r"splits.*train"):
        open_rows(tmp_path / "two", split="dev")


def test_hub_names_go_to_datasets_with_subset_and_split(monkeypatch):
    asked = []

    def load_dataset(name, subset, split):
        asked.append((name, subset, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert all_of(open_rows("openai/gsm8k:main", split="test")) == ROWS
    open_rows("someone/maths")
    assert asked == [("openai/gsm8k", "main", "test"), ("someone/maths", None, "train")]


def test_a_hub_that_does_not_answer_is_one_clear_line(monkeypatch):
    def load_dataset(*_, **__):
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match=r"file someone/maths.*:.*route$"):
        open_rows("someone/maths")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("missing.jsonl", r"missing\.jsonl, looked.*/"),
        ("./missing", r"no file \./missing"),
        ("*.nothing", r"file.*called"),
        ("no_such_module.rows", r"neither.*Python"),
        (5, r"holds.*rows"),
        ({"a": 1}, r"dict holds"),
    ],
)
def test_what_is_not_there_is_said(source, text):
    with pytest.raises(DataError, match=text):
        open_rows(source)


def test_a_parquet_file_that_was_cut_short_is_refused_with_advice(tmp_path):
    whole = write(tmp_path / "a.parquet", [{"prompt": "a"}])
    (tmp_path / "cut.parquet").write_bytes(whole.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"cut\.parquet.*anew"):
        open_rows(tmp_path / "cut.parquet")


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(DataError, match=r"a\.txt.*none.*\.jsonl, \.json, \.csv, \.parquet"):
        open_rows(tmp_path / "a.txt")


def test_lists_and_data_sets_in_memory_are_read_in_any_order():
    assert all_of(open_rows(ROWS)) == ROWS
    assert all_of(open_rows(datasets.Dataset.from_list(ROWS))) == ROWS
    assert all_of(open_rows(pa.Table.from_pylist(ROWS))) == ROWS
    assert all_of(open_rows(lambda: ROWS)) == ROWS


def test_tables_of_pandas_are_rows_with_none_for_what_is_missing():
    frame = pandas.DataFrame({"question": ["0?", "1?"], "answer": [0, 1], "level": [1.5, None]}, index=[7, 7])
    rows = open_rows(frame)
    assert all_of(rows) == [
        {"question": "0?", "answer": 0, "level": 1.5},
        {"question": "1?", "answer": 1, "level": None},
    ]
    assert type(rows[0]["answer"]) is int
    assert rows.where(1) == "a DataFrame, row 2"


def test_messages_that_pandas_read_from_parquet_are_lists(tmp_path):
    chat = [{"prompt": [{"role": "user", "content": "1+1="}], "reward_model": {"ground_truth": ["2", "two"]}}]
    frame = pandas.read_parquet(write(tmp_path / "verl.parquet", chat))
    assert type(frame["prompt"][0]) is numpy.ndarray
    assert all_of(open_rows(frame)) == chat
    assert all_of(open_rows(frame.to_dict("records"))) == chat
    assert list(map(without_arrays, open_rows(iter(frame.to_dict("records"))).open())) == chat


def test_numbers_of_numpy_are_python_s_and_pictures_stay():
    picture = numpy.zeros((2, 2, 3), dtype=numpy.uint8)
    row = {"answer": numpy.int64(3), "choices": numpy.array(["a", "b"]), "image": picture, "same": {"a": [1]}}
    (read,) = all_of(open_rows([row]))
    assert (read["answer"], read["choices"]) == (3, ["a", "b"])
    assert read["image"] is picture
    assert read["same"] is row["same"]


def test_data_sets_that_stream_are_gone_through_again_and_again():
    streamed = datasets.Dataset.from_list(ROWS).to_iterable_dataset()
    rows = open_rows(streamed)
    assert isinstance(rows, Iterated)
    assert [list(rows.open()), list(rows.open())] == [ROWS, ROWS]


def test_iterables_are_gone_through():
    def generate():
        yield from ROWS

    class Again:
        def __iter__(self):
            return iter(ROWS)

    for source, once in [(generate, False), (generate(), True), (Again(), False), (Again, False)]:
        rows = open_rows(source)
        assert isinstance(rows, Iterated)
        assert (rows.once, rows.is_async) == (once, False)
        assert [list(rows.open()), list(rows.open())] == [ROWS, ROWS]


async def test_async_iterables_are_gone_through():
    async def generate():
        for row in ROWS:
            yield row

    for source, once in [(generate, False), (generate(), True)]:
        rows = open_rows(source)
        assert (rows.once, rows.is_async) == (once, True)
        assert [row async for row in rows.open()] == ROWS


def test_a_dotted_path_names_an_object_of_one_s_own(tmp_path, monkeypatch):
    (tmp_path / "my_rows.py").write_text(f"rows = {ROWS}\ndef make():\n    yield from rows\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert all_of(open_rows("my_rows.rows")) == ROWS
    assert list(open_rows("my_rows.make").open()) == ROWS
