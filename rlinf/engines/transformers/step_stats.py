"""How fast an engine is, as sums that those of other engines can be added to.

Flows in: every decode step and every reading, from the thread that computes. Flows out: `sums`, replaced as a whole, so
that the event loop may read them at any moment.
"""

from __future__ import annotations

Sums = tuple[float, float, float, float, float, float, float]
"""Of decode steps: how many, their rows, rows², seconds and rows x seconds; of readings: tokens and seconds."""


class Pace:
    """The sums of one engine, from its beginning."""

    def __init__(self) -> None:
        self.sums: Sums = (0.0,) * 7

    @property
    def steps(self) -> int:
        """Decode steps so far: a row that was there in all of them has got so many tokens."""
        return int(self.sums[0])

    def stepped(self, rows: int, seconds: float) -> None:
        """A decode step of so many rows took so long."""
        count, summed, squares, time, products, tokens, reading = self.sums
        squares, products = squares + rows * rows, products + rows * seconds
        self.sums = (count + 1, summed + rows, squares, time + seconds, products, tokens, reading)

    def read(self, tokens: int, seconds: float) -> None:
        """Reading so many tokens took so long."""
        self.sums = (*self.sums[:5], self.sums[5] + tokens, self.sums[6] + seconds)
