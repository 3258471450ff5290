"""`python -m benchmarks.precision_learning`: does it learn as well from answers of bfloat16, and of rounded weights?

The quickstart in one process, by each way of generating and from several seeds, with as many steps. A line per run:
greedy accuracy on 500 held-out problems before and after, mean reward of the last ten steps' answers, and how far the
engine's log-probs are from the trainer's. `int8` and `float8` have the correction that they have by default,
`int8_plain` and `float8_plain` have none.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean

from benchmarks.contestants import ROOT
from benchmarks.learning_runs import CONFIG, outcome_of, run_process

WAYS = {
    "float32": (),
    "bfloat16": ("rollout.dtype=bfloat16",),
    "int8": ("rollout.weights=int8",),
    "int8_plain": ("rollout.weights=int8", "algorithm.correction=null"),
    "float8": ("rollout.weights=float8",),
    "float8_plain": ("rollout.weights=float8", "algorithm.correction=null"),
}
"""Keys of each."""
LATE = 10
"""Steps at the end whose rewards are averaged."""


async def run(way: str, seed: int, steps: int, output: Path) -> dict[str, float]:
    """Figures of one run."""
    name = f"{way}-{seed}"
    keys = (f"name={name}", f"output_dir={output}", f"steps={steps}", f"seed={seed}", "trace=false", *WAYS[way])
    ended = await run_process(
        [sys.executable, str(ROOT / "launch.py"), "--config", CONFIG, *keys], output / f"{name}.log"
    )
    outcome = outcome_of(output / name, way, seed, ended)
    if outcome.failure:
        sys.exit(f"{name}: {outcome.failure}")
    lines = (output / name / "metrics.jsonl").read_text().splitlines()
    apart = [step["mismatch/mean"] for step in map(json.loads, lines) if "mismatch/mean" in step]
    return {
        "before": outcome.before,
        "after": outcome.after,
        "reward": fmean(outcome.rewards[-LATE:]),
        "mismatch": fmean(apart) if apart else math.nan,
        "processor_minutes": outcome.processor_minutes,
    }


def main() -> None:
    """Run all, one after the other, and print a line as each ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=[*WAYS])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output", help="keeps the runs (default: a temporary directory)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() if options.output is None else nullcontext(options.output) as place:
        for seed in options.seeds:
            for way in options.ways:
                found = asyncio.run(run(way, seed, options.steps, Path(place).absolute()))
                print(f"{way}, seed {seed}: " + ", ".join(f"{k} {v:.4f}" for k, v in found.items()), flush=True)


if __name__ == "__main__":
    main()
