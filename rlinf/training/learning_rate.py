"""The schedule of a learning rate, as a factor that follows from the steps that were taken. Pure."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]
"""What becomes of the learning rate after the warm-up."""
SCHEDULES = ("constant", "linear", "cosine")


def lr_factor(done: int, schedule: Schedule, warmup_steps: int, total_steps: int | None, min_ratio: float) -> float:
    """What the learning rate is multiplied with in the step after `done` steps.

    It rises linearly to 1 in step `warmup_steps`. Then it stays there ("constant"), or falls to `min_ratio` in step
    `total_steps`, in a straight line ("linear") or as half a cosine (SGDR, arXiv:1608.03983, eq. 5), and stays there.
    """
    step = done + 1
    if step < warmup_steps:
        return step / warmup_steps
    if schedule == "constant" or total_steps is None:
        return 1.0
    way = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    left = 1.0 - way if schedule == "linear" else (1.0 + math.cos(math.pi * way)) / 2.0
    return min_ratio + (1.0 - min_ratio) * left
