"""`python -m benchmarks.learning` starts runs as a user would, and tells of each whether it learned."""

from pathlib import Path

import pytest

from benchmarks.contestants import ROOT
from benchmarks.learning_recipes import CHANGES
from benchmarks.learning_runs import Outcome, Runs, arguments
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
