"""Batches of decisions from data sets that need not fit into memory, in an order that follows from a seed alone.

In: data sets with their weights. Out: the batch of any optimizer step. Each data set is an endless sequence: epochs of
all its decisions. An epoch goes through episodes in a random order, cut into windows that fit into memory, and through
each window's decisions in a random order; a data set that fits whole is one window. What a batch holds depends on the
number of its step and on nothing that was drawn before, so a run goes on anywhere without a saved position.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from rlinf.data.demonstrations.episode import ACTIONS, Decisions, Demonstration, Episodes, Window, joined
from rlinf.data.demonstrations.statistics import statistics_of
from rlinf.data.rng import mix, permutation

BOUNDS = ("min_max", "q01_q99")
"""Statistics of a data set that its actions can be scaled by."""
_CONSTANT = 1e-8
"""Width of a number's range below which it is taken as constant, and becomes 0."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A data set, and how much of every batch comes from it."""

    episodes: Episodes
    """To read."""
    places: tuple[int, ...]
    """Places of the episodes that are learned from."""
    weight: float = 1.0
    """Its share, before all are divided by their sum."""
    low: Tensor | None = None
    """Values that become -1 of each number of an action, float32 [A]; None takes actions as they are."""
    high: Tensor | None = None
    """Values that become 1, float32 [A]."""
    frames: int = 1
    """So many last observations are seen at once, as `env.frame_stack` shows them."""

    def read(self, place: int, *, pictures: bool = True) -> Demonstration:
        """An episode, its actions scaled; without pictures, only what is cheap to read is shown.

        Raises:
            ValueError: it is broken, or its actions have another size than the bounds.
        """
        demo = _stacked(self.episodes.read(place, pictures=pictures), self.frames)
        if self.low is None or self.high is None:
            return demo
        if demo.actions.shape[-1] != len(self.low):
            raise ValueError(
                f"{self.episodes.path}: actions have {demo.actions.shape[-1]} numbers, and the bounds {len(self.low)}"
            )
        wide = self.high - self.low
        inside = 2.0 * (demo.actions - self.low) / wide.clamp(min=_CONSTANT) - 1.0
        return replace(demo, actions=torch.where(wide < _CONSTANT, 0.0, inside).clamp(-1.0, 1.0))


def _stacked(demo: Demonstration, frames: int) -> Demonstration:
    """An episode whose observations show those before them, too, the oldest first; the first stands for what is not."""
    if frames == 1:
        return demo
    places = torch.arange(len(demo.actions) + 1)
    back = [(places - before).clamp(min=0) for before in reversed(range(frames))]
    observation = {name: torch.cat([rows[each] for each in back], -1) for name, rows in demo.observation.items()}
    return replace(demo, observation=observation)


def bounded(part: Part, bounds: Any) -> Part:
    """A part whose actions are brought to [-1, 1].

    Args:
        part: of which data set.
        bounds: one of `BOUNDS`, of the data set's own statistics; {low: [...], high: [...]}; None leaves actions as
            they are.

    Raises:
        ValueError: they are none of these.
    """
    if bounds is None:
        return part
    if bounds in BOUNDS:
        actions = statistics_of(part.episodes, part.places)[ACTIONS]
        low, high = (actions.min, actions.max) if bounds == "min_max" else (actions.q01, actions.q99)
        return replace(part, low=low.float(), high=high.float())
    try:
        low, high = (torch.tensor([float(each) for each in bounds[name]]) for name in ("low", "high"))
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"bounds={bounds!r} must be {' or '.join(BOUNDS)}, or {{low: [...], high: [...]}}") from error
    if low.shape != high.shape or not bool((low < high).all() and torch.isfinite(high - low).all()):
        raise ValueError(f"bounds={bounds!r}: low must be below high, number by number")
    return replace(part, low=low, high=high)


