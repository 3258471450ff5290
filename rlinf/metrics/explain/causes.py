"""Why a step took longer than it needed: each cause that was measured, with its seconds and a clause that says it.

In: what devices waited for, what was read off the step, its metrics, and a few steps before it. Out: causes, the
costliest first. Pure but for the memory of earlier steps.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from rlinf.metrics.explain.idle import Waited
from rlinf.placement.profiling.step_costs import Seen, role_of
from rlinf.runtime.observe.lap import Lap

Name = Literal[
    "tail", "slow host", "bound on staleness", "waiting", "reward", "environment", "beside", "switching", "weights",
    "small micro-batches", "longer answers", "busy machine", "flow",
]  # fmt: skip
MICRO_BATCH = "micro_batch"
"""Actors note each micro-batch under this name, with its seconds and its tokens."""
REMEMBERED = 4
"""Steps by which a slow host is told from a long answer: chance hits another one each time."""
SLOWER = 1.25
"""By how much the slowest actor of a role must exceed the middle of the others, in nearly all of these steps."""
GROWN = 1.1
"""By how much answers must be longer than usual to be the reason why work took longer."""
_FIT = 256
"""Micro-batches over which the cost of one is estimated."""
_LEAST = 8
"""Of them, at least so many."""
_JUDGES = ("judge", "reward_model")
_ENVIRONMENTS = ("env", "trials")


@dataclass(frozen=True, slots=True)
class Cause:
    """One reason."""

    name: Name
    seconds: float
    """Of the step, that it cost."""
    text: str
    """What happened, a clause: "training waited 0.4 s for ..."."""
    who: str = ""
    """The role or actor that it is about."""
    failed: float = 0.0
    """The share of answers without a reward, where it is about scoring."""


class Causes:
    """Finds the causes of each step; keeps what it must know of the steps before.

    Args:
        staleness: steps that work is begun early; 0 is synchronous.
    """

    def __init__(self, staleness: int = 0) -> None:
        self._staleness = staleness
        self._slowest: dict[str, deque[str | None]] = {}
        self._tokens: deque[float] = deque(maxlen=16)
        self._pieces: deque[tuple[float, float]] = deque(maxlen=_FIT)

    def found(
        self, lap: Lap, seen: Seen, where: Waited, losses: Mapping[str, float], metrics: Mapping[str, float]
    ) -> list[Cause]:
        """Of one step, the costliest first.

        Args:
            lap, seen, where: the step.
            losses: seconds above the bound by `lost/...` without that prefix.
            metrics: of the step.
        """
        causes = [
            *self._waits(seen, where),
            *self._beside(where, metrics),
            *self._moves(where),
            *self._work(lap, losses, metrics),
        ]
        return sorted(causes, key=lambda cause: -cause.seconds)

    # Idle devices ------------------------------------------------------------------------------------------------

    def _waits(self, seen: Seen, where: Waited) -> Iterator[Cause]:
        slow = dict(self._slow_hosts(where))
        tail, others = where.tail, dict(where.others)
        for role, (actor, excess) in slow.items():
            waited = sum(seconds for (_, working), seconds in others.items() if working == role)
            ends = seen.source is not None and role in seen.source.split("+")
            waited += tail if ends else 0.0
            if (cost := min(excess, waited)) > 0:
                yield Cause("slow host", cost, f"{actor} took {excess:.2g} s longer than its peers, as before", actor)
                tail = 0.0 if ends else tail
                others = {pair: each for pair, each in others.items() if pair[1] != role}
        if tail:
            count = len(seen.released)
            last = max(1, count - int(0.95 * count))
            yield Cause(
                "tail", tail, f"devices idled {_s(tail)} for the last {last} of {count} items", seen.source or ""
            )
        for (idle, working), seconds in others.items():
            ahead = self._staleness and working == "trainer" and idle != "nobody"
            name: Name = "bound on staleness" if ahead else "waiting"
            text = f"devices of {idle} idled {_s(seconds)} while {working} worked elsewhere"
            yield Cause(name, seconds, text + (": nothing may be begun earlier" if ahead else ""), working)

    def _slow_hosts(self, where: Waited) -> Iterator[tuple[str, tuple[str, float]]]:
        """By role: an actor that was the slowest in nearly all of the last steps, and by how much in this one."""
        roles: dict[str, dict[str, float]] = {}
        for actor, seconds in where.by_actor.items():
            roles.setdefault(role_of(actor), {})[actor] = seconds
        for role, actors in roles.items():
            if len(actors) < 2:
                continue
            slowest = max(actors, key=lambda actor: actors[actor])
            usual = statistics.median(seconds for actor, seconds in actors.items() if actor != slowest)
            stands_out = actors[slowest] >= SLOWER * usual
            past = self._slowest.setdefault(role, deque(maxlen=REMEMBERED))
            past.append(slowest if stands_out else None)
            if stands_out and past.count(slowest) >= REMEMBERED - 1:
                yield role, (slowest, actors[slowest] - usual)

    def _beside(self, where: Waited, metrics: Mapping[str, float]) -> Iterator[Cause]:
        for role, seconds in where.beside.items():
            if role in _JUDGES:
                failed = metrics.get("reward/failed", 0.0)
                late = f" ({failed:.0%} of them failed)" if failed else ""
                text = f"no device worked for {_s(seconds)} while answers were scored{late}"
                yield Cause("reward", seconds, text, role, failed)
            elif role in _ENVIRONMENTS:
                text = f"no device worked for {_s(seconds)} while environments stepped"
                yield Cause("environment", seconds, text, role)
            else:
                yield Cause("beside", seconds, f"no device worked for {_s(seconds)} while {role} did", role)
        text = f"nobody worked for {_s(where.nobody)}: the flow itself, data, or what it calls besides its roles"
        yield Cause("flow", where.nobody, text)

    def _moves(self, where: Waited) -> Iterator[Cause]:
        if where.switching:
            parts = ", ".join(
                f"{role} {_s(each)}" for role, each in sorted(where.moved.items(), key=lambda one: -one[1])
            )
            yield Cause("switching", where.switching, f"loading and parking roles took {_s(where.switching)} ({parts})")
        if where.sync:
            yield Cause("weights", where.sync, f"publishing weights took {_s(where.sync)}")

    # Work that took longer ---------------------------------------------------------------------------------------

    def _work(self, lap: Lap, losses: Mapping[str, float], metrics: Mapping[str, float]) -> Iterator[Cause]:
        longer, tokens = losses.get("interference", 0.0), metrics.get("response_tokens")
        usual = statistics.median(self._tokens) if self._tokens else None
        if tokens is not None:
            self._tokens.append(tokens)
        if longer > 0:
            if tokens is not None and usual and tokens >= GROWN * usual:
                text = f"work took {_s(longer)} longer than usual, for answers {tokens / usual:.1f} times as long"
                yield Cause("longer answers", longer, text)
            else:
                yield Cause("busy machine", longer, f"the same work took {_s(longer)} longer than usual")
        pieces: dict[str, list[tuple[float, float]]] = {}
        for span in lap.parts:
            if span.what == MICRO_BATCH:
                pieces.setdefault(span.actor, []).append((float(span.bytes), span.end - span.start))
        for each in pieces.values():
            self._pieces.extend(each)
        count = max(map(len, pieces.values()), default=0)
        if count > 1 and (cost := self._cost_of_one()) > 0:
            mean = statistics.mean(tokens for each in pieces.values() for tokens, _ in each)
            text = (
                f"{count} micro-batches of {mean:.0f} tokens cost {_ms(cost)} each beside their tokens, "
                f"{_s(cost * count)} in all"
            )
            yield Cause("small micro-batches", cost * (count - 1), text, "trainer")

    def _cost_of_one(self) -> float:
        """Seconds of a micro-batch without tokens: of the median of lines through pairs of micro-batches of unlike
        sizes (Theil, 1950; Sen, 1968), which accidents do not move; 0 where sizes are too alike to tell."""
        if len(self._pieces) < _LEAST:
            return 0.0
        sizes, seconds = zip(*sorted(self._pieces), strict=True)
        half = len(sizes) // 2
        pairs = [
            ((seconds[at + half] - seconds[at]) / (sizes[at + half] - sizes[at]))
            for at in range(half)
            if sizes[at + half] >= 1.2 * sizes[at] > 0
        ]
        if len(pairs) < _LEAST // 2:
            return 0.0
        slope = max(0.0, statistics.median(pairs))
        return max(0.0, statistics.median(took - slope * size for size, took in zip(sizes, seconds, strict=True)))


def _s(seconds: float) -> str:
    """`0.42 s`, with two digits that count."""
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def _ms(seconds: float) -> str:
    """`4.2 ms`, `120 ms`."""
    return f"{seconds * 1e3:.{0 if seconds >= 0.01 else 2}{'f' if seconds >= 0.01 else 'g'}} ms"
