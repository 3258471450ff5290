"""`python -m benchmarks.real_learning`: does SmolLM2-135M-Instruct, a real chat model, learn?

In: configurations of configs/real, each started as a user would. Out: a line per run, and by `--save` a file in
benchmarks/results and docs/real-learning.svg, the mean reward of all answers by step where answers are drawn. A run
learned if its last evaluation is beyond the bar of its configuration. What is in `--output` already is not run again.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.contestants import ROOT
from benchmarks.grpo_plot import reward_curves
from benchmarks.learning_runs import reason, run_process
from benchmarks.runtime import machine

PLOT = ROOT / "docs" / "real-learning.svg"
PATIENCE = 7200.0
"""Seconds for a run, of minutes where nothing else computes."""
REWARDS = ("sampling/reward/mean", "reward/mean", "rewards/accuracies")
"""Metrics of a step's answers, the first that is there."""


@dataclass(frozen=True, slots=True)
class Way:
    """A configuration of configs/real: how it is started, and when it has learned."""

    name: str
    """Its name in the picture."""
    measure: str = "evaluation/accuracy"
    """Metric of the held-out rows that tells."""
    bar: float = 0.6
    """At least this is to be measured in the end."""
    falls: bool = False
    """True if a loss is measured, which is to be at most the bar."""
    processes: int = 2

    def command(self, config: str) -> list[str]:
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(self.processes)] * (self.processes > 1)
        return [sys.executable, *torchrun, "launch.py", "--config", f"configs/real/{config}.yaml"]

    def reached(self, measured: float) -> bool:
        return measured <= self.bar if self.falls else measured >= self.bar


WAYS = {
    "sums": Way("all weights"),
    "sums-lora": Way("adapters of rank 16"),
    "chain-sum": Way("chain_sum of reasoning-gym", bar=0.32, processes=1),
    "calculator": Way("an agent with a calculator", bar=0.9, processes=1),
    "sft": Way("conversations", "evaluation/loss", bar=0.1, falls=True, processes=1),
    "dpo": Way("preferences", "evaluation/rewards/accuracies", bar=0.8, processes=1),
}


@dataclass(frozen=True, slots=True)
class Learned:
    """A run that has ended."""

    config: str
    """In configs/real."""
    seed: int
    """Seed of the order of the problems and of the sampling."""
    minutes: float
    """From start to end, imports, evaluations and the last checkpoint included."""
    processor_minutes: float
    """Processor time of all processes."""
    steps: tuple[int, ...]
    """After which it was evaluated."""
    accuracy: tuple[float, ...]
    """Held-out rows answered right, greedily, at those steps; the loss, where that is measured."""
    rewards: tuple[float, ...]
    """Mean reward of each step's answers, those of groups that teach nothing included; of pairs, the share in which
    the right answer is ahead; none where only texts are learned."""
    peak_gib: float = float("nan")
    """Memory of its largest process."""


async def run(config: str, seed: int, output: Path, keys: Sequence[str]) -> Learned:
    """One run, to its end, unless its outcome is there.

    Raises:
        RuntimeError: it failed; with what it said.
    """
    name = f"{config}-{seed}"
    outcome = output / f"{name}.json"
    if outcome.exists():
        return Learned(**json.loads(outcome.read_text()))
    given = [f"name={name}", f"seed={seed}", f"output_dir={output}", "metrics.live=never", *keys]
    ended = await run_process([*WAYS[config].command(config), *given], output / f"{name}.log", PATIENCE)
    if ended.code:
        raise RuntimeError(f"{config}, seed {seed}: {reason(ended.output)}")
    lines = [json.loads(line) for line in (output / name / "metrics.jsonl").read_text().splitlines()]
    measure = WAYS[config].measure
    evaluated = {line["step"]: round(line[measure], 4) for line in lines if measure in line}
    rewards = [next((line[name] for name in REWARDS if name in line), None) for line in lines]
    learned = Learned(
        config,
        seed,
        round(ended.seconds / 60, 2),
        round(ended.processor_seconds / 60, 2),
        tuple(evaluated),
        tuple(evaluated.values()),
        tuple(round(reward, 4) for reward in rewards if reward is not None),
        round(ended.peak_gib, 2),
    )
    outcome.write_text(json.dumps(asdict(learned)) + "\n")
    return learned


def save(runs: Sequence[Learned], keys: Sequence[str]) -> None:
    """Write the day's file, and the picture."""
    now = datetime.datetime.now().astimezone()
    report = {"date": now.isoformat(timespec="seconds"), "machine": machine(), "keys": list(keys)}
    path = ROOT / "benchmarks" / "results" / f"{now:%Y-%m-%d}-real-learning.json"
    path.write_text(json.dumps({**report, "runs": [asdict(each) for each in runs]}, indent=1) + "\n")
    configs = dict.fromkeys(each.config for each in runs if each.rewards)
    curves = {WAYS[one].name: [each.rewards for each in runs if each.config == one] for one in configs}
    PLOT.write_text(reward_curves(curves), encoding="utf-8")


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", default="sums,sums-lora", help=f"of {', '.join(WAYS)} (default: %(default)s)")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("outputs/real-learning"), help="default: %(default)s")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results and docs/real-learning.svg")
    parser.add_argument("keys", nargs="*", metavar="key=value", help="further keys for every run")
    options = parser.parse_args()
    runs = []
    for config in options.configs.split(","):
        for seed in map(int, options.seeds.split(",")):
            each = await run(config, seed, options.output.resolve(), options.keys)
            measured = " ".join(f"{value:.3f}" for value in each.accuracy)
            used = f"{each.minutes:.1f} minutes, {each.processor_minutes:.1f} of processor, {each.peak_gib:.1f} GiB"
            print(f"{config}, seed {seed}: {WAYS[config].measure} {measured}; {used}", flush=True)
            runs.append(each)
    if options.save:
        save(runs, options.keys)
    return 0 if all(WAYS[each.config].reached(each.accuracy[-1]) for each in runs) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
