"""GRPO, with a step that does not end in one run: `HELD_AT` names its index."""

import asyncio
import os
from pathlib import Path

from rlinf.flows.grpo import grpo

HELD = "held"
"""File in `HELD_IN` that says that the step has begun."""


async def held(step, rollout, judge, trainer):
    if os.environ.get("HELD_AT") == str(step.index):
        Path(os.environ["HELD_IN"], HELD).touch()
        await asyncio.sleep(1000)
    return await grpo(step, rollout, judge, trainer)
