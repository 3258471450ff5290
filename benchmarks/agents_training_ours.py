"""Our side of `benchmarks.agents_training`: the calculator agent through the front door, with its steps timed.

`python -m benchmarks.agents_training_ours --config FILE key=value ...` is `launch.py` with a flow that waits for its
turn before each step.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.peers.grpo_job import WORK, Result, Stopwatch
from rlinf import __version__
from rlinf.cli.main import main
from rlinf.data.step import Step
from rlinf.flows.agentic import agentic

FLOW = "benchmarks.agents_training_ours.timed"
result = Result(version=f"rlinf {__version__}")
work: list[tuple[float, float]] = []
"""Work of each step: tokens that the model said, and calls of the tool, per sample."""
_watch = Stopwatch(result)


async def timed(step: Step, session: Any) -> Mapping[str, float]:
    """`rlinf.flows.agentic`, when it is our turn."""
    _watch.over()
    await asyncio.to_thread(_watch.wait)
    _watch.begin()
    metrics = await agentic(step, session)
    result.rewards.append(metrics["reward/mean"])
    work.append((metrics["response_length/mean"], metrics["episodes/calls"] - 1))  # each call of the tool is a turn
    return metrics


if __name__ == "__main__":
    from benchmarks import agents_training_ours  # the module that the flow is found in, which `__main__` is not

    code = main()
    agents_training_ours.result.tell()
    tokens, calls = (statistics.mean(each) for each in zip(*agents_training_ours.work, strict=True))
    print(WORK + json.dumps({"tokens": tokens, "calls": calls}), flush=True)
    sys.exit(code)
