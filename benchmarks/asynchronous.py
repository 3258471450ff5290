"""`python -m benchmarks.asynchronous`: the asynchronous flow beside the synchronous one, and whether its bound holds.

    pair    two processes, answers of which a few are very long: samples per second of both flows, in turns
    quickstart  the quickstart on two processes: the synchronous flow on both, the asynchronous one with staleness 1 on
            both, and with generation on one and learning on the other: samples per second, in turns
    same    staleness 0 beside the synchronous flow: the same weights to the last bit, and how long both take
    bound   random runs in virtual time, killed and gone on with, until many tokens were learned: how old the oldest was

Everything is pinned to one thread per process. Runs take turns, so that whatever else the machine does slows down both.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from benchmarks.contestants import ROOT
from benchmarks.runtime import machine

PARTS = ("pair", "quickstart", "same", "bound")
TAILED = (
    "rollout.engine=benchmarks.asynchronous_engine.tailed",
    "rollout.engine_args={short: 16, long: 200, share: 0.03}",
    *("rollout.max_new_tokens=200", "rollout.max_rows=64", "sft.steps=0", "optimizer.warmup_steps=0"),
    *("algorithm.prompts_per_step=32", "algorithm.group_size=4", "algorithm.epochs=3"),
    *("trainer.micro_batch_tokens=1024", "placement.rollout=0", "placement.trainer=1"),
)
"""Most answers have 8 to 24 tokens, three of a hundred 200."""
QUIET = ("evaluation.problems=1", "trace=false", "checkpoint.every=0", "metrics.live=never", "log_every=1000")


def run(directory: Path, name: str, processes: int, *settings: str) -> list[dict[str, Any]]:
    """Metrics of the steps of one run.

    Raises:
        SystemExit: it failed.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)),
        *("launch.py", "--config", "configs/quickstart.yaml", f"output_dir={directory}", f"name={name}"),
        *QUIET,
        *settings,
    ]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    if found.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{found.stdout[-3000:]}{found.stderr[-3000:]}")
    lines = (directory / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [line for line in map(json.loads, lines) if line.get("timing/step")]


def pair(directory: Path, rounds: int, steps: int) -> dict[str, Any]:
    """Samples per second of both flows where few answers are very long."""
    flows = {
        "synchronous": ("flow=rlinf.flows.grpo",),
        "staleness 1": ("flow=rlinf.flows.grpo_async", "staleness.max=1"),
    }
    told: dict[str, list[dict[str, float]]] = {name: [] for name in flows}
    for number in range(rounds):
        for name, flow in flows.items():
            took = run(directory, f"{name[0]}{number}", 2, f"steps={steps}", *TAILED, *flow)[2:]
            told[name].append(
                {
                    "samples/s": sum(step["samples"] for step in took) / sum(step["timing/step"] for step in took),
                    "efficiency": statistics.median(step["bound/efficiency"] for step in took),
                    "oldest": max(step["staleness/max"] for step in took),
                    "thrown away": sum(step.get("staleness/masked", 0) for step in took)
                    / sum(step["response_tokens"] for step in took),
                }
            )
    ratios = [
        ours["samples/s"] / other["samples/s"]
        for ours, other in zip(told["staleness 1"], told["synchronous"], strict=True)
    ]
    return {**told, "ratio": statistics.median(ratios), "ratios": sorted(ratios)}


ASYNCHRONOUS = ("flow=rlinf.flows.grpo_async", "staleness.max=1")
QUICKSTART = {
    "synchronous, both processes": (),
    "staleness 1, both processes": ASYNCHRONOUS,
    "staleness 1, a process each": (*ASYNCHRONOUS, "placement.rollout=0", "placement.trainer=1"),
}
"""Flow and placement of each contestant; the first is the one that the others are compared with."""


def quickstart(directory: Path, rounds: int, steps: int) -> dict[str, Any]:
    """Samples per second of the quickstart by flow and placement, and ratios to the first within a round."""
    rates: dict[str, list[float]] = {name: [] for name in QUICKSTART}
    for number in range(rounds):
        for which, (name, settings) in enumerate(QUICKSTART.items()):
            took = run(directory, f"q{which}-{number}", 2, f"steps={steps}", "sft.steps=0", *settings)[2:]
            rates[name].append(took[0]["samples"] / statistics.median(step["timing/step"] for step in took))
    first, *others = rates
    ratios = {name: sorted(a / b for a, b in zip(rates[name], rates[first], strict=True)) for name in others}
    return {"samples/s": rates, "ratios": ratios}


def same(directory: Path, rounds: int, steps: int) -> dict[str, Any]:
    """The synchronous flow, and the asynchronous one with staleness 0: weights and seconds."""
    flows = {"grpo": ("flow=rlinf.flows.grpo",), "grpo_async": ("flow=rlinf.flows.grpo_async", "staleness.max=0")}
    seconds: dict[str, list[float]] = {name: [] for name in flows}
    weights: dict[str, dict[str, np.ndarray]] = {}
    for number in range(rounds):
        for name, flow in [*flows.items()][:: 1 if number % 2 else -1]:
            took = run(directory, f"{name}{number}", 1, f"steps={steps}", *flow)
            seconds[name].append(statistics.median(step["timing/step"] for step in took[2:]))
            files = sorted((directory / f"{name}{number}" / "checkpoints/latest/hf").glob("*.safetensors"))
            weights[name] = {key: array for file in files for key, array in load_file(file).items()}
    equal = all(np.array_equal(array, weights["grpo_async"][key]) for key, array in weights["grpo"].items())
    ratios = [ours / other for ours, other in zip(seconds["grpo_async"], seconds["grpo"], strict=True)]
    return {"equal": equal, "seconds": seconds, "ratio": statistics.median(ratios), "ratios": sorted(ratios)}


def bound(tokens: int) -> dict[str, Any]:
    """Random runs in virtual time until so many tokens were learned: by how many versions more than the bound the
    oldest of each run was too old, at worst."""
    from rlinf.data.in_flight import Rules
    from rlinf.runtime.base.clock import run_virtual
    from rlinf.runtime.system.system import ActorSystem
    from tests.data.in_flight.modelled import Run

    random = np.random.default_rng(0)
    learned = runs = thrown = kills = 0
    worst = -10
    while learned < tokens:
        staleness = int(random.integers(0, 5))
        waits = bool(random.random() < 0.5)
        rules = Rules(
            staleness,
            int(random.integers(1, 33)),
            mode=str(random.choice(["mask", "drop", "resample"])),  # type: ignore[arg-type]
            carry=None if waits else staleness + int(random.integers(0, 5)),
        )
        made = Run(
            rules,
            steps=int(random.integers(4, 12)),
            every=2,
            n=int(random.integers(1, 9)),
            rows=int(random.integers(2, 64)),
            lengths=[int(each) for each in np.minimum(random.lognormal(4.0, 1.0, 32) + 1, 2000)],
            learning=[float(each) for each in random.uniform(0, 400, 4)],
        )

        async def lives(made: Run = made) -> None:
            async with ActorSystem.local():
                await made.go_on(float(random.uniform(50, 2000)))
                await made.go_on()

        run_virtual(lives())
        runs, kills, learned = runs + 1, kills + 1, learned + made.tokens
        thrown += made.books.masked_tokens if waits else 0
        worst = max(worst, made.oldest - staleness)
    return {
        "tokens": learned,
        "runs": runs,
        "kills": kills,
        "older than the bound by": worst,
        "thrown away, waiting": thrown,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round: does it run?")
    parser.add_argument("--only", choices=PARTS, action="append", help="these parts alone")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<date>-asynchronous.json")
    asked = parser.parse_args(arguments)
    parts = asked.only or PARTS
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        where = Path(directory)
        if "pair" in parts:
            found["pair"] = pair(where, *(1, 6) if asked.quick else (5, 40))
            one = found["pair"]
            for name in ("synchronous", "staleness 1"):
                rows = one[name]
                rates, shares = ([row[key] for row in rows] for key in ("samples/s", "efficiency"))
                print(f"{name:12} {statistics.median(rates):7.0f} samples/s, E {statistics.median(shares):.2f}")
            print(f"ratio {one['ratio']:.2f} ({one['ratios'][0]:.2f} to {one['ratios'][-1]:.2f})")
        if "quickstart" in parts:
            found["quickstart"] = one = quickstart(where, *(1, 6) if asked.quick else (5, 40))
            for name, rates in one["samples/s"].items():
                ratios = one["ratios"].get(name, [1.0])
                spread = f"{statistics.median(ratios):.2f} x ({ratios[0]:.2f} to {ratios[-1]:.2f})"
                print(f"{name:28} {statistics.median(rates):7.0f} samples/s, {spread}")
        if "same" in parts:
            found["same"] = same(where, *(1, 4) if asked.quick else (5, 30))
            one = found["same"]
            print(
                f"staleness 0: weights {'equal to the last bit' if one['equal'] else 'DIFFER'}, "
                f"{one['ratio']:.3f} x the time ({one['ratios'][0]:.3f} to {one['ratios'][-1]:.3f})"
            )
        if "bound" in parts:
            found["bound"] = bound(200_000 if asked.quick else 10_000_000)
            print(f"bound: {found['bound']}")
    if asked.save:
        path = ROOT / "benchmarks" / "results" / f"{datetime.date.today()}-asynchronous.json"
        path.write_text(json.dumps({"machine": machine(), **found}, indent=1) + "\n", encoding="utf-8")
        print(f"saved to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
