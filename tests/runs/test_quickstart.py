"""The quickstart learns, as the README says; `make drills` sees it on three seeds."""

from __future__ import annotations

import pytest

from tests.launching import QUICKSTART, launch, metrics_of


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.repeated) for seed in (1, 2))])
def test_the_quickstart_answers_at_least_93_percent_of_held_out_problems(tmp_path, seed):
    done = launch("--config", QUICKSTART, f"seed={seed}", f"output_dir={tmp_path}", timeout=280)
    metrics = metrics_of(tmp_path / "quickstart")
    assert metrics[-1]["evaluation/accuracy"] >= 0.93
    assert metrics[0]["reward/mean"] < 0.5, "there was something to learn"
    assert "500 held-out problems" in done.stdout
