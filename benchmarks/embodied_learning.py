"""`python -m benchmarks.embodied_learning`: do policies that begin with demonstrations get better by acting?

Each run records a script that solves the toy (`rlinf/envs/toy.py`), learns from it for a short time, which leaves a
clear gap, and goes on by PPO or GRPO. Success is that of the likeliest actions in 256 trials whose starts nobody
learned from, the same before and after. A case passes if at least half of what its start failed is solved after, on
every seed; one that does not is shown as that.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.contestants import ONE_THREAD, ROOT
from benchmarks.embodied_learning_cases import CASES, shrunk
from benchmarks.embodied_learning_run import Outcome, outcome
from benchmarks.runtime import machine

HEADINGS = ("task", "policy", "algorithm", "seed", "after imitation, %", "after RL, %", "env steps", "CPU minutes")


def improved(found: Outcome) -> bool:
    """Tell whether at least half of the trials that failed at the start, and there were some, are solved now."""
    return found.before < 1 and (1 - found.after) <= 0.5 * (1 - found.before)


def rows(outcomes: Iterable[Outcome]) -> list[tuple[str, ...]]:
    """A row per run, under `HEADINGS`."""
    found = []
    for each in outcomes:
        policy, algorithm = each.case.split("-")
        shares = (f"{100 * each.before:.1f}", f"{100 * each.after:.1f}")
        size = f"{policy}, {each.parameters / 1e3:.0f}k"
        effort = (f"{each.env_steps:,}", f"{each.processor_minutes:.1f}")
        found.append((CASES[each.case].task, size, algorithm, str(each.seed), *shares, *effort))
    return found


def table(outcomes: Sequence[Outcome]) -> Table:
    """The table for people."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for heading in HEADINGS:
        made.add_column(heading)
    for each, cells in zip(outcomes, rows(outcomes), strict=True):
        made.add_row(*cells, style="" if improved(each) else "bold red")
    return made


def save(outcomes: Sequence[Outcome], about: dict[str, object]) -> Path:
    """Write what was measured, by date."""
    now = datetime.datetime.now().astimezone()
    path = ROOT / "benchmarks" / "results" / f"{now:%Y-%m-%d}-embodied-learning.json"
    runs = [{**asdict(each), "curve": " ".join(f"{share:.3f}" for share in each.curve)} for each in outcomes]
    report = {"date": now.isoformat(timespec="seconds"), "machine": machine(), **about, "runs": runs}
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return path


def main() -> int:
    options = _options()
    wanted = [(name, seed) for name in options.cases for seed in options.seeds]
    outcomes = _all(wanted, options.jobs, options.quick)
    Console(width=None if sys.stdout.isatty() else 160).print(table(outcomes))
    better = sum(map(improved, outcomes))
    minutes = statistics.fmean(each.minutes for each in outcomes)
    print(f"\n{better} of {len(outcomes)} runs solved at least half of what their start failed; {minutes:.1f} min each")
    loads = [each.load for each in outcomes]
    print(f"{machine()}; {options.jobs} runs at a time; load average {min(loads):.1f} to {max(loads):.1f}")
    if options.save:
        print(f"saved {save(outcomes, {'at_once': options.jobs, 'trials': TRIALS}).relative_to(ROOT)}")
    return 0 if better == len(outcomes) else 1


TRIALS = 256
"""Before and after, the same."""


def run(name: str, seed: int, quick: bool) -> Outcome:
    """One run, in a process of its own."""
    case = shrunk(CASES[name]) if quick else CASES[name]
    with tempfile.TemporaryDirectory() as directory:
        return asyncio.run(outcome(name, case, seed, Path(directory), 16 if quick else TRIALS))


def _all(wanted: Sequence[tuple[str, int]], jobs: int, quick: bool) -> list[Outcome]:
    """The outcomes, in the order asked for; each is told of when it is there."""
    os.environ.update(ONE_THREAD)  # before the processes begin, which read it
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        runs = [pool.submit(run, *each, quick) for each in wanted]
        for each in as_completed(runs):
            found = each.result()
            told = f"{found.before:.1%} -> {found.after:.1%} in {found.minutes:.1f} min"
            print(f"{found.case}, seed {found.seed}: {told}", file=sys.stderr)
    return [each.result() for each in runs]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=_names, default=list(CASES), help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--seeds", type=_numbers, default=[0, 1, 2], help="comma-separated (default: 0,1,2)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, a core each (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a few seconds each, to see that it runs; learns nothing")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<date>-embodied-learning.json")
    options = parser.parse_args()
    if options.quick and options.save:
        parser.error("--quick learns nothing worth saving")
    return options


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := sorted(set(names) - set(CASES)):
        raise argparse.ArgumentTypeError(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    return names


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
