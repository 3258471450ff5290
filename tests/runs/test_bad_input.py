"""What is wrong with a run's input is one clear message, with an exit code, and nothing is lost or left running."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.launching import QUICKSTART, ROOT, TINY, launch, metrics_of
from tests.stand_in import save_model, save_problems

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
IN_PROCESS = "reward.isolate=never"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def one_message(done: subprocess.CompletedProcess[str], *said: str) -> None:
    """No traceback, and everything that was to be said, once."""
    assert "Traceback" not in done.stderr, done.stderr
    assert done.stderr.count("error:") == 1, done.stderr
    for text in said:
        assert text in done.stderr, done.stderr


def own_data(model: Path, train: Path, *more: str, expect: int = 2, output: Path) -> subprocess.CompletedProcess[str]:
    held_out = save_problems(output / "held_out.jsonl", 4)
    return launch(
        "--config", QUICKSTART, *TINY, "sft.steps=0", f"model.path={model}", f"data.train={train}",
        f"evaluation.data={held_out}", f"output_dir={output}", *more, expect=expect,
    )  # fmt: skip


# Data ----------------------------------------------------------------------------------------------------------------


def test_a_file_that_is_not_there(model, tmp_path):
    one_message(own_data(model, tmp_path / "none.jsonl", output=tmp_path), "data.train", "no such file")


def test_a_line_that_is_not_json(model, tmp_path):
    train = save_problems(tmp_path / "train.jsonl", 5)
    train.write_text(train.read_text() + '{"prompt": "half\n')
    one_message(own_data(model, train, output=tmp_path), "train.jsonl", "6")


def test_a_row_without_prompt(model, tmp_path):
    train = save_problems(tmp_path / "train.jsonl", 5)
    train.write_text(train.read_text() + json.dumps({"question": "?", "answer": "1"}) + "\n")
    one_message(own_data(model, train, output=tmp_path), "train.jsonl", "prompt", "question")


def test_chat_messages_for_a_tokenizer_without_chat_template(tmp_path):
    plain = save_model(tmp_path / "plain", template=None)
    train = tmp_path / "train.jsonl"
    train.write_text(json.dumps({"prompt": [{"role": "user", "content": "1+1?"}], "answer": "2"}) + "\n")
    one_message(own_data(plain, train, output=tmp_path), "chat template", "data.template")


# Settings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("flow=rlinf.flows.gropo", ("flow", "did you mean rlinf.flows.grpo")),
        ("reward.function=rlinf.rewards.exakt", ("reward.function", "did you mean rlinf.rewards.exact")),
        ("placement.device_memory_gb=0.0001", ("device_memory_gb", "host 0 needs")),
        ("evaluation.samples=4", ("evaluation.samples", "set evaluation.temperature")),
        ("metrics.tensorbord=true", ("did you mean metrics.tensorboard",)),
    ],
)
def test_a_setting_that_cannot_be(tmp_path, setting, said):
    one_message(launch("--config", QUICKSTART, *TINY, setting, f"output_dir={tmp_path}", expect=2), *said)
    assert not (tmp_path / "quickstart").exists()


def test_batch_sizes_that_do_not_divide_are_legal(tmp_path):
    launch(
        "--config", QUICKSTART, *TINY, "algorithm.prompts_per_step=5", "algorithm.group_size=3", "rollout.max_rows=4",
        "algorithm.minibatches=2", "trainer.micro_batch_tokens=7", "evaluation.problems=7", f"output_dir={tmp_path}",
    )  # fmt: skip
    assert [line["samples"] for line in metrics_of(tmp_path / "quickstart")] == [15, 15, 15]


# While running -------------------------------------------------------------------------------------------------------


def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_batch(tmp_path):
    done = with_reward(tmp_path, "length", IN_PROCESS, "algorithm.loss={name: own_rewards.no_number}", expect=1)
    one_message(done, "step 1:", "not both finite", "nan_step")
    assert list((tmp_path / "quickstart").glob("nan_step*.safetensors"))


def test_a_full_disk_leaves_the_checkpoint_before_and_the_run_can_go_on(tmp_path):
    run = ("--config", QUICKSTART, *TINY, "model.config.hidden_size=64", "trace=false", f"output_dir={tmp_path}")
    launch(*run, "steps=2")
    limited = Path(__file__).parent / "programs" / "limited.py"
    done = launch(*run, "steps=4", "--resume", "auto", program=limited, expect=1)
    one_message(done, "checkpoint of step 4", "step_000002", "--resume auto")
    checkpoints = {entry.name for entry in (tmp_path / "quickstart" / "checkpoints").iterdir()}
    assert checkpoints == {"step_000002", "latest"}
    launch(*run, "steps=4", "--resume", "auto")
    assert [line["step"] for line in metrics_of(tmp_path / "quickstart")] == [1, 2, 3, 4]


REWARD = """
import math, os, time
from rlinf.algos import losses

