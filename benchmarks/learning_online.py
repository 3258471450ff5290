"""`python -m benchmarks.learning_online`: does a service learn from its users? The online example, from three seeds.

It learned if, of the last tenth of all answers, more than 80 % are accepted; chance is some 20 %. Says how long users
waited for answers meanwhile, all of them given while the policy was trained in the same process.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.contestants import ROOT
from benchmarks.runtime import machine
from examples import online_feedback

PLOT = ROOT / "docs" / "online-learning.svg"
BIN = 250
"""Answers of a point of the curve."""
LEFT, TOP, WIDE, HIGH = 56, 30, 620, 200
"""Where the axes are, pixels."""
COLOURS = ("#0b62a4", "#d1495b", "#3a7d44")
"""A colour for each seed."""


@dataclass(frozen=True, slots=True)
class Served:
    """One run."""

    seed: int
    """Seed of the model and the users."""
    seconds: float
    """From its start to its end."""
    accepted: tuple[float, ...]
    """Share of accepted answers, of `BIN` at a time."""
    median_ms: float
    """That an answer took."""
    p95_ms: float
    """That 95 of 100 answers took at most."""
    counts: dict[str, int]
    """Answers and feedback, counted by what became of them."""

    @property
    def learned(self) -> bool:
        """More than 80 % of the last tenth are accepted."""
        last = self.accepted[-max(1, len(self.accepted) // 10) :]
        return sum(last) / len(last) > 0.8


def run(seed: int, answers: int) -> Served:
    """Serve until so many answers were learned from."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        seen, counts = asyncio.run(online_feedback.main(answers, seed=seed, run_dir=Path(directory) / "online"))
    waits = sorted(1e3 * waited for _, waited in seen)
    shares = [sum(liked for liked, _ in seen[k : k + BIN]) / BIN for k in range(0, len(seen) - BIN + 1, BIN)]
    return Served(
        seed,
        round(time.monotonic() - begun, 1),
        tuple(shares),
        round(waits[len(waits) // 2], 1),
        round(waits[len(waits) * 95 // 100], 1),
        asdict(counts),
    )


def picture(runs: Sequence[Served]) -> str:
    """A line per seed: the share of accepted answers by how many were served."""
    width, height = LEFT + WIDE + 24, TOP + HIGH + 48
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12"><title>Accepted answers</title><rect width="{width}" height="{height}" fill="white"/>'
    ]
    for percent in (0, 25, 50, 75, 100):
        y = TOP + HIGH * (1 - percent / 100)
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + WIDE}" y1="{y:.0f}" y2="{y:.0f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.0f}" text-anchor="end">{percent} %</text>')
    most = max(len(run.accepted) for run in runs)
    for served in range(0, most * BIN + 1, 2000):
        x = LEFT + WIDE * served / (most * BIN)
        parts.append(f'<text x="{x:.0f}" y="{TOP + HIGH + 16}" text-anchor="middle">{served:,}</text>')
    for each, colour in zip(runs, COLOURS * len(runs), strict=False):
        points = " ".join(
            f"{LEFT + WIDE * (k + 0.5) / most:.1f},{TOP + HIGH * (1 - share):.1f}"
            for k, share in enumerate(each.accepted)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
    label = f"answers served; share that was accepted, of {BIN} at a time; a line per seed"
    parts.append(f'<text x="{LEFT + WIDE / 2:.0f}" y="{TOP + HIGH + 38}" text-anchor="middle">{label}</text>')
    return "\n".join([*parts, "</svg>\n"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated (default: %(default)s)")
    parser.add_argument("--answers", type=int, default=8000, help="learned from, per run (default: %(default)s)")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results and docs/online-learning.svg")
    options = parser.parse_args()
    if options.answers < BIN:
        parser.error(f"--answers is {BIN} or more, a point of the curve")
    runs = []
    for seed in map(int, options.seeds.split(",")):
        made = run(seed, options.answers)
        runs.append(made)
        print(
            f"seed {seed}: accepted {made.accepted[0]:.0%} -> {made.accepted[-1]:.0%} in {made.seconds:.0f} s; answers "
            f"took {made.median_ms:.0f} ms (median), {made.p95_ms:.0f} ms (p95); {made.counts}",
            flush=True,
        )
    if options.save:
        now = datetime.datetime.now().astimezone()
        path = ROOT / "benchmarks" / "results" / f"{now:%Y-%m-%d}-online.json"
        report = {"date": now.isoformat(timespec="seconds"), "machine": machine(), "answers": options.answers}
        path.write_text(json.dumps({**report, "runs": [asdict(each) for each in runs]}, indent=1) + "\n")
        PLOT.write_text(picture(runs), encoding="utf-8")
    return 0 if all(each.learned for each in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
