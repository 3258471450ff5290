"""`python -m benchmarks.moe_learning`: does a tiny mixture of experts learn by GRPO? Three seeds.

In: configs/moe/qwen3-moe-tiny.yaml. Out: a line per run, and by `--save` a file in benchmarks/results: rewards by step,
accuracy on held-out problems before and after, and how its experts were used. A run learned if the mean reward of its
sampled answers rose to `GOAL`, from less than half of that: greedy accuracy begins near 80 %, and tells less. Further
keys are for all runs, such as `trainer.router_replay=false`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.contestants import ONE_THREAD, ROOT
from benchmarks.runtime import machine

GOAL = 0.7
"""Bar of the mean reward of the last ten steps."""
WATCHED = ("moe/load_max", "moe/dead_experts", "moe/aux_loss", "moe/route_drift", "mismatch/max")
"""Metrics of which the first and the last step's are kept."""


@dataclass(frozen=True, slots=True)
class Learned:
    """A run that has ended."""

    seed: int
    """Seed of the model, the problems and the sampling."""
    minutes: float
    """From start to end, imports and evaluations included."""
    before: float
    """Share of held-out problems answered right, greedily, after the warm-up."""
    after: float
    """That share at the end."""
    rewards: list[float]
    """Mean of each ten steps."""
    first: dict[str, float]
    """`WATCHED` in the first step."""
    last: dict[str, float]
    """`WATCHED` in the last."""

    @property
    def learned(self) -> bool:
        """It came to its bar."""
        return self.rewards[-1] >= GOAL > 2 * self.rewards[0]


def run(seed: int, keys: Sequence[str]) -> Learned:
    """One run, to its end.

    Raises:
        RuntimeError: it failed; with what it said.
    """
    with tempfile.TemporaryDirectory() as output:
        given = [f"seed={seed}", f"output_dir={output}", "metrics.live=never", "trace=false", *keys]
        command = [sys.executable, "launch.py", "--config", "configs/moe/qwen3-moe-tiny.yaml", *given]
        begun = time.monotonic()
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | ONE_THREAD, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"seed {seed}: {done.stdout[-1000:]}{done.stderr[-1000:]}")
        minutes = round((time.monotonic() - begun) / 60, 2)
        lines = [json.loads(line) for line in (Path(output) / "moe" / "metrics.jsonl").read_text().splitlines()]
    accuracy = [line["evaluation/accuracy"] for line in lines if "evaluation/accuracy" in line]
    steps = [line for line in lines if "reward/mean" in line]
    rewards = [line["reward/mean"] for line in steps]
    tens = [round(fmean(rewards[start : start + 10]), 3) for start in range(0, len(rewards), 10)]
    first, last = ({name: line[name] for name in WATCHED if name in line} for line in (steps[0], steps[-1]))
    return Learned(seed, minutes, accuracy[0], accuracy[-1], tens, first, last)


def save(runs: Sequence[Learned], keys: Sequence[str]) -> None:
    """Write what was measured, by date."""
    now = datetime.datetime.now().astimezone()
    path = ROOT / "benchmarks" / "results" / f"{now:%Y-%m-%d}-moe-learning.json"
    report = {"date": now.isoformat(timespec="seconds"), "machine": machine(), "keys": list(keys)}
    path.write_text(json.dumps({**report, "runs": [asdict(each) for each in runs]}, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated (default: %(default)s)")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    parser.add_argument("keys", nargs="*", metavar="key=value", help="further keys for every run")
    options = parser.parse_args()
    runs: list[Learned] = []
    for seed in map(int, options.seeds.split(",")):
        runs.append(run(seed, options.keys))
        one = runs[-1]
        told = f"reward {one.rewards[0]:.2f} -> {one.rewards[-1]:.2f}, greedily {one.before:.1%} -> {one.after:.1%}"
        print(f"seed {seed}: {told} in {one.minutes:.1f} min, {one.last}", flush=True)
        if options.save:
            save(runs, options.keys)
    return 0 if all(each.learned for each in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