def hangs(response, answer):
    time.sleep(1000)

def crashes_on_one(response, answer, prompt):
    for call in range(6):
        path = f"call_{call}"
        if not os.path.exists(path):
            open(path, "w").write(prompt + response)
            break
    if os.path.exists("call_5") and open("call_5").read() == prompt + response:
        os._exit(3)  # also where it is tried again
    return 1.0 if response == answer else 0.0

def length(response):
    return float(len(response) % 3)

def no_number(batch, aggregation, weights):
    return losses.supervised(batch.logprobs * math.inf, batch.mask)

def raises(response, answer):
    raise RuntimeError("bad luck")

def raises_at_times(response, answer, prompt):
    if prompt[0] in "0369":
        raise KeyError("final answer")
    return 1.0 if response == answer else 0.0
"""


def with_reward(tmp_path: Path, name: str, *more: str, expect: int) -> subprocess.CompletedProcess[str]:
    (tmp_path / "own_rewards.py").write_text(REWARD)
    return launch(
        "--config", str(ROOT / QUICKSTART), *TINY, f"reward.function=own_rewards.{name}", "steps=1",
        "evaluation.problems=10", f"output_dir={tmp_path}", *more, expect=expect, cwd=tmp_path, timeout=200,
    )  # fmt: skip


def test_rewards_that_crash_are_outcomes_and_the_run_goes_on(tmp_path):
    with_reward(tmp_path, "crashes_on_one", "evaluation.problems=2", expect=0)
    (line,) = metrics_of(tmp_path / "quickstart")
    assert 0 < line["outcomes/error"] <= 0.5
    assert line["outcomes/error"] + line["outcomes/ok"] + line["outcomes/truncated"] == pytest.approx(1)


def test_a_reward_that_always_fails_ends_the_run_with_its_first_cause(tmp_path):
    done = with_reward(tmp_path, "raises", IN_PROCESS, expect=1)
    assert "bad luck" in done.stderr


def test_rewards_that_fail_at_times_are_told_at_once_in_the_table_at_the_end_and_in_the_report(tmp_path):
    done = with_reward(tmp_path, "raises_at_times", "steps=3", "algorithm.prompts_per_step=16", expect=0)
    said, run = done.stdout, tmp_path / "quickstart"
    lines = metrics_of(run)
    assert all(line["reward/failed"] == pytest.approx(line["outcomes/error"]) for line in lines)
    assert any(line["reward/failed"] for line in lines)
    assert "KeyError: 'final answer' (" in said
    assert re.search(r"(step \d|evaluation): \d+% of \d+ answers were not scored: \d+ errors; first: KeyError", said)
    assert "not scored" in next(line for line in said.splitlines() if line.startswith("  step"))
    assert re.search(r"^\d+% of \d+ answers were not scored: \d+ errors; first: KeyError", said, re.MULTILINE)
    report = (run / "report.html").read_text()
    assert "Not scored" in report
    assert "the first: KeyError: 'final answer'" in report


def test_a_reward_that_always_fails_on_few_answers_is_one_line_and_its_answers_are_kept(model, tmp_path):
    (tmp_path / "own_rewards.py").write_text(REWARD)
    train = save_problems(tmp_path / "train.jsonl", 8)
    done = launch(
        "--config", str(ROOT / QUICKSTART), *TINY, "sft.steps=0", f"model.path={model}", f"data.train={train}",
        "reward.function=own_rewards.raises", IN_PROCESS, "evaluation.every=0", f"output_dir={tmp_path}", expect=1,
        cwd=tmp_path,
    )  # fmt: skip
    one_message(done, "step 1: train: RuntimeError: bad luck (", "none of 4 groups has a reward")
    assert len(done.stderr.strip().splitlines()) == 1
    rows = [json.loads(line) for line in (tmp_path / "quickstart" / "samples.jsonl").read_text().splitlines()]
    assert rows
    assert all(row["reward"] is None and "bad luck" in row["remark"] for row in rows)
