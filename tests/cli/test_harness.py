"""Evaluation packages of others: the command that runs them, and what is read of the files that they leave."""

import itertools
import json
import sys

import pytest

from rlinf.cli.commands import _evaluate, _parser
from rlinf.cli.harness import _COMMANDS, HarnessRun, Score, Target, _run, inspect_scores, lm_eval_scores
from rlinf.config.load import InputError, RunFailure

TARGET = Target("http://127.0.0.1:1/v1", chats=True)
LM_EVAL = {  # as lm-eval 0.4.13 wrote it, shortened
    "results": {
        "sort_digits": {
            "name": "sort_digits",
            "alias": "sort_digits",
            "exact_match,none": 0.975,
            "exact_match_stderr,none": 0.025,
            "acc,strict": 0.5,
            "acc_stderr,strict": "N/A",
        }
    },
    "n-samples": {"sort_digits": {"original": 40, "effective": 40}},
}
INSPECT = {  # as inspect-ai 0.3.285 writes it, shortened
    "status": "success",
    "eval": {"task": "sort"},
    "results": {
        "completed_samples": 6,
        "scores": [{"name": "match", "metrics": {"accuracy": {"value": 0.5}, "stderr": {"value": 0.2}}}],
    },
}


def test_scores_of_lm_eval_have_errors_where_it_tells_them(tmp_path):
    assert lm_eval_scores(tmp_path) == []
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "results_2026.json").write_text(json.dumps(LM_EVAL))
    expected = [
        Score("sort_digits", "exact_match", 0.975, 0.025, 40),
        Score("sort_digits", "acc (strict)", 0.5, None, 40),
    ]
    assert lm_eval_scores(tmp_path) == expected


def test_scores_of_inspect_have_errors_and_a_task_that_failed_is_a_failure(tmp_path):
    (tmp_path / "results.json").write_text("{}")  # ours, of an evaluation before
    (tmp_path / "log.json").write_text(json.dumps(INSPECT))
    assert inspect_scores(tmp_path) == [Score("sort", "accuracy (match)", 0.5, 0.2, 6)]
    failed = {**INSPECT, "status": "error", "error": {"message": "no such model"}}
    (tmp_path / "log.json").write_text(json.dumps(failed))
    with pytest.raises(RunFailure, match=r"task sort.*no such model"):
        inspect_scores(tmp_path)


def test_a_file_of_lm_eval_is_named_as_in_it_and_found_by_its_directory(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("# ours\ntask: 'my_task'\nprocess_docs: !function utils.process\n")
    for chats, kind, path in (
        (True, "local-chat-completions", "/v1/chat/completions"),
        (False, "local-completions", "/v1/completions"),
        (True, "local-completions", "/v1/completions"),  # where the user says so
    ):
        options = ["--limit", "3", *(["--model", kind] if chats and kind == "local-completions" else [])]
        harness = HarnessRun("lm-eval", [str(file), "gsm8k"], tmp_path, options=options)
        command = _COMMANDS["lm-eval"](harness, Target("http://127.0.0.1:1/v1", chats, "some/model", 64))
        told = dict(itertools.pairwise(command))
        assert told["--model"] == kind
        assert f"base_url=http://127.0.0.1:1{path}," in told["--model_args"]
        assert ("tokenizer=some/model" in told["--model_args"]) == (kind == "local-completions")
        assert told["--model_args"].endswith("max_length=64")
        assert (told["--tasks"], told["--include_path"], told["--limit"]) == ("gsm8k,my_task", str(tmp_path), "3")
        assert ("--apply_chat_template" in command) == chats
    file.write_text("group: x\n")
    with pytest.raises(InputError, match=r"mine\.yaml.*task: NAME"):
        _COMMANDS["lm-eval"](harness, TARGET)


async def test_an_environment_without_the_package_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("rlinf.cli.harness.MODULES", {"lm-eval": ("no_such_package",)})
    monkeypatch.setattr("rlinf.cli.harness._COMMANDS", {"lm-eval": lambda *_: ["-c", "raise SystemExit(86)"]})
    with pytest.raises(InputError, match=r"no_such_package.*--harness-python"):
        await _run(HarnessRun("lm-eval", ["x"], tmp_path), TARGET)
    monkeypatch.setattr("rlinf.cli.harness._COMMANDS", {"lm-eval": lambda *_: ["-c", "raise SystemExit(3)"]})
    with pytest.raises(RunFailure, match="ended with 3"):
        await _run(HarnessRun("lm-eval", ["x"], tmp_path, sys.executable), TARGET)
    with pytest.raises(InputError, match="--harness-python /nowhere/python"):
        await _run(HarnessRun("lm-eval", ["x"], tmp_path, "/nowhere/python"), TARGET)


@pytest.mark.parametrize("arguments", [["--harness", "inspect"], ["--tasks", "gsm8k"]])
def test_package_and_tasks_belong_together(arguments):
    with pytest.raises(InputError, match="--harness and --tasks"):
        _evaluate(_parser().parse_args(["evaluate", "--model", "some/model", *arguments]))
