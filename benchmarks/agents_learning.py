"""`python -m benchmarks.agents_learning`: do the agents of configs/agents learn? Each runs from several seeds.

In: configurations that run in minutes on a core. Out: a line per run, and by `--save` a file in benchmarks/results and
docs/agents-learning.svg: held-out accuracy by step, a line per seed. An agent learned if accuracy at least halved its
error on every seed.
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

from benchmarks.contestants import ONE_THREAD, ROOT
from benchmarks.runtime import machine

AGENTS = ("calculator", "search-r1-tiny")
"""Configurations in configs/agents."""
PLOT = ROOT / "docs" / "agents-learning.svg"
PANEL, LEFT, TOP, HIGH = 400, 48, 40, 180
"""Width of an agent's panel, and where its axes are, pixels."""
COLOURS = ("#0b62a4", "#d1495b", "#3a7d44", "#8a5a9e", "#c98a1b")
"""A colour for each seed."""


@dataclass(frozen=True, slots=True)
class Learned:
    """A run that has ended."""

    agent: str
    """Its configuration."""
    seed: int
    """Seed of the model, the problems and the sampling."""
    minutes: float
    """From start to end, imports, warm-up and evaluations included."""
    steps: tuple[int, ...]
    """After which it was evaluated; 0 is after the warm-up."""
    accuracy: tuple[float, ...]
    """Held-out problems answered right, greedily, at those steps."""
    rewards: tuple[float, ...]
    """Mean reward of each step's attempts."""

    @property
    def halved(self) -> bool:
        """At least half of the error is gone."""
        return 1 - self.accuracy[-1] <= (1 - self.accuracy[0]) / 2


def run(agent: str, seed: int, keys: Sequence[str]) -> Learned:
    """One run, to its end.

    Raises:
        RuntimeError: it failed; with what it said.
    """
    with tempfile.TemporaryDirectory() as output:
        given = [f"seed={seed}", f"output_dir={output}", f"name={agent}", "metrics.live=never", "trace=false", *keys]
        command = [sys.executable, "launch.py", "--config", f"configs/agents/{agent}.yaml", *given]
        begun = time.monotonic()
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | ONE_THREAD, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{agent}, seed {seed}: {done.stdout[-1000:]}{done.stderr[-1000:]}")
        minutes = (time.monotonic() - begun) / 60
        lines = [json.loads(line) for line in (Path(output) / agent / "metrics.jsonl").read_text().splitlines()]
    evaluated = {line["step"]: line["evaluation/accuracy"] for line in lines if "evaluation/accuracy" in line}
    rewards = tuple(round(line["reward/mean"], 4) for line in lines if "reward/mean" in line)
    accuracy = tuple(round(value, 4) for value in evaluated.values())
    return Learned(agent, seed, round(minutes, 2), tuple(evaluated), accuracy, rewards)


def picture(runs: Sequence[Learned]) -> str:
    """A panel per agent, a line per seed."""
    agents = list(dict.fromkeys(run.agent for run in runs))
    width, height = PANEL * len(agents), TOP + HIGH + 50
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12"><title>Agents that learn</title><rect width="{width}" height="{height}" fill="white"/>'
    ]
    for number, agent in enumerate(agents):
        parts += _panel(agent, [run for run in runs if run.agent == agent], number * PANEL + LEFT)
    return "\n".join([*parts, "</svg>\n"])


def _panel(agent: str, runs: Sequence[Learned], left: int) -> list[str]:
    wide, last = PANEL - LEFT - 24, max(run.steps[-1] for run in runs) or 1
    parts = [f'<text x="{left + wide / 2:.0f}" y="22" text-anchor="middle" font-weight="bold">{agent}</text>']
    for percent in (0, 25, 50, 75, 100):
        y = TOP + HIGH * (1 - percent / 100)
        parts.append(f'<line x1="{left}" x2="{left + wide}" y1="{y:.0f}" y2="{y:.0f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.0f}" text-anchor="end">{percent} %</text>')
    for step in runs[0].steps:
        x = left + wide * step / last
        parts.append(f'<text x="{x:.0f}" y="{TOP + HIGH + 16}" text-anchor="middle">{step}</text>')
    for run, colour in zip(runs, COLOURS * len(runs), strict=False):
        points = " ".join(
            f"{left + wide * step / last:.1f},{TOP + HIGH * (1 - share):.1f}"
            for step, share in zip(run.steps, run.accuracy, strict=True)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
    label = "held-out accuracy by step of reinforcement learning"
    return [*parts, f'<text x="{left + wide / 2:.0f}" y="{TOP + HIGH + 38}" text-anchor="middle">{label}</text>']


def save(runs: Sequence[Learned], keys: Sequence[str]) -> None:
    """Write the day's file, in which runs of other agents stay, and the picture of all in it."""
    now = datetime.datetime.now().astimezone()
    path = ROOT / "benchmarks" / "results" / f"{now:%Y-%m-%d}-agents-learning.json"
    before = json.loads(path.read_text())["runs"] if path.exists() else []
    fresh = {run.agent for run in runs}
    every = [*(Learned(**each) for each in before if each["agent"] not in fresh), *runs]
    report = {"date": now.isoformat(timespec="seconds"), "machine": machine(), "keys": list(keys)}
    path.write_text(json.dumps({**report, "runs": [asdict(each) for each in every]}, indent=1) + "\n")
    PLOT.write_text(picture(sorted(every, key=lambda run: (run.agent, run.seed))), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", default=",".join(AGENTS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated (default: %(default)s)")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results and docs/agents-learning.svg")
    parser.add_argument("keys", nargs="*", metavar="key=value", help="further keys for every run")
    options = parser.parse_args()
    runs = []
    for agent in options.agents.split(","):
        for seed in map(int, options.seeds.split(",")):
            runs.append(run(agent, seed, options.keys))
            told = " ".join(f"{share:.1%}" for share in runs[-1].accuracy)
            print(f"{agent}, seed {seed}: {told} in {runs[-1].minutes:.1f} min", flush=True)
    if options.save:
        save(runs, options.keys)
    return 0 if all(each.halved for each in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
