"""Generation that decodes all that it is given at once: how fast items grow in each other's company.

Flows in: seconds of a step's items alone, with the part that its longest takes alone, and when items leave. Flows out:
when each item leaves that comes at any time. Nothing waits here: `actors.py` asks when to wake.

A token takes a + b·n with n items at work. In units of the longest item, with B items of a step, L = a·tokens of the
longest and q = b·tokens of all, that is L + q·(n / B) / mean length. Lengths are those that make a step's items alone
leave by its release curve.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from rlinf.placement.profiling.profile import Release

_HALVINGS = 60
"""Of an interval that holds the mean length; the last ones change no bit."""


def lengths(release: Release, seconds: float, longest: float, count: int) -> list[float]:
    """Return the lengths of a step's items, ascending to 1, the longest.

    Args:
        release: when they leave if they are alone.
        seconds: until the last of them has.
        longest: of these, L.
        count: of items.
    """
    steps = np.diff(np.array(release.chunks(count)), prepend=0.0) * seconds
    shares = np.arange(count, 0, -1) / count

    def grown(mean: float) -> np.ndarray:
        grown: np.ndarray = np.cumsum(steps / (longest + (seconds - longest) * shares / mean))
        return grown

    low, high = 1e-9, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if grown(middle)[-1] > 1 else (middle, high)
    return [float(length) for length in grown(high) / grown(high)[-1]]


class Company:
    """Items at work on one rank.

    Args:
        lengths: of a step's items on this rank, ascending to 1.
        shared: q, seconds of work that all of them share.
        longest: L, seconds of the longest item alone.
    """

    def __init__(self, lengths: Sequence[float], shared: float, longest: float) -> None:
        self._lengths = lengths
        self._longest, self._each = longest, shared / sum(lengths)
        self._grown = 0.0
        self.since = 0.0
        """Until when it has been followed; later than now while it is paused."""
        self._ends: list[tuple[float, int]] = []
        self._begun = 0

    def add(self, now: float, ids: Sequence[int]) -> None:
        """Begin with these; the lengths of each step's items come in an order that mixes them."""
        self._advance(now)
        count = len(self._lengths)
        for id in ids:
            number = self._begun % count
            length = self._lengths[(number * _stride(count)) % count]
            heapq.heappush(self._ends, (self._grown + length, id))
            self._begun += 1

    @property
    def next(self) -> float | None:
        """When the next item leaves; None if none is at work."""
        return None if not self._ends else self.since + (self._ends[0][0] - self._grown) * self._unit

    def leave(self, now: float) -> list[int]:
        """The items that have left until now."""
        self._advance(now)
        left = []
        while self._ends and self._ends[0][0] <= self._grown + 1e-9:
            left.append(heapq.heappop(self._ends)[1])
        return left

    def pause(self, now: float, seconds: float) -> None:
        """Nothing grows for so long, from now on."""
        self._advance(now)
        self.since += seconds

    @property
    def _unit(self) -> float:
        """Seconds in which items grow by the longest's length."""
        return self._longest + self._each * len(self._ends)

    def _advance(self, now: float) -> None:
        if now > self.since:
            if self._ends:
                self._grown += (now - self.since) / self._unit
            self.since = now


def _stride(count: int) -> int:
    """About the golden section of a number, without a common divisor."""
    stride = max(1, round(count * 0.618))
    while np.gcd(stride, count) != 1:
        stride += 1
    return stride
