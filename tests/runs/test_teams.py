"""A killed run of several agents that share a model goes on."""

from __future__ import annotations

import json
import random

import pytest

from tests.launching import killed, launch, learned, metrics_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TEAM = "configs/agents/team.yaml"
SHORT = (
    "steps=12", "checkpoint.every=2", "evaluation.every=4", "evaluation.problems=6", "algorithm.prompts_per_step=6",
    "algorithm.group_size=4", "algorithm.epochs=1", "log_every=1", "trace=false",
)  # fmt: skip
ROUNDED = ("loss", "mismatch/mean", "mismatch/max")
"""Metrics that are 0 but for rounding: which calls of agents are decoded together depends on when they came, and with
it the last bit of their log-probs. All tokens and rewards are equal."""


def test_a_killed_run_of_agents_goes_on_as_if_it_had_not_been(tmp_path):
    run = ("--config", TEAM, *SHORT)
    launch(*run, f"output_dir={tmp_path / 'whole'}")
    broken = tmp_path / "broken" / "team"
    later = random.random() * 0.2
    killed((broken / "checkpoints" / "step_000004").exists, *run, f"output_dir={tmp_path / 'broken'}", later=later)
    done = launch(*run, f"output_dir={tmp_path / 'broken'}", "--resume", "auto")
    assert "going on after step" in done.stdout
    assert [line["step"] for line in metrics_of(broken)] == list(range(1, 13))
    for one, other in zip(learned(tmp_path / "whole" / "team"), learned(broken), strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert other[name] == pytest.approx(value, rel=1e-4, abs=1e-5 if name in ROUNDED else 0), (
                one["step"],
                name,
            )
    whole, gone_on = ((each / "samples.jsonl").read_text() for each in (tmp_path / "whole" / "team", broken))
    assert said(whole) == said(gone_on)


def said(samples):
    """What was answered, and what it was worth."""
    rows = map(json.loads, samples.splitlines())
    return [(row["step"], row["prompt"], row["response"], row["reward"]) for row in rows]
