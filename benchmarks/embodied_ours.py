"""Our side of `benchmarks.embodied`: a configured run through the front door, with its steps timed.

`python -m benchmarks.embodied_ours --config FILE key=value ...` is `launch.py` with a flow that waits for its turn.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from benchmarks.peers.grpo_job import Result, Stopwatch
from rlinf import __version__
from rlinf.cli.main import main
from rlinf.data.step import EmbodiedStep
from rlinf.flows.embodied import embodied
from rlinf.flows.embodied_async import embodied_async

FLOW, ASYNC_FLOW = "benchmarks.embodied_ours.timed", "benchmarks.embodied_ours.timed_async"

result = Result(version=f"rlinf {__version__}")
_watch = Stopwatch(result)


async def timed(step: EmbodiedStep, env: Any, policy: Any, trainer: Any) -> dict[str, float]:
    """`rlinf.flows.embodied`, when it is our turn."""
    _watch.over()
    await asyncio.to_thread(_watch.wait)  # the event loop goes on: workers may die meanwhile
    _watch.begin()
    metrics = await embodied(step, env, policy, trainer)
    result.rewards += [metrics["reward/mean"]] if "reward/mean" in metrics else []  # no episode may have ended
    return metrics


async def timed_async(step: EmbodiedStep, env: Any, policy: Any, trainer: Any) -> dict[str, float]:
    """`rlinf.flows.embodied_async`, when it is our turn.

    Acting that was begun ahead ends within the turn: others' turns are not disturbed, and nothing is had for free.
    """
    ahead = step.in_flight
    while any(entry.result is None for entry in ahead.entries):
        await ahead._change()
    _watch.over()
    await asyncio.to_thread(_watch.wait)
    _watch.begin()
    metrics = await embodied_async(step, env, policy, trainer)
    result.rewards += [metrics["reward/mean"]] if "reward/mean" in metrics else []  # no episode may have ended
    return metrics


if __name__ == "__main__":
    from benchmarks import embodied_ours  # the module that the flow is found in, which this one, `__main__`, is not

    code = main()
    if os.environ.get("RANK", "0") == "0":  # the flow is at work there
        embodied_ours.result.tell()
    sys.exit(code)
