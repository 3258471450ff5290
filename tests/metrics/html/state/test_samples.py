"""samples.jsonl is read where it grew, and rows are looked up by step."""

import json

from rlinf.dashboard.state import MOST_TEXT, MOST_TOKENS, Samples


def row(step, response, **more):
    return json.dumps({"step": step, **more, "response": response}) + "\n"


def test_what_was_added_is_found_and_a_line_that_is_half_there_waits(tmp_path):
    path = tmp_path / "samples.jsonl"
    samples = Samples(path)
    assert samples.refresh() == []
    path.write_text(row(1, "a") + row(1, "b") + row(2, "c")[:10])
    assert samples.refresh() == [1]
    with path.open("a") as file:
        file.write(row(2, "c")[10:] + "no JSON\n" + row(2, "d", kind="held-out"))
    assert samples.refresh() == [2]
    assert samples.steps == [1, 2]
    assert [each["response"] for each in samples.rows(1)] == ["a", "b"]
    assert [each["response"] for each in samples.rows(2)] == ["c"]
    assert samples.rows(3) == []


def test_a_file_that_was_cut_is_read_again(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_text(row(1, "a") + row(2, "b"))
    samples = Samples(path)
    samples.refresh()
    path.write_text(row(1, "a"))
    assert samples.refresh() == [1]
    assert samples.steps == [1]


def test_lines_that_another_program_wrote_are_read_too(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_text('{"response": "x", "step": 3}\n[1]\n{"response": "y", "kind": "held-out", "step": 3}\n')
    samples = Samples(path)
    assert samples.refresh() == [3]
    assert [each["response"] for each in samples.rows(3)] == ["x"]


def test_long_texts_and_token_lists_are_cut(tmp_path):
    path = tmp_path / "samples.jsonl"
    tokens = {"texts": ["é"] * 9_000, "logprobs": [-1.0] * 9_000, "mask": [1] * 9_000, "own": "left out"}
    path.write_text(row(1, "é" * 50_000, tokens=tokens, read=[[3, 5], [MOST_TEXT - 1, 20_000], [30_000, 40_000]]))
    samples = Samples(path)
    samples.refresh()
    (shown,) = samples.rows(1)
    assert len(shown["response"]) < MOST_TEXT + 50
    assert shown["read"] == [[3, 5], [MOST_TEXT - 1, MOST_TEXT]]
    assert shown["tokens"].pop("cut") == 9_000 - MOST_TOKENS
    assert {name: len(each) for name, each in shown["tokens"].items()} == dict.fromkeys(
        ("texts", "logprobs", "mask"), MOST_TOKENS
    )


def test_held_out_problems_of_the_first_and_last_evaluation_are_pairs_with_those_that_changed_first(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_text(
        "".join(
            row(step, response, kind="held-out", prompt=prompt)
            for step, answers in ((0, "ab"), (5, "zz"), (9, "ac"))
            for prompt, response in zip("pq", answers, strict=True)
        )
    )
    samples = Samples(path)
    samples.refresh()
    pairs = [(before["response"], after["response"]) for before, after in samples.held_out(12)]
    assert pairs == [("b", "c"), ("a", "a")]
    assert len(samples.held_out(1)) == 1
