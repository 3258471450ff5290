"""How work grows with its size, whatever the machine: processor time of much of it beside that of little."""

from __future__ import annotations

import time
from collections.abc import Callable

TIMES = 8
"""How much more the large work is: one pass takes 8 times as long then, and a pass for every item 64 times."""
MOST = 24.0
"""Times as long as it may take: as far from the one as from the other, for caches and neighbours."""
TRIES = 5
"""A measurement that others disturb is repeated; what really grows too fast does so each time."""


def in_one_pass(prepare: Callable[[int], Callable[[], object]], small: int) -> bool:
    """Whether the work that `prepare(size)` returns grows as its size does."""
    little = much = float("inf")
    for _ in range(TRIES):
        little = min(little, _processor_seconds(prepare(small)))
        much = min(much, _processor_seconds(prepare(small * TIMES)))
        if much <= MOST * little:
            return True
    return False


def _processor_seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began
