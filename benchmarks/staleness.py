"""`python -m benchmarks.staleness`: what do older answers cost, and which correction pays?

The quickstart's task by `rlinf.flows.grpo_async`, with answers that are up to 0, 1, 2, 4 and 8 versions old, under each
correction. The flow works ahead as far as it is allowed to, and in one process a batch waits for all that were begun
before it, so that from the first few steps on every token is as old as the bound: the table says how old. It ends with
the bar: with the default correction, staleness 4 is within the seeds' spread of staleness 0.
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
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from benchmarks.contestants import ROOT
from benchmarks.runtime import machine
from benchmarks.staleness_runs import CORRECTIONS, LATE, Outcome, Runs

PAGE = ROOT / "docs" / "async.md"
BEGIN, END = "<!-- benchmarks.staleness: table -->", "<!-- benchmarks.staleness: end -->"
"""Between these lines of the page stands the table."""
HEADINGS = (
    "staleness.max", "correction", "accuracy, end, %", "mean", "late, %", "reward, late", "age, mean / max",
    "drift, nats", "ESS", "gradient norm",
)  # fmt: skip
BAR = (4, "default")
"""Bound and correction that are held to what staleness 0 reaches."""


def rows(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """A row per bound and correction, in the order of bounds; seeds stand in order."""
    found = []
    places = dict.fromkeys((outcome.bound, outcome.correction) for outcome in outcomes)
    for bound, correction in sorted(places, key=lambda place: place[0]):
        seeds = [outcome for outcome in outcomes if (outcome.bound, outcome.correction) == (bound, correction)]
        ended = [outcome for outcome in seeds if not outcome.failure]
        if not ended:
            found.append((str(bound), correction, f"failed: {seeds[0].failure}", *[""] * (len(HEADINGS) - 3)))
            continue
        found.append(
            (
                str(bound),
                correction,
                ", ".join(f"{100 * outcome.accuracy:.1f}" for outcome in ended),
                _mean(ended, lambda outcome: 100 * outcome.accuracy, "{:.1f}"),
                _mean(ended, lambda outcome: 100 * outcome.late_accuracy, "{:.1f}"),
                _mean(ended, lambda outcome: outcome.late_reward, "{:.3f}"),
                f"{fmean(outcome.staleness_mean for outcome in ended):.2f} / "
                f"{max(outcome.staleness_max for outcome in ended):.0f}",
                _mean(ended, lambda outcome: outcome.drift, "{:.3f}"),
                _mean(ended, lambda outcome: outcome.ess, "{:.2f}"),
                _mean(ended, lambda outcome: outcome.grad_norm, "{:.2f}"),
            )
        )
    return found


def verdict(outcomes: Sequence[Outcome]) -> tuple[bool | None, str]:
    """Tell whether the bar is met, None where it was not measured, and a line that says by what."""

    def late(bound: int, corrections: Iterable[str]) -> list[float]:
        return [
            outcome.late_accuracy
            for outcome in outcomes
            if outcome.bound == bound and outcome.correction in corrections and math.isfinite(outcome.late_accuracy)
        ]

    fresh, stale = late(0, CORRECTIONS), late(BAR[0], BAR[1:])
    if not fresh or not stale:
        return None, f"the bar needs staleness 0, and {BAR[0]} with correction {BAR[1]!r}"
    low, high = min(fresh), max(fresh)
    met = low <= fmean(stale)
    return met, (
        f"staleness {BAR[0]} with correction {BAR[1]!r}: mean {100 * fmean(stale):.1f} %; staleness 0: "
        f"{100 * low:.1f} to {100 * high:.1f} %: {'within' if met else 'below'} the seeds' spread"
    )


def markdown(outcomes: Sequence[Outcome]) -> str:
    """The table and the verdict."""
    lines = [f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|"]
    lines += [f"| {' | '.join((row[0], f'`{row[1]}`', *row[2:]))} |" for row in rows(outcomes)]
    return "\n".join([*lines, "", f"The bar: {verdict(outcomes)[1]}."])


def in_page(page: str, outcomes: Sequence[Outcome]) -> str:
    """The page with this table in place of the one between the two marks.

    Raises:
        ValueError: the page lacks the marks.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no place for the table: it needs the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{markdown(outcomes)}\n{END}{after}"


