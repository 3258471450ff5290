"""`python -m benchmarks.real_learning`: does SmolLM2-135M-Instruct, a real chat model, learn to add?

In: configurations of configs/real, each started as a user would, by torchrun on two processes. Out: a line per run, and
by `--save` a file in benchmarks/results and docs/real-learning.svg, the mean reward of all answers by step. A run
learned if it ends with at least 60 % of the 200 held-out sums right, greedily. What is in `--output` already is not run
again.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.contestants import ROOT
from benchmarks.grpo_plot import reward_curves
from benchmarks.learning_runs import reason, run_process
from benchmarks.runtime import machine

PLOT = ROOT / "docs" / "real-learning.svg"
BAR = 0.6
"""Share of held-out problems that is to be right in the end."""
NAMES = {"sums": "all weights", "sums-lora": "adapters of rank 16"}
"""Configurations, and what learns in them."""


@dataclass(frozen=True, slots=True)
class Learned:
    """A run that has ended."""

    config: str
    """In configs/real."""
    seed: int
    """Of the order of the problems and of the sampling."""
    minutes: float
    """From start to end, imports, evaluations and the last checkpoint included."""
    processor_minutes: float
    """Of these, what all processes computed."""
    steps: tuple[int, ...]
    """After which it was evaluated."""
    accuracy: tuple[float, ...]
    """Held-out problems answered right, greedily, at those steps."""
    rewards: tuple[float, ...]
    """Mean reward of each step's answers, those of groups that teach nothing included."""


async def run(config: str, seed: int, output: Path, keys: Sequence[str]) -> Learned:
    """One run, to its end, unless its outcome is there.

    Raises:
        RuntimeError: it failed; with what it said.
    """
    name = f"{config}-{seed}"
    outcome = output / f"{name}.json"
    if outcome.exists():
        return Learned(**json.loads(outcome.read_text()))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "launch.py"]
    given = [f"name={name}", f"seed={seed}", f"output_dir={output}", "metrics.live=never", *keys]
    ended = await run_process([*torchrun, "--config", f"configs/real/{config}.yaml", *given], output / f"{name}.log")
    if ended.code:
        raise RuntimeError(f"{config}, seed {seed}: {reason(ended.output)}")
    lines = [json.loads(line) for line in (output / name / "metrics.jsonl").read_text().splitlines()]
    evaluated = {line["step"]: line["evaluation/accuracy"] for line in lines if "evaluation/accuracy" in line}
    drawn = [line.get("sampling/reward/mean", line.get("reward/mean")) for line in lines]
    learned = Learned(
        config,
        seed,
        round(ended.seconds / 60, 2),
        round(ended.processor_seconds / 60, 2),
        tuple(evaluated),
        tuple(evaluated.values()),
        tuple(round(reward, 4) for reward in drawn if reward is not None),
    )
    outcome.write_text(json.dumps(asdict(learned)) + "\n")
    return learned


def save(runs: Sequence[Learned], keys: Sequence[str]) -> None:
    """Write the day's file, and the picture."""
    now = datetime.datetime.now().astimezone()
    report = {"date": now.isoformat(timespec="seconds"), "machine": machine(), "keys": list(keys)}
    path = ROOT / "benchmarks" / "results" / f"{now:%Y-%m-%d}-real-learning.json"
    path.write_text(json.dumps({**report, "runs": [asdict(each) for each in runs]}, indent=1) + "\n")
    configs = dict.fromkeys(each.config for each in runs)
    curves = {NAMES.get(one, one): [each.rewards for each in runs if each.config == one] for one in configs}
    PLOT.write_text(reward_curves(curves), encoding="utf-8")


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", default=",".join(NAMES), help="comma-separated (default: %(default)s)")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("outputs/real-learning"), help="default: %(default)s")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results and docs/real-learning.svg")
    parser.add_argument("keys", nargs="*", metavar="key=value", help="further keys for every run")
    options = parser.parse_args()
    runs = []
    for config in options.configs.split(","):
        for seed in map(int, options.seeds.split(",")):
            each = await run(config, seed, options.output.resolve(), options.keys)
            shares = " ".join(f"{share:.1%}" for share in each.accuracy)
            minutes = f"{each.minutes:.1f} minutes, {each.processor_minutes:.1f} of processor"
            last = statistics.mean(each.rewards[-5:])
            print(f"{config}, seed {seed}: {shares}; reward {each.rewards[0]:.2f} to {last:.2f}; {minutes}", flush=True)
            runs.append(each)
    if options.save:
        save(runs, options.keys)
    return 0 if all(each.accuracy[-1] >= BAR for each in runs) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
