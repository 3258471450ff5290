"""What deaths and ends of runs have left, and what of that should not be.

In: a run, and how it was killed. Out: points and what is wrong with them, as a summary in JSON.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlinf.cli.runs import account
from rlinf.data.ledger import of_ranges
from rlinf.storage.files import read_lines
from tests.drills.run import VICTIMS, Run, birth_of, command_of, tokens_held
from tests.launching import metrics_of
from tests.runtime.programs.jobs import shared_memory, until


@dataclass(slots=True)
class Point:
    """One kill."""

    victim: str
    """Whom."""
    moment: str
    """When."""
    step: int
    """Steps noted then."""
    cause: str = ""
    """What the run told of it: its lines with `error:`."""
    seconds: float = 0.0
    """Until all of it had ended; 0 where it went on."""
    wrong: list[str] = field(default_factory=list)
    """What should not be."""


@dataclass(slots=True)
class Found:
    """What came of drills."""

    points: list[Point] = field(default_factory=list)
    """The kills."""
    runs: int = 0
    """Runs that were let to their end."""
    torn: int = 0
    """How often a run ended because its engine was killed in the middle of taking new weights."""
    wrong: list[str] = field(default_factory=list)
    """What should not be, at the end of a run."""
    held: int = 0
    """Tokens in flight in checkpoints that were gone on from, where what was made afterwards is known."""
    again: int = 0
    """Tokens of those that were made again."""

    @property
    def well(self) -> bool:
        """Nothing was as it should not be."""
        return not self.wrong and not any(point.wrong for point in self.points)


def examine(run: Run, point: Point, born: Sequence[tuple[int, str]], before: set[str], *, silent: bool) -> None:
    """What a death has left.

    Args:
        run, point: what died, and how.
        born: the processes that there were.
        before: what lay in shared memory before.
        silent: nothing needs to be told: it was over by then, or had hardly begun.
    """
    here = run.processes
    assert here is not None
    said = here.everything()
    told = [line for line in said.splitlines() if line.startswith(("error:", "rlinf:"))]
    point.cause = " | ".join(told)
    if point.victim.startswith("rank") and not silent and not _named(told, point):
        point.wrong.append(f"first cause not told in one line: {said[-300:]}")
    if "Traceback" in said and not run.torchrun and not run.engine:  # torchrun and the imitated server show their own
        point.wrong.append(f"a traceback: {said[-500:]}")
    try:
        until(lambda: not [pid for pid, birth in born if birth_of(pid) == birth], "", 15)
    except AssertionError:
        left = [f"{pid} {command_of(pid)[:80]}" for pid, birth in born if birth_of(pid) == birth]
        point.wrong.append(f"processes are left: {left}")
    ours = [str(pid) for pid, _ in born]
    if left_in_memory := [name for name in shared_memory() - before if any(pid in name for pid in ours)]:
        point.wrong.append(f"/dev/shm has {left_in_memory}")
    point.wrong += _ledger(run)


def _named(told: Sequence[str], point: Point) -> bool:
    """One line, which names the host."""
    return len(told) == 1 and f"host {point.victim[-1]}" in told[0]


def _ledger(run: Run) -> list[str]:
    """Why the run's ledger does not balance; nothing where it does, or where no step is over."""
    if not (run.path / "ledger.jsonl").exists():
        return []
    found = account(run.path)
    wrong = [f"ledger: {problem}" for problem in found.problems]
    wrong += [f"ledger: {found.note}"] if found.note else []
    numbers = sorted(
        number
        for line in read_lines(run.path / "ledger.jsonl")
        for ids in line.get("drawn", {}).values()
        for number in of_ranges(ids)
    )
    if numbers != [*range(len(numbers))]:
        wrong.append(f"prompts drawn are not 0 to {len(numbers) - 1}, each once")
    return wrong


def finished(run: Run, found: Found) -> None:
    """A run has come to its end."""
    found.wrong += [f"{run.path}: {each}" for each in _ledger(run)]
    steps = [line["step"] for line in metrics_of(run.path)]
    if steps != [*range(1, run.drill.steps + 1)]:
        found.wrong.append(f"{run.path}: steps are {steps}")
    stale = max((line.get("staleness/max", 0.0) for line in metrics_of(run.path)), default=0.0)
    if stale > (run.drill.staleness if "async" in run.drill.flow else 0):
        found.wrong.append(f"{run.path}: staleness/max {stale}")
    if run.went_on is None or run.engine:
        return
    lines = [line for line in read_lines(run.path / "ledger.jsonl") if line["step"] > run.went_on]
    used = sum(sum(line.get("tokens", {}).values()) for line in lines)
    made = sum(map(int, run.tokens.read_text().split())) if run.tokens.exists() else 0
    at_the_end = tokens_held(run.path / "checkpoints" / "latest")
    found.held += run.held
    found.again += max(0, made + run.held - used - at_the_end)


def summary(found: Found) -> dict[str, Any]:
    """What came of drills, as JSON."""
    by = Counter(point.victim for point in found.points)
    bad = Counter(point.victim for point in found.points if point.wrong)
    return {
        "points": len(found.points),
        "runs": found.runs,
        "ended by an engine killed in the middle of a load": found.torn,
        "well": len(found.points) - sum(bad.values()),
        "victims": {name: f"{by[name] - bad[name]} of {by[name]}" for name in VICTIMS if by[name]},
        "moments": dict(Counter(point.moment for point in found.points)),
        "seconds until it had ended": round(max((point.seconds for point in found.points), default=0.0), 1),
        "tokens held by checkpoints": found.held,
        "of those made again": found.again,
        "wrong": [
            *found.wrong,
            *(f"{p.victim}, {p.moment}, step {p.step}: {w}" for p in found.points for w in p.wrong),
        ],
    }
