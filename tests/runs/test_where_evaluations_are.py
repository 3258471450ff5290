"""Evaluations of saved models lie below their runs, each by itself."""

from __future__ import annotations

import pytest

from rlinf.config.load import InputError
from rlinf.runs.evaluation import new_evaluation


def test_an_evaluation_lies_below_the_run_by_the_step_of_its_checkpoint_and_overwrites_none(tmp_path):
    run = tmp_path / "outputs/toy"
    policy = run / "checkpoints/step_000040/policy"
    policy.mkdir(parents=True)
    (run / "metrics.jsonl").touch()
    (run / "checkpoints/latest").symlink_to("step_000040")
    with new_evaluation(run / "checkpoints/latest/policy", tmp_path / "outputs") as first:
        assert first == run / "evaluations/step_000040"
        (first / "evaluation.json").touch()
        with new_evaluation(policy, tmp_path / "outputs") as second:
            assert second.name == "step_000040-2"
    assert first.is_dir()
    assert not second.exists(), "nothing was written"


def test_what_no_run_made_is_evaluated_by_its_name_among_the_outputs_in_short_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine/checkpoints/step_000003").mkdir(parents=True)
    (tmp_path / "mine/metrics.jsonl").touch()
    outputs = tmp_path / "outputs"
    with new_evaluation(tmp_path / "pi05_base", outputs) as made:
        assert made == outputs / "evaluations/pi05_base"
    with new_evaluation(tmp_path / "mine/checkpoints/step_000003", outputs) as made:
        assert str(made) == "mine/evaluations/step_000003"


def test_where_nothing_can_be_made_an_error_says_what_helps(tmp_path):
    (tmp_path / "outputs").write_text("a file")
    with pytest.raises(InputError, match=r"directory; --output FILE"):
        new_evaluation(tmp_path / "policy", tmp_path / "outputs").__enter__()
