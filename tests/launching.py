"""Starting runs as a user does, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
QUICKSTART = "configs/quickstart.yaml"
TINY = (
    "steps=3", "log_every=1", "sft.steps=2", "sft.batch_size=8", "evaluation.problems=20", "evaluation.every=2",
    "checkpoint.every=2", "algorithm.prompts_per_step=4", "algorithm.group_size=4", "model.config.hidden_size=16",
    "model.config.intermediate_size=16", "model.config.num_hidden_layers=1",
)  # fmt: skip
"""A run of a few seconds, most of which are imports."""


def command(*arguments: str, processes: int = 0) -> list[str]:
    """The command line of launch.py, by torchrun if `processes` are given."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--standalone"] if processes else []
    return [sys.executable, *torchrun, str(ROOT / "launch.py"), *arguments]


def environment(**more: str) -> dict[str, str]:
    """Ours, with one thread per process."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "", **more}


def launch(
    *arguments: str, processes: int = 0, expect: int = 0, timeout: float = 110, cwd: Path = ROOT, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run launch.py to its end."""
    done = subprocess.run(
        command(*arguments, processes=processes),
        cwd=cwd,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """What a run noted of its steps, from 1 on."""
    lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["step"] > 0]


def learned(run: Path) -> list[dict[str, Any]]:
    """The same without what depends on the clock."""
    timed = ("timing/", "tokens_per_s", "bound/", "lost/")
    return [{name: value for name, value in line.items() if not name.startswith(timed)} for line in metrics_of(run)]


def weights_of(run: Path) -> dict[str, Any]:
    """The newest checkpoint's weights."""
    from safetensors.torch import load_file

    return load_file(run / "checkpoints" / "latest" / "hf" / "model.safetensors")


def equal(one: Path, other: Path) -> None:
    """Two runs answered, were rewarded and learned the same, bit for bit."""
    assert learned(one) == learned(other)
    ours, theirs = weights_of(one), weights_of(other)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
