"""The runs of `benchmarks.staleness`: the quickstart with answers of older weights, one process each.

In: corrections, bounds of staleness, seeds. Out: an `Outcome` of each, also as a line of runs.jsonl in the directory of
the runs, so that what was interrupted goes on with the runs that are missing.
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean

from benchmarks.contestants import ROOT
from benchmarks.learning_runs import CONFIG, reason, run_process

CORRECTIONS: Mapping[str, tuple[str, ...]] = {
    "none": ("algorithm.correction=null",),
    "truncated": ("algorithm.correction={cap: 2.0}",),
    "masked": ("algorithm.correction={cap: 2.0, floor: 0.5, outside: mask}",),
    "sequence": ("algorithm.correction={cap: 2.0, level: sequence}",),
    "geometric": ("algorithm.correction={cap: 2.0, level: geometric}",),
    "rejection": ("algorithm.correction=null", "algorithm.rejection={floor: 0.8, cap: 1.25}"),
    "decoupled": (
        "algorithm.correction=null",
        "algorithm.loss={name: decoupled, clip_low: 0.2, clip_high: 0.28, cap: 2.0}",
    ),
    "interpolated": (
        "algorithm.correction=null",
        "algorithm.loss={name: decoupled, clip_low: 0.2, clip_high: 0.28, cap: 2.0, proximal: interpolate}",
    ),
    "both": ("algorithm.correction={cap: 5.0}", "algorithm.rejection={floor: 0.7, cap: 1.43}"),
    "cap_alone": ("algorithm.correction={cap: 5.0}",),
    "rejection_alone": ("algorithm.correction=null", "algorithm.rejection={floor: 0.7, cap: 1.43}"),
    "default": (),
}
"""The keys of each; `default` sets none, and so has what asynchronous flows have of themselves."""
EVERY = 4
"""Steps between evaluations."""
LATE = 20
"""Steps at the end whose numbers are averaged: answers of older weights make those of a single step swing."""
COMMON = (
    *("flow=rlinf.flows.grpo_async", f"evaluation.every={EVERY}", "trace=false"),
    *("placement.rollout=0", "placement.judge=0", "placement.trainer=0"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run; `late` is of the last `LATE` steps."""

    correction: str
    """One of `CORRECTIONS`."""
    bound: int
    """staleness.max, versions."""
    seed: int
    """Seed of the model, the problems and the sampling."""
    keys: tuple[str, ...] = ()
    """Everything that was set."""
    accuracy: float = math.nan
    """Share of held-out problems answered right, greedily, after the last step."""
    late_accuracy: float = math.nan
    """The mean of the late evaluations."""
    late_reward: float = math.nan
    """Mean reward of sampled answers, late."""
    staleness_mean: float = math.nan
    """Age of the tokens learned from, versions, late."""
    staleness_max: float = math.nan
    """The oldest of the whole run."""
    drift: float = math.nan
    """Mean |log-prob before the update - of the engine| of tokens of the greatest age, nats, late."""
    ess: float = math.nan
    """Effective sample size, a share, late."""
    grad_norm: float = math.nan
    """Before clipping, late."""
    rewards: tuple[float, ...] = ()
    """Mean reward of sampled answers of every step."""
    failure: str = ""
    """Message of the run when it failed; empty if it came to its end."""


class Runs:
    """Runs, a few at a time.

    Args:
        output: directory of the runs, and of runs.jsonl.
        steps: of each.
        at_once: how many processes run side by side.
        said: is told of every run that ended.
    """

    def __init__(self, output: Path, steps: int, at_once: int, said: Callable[[Outcome], None]) -> None:
        self.output, self.steps, self.said = output, steps, said
        self._record = output / "runs.jsonl"
        self._places = asyncio.Semaphore(at_once)
        self._known: dict[tuple[str, ...], Outcome] = {}
        if self._record.exists():
            for line in self._record.read_text().splitlines():
                outcome = outcome_of(json.loads(line))
                self._known[outcome.keys] = outcome

    async def all(self, wanted: Sequence[tuple[str, int, int]]) -> list[Outcome]:
        """The outcomes of these corrections, bounds and seeds, in this order. If it is cancelled, so is every run."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._run(*each)) for each in wanted]
        return [task.result() for task in tasks]

    async def _run(self, correction: str, bound: int, seed: int) -> Outcome:
        name = f"{correction}-{bound}-{seed}"
        keys = (
            *COMMON, f"name={name}", f"output_dir={self.output}", f"steps={self.steps}", f"seed={seed}",
            f"staleness.max={bound}", *CORRECTIONS[correction],
        )  # fmt: skip
        if (known := self._known.get(keys)) is not None and not known.failure:
            return known
        async with self._places:
            directory, log = self.output / name, self.output / f"{name}.log"
            shutil.rmtree(directory, ignore_errors=True)
            ended = await run_process([sys.executable, str(ROOT / "launch.py"), "--config", CONFIG, *keys], log)
        if ended.code == 0:
            outcome = Outcome(correction, bound, seed, keys, **measured(directory / "metrics.jsonl", bound))
            shutil.rmtree(directory / "checkpoints", ignore_errors=True)
        else:
            failure = reason(ended.output) or f"exit code {ended.code}"
            outcome = Outcome(correction, bound, seed, keys, failure=failure)
        with self._record.open("a") as record:
            record.write(json.dumps(asdict(outcome)) + "\n")
        self.said(outcome)
        return outcome


def outcome_of(line: Mapping[str, object]) -> Outcome:
    """Read a line of runs.jsonl."""
    known = {field.name for field in fields(Outcome)}
    return Outcome(
        **{name: tuple(value) if isinstance(value, list) else value for name, value in line.items() if name in known}  # type: ignore[arg-type]
    )


def measured(path: Path, bound: int) -> dict[str, object]:
    """The numbers of a run, from its metrics.jsonl.

    Args:
        path: of the file.
        bound: its staleness.max, versions.
    """
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    late = steps[-LATE:]

    def mean(name: str) -> float:
        known = [step[name] for step in late if step.get(name) is not None]
        return fmean(known) if known else math.nan

    return {
        "accuracy": [step["evaluation/accuracy"] for step in steps if "evaluation/accuracy" in step][-1],
        "late_accuracy": mean("evaluation/accuracy"),
        "late_reward": mean("reward/mean"),
        "staleness_mean": mean("staleness/mean"),
        "staleness_max": max(step.get("staleness/max", 0.0) for step in steps),
        "drift": mean(f"staleness/drift/{min(bound, 8)}" if bound else "mismatch/mean"),
        "ess": mean("staleness/ess") if bound else 1.0,
        "grad_norm": mean("grad_norm"),
        "rewards": tuple(round(step["reward/mean"], 4) for step in steps if "reward/mean" in step),
    }
