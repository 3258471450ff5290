"""`python -m benchmarks.placement`: the figures that placement must reach, in one table.

    planner     equals enumeration; plan times; published rankings from published stage costs
    rehearsal   regret of the chosen plan, and how long large rehearsals take: all step times are SIMULATED
    measured    steps of real processes whose stages sleep, beside their prediction; E of balanced stages
    switch      handing over a device with nothing to load

A figure that misses its bar says LOST and is published as it is; so is a part that failed. The load of the machine is
printed and saved with each part: on a machine that is shared, what is measured takes longer than it should.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks import context_switch, placement_measured
from benchmarks.contestants import ROOT
from benchmarks.placement_planned import GRPO, TAIL, Row, against_enumeration, plan_times, rankings
from benchmarks.runtime import machine

__all__ = ["GRPO", "TAIL", "Row"]


@dataclass(slots=True)
class Part:
    """One part of the table, and what was found."""

    name: str
    """Name of the part."""
    rows: list[Row] = field(default_factory=list)
    """Its lines."""
    numbers: Any = None
    """Numbers that are saved besides."""
    seconds: float = 0.0
    """That it took."""
    load: tuple[float, float] = (0.0, 0.0)
    """Average load of the machine over a minute, before and after."""

    def measure(self, quick: bool) -> None:
        """Run it. If it fails, that is a line of the table: the other parts took minutes."""
        started, before = time.monotonic(), os.getloadavg()[0]
        try:
            for row in PARTS[self.name](self, quick):
                self.rows.append(Row(row.what, row.bar, row.found, row.met))
        except Exception as error:
            self.rows.append(Row(f"{self.name}: the rest", "measured", f"failed: {error!r}"[-600:], False))
        self.seconds, self.load = time.monotonic() - started, (before, os.getloadavg()[0])

    @property
    def told(self) -> str:
        """How long it took, and how busy the machine was."""
        return f"{self.name}: {self.seconds:.0f} s, load {self.load[0]:.1f} before, {self.load[1]:.1f} after"


def planner(part: Part, quick: bool) -> Iterator[Row]:
    yield against_enumeration(500)
    yield from plan_times(3 if quick else 5)
    yield from rankings()


def rehearsal(part: Part, quick: bool) -> Iterator[Row]:
    from benchmarks.rehearsal import regrets, scale  # which imports this

    if quick:
        yield from islice(scale(1), 1)
        yield Row("regret under the virtual clock", "mean <= 3 %", "left out by --quick", None)
        return
    yield from scale(1)
    yield from regrets(1)


def measured(part: Part, quick: bool) -> Iterator[Row]:
    found = placement_measured.figures(quick=quick)
    part.numbers = found.numbers()
    yield from found.rows()


def switch(part: Part, quick: bool) -> Iterator[Any]:
    yield from context_switch.rows()


PARTS: dict[str, Callable[[Part, bool], Iterator[Any]]] = {
    each.__name__: each for each in (measured, switch, planner, rehearsal)
}
"""Parts that are measured, by name; first what a busy machine spoils most."""


def table(parts: Sequence[Part]) -> Table:
    """The figures for people."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "bar", "found", ""):
        shown.add_column(column, overflow="fold")
    for part in parts:
        for row in part.rows:
            verdict = {True: "[green]met[/]", False: "[bold red]LOST[/]", None: ""}[row.met]
            shown.add_row(escape(row.what), row.bar, escape(row.found), verdict)
    return shown


def save(parts: Sequence[Part], *, quick: bool) -> Path:
    """Write everything that was measured, by date."""
    now = datetime.datetime.now().astimezone()
    path = ROOT / "benchmarks" / "results" / f"{now:%Y-%m-%d}-placement.json"
    report = {
        "date": now.isoformat(timespec="seconds"),
        "machine": machine(),
        "quick": quick,
        "parts": [asdict(part) for part in parts],
    }
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def main() -> int:
    """Print the table; 1 if a figure that was measured misses its bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="about three minutes instead of eight: says little")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<date>-placement.json")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="some parts of the table")
    given = parser.parse_args()
    parts = [Part(name) for name in given.only]
    for part in parts:
        part.measure(given.quick)
        print(part.told, file=sys.stderr, flush=True)
    Console(width=None if sys.stdout.isatty() else 200).print(table(parts))
    print(f"\n{machine()}; {'; '.join(part.told for part in parts)}")
    if given.save:
        print(f"saved {save(parts, quick=given.quick).relative_to(ROOT)}")
    return int(any(row.met is False for part in parts for row in part.rows))


if __name__ == "__main__":
    sys.exit(main())
