"""Flows with a step that does not end before it may, or with a full disk: `HELD_AT` and `FULL_AT` name its index."""

import asyncio
import os
from pathlib import Path

from rlinf.flows.embodied import embodied
from rlinf.flows.grpo import grpo
from rlinf.flows.interact import interactions

HELD = "held"
"""File in `HELD_IN` that says that the step has begun."""
GO_ON = "go_on"
"""File in `HELD_IN` for which it waits."""


async def held(step, rollout, judge, trainer):
    if os.environ.get("HELD_AT") == str(step.index):
        Path(os.environ["HELD_IN"], HELD).touch()
        while not Path(os.environ["HELD_IN"], GO_ON).exists():
            await asyncio.sleep(0.01)
    if os.environ.get("FULL_AT") == str(step.index):
        (metrics,) = (
            int(each.name)
            for each in Path("/proc/self/fd").iterdir()
            if each.exists() and each.readlink().name == "metrics.jsonl"
        )
        os.dup2(os.open("/dev/full", os.O_WRONLY), metrics)
    return await grpo(step, rollout, judge, trainer)


async def acting(step, env, policy, trainer):
    """Learning by acting, with a step that does not end once all was acted."""
    if os.environ.get("HELD_AT") == str(step.index):
        await asyncio.gather(*interactions(step, env, policy))
        Path(os.environ["HELD_IN"], HELD).touch()
        await asyncio.sleep(1000)
    return await embodied(step, env, policy, trainer)
