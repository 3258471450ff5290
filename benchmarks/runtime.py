"""`python -m benchmarks.runtime`: the runtime beside its peers, in one run.

Machines are noisy, so contestants take turns, A B C A B C …, each turn in fresh processes with no other contestant
alive. A ratio is taken within a round, between turns that lie seconds apart; shown are medians over the rounds and, in
brackets, their quartiles. A row that misses its bar says LOST and is published as it is.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.contestants import ROOT, Contestant, TurnFailed, contestants
from benchmarks.peers.common import GROUPS, SIZES

ALL_GROUPS = (*GROUPS, "leases", "startup")
PEERS = ("bare rpc_async", "ray", "xoscar")
SOCKETS = "bare rpc_async, sockets"
"""Torch RPC on the transport that the runtime chooses on shared cores; alone, torch takes one that spins on a core."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        what: the words of the line.
        key: name of the number that contestants report.
        unit: how it is shown: "s" (scaled to µs or ms), "/s", "%".
        bars: per opponent, the ratio ours / theirs to reach; at least for rates, at most for times.
        bar: the value to reach, where the bar is not relative.
        over: the bar is on ours minus this contestant's, in seconds.
    """

    what: str
    key: str
    unit: str
    bars: dict[str, float]
    bar: float | None = None
    over: str | None = None
    size: int | None = None
    """Bytes, where times are to be shown and judged as GB/s."""

    @property
    def more_is_better(self) -> bool:
        return self.unit in ("/s", "GB/s")


def rows() -> list[Row]:
    calls = [
        Row(
            "awaited call across processes, p50",
            "call_p50",
            "s",
            {"bare rpc_async": 0.35, "ray": 1 / 12, "xoscar": 1 / 3},
        ),
        Row("awaited call across processes, p99", "call_p99", "s", {}),
        Row("256 concurrent calls", "concurrent", "/s", dict(zip(PEERS, (25, 60, 10), strict=True))),
        Row("call inside one process, p50", "local_p50", "s", {}, bar=8e-6),
    ]
    least = {"100MB": {"bare rpc_async": 6.0}}
    transfers = [
        Row(
            f"{name} CPU tensor to a neighbour", f"tensor_{name}", "GB/s", {"ray": 1.0} | least.get(name, {}), size=size
        )
        for name, size in SIZES.items()
    ]
    size = SIZES["100MB"]
    first = Row("100MB CPU tensor, the first five", "cold_100MB", "GB/s", {"bare rpc_async": 6.0}, size=size)
    rest = [
        first,
        Row("100MB tensor already in the arena, handed over", "handover", "s", {}, bar=0.1e-3),
        Row("channel put + get across processes, one item", "queue", "s", {"ray": 1 / 10}),
        Row("stream of small items", "stream", "/s", {}, bar=20_000),
        Row("two-stage stream of 10 ms stages, over ideal", "overlap", "%", {}, bar=0.01),
        Row("lease hand-over, both away from the controller", "lease_handover", "s", {}, bar=0.3e-3),
        Row("CPU of an idle host, of a core", "idle", "%", {}, bar=0.01),
        Row("torchrun to first call answered", "startup", "s", {}, bar=1.5, over="import torch"),
    ]
    return calls + transfers + rest


@dataclass(frozen=True, slots=True)
class Line:
    """A row about us and one opponent (or about us and an absolute bar)."""

    what: str
    ours: str
    opponent: str
    theirs: str
    ratio: str
    bar: str
    verdict: str


def spread(values: list[float]) -> tuple[float, float, float]:
    """Median and quartiles."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, low, high


def show(values: list[float], unit: str) -> str:
    middle, low, high = spread(values)
    scale, unit = {"s": _second(middle), "%": (100, "%")}.get(unit, (1, unit))
    if unit == "/s":
        return f"{middle:,.0f} /s" + (f" [{low:,.0f}-{high:,.0f}]" if len(values) > 1 else "")
    text = f"{middle * scale:.3g} {unit}"
    return text + (f" [{low * scale:.3g}-{high * scale:.3g}]" if len(values) > 1 else "")


def _second(value: float) -> tuple[float, str]:
    if abs(value) >= 1:
        return 1, "s"
    return (1e3, "ms") if abs(value) >= 1e-3 else (1e6, "µs")


def lines(row: Row, entered: list[Contestant]) -> list[Line]:
    """One line per opponent with numbers for this row, or one for ours alone; none if ours was not measured."""
    numbers = {contestant.name: _numbers(row, contestant) for contestant in entered}
    ours = numbers.pop("rlinf")
    if not ours:
        return []
    shown = show(ours, row.unit)
    found = []
    if row.bar is not None:
        found.append(_absolute(row, ours, shown, numbers))
    for name, theirs in numbers.items():
        if theirs and name != row.over:
            ratios = [a / b for a, b in zip(ours, theirs, strict=False)]
            bar = row.bars.get(name)
            found.append(
                Line(row.what, shown, name, show(theirs, row.unit), show(ratios, "×"), *_judged(row, ratios, bar, "×"))
            )
    for name in row.bars:
        if not numbers.get(name):
            found.append(Line(row.what, shown, name, "absent", "", "", "skipped"))
    return found or [Line(row.what, shown, "", "", "", "", "")]


