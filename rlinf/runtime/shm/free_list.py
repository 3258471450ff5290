"""Where in an address range the next tensor goes: best fit, with neighbouring holes merged.

Flows in: sizes to place (`take`) and places that are free again (`give`). Flows out: offsets, and which whole pages
nobody uses (`free_pages`), for those who want to return them to the kernel. Nobody is woken; not thread-safe.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left, insort

PAGE = mmap.PAGESIZE
"""Bytes; the unit in which the kernel gives and takes memory."""


class Holes:
    """Address range with holes: best fit, lowest address first, neighbours merged. The untouched end is one more hole,
    and being the largest it is taken last."""

    def __init__(self, start: int, end: int):
        self.start = start
        self.warm = start
        """No page from here on was ever touched."""
        self._end = end
        self._cold: set[int] = set()  # starts of holes below `warm` that may have lost pages
        self._ends = {start: end}
        self._starts = {end: start}
        self._sizes = [(end - start, start)]

    @property
    def touched(self) -> int:
        """Bytes that may ever have been backed."""
        return self.warm - self.start

    def take(self, size: int) -> tuple[int, bool] | None:
        """Where `size` bytes are from now on, and whether their pages are warm; None if no hole is large enough."""
        index = bisect_left(self._sizes, (size, 0))
        if index == len(self._sizes):
            return None
        hole, start = self._sizes.pop(index)
        end = self._ends.pop(start)
        del self._starts[end]
        warm = start + size <= self.warm and start not in self._cold
        if hole > size:
            self._add(start + size, end, start in self._cold)
        self._cold.discard(start)
        if start + size > self.warm:
            self.warm = start + size
        return start, warm

    def give(self, start: int, size: int) -> None:
        """Take back what `take` gave."""
        end, cold = start + size, False
        if start in self._starts:
            start, cold = self._remove(self._starts[start])
        if end in self._ends:
            after = self._ends[end]
            cold |= self._remove(end)[1]
            end = after
        self._add(start, end, cold)

    def free_pages(self) -> list[tuple[bool, int, int, int]]:
        """(cold, -bytes, hole, first page) of all whole free pages below `warm`, in the order to give them back."""
        found = []
        for start, end in self._ends.items():
            first, last = -(-start // PAGE) * PAGE, min(end, -(-self.warm // PAGE) * PAGE) // PAGE * PAGE
            if first < last:
                found.append((start in self._cold, first - last, start, first))
        return sorted(found)

    def cool(self, hole: int) -> None:
        """The pages of the hole that starts at `hole` went back to the kernel."""
        if self._ends[hole] == self._end:
            self.warm = hole
        else:
            self._cold.add(hole)

    def _add(self, start: int, end: int, cold: bool) -> None:
        self._ends[start] = end
        self._starts[end] = start
        insort(self._sizes, (end - start, start))
        if cold and start < self.warm:
            self._cold.add(start)

    def _remove(self, start: int) -> tuple[int, bool]:
        end = self._ends.pop(start)
        del self._starts[end]
        del self._sizes[bisect_left(self._sizes, (end - start, start))]
        cold = start in self._cold
        self._cold.discard(start)
        return start, cold
