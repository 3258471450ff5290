"""Several processes with uneven shares of a batch learn what one with all of it does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RANKS = 3


@pytest.mark.torchrun
def test_three_processes_with_uneven_shares_get_the_gradient_of_one(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "tests.algos.programs.shares"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(RANKS), str(tmp_path / "store")],
            cwd=ROOT,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(RANKS)
    ]
    try:
        said = [rank.communicate(timeout=100)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [text.splitlines()[-1:] for text in said] == [["equal"]] * RANKS, "\n".join(said)
