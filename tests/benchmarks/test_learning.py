"""`python -m benchmarks.learning` starts runs as a user would, and tells of each whether it learned."""

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import learning_reversed, learning_runs
from benchmarks.contestants import ROOT
from benchmarks.learning_recipes import CHANGES
from benchmarks.learning_runs import CONFIG, Ended, Outcome, Runs, arguments, outcome_of
from rlinf.algos.recipes import NAMES, RECIPES
from rlinf.runs.prepare import algorithm_of
from rlinf.runs.rules import load_config
from tests.launching import TINY


@pytest.mark.parametrize("recipe", NAMES)
def test_every_recipe_is_configured_as_published_but_for_what_the_task_decides(recipe: str, tmp_path: Path) -> None:
    _, path, *settings = arguments(recipe, 0, 100, tmp_path, teacher=tmp_path)
    chosen = algorithm_of(load_config(ROOT / path, settings))
    published = RECIPES[recipe]
    assert (chosen.loss, chosen.advantage, chosen.kl) == (published.loss, published.advantage, published.kl)
    assert set(CHANGES) <= set(NAMES)


async def test_who_distils_waits_for_its_teacher_and_nothing_is_done_twice(tmp_path: Path, monkeypatch) -> None:
    begun = []

    async def ended(command: Sequence[str], log: Path) -> Ended:
        settings = dict(argument.split("=", 1) for argument in command[4:])
        begun.append(settings["name"])
        if settings["name"].startswith("opd"):
            assert Path(settings["teacher.model"]) == tmp_path / "grpo-0" / "checkpoints" / "latest" / "hf"
        run = tmp_path / settings["name"]
        run.mkdir()
        accuracies = ({"evaluation/accuracy": share} for share in (0.5, 0.9))
        (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, accuracies)))
        return Ended(0, 60.0, 30.0, "", 1.5)

    monkeypatch.setattr(learning_runs, "run_process", ended)
    first = await Runs(tmp_path, steps=1, at_once=1).all([("opd", 1), ("opd", 2)])
    told = [(outcome.recipe, outcome.seed, outcome.learned, outcome.processor_minutes) for outcome in first]
    assert told == [("opd", 1, True, 0.5), ("opd", 2, True, 0.5)]
    assert begun == ["grpo-0", "opd-1", "opd-2"]

    # What has ended is not done again, unless it is another command now.
    again = await Runs(tmp_path, steps=1, at_once=1).all([("opd", 2), ("grpo", 1)])
    assert again[0] == first[1]
    assert begun[3:] == ["grpo-1"]
    shutil.rmtree(tmp_path / "grpo-1")
    await Runs(tmp_path, steps=2, at_once=1).all([("grpo", 1)])
    assert begun[4:] == ["grpo-1"]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("quickstart: starting\nerror: 1 mistake:\n  name: none\n", "error: 1 mistake: name: none"),
        (
            'step 1\nTraceback:\n  File "a.py", line 2, in b\n    c()\nValueError: bad\nin trainer[0].setup()\n',
            "ValueError: bad in trainer[0].setup()",
        ),
        ("starting\nKilled\n", "Killed"),
        ("", "exit code 2"),
    ],
)
def test_a_run_that_failed_says_why(said: str, reason: str, tmp_path: Path) -> None:
    failed = outcome_of(tmp_path, "grpo", 0, Ended(2, 6.0, 3.0, said))
    assert failed.failure == reason
    assert math.isnan(failed.after)


async def test_a_real_run_is_read_and_one_that_cannot_start_is_told(tmp_path: Path) -> None:
    said: list[Outcome] = []
    runs = Runs(tmp_path, 2, 2, [key for key in TINY if not key.startswith("steps=")], said.append)
    (outcome,) = await runs.all([("grpo", 3)])
    assert outcome.failure == ""
    assert 0 <= outcome.before <= 1
    assert len(outcome.rewards) == 2
    assert 0 < outcome.processor_minutes < outcome.minutes + 1
    assert said == [outcome]
    (broken,) = await Runs(tmp_path, 2, 2, ["stepps=3"]).all([("grpo", 4)])
    assert "steps" in broken.failure


def test_the_reversed_task_is_what_it_says_and_its_right_answers_are_as_long_as_the_limit(tmp_path: Path) -> None:
    held_out, train = (Path(key.partition("=")[2]) for key in learning_reversed.write_data(tmp_path))
    problems = [[json.loads(line) for line in path.read_text().splitlines()] for path in (held_out, train)]
    assert [len(part) for part in problems] == [300, 8**5 - 300]
    texts = {row["prompt"] for part in problems for row in part}
    assert len(texts) == 8**5
    assert all(row["answer"] == row["prompt"][:-1][::-1] for part in problems for row in part)
    load_config(ROOT / CONFIG, [*learning_reversed.KEYS, f"data.train={train}", f"evaluation.data={held_out}"])
