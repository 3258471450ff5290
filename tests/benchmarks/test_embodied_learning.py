"""`python -m benchmarks.embodied_learning`: policies that begin with demonstrations get better by acting."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.embodied_learning import improved
from benchmarks.embodied_learning_cases import CASES, shrunk
from benchmarks.embodied_learning_run import outcome
from tests.launching import launch


def test_grpo_on_a_sparse_reward_improves_on_a_start_from_demonstrations(tmp_path: Path) -> None:
    found = asyncio.run(outcome("mlp-grpo", CASES["mlp-grpo"], 1, tmp_path, 64))
    assert 0.2 < found.before < 0.8
    assert improved(found)
    assert found.env_steps == sum(1 for _ in found.curve) * 12 * 128  # every decision is one step, and none is lost


@pytest.mark.repeated
def test_a_vla_goes_through_the_same_steps(tmp_path: Path) -> None:
    case = replace(shrunk(CASES["vla-ppo"]), demonstrations=8)
    found = asyncio.run(outcome("vla-ppo", case, 0, tmp_path, 8))
    assert 1e5 < found.parameters < 1e6
    assert len(found.curve) == 2
    again = asyncio.run(outcome("vla-ppo", case, 0, tmp_path / "again", 8))
    assert (again.before, again.after, again.curve) == (found.before, found.after, found.curve)


@pytest.mark.repeated
def test_a_configuration_by_grpo_learns_from_nothing(tmp_path: Path) -> None:
    launch("--config", "configs/embodied/toy_grpo.yaml", f"output_dir={tmp_path}", "steps=15", "trace=false")
    solved = [
        line["evaluation/success_once"]
        for line in map(json.loads, (tmp_path / "toy-grpo" / "metrics.jsonl").read_text().splitlines())
        if "evaluation/success_once" in line
    ]
    assert solved[0] < 0.2
    assert solved[-1] > 0.8
