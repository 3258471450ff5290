"""`python -m rlinf evaluate` scores a saved model as training did, and says what is wrong with its input."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.launching import QUICKSTART, ROOT, TINY, launch, metrics_of
from tests.stand_in import save_model, save_problems

pytestmark = pytest.mark.slow


def rlinf(*arguments: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    return launch(*arguments, program=ROOT / "rlinf" / "__main__.py", expect=expect)


def test_a_saved_model_scores_what_it_scored_at_the_end_of_training(tmp_path):
    tiny = ("--config", QUICKSTART, *TINY, "sft.steps=30", "model.config.hidden_size=32")
    launch(*tiny, f"output_dir={tmp_path}")
    run = tmp_path / "quickstart"
    model, answers = run / "checkpoints" / "latest" / "hf", tmp_path / "answers.jsonl"
    done = rlinf("evaluate", "--model", str(model), "--output", str(answers))
    assert f"by the configuration of the run that made the model: {run / 'resolved.yaml'}" in done.stdout
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    accuracy = sum(row["reward"] for row in rows) / len(rows)
    assert accuracy == pytest.approx(metrics_of(run)[-1]["evaluation/accuracy"])
    assert "20 problems, greedy" in done.stdout
    assert done.stderr == ""
    assert str(run / "report.html") in rlinf("report", str(run)).stdout


def test_several_answers_tell_pass_and_majority(tmp_path):
    model = save_model(tmp_path / "model")
    problems = save_problems(tmp_path / "test.jsonl", 6, prompt="problem")
    done = rlinf(
        "evaluate", "--model", str(model), "--config", "configs/math/qwen2.5-1.5b-grpo.yaml",
        f"evaluation.data={problems}", f"data.train={problems}", "data.columns={prompt: problem, answer: answer}",
        "evaluation.samples=3", "evaluation.temperature=1.0", "evaluation.k=[1,3]", "evaluation.max_new_tokens=4",
        "rollout.dtype=float32",
    )  # fmt: skip
    for measure in ("accuracy", "pass@1", "pass@3", "maj@3"):
        assert measure in done.stdout


def test_an_environment_evaluates_on_the_tasks_that_it_keeps_apart(tmp_path):
    model, answers = save_model(tmp_path / "model"), tmp_path / "answers.jsonl"
    tasks = "{generators: {letter_counting: {max_words: 5}}, size: 8, held_out: 3, instructions: null}"
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    rlinf(
        "evaluate", "--model", str(model), "--config", QUICKSTART, "agent.function=reasoning_gym",
        f"agent.args={tasks}", "data.chat=true", f"data.chat_template={template}", "rollout.max_new_tokens=2",
        "--output", str(answers),
    )  # fmt: skip
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert len(rows) == 3
    assert all("How many times does the letter" in row["prompt"] for row in rows)


REWARD = """
def at_times(response, answer, prompt):
    if prompt.startswith(("What is 0", "What is 1")):
        raise KeyError("final answer")
    return 1.0

def never(response, answer):
    raise KeyError("final answer")
"""


def test_answers_that_cannot_be_scored_are_told_with_the_first_remark(tmp_path):
    model, answers = save_model(tmp_path / "model"), tmp_path / "answers.jsonl"
    problems = save_problems(tmp_path / "test.jsonl", 8)
    (tmp_path / "own_rewards.py").write_text(REWARD)

    def scored(function: str, expect: int) -> subprocess.CompletedProcess[str]:
        return launch(
            "evaluate", "--model", str(model), "--config", str(ROOT / QUICKSTART), f"evaluation.data={problems}",
            f"data.train={problems}", f"reward.function=own_rewards.{function}", "--output", str(answers),
            program=ROOT / "rlinf" / "__main__.py", expect=expect, cwd=tmp_path,
        )  # fmt: skip

    said = scored("at_times", 0).stdout
    assert "25% of 8 answers were not scored: 2 errors; first: KeyError: 'final answer' (" in said
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert ["KeyError" in row.get("remark", "") for row in rows] == [row["reward"] is None for row in rows]
    done = scored("never", 1)
    assert done.stderr.startswith("error: evaluate: not one of 8 answers could be scored: KeyError: 'final answer' (")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("evaluate", "--model", "./none", "--config", QUICKSTART), "model.path = ./none"),
        (("evaluate", "--model", "./tests", "--config", QUICKSTART, "evaluation.k=[2]"), "raise evaluation.samples"),
        (("report", "tests"), "is no run's directory"),
    ],
)
def test_wrong_input_is_one_message(arguments, said):
    done = rlinf(*arguments, expect=2)
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_the_answers_need_a_place_that_is_there(tmp_path: Path):
    nowhere = tmp_path / "none" / "answers.jsonl"
    done = rlinf("evaluate", "--model", "tests", "--config", QUICKSTART, "--output", str(nowhere), expect=2)
    assert "there is no directory" in done.stderr
