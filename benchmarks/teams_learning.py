"""`python -m benchmarks.teams_learning`: do several agents in one task learn, and does self-play? Three seeds of each.

In: configs/agents/team.yaml and self-play.yaml; self-play-past.yaml by `--runs`. Out: a line per run, and by `--save` a
file in benchmarks/results and a picture: each agent's held-out reward by step, a panel per agent, a line per seed. A
run learned if the agent that `GOALS` names came to its bar.
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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.contestants import ONE_THREAD, ROOT
from benchmarks.runtime import machine

GOALS = {
    "team": ("planner", 0.7),
    "self-play": ("against-perfect", 0.9),
    "self-play-past": ("against-random", 0.8),
}
"""Per configuration, the agent whose held-out reward tells whether it learned, and how much is asked of it. The
planner's is the share of the team's answers that are right."""
PANEL, LEFT, TOP, HIGH = 250, 40, 40, 150
"""Width of an agent's panel, and where its axes are, pixels."""
COLOURS = ("#0b62a4", "#d1495b", "#3a7d44", "#8a5a9e")
"""A colour for each seed."""


@dataclass(frozen=True, slots=True)
class Learned:
    """A run that has ended."""

    name: str
    """Its configuration."""
    seed: int
    """Seed of the model, the tasks and the sampling."""
    minutes: float
    """From start to end, imports and evaluations included."""
    rewards: Mapping[str, Mapping[int, float]]
    """Each agent's held-out reward by step."""

    @property
    def reached(self) -> float:
        """The last held-out reward of the agent that is asked."""
        return list(self.rewards[GOALS[self.name][0]].values())[-1]


def run(name: str, seed: int, keys: Sequence[str]) -> Learned:
    """One run, to its end.

    Raises:
        RuntimeError: it failed; with what it said.
    """
    with tempfile.TemporaryDirectory() as output:
        given = [f"seed={seed}", f"output_dir={output}", f"name={name}", "metrics.live=never", "trace=false", *keys]
        command = [sys.executable, "launch.py", "--config", f"configs/agents/{name}.yaml", *given]
        begun = time.monotonic()
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | ONE_THREAD, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{name}, seed {seed}: {done.stdout[-1000:]}{done.stderr[-1000:]}")
        minutes = round((time.monotonic() - begun) / 60, 2)
        lines = [json.loads(line) for line in (Path(output) / name / "metrics.jsonl").read_text().splitlines()]
    rewards: dict[str, dict[int, float]] = {}
    for line in lines:
        for key, value in line.items():
            if key.startswith("evaluation/agent/"):
                rewards.setdefault(key.split("/")[2], {})[line["step"]] = round(value, 4)
    return Learned(name, seed, minutes, rewards)


def picture(runs: Sequence[Learned]) -> str:
    """A panel per agent, a line per seed."""
    panels = list(dict.fromkeys((run.name, agent) for run in runs for agent in run.rewards))
    width, height = PANEL * len(panels), TOP + HIGH + 44
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="11"><title>Teams and self-play</title><rect width="{width}" height="{height}" fill="white"/>'
    ]
    for number, (name, agent) in enumerate(panels):
        curves = [run.rewards.get(agent, {}) for run in runs if run.name == name]
        parts += _panel(f"{name}: {agent}", curves, number * PANEL + LEFT)
    return "\n".join([*parts, "</svg>\n"])


def _panel(title: str, curves: Sequence[Mapping[int, float]], left: int) -> list[str]:
    wide, last = PANEL - LEFT - 14, max(max(curve) for curve in curves) or 1
    parts = [f'<text x="{left + wide / 2:.0f}" y="22" text-anchor="middle" font-weight="bold">{title}</text>']
    for share in (0, 0.5, 1):
        y = TOP + HIGH * (1 - share)
        parts.append(f'<line x1="{left}" x2="{left + wide}" y1="{y:.0f}" y2="{y:.0f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.0f}" text-anchor="end">{share:g}</text>')
    for step in (0, last // 2, last):
        x = left + wide * step / last
        parts.append(f'<text x="{x:.0f}" y="{TOP + HIGH + 16}" text-anchor="middle">{step}</text>')
    for curve, colour in zip(curves, COLOURS * len(curves), strict=False):
        points = " ".join(
            f"{left + wide * step / last:.1f},{TOP + HIGH * (1 - max(0.0, reward)):.1f}"
            for step, reward in curve.items()
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
    label = "held-out reward by step"
    return [*parts, f'<text x="{left + wide / 2:.0f}" y="{TOP + HIGH + 34}" text-anchor="middle">{label}</text>']


def save(runs: Sequence[Learned], keys: Sequence[str], plot: Path) -> None:
    """Write what was measured, by date, and the picture."""
    now = datetime.datetime.now().astimezone()
    path = ROOT / "benchmarks" / "results" / f"{now:%Y-%m-%d}-{plot.stem}.json"
    report = {"date": now.isoformat(timespec="seconds"), "machine": machine(), "keys": keys}
    path.write_text(json.dumps({**report, "runs": [asdict(each) for each in runs]}, indent=1) + "\n")
    plot.write_text(picture(runs), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default="team,self-play", help="comma-separated (default: %(default)s)")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated (default: %(default)s)")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results and the picture")
    plot = ROOT / "docs" / "agents-teams.svg"
    parser.add_argument("--picture", type=Path, default=plot, help="(default: %(default)s)")
    parser.add_argument("keys", nargs="*", metavar="key=value", help="further keys for every run")
    options = parser.parse_args()
    runs: list[Learned] = []
    for name in options.runs.split(","):
        for seed in map(int, options.seeds.split(",")):
            runs.append(run(name, seed, options.keys))
            told = ", ".join(
                f"{agent} {next(iter(curve.values())):.2f} -> {list(curve.values())[-1]:.2f}"
                for agent, curve in runs[-1].rewards.items()
            )
            print(f"{name}, seed {seed}: {told} in {runs[-1].minutes:.1f} min", flush=True)
            if options.save:
                save(runs, options.keys, options.picture)
    return 0 if all(each.reached >= GOALS[each.name][1] for each in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
