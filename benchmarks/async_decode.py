"""An event simulation of asynchronous training, answer by answer: engines that decode, and a trainer that learns.

In: lengths of answers, a decode law, devices of both, the staleness. Out: seconds of a step in the long run. It shares
nothing with the planner but the numbers that both are given; virtual time, nothing is measured.

A token of an engine takes a + b·n seconds with n answers at work, and each of them gets one. A prompt's answers go to
the engines with the fewest. The trainer learns group by group as they are complete, those of the batch that is due, and
publishes after each batch; then the next batch's prompts are drawn, so that no token is older than the staleness.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Law:
    """Costs of decoding and learning."""

    base: float
    """a: seconds of a token, whatever is at work."""
    each: float
    """b: seconds more for every answer that is."""
    learning: float
    """Device-seconds to learn from a token, log-probs included."""
    engine_devices: int = 2
    """Devices of an engine."""
    seats: int | None = None
    """Answers that an engine works on at a time; others wait. None: no limit."""


@dataclass(slots=True)
class _Engine:
    passed: float = 0.0
    """Tokens that an answer has got that was there from the start."""
    since: float = 0.0
    ends: list[tuple[float, int]] = field(default_factory=list)
    """(`passed` at its end, group) of answers at work, a heap."""
    waiting: list[tuple[int, int]] = field(default_factory=list)
    """(length, group)."""
    stamp: int = 0
    """Stamp of the newest event of this engine: older ones are void."""


class Decoding:
    """Engines and the answers that they work on.

    Args:
        law: of decoding.
        engines: how many.
    """

    def __init__(self, law: Law, engines: int) -> None:
        self._law = law
        self._engines = [_Engine() for _ in range(engines)]
        self._events: list[tuple[float, int, int]] = []
        self._left: dict[int, int] = {}
        self._load = [(0, number) for number in range(engines)]

    def add(self, now: float, groups: dict[int, NDArray[np.int64]]) -> None:
        """Begin to answer: `groups` has the lengths of each group's answers."""
        loads = [(len(one.ends) + len(one.waiting), number) for number, one in enumerate(self._engines)]
        heapq.heapify(loads)
        touched = set()
        for group, lengths in groups.items():
            self._left[group] = len(lengths)
            for length in lengths:
                load, number = heapq.heappop(loads)
                heapq.heappush(loads, (load + 1, number))
                self._engines[number].waiting.append((int(length), group))
                touched.add(number)
        for number in touched:
            self._advance(number, now)
            self._seat(number)

    @property
    def next(self) -> float:
        """When the next answer ends; infinite if none is at work."""
        while self._events and self._engines[self._events[0][2]].stamp != self._events[0][1]:
            heapq.heappop(self._events)
        return self._events[0][0] if self._events else float("inf")

    def end(self) -> tuple[float, list[int]]:
        """Go to the next end; the groups that are complete then."""
        now, _, number = heapq.heappop(self._events)
        engine, complete = self._engines[number], []
        self._advance(number, now)
        while engine.ends and engine.ends[0][0] <= engine.passed + 1e-6:
            _, group = heapq.heappop(engine.ends)
            self._left[group] -= 1
            if not self._left[group]:
                complete.append(group)
        self._seat(number)
        return now, complete

    def _advance(self, number: int, now: float) -> None:
        engine = self._engines[number]
        if engine.ends:
            engine.passed += (now - engine.since) / self._token(engine)
        engine.since = now

    def _seat(self, number: int) -> None:
        engine, seats = self._engines[number], self._law.seats
        free = len(engine.waiting) if seats is None else max(0, seats - len(engine.ends))
        for length, group in engine.waiting[:free]:
            heapq.heappush(engine.ends, (engine.passed + length, group))
        del engine.waiting[:free]
        engine.stamp += 1
        if engine.ends:
            when = engine.since + (engine.ends[0][0] - engine.passed) * self._token(engine)
            heapq.heappush(self._events, (max(when, engine.since), engine.stamp, number))

    def _token(self, engine: _Engine) -> float:
        return self._law.base + self._law.each * len(engine.ends)


def steps(
    law: Law,
    draw: Callable[[int], Sequence[NDArray[np.int64]]],
    rollout: int,
    trainer: int,
    staleness: int,
    count: int,
) -> list[float]:
    """Times at which steps end.

    Args:
        law: of decoding and learning.
        draw: lengths of the answers of each group of a batch, by the batch's number.
        rollout, trainer: devices of each.
        staleness: batches begun early; 0: each batch begins when the one before is learned from.
        count: steps.
    """
    decoding = Decoding(law, rollout // law.engine_devices)
    tokens: dict[int, int] = {}
    batch_of: dict[int, int] = {}
    ready: list[list[int]] = [[] for _ in range(count)]
    missing: list[int] = []
    number = 0

    def begin(now: float) -> None:
        nonlocal number
        batch = len(missing)
        if batch >= count:
            return
        groups = {}
        for lengths in draw(batch):
            groups[number], tokens[number], batch_of[number] = lengths, int(lengths.sum()), batch
            number += 1
        missing.append(len(groups))
        decoding.add(now, groups)

    for _ in range(staleness + 1):
        begin(0.0)
    ends: list[float] = []
    now, free = 0.0, 0.0
    while len(ends) < count:
        due = len(ends)
        if ready[due]:
            free = max(free, now)
            group = ready[due].pop(0)
            until = free + law.learning * tokens.pop(group) / trainer
            while decoding.next <= until:
                now, complete = decoding.end()
                for one in complete:
                    ready[batch_of.pop(one)].append(one)
            now = free = until
            missing[due] -= 1
            if not missing[due]:
                ends.append(now)
                begin(now)
            continue
        now, complete = decoding.end()
        for one in complete:
            ready[batch_of.pop(one)].append(one)
    return ends


def period(ends: Sequence[float], warm: int) -> float:
    """Mean seconds of a step once `warm` are over."""
    return (ends[-1] - ends[warm - 1]) / (len(ends) - warm)
