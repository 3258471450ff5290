"""The schedule of a learning rate, as a factor that follows from the steps that were taken. Pure."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]
"""What becomes of the learning rate after the warm-up."""
SCHEDULES = ("constant", "linear", "cosine")


def lr_factor(done: int, schedule: Schedule, warmup_steps: int, total_steps: int | None, min_ratio: float) -> float:
    """What the learning rate is multiplied with in the step after `done` steps.

    It rises linearly to 1 in step `warmup_steps`. Then it stays there ("constant"), or falls towards `min_ratio`, in a
    straight line ("linear") or as half a cosine (SGDR, arXiv:1608.03983, eq. 5). It would be there one step behind
    `total_steps`: the last step learns too, as in transformers, where a line ends at 1/N; a run of one step learns at
    the full rate. Later steps have the factor of the last one.
    """
    step, peak = done + 1, max(1, warmup_steps)
    if step < warmup_steps:
        return step / warmup_steps
    if schedule == "constant" or total_steps is None:
        return 1.0
    falling = max(1, total_steps + 1 - peak)
    way = min(step - peak, falling - 1) / falling
    left = 1.0 - way if schedule == "linear" else (1.0 + math.cos(math.pi * way)) / 2.0
    return min_ratio + (1.0 - min_ratio) * left
