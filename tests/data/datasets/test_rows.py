"""Rows of files: any of them, in any order, with a name by which a person finds it."""

import csv
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.data.datasets.source import (
    DataError,
    JoinedRows,
    JsonLines,
    ListRows,
    fingerprint,
    read_csv,
    read_json,
    read_parquet,
)

ROWS = [{"question": f"{i} + 1, or so?\nSay", "answer": str(i + 1), "extra": {"level": i % 3}} for i in range(10)]


def jsonl(path, rows=ROWS):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return JsonLines(path)


def all_of(rows):
    return [rows[index] for index in range(len(rows))]


def test_lines_of_json(tmp_path):
    rows = jsonl(tmp_path / "a.jsonl")
    assert all_of(rows) == ROWS
    assert list(rows.scan(["question"])) == ROWS
    assert rows.where(3) == f"{tmp_path}/a.jsonl, line 4"


@given(lines=st.lists(st.one_of(st.none(), st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2))),
       mark=st.booleans(), last=st.booleans())  # fmt: skip
def test_empty_lines_are_skipped_and_counted(tmp_path_factory, lines, mark, last):
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    text = "\n".join(" " if line is None else json.dumps(line, ensure_ascii=False) for line in lines)
    path.write_bytes((b"\xef\xbb\xbf" if mark else b"") + (text + "\n" * last).encode())
    rows = JsonLines(path)
    assert all_of(rows) == [line for line in lines if line is not None]
    numbers = [number for number, line in enumerate(lines, 1) if line is not None]
    assert [rows.where(index).rpartition(" ")[2] for index in range(len(rows))] == [str(n) for n in numbers]


@pytest.mark.parametrize(
    ("line", "text"), [("{'a': 1}", r"line 2.*JSON"), ("[1]", r"line 2.*list"), ("\xff", r"line 2.*JSON")]
)
def test_a_line_that_is_no_row_is_named(tmp_path, line, text):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line.encode("latin-1") + b'\n{"a": 2}\n')
    rows = JsonLines(path)
    with pytest.raises(DataError, match=text):
        rows[1]
    first, wrong, third = rows.scan([])
    assert (first, third) == ({"a": 1}, {"a": 2})
    assert isinstance(wrong, DataError)


@pytest.mark.parametrize("wrap", [lambda rows: rows, lambda rows: {"version": 1, "data": rows}])
def test_a_json_file_is_a_list_or_has_one_under_data(tmp_path, wrap):
    (tmp_path / "a.json").write_text(json.dumps(wrap(ROWS)))
    rows = read_json(tmp_path / "a.json")
    assert all_of(rows) == ROWS
    assert rows.where(0).endswith("a.json, row 1")


@pytest.mark.parametrize(
    ("text", "match"), [('{"a": 1}', r"neither.*list"), ('{"a": 1}\n{"a": 2}', r"goes into.*\.jsonl"), ("", "no JSON")]
)
def test_other_json_is_refused(tmp_path, text, match):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=match):
        read_json(tmp_path / "a.json")


def test_csv_with_quotes_and_line_ends(tmp_path):
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["question", "answer"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(ROWS)
    rows = read_csv(tmp_path / "a.csv")
    assert all_of(rows) == [{"question": row["question"], "answer": row["answer"]} for row in ROWS]
    assert rows.where(1).endswith("a.csv, line 5")  # a question takes two lines; this is where the second one ends


@pytest.mark.parametrize(("line", "text"), [("1,2,3", r"3: 3 values.*2 columns"), ("1", "1 values for 2")])
def test_csv_rows_of_another_length_are_named(tmp_path, line, text):
    (tmp_path / "a.csv").write_text(f"a,b\n1,2\n{line}\n")
    with pytest.raises(DataError, match=text):
        read_csv(tmp_path / "a.csv")


def test_csv_that_is_none(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"a,b\n\xff\xfe,\x00\n")
    with pytest.raises(DataError, match=r"a\.csv.*file"):
        read_csv(tmp_path / "a.csv")


def test_parquet_over_several_row_groups(tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet", row_group_size=3)
    rows = read_parquet(tmp_path / "a.parquet")
    assert all_of(rows) == ROWS
    assert list(rows.scan(["answer"])) == [{"answer": row["answer"]} for row in ROWS]
    assert list(rows.scan(["no such"])) == [{}] * 10


def test_parquet_that_is_none_or_empty(tmp_path):
    (tmp_path / "a.parquet").write_text("hello")
    with pytest.raises(DataError, match=r"a\.parquet.*parquet"):
        read_parquet(tmp_path / "a.parquet")
    pq.write_table(pa.Table.from_pylist(ROWS).slice(0, 0), tmp_path / "b.parquet")
    assert len(read_parquet(tmp_path / "b.parquet")) == 0


def test_several_files_are_one_after_the_other(tmp_path):
    rows = JoinedRows("both", [jsonl(tmp_path / "a.jsonl", ROWS[:3]), ListRows("list", ROWS[3:])])
    assert all_of(rows) == ROWS == list(rows.scan([]))
    assert rows.where(2).endswith("a.jsonl, line 3")
    assert rows.where(3) == "list, row 1"
    with pytest.raises(IndexError):
        rows[10]


def test_a_row_in_memory_must_be_one():
    with pytest.raises(DataError, match=r"list, row 2"):
        ListRows("a list", [{}, "row"])[1]


def test_a_fingerprint_notices_other_rows(tmp_path):
    rows = ListRows("a", ROWS)
    assert fingerprint(rows) == fingerprint(jsonl(tmp_path / "a.jsonl"))  # it is about rows, not about files
    changed = [ROWS[:-1], ROWS[::-1], [*ROWS[:4], {**ROWS[4], "answer": "x"}, *ROWS[5:]]]
    assert len({fingerprint(ListRows("a", other)) for other in [ROWS, *changed]}) == 4
    assert fingerprint(ListRows("a", [])) == fingerprint(ListRows("b", []))
