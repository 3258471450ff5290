"""`python -m benchmarks.off_policy_learning`: do off-policy learning and imitation learn their tasks, on three seeds?

Each run is `launch.py` with a configuration of configs/embodied, as a user starts it, with what it learns from besides
acting made before (`benchmarks.off_policy_cases`). Trials are by the likeliest actions, from starts that nobody learned
from. `--save` writes the numbers and the curves of docs/off-policy.md.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.contestants import ONE_THREAD, ROOT
from benchmarks.off_policy_cases import CASES, Case
from benchmarks.off_policy_plot import picture
from benchmarks.runtime import machine


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one run."""

    case: str
    """Its name."""
    seed: int
    """Seed of weights, episodes and actions, and of what was prepared."""
    curve: tuple[tuple[int, float], ...]
    """Steps of the run and what trials measured then; the first before learning."""
    env_steps: int
    """Steps that environments did in learning."""
    minutes: float
    """Duration of the run, from its start to its end."""
    load: float | None
    """The machine's load average over the last minute; None where it was not noted."""


def run(name: str, seed: int, work: Path, *, quick: bool) -> Outcome:
    """Prepare what a case needs, learn, and read what trials measured."""
    case, made = CASES[name], work / f"{name}-{seed}-made"
    if case.prepare is not None:
        asyncio.run(case.prepare(made, seed))
    overrides = [each.format(made=made) for each in case.overrides]
    shorter = ["steps=2", "trials.every=1", "trials.episodes=2", "off_policy.offline_updates=5"] if quick else []
    if quick and not name.startswith(("rlpd", "iql", "sac", "crossq", "steered")):
        shorter.pop()
    given = [f"seed={seed}", f"output_dir={work / f'{name}-{seed}'}", f"trials.every={case.every}", "trace=false"]
    command = [sys.executable, "launch.py", "--config", f"configs/embodied/{case.config}.yaml"]
    began = time.monotonic()
    done = subprocess.run(
        [*command, *given, *overrides, *shorter],
        cwd=ROOT, env={**os.environ, **ONE_THREAD}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{name}, seed {seed}: {done.stdout}{done.stderr}")
    (metrics,) = (work / f"{name}-{seed}").glob("*/metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    key = f"evaluation/{case.measure}"
    return Outcome(
        name,
        seed,
        tuple((line["step"], line[key]) for line in lines if key in line),
        int(sum(line.get("env_steps", 0.0) for line in lines)),
        (time.monotonic() - began) / 60,
        os.getloadavg()[0],
    )


def row(case: Case, outcomes: Sequence[Outcome]) -> str:
    """A row of the docs' table."""
    before, after = ([each.curve[place][1] for each in outcomes] for place in (0, -1))
    style = ".2f" if case.measure == "success_once" else "z.0f"
    steps, minutes = outcomes[0].env_steps, sum(each.minutes for each in outcomes) / len(outcomes)
    numbers = " | ".join(", ".join(format(each, style) for each in found) for found in (before, after))
    return f"| {case.task} | {case.label} | {numbers} | {steps:,} | {minutes:.1f} |"


def table(path: Path) -> list[str]:
    """The rows of what was saved."""
    runs: dict[str, list[Outcome]] = defaultdict(list)
    for each in json.loads(path.read_text(encoding="utf-8"))["runs"]:
        runs[each["case"]].append(Outcome(**{**each, "curve": tuple(map(tuple, each["curve"]))}))
    return [row(CASES[name], found) for name, found in runs.items()]


def save(outcomes: Sequence[Outcome]) -> Path:
    """Write what was measured, by date, over the same runs of an earlier call; and the curves."""
    now = datetime.datetime.now().astimezone()
    path = ROOT / "benchmarks" / "results" / f"{now:%Y-%m-%d}-off-policy.json"
    earlier = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.is_file() else []
    runs = {(each["case"], each["seed"]): each for each in [*earlier, *map(asdict, outcomes)]}
    ordered = [each for name in CASES for each in runs.values() if each["case"] == name]
    report = {"date": now.isoformat(timespec="seconds"), "machine": machine(), "runs": ordered}
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    curves: dict[str, list[list[tuple[int, float]]]] = defaultdict(list)
    for each in ordered:
        curves[each["case"]].append(each["curve"])
    (ROOT / "docs" / "off-policy.svg").write_text(picture(curves), encoding="utf-8")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--quick", action="store_true", help="two steps each, to see that all of it runs")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results and docs/off-policy.svg")
    options = parser.parse_args()
    print("| task | | before | after | env steps | minutes |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        for name in options.cases:
            found = [run(name, seed, Path(directory), quick=options.quick) for seed in options.seeds]
            print(row(CASES[name], found), flush=True)
            if options.save and not options.quick:
                save(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
