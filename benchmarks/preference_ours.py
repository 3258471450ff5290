"""Our side of `benchmarks.preference`: runs through the front door, with their steps timed.

`python -m benchmarks.preference_ours --config FILE key=value ...` is `launch.py` with a flow that waits for its turn.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from benchmarks.peers.grpo_job import Result, Stopwatch
from rlinf import __version__
from rlinf.cli.main import main
from rlinf.data.step import SupervisedStep
from rlinf.flows.dpo import dpo
from rlinf.flows.sft import sft

result = Result(version=f"rlinf {__version__}")
_watch = Stopwatch(result)


async def timed(step: SupervisedStep, trainer: Any) -> dict[str, float]:
    """`sft` or `reward_model`, which are the same call, when it is our turn."""
    return await _timed(sft, step, trainer)


async def timed_dpo(step: SupervisedStep, trainer: Any, reference: Any = None) -> dict[str, float]:
    """`dpo`, when it is our turn."""
    return await _timed(dpo, step, trainer, reference)


async def _timed(flow: Any, step: SupervisedStep, *roles: Any) -> dict[str, float]:
    _watch.over()
    await asyncio.to_thread(_watch.wait)  # the event loop goes on
    _watch.begin()
    metrics: dict[str, float] = await flow(step, *roles)
    result.losses.append(metrics["loss"])
    return metrics


if __name__ == "__main__":
    from benchmarks import preference_ours  # the module that the flow is found in, which `__main__` is not

    code = main()
    preference_ours.result.tell()
    sys.exit(code)