def save(outcomes: Sequence[Outcome], steps: int) -> Path:
    """Write what was measured, by date, and the table in the page."""
    now = datetime.datetime.now().astimezone()
    path = ROOT / "benchmarks" / "results" / f"{now:%Y-%m-%d}-staleness.json"
    runs = [{name: _plain(value) for name, value in asdict(each).items() if name != "keys"} for each in outcomes]
    about = {"date": now.isoformat(timespec="seconds"), "machine": machine(), "steps": steps, "late": LATE}
    corrections = {name: " ".join(keys) for name, keys in CORRECTIONS.items()}
    report = {**about, "corrections": corrections, "verdict": verdict(outcomes)[1], "runs": runs}
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(in_page(PAGE.read_text(encoding="utf-8"), outcomes), encoding="utf-8")
    return path


def main() -> int:
    options = _options()
    if options.quick:
        options.seeds, options.bounds, options.corrections, options.steps = [0], [0, 4], ["none", "default"], 20
    wanted = [
        (correction, bound, seed)
        for seed in options.seeds
        for bound in options.bounds
        for correction in options.corrections
        if bound or correction in ("none", "default")  # there is next to nothing to correct
    ]
    kept = tempfile.TemporaryDirectory() if options.output is None else nullcontext(options.output)
    with kept as output:
        Path(output).mkdir(parents=True, exist_ok=True)
        outcomes = asyncio.run(_all(Runs(Path(output).absolute(), options.steps, options.jobs, _say), wanted))
    widths = [max(map(len, column)) for column in zip(HEADINGS, *rows(outcomes), strict=True)]
    for row in (HEADINGS, *rows(outcomes)):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    met, words = verdict(outcomes)
    print(f"\n{words}\n{machine()}; {options.steps} steps; late: the mean of the last {LATE}")
    if options.save:
        saved = (save(outcomes, options.steps), PAGE)
        print("saved " + ", ".join(str(path.relative_to(ROOT)) for path in saved))
    failed = any(outcome.failure for outcome in outcomes)
    return 1 if failed or (met is False and not options.quick) else 0


def _mean(outcomes: Sequence[Outcome], of: Callable[[Outcome], float], form: str) -> str:
    """Over the outcomes that know it."""
    known = [value for value in map(of, outcomes) if math.isfinite(value)]
    return form.format(fmean(known)) if known else ""


def _plain(value: object) -> object:
    """For a file that can be read: a list as one string, and null for what a failed run does not know."""
    if isinstance(value, float):
        return round(value, 4) if math.isfinite(value) else None
    return " ".join(f"{each:.3f}" for each in value) if isinstance(value, tuple) else value


async def _all(runs: Runs, wanted: Sequence[tuple[str, int, int]]) -> list[Outcome]:
    """The outcomes; being ended by SIGTERM ends the runs too, as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await runs.all(wanted)


def _say(outcome: Outcome) -> None:
    how = outcome.failure or f"{outcome.late_accuracy:.1%}, reward {outcome.late_reward:.3f}"
    print(f"staleness {outcome.bound}, {outcome.correction}, seed {outcome.seed}: {how}", file=sys.stderr)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corrections", type=_names, default=list(CORRECTIONS), help="comma-separated (default: all)")
    parser.add_argument("--bounds", type=_numbers, default=[0, 1, 2, 4, 8], help="of staleness (default: 0,1,2,4,8)")
    parser.add_argument("--seeds", type=_numbers, default=[0, 1, 2], help="comma-separated (default: 0,1,2)")
    parser.add_argument("--steps", type=int, default=100, help="of each run (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, a core each (default: %(default)s)")
    parser.add_argument("--output", help="keeps the runs, and goes on with those kept (default: a temporary one)")
    parser.add_argument("--quick", action="store_true", help="one seed, 20 steps, staleness 0 and 4")
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/<date>-staleness.json and the page"
    )
    return parser.parse_args()


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := sorted(set(names) - set(CORRECTIONS)):
        raise argparse.ArgumentTypeError(f"no correction {', '.join(unknown)}; there are {', '.join(CORRECTIONS)}")
    return names


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
