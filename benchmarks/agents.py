"""`python -m benchmarks.agents`: the bars of agents, a row each.

Each row comes from a module of its own, which says how it is measured: benchmarks.agents_endpoint, agents_loops,
agents_histories, agents_engines, agents_training. A row that misses its bar says LOST; one that cannot be measured here
says why.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import agents_endpoint, agents_engines, agents_histories, agents_loops, agents_training
from benchmarks.contestants import TurnFailed
from benchmarks.runtime import machine
from rlinf.engines.base import lacking

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True, slots=True)
class Line:
    """One bar."""

    what: str
    bar: str
    found: str
    met: bool | None
    """None where it was not measured."""

    @property
    def verdict(self) -> str:
        return {True: "met", False: "LOST", None: "not run"}[self.met]


def endpoint(quick: bool) -> list[Line]:
    """The overhead of HTTP, by how long the engine takes to answer."""
    lines = []
    for engine_ms in (250.0,) if quick else (50.0, 250.0, 1000.0):
        row = agents_endpoint.overhead(engine_ms, turns=4 if quick or engine_ms > 500 else 8, rounds=1 if quick else 3)
        what = f"endpoint over the engine's time, {agents_endpoint.SESSIONS} sessions, answers of {engine_ms:.0f} ms"
        told = f"{row.overhead:.1%}; {row.server_us:.0f} us of computing a call, {row.direct_us:.0f} without HTTP"
        lines.append(Line(what, f"<= {agents_endpoint.BAR:.0%}", told, row.overhead <= agents_endpoint.BAR))
    return lines


def loops(quick: bool) -> list[Line]:
    """Cost of waiting agents."""
    count = agents_loops.LOOPS // 10 if quick else agents_loops.LOOPS
    found = asyncio.run(agents_loops.waiting_loops(count, 1.0 if quick else 5.0))
    memory, share = found["megabytes"], found["waiting"]
    idle = f"{share:.2%} of a core; the idle session {found['idle']:.2%}"
    limits = agents_loops.MEGABYTES, agents_loops.SHARE
    return [
        Line(f"memory of {count:,} waiting loops", f"<= {limits[0]:g} MB", f"{memory:.1f} MB", memory <= limits[0]),
        Line(f"processor of {count:,} waiting loops", f"<= {limits[1]:.0%}", idle, share <= limits[1]),
    ]


def histories(quick: bool) -> list[Line]:
    """Tokens that are encoded again."""
    return [Line(*row) for row in agents_histories.rows(quick)]


def engines(quick: bool) -> list[Line]:
    """How fast weights get into inference servers, and how long these take to come back."""
    lines = []
    for engine in ("sglang", "vllm"):
        if reason := "--quick leaves out servers" if quick else lacking(engine):
            lines.append(Line(f"{engine}: weights and restart", ">= 0.5, <= 1.2", f"not run: {reason}", None))
            continue
        try:
            measured = asyncio.run(agents_engines.measured(engine))
        except Exception as error:  # a server that does not come up must not cost the other rows
            lines.append(Line(f"{engine}: weights and restart", ">= 0.5, <= 1.2", f"failed: {error}", None))
            continue
        for row in measured:
            sign, bound = row.bar.split()
            met = row.ratio >= float(bound) if sign == ">=" else row.ratio <= float(bound)
            told = f"{row.ratio:.2f}: {row.value:.2f} {row.unit} beside {row.beside:.2f}"
            lines.append(Line(f"{engine}: {row.what}", row.bar, told, met))
    return lines


def training(quick: bool) -> list[Line]:
    """Our training beside others'."""
    try:
        return [Line(*row) for row in agents_training.rows(quick)]
    except TurnFailed as error:
        return [Line("calculator agent beside TRL", f">= {agents_training.BAR} x", f"failed: {error}", None)]


PARTS: dict[str, Callable[[bool], list[Line]]] = {
    "endpoint": endpoint, "loops": loops, "histories": histories, "engines": engines, "training": training,
}  # fmt: skip


def table(lines: list[Line]) -> Table:
    """The table that is printed."""
    shown = Table("what", "bar", "found", "")
    for line in lines:
        style = {"LOST": "bold red", "met": "green"}.get(line.verdict, "dim")
        cells = [cell.replace("[", r"\[") for cell in (line.what, line.bar, line.found)]
        shown.add_row(*cells, f"[{style}]{line.verdict}[/]")
    return shown


def save(lines: list[Line], load: dict[str, float]) -> Path:
    """Write the figures down by date, in a file where other rows of that day stay."""
    path = RESULTS / f"{datetime.date.today().isoformat()}-agents.json"
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    fresh = [{**asdict(line), "verdict": line.verdict} for line in lines]
    rows = [*(row for row in before if row["what"] not in {line.what for line in lines}), *fresh]
    report = {"machine": machine(), "torch": torch.__version__, "load_average": load, "rows": rows}
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS], help="some parts (default: all)")
    parser.add_argument("--quick", action="store_true", help="little work: says that it runs, not how fast")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<date>-agents.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    before = os.getloadavg()[0]
    lines: list[Line] = []
    for part in given.only:
        found = PARTS[part](given.quick)
        print(f"{part}: {'; '.join(line.found for line in found)}", file=sys.stderr, flush=True)
        lines += found
    Console(width=None if sys.stdout.isatty() else 160).print(table(lines))
    if given.save:
        print(save(lines, {"before": before, "after": os.getloadavg()[0]}))
    return 1 if any(line.met is False for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
