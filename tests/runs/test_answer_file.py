"""Answers to benchmarks in a file: what is read back is what was written, whatever line a cut went through."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.config.load import InputError
from rlinf.data.datasets.benchmarks import Benchmark
from rlinf.data.sample import Group, Prompt, Sample
from rlinf.runs.evaluation import AnswerFile, measured, model_mark

ASKED = Benchmark("a.jsonl", samples=2)
PROMPTS = [Prompt(number, np.array([1, number]), f"{number}?", str(number)) for number in range(4)]


def judged(prompt):
    ids = np.zeros(2 + prompt.id, dtype=np.int64)
    return Group(
        prompt,
        tuple(
            Sample(prompt, index, ids, ids.astype(np.float32), ids.astype(np.int32), f"so {index}", bool(index),
                   reward=float(index == prompt.id % 2), outcome="ok", extracted="é\n")
            for index in range(2)
        ),
    )  # fmt: skip


def written(path):
    path.unlink(missing_ok=True)
    kept = AnswerFile(path, "model", 0)
    assert kept.open("aime24", ASKED, PROMPTS) == {}
    for prompt in PROMPTS:
        kept.heard(judged(prompt))
    return path.read_bytes()


@settings(max_examples=40)
@given(st.data())
def test_after_any_cut_whole_groups_are_there_and_the_rest_is_answered_again(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("kept") / "answers.jsonl"
    whole = written(path)
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    kept = AnswerFile(path, "model", 0)
    found = kept.open("aime24", ASKED, PROMPTS)
    assert sorted(found) == list(range(whole[:cut].count(b"\n") // 2))
    for prompt in PROMPTS:
        if prompt.id not in found:
            kept.heard(judged(prompt))
    again = AnswerFile(path, "model", 0).open("aime24", ASKED, PROMPTS)
    assert measured([*again.values()], ASKED).metrics == measured(list(map(judged, PROMPTS)), ASKED).metrics


@pytest.mark.parametrize(
    "other",
    [
        lambda path: AnswerFile(path, "other", 0).open("aime24", ASKED, PROMPTS),
        lambda path: AnswerFile(path, "model", 1).open("aime24", ASKED, PROMPTS),
        lambda path: AnswerFile(path, "model", 0).open("aime24", replace(ASKED, top_p=0.5), PROMPTS),
        lambda path: AnswerFile(path, "model", 0).open("aime24", ASKED, PROMPTS[1:]),
    ],
)
def test_answers_of_something_else_are_refused(tmp_path, other):
    written(tmp_path / "answers.jsonl")
    with pytest.raises(InputError, match=r"problems.*settings"):
        other(tmp_path / "answers.jsonl")


def test_a_file_of_something_else_is_refused_and_stays(tmp_path):
    path = tmp_path / "notes.jsonl"
    path.write_text('{"note": 1}\nnot to be lost')
    with pytest.raises(InputError, match=r"1:.*answer.*benchmark"):
        AnswerFile(path, "model", 0)
    assert path.read_text().endswith("not to be lost")


def test_a_model_that_was_saved_anew_is_another(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"a")
    before = model_mark(str(tmp_path))
    assert before == model_mark(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"ab")
    assert before != model_mark(str(tmp_path))
