"""Steps' times by prediction and in real processes; and how far from the possible they are.

In: the cases of `placement_cases.py`. Out: rows of `benchmarks.placement`, and the numbers behind them.

Roles only sleep, while they hold their leases; all else is real: processes under torchrun, the GRPO flow, streams,
leases, the two-phase switch of weights, the trace that steps are read off. A step is predicted twice, by a rehearsal of
the very plan that is run: from the profile of earlier rounds, as a run would, and from the true costs of the stages.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pickle
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contestants import run
from benchmarks.placement_cases import KIND, PREDICTED, Case, Job, balanced
from benchmarks.placement_planned import Row
from benchmarks.placement_stages import FOUND, virtually
from rlinf.flows.grpo import grpo
from rlinf.placement.hardware import Devices
from rlinf.placement.profile import Profile, load
from rlinf.placement.simulate import rehearse
from rlinf.placement.workload import Workload
from rlinf.placement.workload import workload as workload_of

BARS = {"collocated": 0.03, "disaggregated": 0.05, "hybrid": 0.05}
"""How far a prediction may be off, by mode."""
EFFICIENT, ADDS_UP = 0.95, 0.01
"""Least E of balanced stages side by side; by how much of T - T_LB the losses may miss it."""
EXACT = 0.005
"""How far rehearsal and run may be apart where messages take no time."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Outcome of one case."""

    case: Case
    """Which."""
    seconds: tuple[float, ...]
    """Seconds of every measured step."""
    told: tuple[dict[str, float], ...]
    """Ledger of each step: `bound/…` and `lost/…`."""
    profile: Profile
    """Profile of earlier rounds."""

    @property
    def middle(self) -> float:
        """The median step."""
        return statistics.median(self.seconds)

    @property
    def typical(self) -> dict[str, float]:
        """Ledger of the median step."""
        step = min(range(len(self.seconds)), key=lambda index: abs(self.seconds[index] - self.middle))
        return self.told[step]

    @property
    def from_profile(self) -> float:
        """Seconds of a step, rehearsed with what earlier rounds were measured to cost."""
        return rehearsed(self.case, workload_of(self.profile, Devices({KIND: self.case.devices}, self.case.memory)))

    @property
    def missing(self) -> float:
        """The largest share of T - T_LB by which the losses of a step do not add up to it."""
        apart = []
        for seconds, told in zip(self.seconds, self.told, strict=True):
            gap = seconds - told["bound/seconds"]
            apart.append(abs(sum(_losses(told).values()) - gap) / max(gap, 1e-9))
        return max(apart)


def measured(job: Job) -> tuple[list[Measured], float]:
    """Run a job, and predict its cases; also by how many seconds a sleep of 10 ms is late on this machine now."""
    processes = max(case.devices for case in job.cases)
    torchrun = (
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)),
        *("--master-port=0", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"),
    )
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        (directory / "job").write_bytes(pickle.dumps(job))
        run([*torchrun, "-m", "benchmarks.placement_stages", place])
        found = json.loads((directory / FOUND).read_text(encoding="utf-8"))
        cases = [
            Measured(case, tuple(one["seconds"]), tuple(one["told"]), load(directory / f"{index}.json"))
            for index, (case, one) in enumerate(zip(job.cases, found["cases"], strict=True))
        ]
    return cases, found["late"]


def rehearsed(case: Case, workload: Workload) -> float:
    """Seconds of a step of the case's plan, predicted from what its roles cost."""
    return rehearse(grpo, case.plan(), workload, items=case.items, devices_per_rank=1).seconds


def predictions(found: Sequence[Measured]) -> Iterator[Row]:
    """Two rows per case."""
    for one in found:
        bar = BARS[one.case.mode]
        spread = _quartiles(one.seconds)
        truth = rehearsed(one.case, one.case.workload())
        for source, seconds in (("profile", one.from_profile), ("true stage costs", truth)):
            off = seconds / one.middle - 1
            yield Row(
                f"step predicted from {source}: {one.case.mode}, {one.case.name}",
                f"within {bar:.0%}",
                f"{seconds:.3f} s, measured {one.middle:.3f} s ({spread}): {off:+.1%}",
                abs(off) <= bar,
            )


