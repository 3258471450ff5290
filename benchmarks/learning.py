"""`python -m benchmarks.learning`: does every recipe learn? Each trains on the quickstart's task, from several seeds.

A run is what a user would start, `launch.py --config configs/quickstart.yaml algorithm.name=NAME`, with the changes of
`learning_recipes.py`. It learned if it at least halved the error of its start: 1 - greedy accuracy on 500 held-out
problems. This tells that a recipe works from its configuration to its gradient, not which recipe is best: a tiny model
on a toy problem cannot. One that does not learn, or fails, is shown as that.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import math
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.contestants import ROOT
from benchmarks.learning_plot import picture
from benchmarks.learning_runs import Outcome, Runs
from benchmarks.learning_table import HEADINGS, Row, in_page, rows
from benchmarks.runtime import machine
from rlinf.algos.recipes import NAMES

PLOT = ROOT / "docs" / "learning.svg"
PAGE = ROOT / "docs" / "algorithms.md"


def shown(lines: Sequence[Row]) -> Table:
    """The table for people."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in HEADINGS:
        table.add_column(heading)
    for line in lines:
        style = "green" if line.verdict == "yes" else "bold red"
        cells = [cell.replace("[", r"\[") for cell in line.cells]
        table.add_row(*cells, f"[{style}]{line.verdict}[/]")
    return table


def save(outcomes: Sequence[Outcome], lines: Sequence[Row], about: Mapping[str, object]) -> Path:
    """Write what was measured, by date, the picture, and the table in the page."""
    now = datetime.datetime.now().astimezone()
    path = ROOT / "benchmarks" / "results" / f"{now:%Y-%m-%d}-learning.json"
    runs = [{name: _plain(value) for name, value in asdict(each).items()} for each in outcomes]
    report = {"date": now.isoformat(timespec="seconds"), "machine": machine(), **about, "runs": runs}
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PLOT.write_text(picture(outcomes), encoding="utf-8")
    PAGE.write_text(in_page(PAGE.read_text(encoding="utf-8"), lines), encoding="utf-8")
    return path


def main() -> int:
    options = _options()
    wanted = [(recipe, seed) for seed in options.seeds for recipe in options.recipes]
    kept = tempfile.TemporaryDirectory() if options.output is None else nullcontext(options.output)
    with kept as output:
        runs = Runs(Path(output).absolute(), options.steps, options.jobs, options.keys, _say)
        outcomes = asyncio.run(_all(runs, wanted))

    lines = rows(outcomes)
    Console(width=None if sys.stdout.isatty() else 200).print(shown(lines))
    learned = sum(line.verdict == "yes" for line in lines)
    print(f"\n{learned} of {len(lines)} recipes halved the error on all seeds {options.seeds} in {options.steps} steps")
    loads = [outcome.load for outcome in outcomes if math.isfinite(outcome.load)]
    loaded = f"; load average {min(loads):.1f} to {max(loads):.1f}" if loads else ""
    print(f"{machine()}; {options.jobs} runs at a time{loaded}")
    if options.save:
        about = {"steps": options.steps, "at_once": options.jobs, "keys": options.keys}
        saved = (save(outcomes, lines, about), PLOT, PAGE)
        print("saved " + ", ".join(str(path.relative_to(ROOT)) for path in saved))
    return 0 if learned == len(lines) else 1


def _plain(value: object) -> object:
    """For a file that can be read: a list as one string, and null for what a failed run does not know."""
    if isinstance(value, float):
        return round(value, 4) if math.isfinite(value) else None
    return " ".join(f"{each:.4f}" for each in value) if isinstance(value, tuple) else value


async def _all(runs: Runs, wanted: Sequence[tuple[str, int]]) -> list[Outcome]:
    """The outcomes; being ended by SIGTERM ends the runs too, as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await runs.all(wanted)


def _say(outcome: Outcome) -> None:
    how = outcome.failure or f"{outcome.before:.1%} -> {outcome.after:.1%} in {outcome.minutes:.1f} min"
    print(f"{outcome.recipe}, seed {outcome.seed}: {how}", file=sys.stderr)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", type=_names, default=NAMES, help="comma-separated (default: all)")
    parser.add_argument("--seeds", type=_numbers, default=[0, 1, 2], help="comma-separated (default: 0,1,2)")
    parser.add_argument("--steps", type=int, default=100, help="of each run (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, a core each (default: %(default)s)")
    parser.add_argument("--output", help="keeps the runs, and goes on with those kept (default: a temporary one)")
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/<date>-learning.json and the page"
    )
    parser.add_argument("keys", nargs="*", metavar="key=value", help="further keys for every run")
    return parser.parse_args()


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := sorted(set(names) - set(NAMES)):
        raise argparse.ArgumentTypeError(f"no recipe {', '.join(unknown)}; there are {', '.join(NAMES)}")
    return names


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