def _numbers(row: Row, contestant: Contestant) -> list[float]:
    numbers = contestant.rows.get(row.key, [])
    return [row.size / seconds / 1e9 for seconds in numbers] if row.size else numbers


def _absolute(row: Row, ours: list[float], shown: str, others: dict[str, list[float]]) -> Line:
    if row.over is None:
        return Line(row.what, shown, "", "", "", *_judged(row, ours, row.bar, row.unit))
    theirs = others[row.over]
    difference = [a - b for a, b in zip(ours, theirs, strict=False)]
    bar, verdict = _judged(row, difference, row.bar, row.unit)
    return Line(row.what, shown, row.over, show(theirs, row.unit), f"+ {show(difference, row.unit)}", bar, verdict)


def _judged(row: Row, values: list[float], bar: float | None, unit: str) -> tuple[str, str]:
    """The bar as text, and whether the median reaches it."""
    if bar is None:
        return "", ""
    middle = statistics.median(values)
    reached = middle >= bar if row.more_is_better else middle <= bar
    return f"{'≥' if row.more_is_better else '≤'} {show([bar], unit)}", "pass" if reached else "LOST"


def measure(entered: list[Contestant], groups: list[str], rounds: int) -> None:
    """Rounds of turns. A peer that fails drops out and says why; ours failing ends the run."""
    for round_ in range(rounds):
        for group in groups:
            turn = [one for one in entered if group in one.groups and one.missing is None]
            for contestant in turn[round_ % len(turn) :] + turn[: round_ % len(turn)]:  # nobody is always first
                start = time.perf_counter()
                try:
                    contestant.measure(group)
                except TurnFailed as error:
                    if contestant.name == "rlinf":
                        raise
                    contestant.missing = f"failed: {error}"
                took = time.perf_counter() - start
                print(f"round {round_ + 1}/{rounds} {group}: {contestant.name} {took:.1f} s", file=sys.stderr)
                for row in rows():
                    numbers = _numbers(row, contestant)
                    if row.key in contestant.latest and numbers:
                        print(f"    {row.what}: {show(numbers[-1:], row.unit)}", file=sys.stderr)


def table(result: list[Line]) -> Table:
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "rlinf", "opponent", "theirs", "ours / theirs", "bar", ""):
        shown.add_column(column, overflow="fold")
    previous = ""
    for line in result:
        style = {"LOST": "bold red", "pass": "green"}.get(line.verdict, "")
        first = ("", "") if line.what == previous else (line.what, line.ours)
        verdict = f"[{style}]{line.verdict}[/]" if style else line.verdict
        cells = (*first, line.opponent, line.theirs, line.ratio, line.bar)
        shown.add_row(*(cell.replace("[", r"\[") for cell in cells), verdict)
        previous = line.what
    return shown


def save(result: list[Line], entered: list[Contestant], rounds: int, load: tuple[float, float]) -> Path:
    """Everything that was measured, by date."""
    now = datetime.datetime.now().astimezone()
    path = ROOT / "benchmarks" / "results" / f"{now:%Y-%m-%d}-runtime.json"
    path.parent.mkdir(exist_ok=True)
    report = {
        "date": now.isoformat(timespec="seconds"),
        "machine": machine(),
        "load_average": {"before": load[0], "after": load[1]},
        "rounds": rounds,
        "versions": {contestant.name: contestant.version for contestant in entered},
        "missing": {contestant.name: contestant.missing for contestant in entered if contestant.missing},
        "lines": [asdict(line) for line in result],
        "numbers": {contestant.name: contestant.rows for contestant in entered},
    }
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    return path


def machine() -> str:
    """Describe the machine, in words."""
    model = ""
    if (cpus := Path("/proc/cpuinfo")).exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpus.read_text().splitlines() if line.startswith("model name")
        ]
        model = f"{names[0]}, " if names else ""
    return f"{model}{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of every contestant (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one round; no spread")
    parser.add_argument("--groups", default=",".join(ALL_GROUPS), help="rows to measure (default: %(default)s)")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<date>-runtime.json")
    options = parser.parse_args()
    groups = options.groups.split(",")
    if unknown := set(groups) - set(ALL_GROUPS):
        parser.error(f"unknown group {', '.join(sorted(unknown))}; there are {', '.join(ALL_GROUPS)}")
    rounds = 1 if options.quick else options.rounds

    entered = contestants()
    before = os.getloadavg()[0]
    failure = ""
    try:
        measure(entered, groups, rounds)
    except TurnFailed as error:
        failure = f"\nThe run ended early, and nothing is saved: {error}"
    result = [line for row in rows() for line in lines(row, entered)]
    console = Console(width=None if sys.stdout.isatty() else 170)
    console.print(table(result))
    print(f"\n{machine()}; {rounds} rounds; load average {before:.1f} before, {os.getloadavg()[0]:.1f} after")
    print(", ".join(f"{one.name} {one.version}" for one in entered if one.version))
    for contestant in entered:
        if contestant.missing:
            print(f"skipped {contestant.name}: {contestant.missing}")
    if failure:
        sys.exit(failure)
    if options.save:
        print(f"saved {save(result, entered, rounds, (before, os.getloadavg()[0])).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