def efficiencies(found: Sequence[Measured]) -> Iterator[Row]:
    """A row per case: E, where the rest went, and whether that adds up."""
    for one in found:
        shares = [told["bound/efficiency"] for told in one.told]
        middle = statistics.median(shares)
        lost = {name: seconds for name, seconds in _losses(one.typical).items() if abs(seconds) >= 5e-4}
        where = ", ".join(f"{name} {1e3 * seconds:.0f} ms" for name, seconds in lost.items())
        yield Row(
            f"E of balanced stages side by side, {one.case.name}",
            f">= {EFFICIENT:g}",
            f"{middle:.3f} ({_quartiles(shares)}); of {1e3 * one.middle:.0f} ms lost: {where}",
            middle >= EFFICIENT,
        )
        yield Row(
            f"losses add up to T - T_LB, {one.case.name}",
            f"<= {ADDS_UP:.0%} off",
            f"{one.missing:.2%} off at most",
            one.missing <= ADDS_UP,
        )


def virtual_rows(cases: Sequence[Case]) -> Iterator[Row]:
    """Tell whether the rehearsal misses anything but the time of messages and threads: both under the virtual clock."""
    apart = max(abs(rehearsed(case, case.workload()) / virtually(case) - 1) for case in cases)
    yield Row(
        f"rehearsal against the same roles, without time for messages, {len(cases)} placements",
        f"<= {EXACT:.1%} apart",
        f"{apart:.2%} apart at most",
        apart <= EXACT,
    )


def _losses(told: dict[str, float]) -> dict[str, float]:
    return {name.removeprefix("lost/"): value for name, value in told.items() if name.startswith("lost/")}


def _quartiles(values: Sequence[float]) -> str:
    if len(values) < 2:
        return "one step"
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{low:.3f} to {high:.3f}"


@dataclass(frozen=True, slots=True)
class Figures:
    """All that one call measured."""

    predicted: tuple[Measured, ...]
    """Cases whose step time is predicted."""
    balanced: tuple[Measured, ...]
    """Cases whose efficiency is measured."""
    late: float
    """Seconds by which a sleep of 10 ms is late."""

    def rows(self) -> Iterator[Row]:
        """The lines of the table."""
        yield from predictions(self.predicted)
        yield from virtual_rows([one.case for one in self.predicted])
        yield from efficiencies(self.balanced)

    def numbers(self) -> dict[str, Any]:
        """Numbers that are saved."""
        return {"late": self.late, "cases": [_numbers(one) for one in itertools.chain(self.predicted, self.balanced)]}


def _numbers(one: Measured) -> dict[str, Any]:
    roles = {name: list(role.devices) for name, role in one.case.plan().roles.items()}
    return {
        "name": one.case.name,
        "mode": one.case.mode,
        "devices": roles,
        "seconds": [round(each, 5) for each in one.seconds],
        "efficiency": [round(told["bound/efficiency"], 5) for told in one.told],
        "typical": {name: round(value, 5) for name, value in one.typical.items()},
    }


def figures(*, quick: bool = False) -> Figures:
    """Measure; about four minutes, or one and a half if `quick`.

    Raises:
        TurnFailed: the processes failed; the text ends with what they wrote last.
    """
    rounds, steps = (1, 1) if quick else (2, 3)
    predicted, late = measured(Job(PREDICTED, 1, rounds, steps))
    even, _ = measured(Job(balanced(64 if quick else 128), 1, rounds, steps))
    return Figures(tuple(predicted), tuple(even), late)


def main() -> int:
    """Print a line per row; 1 if one misses its bar."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few steps: says little")
    before = os.getloadavg()[0]
    found = figures(quick=parser.parse_args().quick)
    rows = list(found.rows())
    for row in rows:
        print(f"{row.what}: {row.found}, bar {row.bar}: {'met' if row.met else 'LOST'}")
    print(
        f"a sleep of 10 ms is {1e3 * found.late:.2f} ms late; load {before:.1f} before, {os.getloadavg()[0]:.1f} after"
    )
    return int(not all(row.met for row in rows))


if __name__ == "__main__":
    sys.exit(main())
