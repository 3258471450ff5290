"""The quickstart learns; `make drills` sees on three seeds that it comes as far as the README says."""

from __future__ import annotations

import json

import pytest

from tests.launching import QUICKSTART, launch, metrics_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_the_quickstarts_first_steps_teach_what_the_warm_up_left(tmp_path):
    done = launch("--config", QUICKSTART, "steps=12", f"output_dir={tmp_path}")
    before, *_, after = [json.loads(line) for line in (tmp_path / "quickstart" / "metrics.jsonl").open()]
    assert before["evaluation/accuracy"] < 0.86, "there was something to learn"
    assert after["evaluation/accuracy"] >= before["evaluation/accuracy"] + 0.04
    assert "500 held-out problems" in done.stdout
    environment = json.loads((tmp_path / "quickstart" / "environment.json").read_text())
    assert "lean forward" in environment["rollout computes"]
    assert "packed" in environment["trainer computes"]


@pytest.mark.repeated
@pytest.mark.parametrize("seed", range(3))
def test_the_quickstart_answers_at_least_93_percent_of_held_out_problems(tmp_path, seed):
    done = launch("--config", QUICKSTART, f"seed={seed}", f"output_dir={tmp_path}", timeout=280)
    metrics = metrics_of(tmp_path / "quickstart")
    assert metrics[-1]["evaluation/accuracy"] >= 0.93
    assert metrics[0]["reward/mean"] < 0.5, "there was something to learn"
    assert "500 held-out problems" in done.stdout
