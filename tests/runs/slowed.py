"""An engine of a user's own, by which one host becomes a slow one: all that it computes takes longer."""

from __future__ import annotations

import functools
import os
import time

from rlinf.engines.transformers.engine import build as ours
from rlinf.runtime.base.tasks import ComputeThread

LONGER = 0.05
"""Seconds by which each piece of work is: far more than it takes, even where others keep the machine busy."""


def build(setup, **args):
    """Our own engine; on host 1, the process is slowed down for good."""
    if os.environ.get("RANK") == "1":
        ComputeThread.run = _slowly(ComputeThread.run)
    return ours(setup, **args)


def _slowly(run):
    if hasattr(run, "__wrapped__"):
        return run  # the rollout has been here before

    @functools.wraps(run)
    async def slowed(self, fn, *args, **kwargs):
        @functools.wraps(fn)
        def longer(*args, **kwargs):
            time.sleep(LONGER)
            return fn(*args, **kwargs)

        return await run(self, longer, *args, **kwargs)

    return slowed
