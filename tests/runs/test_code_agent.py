"""A model that knows nothing learns to write programs that pass tests in the sandbox, by the configuration as it is."""

import statistics

import pytest

from tests.launching import launch, metrics_of


@pytest.mark.slow
def test_programs_that_pass_more_tests_are_learned(tmp_path):
    tiny = ("steps=30", "log_every=100", "trace=false", "metrics.samples=0", f"output_dir={tmp_path}")
    launch("--config", "configs/agents/code.yaml", *tiny)
    found = metrics_of(tmp_path / "code")
    rewards = [line["reward/mean"] for line in found]
    assert statistics.mean(rewards[:3]) < 0.03
    assert statistics.mean(rewards[-3:]) > 0.1
    assert all(line["episodes/failed"] == 0 for line in found)
    assert all(1 <= line["episodes/calls"] <= 2 for line in found)
