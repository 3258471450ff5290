"""`python -m benchmarks.grpo`: the quickstart beside TRL's GRPOTrainer and beside a bare loop, in one run.

All start from the same warm model and see the same problems in the same order, with the same reward, batch, optimizer
and number of steps, on so many cores and no more. Machines are noisy, so they run side by side and take turns: one
step each, the others waiting. A round uses one seed for all. Speed is that of the median step; ratios are taken within
a round, and shown are medians over the rounds with their range. A figure that misses its bar says LOST and is published
as it is.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.contestants import ROOT
from benchmarks.grpo_contestants import CONFIG, OURS, Contestant, contestants
from benchmarks.grpo_judging import Line, lines
from benchmarks.grpo_plot import reward_curves
from benchmarks.grpo_start import job_of, warm_model
from benchmarks.grpo_turns import in_turn
from benchmarks.peers.grpo_job import Job
from benchmarks.runtime import machine
from rlinf.runs.rules import load_config

PLOT = ROOT / "docs" / "benchmarks-grpo.svg"


def measure(entered: Sequence[Contestant], jobs: Sequence[Path]) -> None:
    """A round per job, in which contestants take steps in turn. A peer that fails drops out, runs and all.

    Raises:
        TurnFailed: ours failed.
    """
    for number, job in enumerate(jobs):
        taking = [one for one in entered if one.missing is None]
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as directory:
            places = [Path(directory) / str(place) for place in range(len(taking))]
            outcomes = in_turn([one.start(job, place) for one, place in zip(taking, places, strict=True)])
            for one, place, outcome in zip(taking, places, outcomes, strict=True):
                if isinstance(outcome, str):
                    one.runs.append(one.read(place, outcome))
                elif one.system == OURS:
                    raise outcome
                else:
                    one.missing = f"failed: {outcome}"
                    one.runs.clear()
        print(f"round {number + 1}/{len(jobs)}: {time.perf_counter() - start:.0f} s", file=sys.stderr)


def table(result: Sequence[Line]) -> Table:
    """The figures for people."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "rlinf", "beside", "compared", "bar", ""):
        shown.add_column(column, overflow="fold")
    previous = ("", "")
    for line in result:
        style = {"LOST": "bold red", "pass": "green"}.get(line.verdict, "")
        first = ("", "") if (line.what, line.ours) == previous else (line.what, line.ours)
        cells = [cell.replace("[", r"\[") for cell in (*first, line.other, line.compared, line.bar)]
        shown.add_row(*cells, f"[{style}]{line.verdict}[/]" if style else line.verdict)
        previous = (line.what, line.ours)
    return shown


def save(result: Sequence[Line], entered: Sequence[Contestant], load: tuple[float, float]) -> Path:
    """Write everything that was measured, by date, and the picture of the curves."""
    now = datetime.datetime.now().astimezone()
    path = ROOT / "benchmarks" / "results" / f"{now:%Y-%m-%d}-grpo.json"
    report = {
        "date": now.isoformat(timespec="seconds"),
        "machine": machine(),
        "load_average": {"before": load[0], "after": load[1]},
        "versions": {one.system: one.runs[0].version for one in entered if one.runs},
        "missing": {one.name: one.missing for one in entered if one.missing},
        "lines": [asdict(line) for line in result],
        "runs": {one.name: [_rounded(asdict(run)) for run in one.runs] for one in entered if one.runs},
    }
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    PLOT.write_text(reward_curves({one.system: [run.rewards for run in one.runs] for one in one_core(entered)}))
    return path


def one_core(entered: Sequence[Contestant]) -> list[Contestant]:
    """Those whose curves are compared: on one core, where every system has one setting."""
    return [one for one in entered if one.cores == 1 and one.runs]


def _rounded(run: dict[str, object]) -> dict[str, object]:
    """To a tenth of a millisecond, and as one string per list, for a file that can be read."""
    return {
        name: " ".join(f"{each:.4f}" for each in value) if isinstance(value, list) else value
        for name, value in run.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="seeds, from 0 (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="steps of each run (default: as many as the quickstart has)")
    parser.add_argument("--cores", type=int, nargs="+", default=[1, 2], help="default: 1 and 2")
    parser.add_argument("--quick", action="store_true", help="one round of 20 steps; says nothing about learning")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<date>-grpo.json and the picture")
    options = parser.parse_args()
    config = load_config(CONFIG)
    rounds = 1 if options.quick else options.rounds
    steps = options.steps or (20 if options.quick else config.steps)

    entered = contestants(options.cores)
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        warm_model(config, model)
        jobs = [Path(directory) / f"seed-{seed}.json" for seed in range(rounds)]
        for seed, path in enumerate(jobs):
            job_of(config, model, seed, steps).write(path)
        measure(entered, jobs)
        samples = _samples(Job.read(jobs[0]))
    result = lines(entered, samples)
    Console(width=None if sys.stdout.isatty() else 200).print(table(result))
    after = os.getloadavg()[0]
    print(f"\n{machine()}; {rounds} rounds of {steps} steps; load average {before:.1f} before, {after:.1f} after")
    print("; ".join(dict.fromkeys(f"{one.system}: {one.runs[0].version}" for one in entered if one.runs)))
    if options.save:
        print(f"saved {save(result, entered, (before, after)).relative_to(ROOT)} and {PLOT.relative_to(ROOT)}")


def _samples(job: Job) -> int:
    """Answers per step."""
    return len(job.problems[0]) * job.group_size


if __name__ == "__main__":
    main()
