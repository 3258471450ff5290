"""What `--dry-run` says of a training step on GPUs, beside what torch's tracker counts of our own trainer code."""

import json
import os
import subprocess
import sys

import pytest

from rlinf.runs.dry_run.footprint import footprints
from rlinf.runs.rules import load_config
from tests.runs.dry_run.tracked import Case, qwen2

SMALL = [Case("0.02B", 1, 4096, False), Case("0.02B", 8, 4096, True, entropies=True)]
FULL = [  # 15 seconds each; ratios beside SMALL's say the rest
    pytest.param(Case("0.02B", 8, 4096, False, entropies=True), marks=pytest.mark.repeated),
    pytest.param(Case("0.02B", 16, 16_384, True), marks=pytest.mark.repeated),
    pytest.param(Case("1.5B", 8, 16_384, True, entropies=True), marks=pytest.mark.repeated),
    pytest.param(Case("7B", 16, 32_768, True), marks=pytest.mark.repeated),
]


def measured(cases):
    """Bytes of each, by a process of its own: a fake process group is the only one that a process has."""
    asked = [sys.executable, "-W", "ignore", "-m", "tests.runs.dry_run.tracked", *(case.text for case in cases)]
    done = subprocess.run(asked, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["peak"] for line in done.stdout.splitlines() if line.startswith("{")]


def estimated(case):
    config = load_config(
        "configs/quickstart.yaml",
        [
            "placement.device_kind=cuda",
            f"trainer.micro_batch_tokens={case.tokens}",
            f"trainer.gradient_checkpointing={str(case.checkpointed).lower()}",
        ],
        1,
    )
    seats = {"trainer": [frozenset({rank}) for rank in range(case.ranks)], "rollout": [frozenset({0})]}
    return footprints(config, qwen2(case.size), seats)["trainer"]


def compare(cases):
    for case, peak in zip(cases, measured(cases), strict=True):
        found = estimated(case)
        assert found.least_bytes < peak, case  # by it runs are refused
        assert peak <= found.active_bytes <= 1.25 * peak, (case, peak / 1e9, found.active_bytes / 1e9)


def test_a_training_steps_peak_is_within_a_quarter_of_the_estimate_and_never_above_it():
    compare(SMALL)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", FULL, ids=lambda case: case.size)
def test_the_same_of_qwens_sizes(case):
    compare([case])
