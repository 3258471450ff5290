"""Comparing the clocks of two machines. Flows in: answers with the other one's time. Nobody is woken."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

PINGS = 5
"""Questions by which a clock on another machine is compared; the quickest answer counts."""


async def best_offset(now: Callable[[], float], ask: Callable[[], Awaitable[float]]) -> float:
    """Seconds to add to another machine's clock to get this one's: right to half a round trip.

    Args:
        now: this clock.
        ask: gets the time of the other one.
    """
    tries = []
    for _ in range(PINGS):
        asked = now()
        theirs = await ask()
        answered = now()
        tries.append((answered - asked, (asked + answered) / 2 - theirs))
    return min(tries)[1]
