"""What a run warns of: engine and trainer that disagree on log-probs or experts, tokens that are too old, and answers
that cannot be scored.

In: a step's metrics, and what a judge's ranks counted since they were last asked. Out: a line in the step in which a
limit is passed or answers first fail, and again when that changes; and for failures one for the end of the run, and the
metric `reward/failed`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

MEASURES = ("mean", "max")


class Alarm(str):
    """A line for people; its parts are in alarms.jsonl, too."""

    __slots__ = ("do", "text")
    text: str
    """What is wrong."""
    do: str
    """What to do about it, in sentences; "" where there is nothing to be done."""

    def __new__(cls, where: str, text: str, do: str = "") -> Alarm:
        """An alarm of a place in the run, such as "step 3"."""
        made = super().__new__(cls, f"{where}: {text}{f'. {do}' if do else ''}")
        made.text, made.do = text, do
        return made


class MismatchAlarm:
    """Watches `mismatch/mean` and `mismatch/max`, |log-prob of the trainer - of the engine|, nats.

    Args:
        mean, max: their limits; None for none.
    """

    def __init__(self, mean: float | None, max: float | None) -> None:
        self._limits = {"mean": mean, "max": max}
        self._passed: set[str] = set()

    def heard(self, step: int, metrics: Mapping[str, float]) -> Alarm | None:
        """What to tell people about this step; None if nothing is new."""
        over = {
            name
            for name in MEASURES
            if (limit := self._limits[name]) is not None and not metrics.get(f"mismatch/{name}", 0.0) <= limit
        }
        new, self._passed = over - self._passed, over
        if not new:
            return None
        figures = " and ".join(
            f"mismatch/{name} is {metrics[f'mismatch/{name}']:.3g} nats (limit metrics.mismatch_{name} = "
            f"{self._limits[name]:g})"
            for name in MEASURES
            if name in new
        )
        return Alarm(
            f"step {step}",
            f"engine and trainer disagree about the sampled tokens: {figures}. Gradients are off by as much",
            "Let both compute in the same precision (rollout.dtype, trainer.dtype), or correct for it "
            "(algorithm.correction.cap=2)",
        )


class RouteDriftAlarm:
    """Watches `moe/route_drift`: of a mixture of experts, the share of tokens and layers in which the trainer's gates
    would have chosen other experts than the engine did, with the same weights.

    Args:
        limit: of that share; None for none.
    """

    def __init__(self, limit: float | None) -> None:
        self._limit = limit
        self._passed = False

    def heard(self, step: int, metrics: Mapping[str, float]) -> Alarm | None:
        """What to tell people about this step; None if nothing is new."""
        found = metrics.get("moe/route_drift", 0.0)
        before, self._passed = self._passed, self._limit is not None and not found <= self._limit
        if before or not self._passed:
            return None
        return Alarm(
            f"step {step}",
            f"engine and trainer send {percent(found)} of tokens to other experts with the same weights "
            f"(limit metrics.route_drift = {self._limit:g})",
            "trainer.router_replay computes on the engine's; but so many say that the two compute differently: let "
            "both have the same precision (rollout.dtype, trainer.dtype), and see whether mismatch/mean is as large at "
            "step 1, where the engine's copy of the weights may be at fault",
        )


class StalenessAlarm:
    """Watches `staleness/max`, by how many versions the oldest token learned from was older than the weights.

    Args:
        bound: what it may be at most.
        key: of the configuration that says so.
    """

    def __init__(self, bound: int, key: str) -> None:
        self._bound, self._key = bound, key
        self._worst = 0.0

    def heard(self, step: int, metrics: Mapping[str, float]) -> Alarm | None:
        """What to tell people about this step; None unless it is older than ever."""
        oldest = metrics.get("staleness/max", 0.0)
        if oldest <= max(self._bound, self._worst):
            return None
        self._worst = oldest
        return Alarm(
            f"step {step}",
            f"learned from tokens that are {oldest:g} versions old (limit {self._key} = {self._bound})",
            "What comes by step.in_flight is never older: does the flow keep answers by itself, or publish weights "
            "past step.in_flight? If not, this is a fault of rlinf",
        )


MOST_ROWS = 8
"""Failed answers that a judge remembers between two questions: enough to see what they have in common."""
CHANGE = 0.2
"""By how much the rate of failures must change to be told again: less is of no consequence."""
CERTAIN = 3.0
"""And by how many standard deviations of a share of so many answers: a step of few answers varies by chance."""
NAMES = {"timeouts": "timeout", "errors": "error"}


@dataclass(frozen=True, slots=True)
class Scored:
    """What became of the answers that judges were given; those of several add up."""

    answers: int = 0
    """All of them."""
    timeouts: int = 0
    """The reward took too long."""
    errors: int = 0
    """It raised, crashed, or returned no number."""
    remark: str = ""
    """Why the first of those failed."""
    rows: tuple[Mapping[str, Any], ...] = ()
    """A few of those, as rows of samples.jsonl."""

    def __add__(self, other: Scored) -> Scored:
        return Scored(
            self.answers + other.answers,
            self.timeouts + other.timeouts,
            self.errors + other.errors,
            self.remark or other.remark,
            (*self.rows, *other.rows)[:MOST_ROWS],
        )

    @staticmethod
    def total(parts: Iterable[Scored]) -> Scored:
        """All of them together."""
        return sum(parts, Scored())

    @property
    def failed(self) -> float:
        """The share of answers without a reward."""
        return (self.timeouts + self.errors) / self.answers if self.answers else 0.0

    def __str__(self) -> str:
        """`34% of 1,220 answers were not scored: 412 timeouts, 3 errors; first: took longer than 2 s; killed`."""
        counts = ((name, getattr(self, name)) for name in NAMES)
        kinds = ", ".join(f"{count:,} {NAMES[name] if count == 1 else name}" for name, count in counts if count)
        first = f"; first: {one_line(self.remark)}" if self.remark else ""
        return f"{percent(self.failed)} of {self.answers:,} answers were not scored: {kinds}{first}"


class FailureAlarm:
    """Watches which share of answers fails, step by step."""

    def __init__(self) -> None:
        self._told = 0.0
        self._kinds: set[str] = set()
        self.total = Scored()
        """Of all steps."""

    def heard(self, where: str, found: Scored) -> Alarm | None:
        """What to tell people; None if nothing is new.

        Args:
            where: such as "step 3".
            found: what judges counted there.
        """
        self.total += found
        if not found.answers or not self._is_news(found):
            return None
        self._told = found.failed
        if not found.failed:
            return Alarm(where, "all answers are scored again")
        return Alarm(where, str(found), "They count as not drawn; samples.jsonl shows some of them")

    def _is_news(self, found: Scored) -> bool:
        """A kind of failure that was not told yet, or another rate."""
        kinds = {name for name in NAMES if getattr(found, name)}
        new, self._kinds = kinds - self._kinds, self._kinds | kinds
        change, spread = abs(found.failed - self._told), sqrt(self._told * (1.0 - self._told) / found.answers)
        return bool(new) or (change >= CHANGE and change >= CERTAIN * spread)


def percent(share: float) -> str:
    """A share for people: `34%`; `0.25%` where it is small."""
    return f"{share:.0%}" if share >= 0.01 or not share else f"{share:.2%}"


def one_line(remark: str) -> str:
    """The first line of a remark."""
    return remark.strip().partition("\n")[0]