class DecisionStream:
    """The batches of a run.

    Args:
        parts: data sets, at least one.
        chunk: actions in a decision, C.
        batch: decisions in a batch.
        before: see `Window`.
        seed: of the order.
        memory: bytes of episodes that are held at a time, over all data sets; a little more while a batch lies across
            two windows.

    Raises:
        ValueError: the parts do not go together, or a batch is too small to mix them.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        chunk: int,
        *,
        batch: int,
        before: int = 0,
        seed: int = 0,
        memory: int = 4 << 30,
    ):
        if not parts:
            raise ValueError("there is no data set to draw from")
        if batch < (least := len(parts) * (len(parts) - 1)):
            raise ValueError(f"a batch of {batch} is too small to mix {len(parts)} data sets: take at least {least}")
        share = sum(part.weight for part in parts)
        self._weights = [part.weight / share for part in parts]
        share_of_memory = memory // len(parts)
        self._sets = [
            _Endless(part, (before, chunk), seed + number, share_of_memory) for number, part in enumerate(parts)
        ]
        self._rest = max(range(len(parts)), key=lambda number: self._weights[number])
        self.batch, self._seed = batch, seed

    @property
    def decisions(self) -> int:
        """Number of decisions in all data sets."""
        return sum(each.count for each in self._sets)

    def draw(self, step: int) -> Decisions:
        """The batch of an optimizer step.

        Of n decisions up to some step, each data set has had floor(n w) for its share w, and the one with the largest
        share what remains.

        Args:
            step: its number, from 0.

        Raises:
            ValueError: an episode is broken, or shows something else than the others.
        """
        before, after = self._drawn(step), self._drawn(step + 1)
        parts = []
        for each, first, end in zip(self._sets, before, after, strict=True):
            if end > first:
                parts += each.rows(first, end - first)
        try:
            return joined(parts)
        except (KeyError, RuntimeError) as error:
            raise ValueError(f"the data sets do not show the same: {_named(error)}") from error

    def beginning(self, most: int) -> Iterator[Decisions]:
        """Yield the decisions of each data set's first window, `most` at a time: of data sets that fit into memory,
        all."""
        for each in self._sets:
            yield from each.beginning(most)

    def seeds(self, step: int) -> Tensor:
        """A seed for each row of a step's batch, int64 [batch], for policies that learn from something drawn."""
        return torch.tensor([mix(self._seed, step, row) for row in range(self.batch)], dtype=torch.int64)

    def _drawn(self, step: int) -> list[int]:
        """How many decisions of each data set the steps before this one took."""
        counts = [int(step * self.batch * weight) for weight in self._weights]
        counts[self._rest] = step * self.batch - sum(counts) + counts[self._rest]
        return counts


class _Endless:
    """One data set, epoch after epoch."""

    def __init__(self, part: Part, lesson: tuple[int, int], seed: int, memory: int):
        self._part, self._seed = part, seed
        self._before, self._chunk = lesson
        self._rows = {place: part.episodes.abouts[place].rows for place in part.places}
        self.count = sum(self._rows.values())
        if not self.count:
            raise ValueError(f"{part.episodes.path}: there is no episode to learn from")
        first = part.read(part.places[0])
        tensors = [*first.observation.values(), first.actions, first.rewards, first.valid]
        size = sum(rows.nbytes for rows in tensors) / len(first.actions)  # bytes of a decision, as of this one
        self._most = None if self.count * size <= memory else max(1, int(memory / size))
        self._held: tuple[tuple[int, ...], Window] | None = None
        self._epoch: tuple[int, list[tuple[int, ...]], list[int]] | None = None

    def rows(self, first: int, count: int) -> list[Decisions]:
        """Neighbours in the sequence, in parts of one window each."""
        parts = []
        while count:
            epoch, place = divmod(first, self.count)
            windows, ends = self._windows(epoch)
            number = bisect_right(ends, place)
            start = ends[number - 1] if number else 0
            size = min(count, ends[number] - place)
            order = permutation(ends[number] - start, self._seed, epoch, number)
            indices = torch.from_numpy(order[place - start : place - start + size])
            parts.append(self._window(windows[number]).rows(indices))
            first, count = first + size, count - size
        return parts

    def beginning(self, most: int) -> Iterator[Decisions]:
        """The decisions of the first window, in their order."""
        window = self._window(self._windows(0)[0][0])
        for indices in torch.arange(len(window)).split(most):
            yield window.rows(indices)

    def _windows(self, epoch: int) -> tuple[list[tuple[int, ...]], list[int]]:
        """The episodes of each window of an epoch, and after how many of its decisions each ends."""
        if self._most is None:
            return [self._part.places], [self.count]
        if self._epoch is None or self._epoch[0] != epoch:
            windows: list[list[int]] = [[]]
            for number in permutation(len(self._part.places), self._seed, epoch).tolist():
                place = self._part.places[number]
                total = sum(self._rows[each] for each in windows[-1])
                if total and total + self._rows[place] > self._most:
                    windows.append([])
                windows[-1].append(place)
            ends = [*accumulate(sum(self._rows[place] for place in window) for window in windows)]
            self._epoch = (epoch, [tuple(window) for window in windows], ends)
        return self._epoch[1], self._epoch[2]

    def _window(self, places: tuple[int, ...]) -> Window:
        if self._held is None or self._held[0] != places:
            self._held = None  # before others are read
            path = self._part.episodes.path
            demos = [self._part.read(place) for place in places]
            for place, each in zip(places, demos, strict=True):
                if len(each.actions) != self._rows[place]:
                    problem = f"it has {len(each.actions)} rows, and {self._rows[place]} by the index"
                    raise ValueError(f"{path}: episode {place}: {problem}")
            try:
                self._held = (places, Window(demos, self._chunk, self._before))
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
        return self._held[1]


def _named(error: Exception) -> str:
    return f"one of them lacks {error}" if isinstance(error, KeyError) else str(error)
