"""Our side of `benchmarks.grpo`: the quickstart through the front door, with its steps timed.

`python -m benchmarks.grpo_ours --config FILE key=value ...`, alone or under torchrun, is `launch.py` with a flow that
waits for its turn, and whose every process says at the end how much memory it took. `result_of` reads what such a run
left behind.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.peers.grpo_job import Result, Stopwatch, peak_memory
from rlinf import __version__
from rlinf.cli.main import main
from rlinf.data.step import Step, alternates
from rlinf.flows.grpo import grpo
from rlinf.placement.grammar import parse

FLOW = "benchmarks.grpo_ours.timed"
WARM_UP = 5
"""Steps that are not counted: they warm caches and allocators."""
Interval = tuple[float, float]

result = Result(version=f"rlinf {__version__}")
_watch = Stopwatch(result)


@alternates
async def timed(step: Step, rollout: Any, judge: Any, trainer: Any) -> dict[str, float]:
    """`rlinf.flows.grpo`, when it is our turn."""
    _watch.over()
    await asyncio.to_thread(_watch.wait)  # the event loop goes on: other processes may ask whether we are alive
    _watch.begin()
    metrics = await grpo(step, rollout, judge, trainer)
    result.rewards.append(metrics["reward/mean"])
    return metrics


def result_of(directory: Path, output: str) -> Result:
    """Measurements of a run.

    Args:
        directory: the run directory.
        output: what its processes printed.
    """
    found = Result.heard(output)
    peaks = dict(map(int, line.split()[1:]) for line in output.splitlines() if line.startswith("peak "))
    placement = yaml.safe_load((directory / "resolved.yaml").read_text())["placement"]
    trainers = [0]  # one process has every role
    if len(peaks) > 1:
        where = parse(str(placement["trainer"]), len(peaks), key="placement.trainer")
        trainers = [rank for process in where for rank in process]
    found.peak = max(peaks[rank] for rank in trainers)
    found.outside = outside(json.loads((directory / "trace.json").read_text()), found.seconds)
    return found


def outside(trace: dict[str, Any], seconds: Sequence[float]) -> float:
    """Share of the steps' time in which no process was at a stage.

    A stage computes in its actor's own thread, as spans of category "compute"; the exception is the judge, whose
    trusted rewards take microseconds and run within its calls, so those are taken whole. Steps are told apart by the
    calls of the trainer. The trace goes on while we wait for our turn, but then nothing computes.

    Args:
        trace: as trace.json has it; times in microseconds.
        seconds: of each step but the last, waiting left out.
    """
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    calls = sorted(span["ts"] for span in spans if _is_call(span, "trainer[0]", "train"))
    computing = [
        (span["ts"], span["ts"] + span["dur"])
        for span in spans
        if span["cat"] == "compute" or _is_call(span, "judge[", "score")
    ]
    inside = covered(computing, (calls[WARM_UP], calls[-1]))
    return 1.0 - inside / 1e6 / sum(seconds[WARM_UP:])


def _is_call(span: dict[str, Any], actor: str, endpoint: str) -> bool:
    return span["cat"] == "call" and span["name"] == endpoint and span["args"]["actor"].startswith(actor)


def covered(intervals: Iterable[Interval], window: Interval) -> float:
    """How much of a window lies in at least one of the intervals."""
    total, reached = 0.0, window[0]
    for start, end in sorted(intervals):
        start, end = max(start, reached), min(end, window[1])
        if end > start:
            total += end - start
            reached = end
    return total


if __name__ == "__main__":
    from benchmarks import grpo_ours  # the module that the flow is found in, which this one, `__main__`, is not

    code = main()
    print(f"\npeak {os.environ.get('RANK', '0')} {peak_memory()}", flush=True)
    if os.environ.get("RANK", "0") == "0":
        grpo_ours.result.tell()
    sys.exit(code)
